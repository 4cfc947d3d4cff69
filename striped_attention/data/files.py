"""Files: the files of a source and their kinds. The name of a file gives its kind; reading checks the content.

    .jsonl .ndjson               JSON lines, optionally compressed; also .json.gz and .json.zst
    .json                        an array of records is read like JSON lines; other JSON is text
    .parquet                     Parquet
    .arrow                       Arrow, as a file or a stream
    .gz .zst                     compressed text or JSON lines
    everything else              text

A folder must hold files of one kind, or be written by the library `datasets`. A pattern like data/train-*.parquet
stands for the files that it matches.
"""

import codecs
import glob
import json
import os
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

from striped_attention.data.splits import refuse_several
from striped_attention.errors import UsageError

TEXT, LINES, PARQUET, ARROW = "text", "JSON lines", "Parquet", "Arrow"
KINDS = {".jsonl": LINES, ".ndjson": LINES, ".parquet": PARQUET, ".arrow": ARROW}
PACKED = {".gz": "gzip", ".zst": "zstd"}
TOKENS = (".npy", ".bin")
HEAD = 512  # bytes at the beginning of a file that identify its kind
WEIGHTS = ".safetensors"
# Files that accompany the data of a dataset, by the first part of their name, in lower case.
BESIDE = {"readme", "license", "licence", "notice", "citation", "dataset_info", "dataset_infos", "_success"}


class File(NamedTuple):
    """A file, its kind, and its compression, if any."""

    path: pathlib.Path
    kind: str
    packed: str | None = None


class Files(NamedTuple):
    """All files of a source, in order, and its name in messages."""

    files: tuple[File, ...]
    source: str


def is_there(path: pathlib.Path) -> bool:
    """Whether a path exists, or is a pattern that matches something."""
    return path.exists() or bool(_matches(path))


def find_files(path: pathlib.Path) -> Files:
    """Return the files of a path or of a pattern."""
    weights = [path] if path.is_file() else sorted(path.glob(f"*{WEIGHTS}"))
    if weights and weights[0].suffix == WEIGHTS:
        raise UsageError(
            f"{path} holds the weights of a model ({weights[0].name}), not data. Give text, JSON lines, Parquet or "
            f"Arrow, or a folder of one of them."
        )
    if path.is_file():
        return Files((_file(path),), str(path))
    _refuse_splits(path)
    found = _without_companions(tuple(map(_file, _of_datasets(path) or _below(path))))
    tokens = [file.path for file in found if file.path.suffix in TOKENS]
    if tokens:
        raise UsageError(f"{path} holds token files ({tokens[0].name}). Give one token file, not a folder.")
    root = path if path.is_dir() else pathlib.Path(os.path.commonpath([file.path.parent for file in found] or [path]))
    kinds = {file.kind: file.path for file in reversed(found)}
    if len(kinds) > 1:
        examples = ", ".join(f"{kind} ({first.relative_to(root)})" for kind, first in sorted(kinds.items()))
        raise UsageError(
            f"{path} must hold files of one kind, but it holds {examples}. Give the folder, or the files, of one kind."
        )
    # Text is often source code, in which train.py and test.py are not splits.
    refuse_several(root, [file.path for file in found if file.kind != TEXT or file.path.suffix == ".txt"])
    return Files(found, str(path))


def standard_library() -> Files:
    """Return the source files of Python's standard library."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    others = ("site-packages", "test", "tests")  # tests are deliberately odd, e.g. in other encodings
    own = tuple(File(path, TEXT) for path in sorted(_walk(root, others)) if path.suffix == ".py")
    if not own:
        raise UsageError(f"This Python has no standard library sources in {root}. Give data with --data.")
    return Files(own, "Python's standard library")


def _file(path: pathlib.Path) -> File:
    packed = PACKED.get(path.suffix)
    inner = path.with_suffix("").suffix if packed else path.suffix
    kind = LINES if inner == ".json" and (packed or _begins_an_array(path)) else KINDS.get(inner, TEXT)
    if packed and kind in (PARQUET, ARROW):
        raise UsageError(f"{path} is {kind} compressed with {packed}, which cannot be read in parts. Unpack it first.")
    return File(path, kind, packed)


def _begins_an_array(path: pathlib.Path) -> bool:
    """Whether a file begins like a JSON array."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    except OSError:
        return False  # reading the file will raise a better error


def _without_companions(found: tuple[File, ...]) -> tuple[File, ...]:
    """Drop files that describe a dataset. Among text files, .json is text too, as in source code."""
    beside = lambda file: file.path.name.lower().split(".")[0] in BESIDE  # noqa: E731
    others = [file for file in found if not beside(file)]
    if any(file.kind == TEXT for file in others):
        arrays = lambda file: file.kind == LINES and file.path.suffix == ".json"  # noqa: E731
        found = tuple(file._replace(kind=TEXT) if arrays(file) else file for file in found)
    records = any(file.kind != TEXT for file in found if not beside(file))
    return tuple(file for file in found if not (records and beside(file)))


def _matches(path: pathlib.Path) -> list[pathlib.Path]:
    """Return what a pattern matches, except hidden files and folders."""
    return sorted(map(pathlib.Path, glob.glob(str(path), recursive=True))) if glob.has_magic(str(path)) else []


def _below(path: pathlib.Path) -> list[pathlib.Path]:
    """Return all files of a folder, or those that a pattern matches."""
    if path.is_dir():
        return sorted(_walk(path))
    found = (sorted(_walk(match)) if match.is_dir() else [match] for match in _matches(path))
    return list(dict.fromkeys(file for files in found for file in files))


def _walk(folder: pathlib.Path, without: tuple[str, ...] = ()) -> Iterator[pathlib.Path]:
    """Yield all files below a folder, except hidden ones."""
    for root, folders, names in os.walk(folder, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        yield from (path for name in names if not name.startswith(".") and (path := pathlib.Path(root, name)).is_file())


def _refuse_splits(path: pathlib.Path) -> None:
    listing = path / "dataset_dict.json"
    if listing.is_file():
        splits = _json(listing).get("splits")
        names = ", ".join(map(str, splits)) if isinstance(splits, list) else "none"
        first = splits[0] if isinstance(splits, list) and splits else "train"
        raise UsageError(f"{path} holds several splits: {names}. Give one of them, like {path / str(first)}.")


def _of_datasets(path: pathlib.Path) -> list[pathlib.Path]:
    """Return the Arrow files of a folder that the library `datasets` wrote, in order; none for any other folder."""
    state = path / "state.json"
    if not state.is_file():
        return sorted(path.glob("*.arrow")) if (path / "dataset_info.json").is_file() else []
    said = _json(state)
    if "_data_files" not in said:
        return []
    if said.get("_indices_data_files"):
        raise UsageError(f"{path} is a selection of rows from an old version of datasets. Load it and save it again.")
    try:
        names = [pathlib.Path(entry["filename"]).name for entry in said["_data_files"]]
    except (TypeError, KeyError) as error:
        raise UsageError(f"{state} is damaged: its _data_files list no file names. Save the dataset again.") from error
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise UsageError(f"{path} lacks {missing[0]}, which {state.name} lists. Copy or save the dataset again.")
    if not names:
        raise UsageError(f"{path} is empty: {state.name} lists no data files. Save the dataset again.")
    return [path / name for name in names]


def _json(path: pathlib.Path) -> dict:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} cannot be read ({error}). Save the dataset again.") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} must hold a JSON object. Save the dataset again.")
    return found

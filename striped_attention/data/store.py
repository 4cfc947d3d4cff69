"""Store: a folder with the tokens of a source, used by the cache and written by `striped tokenize`.

    tokens.bin    all tokens end to end, little-endian uint16, or uint32 where the tokenizer needs more
    starts.bin    int64, the index of each document's first token
    counted.bin   uint8, 1 where a token counts in the loss; only if some do not
    checks.bin    uint32, the CRC-32 of every 1 MiB of these files, one file after the other
    meta.json     describes these files and how they were made; written last

The folder is written under a temporary name and renamed when all of it is on disk.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import zlib
from typing import Any

import numpy as np

from striped_attention._version import __version__
from striped_attention.data.corpus import Corpus
from striped_attention.data.counts import Counts
from striped_attention.data.encoder import BYTES_HASH, Encoded, Encoder
from striped_attention.errors import UsageError

FORMAT = "striped_attention tokens 1"
META, CHECKS = "meta.json", "checks.bin"
DTYPES = {"starts.bin": "<i8", "counted.bin": "|u1"}
BLOCK = 2**20
LOOKS = 64  # blocks of a file that are verified when it is opened
TOKENIZER = "tokenizer.json"


@dataclasses.dataclass(frozen=True)
class Meta:
    """The metadata of a store. `tokenizer` is the hash of its tokenizer, None for bytes."""

    source: str
    end: int
    vocabulary: int
    dtype: str
    tokenizer: str | None
    counts: Counts
    sizes: dict[str, int]
    checks: str

    def as_json(self) -> str:
        said = {"format": FORMAT, "written_by": __version__, **dataclasses.asdict(self)}
        said["check"] = _checksum(said)
        return json.dumps(said, indent=2) + "\n"


def _checksum(said: dict[str, Any]) -> str:
    """Return a hash of everything in meta.json except the hash itself."""
    said = {key: value for key, value in said.items() if key != "check"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


class _Checked:
    """A file that is written sequentially, with the CRC-32 of each of its blocks."""

    def __init__(self, path: pathlib.Path) -> None:
        self._file = path.open("wb")
        self.sums: list[int] = []
        self._crc = self.size = 0

    def write(self, numbers: np.ndarray) -> None:
        content = np.ascontiguousarray(numbers).view(np.uint8).data
        self._file.write(content)
        while len(content):
            part = content[: BLOCK - self.size % BLOCK]
            self._crc = zlib.crc32(part, self._crc)
            self.size += len(part)
            if self.size % BLOCK == 0:
                self.sums.append(self._crc)
                self._crc = 0
            content = content[len(part) :]

    def finish(self) -> list[int]:
        """Flush everything to disk and return all checksums."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return [*self.sums, self._crc] if self.size % BLOCK else self.sums

    def close(self) -> None:
        self._file.close()


class Writer:
    """Writes a store into a folder that exists and is empty."""

    def __init__(self, folder: pathlib.Path, encoder: Encoder) -> None:
        self._folder, self._encoder = folder, encoder
        self.dtype = "<u2" if encoder.vocabulary <= 2**16 else "<u4"
        names = ("tokens.bin", "starts.bin", "counted.bin") if encoder.weighs else ("tokens.bin", "starts.bin")
        self._files = {name: _Checked(folder / name) for name in names}
        self.tokens = 0

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: Any) -> None:
        for file in self._files.values():
            file.close()

    def add(self, documents: list[Encoded], counts: Counts) -> None:
        """Append documents, each with at least one token."""
        sizes = [len(document.tokens) for document in documents]
        ends = self.tokens + np.cumsum(sizes)
        self._files["starts.bin"].write((ends - sizes).astype("<i8"))
        self._files["tokens.bin"].write(np.concatenate([d.tokens for d in documents]).astype(self.dtype))
        self.tokens = counts.tokens = int(ends[-1])
        if not self._encoder.weighs:
            counts.counted = self.tokens
            return
        counted = [np.ones(len(d.tokens), np.uint8) if d.counted is None else d.counted for d in documents]
        self._files["counted.bin"].write(np.concatenate(counted))
        counts.counted += sum(int(part.sum()) for part in counted)
        counts.silent += sum(not part.any() for part in counted)

    def finish(self, source: str, counts: Counts) -> None:
        """Write the checksums and the metadata."""
        sums = np.array([sum_ for file in self._files.values() for sum_ in file.finish()], "<u4")
        sums.tofile(self._folder / CHECKS)
        encoder = self._encoder
        meta = Meta(
            *(source, encoder.end, encoder.vocabulary, self.dtype, encoder.identity, counts),
            sizes={name: file.size for name, file in self._files.items()},
            checks=hashlib.sha256(sums.tobytes()).hexdigest(),
        )
        (self._folder / META).write_text(meta.as_json())


def is_store(path: pathlib.Path) -> bool:
    """Whether a path is a store, damaged or not."""
    if not (path / META).is_file():
        return all((path / name).is_file() for name in (CHECKS, "tokens.bin"))
    return (path / CHECKS).exists() or b'"striped_attention tokens' in (path / META).read_bytes()[:100]


def open_store(path: pathlib.Path) -> tuple[Corpus, Meta]:
    """Open a store, memory-mapped. Raises if it was truncated or changed."""
    meta = _read_meta(path)
    for name, size in meta.sizes.items():
        there = (path / name).stat().st_size if (path / name).is_file() else None
        if there != size:
            raise _damaged(path, f"{name} has {'no' if there is None else f'{there:,}'} bytes, not {size:,}")
    _check_blocks(path, meta)
    dtypes = {**DTYPES, "tokens.bin": meta.dtype}
    arrays = {name: np.memmap(path / name, dtypes[name], mode="r") for name in meta.sizes}
    corpus = Corpus(
        *(arrays["tokens.bin"], meta.end, meta.vocabulary, meta.source),
        starts=arrays["starts.bin"],
        counted=arrays.get("counted.bin"),
        counts=meta.counts,
        tokenizer=path / TOKENIZER if (path / TOKENIZER).is_file() else None,
        made_with=meta.tokenizer or BYTES_HASH,
    )
    return corpus, meta


def _read_meta(path: pathlib.Path) -> Meta:
    try:
        said = json.loads((path / META).read_bytes())
        if said["format"] != FORMAT:
            raise UsageError(f"{path} was written by another version of `striped tokenize`. Tokenise the source again.")
        whole = said.get("check", _checksum(said)) == _checksum(said)  # older stores have none
        said = {key: value for key, value in said.items() if key not in ("format", "written_by", "check")}
        if not (whole and _sensible(said)):
            raise _damaged(path, f"{META} is not what was written")
        return Meta(**{**said, "counts": Counts(**said["counts"])})
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise _damaged(path, f"{META} cannot be read ({error})") from error


def _sensible(said: dict[str, Any]) -> bool:
    """Whether the values of meta.json are valid."""
    sizes, example = said["sizes"], said["counts"].get("example")
    counts = [value for name, value in said["counts"].items() if name != "example"]
    numbers = [said["end"], said["vocabulary"], *sizes.values(), *counts]
    texts = [said["source"], said["checks"], said["tokenizer"] or "", example or ""]
    return (
        all(type(number) is int and number >= 0 for number in numbers)
        and all(isinstance(text, str) for text in texts)
        and {"tokens.bin", "starts.bin"} <= sizes.keys() <= {"tokens.bin", *DTYPES}
        and said["dtype"] in ("<u2", "<u4")
        and said["end"] < said["vocabulary"]
    )


def _check_blocks(path: pathlib.Path, meta: Meta) -> None:
    """Verify checksums: all of them, or samples of a large file."""
    try:
        sums = np.fromfile(path / CHECKS, "<u4")
    except OSError as error:
        raise _damaged(path, f"{CHECKS} cannot be read ({error.strerror})") from error
    blocks = {name: -(-size // BLOCK) for name, size in meta.sizes.items()}
    if len(sums) != sum(blocks.values()) or hashlib.sha256(sums.tobytes()).hexdigest() != meta.checks:
        raise _damaged(path, f"{CHECKS} is not what was written")
    for name, count in blocks.items():
        mine, sums = sums[:count], sums[count:]
        with (path / name).open("rb") as file:
            for block in np.unique(np.linspace(0, count - 1, min(count, LOOKS)).astype(int)):
                file.seek(int(block) * BLOCK)
                if zlib.crc32(file.read(BLOCK)) != mine[block]:
                    raise _damaged(path, f"{name} is not what was written, at byte {block * BLOCK:,} or after")


def _damaged(path: pathlib.Path, why: str) -> UsageError:
    return UsageError(f"{path} is damaged: {why}. Remove it and tokenise the source again.")

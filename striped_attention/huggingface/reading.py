"""Reading: read the weights of a Hugging Face folder, whole or in slices, after checking all of them."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from safetensors import SafetensorError, safe_open

from striped_attention.errors import UsageError
from striped_attention.huggingface.said import read_json
from striped_attention.huggingface.weight import CODES, OUTSIDE, Named, Weight, weights
from striped_attention.models.config import ModelConfig

EMBEDDING, HEAD = (f"{OUTSIDE[name]}.weight" for name in ("embedding", "unembedding"))
SAME = "Do both belong to the same model?"


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file's header says about one weight."""

    path: pathlib.Path
    key: str
    code: str
    shape: tuple[int, ...]


class Files:
    """The weights of a folder. The constructor checks that names, shapes and dtypes match the model.

    Files are open inside a `with`. Only requested data is read.
    """

    def __init__(self, folder: pathlib.Path, config: ModelConfig) -> None:
        self._places = {(weight.name, weight.layer): (weight, header) for weight, header in _located(folder, config)}
        self._stack = contextlib.ExitStack()
        self._open: dict[pathlib.Path, Any] = {}

    def __enter__(self) -> "Files":
        for path in {header.path for _, header in self._places.values()}:
            self._open[path] = self._stack.enter_context(_open(path))
        return self

    def __exit__(self, *_: Any) -> None:
        self._open = {}
        self._stack.close()

    def part(self, name: str, layer: int | None, index: tuple[slice, ...]) -> np.ndarray:
        """Read a slice of one weight of one layer, in our shape and the file's dtype. May be a transposed view."""
        weight, header = self._places[name, layer]
        return weight.part(self._open[header.path].get_slice(header.key), index)

    def __iter__(self) -> Iterator[Named]:
        """Yield every weight whole: all layers of one name, then the next."""
        for weight, header in self._places.values():
            yield weight.name, weight.layer, weight.ours(self._open[header.path].get_slice(header.key))


def tensors(folder: pathlib.Path, config: ModelConfig) -> Iterator[Named]:
    """Yield name, layer and array of every weight, in our shape and the file's dtype; all layers of a name in a row.

    The files are checked in this call, before the first weight is requested. Arrays may be transposed views.
    """
    return _read(Files(folder, config))


def _read(files: Files) -> Iterator[Named]:
    with files:
        yield from files


def _located(folder: pathlib.Path, config: ModelConfig) -> list[tuple[Weight, Header]]:
    """Locate every weight of a model. Raises if one is missing or does not match, or if there are others."""
    wanted, found = weights(config), _found(folder)
    head = found.pop(HEAD, None) if config.tied else None
    if head is not None:
        found.setdefault(EMBEDDING, head)  # a tied model may store its one matrix under either name, or both
    for weight in wanted:
        _check(folder, weight, found.get(weight.key))
    extra = found.keys() - {weight.key for weight in wanted}
    extra = {key for key in extra if not key.endswith("rotary_emb.inv_freq")}  # old files store what is computed
    if extra:
        raise UsageError(
            f"{found[min(extra)].path} holds the weight {_first(extra)}, which the model of config.json does not have. "
            f"{SAME}"
        )
    if head is not None and head != found[EMBEDDING]:
        _check_same(folder, found[EMBEDDING], head)
    return [(weight, found[weight.key]) for weight in wanted]


def _open(path: pathlib.Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise UsageError(f"{path} is cut short or damaged ({error}). Download it again.") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error


def _found(folder: pathlib.Path) -> dict[str, Header]:
    """Return the header of every weight in the files of a folder."""
    found = {}
    for path in _files(folder):
        with _open(path) as file:
            for key in file.keys():  # noqa: SIM118  not a dictionary
                part = file.get_slice(key)
                found[key] = Header(path, key, part.get_dtype(), tuple(part.get_shape()))
    return found


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files that hold a model's weights."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        _refuse_pickles(folder)
        raise UsageError(
            f"{folder} holds no weights: neither {single.name} nor {index.name}. Download the whole model."
        )
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise UsageError(f"{index} must map every weight to a file in weight_map. Download the model again.")
    names = sorted(set(places.values()))
    strange = [name for name in names if pathlib.Path(name).name != name or not name.endswith(".safetensors")]
    if strange:
        raise UsageError(f"{index} must name .safetensors files of its own folder; got {_first(strange)}.")
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise UsageError(f"{folder} lacks {_first(missing)}, which {index.name} lists. Download the model again.")
    return [folder / name for name in names]


def _refuse_pickles(folder: pathlib.Path) -> None:
    pickles = [path.name for end in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{end}")]
    if pickles:
        raise UsageError(
            f"{folder} holds its weights as a pickle ({_first(pickles)}), which can run arbitrary code and is never "
            f"opened. If you trust it, load it with transformers and save it again with "
            f"model.save_pretrained(FOLDER, safe_serialization=True)."
        )


def _check(folder: pathlib.Path, weight: Weight, header: Header | None) -> None:
    """Raise if a weight is missing or does not match the model."""
    if header is None:
        raise UsageError(
            f"{folder} lacks the weight {weight.key} of shape {list(weight.stored)}, which the model of config.json "
            f"has. {SAME}"
        )
    where = f"{header.path} holds the weight {header.key}"
    if header.shape != weight.stored:
        raise UsageError(
            f"{where} of shape {list(header.shape)}, but the model of config.json needs shape {list(weight.stored)}. "
            f"{SAME}"
        )
    if header.code not in CODES.values():
        raise UsageError(f"{where} as {header.code}. Use the model in one of {', '.join(CODES.values())}.")


def _check_same(folder: pathlib.Path, embedding: Header, head: Header) -> None:
    """Raise unless both stored copies of a tied model's matrix are identical."""
    same = (head.code, head.shape) == (embedding.code, embedding.shape)
    with _open(embedding.path) as one, _open(head.path) as other:
        a, b = one.get_slice(embedding.key), other.get_slice(head.key)
        rows = embedding.shape[0]
        parts = [(start, min(start + 4096, rows)) for start in range(0, rows, 4096)]
        same = same and all(np.array_equal(a[start:end], b[start:end]) for start, end in parts)
    if not same:
        raise UsageError(
            f"{folder} holds {EMBEDDING} and {HEAD}, which differ, but config.json ties them (tie_word_embeddings). If "
            f"both are intended, set it to false there."
        )


def _first(names: Any) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first

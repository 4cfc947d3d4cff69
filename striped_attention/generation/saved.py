"""Saved: the KV cache of a prompt as a file, so that later runs continue from it instead of prefilling again.

    save(engine, tokens, path)             write one sequence of an engine: tokens, keys and values
    Saved(path, config, dtype)             open such a file and check it against the model that will load it
    saved.load(engine)                     start every sequence of an engine with these tokens

The file is safetensors, never a pickle:

    tokens              [length]
    scores              [vocabulary]    logits of the next token
    layers.0.key …      [kept, kv_heads, head_dim] and the same for value, in sequence order; kept is the length, or
                        the window of the layer if that is less
    checksums           CRC-32 of each of the above, in this order

The header has the model, a fingerprint of its weights and the dtype, which must match the model that loads it. Nothing
in the file depends on devices, layout and capacity, so these may differ. Host memory holds the keys and values of one
layer at a time.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from striped_attention.errors import UsageError
from striped_attention.generation.engine import Engine, Numbers
from striped_attention.generation.text import Bytes, Tokenizer
from striped_attention.huggingface import stream
from striped_attention.huggingface.weight import CODES
from striped_attention.inference.cache import KVCache
from striped_attention.models.config import ModelConfig
from striped_attention.training.arrays import Say, place

FORMAT = "striped_attention cache 1"
MAGIC = b'{"__metadata__": {"format": "striped_attention cache '  # after eight bytes; the same in every version


def save(engine: Engine, tokens: Numbers, path: pathlib.Path, row: int = 0, say: Say | None = None) -> None:
    """Write the cache of one sequence with these tokens, all or nothing. Calls `say(done, total)` after each layer.

    The first process writes the file; all processes must call this.
    """
    engine.prefill([[]] * engine.options.batch)  # writes generated tokens to the caches
    tokens = np.asarray(tokens, np.int32)
    if not 0 < len(tokens) == engine.lengths[row]:
        raise ValueError(
            f"A cache must be saved with all of its tokens, at least one; got {len(tokens)} tokens, but sequence {row} "
            f"has {engine.lengths[row]}."
        )
    tensors = _tensors(engine.config, engine.options.dtype, len(tokens))
    metadata = _metadata(engine.config, engine.fingerprint, engine.options.dtype, len(tokens))
    with _new_file(path, tensors, metadata) as put:
        put("tokens", tokens)
        put("scores", _on_host(_row(engine.scores, row)))
        for layer, cache in enumerate(engine.caches):
            for name in ("key", "value"):
                put(f"layers.{layer}.{name}", _in_order(cache, getattr(cache, name), row, len(tokens)))
            if say is not None:
                say(layer + 1, engine.config.layers)


class Saved:
    """A file written by `save`, and its `tokens` [length]. Keys and values are read and checked by `load`.

    `config` and `dtype` are those of the engine that will load it: `Engine.config`, `Engine.options.dtype`.
    """

    def __init__(self, path: pathlib.Path, config: ModelConfig, dtype: Any) -> None:
        self.path, self.config = path, config
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(8 + len(MAGIC))
                if start[8:] != MAGIC:
                    raise UsageError(
                        f"{path} is not a cache saved by striped generate. Give a file written by --save-cache."
                    )
                (length,) = struct.unpack("<Q", start[:8])
                if length > size - 8:
                    self._cut_short()
                file.seek(0)
                header = file.read(8 + length)
        except OSError as error:
            raise UsageError(f"The cache {path} cannot be read: {error.strerror or error}.") from error
        said = self._said(header[8:])
        self._check_model(said, config, str(jnp.dtype(dtype)))
        self.weights = said["weights"]
        self._tensors = _tensors(config, dtype, int(said["length"]))
        expected, self._places = stream.header(self._tensors, said)
        if header != expected:
            self._damaged()
        end = self._places["checksums"] + 4 * (len(self._tensors) - 1)
        if size != end:
            self._cut_short() if size < end else self._damaged()
        self._checksums = dict(zip(self._tensors, self._read("checksums").tolist(), strict=False))
        self.tokens = self._checked("tokens")

    def check_prompt(self, tokens: list[int], where: str, encoder: Bytes | Tokenizer) -> None:
        """Raise unless a prompt begins with the tokens of the cache; the error names the first difference."""
        mine = self.tokens.tolist()
        if tokens[: len(mine)] == mine:
            return
        at = next((i for i, (a, b) in enumerate(zip(tokens, mine, strict=False)) if a != b), len(tokens))
        shown = lambda token: f"{encoder.show([token])!r} ({token})"  # noqa: E731
        found = f"token {at + 1} is {shown(tokens[at])}" if at < len(tokens) else f"it ends before token {at + 1}"
        raise UsageError(
            f"{where} must begin with the {len(mine):,} tokens of --cache {self.path}, but {found}, and that of the "
            f"cache is {shown(mine[at])}. Begin the prompt with the saved text, or leave out --cache."
        )

    def load(self, engine: Engine, say: Say | None = None) -> None:
        """Start every sequence of an engine with the saved tokens. If this raises, the sequences are empty."""
        if engine.fingerprint != self.weights:
            raise UsageError(
                f"The cache {self.path} was saved with other weights of the same architecture. Load it with those "
                f"weights, or save it again."
            )

        def rows() -> Iterator[tuple[jax.Array, jax.Array]]:
            for layer, cache in enumerate(engine.programs.caches):
                key, value = (self._checked(f"layers.{layer}.{name}") for name in ("key", "value"))
                yield _placed(cache, key, len(self.tokens)), _placed(cache, value, len(self.tokens))
                if say is not None:
                    say(layer + 1, engine.config.layers)

        engine.begin(len(self.tokens), self._checked("scores"), rows())

    def _said(self, header: bytes) -> dict[str, str]:
        """Return the metadata of the header. Raise if it is damaged or of another version."""
        try:
            said = json.loads(header)["__metadata__"]
        except (ValueError, LookupError, TypeError, RecursionError):
            self._damaged()
        if said.get("format") != FORMAT:
            raise UsageError(
                f"The cache {self.path} was saved by another version of striped_attention ({said.get('format')!r}; "
                f"this version reads {FORMAT!r}). Save it again."
            )
        if said.get("checksum") != _checksum_of(said):
            self._damaged()
        return said

    def _check_model(self, said: dict[str, str], config: ModelConfig, dtype: str) -> None:
        there, here = json.loads(said["model"]), _json(config)
        names = [name for name in {**here, **there} if there.get(name) != here.get(name)]
        if names == ["rope_scaling"] and config.rope_scaling is not None and config.rope_scaling.kind == "longrope":
            raise UsageError(
                f"The cache {self.path} was saved with a capacity for which longrope uses other factors. Save it "
                f"again, with a --capacity that is large enough for both runs."
            )
        if names:
            other = ", ".join(f"{name} {there.get(name)} there, {here.get(name)} here" for name in names)
            raise UsageError(f"The cache {self.path} is of another model: {other}. Give the --model it was saved with.")
        if said["dtype"] != dtype:
            raise UsageError(
                f"The cache {self.path} was saved in {said['dtype']}, but this run computes in {dtype}. Give --dtype "
                f"{said['dtype']}, or save it again."
            )

    def _checked(self, name: str) -> np.ndarray:
        """Read a tensor and verify its checksum."""
        array = self._read(name)
        if _crc(array) != self._checksums[name]:
            self._damaged()
        return array

    def _read(self, name: str) -> np.ndarray:
        code, shape = self._tensors[name]
        dtype, count = stream.DTYPES[code], int(np.prod(shape))
        try:
            content = np.fromfile(self.path, np.uint8, count * dtype.itemsize, offset=self._places[name])
        except OSError as error:
            raise UsageError(f"The cache {self.path} cannot be read: {error.strerror or error}.") from error
        if len(content) < count * dtype.itemsize:
            self._cut_short()
        return content.view(dtype).reshape(shape)

    def _cut_short(self) -> NoReturn:
        raise UsageError(f"The cache {self.path} is cut short: its end is missing. Save it again.")

    def _damaged(self) -> NoReturn:
        raise UsageError(f"The cache {self.path} is damaged. Save it again.")


def check_new(path: pathlib.Path) -> None:
    """Raise if a cache cannot be saved to this path."""
    if path.exists():
        raise UsageError(f"--save-cache {path} already exists. Choose a new file, or remove it.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--save-cache {path}: there is no folder {path.absolute().parent}.")


def _tensors(config: ModelConfig, dtype: Any, length: int) -> dict[str, tuple[str, list[int]]]:
    """Return the dtypes and shapes of a file's tensors, in file order."""
    found: dict[str, tuple[str, list[int]]] = {"tokens": ("I32", [length]), "scores": ("F32", [config.vocabulary])}
    for i in range(config.layers):
        kept = min(length, config.layer(i).window or length)
        for name in ("key", "value"):
            found[f"layers.{i}.{name}"] = CODES[str(jnp.dtype(dtype))], [kept, config.kv_heads, config.head_dim]
    return {**found, "checksums": ("U32", [len(found)])}


def _metadata(config: ModelConfig, weights: str, dtype: Any, length: int) -> dict[str, str]:
    said = {"format": FORMAT, "model": json.dumps(_json(config)), "weights": weights, "dtype": str(jnp.dtype(dtype))}
    said |= {"length": str(length)}
    return {**said, "checksum": _checksum_of(said)}


def _json(config: ModelConfig) -> dict[str, Any]:
    """Return a model as it is after a round trip through JSON."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _checksum_of(said: dict[str, str]) -> str:
    others = {name: text for name, text in said.items() if name != "checksum"}
    return f"{zlib.crc32(json.dumps(others).encode()):08x}"


def _crc(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


@contextlib.contextmanager
def _new_file(
    path: pathlib.Path, tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str]
) -> Iterator[Callable[[str, np.ndarray], None]]:
    """Yield a function that writes the next tensor, in file order. The file is moved to `path` at the end."""
    if jax.process_index() > 0:
        yield lambda name, array: None
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    places, checksums = stream.header(tensors, metadata)[1], []
    size = places["checksums"] + 4 * len(tensors)
    try:
        free = shutil.disk_usage(path.absolute().parent).free
        if free < size:
            raise OSError(f"it needs {size / 1e6:,.1f} MB and the disk has {free / 1e6:,.1f} MB left")
        stream.begin(temporary, tensors, metadata)

        def put(name: str, array: np.ndarray) -> None:
            stream.put(temporary, places[name], array)
            checksums.append(_crc(array))

        yield put
        put("checksums", np.array(checksums, np.uint32))
        temporary.replace(path)
    except OSError as error:
        raise UsageError(
            f"The cache could not be saved to {path}: {error.strerror or error}. No file was left. Free disk space, or "
            f"choose another folder."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _in_order(cache: KVCache, entries: jax.Array, row: int, length: int) -> np.ndarray:
    """Return the kept keys or values of a sequence in sequence order: [kept, kv_heads, head_dim]."""
    index = np.arange(length - min(length, cache.window or length), length) % cache.capacity
    slots = np.argsort(cache.layout.order(cache.capacity, cache.devices))[index]
    return _on_host(_row(entries, row))[:, slots].swapaxes(0, 1)


def _placed(cache: KVCache, x: np.ndarray, length: int) -> jax.Array:
    """The inverse of `_in_order`: one sequence's cache from its last keys or values. Empty slots are 0."""
    index = cache.layout.order(cache.capacity, cache.devices)
    position = length - 1 - (length - 1 - index) % cache.capacity if cache.wraps else index
    source = position - (length - len(x))
    there = (position < length) & (source >= 0)

    def read(part: tuple[slice, ...], into: np.ndarray) -> None:
        mine, at = there[part[2]], source[part[2]]
        into[...] = 0
        into[0][:, mine] = x[at[mine]].swapaxes(0, 1)

    return place((1, *cache.key.shape[1:]), cache.key.sharding, cache.key.dtype, read)


@jax.jit
def _row(entries: jax.Array, row: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(entries, row, keepdims=False)


def _on_host(x: jax.Array) -> np.ndarray:
    """Return the whole array, in every process."""
    return np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))

"""Loading: read weights onto a mesh, fused and in the dtype of generation.

Hugging Face matrices are [outputs, inputs], like fused ones. So each device's shard is copied out of memory-mapped
files without a transpose, one after the other; no process ever holds a whole copy. Checkpoints hold float32 weights
with all layers stacked; these are unstacked and fused on the devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from striped_attention.generation.fused import fuse, fused_shapes
from striped_attention.huggingface import Files
from striped_attention.models.config import ModelConfig, Weights
from striped_attention.training.arrays import Say, place, read_stacked
from striped_attention.training.source import Source

Index = tuple[slice, ...]


def load(source: Source, mesh: Mesh, dtype: Any, say: Say | None = None) -> Weights:
    """Return the fused weights of a source. `say(done, total)` is called with the number of parameters read."""
    if source.step is not None:
        return fuse(source.model, mesh, _unstacked(source.model, read_stacked(source, mesh), mesh, dtype))
    shapes, done = fused_shapes(source.model, mesh, dtype), 0
    with Files(source.folder, source.model) as files:
        readers = _Readers(source.model, files)

        def one(name: str, shape: jax.ShapeDtypeStruct, layer: int | None) -> jax.Array:
            nonlocal done
            placed = place(shape.shape, shape.sharding, dtype, readers.of(name, layer))
            done += placed.size
            if say is not None:
                say(done, source.model.parameters)
            return placed

        layers = shapes.pop("layers")
        return {
            **{name: one(name, shape, None) for name, shape in shapes.items()},
            "layers": [{name: one(name, shape, i) for name, shape in layer.items()} for i, layer in enumerate(layers)],
        }


class _Readers:
    """Functions that fill shards of fused weights from a model's files."""

    def __init__(self, config: ModelConfig, files: Files) -> None:
        self.config, self.files = config, files

    def of(self, name: str, layer: int | None) -> Callable[[Index, np.ndarray], None]:
        """Return the function for one weight of one layer."""

        def read(index: Index, into: np.ndarray) -> None:
            if name == "qkv":
                self._qkv(layer, index[0], into)
            elif name == "qkv_bias":
                biases = [self._flat(f"{of}_bias", layer).ravel() for of in ("query", "key", "value")]
                _copy(into, np.concatenate(biases))
            elif name == "gate_up":
                self._gate_up(layer, index[0], into)
            elif name in ("output", "down"):
                _copy(into, self._inputs(name, layer, *_bounds(index[1], into.shape[1])))
            else:
                _copy(into, self.files.part(name, layer, index))

        return read

    def _qkv(self, layer: int | None, rows: slice, into: np.ndarray) -> None:
        """Read rows of the concatenated query, key and value matrices."""
        config, (start, stop), first = self.config, _bounds(rows, len(into)), 0
        for name, heads in (("query", config.heads), ("key", config.kv_heads), ("value", config.kv_heads)):
            low, high = max(start - first, 0), min(stop - first, heads * config.head_dim)
            if low < high:
                begin = low // config.head_dim
                index = slice(None), slice(begin, -(-high // config.head_dim)), slice(None)
                part = self.files.part(name, layer, index)
                flat = part.reshape(len(part), -1).T  # files are read in whole heads
                _copy(
                    into[first + low - start : first + high - start],
                    flat[low - begin * config.head_dim :][: high - low],
                )
            first += heads * config.head_dim

    def _gate_up(self, layer: int | None, devices: slice, into: np.ndarray) -> None:
        width = into.shape[2]
        start, stop = _bounds(devices, len(into))
        for number in range(start, stop):
            for i, name in enumerate(("gate", "up")):
                index = slice(None), slice(number * width, (number + 1) * width)
                _copy(into[number - start, i], self.files.part(name, layer, index).T)

    def _inputs(self, name: str, layer: int | None, start: int, stop: int) -> np.ndarray:
        """Read columns of a matrix [outputs, inputs]; of attention's output matrix, files are read in whole heads."""
        if name == "down":
            return self.files.part(name, layer, (slice(start, stop), slice(None))).T
        width = self.config.head_dim
        begin = start // width
        part = self.files.part(name, layer, (slice(begin, -(-stop // width)), slice(None), slice(None)))
        return part.reshape(-1, part.shape[-1])[start - begin * width :][: stop - start].T

    def _flat(self, name: str, layer: int | None) -> np.ndarray:
        return self.files.part(name, layer, (slice(None), slice(None)))


def _bounds(part: slice, size: int) -> tuple[int, int]:
    """Return the start and end of a slice of `size` elements."""
    start = part.start or 0
    return start, start + size


def _copy(into: np.ndarray, array: np.ndarray) -> None:
    np.copyto(into, array, casting="unsafe")


def _unstacked(config: ModelConfig, stacked: Weights, mesh: Mesh, dtype: Any) -> Weights:
    """Split a checkpoint's stacked weights into layers."""
    specs = config.layer_specs(mesh.size)

    def unstack(name: str) -> list[Any]:
        split = jax.jit(
            lambda x: [x[i].astype(dtype) for i in range(config.layers)],
            out_shardings=[NamedSharding(mesh, layer[name]) for layer in specs["layers"]],
        )
        return split(stacked["layers"].pop(name))

    by_name = {name: unstack(name) for name in list(stacked["layers"])}
    whole = {name: stacked.pop(name).astype(dtype) for name in list(stacked) if name != "layers"}
    return {**whole, "layers": [{name: x[i] for name, x in by_name.items()} for i in range(config.layers)]}

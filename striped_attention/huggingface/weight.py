"""Weight: names and shapes of weights, in Hugging Face's files and in this library.

In files a matrix is [outputs, inputs] and heads are flattened into one dimension. Here a matrix is [inputs, outputs],
and heads have a dimension of their own:

    model.layers.3.self_attn.q_proj.weight  [heads · head_dim, dim]      query of layer 3   [dim, heads, head_dim]
    model.layers.3.self_attn.o_proj.weight  [dim, heads · head_dim]      output of layer 3  [heads, head_dim, dim]

Phi's files fuse query, key and value into one matrix, and gate and up into another, stacked by rows. Here each is a
separate weight, which knows its first row in the stored matrix.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from striped_attention.models.config import ModelConfig

Named = tuple[str, int | None, np.ndarray]  # our name, the layer or None, the array

CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "unembedding": "lm_head"}
INSIDE = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "output": "self_attn.o_proj",
    "after_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",  # with norms before alone, it has the name above
    "after_ffn_norm": "post_feedforward_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
FUSED = {"self_attn.qkv_proj": ("query", "key", "value"), "mlp.gate_up_proj": ("gate", "up")}


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of one layer, or outside the layers (None). `name` and `shape` are ours; `key` is its name in a file.

    In a fused matrix of `rows` rows it begins at row `first`.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    key: str
    first: int = 0
    rows: int | None = None

    @property
    def inputs(self) -> int | None:
        """The number of inputs of a matrix; None if the weight is not a matrix."""
        if self.name == "embedding" or self.name.endswith(("norm", "bias")):
            return None
        return math.prod(self.shape[:-1]) if self.name == "output" else self.shape[0]

    @property
    def outputs(self) -> int:
        """The number of outputs: the rows of the stored matrix that belong to this weight."""
        return math.prod(self.shape) // (self.inputs or 1)

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of the array that a file stores under `key`."""
        if self.inputs is not None:
            return (self.rows or self.outputs, self.inputs)
        return self.shape if self.name == "embedding" else (math.prod(self.shape),)

    def ours(self, stored: Any) -> np.ndarray:
        """Convert a stored array to ours."""
        return self.part(stored, tuple(slice(None) for _ in self.shape))

    def part(self, stored: Any, index: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of our array. `stored` may be a lazy slice of a file: only the rows and columns needed are
        read."""
        rows, *columns = (_flat(self.shape[group], index[group]) for group in self._groups)
        read = stored[(slice(rows.start + self.first, rows.stop + self.first), *columns)]
        firsts = {group.start for group in self._groups}
        bounds = [i.indices(n) for i, n in zip(index, self.shape, strict=True)]
        shape = [stop - start if i in firsts else self.shape[i] for i, (start, stop, _) in enumerate(bounds)]
        ours = (read if self.inputs is None else read.T).reshape(shape)
        return ours[tuple(slice(None) if i in firsts else index[i] for i in range(len(shape)))]

    @property
    def _groups(self) -> list[slice]:
        """Which of our dimensions are flattened into each dimension of the stored array."""
        if self.name == "embedding":
            return [slice(0, 1), slice(1, 2)]
        if self.inputs is None:
            return [slice(0, len(self.shape))]
        inputs = 2 if self.name == "output" else 1
        return [slice(inputs, len(self.shape)), slice(0, inputs)]

    def theirs(self, array: np.ndarray) -> np.ndarray:
        """Convert our array to its rows of the stored array."""
        return array.reshape(self.stored) if self.inputs is None else array.reshape(self.inputs, -1).T


def _flat(shape: tuple[int, ...], index: tuple[slice, ...]) -> slice:
    """Return the range of flattened dimensions that contains a slice of the first one and all of the others."""
    start, stop, step = index[0].indices(shape[0])
    if step != 1:
        raise ValueError(f"Slices of weights must be contiguous; got {index[0]}.")
    inner = math.prod(shape[1:])
    return slice(start * inner, stop * inner)


def weights(config: ModelConfig) -> list[Weight]:
    """Return every weight of a model. Those of one name are consecutive, in the order in which layers are stacked."""
    shapes = config.shapes
    inside = shapes.pop("layers")
    layers = [_of_layer(config, name, i, inside) for name in inside for i in range(config.layers)]
    embedding, *last = (Weight(name, None, shape, f"{OUTSIDE[name]}.weight") for name, shape in shapes.items())
    return [embedding, *layers, *last]


def _of_layer(config: ModelConfig, name: str, layer: int, shapes: dict[str, tuple[int, ...]]) -> Weight:
    owner, shape = name.removesuffix("_bias"), shapes[name][1:]
    place = INSIDE["after_attention_norm" if name == "ffn_norm" and config.norms == "before" else owner]
    plain = Weight(name, layer, shape, f"model.layers.{layer}.{place}.{'weight' if owner == name else 'bias'}")
    for fused, names in FUSED.items() if config.fused else ():
        if name in names:
            rows = [math.prod(shapes[each][2:]) for each in names]
            first = sum(rows[: names.index(name)])
            return dataclasses.replace(plain, key=f"model.layers.{layer}.{fused}.weight", first=first, rows=sum(rows))
    return plain


def by_key(some: Iterable[Weight]) -> list[list[Weight]]:
    """Group weights by their name in a file: those of a fused matrix together, all others alone."""
    found: dict[str, list[Weight]] = {}
    for weight in some:
        found.setdefault(weight.key, []).append(weight)
    return list(found.values())

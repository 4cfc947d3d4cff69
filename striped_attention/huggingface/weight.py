"""Weight: names and shapes of weights, in Hugging Face's files and here.

There a matrix is [outputs, inputs] and heads lie end to end in one dimension. Here a matrix is [inputs, outputs], and
heads have a dimension of their own:

    model.layers.3.self_attn.q_proj.weight  [heads · head_dim, dim]      query of layer 3   [dim, heads, head_dim]
    model.layers.3.self_attn.o_proj.weight  [dim, heads · head_dim]      output of layer 3  [heads, head_dim, dim]

Phi's files keep query, key and value as one matrix, and gate and up as another: the rows of one follow those of the
other. Each is a weight of its own here, which knows at which row of the stored matrix it begins.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from striped_attention.models.llama import ModelConfig

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
    "ffn_norm": "pre_feedforward_layernorm",  # where there is one after attention too; else that one's name
    "after_ffn_norm": "post_feedforward_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
FUSED = {"self_attn.qkv_proj": ("query", "key", "value"), "mlp.gate_up_proj": ("gate", "up")}


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of one layer, or of none. `name` and `shape` are ours, `key` is its name in a file.

    Of a fused matrix with so many `rows` it is those from row `first` on.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    key: str
    first: int = 0
    rows: int | None = None

    @property
    def inputs(self) -> int | None:
        """How many numbers a matrix takes; None for what is not a matrix."""
        if self.name == "embedding" or self.name.endswith(("norm", "bias")):
            return None
        return math.prod(self.shape[:-1]) if self.name == "output" else self.shape[0]

    @property
    def outputs(self) -> int:
        """The rows of a matrix in a file that are its own."""
        return math.prod(self.shape) // (self.inputs or 1)

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of what a file holds under its name."""
        if self.inputs is not None:
            return (self.rows or self.outputs, self.inputs)
        return self.shape if self.name == "embedding" else (math.prod(self.shape),)

    def ours(self, stored: Any) -> np.ndarray:
        """All of our array."""
        return self.part(stored, tuple(slice(None) for _ in self.shape))

    def part(self, stored: Any, index: tuple[slice, ...]) -> np.ndarray:
        """A part of our array. Of `stored`, which may be a slice of a file, only the rows and columns that hold it are
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
        """Which of our dimensions lie end to end in each dimension of a file."""
        if self.name == "embedding":
            return [slice(0, 1), slice(1, 2)]
        if self.inputs is None:
            return [slice(0, len(self.shape))]
        inputs = 2 if self.name == "output" else 1
        return [slice(inputs, len(self.shape)), slice(0, inputs)]

    def theirs(self, array: np.ndarray) -> np.ndarray:
        """Our array as the rows of a file that are its own."""
        return array.reshape(self.stored) if self.inputs is None else array.reshape(self.inputs, -1).T


def _flat(shape: tuple[int, ...], index: tuple[slice, ...]) -> slice:
    """The range that holds a part of some dimensions when they lie end to end; all of the inner ones."""
    start, stop, step = index[0].indices(shape[0])
    if step != 1:
        raise ValueError(f"Parts of weights are contiguous; got {index[0]}.")
    inner = math.prod(shape[1:])
    return slice(start * inner, stop * inner)


def weights(config: ModelConfig) -> list[Weight]:
    """Every weight of a model. Those of one name follow each other, layer by layer, as they are stacked here."""
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
    """Weights that a file holds under one name together, the others each by itself."""
    found: dict[str, list[Weight]] = {}
    for weight in some:
        found.setdefault(weight.key, []).append(weight)
    return list(found.values())

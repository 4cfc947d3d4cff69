"""Weight: names and shapes of weights, in Hugging Face's files and here.

There a matrix is [outputs, inputs] and heads lie end to end in one dimension. Here a matrix is [inputs, outputs], and
heads have a dimension of their own:

    model.layers.3.self_attn.q_proj.weight  [heads · head_dim, dim]      query of layer 3   [dim, heads, head_dim]
    model.layers.3.self_attn.o_proj.weight  [dim, heads · head_dim]      output of layer 3  [heads, head_dim, dim]
"""

import dataclasses
import math
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
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of one layer, or of none. `name` and `shape` are ours."""

    name: str
    layer: int | None
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """Its name in a file."""
        owner = self.name.removesuffix("_bias")
        place = OUTSIDE[owner] if self.layer is None else f"model.layers.{self.layer}.{INSIDE[owner]}"
        return f"{place}.{'weight' if owner == self.name else 'bias'}"

    @property
    def inputs(self) -> int | None:
        """How many numbers a matrix takes; None for what is not a matrix."""
        if self.name == "embedding" or self.name.endswith(("norm", "bias")):
            return None
        return math.prod(self.shape[:-1]) if self.name == "output" else self.shape[0]

    @property
    def stored(self) -> tuple[int, ...]:
        """Its shape in a file."""
        if self.inputs is not None:
            return (math.prod(self.shape) // self.inputs, self.inputs)
        return self.shape if self.name == "embedding" else (math.prod(self.shape),)

    def ours(self, array: np.ndarray) -> np.ndarray:
        return (array if self.inputs is None else array.T).reshape(self.shape)

    def part(self, stored: Any, index: tuple[slice, ...]) -> np.ndarray:
        """A part of our array. Of `stored`, which may be a slice of a file, only the rows and columns that hold it are
        read."""
        read = stored[tuple(_flat(self.shape[group], index[group]) for group in self._groups)]
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
    layers = [Weight(name, i, shape[1:]) for name, shape in shapes.pop("layers").items() for i in range(config.layers)]
    embedding, *last = (Weight(name, None, shape) for name, shape in shapes.items())
    return [embedding, *layers, *last]

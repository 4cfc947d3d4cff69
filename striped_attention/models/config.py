"""Config: the shape of a model, its weights' shapes and shardings, and presets."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from striped_attention.core.mask import Mask, causal, sliding_window
from striped_attention.models.rotary import RopeScaling
from striped_attention.models.stages import AXES

Weights = dict[str, Any]

NORMS = ("before", "around", "after")
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a model. By default LLaMA's: RMSNorm before each sublayer, rotary positions, SwiGLU.

    Options for related families:

    * `head_width` other than dim / heads; `tied`: one matrix for the embedding and the logits.
    * A sliding `window` in every layer (Mistral), or with `full_every` = n in all but every n-th (Gemma 2 and 3).
    * `biases` for queries, keys and values (Qwen 2); norms of queries and keys, per head (`head_norms`: Qwen 3,
      Gemma 3) or across all heads (`wide_norms`: OLMo 2).
    * `norms` "before" each sublayer, "after" it (OLMo 2) or "around" it, on both sides (Gemma). With `centered_norms`
      the scale of a norm is 1 + weight (Gemma).
    * `activation` of the gate: silu or gelu_tanh (Gemma).
    * `softcap` for attention scores and `score_softcap` for logits (Gemma 2): s becomes cap · tanh(s / cap).
    * `attention_width`: attention scores are divided by its square root instead of that of the head width (Gemma).
    * `scaled_embedding`: embeddings are multiplied by √dim (Gemma).
    * `rope_scaling`: for longer sequences. `local_theta`: the theta of layers with a window, which are then not scaled
      (Gemma 3).
      `rotary_width`: only the first `rotary_width` elements of each head are rotated (Phi-4-mini).
    * `fused`: Hugging Face's files store query, key and value as one matrix, gate and up as another (Phi). The
      computation is the same.
    """

    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    head_width: int | None = None
    window: int | None = None
    biases: bool = False
    head_norms: bool = False
    tied: bool = False
    rope_scaling: RopeScaling | None = None
    full_every: int | None = None
    wide_norms: bool = False
    norms: str = "before"
    centered_norms: bool = False
    activation: str = "silu"
    softcap: float | None = None
    score_softcap: float | None = None
    attention_width: int | None = None
    scaled_embedding: bool = False
    local_theta: float | None = None
    rotary_width: int | None = None
    fused: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "ffn", "heads", "kv_heads", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a model must be at least 1; got {getattr(self, name)}.")
        if self.head_width is None and self.dim % (2 * self.heads):
            raise ValueError(
                f"A model's dim must be its heads times an even head width; got dim {self.dim} and {self.heads} heads."
            )
        if self.head_dim % 2 or self.head_dim < 2:
            raise ValueError(f"The width of a head must be even; got {self.head_dim}.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"A model's window must be at least 1; got {self.window}.")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"A model's heads must be a multiple of its kv_heads; got {self.heads} and {self.kv_heads}."
            )
        if self.full_every is not None and (self.window is None or self.full_every < 2):
            raise ValueError(
                f"full_every must be at least 2 and needs a window, for the other layers; got full_every "
                f"{self.full_every} and window {self.window}."
            )
        if self.local_theta is not None and self.window is None:
            raise ValueError(f"local_theta is for layers with a window; got {self.local_theta} and no window.")
        if self.rotary_width is not None and not (self.rotary_width % 2 == 0 < self.rotary_width <= self.head_dim):
            raise ValueError(
                f"rotary_width must be even, above 0 and at most the head width {self.head_dim}; got "
                f"{self.rotary_width}."
            )
        if self.norms not in NORMS or self.activation not in ACTIVATIONS:
            raise ValueError(
                f"A model's norms must be one of {', '.join(NORMS)}, its activation {' or '.join(ACTIVATIONS)}; got "
                f"{self.norms!r} and {self.activation!r}."
            )

    @property
    def head_dim(self) -> int:
        return self.head_width or self.dim // self.heads

    @property
    def attention_scale(self) -> float | None:
        """The factor on attention scores; None means 1/√head_dim."""
        return None if self.attention_width is None else self.attention_width**-0.5

    @property
    def mask(self) -> Mask:
        """The mask of a layer, without documents. If layers differ, that of the layers without a window."""
        return causal() if self.window is None or self.full_every is not None else sliding_window(self.window)

    @property
    def period(self) -> int:
        """The number of layers after which the pattern of windows repeats."""
        return self.full_every or 1

    def layer(self, index: int) -> "ModelConfig":
        """Return the config of layer `index`: a model whose layers are all like it. Equal layers give equal configs."""
        if self.full_every is not None and (index + 1) % self.full_every == 0:
            return dataclasses.replace(self, window=None, full_every=None, local_theta=None)
        if self.full_every is None and self.local_theta is None:
            return self
        changes: dict[str, Any] = {"full_every": None, "local_theta": None}
        if self.local_theta is not None:
            changes |= {"rope_theta": self.local_theta, "rope_scaling": None}
        return dataclasses.replace(self, **changes)

    @property
    def kinds(self) -> dict["ModelConfig", int]:
        """The distinct layers, as returned by `layer`, and the number of each; those without a window first."""
        found = collections.Counter(self.layer(i) for i in range(self.layers))
        return dict(sorted(found.items(), key=lambda kind: kind[0].window is not None))

    def at_length(self, length: int) -> "ModelConfig":
        """Return the model for sequences of up to `length` tokens, which determines longrope's factors."""
        if self.rope_scaling is None:
            return self
        return dataclasses.replace(self, rope_scaling=self.rope_scaling.at_length(length))

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> "ModelConfig":
        """The inverse of `dataclasses.asdict`; fields that an older version did not have take their defaults."""
        rope_scaling = said.get("rope_scaling")
        return cls(**{**said, "rope_scaling": None if rope_scaling is None else RopeScaling.from_json(rope_scaling)})

    @property
    def shapes(self) -> Weights:
        """The shape of every weight; those of the layers are stacked."""
        n = self.layers
        more: Weights = {}
        if self.biases:
            more["query_bias"] = (n, self.heads, self.head_dim)
            more["key_bias"] = more["value_bias"] = (n, self.kv_heads, self.head_dim)
        if self.head_norms:
            more["query_norm"] = more["key_norm"] = (n, self.head_dim)
        if self.wide_norms:
            more["query_norm"], more["key_norm"] = (n, self.heads * self.head_dim), (n, self.kv_heads * self.head_dim)
        if self.norms != "after":
            more["attention_norm"] = more["ffn_norm"] = (n, self.dim)
        if self.norms != "before":
            more["after_attention_norm"] = more["after_ffn_norm"] = (n, self.dim)
        return {
            "embedding": (self.vocabulary, self.dim),
            "layers": {
                "query": (n, self.dim, self.heads, self.head_dim),
                "key": (n, self.dim, self.kv_heads, self.head_dim),
                "value": (n, self.dim, self.kv_heads, self.head_dim),
                "output": (n, self.heads, self.head_dim, self.dim),
                "gate": (n, self.dim, self.ffn),
                "up": (n, self.dim, self.ffn),
                "down": (n, self.ffn, self.dim),
                **more,
            },
            "norm": (self.dim,),
            **({} if self.tied else {"unembedding": (self.dim, self.vocabulary)}),
        }

    @property
    def last(self) -> tuple[str, ...]:
        """The names of the weights that turn the last layer's output into logits."""
        return ("norm", "embedding" if self.tied else "unembedding")

    def specs(self, devices: int) -> Weights:
        """Return the sharding of every weight on a mesh of `devices` devices."""

        def one(path: Any, shape: tuple[int, ...]) -> PartitionSpec:
            return AXES.weight(shape, devices, stacked=path[0].key == "layers")

        return jax.tree_util.tree_map_with_path(one, self.shapes, is_leaf=is_shape)

    def layer_specs(self, devices: int) -> Weights:
        """Return the same with a separate entry for each layer, as used in generation."""
        specs = self.specs(devices)
        layer = {name: PartitionSpec(*spec[1:]) for name, spec in specs["layers"].items()}
        return {**specs, "layers": [layer] * self.layers}

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(shape)) for shape in jax.tree.leaves(self.shapes, is_leaf=is_shape))


# The paper's models have LLaMA's shape at three sizes; 7b is LLaMA 7B itself.
PRESETS = {
    "debug": ModelConfig(layers=2, dim=128, ffn=384, heads=4, kv_heads=2, vocabulary=320),
    "1b": ModelConfig(layers=22, dim=2048, ffn=5504, heads=16, kv_heads=16, vocabulary=32_000),
    "3b": ModelConfig(layers=26, dim=3200, ffn=8640, heads=32, kv_heads=32, vocabulary=32_000),
    "7b": ModelConfig(layers=32, dim=4096, ffn=11_008, heads=32, kv_heads=32, vocabulary=32_000),
    "llama3-8b": ModelConfig(
        layers=32, dim=4096, ffn=14_336, heads=32, kv_heads=8, vocabulary=128_256, rope_theta=500_000.0
    ),
}


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple)

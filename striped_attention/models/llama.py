"""Model: a LLaMA-style decoder as plain functions on a pytree of arrays, for one device's shard of a long sequence.

Everything except `ModelConfig` and `init` runs inside `jax.shard_map`: a device holds [batch, slots] of the tokens, in
layout order, and a shard of every weight. A layer has three steps:

    q, k, v = before(x)          norm, projections, rotary positions     a stage: position-wise, chunk by chunk
    a = attention(q, k, v)       the ring                                the only step in which positions interact
    x = after(x, a)              projection, norm, SwiGLU                a stage

Thanks to the chunks, no array of size slots × ffn or slots × vocabulary is materialised, forward or backward. Layers
are stacked and scanned. If only some layers have a sliding window, one step of the scan covers a whole period of that
pattern, so the mask of every layer is static and kernels can skip hidden tiles. `REMAT` selects what a layer keeps for
the backward pass, besides its input:

    none        the results of all matrix products and of attention: no product is recomputed
    qkv         attention's result and its inputs
    attention   attention's result
    full        nothing
"""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from striped_attention.attention import attention_shard
from striped_attention.core.layout import Layout
from striped_attention.core.mask import Mask, causal, sliding_window
from striped_attention.models.rotary import RopeScaling, rotary, rotate
from striped_attention.models.stages import AXES, stage, stage_sum
from striped_attention.strategies.ring import SAVED
from striped_attention.strategies.strategy import AUTO, Strategy

Weights = dict[str, Any]

REMAT = ("none", "qkv", "attention", "full")  # from the most memory and the least recomputation to the opposite
NORMS = ("before", "around", "after")
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
PRODUCT = "matrix_product"  # the checkpoint name of the arrays that "none" keeps
SCORES = 2**28  # logits computed at a time, in float32: 1 GiB, enough to keep a device busy


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

        return jax.tree_util.tree_map_with_path(one, self.shapes, is_leaf=_is_shape)

    def layer_specs(self, devices: int) -> Weights:
        """Return the same with a separate entry for each layer, as used in generation."""
        specs = self.specs(devices)
        layer = {name: PartitionSpec(*spec[1:]) for name, spec in specs["layers"].items()}
        return {**specs, "layers": [layer] * self.layers}

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(shape)) for shape in jax.tree.leaves(self.shapes, is_leaf=_is_shape))


# The weights of a layer's second stage; the others belong to the first.
AFTER = ("output", "after_attention_norm", "ffn_norm", "gate", "up", "gate_up", "down", "after_ffn_norm")

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


@dataclasses.dataclass(frozen=True)
class Compute:
    """How to run a model, as opposed to its shape. `devices` is the size of the sequence axis."""

    layout: Layout
    devices: int
    length: int
    dtype: Any = jnp.bfloat16
    remat: str = "attention"
    chunk: int = 1024
    kernel: str = "auto"
    tile: tuple[int, int] | None = None
    deterministic: bool = False
    strategy: str | Strategy = AUTO

    @property
    def padded_length(self) -> int:
        return self.layout.padded_length(self.length, self.devices)

    def attend(self, config: ModelConfig, q: Array, k: Array, v: Array, mask: Mask) -> Array:
        """Compute attention over the whole sequence, in a layer of the model `config`."""
        return attention_shard(
            *(q, k, v),
            axis_name=AXES.sequence,
            layout=self.layout,
            mask=mask,
            scale=config.attention_scale,
            softcap=config.softcap,
            kernel=self.kernel,
            tile=self.tile,
            deterministic=self.deterministic,
            strategy=self.strategy,
            length=self.length,
        )

    def positions(self) -> Int[Array, " slots"]:
        return jnp.asarray(self.layout.positions(lax.axis_index(AXES.sequence), self.padded_length, self.devices))


def init(config: ModelConfig, key: Array) -> Weights:
    """Return new float32 weights: normal, standard deviation 0.02, smaller if added to the residual stream."""
    named, structure = jax.tree_util.tree_flatten_with_path(config.shapes, is_leaf=_is_shape)
    keys = jax.random.split(key, len(named))

    def one(path: Any, shape: tuple[int, ...], key: Array) -> Array:
        name = path[-1].key
        if name.endswith(("norm", "bias")):
            return jnp.full(shape, name.endswith("norm") and not config.centered_norms, jnp.float32)
        residual = (2 * config.layers) ** -0.5 if name in ("output", "down") else 1.0
        return jax.random.normal(key, shape, jnp.float32) * (0.02 * residual)

    weights = [one(path, shape, key) for (path, shape), key in zip(named, keys, strict=True)]
    return jax.tree.unflatten(structure, weights)


def loss_chunk(chunk: int, vocabulary: int) -> int:
    """Return how many tokens get their logits at a time, when stages take chunks of `chunk` tokens."""
    return min(chunk, max(1024, SCORES // vocabulary))


def token_losses(
    config: ModelConfig,
    compute: Compute,
    weights: Weights,
    specs: Weights,
    tokens: Int[Array, "batch slots"],
    targets: Int[Array, "batch slots"],
    mask: Mask,
    attend: Callable[..., Array] | None = None,
) -> Float[Array, "batch slots"]:
    """Return the cross-entropy of every target, for this device's slots. `attend` replaces the ring in tests."""
    x = last_layer(config, compute, weights, specs, tokens, mask, attend)
    last, last_specs = ({name: tree[name] for name in config.last} for tree in (weights, specs))
    chunk = loss_chunk(compute.chunk, config.vocabulary)
    return stage(functools.partial(losses, config), last, last_specs, x, targets, chunk=chunk, dtype=compute.dtype)


def weighted_loss(
    config: ModelConfig,
    compute: Compute,
    weights: Weights,
    specs: Weights,
    tokens: Int[Array, "batch slots"],
    targets: Int[Array, "batch slots"],
    loss_weights: Float[Array, "batch slots"],
    mask: Mask,
    attend: Callable[..., Array] | None = None,
) -> Float[Array, ""]:
    """Return the sum of `token_losses` times `loss_weights`. Its gradient does not recompute the logits."""

    def weighted(last: Weights, x: Array, constants: tuple[Array, Array]) -> Array:
        targets, loss_weights = constants
        return jnp.sum(losses(config, last, x, targets) * loss_weights)

    x = last_layer(config, compute, weights, specs, tokens, mask, attend)
    last, last_specs = ({name: tree[name] for name in config.last} for tree in (weights, specs))
    chunk = loss_chunk(compute.chunk, config.vocabulary)
    return stage_sum(weighted, last, last_specs, x, (targets, loss_weights), chunk=chunk, dtype=compute.dtype)


def last_layer(
    config: ModelConfig,
    compute: Compute,
    weights: Weights,
    specs: Weights,
    tokens: Int[Array, "batch slots"],
    mask: Mask,
    attend: Callable[..., Array] | None = None,
) -> Float[Array, "batch slots dim"]:
    """Return the last layer's output for this device's slots."""
    config = config.at_length(compute.length)
    keep = PRODUCT if compute.remat == "none" else None
    run = functools.partial(stage, chunk=compute.chunk, dtype=compute.dtype, keep=keep)
    positions = jnp.broadcast_to(compute.positions(), tokens.shape)
    layer_specs = {name: PartitionSpec(*spec[1:]) for name, spec in specs["layers"].items()}

    def layer(index: int, x: Array, weights: Weights) -> Array:
        if config.period == 1:
            return of_kind(config.layer(index), x, weights)
        # Slice inside the checkpointed function, which recomputes it: if kept, it would be a copy of every weight.
        return of_kind(config.layer(index), x, {name: w[index] for name, w in weights.items()})

    def of_kind(config: ModelConfig, x: Array, weights: Weights) -> Array:
        first, second = split_layer(weights)
        first_specs, second_specs = split_layer(layer_specs)
        q, k, v = run(functools.partial(before, config), first, first_specs, x, positions)
        masked = mask if config.window is None else mask & sliding_window(config.window)
        attended = (attend or functools.partial(compute.attend, config))(q, k, v, masked)
        return run(functools.partial(after, config), second, second_specs, (x, attended), ())

    layers = [_remat(functools.partial(layer, i), compute.remat) for i in range(config.period)]

    def period(x: Array, weights: Weights) -> tuple[Array, None]:
        for one in layers:
            x = one(x, weights)
        return x, None

    embed = functools.partial(stage, chunk=tokens.shape[1], dtype=compute.dtype)  # one chunk: its gradient is a table
    x = embed(functools.partial(lookup, config), weights["embedding"], specs["embedding"], (), tokens)
    whole, rest = _periods(weights["layers"], config.layers, config.period)
    x, _ = lax.scan(period, x, whole)
    for one in layers[: config.layers % config.period]:
        x = one(x, rest)
    return x


def _periods(weights: Weights, layers: int, period: int) -> tuple[Weights, Weights]:
    """Return stacked weights as [periods, period, ...], and those of the remaining layers at the end."""
    if period == 1:
        return weights, {}
    left = layers % period
    # split, not slices: the gradient of every slice would be an array of full size, padded with zeros.
    parts = {name: lax.split(w, (layers - left, left)) if left else [w] for name, w in weights.items()}
    whole = {name: part[0].reshape(layers // period, period, *part[0].shape[1:]) for name, part in parts.items()}
    return whole, {name: part[-1] for name, part in parts.items()}


def split_layer(weights: Weights) -> tuple[Weights, Weights]:
    """Split the weights of a layer (or their specs) into those of its two stages, `before` and `after`."""
    first = {n: x for n, x in weights.items() if n not in AFTER}
    return first, {n: x for n, x in weights.items() if n in AFTER}


def _remat(layer: Any, kind: str) -> Any:
    """Set what a layer keeps of its forward pass. Without a checkpoint, attention keeps its inputs as well."""
    if kind in ("none", "qkv"):
        return layer
    names = SAVED if kind == "attention" else ()
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names), prevent_cse=False)


def lookup(config: ModelConfig, embedding: Array, _: Any, tokens: Array) -> Array:
    # The gradient sums over all uses of a token, so in float32: a bfloat16 sum of ones stalls at 256.
    return scale_embedding(config, embedding.astype(jnp.float32)[tokens].astype(embedding.dtype))


def scale_embedding(config: ModelConfig, x: Array) -> Array:
    """Scale embedding rows for the first layer. The factor is rounded to their dtype, as in transformers."""
    return x * jnp.asarray(config.dim**0.5, x.dtype) if config.scaled_embedding else x


def _as_it_is(x: Array) -> Array:
    return x


def before(
    config: ModelConfig, weights: Weights, x: Array, positions: Array, whole: Callable[[Array], Array] = _as_it_is
) -> tuple[Array, Array, Array]:
    """Return queries, keys and values of a layer; `config` is that of the layer (`ModelConfig.layer`).

    If fused weights are split over devices (`generation.fused`), `whole` gathers or sums their products.
    """
    y = x if config.norms == "after" else _norm(config, x, weights["attention_norm"])
    q, k, v = _attention_inputs(config, weights, y, whole)
    if config.head_norms:
        q, k = (_norm(config, x, weights[f"{name}_norm"]) for x, name in ((q, "query"), (k, "key")))
    if config.wide_norms:
        flat = lambda x: x.reshape(*x.shape[:2], -1)  # noqa: E731
        q, k = (_norm(config, flat(x), weights[f"{n}_norm"]).reshape(x.shape) for x, n in ((q, "query"), (k, "key")))
    cos, sin = rotary(positions, config.rotary_width or config.head_dim, config.rope_theta, config.rope_scaling)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def _attention_inputs(
    config: ModelConfig, weights: Weights, y: Array, whole: Callable[[Array], Array]
) -> tuple[Array, Array, Array]:
    """Return queries, keys and values before their norms and rotation."""
    if "qkv" in weights:
        flat = whole(_project("bsd,ed->bse", y, weights["qkv"]))
        flat = _for_all(jnp.add, flat, weights["qkv_bias"]) if config.biases else flat
        heads = flat.reshape(*y.shape[:2], -1, config.head_dim)
        q, k, v = jnp.split(heads, [config.heads, config.heads + config.kv_heads], axis=2)
        return q, k, v
    q, k, v = (_project("bsd,dhk->bshk", y, weights[name]) for name in ("query", "key", "value"))
    if config.biases:
        q, k, v = (_for_all(jnp.add, x, weights[f"{n}_bias"]) for x, n in ((q, "query"), (k, "key"), (v, "value")))
    return q, k, v


def after(
    config: ModelConfig,
    weights: Weights,
    inputs: tuple[Array, Array],
    _: Any,
    whole: Callable[[Array], Array] = _as_it_is,
) -> Array:
    """Return the residual stream after a layer, from that before it and attention's output; `whole` as in `before`."""
    x, attended = inputs
    y = whole(_attention_output(weights, attended))
    x = x + (y if config.norms == "before" else _norm(config, y, weights["after_attention_norm"]))
    y = x if config.norms == "after" else _norm(config, x, weights["ffn_norm"])
    y = whole(_feed_forward(config, weights, y))
    return x + (y if config.norms == "before" else _norm(config, y, weights["after_ffn_norm"]))


def _attention_output(weights: Weights, attended: Array) -> Array:
    if "gate_up" in weights:
        return _project("bse,de->bsd", attended.reshape(*attended.shape[:2], -1), weights["output"])
    return _project("bshk,hkd->bsd", attended, weights["output"])


def _feed_forward(config: ModelConfig, weights: Weights, y: Array) -> Array:
    activation = ACTIVATIONS[config.activation]
    if "gate_up" in weights:
        parts = weights["gate_up"]  # [devices, gate or up, ffn / devices, dim]
        both = _project("bsd,ed->bse", y, parts.reshape(-1, parts.shape[-1]))
        both = both.reshape(*y.shape[:2], *parts.shape[:3])
        inner = (activation(both[:, :, :, 0]) * both[:, :, :, 1]).reshape(*y.shape[:2], -1)
        return _project("bsf,df->bsd", inner, weights["down"])
    gate, up = (_project("bsd,df->bsf", y, weights[name]) for name in ("gate", "up"))
    return _project("bsf,fd->bsd", activation(gate) * up, weights["down"])


def logits(config: ModelConfig, weights: Weights, x: Array) -> Array:
    """Return the logits of the vocabulary, in float32, from the last layer's output."""
    unembedding = weights["embedding"].T if config.tied else weights["unembedding"]
    scores = _logits(_norm(config, x, weights["norm"]), unembedding)
    cap = config.score_softcap
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def losses(config: ModelConfig, weights: Weights, x: Array, targets: Array) -> Array:
    scores = logits(config, weights, x)
    target = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - target


def _norm(config: ModelConfig, x: Array, weight: Array) -> Array:
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + config.norm_epsilon)
    if config.norms == "before":  # LLaMA rounds before it multiplies; Gemma and OLMo 2 do not
        y = y.astype(x.dtype)
    multiply = _times_one_more if config.centered_norms else jnp.multiply
    return _for_all(multiply, y, weight).astype(x.dtype)


def _times_one_more(x: Array, weight: Array) -> Array:
    return x * (1 + weight)


def _for_all(operation: Callable[..., Array], x: Array, weight: Array) -> Array:
    """Apply an operation to x and a weight that all tokens share; the weight's gradient is summed in float32."""
    return operation(x.astype(jnp.float32), weight.astype(jnp.float32)).astype(x.dtype)


def _precision(dtype: Any) -> lax.Precision | None:
    """Full precision for float32, even on hardware that would round by default."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _project(form: str, x: Array, weight: Array) -> Array:
    return checkpoint_name(jnp.einsum(form, x, weight, precision=_precision(x.dtype)), PRODUCT)


@jax.custom_vjp
def _logits(x: Array, weight: Array) -> Array:
    """Return x · weight in float32. As everywhere, gradients are rounded to the compute dtype before the products."""
    return jnp.einsum("bsd,dv->bsv", x, weight, precision=_precision(x.dtype), preferred_element_type=jnp.float32)


def _logits_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _logits(x, weight), (x, weight)


def _logits_backward(residuals: tuple[Array, Array], dscores: Array) -> tuple[Array, Array]:
    x, weight = residuals
    dscores = dscores.astype(x.dtype)
    dx = _project("bsv,dv->bsd", dscores, weight)
    return dx, _project("bsd,bsv->dv", x, dscores)


_logits.defvjp(_logits_forward, _logits_backward)


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)

"""Layers: the position-wise parts of a model, for one device's chunk of tokens and whole weights.

x                        lookup          embedding rows
q, k, v = before(x)      norm, projections, rotary positions
x = after(x, a)          projection of attention's result, norm, feed-forward
logits(x)                norm, unembedding
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from striped_attention.models.config import ACTIVATIONS, ModelConfig, Weights
from striped_attention.models.rotary import rotary, rotate

# The checkpoint name of the results of matrix products, which remat "none" and "unrolled" keep.
PRODUCT = "matrix_product"
# The weights of a layer's second stage; the others belong to the first.
AFTER = ("output", "after_attention_norm", "ffn_norm", "gate", "up", "gate_up", "down", "after_ffn_norm")


def split_layer(weights: Weights) -> tuple[Weights, Weights]:
    """Split the weights of a layer (or their specs) into those of its two stages, `before` and `after`."""
    first = {n: x for n, x in weights.items() if n not in AFTER}
    return first, {n: x for n, x in weights.items() if n in AFTER}


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
    return cross_entropy(logits(config, weights, x), targets)


@jax.custom_vjp
def cross_entropy(scores: Array, targets: Array) -> Array:
    """Return -log softmax(scores) at the targets.

    JAX would add the target's -1 to the gradient by a scatter, in a pass of its own over all scores.
    """
    return _cross_entropy_forward(scores, targets)[0]


def _cross_entropy_forward(scores: Array, targets: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    total = jax.nn.logsumexp(scores, axis=-1)
    target = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return total - target, (scores, targets, total)


def _cross_entropy_backward(residuals: tuple[Array, Array, Array], dlosses: Array) -> tuple[Array, None]:
    scores, targets, total = residuals
    hit = lax.broadcasted_iota(targets.dtype, scores.shape, scores.ndim - 1) == targets[..., None]
    return (jnp.exp(scores - total[..., None]) - hit.astype(scores.dtype)) * dlosses[..., None], None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


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

"""Oracle: the reference implementation, textbook attention on one device with all scores in memory.

Everything else is compared with it: tests and benchmarks call it in float64, examples in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from striped_attention.core.bias import Bias
from striped_attention.core.mask import Mask
from striped_attention.core.partial import Partial


def dense_attention(*args: Any, **options: Any) -> Float[Array, "batch queries heads dim"]:
    """Return the output of `dense_partial` without the lse; the arguments are the same."""
    return dense_partial(*args, **options).out


def control_attention(query: Array, key: Array, value: Array, mask: Mask) -> Float[Array, "batch queries heads dim"]:
    """Compute dense attention on one device that holds the whole sequence: replaces the ring in control runs."""
    position = jnp.arange(query.shape[1], dtype=jnp.int32)
    lo, hi = mask.bounds(position, query.shape[1])
    return dense_attention(query, key, value, (lo[:, :, None] <= position) & (position < hi[:, :, None]))


def dense_partial(
    query: Float[Array | np.ndarray, "batch queries heads dim"],
    key: Float[Array | np.ndarray, "batch keys kv_heads dim"],
    value: Float[Array | np.ndarray, "batch keys kv_heads value_dim"],
    visible: Bool[Array | np.ndarray, "*rows queries keys"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Float[Array | np.ndarray, " heads"] | None = None,
    distance: Int[Array | np.ndarray, "queries keys"] | None = None,
) -> Partial:
    """Compute attention in sequence order, in the dtype of the inputs. `visible` is the result of `mask.dense(length)`.

    A bias needs `distance`, key position minus query position, unless positions are 0, 1, 2, ….
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    heads, dim = query.shape[2:]
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        if distance is None:
            distance = np.arange(key.shape[1])[None, :] - np.arange(query.shape[1])[:, None]
        scores = scores + jax.vmap(lambda head: head.at(jnp.asarray(distance)))(bias).astype(scores.dtype)
    visible = jnp.asarray(visible).reshape(-1, 1, *scores.shape[2:])
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(jnp.asarray(sinks).astype(scores.dtype)[None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
        value = jnp.pad(value, [(0, 0), (0, 1), (0, 0), (0, 0)])
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = lax.stop_gradient(jnp.where(jnp.isneginf(top), 0, top))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    probabilities = weights / jnp.where(total == 0, 1, total)
    lse = (jnp.log(jnp.where(total == 0, 1, total)) + top)[..., 0]
    lse = jnp.where(total[..., 0] == 0, -jnp.inf, lse)
    return Partial(jnp.einsum("bhqk,bkhd->bqhd", probabilities, value), lse.transpose(0, 2, 1))

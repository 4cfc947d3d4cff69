"""Partial results: attention over some of the keys, and how to merge two of them.

Attention over all keys is the merge of the partial results over any partition of the keys. So a device can attend to
the keys of the other devices one block at a time.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


def accumulator(dtype: Any) -> Any:
    """Return the dtype in which results are accumulated: float64 for float64, otherwise float32."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


class Partial(NamedTuple):
    """Attention over some of the keys: a normalised output and the log of its normaliser (log-sum-exp)."""

    out: Float[Array, "batch queries heads dim"]
    lse: Float[Array, "batch queries heads"]


def merge(a: Partial, b: Partial) -> Partial:
    """Merge into attention over the keys of both `a` and `b`. Associative; the identity is (out 0, lse -inf)."""
    top = jnp.maximum(a.lse, b.lse)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weight_a, weight_b = jnp.exp(a.lse - top), jnp.exp(b.lse - top)
    total = weight_a + weight_b
    nothing = total == 0
    total = jnp.where(nothing, 1, total)
    out = a.out * (weight_a / total)[..., None] + b.out * (weight_b / total)[..., None]
    return Partial(out, jnp.where(nothing, -jnp.inf, top + jnp.log(total)))


def merge_all(parts: Partial) -> Partial:
    """Merge all partial results along the first dimension of both arrays."""
    top = jnp.max(parts.lse, axis=0)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weight = jnp.exp(parts.lse - top)
    total = jnp.sum(weight, axis=0)
    nothing = total == 0
    share = weight / jnp.where(nothing, 1, total)
    return Partial(jnp.sum(parts.out * share[..., None], axis=0), jnp.where(nothing, -jnp.inf, top + jnp.log(total)))


def add_sinks(part: Partial, sinks: Float[Array, " heads"] | None) -> Partial:
    """Add attention sinks: one more key per head, which every query sees and whose value is 0."""
    if sinks is None:
        return part
    lse = jnp.broadcast_to(sinks.astype(part.lse.dtype), part.lse.shape)
    return merge(part, Partial(jnp.zeros_like(part.out), lse))

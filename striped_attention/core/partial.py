"""Partial results: attention over some of the keys, and the merge that joins two of them.

Attention over all keys is the merge of attention over any parts of them. That is why keys can travel.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


def accumulator(dtype: Any) -> Any:
    """What results are added up in: float64 for float64, float32 for everything else."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


class Partial(NamedTuple):
    """Attention over some of the keys: a normalised output and the log of its normaliser. `merge` joins two."""

    out: Float[Array, "batch queries heads dim"]
    lse: Float[Array, "batch queries heads"]


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of `a` and `b` together. Associative; the identity is (out 0, lse -inf)."""
    top = jnp.maximum(a.lse, b.lse)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weight_a, weight_b = jnp.exp(a.lse - top), jnp.exp(b.lse - top)
    total = weight_a + weight_b
    nothing = total == 0
    total = jnp.where(nothing, 1, total)
    out = a.out * (weight_a / total)[..., None] + b.out * (weight_b / total)[..., None]
    return Partial(out, jnp.where(nothing, -jnp.inf, top + jnp.log(total)))


def merge_all(parts: Partial) -> Partial:
    """`merge` of as many as the first dimension of both arrays has."""
    top = jnp.max(parts.lse, axis=0)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weight = jnp.exp(parts.lse - top)
    total = jnp.sum(weight, axis=0)
    nothing = total == 0
    share = weight / jnp.where(nothing, 1, total)
    return Partial(jnp.sum(parts.out * share[..., None], axis=0), jnp.where(nothing, -jnp.inf, top + jnp.log(total)))


def add_sinks(part: Partial, sinks: Float[Array, " heads"] | None) -> Partial:
    """The partial result with one more key a head, which everybody sees and whose value is 0."""
    if sinks is None:
        return part
    lse = jnp.broadcast_to(sinks.astype(part.lse.dtype), part.lse.shape)
    return merge(part, Partial(jnp.zeros_like(part.out), lse))

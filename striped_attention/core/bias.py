"""Bias: a term added to the scores that depends on the distance between query and key.

Both forms depend only on the distance `key position - query position`, so a tile's bias is computed from its positions
and never stored:

    alibi(slopes)           -slope * |distance|                          one slope per head
    relative_bias(table)    table[bucket(distance), head]                T5's logarithmic buckets
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from striped_attention.core.annotations import checks_itself
from striped_attention.core.layout import check_whole


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bias:
    """A position bias, made by `alibi` or `relative_bias`. The first dimension of every array is heads, to be sharded.

    `slopes` is [heads]; `values` is [heads, 2m + 1], the bias at distances -m … m. Larger distances use the nearer end.
    """

    slopes: Any = None
    values: Any = None

    @property
    def heads(self) -> int:
        return (self.slopes if self.slopes is not None else self.values).shape[0]

    def at(self, distance: Int[Array, "*tile"]) -> Float[Array, "*tile"]:
        """Return the bias of one head at each distance; the arrays must have no heads dimension here."""
        if self.slopes is not None:
            return -self.slopes * jnp.abs(distance).astype(self.slopes.dtype)
        reach = self.values.shape[0] // 2
        return self.values[jnp.clip(distance, -reach, reach) + reach]


@checks_itself
def alibi(slopes: Float[Array | np.ndarray, " heads"]) -> Bias:
    """Return an ALiBi bias: a penalty proportional to distance, with one slope per head. The slopes may be learned."""
    slopes = jnp.asarray(slopes)
    if slopes.ndim != 1 or not jnp.issubdtype(slopes.dtype, jnp.floating):
        raise ValueError(
            f"alibi needs one floating-point slope per head, shape [heads]; got {slopes.dtype}{slopes.shape}."
        )
    return Bias(slopes=slopes)


@checks_itself
def relative_bias(
    table: Float[Array | np.ndarray, "buckets heads"], bidirectional: bool = False, max_distance: int = 128
) -> Bias:
    """Return T5's relative position bias: `table` is the learned weight, [buckets, heads], as T5 stores it.

    Small distances have a bucket each; larger ones share buckets that widen logarithmically up to `max_distance`. With
    `bidirectional`, half the buckets are for keys after the query (T5's encoder); without it, all such keys fall into
    bucket 0. T5 does not divide scores by √dim: pass scale=1.0 to `attention` for its models.
    """
    table = jnp.asarray(table)
    least = 4 if bidirectional else 2
    if table.ndim != 2 or table.shape[0] < least or not jnp.issubdtype(table.dtype, jnp.floating):
        raise ValueError(
            f"relative_bias needs a floating-point table of shape [buckets, heads] with at least {least} buckets; "
            f"got {table.dtype}{table.shape}."
        )
    exact = table.shape[0] // (4 if bidirectional else 2)
    if check_whole("max_distance", max_distance) <= exact:
        raise ValueError(
            f"max_distance must be larger than the {exact} distances with their own bucket; got {max_distance}."
        )
    buckets = _t5_buckets(np.arange(-max_distance, max_distance + 1), table.shape[0], bidirectional, max_distance)
    return Bias(values=table[buckets].T)


def _t5_buckets(distance: np.ndarray, buckets: int, bidirectional: bool, max_distance: int) -> np.ndarray:
    """Return the bucket of each distance (key - query) by T5's formula, evaluated in float32 as T5 does."""
    offset = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / exact) / math.log(max_distance / exact)
    far = exact + (ratio * np.float32(buckets - exact)).astype(np.int32)
    return offset + np.where(distance < exact, distance, np.minimum(far, buckets - 1))

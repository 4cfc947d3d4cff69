"""Kernel: the contract that every attention kernel keeps, whatever it is written in.

A kernel works on one *block*: the queries of one device against the keys of one device. The mask of a block is two
integer vectors, `start` and `end`: query row i sees the key slots `[start[i], end[i])`. Both never decrease with i.

    attend(q)(k, v, block)                      -> Partial(out, lse)
    attend_grad(q, out, lse, dout)(k, v, block) -> (dq, dk, dv, dbias)

The first call is made once, with what stays at home, the second once for every block: what a kernel can prepare for all
blocks it prepares in the first.

* q is [batch, queries, heads, dim]; k and v are [batch, keys, kv_heads, dim] and heads are never repeated in memory.
* `out` is normalised over the block's own keys; `lse` is the log of the sum of exponentials of their scores. Both are
  float32 whatever the inputs are (float64 for float64). A row that sees no key gives out = 0 and lse = -inf.
* `attend_grad` is given the `out` and `lse` of the *whole* row, all blocks merged: exp(score - lse) is then the final
  probability. It returns float32 gradients (the caller adds them up over blocks); a row without keys adds nothing.
* `unsupported(q, k, softcap=, bias=, mask=, layout=, devices=, tile=, padded=, platform=)` says in a sentence what a
  kernel cannot do, or None. It looks only at the shapes and dtypes of q and k. Nobody ignores an option. `platform` is
  where it is to run, None somewhere where it does.
* `FULL_OUT` says whether `attend_grad` makes use of an `out` with more digits than q has.
* `SUMS_LAST` says whether dk and dv are added up only when the next k and v are there. XLA for TPUs would else take the
  sum for work to hide a transfer behind, and begin it after attention instead of before.

Because the ranges are monotone, a row of tiles needs the key tiles from the first key that one of its queries sees to
the last one: `tile_spans`. Kernels run these tiles and no others; the plan counts them with the same function.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from striped_attention.bias import Bias
from striped_attention.layout import INT32_MAX, Layout, namespace


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


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Where the ranges of all blocks of a ring come from, if a mask is known while tracing: for kernels without ranges.

    A query sees every key or, if `causal`, those up to itself, or the last `window` of them. `own` is a block of the
    queries and keys of the same device.
    """

    layout: Layout
    devices: int
    causal: bool
    window: int | None
    own: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """All that a kernel is told besides q, k and v. `rows` is the batch, or 1 when all sequences share a mask.

    Positions serve the bias; `tile` is queries × keys, None for the kernel's own choice; `pattern` says the same as
    `start` and `end` where it is there.
    """

    start: Any  # int32 [rows, queries]
    end: Any  # int32 [rows, queries]
    query_positions: Any  # int32 [queries]
    key_positions: Any  # int32 [keys]
    bias: Any = None  # Bias | None
    pattern: Pattern | None = dataclasses.field(default=None, metadata={"static": True})
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})
    tile: tuple[int, int] | None = dataclasses.field(default=None, metadata={"static": True})


@runtime_checkable
class Kernel(Protocol):
    """What the module of a kernel has."""

    FULL_OUT: bool
    SUMS_LAST: bool
    attend: Callable[..., Callable[..., Partial]]
    attend_grad: Callable[..., Callable[..., tuple[Array, Array, Array, Bias | None]]]
    unsupported: Callable[..., str | None]


class Spans(NamedTuple):
    """Key tiles of every row of query tiles: `[first, last)` are run, `[inner_first, inner_last)` of them unmasked."""

    first: Any
    inner_first: Any
    inner_last: Any
    last: Any


def tile_spans(start: Any, end: Any, tile_q: int, tile_k: int) -> Spans:
    """The key tiles that each row of `tile_q` queries needs; `start` and `end` are [rows, queries], NumPy or JAX.

    From the first key that one of its queries sees to the last one. The last row of tiles may be shorter than others.
    """
    xp = namespace(start)
    rows, queries = start.shape
    pad = [(0, 0), (0, -queries % tile_q)]
    by_tile = lambda x: xp.pad(x, pad, mode="edge").reshape(rows, -1, tile_q)  # noqa: E731
    start, end = by_tile(start), by_tile(end)
    seeing = start < end  # a query without keys needs no tile, wherever its empty range lies
    some = seeing.any(axis=-1)
    first = xp.where(some, xp.where(seeing, start, INT32_MAX).min(axis=-1) // tile_k, 0)
    last = xp.where(some, -(-xp.where(seeing, end, 0).max(axis=-1) // tile_k), 0)
    inner_first = xp.clip(-(-start[..., -1] // tile_k), first, last)
    inner_last = xp.clip(end[..., 0] // tile_k, inner_first, last)
    return Spans(first, inner_first, inner_last, last)

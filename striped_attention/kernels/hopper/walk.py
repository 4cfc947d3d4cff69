"""Walk: the order in which a thread block visits the tiles that its queries, or its keys, need.

A work item is a tile of queries and the key tiles that some of them see (forward, dq), or a tile of keys and the query
tiles that see some of them (dk, dv). Ranges are monotone, so the tiles to visit are consecutive:

    first          inner_first                inner_last           last
      | mask needed |  every pair is visible      | mask needed     |

A walk visits the tiles at both edges first, then the inner ones: one loop with a mask and one without. Items are sorted
by their number of tiles, longest first, so that no long item starts last.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from striped_attention.kernels.tiles import Spans, tile_spans

ROWS = 64  # rows per warpgroup
TILE = 2 * ROWS  # rows per thread block
FIELDS = 8  # integers per item
SPACING = 256  # of the bounds that a search compares with first


class Walk(NamedTuple):
    """A work item: its sequence, its own tile, and the offsets from the index of a step to that of the tile to visit.

    Steps before `edge` visit the first edge, those before `masked` the second edge, those before `steps` inner tiles.
    """

    batch: Any
    own: Any
    first: Any
    edge: Any
    second: Any
    masked: Any
    inner: Any
    steps: Any

    def tile(self, step: Any, masked: bool | None = None) -> Any:
        """Return the tile of a step; cheaper if `masked` says statically whether the tile needs a mask."""
        if masked is None:
            masked = step < self.masked
        if masked is False:
            return step + self.inner
        edge = jnp.where(step < self.edge, self.first, self.second)
        return step + (edge if masked is True else jnp.where(masked, edge, self.inner))


def read(ref: Any, item: Any) -> Walk:
    """Read an item inside a kernel.

    Adding 0 makes plain values: under shard_map, values read from memory have a type that loops do not accept.
    """
    return Walk(*(ref[item * FIELDS + i] + 0 for i in range(FIELDS)))


def by_queries(start: Array, end: Array, batch: int, tile: tuple[int, int]) -> Int[Array, " numbers"]:
    """Return the work items of a block's query tiles."""
    return _items(tile_spans(start, end, *tile), batch)


def by_keys(start: Array, end: Array, keys: int, batch: int, tile: tuple[int, int]) -> Int[Array, " numbers"]:
    """Return the work items of a block's key tiles.

    Ranges are monotone: queries that start before a key are a prefix, and those that end after it are a suffix.
    """
    queries, (tile_q, tile_k) = start.shape[1], tile
    begin = jnp.arange(0, keys, tile_k, dtype=jnp.int32)
    counts = _count_before(jnp.concatenate([start, end]), jnp.concatenate([begin + 1, begin + tile_k]))
    (all_most, most), (least, all_least) = (jnp.split(half, 2, axis=1) for half in jnp.split(counts, 2))
    # Queries [least, most) may see some keys of a tile; [all_least, all_most) see all of them.
    first, last = least // tile_q, -(-most // tile_q)
    last = jnp.where(least < most, last, first)
    inner_first = jnp.clip(-(-all_least // tile_q), first, last)
    # A tile that extends past the last query is masked.
    inner_last = jnp.clip(jnp.minimum(all_most, queries) // tile_q, inner_first, last)
    return _items(Spans(first, inner_first, inner_last, last), batch)


def _count_before(bounds: Int[Array, "rows queries"], keys: Int[Array, " keys"]) -> Int[Array, "rows keys"]:
    """Return how many of each row's sorted bounds are smaller than each key.

    Two comparisons, with every 256th bound and with those up to the next: a binary search would be a loop of tiny
    kernels, and comparing with all bounds takes longer than short documents leave for it.
    """
    padding = ((0, 0), (0, -bounds.shape[1] % SPACING))
    groups = jnp.pad(bounds, padding, constant_values=np.iinfo(np.int32).max).reshape(len(bounds), -1, SPACING)
    smaller = lambda some: jnp.sum(some < keys[:, None], axis=-1, dtype=jnp.int32)  # noqa: E731
    group = jnp.maximum(smaller(groups[:, None, :, 0]) - 1, 0)
    return group * SPACING + smaller(jnp.take_along_axis(groups, group[:, :, None], axis=1))


def _items(spans: Spans, batch: int) -> Int[Array, " numbers"]:
    first, inner_first, inner_last, last = spans
    edge = inner_first - first
    masked = edge + last - inner_last
    sequence, own = jnp.arange(batch)[:, None], jnp.arange(first.shape[1])[None]
    fields = Walk(sequence, own, first, edge, inner_last - edge, masked, inner_first - masked, last - first)
    numbers = [jnp.broadcast_to(x, (batch, first.shape[1])).reshape(-1).astype(jnp.int32) for x in fields]
    longest_first = jnp.argsort(-numbers[-1], stable=True)
    return jnp.stack(numbers, axis=-1)[longest_first].reshape(-1)

"""Walk: in which order a thread block visits the tiles that its queries, or its keys, need.

An item of work is a tile of queries and the key tiles that some of them see (forward, dq), or a tile of keys and the
query tiles that see some of them (dk, dv). Ranges are monotone, so these are neighbours:

    first          inner_first                inner_last           last
      | mask needed |  every pair is visible      | mask needed     |

A walk takes the tiles at both edges first, then the inner ones: two loops, one with a mask and one without. Items are
sorted by their number of tiles, the longest first, so that no long one is left for the end.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from striped_attention.kernels.tiles import Spans, tile_spans

ROWS = 64  # of a warpgroup
TILE = 2 * ROWS  # of a thread block
FIELDS = 8  # numbers of an item


class Walk(NamedTuple):
    """An item: its sequence, its own tile, and what to add to a step's number for the number of the tile to visit.

    Steps before `edge` are at the first edge, before `masked` at the second, before `steps` inside.
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
        """The tile of a step, quicker if it is known whether that needs a mask."""
        if masked is None:
            masked = step < self.masked
        if masked is False:
            return step + self.inner
        edge = jnp.where(step < self.edge, self.first, self.second)
        return step + (edge if masked is True else jnp.where(masked, edge, self.inner))


def read(ref: Any, item: Any) -> Walk:
    """An item, inside a kernel.

    Adding 0 makes plain numbers of it: under shard_map, what is read from memory has a type that loops do not take.
    """
    return Walk(*(ref[item * FIELDS + i] + 0 for i in range(FIELDS)))


def by_queries(start: Array, end: Array, batch: int, tile: tuple[int, int]) -> Int[Array, " numbers"]:
    """The items of a block's tiles of queries."""
    return _items(tile_spans(start, end, *tile), batch)


def by_keys(start: Array, end: Array, keys: int, batch: int, tile: tuple[int, int]) -> Int[Array, " numbers"]:
    """The items of a block's tiles of keys. Whoever starts early enough comes first, whoever ends late enough last."""
    queries, (tile_q, tile_k) = start.shape[1], tile
    begin = jnp.arange(0, keys, tile_k, dtype=jnp.int32)
    # Compared with all bounds: a search would be loops of tiny kernels.
    before = lambda bounds, key: jnp.sum(bounds[:, None] < key[:, None], axis=-1, dtype=jnp.int32)  # noqa: E731
    most, least = before(start, begin + tile_k), before(end, begin + 1)  # queries [least, most) may see some keys
    all_most, all_least = before(start, begin + 1), before(end, begin + tile_k)  # [all_least, all_most) see all keys
    first, last = least // tile_q, -(-most // tile_q)
    last = jnp.where(least < most, last, first)
    inner_first = jnp.clip(-(-all_least // tile_q), first, last)
    # A tile that reaches past the last query is masked.
    inner_last = jnp.clip(jnp.minimum(all_most, queries) // tile_q, inner_first, last)
    return _items(Spans(first, inner_first, inner_last, last), batch)


def _items(spans: Spans, batch: int) -> Int[Array, " numbers"]:
    first, inner_first, inner_last, last = spans
    edge = inner_first - first
    masked = edge + last - inner_last
    sequence, own = jnp.arange(batch)[:, None], jnp.arange(first.shape[1])[None]
    fields = Walk(sequence, own, first, edge, inner_last - edge, masked, inner_first - masked, last - first)
    numbers = [jnp.broadcast_to(x, (batch, first.shape[1])).reshape(-1).astype(jnp.int32) for x in fields]
    longest_first = jnp.argsort(-numbers[-1], stable=True)
    return jnp.stack(numbers, axis=-1)[longest_first].reshape(-1)

"""Tile list: the visible tiles of a block, as the grid of a kernel.

`pallas.py` iterates over this list. An entry is a single integer, because the list is kept in a TPU's scalar memory:

    last | row (or column) of tiles | tile in it | kind
      1              14                  14          2     bits
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from striped_attention.core.layout import INT32_MAX
from striped_attention.kernels.contract import Block
from striped_attention.kernels.tiles import tile_spans

INNER, EDGE, NOTHING = range(3)  # kinds of steps: all keys visible, some, or none (zeros must be written)
_BITS = 14
_LAST = 1 << 30  # set in entries that come after all others
MOST = 2**_BITS - 2  # maximum rows or columns of tiles


class TileList(NamedTuple):
    """Tiles of a block, sorted by row (or column), then by their index in it.

    A row without visible keys has an entry too, because its results, zeros, must be written; these entries come last.
    """

    entries: Array  # each holds a row, the tile in it, and the kind of step
    steps: Array  # number of valid entries; the others are INT32_MAX
    seen: Array  # how many of these are visible tiles


def list_tiles(block: Block, rows: int, columns: int, by_columns: bool) -> TileList:
    """List the visible tiles of a block of `rows` × `columns` tiles, whose sequences share a mask."""
    assert block.tile is not None
    spans = jax.tree.map(lambda x: x[0, :, None], tile_spans(block.start, block.end, *block.tile))
    column = jnp.arange(columns, dtype=jnp.int32)[None, :]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    seen = (spans.first <= column) & (column < spans.last)
    inner = (spans.inner_first <= column) & (column < spans.inner_last)
    kind = jnp.where(inner, INNER, EDGE)
    seen, kind = (seen.T, kind.T) if by_columns else (seen, kind)
    outer, within = (column.T, row.T) if by_columns else (row, column)
    empty = ~jnp.any(seen, axis=1)
    entries = jnp.where(seen, _entry(outer, within, kind), INT32_MAX)
    blank = jnp.where(empty, _LAST | _entry(outer[:, 0], 0, NOTHING), INT32_MAX)
    total = jnp.sum(seen, dtype=jnp.int32)
    # One more entry than the maximum, so that one always follows the last valid entry.
    entries = jnp.pad(jnp.concatenate([entries.reshape(-1), blank]), (0, 1), constant_values=INT32_MAX)
    return TileList(jnp.sort(entries), total + jnp.sum(empty, dtype=jnp.int32), total)


def _entry(outer: Any, within: Any, kind: Any) -> Any:
    return (outer << (_BITS + 2)) | (within << 2) | kind


def outer_of(entry: Any) -> Any:
    return (entry >> (_BITS + 2)) & (2**_BITS - 1)


def within_of(entry: Any) -> Any:
    return (entry >> 2) & (2**_BITS - 1)


def kind_of(entry: Any) -> Any:
    return entry & 3

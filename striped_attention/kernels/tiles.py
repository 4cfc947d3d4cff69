"""Tiles: which tiles of a block run.

The ranges of a block are monotone. A row of query tiles therefore needs consecutive key tiles: from the first key that
any of its queries sees to the last. Kernels run exactly these tiles; the planner counts them with the same function.
"""

from typing import Any, NamedTuple

from striped_attention.core.layout import INT32_MAX, namespace


class Spans(NamedTuple):
    """Key tiles for each row of query tiles: `[first, last)` run, of which `[inner_first, inner_last)` run unmasked."""

    first: Any
    inner_first: Any
    inner_last: Any
    last: Any


def tile_spans(start: Any, end: Any, tile_q: int, tile_k: int) -> Spans:
    """Return the key tiles that each row of `tile_q` queries needs; `start`, `end`: [rows, queries], NumPy or JAX.

    They extend from the first key that any query of the row sees to the last. The last row of tiles may be shorter.
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

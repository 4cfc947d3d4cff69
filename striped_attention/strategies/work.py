"""Work: how many tiles each device computes, step by step, counted before anything runs.

The counts come from the functions that the ring and the kernels use themselves, on NumPy, without any device.
`count_tiles` goes through every block. `count_tile_rows` goes through every row of tiles: it handles 4,096 devices and
100 million tokens in seconds, and reports whether its counts are exact.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from striped_attention.core.layout import INT32_MAX, Layout, Stair
from striped_attention.core.mask import Mask
from striped_attention.kernels.tiles import tile_spans

Counts = Int[np.ndarray, "devices steps"]


def count_tiles(layout: Layout, mask: Mask, length: int, devices: int, tile: tuple[int, int]) -> Counts:
    """Count the tiles per head that device d (row) computes at step j (column), on the keys from j places back.

    `tile` is queries × keys. Sequences with documents of their own are summed. A step takes as long as its busiest
    device.
    """
    counts = np.zeros((devices, devices), np.int64)
    slots = layout.padded_length(length, devices) // devices
    tile_q, tile_k = (min(side, slots) for side in tile)
    for device, step, start, end in _blocks(layout, mask, length, devices):
        spans = tile_spans(start, end, tile_q, tile_k)
        counts[device, step] = np.sum(spans.last - spans.first)
    return counts


def count_pairs(layout: Layout, mask: Mask, length: int, devices: int) -> Counts:
    """Count visible pairs of a query and a key, by device and step as in `count_tiles`: the least possible work."""
    counts = np.zeros((devices, devices), np.int64)
    for device, step, start, end in _blocks(layout, mask, length, devices):
        counts[device, step] = np.sum(np.maximum(end - start, 0), dtype=np.int64)
    return counts


def _blocks(layout: Layout, mask: Mask, length: int, devices: int) -> Iterator[tuple[int, int, Any, Any]]:
    """Yield the device, the step and the ranges `start`, `end` of every block of the ring."""
    mask.check_length(length)
    mask = mask.permute(layout, devices)
    padded = layout.padded_length(length, devices)
    slots = padded // devices
    for device in range(devices):
        held = slice(device * slots, (device + 1) * slots)
        part = jax.tree.map(lambda x, held=held: np.asarray(x)[:, held], mask)
        lo, hi = part.bounds(layout.positions(device, padded, devices), length)
        for step in range(devices):
            there = (device - step) % devices
            start, end = (layout.count_before(there, x, padded, devices) for x in (lo, hi))
            yield device, step, start, end


def count_tile_rows(
    layout: Layout, mask: Mask, length: int, devices: int, tile: tuple[int, int]
) -> tuple[Counts, bool]:
    """Return the counts of `count_tiles`, and whether they are exact or upper bounds, from rows of tiles alone.

    A run of queries at consecutive positions sees one range of positions, and so one range of keys on every device:
    from the first key of its first query to the last key of its last query. If stripes are as wide as tiles, a row of
    tiles has one or two such runs. If they are narrower, it has many. Then all tiles from the first key of the first
    query to the last key of the last are counted, which may be too many, unless all queries see the sequence from its
    beginning.
    """
    mask.check_length(length)
    if mask.placed is not None:
        raise ValueError("Tiles must be counted from a mask in sequence order. Pass it as it was before mask.permute.")
    padded = layout.padded_length(length, devices)
    slots = padded // devices
    tile_q, tile_k = (min(side, slots) for side in tile)
    first = np.tile(np.arange(0, slots, tile_q, dtype=np.int32), devices)
    device = np.repeat(np.arange(devices, dtype=np.int32), len(first) // devices)
    end = np.minimum(first, slots - tile_q) + tile_q  # min first: int32 must not overflow
    filled = layout.count_before_all(np.array(length), padded, devices).value(device)  # the slots before padding
    cut = np.minimum(layout.stripe_end(first, padded, devices), end)
    exact = True
    if (layout.stripe_end(np.minimum(cut, slots - 1), padded, devices) < end).any():
        exact = mask.rule.window is None and mask.lo is None
        cut = end
    runs = [(first, cut)] if (cut == end).all() else [(first, cut), (cut, end)]
    # int32 where it suffices: half the memory, and half the time with thousands of devices.
    most = mask.rows * -(-slots // tile_q) * -(-slots // tile_k)
    counts = np.zeros((devices, devices), np.int32 if most <= INT32_MAX else np.int64)
    for row in range(mask.rows):
        seen = [_seen(layout, mask, row, length, devices, device, a, np.minimum(b, filled)) for a, b in runs]
        for where, change in _changes(seen, device, devices, tile_k):
            np.add.at(counts.reshape(-1), where, change.astype(counts.dtype))
    for step in range(1, devices):
        counts[step] += counts[step - 1]
    return counts.T, exact


def _seen(
    layout: Layout, mask: Mask, row: int, length: int, devices: int, device: np.ndarray, a: np.ndarray, b: np.ndarray
) -> tuple[Stair, Stair]:
    """Return where, on every device, the keys begin and end that queries in the slots [a, b) see together."""
    padded = layout.padded_length(length, devices)
    left, right = (layout.position(device, np.clip(x, 0, padded // devices - 1), padded, devices) for x in (a, b - 1))
    lo, hi = _bounds(mask, row, left, length)[0], _bounds(mask, row, right, length)[1]
    begin, end = (layout.count_before_all(np.where(a < b, x, 0), padded, devices) for x in (lo, hi))
    return begin, end


def _bounds(mask: Mask, row: int, positions: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `Mask.bounds` of one sequence at the given positions."""

    def pick(x: Any) -> Any:
        return None if x is None else np.asarray(x)[min(row, x.shape[0] - 1)][None, np.minimum(positions, length - 1)]

    lo, hi = dataclasses.replace(mask, lo=pick(mask.lo), hi=pick(mask.hi)).bounds(positions, length)
    return np.asarray(lo[0]), np.asarray(hi[0])


def _changes(
    seen: list[tuple[Stair, Stair]], device: np.ndarray, devices: int, tile_k: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return by how many tiles each step differs from the one before, as indices (step · devices + device) and values.

    `seen` has two stairs for every run of a row of tiles: where its keys begin and end. Between the places where a
    stair changes, neighbouring devices hold equally many visible tiles.
    """
    rises = [place for stairs in seen for stair in stairs for place in (stair.at, stair.at + 1)]
    cuts = np.stack([np.zeros_like(device), *rises, np.full_like(device, devices)])
    cuts = np.sort(np.clip(cuts, 0, devices, out=cuts), axis=0)
    changes = []
    for left, right in itertools.pairwise(cuts):
        tiles = _tiles([[stair.value(left) for stair in stairs] for stairs in seen], tile_k)
        some = np.flatnonzero((left < right) & (tiles > 0))
        here, low, high, tiles = device[some], left[some], right[some], tiles[some]
        # Keys of the devices [low, high) come at the steps (here - high, here - low]; negative steps wrap around.
        for begin, end in ((here + 1 - high, here + 1 - low), (here + 1 - high + devices, here + 1 - low + devices)):
            begin, end = np.clip(begin, 0, devices), np.clip(end, 0, devices)
            for step, sign in ((begin, 1), (end, -1)):
                within = np.flatnonzero((begin < end) & (step < devices))
                changes.append((step[within] * devices + here[within], sign * tiles[within]))
    return changes


def _tiles(ranges: list[list[np.ndarray]], tile_k: int) -> np.ndarray:
    """Count the tiles from the first key that any run sees to the last one; runs that see no key are ignored."""
    first = np.minimum.reduce([np.where(start < end, start, INT32_MAX) for start, end in ranges])
    last = np.maximum.reduce([np.where(start < end, end, 0) for start, end in ranges])
    return np.where(last > 0, -(-last // tile_k) - first // tile_k, 0)

"""Plan: how much work each device has, step by step, before anything runs.

The counts come from the functions that the ring and the kernels use themselves, on NumPy, without any device.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from striped_attention.kernel import tile_spans
from striped_attention.layout import Layout
from striped_attention.mask import Mask

Counts = Int[np.ndarray, "devices steps"]


def count_tiles(layout: Layout, mask: Mask, length: int, devices: int, tile: tuple[int, int]) -> Counts:
    """Tiles (queries × keys) that device d (row) runs at step j (column), on the keys from j places back; per head.

    Sequences with documents of their own add up. A step takes as long as its busiest device.
    """
    counts = np.zeros((devices, devices), np.int64)
    slots = layout.padded_length(length, devices) // devices
    tile_q, tile_k = (min(side, slots) for side in tile)
    for device, step, start, end in _blocks(layout, mask, length, devices):
        spans = tile_spans(start, end, tile_q, tile_k)
        counts[device, step] = np.sum(spans.last - spans.first)
    return counts


def count_pairs(layout: Layout, mask: Mask, length: int, devices: int) -> Counts:
    """Visible pairs of a query and a key, counted like `count_tiles`: the least work there is."""
    counts = np.zeros((devices, devices), np.int64)
    for device, step, start, end in _blocks(layout, mask, length, devices):
        counts[device, step] = np.sum(np.maximum(end - start, 0), dtype=np.int64)
    return counts


def _blocks(layout: Layout, mask: Mask, length: int, devices: int) -> Iterator[tuple[int, int, Any, Any]]:
    """Device, step, and the ranges `start`, `end` of every block of the ring."""
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

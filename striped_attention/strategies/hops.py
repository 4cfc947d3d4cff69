"""Hops: from how many places back a ring's keys are needed, under the part of a mask that is known while tracing.

The ring makes these hops, and the planner counts them.
"""

import functools
import itertools

import numpy as np

from striped_attention.core.layout import Layout
from striped_attention.core.mask import Mask


@functools.lru_cache(maxsize=256)
def needed_hops(
    layout: Layout, window: int | None, prefix: int | None, length: int, padded_length: int, devices: int
) -> tuple[int, ...]:
    """The offsets at which some device sees some key, in order; the first is 0, a device's own keys.

    Queries of a stripe see a range of positions together, from what the first one sees to what the last one sees, and
    on which devices these lie, `count_before_all` says for all devices at once. Stripes of a few rounds stand for all
    (`sample_stripes`): farther ones see no other devices. So this takes a few numbers for each device.
    """
    mask = Mask(window=window, prefix=prefix)
    here, first, last = layout.sample_stripes(padded_length, devices)
    real = first < length
    here, first, last = here[real], first[real], np.minimum(last[real], length - 1)
    lo, hi = mask.bounds(first, length)[0][0], mask.bounds(last, length)[1][0]
    begin, end = (layout.count_before_all(np.asarray(x), padded_length, devices) for x in (lo, hi))
    places = [place for stair in (begin, end) for place in (stair.at, stair.at + 1)]
    cuts = np.sort(np.clip([np.zeros_like(here), *places, np.full_like(here, devices)], 0, devices), axis=0)
    changes = np.zeros(2 * devices + 1, np.int64)  # by how many sights an offset has more than the one before
    for left, right in itertools.pairwise(cuts):
        seen = (left < right) & (begin.value(left) < end.value(left))
        # Keys of the devices [left, right) come from here - right + 1 to here - left places back.
        nearest = here[seen] - right[seen] + 1 + devices
        np.add.at(changes, nearest, 1)
        np.add.at(changes, nearest + (right - left)[seen], -1)
    sights = np.cumsum(changes)[:-1].reshape(2, devices).sum(axis=0)
    return (0, *(int(offset) for offset in np.flatnonzero(sights) if offset > 0))

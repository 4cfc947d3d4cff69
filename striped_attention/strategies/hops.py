"""Hops: how many places back the keys that a ring needs lie, given the part of the mask that is known at trace time.

The ring makes these hops, and the planner counts them.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from striped_attention.core.layout import Layout
from striped_attention.core.mask import Mask, Rule


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring of `size` groups of devices. Neighbours are `stride` groups apart; keys are needed from `offsets` back.

    In a double ring of 2 nodes × 4 groups, groups 0 to 3 and 4 to 7 are inner rings (size 4, stride 1), and the outer
    rings (size 2, stride 4) join group 0 with 4, 1 with 5, and so on.
    """

    size: int
    stride: int
    offsets: tuple[int, ...]

    def shift(self, group: Any, places: Any) -> Any:
        """Return the group that lies `places` further along the ring."""
        place = group // self.stride % self.size
        return group + ((place + places) % self.size - place) * self.stride


def make_rings(inner: int, offsets: tuple[int, ...], groups: int) -> tuple[Ring, ...]:
    """Return the rings that keys travel, the outer one first: one, or a double ring with inner rings of `inner` groups.

    If a mask such as a window makes some hops unnecessary, so that `needed_hops` returns fewer `offsets`, a single ring
    is used, because it makes fewer hops.
    """
    if 1 < inner < groups and len(offsets) == groups:
        outer = groups // inner
        return Ring(outer, inner, offsets[:outer]), Ring(inner, 1, offsets[:inner])
    return (Ring(groups, 1, offsets),)


@functools.lru_cache(maxsize=256)
def needed_hops(layout: Layout, rule: Rule, length: int, padded_length: int, devices: int) -> tuple[int, ...]:
    """Return the offsets at which some device sees some key, in order; the first is 0, a device's own keys.

    The queries of a stripe together see one range of positions, from the first key of the first query to the last key
    of the last. `count_before_all` gives the devices that hold this range, for all devices at once. The stripes of a
    few rounds (`sample_stripes`) represent all: the others add no offsets. So the cost is a few integers per device.
    """
    mask = Mask(rule)
    here, first, last = layout.sample_stripes(padded_length, devices)
    real = first < length
    here, first, last = here[real], first[real], np.minimum(last[real], length - 1)
    lo, hi = mask.bounds(first, length)[0][0], mask.bounds(last, length)[1][0]
    begin, end = (layout.count_before_all(np.asarray(x), padded_length, devices) for x in (lo, hi))
    places = [place for stair in (begin, end) for place in (stair.at, stair.at + 1)]
    cuts = np.sort(np.clip([np.zeros_like(here), *places, np.full_like(here, devices)], 0, devices), axis=0)
    changes = np.zeros(2 * devices + 1, np.int64)  # how many more blocks are visible than at the offset before
    for left, right in itertools.pairwise(cuts):
        seen = (left < right) & (begin.value(left) < end.value(left))
        # Keys of the devices [left, right) come from here - right + 1 to here - left places back.
        nearest = here[seen] - right[seen] + 1 + devices
        np.add.at(changes, nearest, 1)
        np.add.at(changes, nearest + (right - left)[seen], -1)
    sights = np.cumsum(changes)[:-1].reshape(2, devices).sum(axis=0)
    return (0, *(int(offset) for offset in np.flatnonzero(sights) if offset > 0))

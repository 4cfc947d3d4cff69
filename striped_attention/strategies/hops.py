"""Hops: how many places back the keys lie that a ring needs, under the part of a mask that is known while tracing.

The ring makes these hops, and the planner counts them.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from striped_attention.core.layout import Layout
from striped_attention.core.mask import Mask


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring of `size` groups of devices. Neighbours are `stride` groups apart; keys are needed at `offsets` back.

    In a double ring of 2 nodes × 4 groups, groups 0 to 3 and 4 to 7 are inner rings (size 4, stride 1), and the outer
    rings (size 2, stride 4) join group 0 with 4, 1 with 5, and so on.
    """

    size: int
    stride: int
    offsets: tuple[int, ...]

    def shift(self, group: Any, places: Any) -> Any:
        """The group that lies `places` further along the ring."""
        place = group // self.stride % self.size
        return group + ((place + places) % self.size - place) * self.stride


def make_rings(
    inner: int, layout: Layout, window: int | None, prefix: int | None, length: int, padded_length: int, groups: int
) -> tuple[Ring, ...]:
    """The rings that keys travel, the outer one first: one, or a double ring with inner rings of `inner` groups.

    A mask that some groups need no keys for, such as a window, makes fewer hops in a single ring.
    """
    offsets = needed_hops(layout, window, prefix, length, padded_length, groups)
    if 1 < inner < groups and len(offsets) == groups:
        outer = groups // inner
        return Ring(outer, inner, offsets[:outer]), Ring(inner, 1, offsets[:inner])
    return (Ring(groups, 1, offsets),)


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

"""Choice: which strategy `strategy="auto"` takes, by how long each would be.

`assess` counts the tiles of every device and step as the kernels would run them, turns them into seconds with what is
known of kernels and hardware, and lets transfers run beside them. The planner asks it too.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from striped_attention.core.layout import Layout
from striped_attention.core.mask import Mask, packed
from striped_attention.kernels import choice as kernels
from striped_attention.kernels.contract import Request
from striped_attention.runtime.hardware import hardware_of
from striped_attention.strategies.strategy import AUTO, RING, Strategy, candidates, resolve
from striped_attention.strategies.timeline import Timeline, passes, tile_flops
from striped_attention.strategies.work import Counts, count_tile_rows, count_tiles
from striped_attention.strategies.workload import Workload, adapted

Option = TypeVar("Option")
AFFORDABLE = 2**25  # devices × tokens that are counted block by block where rows of tiles are not enough
CLOSE = 0.01  # a difference in time that is no reason to leave a simpler strategy


@dataclasses.dataclass(frozen=True, eq=False)
class Assessment:
    """What a layer's attention would be.

    `tiles` are of one head, by device and step, and no more than these if not `exact` (gathered ones: about these); the
    ring leaves out the steps that are not `needed`. `waiting` is the part of attention's time in which the mean device
    does not compute; `hidden` says whether no step waits for the interconnect alone.
    """

    workload: Workload
    chosen: kernels.Choice
    tiles: Counts
    exact: bool
    needed: np.ndarray
    forward_seconds: float
    backward_seconds: float
    waiting: float
    hidden: bool

    @property
    def layout(self) -> Layout:
        return self.workload.plain.layout

    @property
    def strategy(self) -> Strategy:
        return self.workload.strategy

    @property
    def kernel(self) -> str:
        return self.chosen.name

    @property
    def attention_seconds(self) -> float:
        """Of one layer, forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def flops(self) -> np.ndarray:
        """What every device computes at every step, of one layer forward, in whole tiles; backward 2.5 times that."""
        return self.tiles * float(tile_flops(self.workload, self.chosen.tile))

    @property
    def critical_path(self) -> int:
        """Tiles of the busiest device, added up over the steps; per head."""
        return int(self.tiles.max(axis=0).sum(dtype=np.int64))

    @property
    def imbalance(self) -> float:
        """The critical path over the mean device's tiles: 1 if all steps are shared equally."""
        return self.critical_path * len(self.tiles) / max(1, int(self.tiles.sum(dtype=np.int64)))

    def timelines(self) -> tuple[Timeline, Timeline]:
        """The forward and the backward pass, step by step; worked out anew, for they are large."""
        forward, backward = passes(self.workload, self.chosen, self.tiles, self.needed)
        return forward.timeline(), backward.timeline()


class TileCount:
    """Tiles of a mask by layout, devices and tile, each counted once, and whether that is exact."""

    def __init__(self, mask: Mask, length: int, affordable: int | None = None) -> None:
        self.mask, self.length = mask, length
        self.affordable = AFFORDABLE if affordable is None else affordable
        self.known: dict[Any, tuple[Counts, bool]] = {}

    def __call__(self, layout: Layout, devices: int, tile: tuple[int, int]) -> tuple[Counts, bool]:
        key = (layout, devices, tile)
        if key not in self.known:
            tiles, exact = count_tile_rows(layout, self.mask, self.length, devices, tile)
            if not exact and devices * self.length <= self.affordable:
                tiles, exact = count_tiles(layout, self.mask, self.length, devices, tile), True
            self.known[key] = tiles, exact
        return self.known[key]


def assess(workload: Workload, count: TileCount) -> Assessment:
    """What a layer's attention would be; raises NotImplementedError if the kernel that is asked for cannot do it."""
    request, strategy = workload.request, workload.strategy
    chosen = kernels.fastest(workload.kernel, request)
    tiles, exact = count(request.layout, request.devices, chosen.tile)
    if strategy.gather > 1:
        tiles, exact = _gathered(tiles, strategy.gather), False
    both = passes(workload, chosen, tiles, needed := workload.needed())
    forward, backward = (one.seconds() for one in both)
    mean, most = both[0].tiles.mean(axis=1), both[0].tiles.max(axis=1)
    return Assessment(
        workload=workload,
        chosen=chosen,
        tiles=tiles,
        exact=exact,
        needed=needed,
        forward_seconds=forward,
        backward_seconds=backward,
        waiting=max(0.0, 1 - sum(one.mean_work(mean) for one in both) / (forward + backward)),
        hidden=all(one.is_hidden(most) for one in both),
    )


def _gathered(tiles: Counts, gather: int) -> Int[np.ndarray, "devices groups"]:
    """Tiles by group of keys, that many devices in each, from tiles by device of keys: about so many.

    The keys that a row of tiles sees are as many, but lie together: their ends are rounded to tiles once, not on each.
    """
    devices = len(tiles)
    groups = devices // gather
    if groups == 1:
        return tiles.sum(axis=1, keepdims=True, dtype=tiles.dtype)
    found = np.zeros((devices, groups), tiles.dtype)
    for member in range(gather):
        # Of a group's member, the keys from j places back lie (gather - 1 - member + j) // gather groups back.
        aligned = np.roll(tiles[member::gather], gather - 1 - member, axis=1)
        found[member::gather] = aligned.reshape(groups, groups, gather).sum(axis=2)
    return found


def choose_strategy(
    asked: Any, request: Request, kernel: str = "auto", *, neighbours: int | None = None, forward_only: bool = False
) -> Strategy:
    """The strategy that is asked for; for "auto" the fastest of those that fit in memory.

    `request` is what a ring asks of a kernel. So many consecutive `neighbours` share a fast interconnect; by default as
    many as a node or pod has. Documents are known only when the program runs, so lengths as `striped plan` draws them
    are taken. What "auto" took, and why, is logged at level INFO; if nothing is planned to fit, it is a warning.
    """
    log = logging.getLogger("striped_attention")
    if isinstance(asked, str) and asked == AUTO:
        if request.devices == 1:
            return RING
        found, why, fits = _fastest(request, kernel, forward_only, neighbours)
        log.log(logging.INFO if fits else logging.WARNING, "strategy='auto' takes %s: %s", found, why)
        return found
    wanted = resolve(asked, request.devices, request.heads)
    found = adapted(wanted, request)
    if found != wanted:
        log.info("strategy %s is %s here: what it adds to that, neither the mask nor the devices need", wanted, found)
    return found


def fastest_that_fits(
    options: list[Option], seconds: Callable[[Option], float], memory: Callable[[Option], int], usable: float
) -> Option:
    """The fastest of those that fit in a device's memory; if none does, what needs least of it.

    Options come with the simplest one first, and it is taken where others are planned to be hardly faster.
    """
    fitting = [one for one in options if memory(one) <= usable]
    if not fitting:
        return min(options, key=memory)
    least = min(map(seconds, fitting))
    return next(one for one in fitting if seconds(one) <= (1 + CLOSE) * least)


@functools.lru_cache(maxsize=1024)
def _fastest(request: Request, kernel: str, forward_only: bool, neighbours: int | None) -> tuple[Strategy, str, bool]:
    """The strategy to take, why, and whether it is planned to fit in memory."""
    hardware = hardware_of(request.platform, request.device_kind)
    if neighbours is not None:
        hardware = dataclasses.replace(hardware, group=neighbours)
    mask = Mask(window=request.window, prefix=request.prefix)
    if request.documents:
        mask = mask & packed(request.length)
    count = TileCount(mask, request.length, affordable=0)  # while a program is traced, estimates must do
    seconds: dict[Strategy, float] = {}
    memory: dict[Strategy, int] = {}
    found = candidates(request.devices, request.heads, hardware.group)
    for strategy in dict.fromkeys(adapted(one, request) for one in found):
        workload = Workload(request, mask, hardware, strategy, kernel)
        if kernel != "auto" and kernels.refusal(kernel, workload.request) is not None:
            continue
        times = assess(workload, count)
        seconds[strategy] = times.forward_seconds if forward_only else times.attention_seconds
        memory[strategy] = workload.messages.memory
    if not seconds:
        return RING, f"kernel {kernel!r} can do none", True
    fitting = [strategy for strategy in seconds if memory[strategy] <= hardware.usable]
    best = fastest_that_fits(list(seconds), seconds.__getitem__, memory.__getitem__, hardware.usable)
    each = ", ".join(
        f"{strategy} {time:.3g} s{'' if strategy in fitting else ' (does not fit in memory)'}"
        for strategy, time in seconds.items()
    )
    why = f"planned for a layer's attention on {request.devices} × {hardware.name}: {each}"
    if not fitting:
        why = (
            f"none fits in the {hardware.usable / 1e9:.3g} GB of a device, and this one needs least, "
            f"{memory[best] / 1e9:.3g} GB. Use more devices or shorter sequences. What was {why}"
        )
    return best, why, bool(fitting)

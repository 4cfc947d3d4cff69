"""Choice: which strategy `strategy="auto"` takes, by estimated time.

`assess` counts the tiles that the kernels would compute on every device at every step, converts them to seconds with
the known rates of kernels and hardware, and overlaps transfers with computation. The planner uses it too.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from striped_attention.core.layout import Layout
from striped_attention.core.mask import Mask, causal, packed
from striped_attention.kernels import choice as kernels
from striped_attention.kernels.contract import Request
from striped_attention.runtime.hardware import hardware_of
from striped_attention.strategies.strategy import AUTO, RING, Strategy, candidates, resolve
from striped_attention.strategies.timeline import Timeline, passes, tile_flops
from striped_attention.strategies.work import Counts, count_tile_rows, count_tiles
from striped_attention.strategies.workload import Workload, adapted

Option = TypeVar("Option")
AFFORDABLE = 2**25  # devices × tokens up to which tiles are counted block by block if rows of tiles are not exact
CLOSE = 0.01  # relative difference in time that does not justify a less simple strategy


@dataclasses.dataclass(frozen=True, eq=False)
class Assessment:
    """The estimated cost of one layer's attention.

    `tiles` are per head, by device and step; an upper bound unless `exact` (with gathered keys: an estimate). The ring
    skips the steps that are not `needed`. `waiting` is the fraction of attention's time in which the mean device is
    idle; `hidden` is true if no step's transfer takes longer than the busiest device's computation.
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
        """Seconds of one layer's attention, forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def flops(self) -> np.ndarray:
        """FLOPs of one layer's forward pass by device and step, in whole tiles; × 2.5 in the backward pass."""
        return self.tiles * float(tile_flops(self.workload, self.chosen.tile))

    @property
    def critical_path(self) -> int:
        """Tiles per head of the busiest device of each step, summed over the steps."""
        return int(self.tiles.max(axis=0).sum(dtype=np.int64))

    @property
    def imbalance(self) -> float:
        """The critical path divided by the mean device's tiles: 1 if every step is balanced."""
        return self.critical_path * len(self.tiles) / max(1, int(self.tiles.sum(dtype=np.int64)))

    def timelines(self) -> tuple[Timeline, Timeline]:
        """Compute the forward and the backward pass step by step; not stored, because they are large."""
        forward, backward = passes(self.workload, self.chosen, self.tiles, self.needed)
        return forward.timeline(), backward.timeline()


class TileCount:
    """Count a mask's tiles for a layout, devices and tile, and report whether that is exact. Results are cached."""

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
    """Estimate a layer's attention; raise NotImplementedError if the requested kernel does not support it."""
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
    """Estimate the tiles by group of `gather` devices whose keys are gathered, from the tiles by device.

    This is approximate: a row of tiles sees the same keys, but gathered keys are contiguous, so their ends are rounded
    to tiles once per group, not once per device.
    """
    devices = len(tiles)
    groups = devices // gather
    if groups == 1:
        return tiles.sum(axis=1, keepdims=True, dtype=tiles.dtype)
    found = np.zeros((devices, groups), tiles.dtype)
    for member in range(gather):
        # For this member of a group, the keys from j places back lie (gather - 1 - member + j) // gather groups back.
        aligned = np.roll(tiles[member::gather], gather - 1 - member, axis=1)
        found[member::gather] = aligned.reshape(groups, groups, gather).sum(axis=2)
    return found


def choose_strategy(
    asked: Any, request: Request, kernel: str = "auto", *, neighbours: int | None = None, forward_only: bool = False
) -> Strategy:
    """Return the requested strategy; for "auto", the fastest of those that fit in memory.

    `request` is what a ring would ask of a kernel. `neighbours` consecutive devices share a fast interconnect; by
    default as many as a node or pod has. Documents are known only at run time, so "auto" assumes document lengths
    sampled as in `striped plan`. It logs its choice and the reason at level INFO, or as a warning if no strategy is
    expected to fit.
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
        log.info("strategy %s is reduced to %s: this mask and these devices do not need the rest", wanted, found)
    return found


def fastest_that_fits(
    options: list[Option], seconds: Callable[[Option], float], memory: Callable[[Option], int], usable: float
) -> Option:
    """Return the fastest option that fits in a device's memory; if none fits, the one that needs the least.

    Options are sorted, the simplest first. A simpler one is preferred if it is expected to be at most 1% slower.
    """
    fitting = [one for one in options if memory(one) <= usable]
    return as_fast(fitting, seconds)[0] if fitting else min(options, key=memory)


def as_fast(options: list[Option], seconds: Callable[[Option], float]) -> list[Option]:
    """Return the options that are expected to be at most 1% slower than the fastest, in their order."""
    least = min(map(seconds, options), default=0.0)
    return [one for one in options if seconds(one) <= (1 + CLOSE) * least]


@functools.lru_cache(maxsize=1024)
def _fastest(request: Request, kernel: str, forward_only: bool, neighbours: int | None) -> tuple[Strategy, str, bool]:
    """Return the strategy to take, the reason, and whether it is expected to fit in memory."""
    hardware = hardware_of(request.platform, request.device_kind)
    if neighbours is not None:
        hardware = dataclasses.replace(hardware, group=neighbours)
    mask = Mask(request.rule)
    if "documents" in request.made:  # not known here: documents of the usual lengths, or causal ranges
        mask = mask & packed(request.length)
    elif "ranges" in request.made:
        mask = mask & causal()
    count = TileCount(mask, request.length, affordable=0)  # estimates, to keep tracing fast
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
        return RING, f"kernel {kernel!r} supports none of the strategies", True
    fitting = [strategy for strategy in seconds if memory[strategy] <= hardware.usable]
    best = fastest_that_fits(list(seconds), seconds.__getitem__, memory.__getitem__, hardware.usable)
    each = ", ".join(
        f"{strategy} {time:.3g} s{'' if strategy in fitting else ' (does not fit in memory)'}"
        for strategy, time in seconds.items()
    )
    why = f"estimated for one layer's attention on {request.devices} × {hardware.name}: {each}"
    if not fitting:
        why = (
            f"none fits in the {hardware.usable / 1e9:.3g} GB of a device, and this one needs the least, "
            f"{memory[best] / 1e9:.3g} GB. Use more devices or shorter sequences. Times {why}"
        )
    return best, why, bool(fitting)

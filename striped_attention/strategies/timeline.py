"""Timeline: when the steps of a ring begin and end, from the tiles of every device and step and from hardware figures.

A device begins a step when it has ended the one before; then it sends and computes. It ends the step when its
computation and its own transfer are done. A transfer needs both neighbours to have begun the step:

    end(d, j) = max(begin(d, j) + work(d, j), max over d-1, d, d+1 of begin(·, j) + transfer(j))
"""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from striped_attention.kernels.choice import Choice
from striped_attention.kernels.rates import BACKWARD, Rate
from striped_attention.strategies.messages import FLOAT32
from striped_attention.strategies.work import Counts
from striped_attention.strategies.workload import Workload


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """One pass of one layer's attention, in seconds by device (row) and step (column).

    `begin` is when a device begins a step, `work` how long it computes. By step, `transfer` is how long the
    interconnect takes, and `sent` the bytes per device. The backward pass has one more column: its first and last steps
    are halves of a device's own block.
    """

    begin: np.ndarray
    work: np.ndarray
    transfer: np.ndarray
    sent: np.ndarray
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """A pass over the ring: the block (row of `tiles`, [blocks, devices]) computed at each step, and the bytes sent.

    A device computes a block in tiles · per_tile + per_step seconds, times `part` if only part of it is computed.
    """

    tiles: np.ndarray
    block: np.ndarray
    part: np.ndarray
    per_tile: float
    per_step: float
    sent: np.ndarray
    interconnect: float
    exposed: float = 0.0  # seconds of transfers that nothing overlaps with
    latency: float = 0.0  # fixed seconds of a step's messages, on top of bytes / bandwidth

    def work(self, tiles: np.ndarray, step: Any) -> np.ndarray:
        return (tiles * self.per_tile + self.per_step) * self.part[step]

    def mean_work(self, mean: np.ndarray) -> float:
        """Return the seconds that the mean device computes, given its tiles of every block."""
        return float(self.work(mean[self.block], slice(None)).sum())

    @property
    def transfer(self) -> np.ndarray:
        """Seconds that each step's messages take."""
        return self.sent / self.interconnect + self.latency * (self.sent > 0)

    def is_hidden(self, most: np.ndarray) -> bool:
        """Return whether no transfer takes longer than the busiest device, given its tiles of every block."""
        return bool((self.transfer <= self.work(most[self.block], slice(None))).all())

    def begins(self) -> Iterator[np.ndarray]:
        """Yield when the devices begin each step and, last, when they end, by the formula above."""
        now = np.zeros(self.tiles.shape[1])
        for step, (block, transfer) in enumerate(zip(self.block, self.transfer, strict=True)):
            yield now
            circle = np.concatenate([now[-1:], now, now[:1]])
            together = np.maximum(np.maximum(circle[:-2], circle[2:]), now)
            now = np.maximum(now + self.work(self.tiles[block], step), together + transfer)
        yield now

    def seconds(self) -> float:
        """Return how long the pass takes."""
        return float(collections.deque(self.begins(), maxlen=1).pop().max()) + self.exposed

    def timeline(self) -> Timeline:
        *begins, ends = self.begins()
        work = np.stack([self.work(self.tiles[block], step) for step, block in enumerate(self.block)], axis=1)
        seconds = float(ends.max()) + self.exposed
        return Timeline(np.stack(begins, axis=1), work, self.transfer, self.sent, seconds)


def tile_flops(workload: Workload, tile: tuple[int, int]) -> int:
    """Return the forward FLOPs of a tile for all heads, and for all sequences unless each has its own documents."""
    request = workload.request
    area = min(tile[0], request.queries) * min(tile[1], request.queries)
    return 4 * area * request.heads * request.dim * (request.batch // workload.mask.rows)


def _all_to_all_seconds(workload: Workload) -> float:
    """Return how long a pass exchanges heads for tokens and back: two exchanges, over all links at once."""
    hardware, messages = workload.hardware, workload.messages
    if workload.strategy.heads == 1:
        return 0.0
    _, far = messages.slow(hardware.group)
    seconds = max((messages.all_to_all - far) / hardware.interconnect, far / hardware.far_interconnect)
    return seconds + 2 * workload.latency_of(workload.strategy.heads)


def passes(workload: Workload, chosen: Choice, tiles: Counts, needed: np.ndarray) -> tuple[Pass, Pass]:
    """Return the forward and backward pass of a layer's attention with the chosen kernel, over the needed steps."""
    hardware, rates, messages, strategy = workload.hardware, chosen.rates, workload.messages, workload.strategy
    blocks = np.ascontiguousarray(tiles.T if needed.all() else tiles.T[needed])
    wide = rates.widening(messages.dim)
    hops = len(blocks) - 1

    def make(rate: Rate, factor: float, order: list[int], part: list[float], sent: list[float], exposed: float) -> Pass:
        per_tile = factor * wide * tile_flops(workload, chosen.tile) / (rate.efficiency * hardware.peak)
        per_step = rate.query_bytes * messages.queries / hardware.bandwidth + rate.seconds
        per_step += rate.merging if hops else 0.0
        where = np.array(order), np.array(part), per_tile, per_step, np.array(sent), workload.interconnect
        return Pass(blocks, *where, exposed, workload.latency)

    again = 2 if workload.again else 1
    more = FLOAT32 / messages.width  # gradients of keys and values are float32
    all_to_all = _all_to_all_seconds(workload)
    # Gathered keys of a step, in bytes that would take the ring's interconnect equally long. Those of the first group
    # of heads have nothing to overlap with, nor, in the backward pass, do the sums of the last. XLA for TPUs overlaps
    # none of it, and turns a reduce-scatter into an all-reduce with twice the bytes (docs/tpu.md).
    overlaps = hardware.platform != "tpu"
    gathered = 0.0
    if strategy.gather > 1:
        gathered = messages.gather / (messages.hops + 1) * workload.interconnect / workload.gather_bandwidth
    share = 1 / messages.groups if overlaps else 1.0
    wait = gathered * share / workload.interconnect
    wait += workload.latency_of(strategy.group) if strategy.gather > 1 else 0.0
    sums = more if overlaps else 2 * more
    kv = float(messages.hop)
    order = list(range(hops + 1))
    if not hops:
        behind = gathered * (1 - share)
        forward = make(rates.forward, 1.0, order, [1.0], [behind], all_to_all + wait)
        exposed = again * all_to_all + wait * (1 + sums)
        return forward, make(rates.backward, BACKWARD, order, [1.0], [behind * (1 + more)], exposed)
    # Keys that hop are gathered next, the first group of heads in the same step.
    step = max(kv + gathered * share, gathered) if overlaps else kv
    waits = wait if overlaps else wait * (hops + 1)
    forward = make(rates.forward, 1.0, order, [1.0] * len(order), [step] * hops + [0.0], all_to_all + waits)
    halves = [0.5, *[1.0] * hops, 0.5]
    sent = [step * (i < hops) + step * more * (i > 1) for i in range(hops + 2)]
    # In the backward pass, a double ring's first hop to the next node has nothing to overlap with.
    late = (
        kv / hardware.far_interconnect
        if workload.interconnect != workload.interconnect_of(workload.plain.devices)
        else 0.0
    )
    exposed = again * all_to_all + waits * (1 + sums) + late
    return forward, make(rates.backward, BACKWARD, [*order, 0], halves, sent, exposed)

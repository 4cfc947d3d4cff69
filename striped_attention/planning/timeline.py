"""Timeline: a ring's steps in time, from the tiles of every device and step and what is known of the hardware.

A device begins a step when it has ended the one before; then it sends, and computes. It ends the step when it has
computed and when its own transfer is done, which needs both neighbours to have begun theirs:

    end(d, j) = max(begin(d, j) + work(d, j), max over d-1, d, d+1 of begin(·, j) + transfer(j))
"""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from striped_attention.core.layout import BASELINE, Layout
from striped_attention.core.mask import Mask
from striped_attention.kernels.choice import Choice
from striped_attention.kernels.rates import BACKWARD, Rate
from striped_attention.models.llama import ModelConfig
from striped_attention.planning.cost import FLOAT32, Messages
from striped_attention.planning.work import Counts
from striped_attention.runtime.hardware import Hardware
from striped_attention.strategies.ring import sends_backward
from striped_attention.strategies.strategy import RING, Strategy

LATENCY = 20e-6  # seconds of an exchange besides its bytes; assumed


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a plan was asked for, and a layout for it. Also all that `cost.estimate` wants to know."""

    devices: int
    sequence_length: int
    mask: Mask
    hardware: Hardware
    model: ModelConfig
    batch: int = 1
    kernel: str = "auto"
    layout: Layout = BASELINE
    remat: str = "attention"
    chunk: int = 8192
    strategy: Strategy = RING

    @property
    def dtype(self) -> str:
        return "float32" if self.hardware.platform == "cpu" else "bfloat16"

    def make_layout(self, devices: int) -> Layout:
        return self.layout

    def make_strategy(self, devices: int) -> Strategy:
        return self.strategy

    @property
    def slots(self) -> int:
        """Tokens of a device, padding included."""
        return self.layout.padded_length(self.sequence_length, self.devices) // self.devices

    @property
    def messages(self) -> Messages:
        tokens, width = self.batch * self.slots, jnp.dtype(self.dtype).itemsize
        return Messages(self.model, self.strategy, self.devices, tokens, width)

    @property
    def hop_bytes(self) -> int:
        """What a device sends of keys and values at once."""
        return self.messages.hop

    @property
    def wire(self) -> float:
        """Bytes per second of the slowest hop."""
        return self.wire_of(self.devices)

    def wire_of(self, neighbours: int) -> float:
        """Bytes per second among so many neighbours."""
        return self.hardware.wire if neighbours <= self.hardware.group else self.hardware.far_wire


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """One pass of one layer's attention: seconds by device (row) and step (column).

    `begin` is when a device begins a step, `work` how long it computes; `transfer` (by step) is what the wire takes,
    `sent` the bytes on it. The backward pass has a column more: its first and last are halves of a device's own block.
    """

    begin: np.ndarray
    work: np.ndarray
    transfer: np.ndarray
    sent: np.ndarray
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """A pass over the ring: which blocks (rows of `tiles`, [blocks, devices]) are done step by step, and what is sent.

    A device computes a block for tiles · per_tile + per_step seconds, and `part` of that if only part of it is done.
    """

    tiles: np.ndarray
    block: np.ndarray
    part: np.ndarray
    per_tile: float
    per_step: float
    sent: np.ndarray
    wire: float
    exposed: float = 0.0  # seconds of transfers that nothing hides

    def work(self, tiles: np.ndarray, step: Any) -> np.ndarray:
        return (tiles * self.per_tile + self.per_step) * self.part[step]

    def mean_work(self, mean: np.ndarray) -> float:
        """Seconds that the mean device computes, if it has this many tiles of every block."""
        return float(self.work(mean[self.block], slice(None)).sum())

    def is_hidden(self, most: np.ndarray) -> bool:
        """Whether the wire is never slower than the busiest device, which has this many tiles of every block."""
        return bool((self.sent / self.wire <= self.work(most[self.block], slice(None))).all())

    def begins(self) -> Iterator[np.ndarray]:
        """When the devices begin each step and, last, when they end; see above."""
        now = np.zeros(self.tiles.shape[1])
        for step, (block, sent) in enumerate(zip(self.block, self.sent, strict=True)):
            yield now
            circle = np.concatenate([now[-1:], now, now[:1]])
            together = np.maximum(np.maximum(circle[:-2], circle[2:]), now)
            now = np.maximum(now + self.work(self.tiles[block], step), together + sent / self.wire)
        yield now

    def seconds(self) -> float:
        """How long the pass takes."""
        return float(collections.deque(self.begins(), maxlen=1).pop().max()) + self.exposed

    def timeline(self) -> Timeline:
        *begins, ends = self.begins()
        work = np.stack([self.work(self.tiles[block], step) for step, block in enumerate(self.block)], axis=1)
        seconds = float(ends.max()) + self.exposed
        return Timeline(np.stack(begins, axis=1), work, self.sent / self.wire, self.sent, seconds)


def tile_flops(setting: Setting, tile: tuple[int, int]) -> int:
    """FLOPs of a tile, forward: of all heads and of all sequences that have no documents of their own."""
    model, slots = setting.model, setting.slots * setting.strategy.heads
    area = min(tile[0], slots) * min(tile[1], slots)
    heads = model.heads // setting.strategy.heads
    return 4 * area * heads * model.head_dim * (setting.batch // setting.mask.rows)


def passes(setting: Setting, chosen: Choice, tiles: Counts, needed: np.ndarray) -> tuple[Pass, Pass]:
    """The two passes of a layer's attention, with the kernel that was chosen, over the steps that are needed."""
    model, hardware, rates = setting.model, setting.hardware, chosen.rates
    blocks = np.ascontiguousarray(tiles.T if needed.all() else tiles.T[needed])
    wide = rates.widening(model.head_dim)
    elements = setting.batch * setting.slots * model.heads * model.head_dim
    hops = len(blocks) - 1

    def make(rate: Rate, factor: float, order: list[int], part: list[float], sent: list[float], exposed: float) -> Pass:
        per_tile = factor * wide * tile_flops(setting, chosen.tile) / (rate.efficiency * hardware.peak)
        per_step = rate.query_bytes * elements / hardware.bandwidth + rate.seconds
        where = np.array(order), np.array(part), per_tile, per_step, np.array(sent), setting.wire
        return Pass(blocks, *where, exposed)

    messages, strategy, again = setting.messages, setting.strategy, 1 if setting.remat == "none" else 2
    more = FLOAT32 / messages.width  # gradients of keys and values are float32
    trade = messages.trade / setting.wire_of(strategy.heads) + (LATENCY if strategy.heads > 1 else 0.0)
    # Gathered keys in bytes that take the ring's wire as long, for each of its steps, and what cannot be hidden: those
    # of the first group of heads, and backward the sums of the last.
    near = setting.wire_of(strategy.group)
    gathered = messages.gather / (messages.hops + 1) * (1.0 if near == setting.wire else setting.wire / near)
    first = gathered / messages.groups / setting.wire + (LATENCY if strategy.gather > 1 else 0.0)
    hidden = gathered * (1 - 1 / messages.groups)
    kv = float(messages.hop)
    order = list(range(hops + 1))
    if not hops:
        forward = make(rates.forward, 1.0, order, [1.0], [hidden], trade + first)
        sent = [hidden * (1 + more)]
        return forward, make(rates.backward, BACKWARD, order, [1.0], sent, again * trade + first * (1 + more))
    # What hops is gathered next: of the two the longer one is hidden, and the other way round sums.
    most, least = max(kv, gathered), min(kv, gathered) * hops / setting.wire
    forward = make(rates.forward, 1.0, order, [1.0] * len(order), [most] * hops + [0.0], trade + first + least)
    halves = [0.5, *[1.0] * hops, 0.5]
    sent = [most * (step < sends_backward(hops)) + most * more * (step > 1) for step in range(hops + 2)]
    exposed = again * trade + first + least * (1 + more)
    return forward, make(rates.backward, BACKWARD, [*order, 0], halves, sent, exposed)

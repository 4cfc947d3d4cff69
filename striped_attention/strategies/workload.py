"""Workload: the attention of one layer over a sequence axis, and how it is computed."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from striped_attention.core.mask import Mask
from striped_attention.kernels.contract import CONTEXT, Request
from striped_attention.runtime.hardware import Hardware
from striped_attention.strategies.hops import Ring, make_rings, needed_hops
from striped_attention.strategies.messages import Messages
from striped_attention.strategies.strategy import RING, Strategy, exchanged


@dataclasses.dataclass(frozen=True)
class Workload:
    """Everything that the time of a layer's attention depends on.

    `plain` is what a ring would ask of a kernel: a device's own queries and keys. `mask` is in sequence order. `again`
    is whether the backward pass repeats the exchanges of the forward pass, as with rematerialisation.
    """

    plain: Request
    mask: Mask
    hardware: Hardware
    strategy: Strategy = RING
    kernel: str = "auto"
    again: bool = True

    @property
    def request(self) -> Request:
        """What the strategy asks of a kernel."""
        return exchanged(self.strategy, self.plain)

    @property
    def messages(self) -> Messages:
        return messages_of(self.plain, self.strategy)

    @property
    def interconnect(self) -> float:
        """Bytes per second of the slowest hop.

        A double ring leaves a node once per round, and that hop has the whole round to complete.
        """
        slow = self.interconnect_of(self.plain.devices)
        return min(self.hardware.interconnect, slow * self.strategy.inner) if self.is_double else slow

    @property
    def latency(self) -> float:
        """Latency in seconds of the slowest hop, or of a step that gathers keys and makes no hops."""
        slow = self.latency_of(self.plain.devices)
        return max(self.hardware.latency, slow / self.strategy.inner) if self.is_double else slow

    @property
    def is_double(self) -> bool:
        """Whether the ring is a double ring whose inner rings stay within a node."""
        size = self.strategy.group * self.strategy.inner
        return len(rings_of(self.plain, self.strategy)) > 1 and self.hardware.group % size == 0

    def interconnect_of(self, neighbours: int) -> float:
        """Return the bytes per second among this many neighbours."""
        return self.hardware.interconnect if neighbours <= self.hardware.group else self.hardware.far_interconnect

    def latency_of(self, neighbours: int) -> float:
        """Return the latency in seconds of a message among this many neighbours."""
        return self.hardware.latency if neighbours <= self.hardware.group else self.hardware.far_latency

    @property
    def gather_bandwidth(self) -> float:
        """Bytes per second at which a device receives gathered keys."""
        return self.hardware.gather_bandwidth(self.strategy.gather, apart=self.strategy.heads)

    def needed(self) -> np.ndarray:
        """Return which steps the ring makes, indexed by how many places back the keys come from."""
        made = np.zeros(self.plain.devices // self.strategy.group, bool)
        rings = rings_of(self.plain, self.strategy)
        made[list(rings[0].offsets) if len(rings) == 1 else slice(None)] = True
        return made


def rings_of(plain: Request, strategy: Strategy) -> tuple[Ring, ...]:
    """Return the rings that keys travel, from what a ring would ask of a kernel."""
    layout, groups = plain.layout.grouped(strategy.group), plain.devices // strategy.group
    offsets = tuple(range(groups))
    if CONTEXT not in plain.made:
        offsets = needed_hops(layout, plain.rule, plain.length, plain.padded_length, groups)
    return make_rings(strategy.inner, offsets, groups)


def messages_of(plain: Request, strategy: Strategy) -> Messages:
    """Return what a device sends and keeps in memory, from what a ring would ask of a kernel."""
    tokens, width = plain.batch * plain.queries, jnp.dtype(plain.dtype).itemsize
    steps = math.prod(len(ring.offsets) for ring in rings_of(plain, strategy))
    return Messages(plain.heads, plain.kv_heads, plain.dim, strategy, plain.devices, tokens, width, steps)


def adapted(strategy: Strategy, plain: Request) -> Strategy:
    """Return the strategy without the parts that the mask makes useless.

    If a window needs the keys of only some neighbours, hops send less than a gather, and a double ring becomes single.
    """
    hops = dataclasses.replace(strategy, gather=1)
    found = hops if messages_of(plain, hops).forward < messages_of(plain, strategy).forward else strategy
    return found if len(rings_of(plain, found)) > 1 else dataclasses.replace(found, inner=1)

"""Workload: the attention of one layer over a sequence axis, and how it is to be done."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from striped_attention.core.mask import Mask
from striped_attention.kernels.contract import Request
from striped_attention.runtime.hardware import Hardware
from striped_attention.strategies.hops import Ring, make_rings
from striped_attention.strategies.messages import Messages
from striped_attention.strategies.strategy import RING, Strategy, exchanged


@dataclasses.dataclass(frozen=True)
class Workload:
    """All that the time of a layer's attention depends on.

    `plain` is what a ring would ask of a kernel: a device's own queries and keys. `mask` is in text order. `again` is
    whether the backward pass makes the exchanges of the forward pass once more, as with rematerialisation.
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
    def wire(self) -> float:
        """Bytes per second of the slowest hop. A double ring leaves a node once per round, during the whole of it."""
        slow = self.wire_of(self.plain.devices)
        return min(self.hardware.wire, slow * self.strategy.inner) if self.is_double else slow

    @property
    def latency(self) -> float:
        """Seconds of the slowest hop besides its bytes, or of a step that gathers keys and makes no hops."""
        slow = self.latency_of(self.plain.devices)
        return max(self.hardware.latency, slow / self.strategy.inner) if self.is_double else slow

    @property
    def is_double(self) -> bool:
        """Whether there are inner rings, each of which stays within a node."""
        size = self.strategy.group * self.strategy.inner
        return len(rings_of(self.plain, self.strategy)) > 1 and self.hardware.group % size == 0

    def wire_of(self, neighbours: int) -> float:
        """Bytes per second among so many neighbours."""
        return self.hardware.wire if neighbours <= self.hardware.group else self.hardware.far_wire

    def latency_of(self, neighbours: int) -> float:
        """Seconds of a message among so many neighbours, besides its bytes."""
        return self.hardware.latency if neighbours <= self.hardware.group else self.hardware.far_latency

    @property
    def gather_wire(self) -> float:
        """Bytes per second at which a device receives gathered keys."""
        return self.hardware.gather_wire(self.strategy.gather, apart=self.strategy.heads)

    def needed(self) -> np.ndarray:
        """Which steps the ring makes, by how many places back keys come from."""
        made = np.zeros(self.plain.devices // self.strategy.group, bool)
        rings = rings_of(self.plain, self.strategy)
        made[list(rings[0].offsets) if len(rings) == 1 else slice(None)] = True
        return made


def rings_of(plain: Request, strategy: Strategy) -> tuple[Ring, ...]:
    """The rings that keys travel, from what a ring would ask of a kernel."""
    layout, groups = plain.layout.grouped(strategy.group), plain.devices // strategy.group
    return make_rings(strategy.inner, layout, plain.window, plain.prefix, plain.length, plain.padded_length, groups)


def messages_of(plain: Request, strategy: Strategy) -> Messages:
    """What a device sends and holds, from what a ring would ask of a kernel."""
    tokens, width = plain.batch * plain.queries, jnp.dtype(plain.dtype).itemsize
    steps = math.prod(len(ring.offsets) for ring in rings_of(plain, strategy))
    return Messages(plain.heads, plain.kv_heads, plain.dim, strategy, plain.devices, tokens, width, steps)


def adapted(strategy: Strategy, plain: Request) -> Strategy:
    """The same strategy, without what a mask makes useless.

    Where a window needs only some of the neighbours, hops send less than gathered keys, and a ring is a single one.
    """
    hops = dataclasses.replace(strategy, gather=1)
    found = hops if messages_of(plain, hops).forward < messages_of(plain, strategy).forward else strategy
    return found if len(rings_of(plain, found)) > 1 else dataclasses.replace(found, inner=1)

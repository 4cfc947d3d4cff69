"""Workload: the attention of one layer over a sequence axis, and how it is to be done."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from striped_attention.core.mask import Mask
from striped_attention.kernels.contract import Request
from striped_attention.runtime.hardware import Hardware
from striped_attention.strategies.hops import needed_hops
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
        plain = self.plain
        tokens, width = plain.batch * plain.queries, jnp.dtype(plain.dtype).itemsize
        return Messages(plain.heads, plain.kv_heads, plain.dim, self.strategy, plain.devices, tokens, width)

    @property
    def wire(self) -> float:
        """Bytes per second of the slowest hop."""
        return self.wire_of(self.plain.devices)

    def wire_of(self, neighbours: int) -> float:
        """Bytes per second among so many neighbours."""
        return self.hardware.wire if neighbours <= self.hardware.group else self.hardware.far_wire

    def needed(self) -> np.ndarray:
        """Which steps the ring makes."""
        plain, group = self.plain, self.strategy.group
        layout, ring = plain.layout.grouped(group), plain.devices // group
        made = np.zeros(ring, bool)
        made[list(needed_hops(layout, plain.window, plain.prefix, plain.length, plain.padded_length, ring))] = True
        return made

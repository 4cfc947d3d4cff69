"""Problem: what is computed, regardless of what moves when: the block of any group's queries with any group's keys."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from striped_attention.core.arguments import Context
from striped_attention.core.bias import Bias
from striped_attention.core.layout import AxisName, Layout
from striped_attention.core.mask import Mask
from striped_attention.kernels.contract import Block, Kernel, Pattern
from striped_attention.strategies.hops import Ring, make_rings, needed_hops
from striped_attention.strategies.strategy import RING, Strategy


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything about attention over a mesh axis that is known at trace time.

    `layout` assigns the tokens to the `devices` of the axis. Attention itself sees fewer, larger devices: its queries
    are those of a group that shares out heads, and its keys those of the groups that gather them.
    """

    axis_name: AxisName
    devices: int
    layout: Layout
    length: int
    padded_length: int
    kernel: Kernel
    scale: float
    softcap: float | None = None
    tile: tuple[int, int] | None = None
    strategy: Strategy = RING
    deterministic: bool = False
    lse: bool = False  # whether the result is a `Partial` with the lse, which then has a gradient
    context: Context | None = None  # of cross attention

    @property
    def query_layout(self) -> Layout:
        return self.layout.grouped(self.strategy.heads)

    @property
    def query_devices(self) -> int:
        return self.devices // self.strategy.heads

    @property
    def key_layout(self) -> Layout:
        return self.layout.grouped(self.strategy.group)

    @property
    def keys(self) -> Context:
        """The keys that the queries see: those of the context, or else of the same sequence."""
        return self.context or Context(self.length, self.padded_length)

    @property
    def ring(self) -> int:
        """The number of groups that keys travel among."""
        return self.devices // self.strategy.group

    def offsets(self, mask: Mask) -> tuple[int, ...]:
        """Return how many places back in the ring the keys of every step come from."""
        if self.context is not None:
            return tuple(range(self.ring))
        return needed_hops(self.key_layout, mask.rule, self.length, self.padded_length, self.ring)

    def rings(self, mask: Mask) -> tuple[Ring, ...]:
        """Return the rings that keys travel, the outer one first."""
        return make_rings(self.strategy.inner, self.offsets(mask), self.ring)

    def whole(self, mask: Mask) -> bool:
        """Whether a device's queries see all their keys, and its keys all their queries, in a single block."""
        return self.strategy.gather == 1 and all(len(ring.offsets) == 1 for ring in self.rings(mask))

    def blocks(self, mask: Mask, bias: Bias | None) -> Callable[..., Block]:
        """Return a function from an offset in each ring to the block of this device's queries with those keys."""
        device = lax.axis_index(self.axis_name)
        meet = self.meetings(mask, bias, _divide(device, self.strategy.heads))
        here = _divide(device, self.strategy.group)
        rings = self.rings(mask)

        def block(*offsets: Any) -> Block:
            there = here
            for ring, offset in zip(rings, offsets, strict=True):
                there = there if isinstance(offset, int) and offset == 0 else ring.shift(there, -offset)
            return meet(there, there is here)

        return block

    def meetings(self, mask: Mask, bias: Bias | None, here: Any) -> Callable[[Any, bool], Block]:
        """Return a function block(there, own): the block of `here`'s queries with the keys of group `there`.

        `own` says whether group `there` includes `here`. What all blocks share is computed once. `mask` is that of
        `here`'s queries.
        """
        positions = self.query_layout.positions(here, self.padded_length, self.query_devices)
        context, rule = self.keys, mask.rule
        lo, hi = mask.bounds(positions, self.length, context.length, context.offset)
        simple = rule.prefix in (None, 0) and rule.ahead is None and self.context is None
        known = mask.lo is None and mask.hi is None and simple and self.strategy.gather == 1
        shape = (self.query_layout, self.query_devices, self.padded_length)
        keys, where = self.key_layout, (context.padded_length, self.ring)
        queries = positions + np.int32(context.offset) if context.offset else positions
        whole = self.whole(mask)

        def block(there: Any, own: bool) -> Block:
            start, end = (keys.count_before(there, x, *where) for x in (lo, hi))
            pattern = Pattern(*shape, causal=rule.prefix == 0, window=rule.window, own=own) if known else None
            alike = own and self.strategy.gather == 1 and self.context is None
            places = queries, queries if alike else keys.positions(there, *where)
            return Block(
                *(start, end, *places, bias, pattern),
                scale=self.scale,
                softcap=self.softcap,
                tile=self.tile,
                deterministic=self.deterministic,
                whole=whole,
            )

        return block


def _divide(device: Any, size: int) -> Any:
    return device if size == 1 else lax.div(device, np.int32(size))

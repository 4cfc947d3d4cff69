"""Messages: what a strategy sends and keeps in memory for one layer's attention, from shapes alone."""

import dataclasses

from striped_attention.strategies.head_groups import split_heads
from striped_attention.strategies.strategy import Strategy

FLOAT32 = 4  # bytes


@dataclasses.dataclass(frozen=True)
class Messages:
    """Bytes that a device sends for one layer's attention in the forward pass, on `devices` devices of an axis."""

    heads: int
    kv_heads: int
    dim: int
    strategy: Strategy
    devices: int
    tokens: int  # per device, of all its sequences
    width: int  # bytes per element
    steps: int | None = None  # groups of devices whose keys a device needs; by default all

    @property
    def queries(self) -> int:
        """Elements of the queries on a device; the result has as many."""
        return self.tokens * self.heads * self.dim

    @property
    def keys(self) -> int:
        """Elements of the keys on a device, including copies of key heads; the values have as many."""
        copies = self.strategy.key_copies(self.heads, self.kv_heads)
        return self.tokens * self.kv_heads * copies * self.dim

    @property
    def all_to_all(self) -> int:
        """Bytes of the all-to-all exchanges of heads for tokens: queries, keys, values and results."""
        heads = self.strategy.heads
        return 2 * (self.queries + self.keys) * (heads - 1) // heads * self.width

    @property
    def gather(self) -> int:
        """Bytes of gathered keys and values, over all steps of the ring."""
        return 2 * self.keys * (self.strategy.gather - 1) * (self.hops + 1) * self.width

    @property
    def hop(self) -> int:
        """Bytes of keys and values in one hop to the next group of the ring."""
        return 2 * self.keys * self.width

    @property
    def hops(self) -> int:
        return (self.devices // self.strategy.group if self.steps is None else self.steps) - 1

    @property
    def forward(self) -> int:
        """Bytes of all keys and values, hops and gathers. The backward pass adds the float32 gradients of both."""
        return self.hops * self.hop + self.gather

    def slow(self, near: int) -> tuple[int, int]:
        """Return the parts of `forward` and `all_to_all` that leave a group of `near` devices with a fast interconnect.

        These are the bytes of the device that sends the most: in a single ring the last of its group, which sends every
        hop to the next group. Gathered keys leave a group once for all devices of the next one; the devices of the
        group share that traffic.
        """
        if self.devices <= near:
            return 0, 0
        strategy = self.strategy
        gathering = max(1, near // strategy.heads)  # how many devices with the same heads are in the group
        hops = self.devices // strategy.group
        if strategy.inner > 1 and self.hops + 1 == hops and near % (strategy.group * strategy.inner) == 0:
            hops //= strategy.inner
        gathered = self.gather // gathering if strategy.gather > gathering else 0
        exchanged = self.all_to_all * max(0, strategy.heads - near) // max(1, strategy.heads - 1)
        return gathered + min(self.hops, hops - 1) * self.hop, exchanged

    @property
    def groups(self) -> int:
        """The number of groups of heads whose keys are gathered one after another."""
        copies, shared = self.strategy.key_copies(self.heads, self.kv_heads), self.strategy.heads
        return len(split_heads(self.strategy.gather, self.heads // shared, self.kv_heads * copies // shared))

    @property
    def gathered(self) -> int:
        """Elements of gathered keys and values in memory: groups in use and next; in a ring also the next step's."""
        sets = min(3 if self.hops else 2, self.groups) / self.groups
        return int(2 * self.keys * (self.strategy.gather - 1) * sets)

    @property
    def memory(self) -> int:
        """Peak bytes of the backward pass, including inputs and results.

        As observed in programs compiled for H200s and TPUs. Arrays of the queries' size: q, the result and its rounding
        error; in float32 the result and its gradient, in a ring also dq, and copies of these for the loop. Arrays of
        the keys' size: k and v in use, being sent and saved; the sums of dk and dv at home, travelling, arriving and of
        this block. Gathered keys and their float32 gradients exist twice: as received and sorted by position.
        """
        travelling = min(self.hops + 1, 3)
        exchanged = (
            (2 * self.queries + 4 * self.keys) * self.width if self.strategy.heads > 1 else 0
        )  # before and after
        return (
            self.queries * (3 * self.width + (6 if self.hops else 2) * FLOAT32)
            + 2 * self.keys * (travelling * self.width + (1 + travelling) * FLOAT32)
            + exchanged
            + self.gathered * 2 * (self.width + FLOAT32)
            + self._of_double_ring
        )

    @property
    def _of_double_ring(self) -> int:
        """Bytes of an inner round's own result and sums. XLA unrolls short loops and then keeps every step's result."""
        if self.strategy.inner == 1:
            return 0
        kept = self.hops + 1 if self.strategy.inner <= 4 else 0
        return (self.queries * (1 + kept) + 4 * self.keys) * FLOAT32

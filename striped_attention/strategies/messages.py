"""Messages: what a strategy sends and holds for the attention of one layer, from shapes alone."""

import dataclasses

from striped_attention.strategies.head_groups import split_heads
from striped_attention.strategies.strategy import Strategy

FLOAT32 = 4  # bytes


@dataclasses.dataclass(frozen=True)
class Messages:
    """What a device sends for the attention of one layer, forward, in bytes: by strategy, on `devices` of an axis."""

    heads: int
    kv_heads: int
    dim: int
    strategy: Strategy
    devices: int
    tokens: int  # per device, of all its sequences
    width: int  # bytes per number
    steps: int | None = None  # groups of devices whose keys a device needs; by default all

    @property
    def queries(self) -> int:
        """Numbers that a device holds of queries; of the result as many."""
        return self.tokens * self.heads * self.dim

    @property
    def keys(self) -> int:
        """Numbers that a device holds of keys, copies for other heads included; of values as many."""
        copies = self.strategy.key_copies(self.heads, self.kv_heads)
        return self.tokens * self.kv_heads * copies * self.dim

    @property
    def trade(self) -> int:
        """Queries, keys, values and results among devices that share out heads."""
        heads = self.strategy.heads
        return 2 * (self.queries + self.keys) * (heads - 1) // heads * self.width

    @property
    def gather(self) -> int:
        """Keys and values among devices that gather them, at all steps of the ring."""
        return 2 * self.keys * (self.strategy.gather - 1) * (self.hops + 1) * self.width

    @property
    def hop(self) -> int:
        """Keys and values to the next group of the ring, once."""
        return 2 * self.keys * self.width

    @property
    def hops(self) -> int:
        return (self.devices // self.strategy.group if self.steps is None else self.steps) - 1

    @property
    def forward(self) -> int:
        """Keys and values in all, by hops and gathered. Backward as much, and the float32 gradients of both."""
        return self.hops * self.hop + self.gather

    def slow(self, near: int) -> tuple[int, int]:
        """Of `forward` and `trade`, what leaves a group of `near` neighbours with a fast interconnect.

        Of the device that sends most: in a single ring the last of its group, which sends every hop to the next one.
        Gathered keys leave a group once for all devices of the next one, and its members share that out.
        """
        if self.devices <= near:
            return 0, 0
        strategy = self.strategy
        gathering = max(1, near // strategy.heads)  # of those with the same heads, so many are near
        hops = self.devices // strategy.group
        if strategy.inner > 1 and self.hops + 1 == hops and near % (strategy.group * strategy.inner) == 0:
            hops //= strategy.inner
        gathered = self.gather // gathering if strategy.gather > gathering else 0
        traded = self.trade * max(0, strategy.heads - near) // max(1, strategy.heads - 1)
        return gathered + min(self.hops, hops - 1) * self.hop, traded

    @property
    def groups(self) -> int:
        """Groups of heads whose keys are gathered one after the other."""
        copies, shared = self.strategy.key_copies(self.heads, self.kv_heads), self.strategy.heads
        return len(split_heads(self.strategy.gather, self.heads // shared, self.kv_heads * copies // shared))

    @property
    def gathered(self) -> int:
        """Numbers of gathered keys and values in memory: those at work, the next ones, in a ring also its next ones."""
        sets = min(3 if self.hops else 2, self.groups) / self.groups
        return int(2 * self.keys * (self.strategy.gather - 1) * sets)

    @property
    def memory(self) -> int:
        """Bytes at the peak of the backward pass, inputs and results included.

        As seen in programs compiled for H200s and TPUs. Of the queries' size: q, the result and what its rounding lost;
        in float32 the result and its gradient, in a ring also dq, with their copies for a loop. Of the keys' size: k
        and v that are held, sent and kept, and the sums of dk and dv: at home, travelling, arriving, of this block.
        Gathered keys and their float32 gradients are there twice, as they come and sorted by position.
        """
        travelling = min(self.hops + 1, 3)
        traded = (2 * self.queries + 4 * self.keys) * self.width if self.strategy.heads > 1 else 0  # before and after
        return (
            self.queries * (3 * self.width + (6 if self.hops else 2) * FLOAT32)
            + 2 * self.keys * (travelling * self.width + (1 + travelling) * FLOAT32)
            + traded
            + self.gathered * 2 * (self.width + FLOAT32)
            + self._of_double_ring
        )

    @property
    def _of_double_ring(self) -> int:
        """Bytes of a round's own result and sums. XLA unrolls short loops, and then keeps the results of all steps."""
        if self.strategy.inner == 1:
            return 0
        kept = self.hops + 1 if self.strategy.inner <= 4 else 0
        return (self.queries * (1 + kept) + 4 * self.keys) * FLOAT32

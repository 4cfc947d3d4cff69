"""Strategy: how queries and keys of different devices come to meet.

The devices of a sequence axis are factored, N = heads × gather × ring, neighbours first:

    heads     all-to-all among `heads` neighbours: each gets all of their tokens, for its share of the heads (Ulysses)
    gather    all-gather of K and V among `gather` such groups: each has all of their keys, for its own queries
    ring      K and V travel from one group of groups to the next, behind the arithmetic

The ring may be a double ring: inner rings of `inner` groups that share a fast interconnect, whose keys go on to the
next inner ring once per round. So the slow interconnect carries 1/inner of the hops, each started a round ahead.

Layouts are closed under grouping (`layout.grouped`), so after each exchange tokens lie in a layout again, and a mask is
still a range of slots.
"""

import dataclasses
import math
import re
from typing import Any

from striped_attention.core.annotations import checks_itself
from striped_attention.core.layout import check_whole
from striped_attention.kernels.contract import Request

NAMES = ("ring", "gather", "heads")
AUTO = "auto"  # what the cost model takes


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Sizes of the groups of devices; made by `strategy`. The ring takes the rest."""

    heads: int = 1
    gather: int = 1
    inner: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            check_whole(name, size)

    def __str__(self) -> str:
        """As `parse_strategy` takes it."""
        return ",".join(f"{name}={size}" for name, size in vars(self).items() if size > 1) or "ring"

    @property
    def group(self) -> int:
        """Devices that the ring takes for one."""
        return self.heads * self.gather

    def key_copies(self, heads: int, kv_heads: int) -> int:
        """How often a key head is sent, so that equal shares of the query heads find theirs among equal shares.

        A device's share of the query heads sees whole key heads, parts of a single one, or pieces of some: of the
        largest size that fills shares and divides the query heads of a key head.
        """
        shared = heads // kv_heads
        return shared // math.gcd(shared, heads // self.heads)


RING = Strategy()


@checks_itself
def strategy(*, heads: int = 1, gather: int = 1, inner: int = 1) -> Strategy:
    """A strategy by the sizes of its groups: neighbours that share out heads, groups that gather keys, inner rings.

    `heads · gather · inner` must divide the devices of the sequence axis, and a ring joins what is left: of 8 devices
    `strategy(heads=2)` makes a ring of 4, `strategy(heads=8)` none. `inner` makes it a double ring: of 16 devices on
    two nodes `strategy(inner=8)` makes two inner rings of 8, between which keys travel once per round.
    """
    return Strategy(heads, gather, inner)


def parse_strategy(text: str) -> str | Strategy:
    """A strategy as commands take it: a name, or the sizes of groups, like heads=2 or heads=2,inner=4."""
    text = text.strip()
    if text in NAMES:
        return text
    sizes = [re.fullmatch(r" ?(heads|gather|inner)=(\d{1,6})", part) for part in text.split(",")]
    found = {size[1]: int(size[2]) for size in sizes if size is not None}
    if len(found) < len(sizes):  # something else, or a name twice
        raise ValueError(f"A strategy is written like {', '.join(NAMES)}, heads=2 or heads=2,inner=4; got {text!r}.")
    return strategy(**found)


def check_strategy(asked: Any, devices: int) -> None:
    """Raise unless it is "auto", or a strategy that so many devices can follow."""
    if not (isinstance(asked, str) and asked == AUTO):
        resolve(asked, devices)


def resolve(asked: Any, devices: int, heads: int | None = None) -> Strategy:
    """The strategy that is asked for, by name or sizes; raises if so many devices, or query heads, cannot follow it."""
    if isinstance(asked, str) and asked in NAMES:
        found = {"ring": RING, "gather": Strategy(gather=devices), "heads": Strategy(heads=devices)}[asked]
    elif isinstance(asked, Strategy):
        found = asked
    else:
        raise ValueError(
            f"strategy must be one of {', '.join(map(repr, (AUTO, *NAMES)))}, or sa.strategy(heads=…, gather=…, "
            f"inner=…); got {asked!r}."
        )
    if devices % (found.group * found.inner):
        raise ValueError(
            f"heads · gather · inner of a strategy must divide the {devices} devices of the sequence axis; got heads="
            f"{found.heads}, gather={found.gather}, inner={found.inner}."
        )
    if heads is not None and heads % found.heads:
        common = math.gcd(heads, found.heads)
        instead = f"heads={common}, and a ring or gather for the rest" if common > 1 else "a ring or gather"
        raise ValueError(
            f"A strategy shares out a device's query heads equally: {heads} heads cannot be shared by "
            f"{found.heads} devices. Use {instead}."
        )
    return found


def candidates(devices: int, heads: int, group: int) -> list[Strategy]:
    """Strategies worth comparing, the ring first: heads or keys among all devices, or among those of a fast `group`.

    Where a ring leaves that group, also double rings. Heads within the group also go with keys gathered among the rest
    of it, and of all devices.
    """
    near = math.gcd(devices, group)
    shared = math.gcd(near, heads)
    found = [RING, Strategy(heads=math.gcd(devices, heads)), Strategy(heads=shared)]
    found += [Strategy(gather=devices), Strategy(gather=near)]
    found += [Strategy(heads=shared, gather=near // shared), Strategy(heads=shared, gather=devices // shared)]
    if near < devices:
        found += [Strategy(inner=near), Strategy(heads=shared, inner=near // shared)]
    return list(dict.fromkeys(found))


def exchanged(strategy: Strategy, plain: Request) -> Request:
    """What is asked of a kernel after the exchanges of a strategy, from what a ring would ask."""
    kv_heads = plain.kv_heads * strategy.key_copies(plain.heads, plain.kv_heads)
    return dataclasses.replace(
        plain,
        queries=plain.queries * strategy.heads,
        keys=plain.keys * strategy.group,
        heads=plain.heads // strategy.heads,
        kv_heads=kv_heads // strategy.heads,
        layout=plain.layout.grouped(strategy.heads),
        devices=plain.devices // strategy.heads,
        gathered=strategy.gather > 1,
    )

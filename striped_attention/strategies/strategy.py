"""Strategy: how queries meet the keys of other devices.

The devices of a sequence axis are factored, N = heads × gather × ring, neighbours first:

    heads     all-to-all among `heads` neighbours: each gets all of their tokens, for its share of the heads (Ulysses)
    gather    all-gather of K and V among `gather` such groups: each gets all of their keys, for its own queries
    ring      K and V travel from one group of groups to the next, overlapped with computation

The ring may be a double ring: inner rings of `inner` groups that share a fast interconnect, whose keys go on to the
next inner ring once per round. So the slow interconnect carries 1/inner of the hops, each started one round ahead.

Layouts are closed under grouping (`layout.grouped`). So after each exchange the tokens are again in a layout, and a
query still sees a range of slots.
"""

import dataclasses
import math
import re
from typing import Any

from striped_attention.core.annotations import checks_itself
from striped_attention.core.layout import check_whole
from striped_attention.kernels.contract import Request

NAMES = ("ring", "gather", "heads")
AUTO = "auto"  # chosen by the cost model


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The sizes of the groups of devices; made by `strategy`. The ring joins the groups."""

    heads: int = 1
    gather: int = 1
    inner: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            check_whole(name, size)

    def __str__(self) -> str:
        """Return the strategy as `parse_strategy` reads it."""
        return ",".join(f"{name}={size}" for name, size in vars(self).items() if size > 1) or "ring"

    @property
    def group(self) -> int:
        """The number of devices that the ring treats as one."""
        return self.heads * self.gather

    def key_copies(self, heads: int, kv_heads: int) -> int:
        """Return how many copies of a key head are needed, so that key heads divide equally, like the query heads.

        Query heads are split into the largest groups that divide both a device's share of them and those of a key head.
        Every such group gets a copy of its key head.
        """
        shared = heads // kv_heads
        return shared // math.gcd(shared, heads // self.heads)


RING = Strategy()


@checks_itself
def strategy(*, heads: int = 1, gather: int = 1, inner: int = 1) -> Strategy:
    """Return a strategy from the sizes of its groups: devices that divide heads, groups that gather keys, inner rings.

    `heads · gather · inner` must divide the devices of the sequence axis. A ring joins the groups: with 8 devices,
    `strategy(heads=2)` makes a ring of 4, `strategy(heads=8)` none. `inner` makes it a double ring: with 16 devices on
    two nodes, `strategy(inner=8)` makes two inner rings of 8, between which keys travel once per round.
    """
    return Strategy(heads, gather, inner)


def parse_strategy(text: str) -> str | Strategy:
    """Parse a strategy from the command line: a name, or the sizes of groups, e.g. heads=2 or heads=2,inner=4."""
    text = text.strip()
    if text in NAMES:
        return text
    sizes = [re.fullmatch(r" ?(heads|gather|inner)=(\d{1,6})", part) for part in text.split(",")]
    found = {size[1]: int(size[2]) for size in sizes if size is not None}
    if len(found) < len(sizes):  # an unknown or a repeated name
        raise ValueError(f"A strategy is written like {', '.join(NAMES)}, heads=2 or heads=2,inner=4; got {text!r}.")
    return strategy(**found)


def check_strategy(asked: Any, devices: int) -> None:
    """Raise unless `asked` is "auto", or a strategy for this number of devices."""
    if not (isinstance(asked, str) and asked == AUTO):
        resolve(asked, devices)


def resolve(asked: Any, devices: int, heads: int | None = None) -> Strategy:
    """Return the requested strategy, by name or sizes; raise unless it fits the number of devices and query heads."""
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
            f"A strategy must divide a device's query heads equally: {heads} heads cannot be shared by "
            f"{found.heads} devices. Use {instead}."
        )
    return found


def candidates(devices: int, heads: int, group: int) -> list[Strategy]:
    """Return strategies worth comparing, the ring first: heads or gather over all devices, or over a fast `group`.

    Heads within the group are also combined with gather over the rest of the group, or over all other devices. If there
    are several groups, double rings are added.
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
    """Return what the strategy asks of a kernel after its exchanges, from what a ring would ask."""
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

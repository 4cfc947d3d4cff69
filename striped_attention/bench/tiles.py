"""The suite `tiles`: the side of the kernel's tiles over two orders of magnitude. What do small ones gain and cost?

A tile is skipped whole or run whole, so smaller ones waste fewer hidden pairs along the edge of a mask, and need less
memory; but each has its own overhead. `tiles` × tile² over `pairs` is the work that is done over the work there is.
"""

import functools
import itertools
from typing import Any

import rich.table

from striped_attention.bench import blocks, problem
from striped_attention.bench.config import BenchConfig
from striped_attention.bench.layouts import with_contiguous
from striped_attention.bench.masks import parse_masks
from striped_attention.bench.run import document, path, say, write
from striped_attention.bench.workers import Team
from striped_attention.count import count_tiles
from striped_attention.layout import contiguous


def run(config: BenchConfig) -> None:
    """Check, measure, print a table and write the JSON, after every size."""
    options = config.options
    masks, shape = parse_masks(config), problem.SHAPES[options["platform"]]
    checks: list[dict[str, Any]] = []
    result = document(config, {**options, **shape.configuration()})
    result |= {"how": blocks.HOW, "checks": checks, "rows": []}
    with blocks.core(options["platform"]) as team:
        result["hardware"] |= blocks.hardware(team)
        for (mask, length), devices in itertools.product(masks, options["members"]):
            say(f"{mask}, {devices} devices, {length:,} tokens")
            case = functools.partial(blocks.Case, mask=masks[mask, length], devices=devices, length=length, shape=shape)
            truth = blocks.truth_of(case(contiguous()))
            for tile in options["tiles"]:
                cases = [case(layout, tile=tile) for layout in with_contiguous(config)]
                paths = blocks.measure(team, cases, options["rounds"], checks, truth)
                result["rows"] += rows(team, options["platform"], mask, paths)
                write(result, config)
    say(table(result["rows"]))
    say(str(path(config)))


def rows(team: Team, platform: str, mask: str, paths: list[blocks.Path]) -> list[dict[str, Any]]:
    """What the blocks of one text's rings say, the contiguous one first."""
    found = []
    for one in paths:
        case = one.case
        tile = case.tile or 0
        counts = count_tiles(case.layout, case.mask, case.length, case.devices, (tile, tile))
        (temporary,) = team.ask("temporary_bytes", str(case))
        found.append(
            {
                **{"platform": platform, "mask": mask, "tile": case.tile, "layout": repr(case.layout)},
                **{"devices": case.devices, "length": case.length, "forward": one.forward, "both": one.both},
                **{"over_contiguous": paths[0].both / one.both, "bound": blocks.bound(case)},
                **{"tiles": int(counts.sum()), "pairs": int(blocks.pairs(case).sum()), "temporary_bytes": temporary},
            }
        )
    return found


def table(rows: list[dict[str, Any]]) -> rich.table.Table:
    shown = rich.table.Table(
        *(
            "mask",
            "tile",
            "devices",
            "tokens",
            "layout",
            "critical path s",
            "× contiguous",
            "MB of a block",
            "work done / needed",
        )
    )
    for row in rows:
        side = min(row["tile"], row["length"] // row["devices"])
        shown.add_row(
            *(
                row["mask"],
                str(row["tile"]),
                str(row["devices"]),
                f"{row['length']:,}",
                row["layout"],
                f"{row['both']:.3f}",
            ),
            *(f"{row['over_contiguous']:.2f}", f"{row['temporary_bytes'] / 1e6:.1f}"),
            f"{row['tiles'] * side * side / row['pairs']:.2f}",
        )
    return shown

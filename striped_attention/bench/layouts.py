"""The suite `layouts`: ring, striped and zigzag over lengths and devices. Where does each win?

Two devices are two processes on the clock (`wall.py`). Larger rings do not fit the cores of this machine, so theirs is
the critical path (`blocks.py`).
"""

import itertools
from typing import Any

import rich.table

from striped_attention.bench import blocks, problem, wall
from striped_attention.bench.config import BenchConfig, parse_layouts
from striped_attention.bench.contestants import DEVICES
from striped_attention.bench.run import document, path, say, write
from striped_attention.layout import Layout, contiguous
from striped_attention.mask import causal


def run(config: BenchConfig) -> None:
    """Check, measure, print a table and write the JSON, after every row."""
    options = config.options
    layouts = with_contiguous(config)
    result = document(config, {**options, **problem.CPU.configuration(), "mask": "causal"})
    checks: list[dict[str, Any]] = []
    result |= {"checks": checks, "wall": {"devices": DEVICES, "how": wall.HOW, "rows": []}}
    result["critical_path"] = {"how": blocks.HOW, "rows": []}
    say("two processes, a core each: starting")
    for row in wall.measure(layouts, options["lengths"], options["rounds"], checks):
        result["wall"]["rows"].append(row)
        write(result, config)
        say(f"two processes, {_line(row)}")
    with blocks.core() as team:
        for devices, length in itertools.product(options["members"], options["lengths"]):
            say(f"critical path of {devices} devices, {length:,} tokens: {len(layouts)} layouts")
            cases = [blocks.Case(layout, causal(), devices, length) for layout in layouts]
            for row in rows(blocks.measure(team, cases, options["rounds"], checks)):
                result["critical_path"]["rows"].append(row)
                say(f"critical path, {devices} devices, {_line(row)}")
            write(result, config)
    say(table(result))
    say(str(path(config)))


def with_contiguous(config: BenchConfig) -> list[Layout]:
    """The layouts of a suite, and the one that they are compared with first."""
    return list(dict.fromkeys([contiguous(), *parse_layouts(config.options["layouts"])]))


def rows(paths: list[blocks.Path]) -> list[dict[str, Any]]:
    """What the blocks of one text's rings say, the contiguous one first."""
    base = paths[0]
    return [
        {
            **{"devices": found.case.devices, "length": found.case.length, "layout": repr(found.case.layout)},
            **{"forward": found.forward, "both": found.both, "seconds": found.both_blocks.tolist()},
            "over_contiguous": {"forward": base.forward / found.forward, "both": base.both / found.both},
            "bound": blocks.bound(found.case),
        }
        for found in paths
    ]


def _line(row: dict[str, Any]) -> str:
    gain = row["over_contiguous"]["both"]
    return f"{row['length']:,} tokens, {row['layout']}: {row['both']:.3f} s, {gain:.2f} × contiguous"


def table(result: dict[str, Any]) -> rich.table.Table:
    shown = rich.table.Table(
        *("measured by", "devices", "tokens", "layout", "forward s", "both s", "× contiguous", "bound")
    )
    clock = [{"devices": result["wall"]["devices"], **row} for row in result["wall"]["rows"]]
    for how, found in (("wall-clock", clock), ("critical path", result["critical_path"]["rows"])):
        for row in found:
            gains = " / ".join(f"{row['over_contiguous'][kind]:.2f}" for kind in problem.KINDS)
            shown.add_row(
                *(how, str(row["devices"]), f"{row['length']:,}", row["layout"]),
                *(f"{row['forward']:.3f}", f"{row['both']:.3f}", gains, f"{row['bound']:.2f}"),
            )
    return shown

"""Speed: how many times as fast as contiguous the other layouts are, over the length of the text."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from striped_attention.report import figures
from striped_attention.report.figures import Line, Panel
from striped_attention.report.read import Document, of
from striped_attention.report.section import (
    PAPER,
    Section,
    bound,
    is_striped,
    newest,
    plain,
    ratio,
    span,
    tokens,
)
from striped_attention.report.style import of_layout

ATTENTION = ("members", "length", "heads", "layout")
_PATH = ("devices", "length", "layout")
STEP = ("preset", "length", "members", "layout")
WHOLE_STEP = "whole step, striped(1)"
TIMES = "times as fast as contiguous"
BOUND_NAME = "bound, 2 − 1/N"
BOUND = (
    "The dashed line is the most that balance can give, 2 − 1/N on N devices: with contiguous pieces the device with "
    "the end of the text does 2 − 1/N times the mean, and everybody waits for it."
)


def gpus(documents: Sequence[Document]) -> Section | None:
    """Speed-up over length on GPUs, with the paper's points."""
    rows, sources = newest(of(documents, "gpu"), "summary", ATTENTION)
    small = [d for d in of(documents, "step") if any(row["preset"] == "1b" for row in d.rows("summary"))]
    steps, more = newest(small, "summary", STEP)
    striped = [row for row in rows if is_striped(row["layout"])]
    if not striped:
        return None
    panels = [
        _ring(list(group), members, heads, steps)
        for (members, heads), group in itertools.groupby(sorted(rows, key=_by_ring), _by_ring)
    ]
    return Section(
        name="speedup-gpu",
        title=(
            f"On GPUs striped attention is {span(ratio(row) for row in striped)} times as fast as contiguous, up to "
            f"{100 * max(ratio(row) / row['bound'] for row in striped):.0f} % of the bound"
        ),
        caption=(
            f"Forward and backward; contiguous is Ring Attention. {BOUND} Stars are what the paper reached for whole "
            f"training steps; pink diamonds are our whole steps of a 1b model. Measured on one GPU that does what the "
            f"busiest member of the ring would do; transfers between GPUs are not in it. a:b heads are query and key "
            f"heads."
        ),
        sources=(*sources, *more),
        draw=functools.partial(
            figures.curves,
            panels,
            "tokens of the text",
            TIMES,
            x_format=tokens,
            colours=lambda name: "pink" if name == WHOLE_STEP else of_layout(name),
            bound_name=BOUND_NAME,
            floor=1.0,
        ),
    )


def _by_ring(row: dict[str, Any]) -> tuple[int, str]:
    return row["members"], row["heads"]


def _ring(rows: list[dict[str, Any]], members: int, heads: str, steps: list[dict[str, Any]]) -> Panel:
    lines: dict[str, Line] = {}
    for row in rows:
        if plain(row["layout"]) != "contiguous":
            lines.setdefault(plain(row["layout"]), []).append((row["length"], ratio(row)))
    marks = []
    if heads == "16:16":  # the heads of the 1b model, with which the paper's points are compared
        whole = [
            row for row in steps if (row["preset"], row["members"], row["layout"]) == ("1b", members, "striped(1)")
        ]
        if whole:
            lines[WHOLE_STEP] = [(row["length"], ratio(row)) for row in whole if row["fits"]]
        marks = [(length, times, f"{times} on {where}") for n, length, times, where in PAPER if n == members]
    return Panel(f"{members} devices, {heads} heads", lines, bound(members), marks)


def cpus(documents: Sequence[Document]) -> Section | None:
    """Speed-up over length on CPUs: wall-clock of two processes, and the critical path of more devices."""
    wall, paths, sources = _wall(documents), *newest(of(documents, "layouts"), "critical_path.rows", _PATH)
    found: dict[tuple[str, int], dict[str, dict[float, float]]] = {}
    for devices, layout, length, times in wall:
        found.setdefault(("wall clock", devices), {}).setdefault(plain(layout), {})[length] = times
    for row in paths:
        lines = found.setdefault(("critical path", row["devices"]), {}).setdefault(plain(row["layout"]), {})
        lines[row["length"]] = ratio(row)
    panels = [
        Panel(f"{n} devices, {how}", {k: list(v.items()) for k, v in lines.items() if k != "contiguous"}, bound(n))
        for (how, n), lines in sorted(found.items(), key=lambda item: (item[0][0] == "critical path", item[0][1]))
    ]
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        return None
    every = [point for panel in panels for points in panel.lines.values() for point in points]
    longest = max(length for length, _ in every)
    loses = "; with few tokens a device they can lose" if min(times for _, times in every) < 0.95 else ""
    used = {str(d.path): d for d in (*of(documents, "cpu_balance"), *of(documents, "layouts"), *sources)}
    return Section(
        name="speedup-cpu",
        title=(
            f"On CPUs, with {tokens(longest)} tokens, balanced layouts are "
            f"{span(times for length, times in every if length == longest)} times as fast as contiguous{loses}"
        ),
        caption=(
            f"Forward and backward, kernel xla. Wall clock: two processes with a core each, joined by a network. "
            f"Critical path: every device's share of every step is timed by itself, and the slowest of each step "
            f"added up. {BOUND}"
        ),
        sources=tuple(used.values()),
        draw=functools.partial(
            figures.curves,
            panels,
            "tokens of the text",
            TIMES,
            x_format=tokens,
            colours=of_layout,
            bound_name=BOUND_NAME,
            floor=1.0,
        ),
    )


def _wall(documents: Sequence[Document]) -> list[tuple[int, str, int, float]]:
    """Devices, layout, length and speed-up; the newest come last."""
    found = []
    for document in documents:
        if document.benchmark == "cpu_balance":
            devices = document.content["configuration"]["devices"]
            for length, layouts in document.rows("lengths").items():
                for layout, times in layouts.items():
                    found.append((devices, layout, int(length), float(times["both"]["times_as_fast_as_contiguous"])))
        elif document.benchmark == "layouts":
            devices = document.content["wall"].get("devices", 2)
            found += [(devices, row["layout"], row["length"], ratio(row)) for row in document.rows("wall.rows")]
    return found

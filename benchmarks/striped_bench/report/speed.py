"""Speed: speed-up of other layouts over contiguous, by length, devices, tile size and mask."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

import striped_attention as sa
from striped_bench.report.bars import groups
from striped_bench.report.curves import Line, Panel, Point, curves, panels
from striped_bench.report.read import Document, of
from striped_bench.report.section import ATTENTION, PAPER, STEP, Finding, bound, newest, ratio, some
from striped_bench.report.style import of_layout
from striped_bench.report.text import plain, span, tokens, words

WHOLE_STEP = "whole step, striped(1)"
TIMES = "speed-up over contiguous"


def _curves(shown: Sequence[Panel], x_label: str, **more: Any) -> Callable[[], Figure]:
    """Plot speed-ups, from 1 upwards, with their bound."""
    return lambda: curves(shown, x_label, TIMES, floor=1.0, **more)


def gpus(documents: Sequence[Document]) -> Finding:
    """Speed-up over length on GPUs, with the paper's points."""
    rows, sources = newest(of(documents, "gpu"), "summary", ATTENTION)
    small = [d for d in of(documents, "step") if any(row["preset"] == "1b" for row in d.rows("summary"))]
    steps, more = newest(small, "summary", STEP)
    striped = some(row for row in rows if row["layout"].startswith("striped"))
    rows = sorted(rows, key=lambda row: (row["members"], row["heads"]))
    bounds = {f"{row['members']} devices, {row['heads']} heads": bound(row["members"]) for row in rows}
    points: list[Point] = [
        (f"{row['members']} devices, {row['heads']} heads", plain(row["layout"]), row["length"], ratio(row))
        for row in rows
        if plain(row["layout"]) != "contiguous"
    ]
    # The paper's points are compared with the 1b model, which has these heads.
    for row in steps:
        panel = f"{row['members']} devices, 16:16 heads"
        if panel in bounds and row["fits"] and (row["preset"], row["layout"]) == ("1b", "striped(1)"):
            points.append((panel, WHOLE_STEP, row["length"], ratio(row)))
    marks = {f"{n} devices, 16:16 heads": [(at, times, f"{times} on {where}")] for n, at, times, where in PAPER}
    colours = lambda name: "pink" if name == WHOLE_STEP else of_layout(name)  # noqa: E731
    draw = _curves(panels(points, bounds, marks), "sequence length (tokens)", x_format=tokens, colours=colours)
    best = max(striped, key=ratio)
    numbers = {
        "times": span(ratio(row) for row in striped),
        "share": 100 * max(ratio(row) / row["bound"] for row in striped),
        "best": ratio(best),
        "limit": bound(best["members"]),
        "where": f"{tokens(best['length'])} tokens on {best['members']} GPUs",
    }
    return Finding(numbers, (*sources, *more), draw)


def cpus(documents: Sequence[Document]) -> Finding:
    """Speed-up over length on CPUs: wall-clock of two processes, and the critical path of more devices."""
    used = [d for d in documents if d.benchmark in ("cpu_balance", "layouts")]
    found = [(False, *row) for document in used for row in _wall(document)]
    paths, _ = newest(of(documents, "layouts"), "critical_path.rows", ("devices", "length", "layout"))
    found += [(True, row["devices"], row["layout"], row["length"], ratio(row)) for row in paths]
    found = sorted(some(row for row in found if plain(row[2]) != "contiguous"), key=lambda row: row[:2])
    name = lambda path, n: f"{n} devices, {'critical path' if path else 'wall clock'}"  # noqa: E731
    bounds = {name(path, n): bound(n) for path, n, *_ in found}
    shown = panels([(name(path, n), plain(layout), x, y) for path, n, layout, x, y in found], bounds)
    every = [point for panel in shown for points in panel.lines.values() for point in points]
    longest = max(length for length, _ in every)
    loses = "; with few tokens per device they can be slower" if min(times for _, times in every) < 0.95 else ""
    numbers = {"longest": tokens(longest), "times": span(y for x, y in every if x == longest), "loses": loses}
    used.sort(key=lambda document: document.benchmark)
    return Finding(numbers, used, _curves(shown, "sequence length (tokens)", x_format=tokens, colours=of_layout))


def _wall(document: Document) -> list[tuple[int, str, int, float]]:
    """Devices, layout, length and wall-clock speed-up."""
    if document.benchmark == "layouts":
        devices = document.content["wall"].get("devices", 2)
        return [(devices, row["layout"], row["length"], ratio(row)) for row in document.rows("wall.rows")]
    lengths, devices = document.rows("lengths").items(), document.content["configuration"]["devices"]
    times = "times_as_fast_as_contiguous"
    return [(devices, x, int(n), float(row["both"][times])) for n, layouts in lengths for x, row in layouts.items()]


def scaling(documents: Sequence[Document], plans: bool) -> Finding:
    """Speed-up over devices: measured rings, and with `plans` larger ones as planned."""
    rows, sources = newest(of(documents, "gpu"), "summary", ATTENTION)
    measured: dict[int, Line] = {}
    for row in rows:
        if row["layout"] == "striped(1)" and row["heads"] == "16:16":
            measured.setdefault(row["length"], []).append((row["members"], ratio(row)))
    lines = {f"measured, {tokens(n)} tokens": points for n, points in sorted(measured.items()) if len(points) > 1}
    if single := sorted(n for n, points in measured.items() if len(points) == 1):
        name = " to ".join(dict.fromkeys((tokens(single[0]), tokens(single[-1]))))
        lines[f"measured, {name} tokens"] = [measured[n][0] for n in single]
    shrinks = any(max(points)[1] < max(y for _, y in points) for points in some(lines.values()))
    times, most = max((y, x) for points in lines.values() for x, y in points)
    finding, how = f"The speed-up by the number of devices is up to {times:.2f} times, on {most} devices", ""
    if plans:
        lines["planned, 32k tokens per device"] = planned = planned_scaling()
        most, times = planned[-1]
        finding = "With 32k tokens per device the planned speed-up grows with the ring, "
        finding += f"to {times:.2f} times on {most:.0f} devices"
        how = " The planned line is what striped plan expects of H200s, transfers included, and was not measured."
    devices = sorted({x for points in lines.values() for x, _ in points})
    panel = Panel("attention, striped(1)", lines, [(n, bound(n)) for n in devices])
    numbers = {"finding": finding, "shrinks": "; with short sequences it shrinks" if shrinks else "", "how": how}
    return Finding(numbers, sources, _curves([panel], "devices in the ring"))


@functools.cache
def planned_scaling() -> Line:
    """Planned speed-up of attention by number of H200s, with 32,768 tokens per device."""
    found: Line = []
    for devices in (2, 8, 16, 64, 256):
        plan = sa.plan(devices, 32_768 * devices, hardware="h200", model="1b", layouts=[sa.striped()])
        striped = next(choice for choice in plan.choices if choice.layout == sa.striped())
        found.append((float(devices), plan.speedup(striped)))
    return found


def tiles(documents: Sequence[Document]) -> Finding:
    """Speed-up over the kernel's tile size."""
    key = ("platform", "mask", "devices", "length")
    rows, sources = newest(of(documents, "tiles"), "rows", (*key, "tile", "layout"))
    points: list[Point] = []
    bounds: dict[str, float] = {}
    for row in rows:
        if plain(row["layout"]) != "contiguous":
            panel = f"{row['platform'].upper()}, {row['mask']}, {row['devices']} devices, {row['length']:,} tokens"
            points.append((panel, plain(row["layout"]), row["tile"], ratio(row)))
            bounds[panel] = max(row["bound"], bounds.get(panel, 1.0))
    _, layout, tile, times = max(some(points), key=lambda point: point[3])
    draw = _curves(panels(points, bounds), "tile size (queries × as many keys)", colours=of_layout)
    return Finding({"layout": layout, "times": times, "tile": tile}, sources, draw)


def masks(documents: Sequence[Document], platform: str) -> Finding:
    """Speed-up for every mask, with the most devices and the longest sequences."""
    own = [x for x in of(documents, "masks") if {row["platform"] for row in x.rows("rows")} == {platform}]
    rows, sources = newest(own, "rows", ("mask", "devices", "length", "layout"))
    rows = some(row for row in rows if plain(row["layout"]) != "contiguous")
    devices, length = max((row["devices"], row["length"]) for row in rows)
    bars: dict[str, dict[str, float]] = {}
    bounds: dict[str, float] = {}
    for row in rows:
        if (row["devices"], row["length"]) == (devices, length):
            bars.setdefault(row["mask"], {})[plain(row["layout"])] = ratio(row)
            bounds[row["mask"]] = max(float(row["bound"]), bounds.get(row["mask"], 1.0))
    wins = {mask: max(layouts, key=lambda name: layouts[name]) for mask, layouts in bars.items()}
    wins = {mask: name if bars[mask][name] > 1 else "contiguous" for mask, name in wins.items()}
    best = max(sorted(set(wins.values())), key=list(wins.values()).count)
    won = words([mask for mask, layout in wins.items() if layout == best])
    finding = f"the best layout depends on the mask: {best} for {won}"
    if len(set(wins.values())) == 1:
        finding = f"{best} gains most under every mask"
    numbers = {"finding": finding, "length": length, "devices": devices}
    return Finding(numbers, sources, lambda: groups(bars, bounds, TIMES, of_layout))

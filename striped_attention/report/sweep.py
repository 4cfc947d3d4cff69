"""Sweep: what the gain over contiguous depends on besides length: the kernel's tile, the mask, how many devices."""

import functools
from collections.abc import Sequence
from typing import Any

import striped_attention as sa
from striped_attention.report import figures
from striped_attention.report.figures import Line, Panel
from striped_attention.report.read import Document, of
from striped_attention.report.section import Section, bound, is_striped, newest, number, plain, ratio, tokens, words
from striped_attention.report.speed import ATTENTION, BOUND, BOUND_NAME, TIMES
from striped_attention.report.style import of_layout


def tiles(documents: Sequence[Document]) -> Section | None:
    """Speed-up over the size of a kernel's tile."""
    key = ("platform", "mask", "devices", "length")
    rows, sources = newest(of(documents, "tiles"), "rows", (*key, "tile", "layout"))
    found: dict[tuple[Any, ...], dict[str, Line]] = {}
    bounds: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if plain(row["layout"]) != "contiguous":
            ring = tuple(row[name] for name in key)
            found.setdefault(ring, {}).setdefault(plain(row["layout"]), []).append((_edge(row["tile"]), ratio(row)))
            bounds[ring] = max(row["bound"], bounds.get(ring, 1.0))
    if not found:
        return None
    panels = [
        Panel("{}, {}, {} devices, {:,} tokens".format(ring[0].upper(), *ring[1:]), lines, bounds[ring])
        for ring, lines in found.items()
    ]
    best = max((row for row in rows if plain(row["layout"]) != "contiguous"), key=ratio)
    return Section(
        name="tiles",
        title=(
            f"The gain depends on the kernel's tile: {plain(best['layout'])} gains most, {ratio(best):.2f} times, "
            f"with tiles of {_edge(best['tile'])}"
        ),
        caption=(
            f"A kernel works on tiles, squares of so many queries by so many keys, and skips those that are hidden "
            f"altogether. Large tiles skip less: the stripes' diagonal is in every one of their blocks. {BOUND}"
        ),
        sources=sources,
        draw=functools.partial(
            figures.curves,
            panels,
            "queries of a tile, and as many keys",
            TIMES,
            x_format=lambda tile: f"{tile:g}",
            colours=of_layout,
            bound_name=BOUND_NAME,
            floor=1.0,
        ),
    )


def _edge(tile: Any) -> int:
    """A tile's queries, however it was written: 256, [256, 256], "256x256"."""
    return number(tile) if isinstance(tile, str) else int(tile[0] if isinstance(tile, list | tuple) else tile)


def masks(documents: Sequence[Document], platform: str) -> Section | None:
    """Speed-up for every mask."""
    own = [x for x in of(documents, "masks") if {row["platform"] for row in x.rows("rows")} == {platform}]
    rows, sources = newest(own, "rows", ("mask", "devices", "length", "layout"))
    shown = [row for row in rows if plain(row["layout"]) != "contiguous"]
    if not shown:
        return None
    devices, length = max((row["devices"], row["length"]) for row in shown)
    shown = [row for row in shown if (row["devices"], row["length"]) == (devices, length)]
    bars: dict[str, dict[str, float]] = {}
    bounds: dict[str, float] = {}
    for row in shown:
        bars.setdefault(row["mask"], {})[plain(row["layout"])] = ratio(row)
        bounds[row["mask"]] = max(float(row["bound"]), bounds.get(row["mask"], 1.0))
    wins = {mask: max(layouts, key=lambda name: layouts[name]) for mask, layouts in bars.items()}
    wins = {mask: name if bars[mask][name] > 1 else "contiguous" for mask, name in wins.items()}
    best = max(sorted(set(wins.values())), key=list(wins.values()).count)
    won = words([mask for mask, layout in wins.items() if layout == best])
    every = len(set(wins.values())) == 1
    return Section(
        name="masks" if platform == "cpu" else f"masks_{platform}",
        title=f"{platform.upper()}s: {best} gains most under every mask"
        if every
        else f"{platform.upper()}s: which layout is best depends on the mask: {best} for {won}",
        caption=(
            f"A mask says which earlier tokens a token sees. {length:,} tokens on {devices} devices, forward and "
            f"backward, with the kernel xla, by the critical path. The dashed line is the most that balance could give "
            f"with that mask."
        ),
        sources=sources,
        draw=functools.partial(figures.groups, bars, bounds, TIMES, of_layout),
    )


def scaling(documents: Sequence[Document]) -> Section | None:
    """Speed-up over devices: measured rings, and what the planner expects of larger ones."""
    rows, sources = newest(of(documents, "gpu"), "summary", ATTENTION)
    measured: dict[int, Line] = {}
    for row in rows:
        if row["layout"] == "striped(1)" and row["heads"] == "16:16":
            measured.setdefault(row["length"], []).append((row["members"], ratio(row)))
    lines = {f"measured, {tokens(n)} tokens": points for n, points in sorted(measured.items()) if len(points) > 1}
    single = sorted(n for n, points in measured.items() if len(points) == 1)
    if single:
        name = " to ".join(dict.fromkeys((tokens(single[0]), tokens(single[-1]))))
        lines[f"measured, {name} tokens"] = [measured[n][0] for n in single]
    if not lines:
        return None
    shrinks = any(max(points)[1] < max(y for _, y in points) for points in lines.values())
    planned = planned_scaling()
    lines["planned, 32k tokens a device"] = planned
    devices = sorted({x for points in lines.values() for x, _ in points})
    panel = Panel("attention, striped(1)", lines, [(n, bound(int(n))) for n in devices])
    return Section(
        name="scaling",
        title=(
            f"With 32k tokens a device the gain should grow with the ring, to {planned[-1][1]:.2f} times on "
            f"{planned[-1][0]:.0f} devices" + ("; with short texts it shrinks" if shrinks else "")
        ),
        caption=(
            "More devices make contiguous pieces more unfair, and the gain larger, as long as each device has enough "
            "to do; with few tokens on each, fixed costs of a step weigh more than balance. Measured lines are one "
            "GPU as the busiest member of a ring; the planned line is worked out by striped plan for H200s, with "
            "transfers, and has not been measured."
        ),
        sources=sources,
        draw=functools.partial(
            figures.curves,
            [panel],
            "devices in the ring",
            TIMES,
            x_format=lambda n: f"{n:g}",
            bound_name=BOUND_NAME,
            floor=1.0,
        ),
    )


@functools.cache
def planned_scaling() -> Line:
    """Devices and speed-up of attention that the planner expects on H200s, with 32,768 tokens on each."""
    found = []
    for devices in (2, 8, 16, 64, 256):
        plan = sa.plan(devices, 32_768 * devices, hardware="h200", model="1b", layouts=[sa.striped()])
        striped = next(choice for choice in plan.choices if is_striped(repr(choice.layout)))
        found.append((float(devices), plan.speedup(striped)))
    return found


def throughput(documents: Sequence[Document]) -> Section | None:
    """Tokens a second over devices, from the suite `scale`: with the best layout, of the first and the last model."""
    key = ("preset", "length", "devices", "hardware", "layout", "measured")
    rows, sources = newest(of(documents, "scale"), "rows", key)
    planned = [row for row in rows if not row["measured"] and row["hardware"] != "cpu"]
    if not planned:
        return None
    presets = list(dict.fromkeys(row["preset"] for row in planned))
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in planned:
        if row["preset"] in (presets[0], presets[-1]):
            lines = found.setdefault(f"{row['preset']}, {row['hardware']}", {})
            line = lines.setdefault(f"{tokens(row['length'])} tokens", {})
            line[row["devices"]] = max(row["tokens_per_second"], line.get(row["devices"], 0.0))
    first, lines = next(iter(found.items()))
    most = {name: max(line, key=lambda n: line[n]) for name, line in lines.items()}
    short, long = next(iter(most)), list(most)[-1]
    gains = f"{long} go fastest on {most[long]:,} devices" + ("" if short == long else f", {short} on {most[short]:,}")
    return Section(
        name="throughput",
        title=f"{first}: texts of {gains}, says the planner",
        caption=(
            "Tokens a second of whole training steps, all devices together, with the best layout of each; worked out "
            "from counted work and the known speed of the hardware, not measured." + _as_measured(rows)
        ),
        sources=sources,
        draw=functools.partial(
            figures.curves,
            [Panel(name, {k: sorted(v.items()) for k, v in lines.items()}) for name, lines in found.items()],
            "devices",
            "tokens a second",
            x_format=lambda n: f"{n:g}",
            log_y=True,
        ),
    )


def _as_measured(rows: list[dict[str, Any]]) -> str:
    """How the planner compares with what the same suite measured, in a sentence."""
    name = lambda row: (row["length"], row["devices"], row["layout"])  # noqa: E731
    planned = {name(row): row["tokens_per_second"] for row in rows if row["hardware"] == "cpu" and not row["measured"]}
    pairs = [(row["tokens_per_second"], planned[name(row)]) for row in rows if row["measured"] and name(row) in planned]
    if not pairs:
        return ""
    worst = max(abs(found / expected - 1) for found, expected in pairs)
    return f" Where the same was measured, on CPU cores, the two differ by {worst:.0%} at most."

"""Cost: time, memory and traffic of attention and of everything else, and the time of other libraries."""

from collections.abc import Sequence
from typing import Any

from striped_bench.report.bars import Bar, stacks
from striped_bench.report.curves import Point, curves, panels
from striped_bench.report.read import Document, of
from striped_bench.report.section import ATTENTION, STEP, Finding, Row, Table, newest, ratio, some
from striped_bench.report.style import CYCLE, ENTRIES, of_layout
from striped_bench.report.text import plain, span, tokens, words

# Colours of the kinds of kernels in a profile (the kinds of `bench/profile.py`).
KINDS = {
    **{"attention, forward": "blue", "attention, backward": "sky", "merges, sums and slices": "pink"},
    **{"copies": "yellow", "copies in place of hops": "orange", "nothing": "quiet"},
}
_FAMILIES = {"ours": "striped_attention", "plain-jax": "plain JAX", "torch-sdpa": "torch, one device"}


def busiest(documents: Sequence[Document], layout: str) -> tuple[list[Row], tuple[Document, ...]]:
    """The slowest device of every measured ring with this layout, sorted by tokens per device (`each`)."""
    rows, sources = newest(of(documents, "gpu"), "members", (*ATTENTION, "rank"))
    slowest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["layout"] == layout:
            ring = tuple(row[name] for name in ATTENTION)
            slowest[ring] = max(slowest.get(ring, row), row, key=lambda row: row["both"])
    found = [{**row, "each": row["length"] // row["members"]} for row in slowest.values()]
    return sorted(found, key=lambda row: (row["each"], row["members"])), sources


def beside(row: Row) -> float:
    """The fraction of a profile spent outside attention kernels."""
    where = row["where"]
    return 1 - sum(where[kind] for kind in where if kind.startswith("attention")) / sum(where.values())


def kernels(documents: Sequence[Document]) -> Finding:
    """Time of a striped ring by kind of kernel."""
    rows, sources = busiest(documents, "striped(1)")
    shown = []
    for row in (rows := some(row for row in rows if row["where"])):
        parts = {kind: 100 * seconds / sum(row["where"].values()) for kind, seconds in row["where"].items()}
        label = f"{tokens(row['each'])} tokens per GPU, {row['members']} GPUs, {row['heads']}"
        shown.append((label, parts, f"{100 * beside(row):.1f} %"))
    least, most = min(rows, key=beside), max(rows, key=beside)
    trend = ", less with more tokens per GPU" if least["each"] > most["each"] else ""
    numbers = {"least": 100 * beside(least), "most": 100 * beside(most), "trend": trend}
    return Finding(numbers, sources, lambda: stacks(shown, KINDS, "% of the time of a profiled run"))


def steps(documents: Sequence[Document]) -> Finding:
    """Whole training steps: attention and everything else."""
    rows, sources = newest(of(documents, "step"), "summary", STEP)
    rows = [row for row in rows if row["fits"] and row.get("outside_attention_seconds") is not None]
    striped = some(row for row in rows if plain(row["layout"]) != "contiguous")
    rows.sort(key=lambda row: (row["length"], row["preset"], row["layout"]))
    base = {tuple(row[n] for n in STEP[:3]): row["seconds"] for row in rows if plain(row["layout"]) == "contiguous"}
    shown = []
    for row in rows:
        whole = base.get(tuple(row[n] for n in STEP[:3]), row["seconds"])
        outside = 100 * row["outside_attention_seconds"] / whole
        parts = {"attention": 100 * row["seconds"] / whole - outside, "everything else": outside}
        gain = "" if row["layout"] == "contiguous()" else f", {ratio(row):.2f}× of {row['step_bound']:.2f}"
        label = f"{row['preset']}, {tokens(row['length'])} on {row['members']}, {plain(row['layout'])}"
        shown.append((label, parts, f"{row['seconds']:.2f} s{gain}"))
    rest = span((100 * (1 - row["attention_share"]) for row in striped), ".0f")
    colours = {"attention": "blue", "everything else": "yellow"}
    best = max(striped, key=ratio)
    where = f"{best['preset']} with {tokens(best['length'])} tokens on {best['members']} GPUs"
    numbers = {"times": span(ratio(row) for row in striped), "rest": rest, "best": ratio(best), "where": where}
    return Finding(numbers, sources, lambda: stacks(shown, colours, "% of the step with contiguous"))


def overhead(documents: Sequence[Document]) -> Finding:
    """A training step by component, from the suite `overhead`. The table lists every component."""
    rows, sources = newest(of(documents, "overhead"), "rows", ("length", "what"))
    shown, cells = [], []
    for length in sorted({row["length"] for row in some(rows)}):
        parts = {str(row["what"]): float(row["seconds"]) * row["times"] for row in rows if row["length"] == length}
        total = sum(parts.values())
        shares = {what: 100 * seconds / total for what, seconds in parts.items()}
        cells += [(f"{length:,}", what, f"{parts[what]:.3g} s", f"{shares[what]:.2g} %") for what in parts]
        shown.append((f"{length:,} tokens", shares, f"{total:,.4g} s"))
    largest = max(shares, key=lambda what: shares[what])
    drawn = _largest(shown)
    colours = dict(zip(dict.fromkeys(what for _, parts, _ in drawn for what in parts), CYCLE, strict=False))
    numbers = {"length": length, "largest": largest, "share": shares[largest]}
    table = Table(("tokens", "component", "seconds per step", "share"), tuple(cells))
    return Finding(numbers, sources, lambda: stacks(drawn, colours, "% of the time"), table)


def _largest(rows: Sequence[Bar]) -> list[Bar]:
    """Keep the largest parts of some bars, as many as a legend may have, and add up the others."""
    names = list(dict.fromkeys(name for _, parts, _ in rows for name in parts))
    if len(names) <= ENTRIES:
        return list(rows)
    order = sorted(names, key=lambda name: -max(parts.get(name, 0.0) for _, parts, _ in rows))
    small = order[ENTRIES - 1 :]
    drawn: list[Bar] = []
    for label, parts, text in rows:
        kept = {name: parts[name] for name in parts if name not in small}
        others = sum(parts.get(name, 0.0) for name in small)
        drawn.append((label, {**kept, words(sorted(small)): others}, text))
    return drawn


_RATE = ("preset", "length", "devices", "hardware", "layout", "measured")  # identify a row of the suite `scale`


def rates(documents: Sequence[Document]) -> Finding:
    """Tokens per second of attention by layout, as measured by the suite `scale`."""
    rows, sources = newest(of(documents, "scale"), "rows", _RATE)
    measured = some(row for row in rows if row["measured"])
    points: list[Point] = [
        (f"{r['preset']}, {r['devices']} × {r['hardware']}", plain(r["layout"]), r["length"], r["tokens_per_second"])
        for r in measured
    ]
    best = max(measured, key=lambda row: (row["length"], row["tokens_per_second"]))
    numbers = {"length": tokens(best["length"]), "layout": plain(best["layout"]), "rate": best["tokens_per_second"]}
    names = "sequence length (tokens)", "tokens per second"
    draw = lambda: curves(panels(points), *names, x_format=tokens, colours=of_layout, log_y=True)  # noqa: E731
    return Finding(numbers, sources, draw)


def throughput(documents: Sequence[Document], plans: bool) -> Finding:
    """Planned tokens per second over devices, from the suite `scale`: the best layout, for the first and last model."""
    rows, sources = newest(of(documents, "scale"), "rows", _RATE)
    planned = some(row for row in rows if plans and not row["measured"] and row["hardware"] != "cpu")
    presets = list(dict.fromkeys(row["preset"] for row in planned))
    points: list[Point] = [
        (f"{r['preset']}, {r['hardware']}", f"{tokens(r['length'])} tokens", r["devices"], r["tokens_per_second"])
        for r in planned
        if r["preset"] in (presets[0], presets[-1])
    ]
    shown = panels(points, choose=max)
    first, most = shown[0].title, {name: max(line, key=lambda p: p[1])[0] for name, line in shown[0].lines.items()}
    short, long = next(iter(most)), list(most)[-1]
    gains = f"{long} run fastest on {most[long]:,} devices" + ("" if short == long else f", {short} on {most[short]:,}")
    numbers = {"first": first, "gains": gains, "compared": _as_measured(rows)}
    return Finding(numbers, sources, lambda: curves(shown, "devices", "tokens per second", log_y=True))


def _as_measured(rows: list[Row]) -> str:
    """A sentence on how far the plan is from what the same suite measured."""
    name = lambda row: (row["length"], row["devices"], row["layout"])  # noqa: E731
    planned = {name(row): row["tokens_per_second"] for row in rows if row["hardware"] == "cpu" and not row["measured"]}
    pairs = [(row["tokens_per_second"], planned[name(row)]) for row in rows if row["measured"] and name(row) in planned]
    if not pairs:
        return ""
    worst = max(abs(found / expected - 1) for found, expected in pairs)
    return f" On CPU cores, where both exist, plan and measurement differ by at most {worst:.0%}."


def traffic(documents: Sequence[Document]) -> Finding:
    """Bytes that a device sends per token, over devices."""
    key = ("preset", "batch", "layout", "devices", "cached")
    own = [x for x in of(documents, "decode") if any("wire_bytes" in row for row in x.rows("rows"))]
    rows, sources = newest(own, "rows", key)
    rows = some(row for row in rows if row["devices"] > 1)
    sizes = {(tuple(row[name] for name in key[:-1]), row["wire_bytes"]) for row in rows}
    same = len(sizes) == len({ring for ring, _ in sizes})  # at any sequence length
    points: list[Point] = []
    for row in rows:
        if not same or row["cached"] == rows[0]["cached"]:
            panel = f"{row['preset']}, {row['batch']} sequence{'s' * (row['batch'] > 1)}"
            where = "" if same else f", {tokens(row['cached'])}"
            points.append((panel, f"all{where}", row["devices"], row["wire_bytes"] / 1e3))
            points.append((panel, f"for attention{where}", row["devices"], row["attention_bytes"] / 1e3))
    most = max(row["wire_bytes"] for row in rows) / 1e3
    draw = lambda: curves(panels(points), "devices", "kB sent per token and device", floor=0.0)  # noqa: E731
    return Finding({"most": most, "however": ", at any sequence length" if same else ""}, sources, draw)


def memory(documents: Sequence[Document]) -> Finding:
    """Memory per device over sequence length."""
    points: list[Point] = []
    for document in (compiled := of(documents, "train_memory")):
        options, panel = document.content["configuration"], f"default chunks, {document.hardware}"
        preset = (options.get("model") or options.get("options") or {}).get("preset", "model")
        for row in document.rows("bytes_per_device"):
            points.append((panel, f"{preset} on {row['devices']}", row["length"], row["together"] / 2**30))
    steps, sources = newest(of(documents, "step"), "summary", STEP)
    for row in steps:
        if row["fits"] and row["layout"].startswith("striped"):
            name = f"{row['preset']} on {row['members']}"
            points.append(("the measured steps, --chunk 8192", name, row["length"], row["needed_bytes"] / 2**30))
    shown = panels(some(points))
    finding = next(filter(None, map(_less_memory, compiled)), "Memory per device by sequence length")
    names = "sequence length (tokens)", "GiB per device"
    draw = lambda: curves(shown, *names, x_format=tokens, log_y=True)  # noqa: E731
    return Finding({"finding": finding}, (*compiled, *sources), draw)


def _less_memory(document: Document) -> str | None:
    """State what more devices save at the longest length, if a document has it on several device counts."""
    rows = document.rows("bytes_per_device")
    longest = max((row["length"] for row in rows), default=0)
    same = sorted((row for row in rows if row["length"] == longest), key=lambda row: row["devices"])
    if len({row["devices"] for row in same}) < 2:
        return None
    few, many = same[0], same[-1]
    alone = "a single one" if few["devices"] == 1 else f"each of {few['devices']}"
    part = f"{100 * many['together'] / few['together']:.0f} % of the memory that {alone} would"
    return f"With {longest:,} tokens, each of {many['devices']} devices needs {part}"


def peers(documents: Sequence[Document]) -> Finding:
    """Seconds of other libraries on the same problem, each in its fastest configuration."""
    last = some(of(documents, "cpu_peers", "peers"))[-1]
    points: list[Point] = []
    for row in last.rows("contestants"):
        name = _FAMILIES.get(row["family"], row["family"]) + ("" if row["status"] == "right" else " (wrong)")
        timed = [(int(n), times["both"]) for n, times in row.get("lengths", {}).items() if "both" in times]
        points += [("8 heads × 64, float32", name, n, both["median_seconds"]) for n, both in timed]
    gains = [row["both"]["times_ours"] for row in last.content.get("fastest_jax_peer", {}).values()]
    finding = "Time of other libraries for the same attention on a CPU"
    if gains:
        finding = f"The fastest other JAX library takes {span(gains, '.1f')} times as long on a CPU"
    names, shown = ("sequence length (tokens)", "seconds"), panels(some(points), choose=min)
    return Finding({"finding": finding}, [last], lambda: curves(shown, *names, x_format=tokens, log_y=True))

"""Overhead: where the time goes that is not attention's arithmetic."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from striped_attention.report import figures
from striped_attention.report.read import Document, of
from striped_attention.report.section import Section, newest, plain, ratio, span, tokens
from striped_attention.report.speed import ATTENTION, STEP
from striped_attention.report.style import CYCLE

# Kinds of work in a profile, as `bench/profile.py` names them, and their colours.
KINDS = {
    "attention, forward": "blue",
    "attention, backward": "sky",
    "merges, sums and slices": "pink",
    "copies": "yellow",
    "copies in place of hops": "orange",
    "nothing": "quiet",
}


def busiest(documents: Sequence[Document], layout: str) -> tuple[list[dict[str, Any]], tuple[Document, ...]]:
    """The slowest member of every measured ring with a layout, by tokens a device."""
    rows, sources = newest(of(documents, "gpu"), "members", (*ATTENTION, "rank"))
    slowest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        ring = tuple(row[name] for name in ATTENTION)
        if row["layout"] == layout and (ring not in slowest or row["both"] > slowest[ring]["both"]):
            slowest[ring] = row
    return sorted(slowest.values(), key=lambda row: (_each(row), row["members"])), sources


def _each(row: dict[str, Any]) -> int:
    """Tokens of a GPU."""
    return row["length"] // row["members"]


def beside(row: dict[str, Any]) -> float:
    """The part of a profile that is not in attention's kernels."""
    where = row["where"]
    return 1 - sum(where[kind] for kind in where if kind.startswith("attention")) / sum(where.values())


def kernels(documents: Sequence[Document]) -> Section | None:
    """Shares of a striped ring's time by kind of kernel."""
    rows, sources = busiest(documents, "striped(1)")
    rows = [row for row in rows if row["where"]]
    if not rows:
        return None
    shown = []
    for row in rows:
        total = sum(row["where"].values())
        parts = {kind: 100 * seconds / total for kind, seconds in row["where"].items()}
        label = f"{_each(row):,} tokens each, {row['members']} GPUs, {row['heads']}"
        shown.append((label, parts, f"{100 * beside(row):.1f} % beside attention"))
    least, most = min(rows, key=beside), max(rows, key=beside)
    return Section(
        name="kernels",
        title=(
            f"Beside the fused kernels a ring spends {100 * beside(least):.0f} to {100 * beside(most):.0f} % of "
            f"attention's time" + (", the less the more tokens a GPU has" if _each(least) > _each(most) else "")
        ),
        caption=(
            "One layer's attention, forward and backward, with the layout striped(1), as a profile of the busiest "
            "GPU shows it. Each step's result must be merged with the ones before (merges, sums and slices); hops "
            "are keys and values on their way to the neighbour, for which a copy stands here; nothing is when no "
            "kernel ran. a:b are query and key heads."
        ),
        sources=sources,
        draw=functools.partial(figures.stacks, shown, KINDS, "percent of the time of a profiled run"),
    )


def steps(documents: Sequence[Document]) -> Section | None:
    """Whole training steps: attention and all the rest."""
    rows, sources = newest(of(documents, "step"), "summary", STEP)
    rows = [row for row in rows if row["fits"] and row.get("outside_attention_seconds") is not None]
    striped = [row for row in rows if plain(row["layout"]) != "contiguous"]
    if not striped:
        return None
    rows.sort(key=lambda row: (row["length"], row["preset"], row["layout"]))
    base = {tuple(row[n] for n in STEP[:3]): row["seconds"] for row in rows if plain(row["layout"]) == "contiguous"}
    shown = []
    for row in rows:
        whole = base.get(tuple(row[n] for n in STEP[:3]), row["seconds"])
        outside = 100 * row["outside_attention_seconds"] / whole
        parts = {"attention": 100 * row["seconds"] / whole - outside, "all the rest": outside}
        gain = "" if row["layout"] == "contiguous()" else f", {ratio(row):.2f}× of at most {row['step_bound']:.2f}×"
        label = f"{row['preset']}, {tokens(row['length'])} tokens on {row['members']}, {plain(row['layout'])}"
        shown.append((label, parts, f"{row['seconds']:.2f} s{gain}"))
    return Section(
        name="steps",
        title=(
            f"Whole training steps become {span(ratio(row) for row in striped)} times as fast; the rest of the model "
            f"takes {span((100 * (1 - row['attention_share']) for row in striped), '.0f')} % of a striped step"
        ),
        caption=(
            "A training step is forward, backward and the optimizer. The step with contiguous pieces is 100 %; only "
            "attention can gain from another layout, so the rest bounds the gain. Labels: model, tokens of the text, "
            "GPUs, layout. One GPU does one member's share; transfers between GPUs are not in it."
        ),
        sources=sources,
        draw=functools.partial(
            figures.stacks,
            shown,
            {"attention": "blue", "all the rest": "yellow"},
            "percent of the step with contiguous",
        ),
    )


def outside(documents: Sequence[Document]) -> Section | None:
    """What else a ring costs, from the suite `overhead`."""
    rows, sources = newest(of(documents, "overhead"), "rows", ("length", "what"))
    if not rows:
        return None
    kinds = list(dict.fromkeys(str(row["what"]) for row in rows))
    lengths = sorted({row["length"] for row in rows})
    shown = []
    for length in lengths:
        parts = {str(row["what"]): float(row["seconds"]) * row["times"] for row in rows if row["length"] == length}
        total = sum(parts.values())
        shown.append((f"{length:,} tokens", {k: 100 * v / total for k, v in parts.items()}, f"{total:,.3f} s"))
    shares = shown[-1][1]
    largest = max(shares, key=lambda what: shares[what])
    return Section(
        name="overhead",
        title=f"With {lengths[-1]:,} tokens, {largest} takes most of the time: {shares[largest]:.0f} %",
        caption=(
            "Everything that a step does, attention and the rest, as shares of the whole: the parts of a layer as "
            "often as there are layers. At the end of a bar the seconds of all together."
        ),
        sources=sources,
        draw=functools.partial(
            figures.stacks, shown, dict(zip(kinds, itertools.cycle((*CYCLE, "quiet")))), "percent of the time"
        ),
    )

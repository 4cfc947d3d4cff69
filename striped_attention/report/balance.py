"""Balance: which device works at which step, measured where a result has it, else counted by the planner."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import striped_attention as sa
from striped_attention.mask import Mask, packed
from striped_attention.report import figures
from striped_attention.report.read import Document, of
from striped_attention.report.section import Section, is_striped, plain, tokens

DEVICES, LENGTH = 8, 65_536  # of what is counted where no result has it
_RING = (
    "The text is cut into one part per device. Keys and values travel round the ring of devices, so that after as "
    "many steps as there are devices everybody has met everything; a step is over when the busiest device is done "
    "with it."
)
_LAYOUTS = (
    "A layout says which tokens a device gets: contiguous is one piece of the text each (Ring Attention), striped(g) "
    "deals g tokens at a time like cards, zigzag gives everybody a piece of the beginning and its mirror image."
)
Maps = dict[str, np.ndarray]


def work(documents: Sequence[Document]) -> Section:
    """Heat maps, device × step, for every layout side by side."""
    measured, sources = _measured(documents)
    counted, plans = _planned(documents)
    rows = [*measured, *(counted or _counted())]
    first = rows[0][1]
    how = "Rows that say measured are seconds; the others are counted tiles of work." if measured else "Counted work."
    return Section(
        name="work",
        title=f"Every step waits for its busiest device: {_finding(first)}",
        caption=(
            f"{_RING} {_LAYOUTS} The stronger the colour the more work; an empty square is a device that waits. The "
            f"number above a map is the time of all steps, over that of the least work shared equally; 1 is perfect. "
            f"{how}"
        ),
        sources=(*sources, *plans),
        draw=functools.partial(figures.heat_maps, rows, "of this row"),
    )


def _finding(maps: Maps) -> str:
    paths = figures.over_ideal(maps)
    best = min(paths, key=lambda name: paths[name])
    base = f"contiguous takes {paths['contiguous']:.2f} times the ideal" if "contiguous" in paths else "at best"
    return f"{base}, {best} {paths[best]:.2f}"


def _measured(documents: Sequence[Document]) -> tuple[list[tuple[str, Maps]], tuple[Document, ...]]:
    """Seconds of each device and step, from the last `layouts` result: its most devices, its longest text."""
    for document in reversed(of(documents, "layouts")):
        rows = document.rows("critical_path.rows")
        if rows:
            devices, length = max((row["devices"], row["length"]) for row in rows)
            chosen = [row for row in rows if (row["devices"], row["length"]) == (devices, length)]
            maps = {plain(row["layout"]): np.asarray(row["seconds"], float) for row in chosen}
            return [(f"measured, causal, {tokens(length)}", maps)], (document,)
    return [], ()


def _planned(documents: Sequence[Document]) -> tuple[list[tuple[str, Maps]], tuple[Document, ...]]:
    """Counted work in plans, the last of each mask."""
    rows, sources = {}, {}
    for document in of(documents, "plan"):
        choices = [choice for choice in document.rows("choices") if choice["tiles"] is not None]
        mask = str(document.content["configuration"].get("mask"))
        if choices:
            maps = {plain(choice["layout"]): _weighted(choice) for choice in choices}
            rows[mask] = {name: maps[name] for name in sorted(maps)}
            sources[mask] = document
    return [(f"counted, {mask}", maps) for mask, maps in rows.items()], tuple(sources.values())


def _weighted(choice: dict[str, Any]) -> np.ndarray:
    """Tiles by their size: kernels differ in it."""
    return np.asarray(choice["tiles"], float) * math.prod(choice.get("rates", {}).get("tile", (1,)))


@functools.cache
def _counted() -> list[tuple[str, Maps]]:
    masks: dict[str, Mask] = {"causal": sa.causal(), "packed documents": packed(LENGTH)}
    layouts = [sa.contiguous(), sa.striped(), sa.striped(256), sa.zigzag()]
    found = []
    for name, mask in masks.items():
        plan = sa.plan(DEVICES, LENGTH, mask=mask, hardware="cpu", model="1b", layouts=layouts)
        tiles = {choice.layout: choice.tiles for choice in plan.choices}
        maps = {plain(repr(layout)): tiles[layout].astype(float) for layout in layouts}
        found.append((f"counted, {name}", maps))
    return found


def timeline(documents: Sequence[Document]) -> Section:
    """When each device computes and when it waits, for contiguous and the best other layout."""
    plans = [d for d in of(documents, "plan") if all(choice["timelines"] for choice in d.rows("choices"))]
    lines, where = _lines_of(plans[-1]) if plans else _lines()
    (base, *_), others = lines.items(), [name for name in lines if name != "contiguous"]
    ends = {name: float((begin + lasts).max()) for name, (begin, lasts) in lines.items()}
    title = "Contiguous is the best layout here"
    if others:
        title = f"Without waiting, the forward pass ends {ends[base[0]] / ends[others[0]]:.2f} times as soon"
    return Section(
        name="timeline",
        title=title,
        caption=(
            f"One layer's attention, forward, {where}: a row is a device, a bar one step of computing, a gap is "
            f"waiting for a neighbour. {_RING} Times are worked out from counted tiles and the speeds that the "
            f"planner assumes, not measured."
        ),
        sources=tuple(plans[-1:]),
        draw=functools.partial(figures.timelines, lines),
    )


def _lines_of(document: Document) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], str]:
    choices = document.rows("choices")  # the fastest first
    base = next(choice for choice in choices if plain(choice["layout"]) == "contiguous")
    shown = [base] + [choice for choice in choices[:1] if choice is not base]
    forward = {plain(choice["layout"]): choice["timelines"][0] for choice in shown}
    lines = {name: (np.asarray(one["begin"]), np.asarray(one["work"])) for name, one in forward.items()}
    options = document.content["configuration"]
    return (
        lines,
        f"{options.get('tokens', 0):,} tokens ({options.get('mask')}) on {document.hardware.split('for ')[-1]}",
    )


@functools.cache
def _lines() -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], str]:
    plan = sa.plan(DEVICES, 4 * LENGTH, hardware="h200", model="1b", layouts=[sa.striped()])
    best = next(choice for choice in plan.choices if is_striped(repr(choice.layout)))
    lines = {plain(repr(choice.layout)): choice.timelines()[0] for choice in (plan.baseline, best)}
    where = f"{4 * LENGTH:,} tokens (causal) on {DEVICES} × h200"
    return {name: (line.begin, line.work) for name, line in lines.items()}, where

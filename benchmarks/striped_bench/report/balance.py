"""Balance: work by device and step, as measured if a result has it, or else as counted by the planner."""

import functools
import math
from collections.abc import Sequence

import numpy as np

import striped_attention as sa
from striped_attention.core.mask import Mask, packed
from striped_bench.report.maps import heat_maps, over_ideal, timelines
from striped_bench.report.read import Document, of
from striped_bench.report.section import Finding, NoData, some
from striped_bench.report.text import plain, tokens

DEVICES, LENGTH = 8, 65_536  # for counted work, if no result has any
Maps = dict[str, np.ndarray]
Lines = dict[str, tuple[np.ndarray, np.ndarray]]


def work(documents: Sequence[Document], plans: bool) -> Finding:
    """Heat maps of work, device × step, with the layouts side by side.

    Work is as measured and as in the files of `striped plan`; with `plans` it is also counted where there is no file.
    """
    measured, sources = _measured(documents)
    counted, planned = _planned(documents)
    if plans and not counted:
        counted = _counted()
    rows = some([*measured, *counted])
    paths = over_ideal(rows[0][1])
    best = min(paths, key=lambda name: paths[name])
    base = f"contiguous takes {paths['contiguous']:.2f} times the ideal time" if "contiguous" in paths else "at best"
    numbers = {"finding": f"{base}, {best} {paths[best]:.2f}", "how": _HOW[bool(measured), bool(counted)]}
    return Finding(numbers, (*sources, *planned), lambda: heat_maps(rows, "of this row"))


_HOW = {
    (True, True): "Measured rows show seconds; counted rows show tiles, as striped plan counts them.",
    (True, False): "The maps show measured seconds.",
    (False, True): "The maps show tiles, as striped plan counts them; nothing was measured.",
}


def _measured(documents: Sequence[Document]) -> tuple[list[tuple[str, Maps]], list[Document]]:
    """Seconds by device and step, from the latest `layouts` result: its largest ring and longest sequence."""
    found = [document for document in of(documents, "layouts") if document.rows("critical_path.rows")][-1:]
    if not found:
        return [], []
    rows = found[0].rows("critical_path.rows")
    devices, length = max((row["devices"], row["length"]) for row in rows)
    chosen = [row for row in rows if (row["devices"], row["length"]) == (devices, length)]
    maps = {plain(row["layout"]): np.asarray(row["seconds"], float) for row in chosen}
    return [(f"measured, causal, {tokens(length)}", maps)], found


def _planned(documents: Sequence[Document]) -> tuple[list[tuple[str, Maps]], list[Document]]:
    """Counted work, from the latest plan of each mask."""
    rows, sources = {}, {}
    for document in of(documents, "plan"):
        choices = [choice for choice in document.rows("choices") if choice["tiles"] is not None]
        mask = f"counted, {document.content['configuration'].get('mask')}"
        if choices:
            # Weight tiles by their size, which depends on the kernel.
            sizes = [math.prod(choice.get("rates", {}).get("tile", (1,))) for choice in choices]
            works = [np.asarray(choice["tiles"], float) * size for choice, size in zip(choices, sizes, strict=True)]
            maps = {plain(choice["layout"]): work for choice, work in zip(choices, works, strict=True)}
            rows[mask], sources[mask] = dict(sorted(maps.items())), document
    return list(rows.items()), list(sources.values())


@functools.cache
def _counted() -> list[tuple[str, Maps]]:
    masks: dict[str, Mask] = {"causal": sa.causal(), "packed documents": packed(LENGTH)}
    layouts = [sa.contiguous(), sa.striped(), sa.striped(256), sa.zigzag()]
    found = []
    for name, mask in masks.items():
        plan = sa.plan(DEVICES, LENGTH, mask=mask, hardware="cpu", model="1b", layouts=layouts)
        tiles = {choice.layout: choice.tiles for choice in plan.choices}
        found.append((f"counted, {name}", {plain(repr(x)): tiles[x].astype(float) for x in layouts}))
    return found


def timeline(documents: Sequence[Document], plans: bool) -> Finding:
    """Computing and idle time of each device, for contiguous and the best other layout.

    They are those of the last file of `striped plan`; without a file, and with `plans`, of a plan made here.
    """
    files = [d for d in of(documents, "plan") if all(choice["timelines"] for choice in d.rows("choices"))][-1:]
    if not (files or plans):
        raise NoData
    lines, where = _recorded(files[0]) if files else _worked_out()
    base, *others = (float((begin + lasts).max()) for begin, lasts in lines.values())
    finding = "contiguous is the best layout here"
    if others:
        finding = f"with less idle time the forward pass is {base / others[0]:.2f} times as fast as with contiguous"
    return Finding({"finding": finding, "where": where}, files, lambda: timelines(lines))


def _recorded(document: Document) -> tuple[Lines, str]:
    choices, options = document.rows("choices"), document.content["configuration"]  # fastest first
    base = next(choice for choice in choices if plain(choice["layout"]) == "contiguous")
    shown = [base] + [choice for choice in choices[:1] if choice is not base]
    forward = {plain(choice["layout"]): choice["timelines"][0] for choice in shown}
    where = f"{options.get('tokens', 0):,} tokens ({options.get('mask')}) on {document.hardware.split('for ')[-1]}"
    return {name: (np.asarray(one["begin"]), np.asarray(one["work"])) for name, one in forward.items()}, where


@functools.cache
def _worked_out() -> tuple[Lines, str]:
    plan = sa.plan(DEVICES, 4 * LENGTH, hardware="h200", model="1b", layouts=[sa.striped()])
    best = next(choice for choice in plan.choices if choice.layout == sa.striped())
    forward = {plain(repr(choice.layout)): choice.timelines()[0] for choice in (plan.baseline, best)}
    where = f"{4 * LENGTH:,} tokens (causal) on {DEVICES} × h200"
    return {name: (line.begin, line.work) for name, line in forward.items()}, where

"""Curves: line plots over a quantity that doubles from point to point, such as lengths or devices."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib.ticker as ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from striped_bench.report.style import MARKERS, colour, figure, legend_below

Number = int | float
Line = list[tuple[Number, Number]]
Point = tuple[str, str, Number, Number]  # panel, line, x, y
Marks = Sequence[tuple[Number, Number, str]]


class Panel(NamedTuple):
    """Curves that share axes. `bound` is a dashed line, horizontal if it has one point; `marks` are labelled points."""

    title: str
    lines: Mapping[str, Line]
    bound: Line | tuple[()] = ()
    marks: Marks = ()


def panels(
    points: Iterable[Point],
    bounds: Mapping[str, Number] = MappingProxyType({}),
    marks: Mapping[str, Marks] = MappingProxyType({}),
    choose: Callable[[Number, Number], Number] = lambda old, new: new,
) -> list[Panel]:
    """Group points by panel and line; `choose` picks between two values at the same x."""
    found: dict[str, dict[str, dict[Number, Number]]] = {}
    for panel, name, x, y in points:
        line = found.setdefault(panel, {}).setdefault(name, {})
        line[x] = choose(line.get(x, y), y)
    lines = {panel: {name: list(line.items()) for name, line in named.items()} for panel, named in found.items()}
    ends: dict[str, Line] = {panel: [(0, bound)] for panel, bound in bounds.items()}
    return [Panel(panel, named, ends.get(panel, ()), marks.get(panel, ())) for panel, named in lines.items()]


def curves(
    panels: Sequence[Panel],
    x_label: str,
    y_label: str,
    *,
    x_format: Callable[[Number], str] = lambda x: f"{x:g}",
    colours: Callable[[str], str] | None = None,
    floor: float | None = None,
    log_y: bool = False,
) -> Figure:
    """Line plots over a quantity that doubles from point to point: lengths, devices, tiles."""
    columns = min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    made = figure(0.6 + 2.7 * rows)
    grid = made.subplots(rows, columns, squeeze=False, sharey=not log_y)
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    cycle = itertools.cycle([*MARKERS.items(), *zip(MARKERS, "X<>hp8", strict=True)])
    chosen = {name: (which := colours(name), MARKERS[which]) if colours else next(cycle) for name in names}
    values = [y for panel in panels for points in panel.lines.values() for _, y in points]
    bounds = [y for panel in panels for _, y in panel.bound]
    for axes, panel in zip(grid.flat, panels, strict=False):
        _panel(axes, panel, chosen)
        places = sorted({x for points in panel.lines.values() for x, _ in points} | {x for x, *_ in panel.marks})
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [x_format(x) for x in places])
        axes.minorticks_off()
        axes.set_xlim(places[0] / 1.35, places[-1] * 1.35)
        axes.set(xlabel=x_label)
        if log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
            axes.yaxis.set_minor_locator(ticker.NullLocator())
        elif floor is not None:
            axes.set_ylim(min(floor, 0.97 * min(values)), 1.03 * max(values + bounds))
    for axes in grid[:, 0]:
        axes.set_ylabel(y_label)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    legend_below(made, list(grid.flat[: len(panels)]))
    return made


def _panel(axes: Axes, panel: Panel, chosen: Mapping[str, tuple[str, str]]) -> None:
    used: dict[str, int] = {}
    for i, (name, points) in enumerate(panel.lines.items()):
        which, marker = chosen[name]
        used[which] = used.get(which, 0) + 1
        style = {1: "-", 2: ":", 3: "-."}.get(used[which], "--")
        x, y = zip(*sorted(points), strict=True)
        width = max(1.2, 2.8 - 0.4 * i)  # an upper line leaves the edges of a lower one visible
        axes.plot(x, y, style, color=colour(which), marker=marker, linewidth=width, label=name)
    dashed: Any = {"color": colour("ink"), "linestyle": "--", "linewidth": 1.2, "label": "bound, 2 − 1/N"}
    if len(panel.bound) == 1:
        axes.axhline(panel.bound[0][1], **dashed)
    elif panel.bound:
        axes.plot(*zip(*panel.bound, strict=True), **dashed)
    star: Any = {"marker": "*", "color": colour("ink"), "markersize": 11, "linestyle": "none"}
    for place, height, text in panel.marks:
        axes.plot([place], [height], **star, label="the paper, whole step")
        axes.annotate(text, (place, height), (0, -8), textcoords="offset points", ha="center", va="top", fontsize=8.5)
    axes.set_title(panel.title)
    axes.grid(True, axis="y")

"""Curves: line plots over a quantity that doubles from point to point, such as lengths or devices."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib.ticker as ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from striped_bench.report.style import ENTRIES, MARKERS, abreast, colour, figure, fit, legend_below, named, width

Number = int | float
Line = list[tuple[Number, Number]]
Point = tuple[str, str, Number, Number]  # panel, line, x, y
Marks = Sequence[tuple[Number, Number, str]]


_TICKS = 10  # points with a tick each, at most
_NEAR: Any = {"textcoords": "offset points", "fontsize": 8.5}  # labels of points and lines


class Panel(NamedTuple):
    """Curves that share axes. `bound` is a dashed line, horizontal if it has one point; `marks` are labelled points."""

    title: str
    lines: Mapping[str, Line]
    bound: Line | tuple[()] = ()
    marks: Marks = ()
    bound_name: str = "bound, 2 − 1/N"


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
    """Line plots over a quantity that doubles from point to point: lengths, devices, tiles.

    Where a legend would be too long, every line has its name at its last point instead.
    """
    columns = min(len(panels), abreast(3.2))
    rows = math.ceil(len(panels) / columns)
    made = figure(0.2 + min(2.7, 0.66 * width()) * rows)
    grid = made.subplots(rows, columns, squeeze=False, sharey=not log_y)
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    cycle = itertools.cycle([*MARKERS.items(), *zip(MARKERS, "X<>hp8", strict=True)])
    direct = len(names) + any(panel.marks for panel in panels) > ENTRIES
    chosen = {name: (which := colours(name), MARKERS[which]) if colours else next(cycle) for name in names}
    values = [y for panel in panels for points in panel.lines.values() for _, y in points]
    bounds = [y for panel in panels for _, y in panel.bound]
    for axes, panel in zip(grid.flat, panels, strict=False):
        axes.set_xscale("log", base=2)
        if log_y:
            _decades(axes)
        elif floor is not None:
            axes.set_ylim(min(floor, 0.97 * min(values)), 1.06 * max(values + bounds))
        _panel(axes, panel, chosen, direct)
        axes.set_title(fit(panel.title, columns=columns))
        axes.set_xlabel(fit(x_label, columns=columns))
        _ticks(axes, panel, x_format, direct, width() / columns - 0.6)
    for axes in grid[:, 0]:
        axes.set_ylabel(y_label)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    if not direct:
        legend_below(made, named(grid.flat[: len(panels)]))
    return made


def _decades(axes: Axes) -> None:
    """Make the y axis logarithmic, with ticks at 1, 2 and 5."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def _ticks(axes: Axes, panel: Panel, x_format: Callable[[Number], str], direct: bool, inches: float) -> None:
    """Put a tick at every point, or at powers of two if there are many, and label those far from the last label.

    Lines with names at their ends get the room that the names need.
    """
    places = sorted({x for points in panel.lines.values() for x, _ in points} | {x for x, *_ in panel.marks})
    ends = places[0] / 1.35, places[-1] * 1.35
    if direct:
        free = {name: 1 - min(0.6, (0.2 + 0.075 * len(name)) / inches) for name in panel.lines}  # share left of a name
        octaves = [math.log2(max(points)[0] / ends[0]) / free[name] for name, points in panel.lines.items()]
        ends = ends[0], max(ends[1], ends[0] * 2 ** max(octaves))
    powers = [2**n for n in range(math.ceil(math.log2(places[0])), int(math.log2(places[-1])) + 1)]
    if len(places) > _TICKS and len(powers) > 1:
        places = powers
    near = (ends[1] / ends[0]) ** (0.27 / inches)  # the ratio of places 0.27 inches apart
    labels, last = [], 0.0
    for place in places:
        labels.append(x_format(place) if place > near * last else "")
        last = place if labels[-1] else last
    axes.set_xticks(places, labels)
    axes.minorticks_off()
    axes.set_xlim(*ends)


def _panel(axes: Axes, panel: Panel, chosen: Mapping[str, tuple[str, str]], direct: bool) -> None:
    used: dict[str, int] = {}
    for i, (name, points) in enumerate(panel.lines.items()):
        which, marker = chosen[name]
        used[which] = used.get(which, 0) + 1
        style = {1: "-", 2: ":", 3: "-."}.get(used[which], "--")
        x, y = zip(*sorted(points), strict=True)
        thick = max(1.2, 2.8 - 0.4 * i)  # an upper line leaves the edges of a lower one visible
        axes.plot(x, y, style, color=colour(which), marker=marker, linewidth=thick, label=name)
    if direct:
        for name, points in panel.lines.items():
            axes.annotate(name, max(points), (7, 0), ha="left", va="center", **_NEAR)
    _bound(axes, panel)
    star: Any = {"marker": "*", "color": colour("ink"), "markersize": 11, "linestyle": "none"}
    for place, height, text in panel.marks:
        axes.plot([place], [height], **star, label="the paper, whole step")
        axes.annotate(text, (place, height), (0, -8), ha="center", va="top", **_NEAR)
    axes.grid(True, axis="y")


def _bound(axes: Axes, panel: Panel) -> None:
    """Draw the bound with its name above it: on the left, where curves are low, if it is horizontal."""
    dashed: Any = {"color": colour("ink"), "linestyle": "--", "linewidth": 1.2}
    if len(panel.bound) == 1:
        _, height = panel.bound[0]
        axes.axhline(height, **dashed)
        text = f"{panel.bound_name}: {height:.4g}"
        axes.annotate(text, (0, height), (3, 2), xycoords=axes.get_yaxis_transform(), va="bottom", **_NEAR)
    elif panel.bound:
        axes.plot(*zip(*panel.bound, strict=True), **dashed)
        axes.annotate(panel.bound_name, max(panel.bound), (0, 3), ha="right", va="bottom", **_NEAR)

"""Figures: functions from plain data to matplotlib figures, one for each of seven kinds of figure."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib.ticker as ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from striped_bench.report.style import MARKERS, WIDTH, colour, figure, legend_below

Number = int | float
Line = list[tuple[Number, Number]]
Point = tuple[str, str, Number, Number]  # panel, line, x, y
Marks = Sequence[tuple[Number, Number, str]]
_SMALLEST = 1e-8  # stands for an error of 0, which a logarithmic axis cannot show
_ABREAST = 4  # heat maps per row
_LINES = 16  # devices drawn in a timeline
_LARGEST = 64  # devices and steps drawn in a heat map


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


def heat_maps(rows: Sequence[tuple[str, Mapping[str, np.ndarray]]], what: str) -> Figure:
    """Heat maps of work, device × step: layouts side by side, a row per mask. Each mask has its own colour scale."""
    columns = min(_ABREAST, max(len(maps) for _, maps in rows))
    cuts = [(name, maps, first) for name, maps in rows for first in range(0, len(maps), columns)]
    lines = [(name, maps, list(maps)[first : first + columns]) for name, maps, first in cuts]
    made = figure(0.45 + (0.5 + WIDTH / columns) * len(lines))
    made.set_layout_engine("compressed")
    grid = made.subplots(len(lines), columns, squeeze=False)
    for row, (name, maps, layouts) in zip(grid, lines, strict=True):
        most, paths = max(float(np.max(values)) for values in maps.values()), over_ideal(maps)
        for axes, layout in zip(row, layouts, strict=False):
            _heat(axes, np.asarray(maps[layout], float) / (most or 1.0))
            axes.set_title(f"{layout}\n{paths[layout]:.2f} × the ideal", fontsize=9)
            axes.set_xlabel("step")
            if axes is not row[0]:
                axes.set_yticks([])
        row[0].set_ylabel(f"{name}\ndevice")
        for axes in row[len(layouts) :]:
            axes.set_visible(False)
    scale = ((0.0, "no work"), (0.25, "a quarter"), (0.5, "half"), (1.0, f"the maximum {what}"))
    shades = [Patch(color=colour("blue"), alpha=alpha, label=text) for alpha, text in scale]
    made.legend(handles=shades, loc="outside lower center", ncols=len(shades))
    return made


def shares(maps: Mapping[str, Mapping[tuple[Number, Number], float]], x_format: Callable[[Number], str]) -> Figure:
    """Heat maps of shares, length × depth, with models side by side."""
    columns = min(_ABREAST, len(maps))
    rows = math.ceil(len(maps) / columns)
    made = figure(0.6 + 2.7 * rows)
    grid = made.subplots(rows, columns, squeeze=False)
    for axes, (name, cells) in zip(grid.flat, maps.items(), strict=False):
        lengths, depths = (sorted({place[i] for place in cells}) for i in (0, 1))
        for (length, depth), share in cells.items():
            x, y = lengths.index(length), depths.index(depth)
            box = _box(x - 0.48, y - 0.48, x + 0.48, y + 0.48)
            axes.add_patch(PathPatch(box, facecolor=colour("blue"), alpha=share, linewidth=0))
            ink = colour("paper" if share > 0.6 else "ink")
            axes.annotate(f"{100 * share:.0f}", (x, y), ha="center", va="center", fontsize=8, color=ink)
        axes.set_xticks(range(len(lengths)), [x_format(length) for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:g} %" for depth in depths])
        axes.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(len(depths) - 0.5, -0.5), title=name, xlabel="tokens")
        axes.tick_params(length=0)
    for axes in grid[:, 0]:
        axes.set_ylabel("depth of the needle")
    for axes in grid.flat[len(maps) :]:
        axes.set_visible(False)
    return made


def over_ideal(maps: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Critical path of each layout, relative to the least total work of any layout shared equally by all devices."""
    least = min(float(np.sum(values)) / len(values) for values in maps.values())
    return {layout: float(np.max(values, axis=0).sum()) / (least or 1.0) for layout, values in maps.items()}


def _heat(axes: Axes, shades: np.ndarray) -> None:
    """Draw squares whose opacity is the work, one path per shade. Large maps are subsampled."""
    keep = math.ceil(len(shades) / _LARGEST)
    shades = shades[::keep, ::keep]
    rounded = np.ceil(shades * 50) / 50
    for alpha in np.unique(rounded[rounded > 0]):
        squares = [_box(x - 0.47, y - 0.47, x + 0.47, y + 0.47) for y, x in np.argwhere(rounded == alpha).tolist()]
        path = Path.make_compound_path(*squares)
        axes.add_patch(PathPatch(path, facecolor=colour("blue"), alpha=float(alpha), linewidth=0))
    axes.set(xlim=(-0.5, shades.shape[1] - 0.5), ylim=(len(shades) - 0.5, -0.5), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(8 if len(shades) <= 16 else 4, integer=True))
        axis.set_major_formatter(ticker.FuncFormatter(lambda place, _: f"{int(place) * keep}"))
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(True)


def _box(left: float, top: float, right: float, bottom: float) -> Path:
    return Path([(left, top), (right, top), (right, bottom), (left, bottom), (left, top)], closed=True)


def timelines(lines: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Timelines of all devices by layout, given the start and the computing time of each step."""
    devices = len(next(iter(lines.values()))[0])
    shown = range(0, devices, math.ceil(devices / _LINES))
    made = figure(0.9 + len(lines) * (0.75 + 0.17 * len(shown)))
    column = made.subplots(len(lines), 1, squeeze=False, sharex=True)[:, 0]
    longest = max(float((begin + work).max()) for begin, work in lines.values())
    unit, name = (1e3, "milliseconds") if longest < 1 else (1.0, "seconds")
    for axes, (layout, (begin, work)) in zip(column, lines.items(), strict=True):
        _bars(axes, begin[shown] * unit, work[shown] * unit)
        ends = float((begin + work).max()) * unit
        axes.axvline(ends, color=colour("ink"), linestyle="--", linewidth=1.2)
        waiting = max(0.0, 1 - float(work.sum()) * unit / (ends * devices))
        axes.set_title(f"{layout}: {ends:.3g} {name}; devices wait {waiting:.0%} of the time", loc="left")
        axes.set(ylim=(len(shown) - 0.4, -0.6), ylabel="device")
        axes.set_yticks(range(len(shown)), [str(device) for device in shown])
    column[-1].set(xlabel=f"{name} since the start of the pass", xlim=(0, longest * unit * 1.03))
    names = [Patch(color=colour("blue"), label="computing, even steps"), Patch(color=colour("sky"), label="odd steps")]
    blank = Patch(facecolor="none", edgecolor=colour("quiet"), label="waiting")
    made.legend(handles=[*names, blank], loc="outside lower center", ncols=3)
    return made


def _bars(axes: Axes, begin: np.ndarray, work: np.ndarray) -> None:
    """Draw a bar per device and step, in alternating colours."""
    for first, shade in enumerate(("blue", "sky")):
        places = [(line, step) for line in range(len(begin)) for step in range(first, begin.shape[1], 2)]
        boxes = [_box(float(begin[at]), at[0] - 0.4, float(begin[at] + work[at]), at[0] + 0.4) for at in places]
        axes.add_patch(PathPatch(Path.make_compound_path(*boxes), facecolor=colour(shade), linewidth=0))


def stacks(rows: Sequence[tuple[str, Mapping[str, Number], str]], colours: Mapping[str, str], x_label: str) -> Figure:
    """Stacked horizontal bars. A row has a label, percentages by kind, and a note at the end of the bar."""
    made = figure(1.0 + 0.32 * len(rows))
    axes = made.subplots()
    left = np.zeros(len(rows))
    for kind, which in colours.items():
        width = np.array([parts.get(kind, 0.0) for _, parts, _ in rows])
        axes.barh(range(len(rows)), width, left=left, color=colour(which), label=kind, height=0.72)
        left += width
    for place, (_, _, text) in enumerate(rows):
        axes.annotate(text, (left[place], place), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    longest = max(len(text) for _, _, text in rows)
    axes.set_xticks(range(0, 101, 20))
    axes.set(xlabel=x_label, ylim=(len(rows) - 0.5, -0.5), xlim=(0, float(left.max()) * (1.03 + 0.0145 * longest)))
    axes.grid(True, axis="x")
    legend_below(made, [axes], 3)
    return made


def groups(
    rows: Mapping[str, Mapping[str, Number]],
    bounds: Mapping[str, Number],
    y_label: str,
    colours: Callable[[str], str],
    form: str = ".2f",
) -> Figure:
    """Grouped bars: a bar per name in every group, and a dashed line where the group has a bound."""
    made = figure(3.4)
    axes = made.subplots()
    names = list(dict.fromkeys(name for bars in rows.values() for name in bars))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [g + (i - (len(names) - 1) / 2) * width for g, bars in enumerate(rows.values()) if name in bars]
        heights = [bars[name] for bars in rows.values() if name in bars]
        axes.bar(places, heights, width * 0.9, color=colour(colours(name)), label=name)
        place: Any = {"textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 7.5}
        for x, y in zip(places, heights, strict=True):
            axes.annotate(format(y, form), (x, y), (0, -3), color=colour("paper"), **place)
    for g, name in enumerate(rows):
        if name in bounds:
            label = "bound" if g == 0 else None
            axes.plot([g - 0.42, g + 0.42], [bounds[name]] * 2, "--", color=colour("ink"), linewidth=1.2, label=label)
    axes.set_xticks(range(len(rows)), [name.replace("(", "\n(") for name in rows])
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set(ylabel=y_label)
    axes.grid(True, axis="y")
    legend_below(made, [axes], 5)
    return made


def dots(rows: Sequence[tuple[str, Number, Number | None]], x_label: str) -> Figure:
    """One value per line on a logarithmic axis, with its limit if it has one."""
    made = figure(0.9 + 0.24 * len(rows))
    axes = made.subplots()
    places = range(len(rows))
    values = [max(value, _SMALLEST) for _, value, _ in rows]
    axes.scatter(values, places, color=colour("blue"), label="largest error", zorder=3)
    limits = [(limit, place) for place, (_, _, limit) in enumerate(rows) if limit is not None]
    if limits:
        x, y = zip(*limits, strict=True)
        axes.scatter(x, y, color=colour("orange"), marker="|", s=90, linewidths=2, label="limit of the check", zorder=3)
    axes.set_xscale("log")
    axes.set_yticks(places, [label for label, _, _ in rows])
    axes.set(xlabel=x_label, ylim=(len(rows) - 0.5, -0.5))
    axes.margins(x=0.08)
    axes.grid(True)
    legend_below(made, [axes])
    return made

"""Maps: heat maps of work, device × step, and of shares, length × depth; and timelines of devices."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.ticker as ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from striped_bench.report.curves import Number
from striped_bench.report.style import abreast, colour, figure, fit, legend_below, narrow, width

_ABREAST = 4  # heat maps per row, at most
_LINES = 16  # devices drawn in a timeline
_LARGEST = 64  # devices and steps drawn in a heat map


def heat_maps(rows: Sequence[tuple[str, Mapping[str, np.ndarray]]], what: str) -> Figure:
    """Heat maps of work, device × step: layouts side by side, a row per mask. Each mask has its own colour scale."""
    columns = min(_ABREAST, abreast(1.1), max(len(maps) for _, maps in rows))
    cuts = [(name, maps, first) for name, maps in rows for first in range(0, len(maps), columns)]
    lines = [(name, maps, list(maps)[first : first + columns]) for name, maps, first in cuts]
    made = figure(0.1 + 0.25 * len(rows) + (0.4 + width() / columns) * len(lines))
    made.set_layout_engine("compressed", h_pad=0.08)  # keeps the squares close together
    grid = made.subplots(len(lines), columns, squeeze=False)
    for row, (name, maps, layouts) in zip(grid, lines, strict=True):
        most, paths = max(float(np.max(values)) for values in maps.values()), over_ideal(maps)
        first = layouts[0] == next(iter(maps))
        for axes, layout in zip(row, layouts, strict=False):
            _heat(axes, np.asarray(maps[layout], float) / (most or 1.0))
            head = "\n\n" if first else ""  # room for the name of the mask
            axes.set_title(f"{head}{layout}\n{paths[layout]:.2f} × ideal", fontsize=8.5)
            axes.set_xlabel("step")
            if axes is not row[0]:
                axes.set_yticks([])
        row[0].set_ylabel("device")
        if first:
            above: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "in_layout": False}
            row[0].annotate(name, (0, 1), (0, 32), fontweight="bold", **above)
        for axes in row[len(layouts) :]:
            axes.set_visible(False)
    scale = ((0.0, "no work"), (0.25, "a quarter"), (0.5, "half"), (1.0, f"the maximum {what}"))
    legend_below(made, {text: Patch(color=colour("blue"), alpha=alpha) for alpha, text in scale})
    return made


def shares(maps: Mapping[str, Mapping[tuple[Number, Number], float]], x_format: Callable[[Number], str]) -> Figure:
    """Heat maps of shares, length × depth, with models side by side."""
    columns = min(abreast(2), len(maps))
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
        axes.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(len(depths) - 0.5, -0.5), xlabel="tokens")
        axes.set_title(fit(name, columns=columns))
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
        axis.set_major_locator(ticker.MaxNLocator(8 if len(shades) <= 16 and not narrow() else 4, integer=True))
        axis.set_major_formatter(ticker.FuncFormatter(lambda place, _: f"{int(place) * keep}"))
    axes.tick_params(length=0)
    axes.spines[["top", "right"]].set_visible(True)


def timelines(lines: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Timelines of all devices by layout, given the start and the computing time of each step."""
    devices = len(next(iter(lines.values()))[0])
    shown = range(0, devices, math.ceil(devices / _LINES))
    made = figure(0.5 + len(lines) * (0.75 + 0.17 * len(shown)))
    column = made.subplots(len(lines), 1, squeeze=False, sharex=True)[:, 0]
    longest = max(float((begin + work).max()) for begin, work in lines.values())
    unit, name = (1e3, "milliseconds") if longest < 1 else (1.0, "seconds")
    for axes, (layout, (begin, work)) in zip(column, lines.items(), strict=True):
        _bars(axes, begin[shown] * unit, work[shown] * unit)
        ends = float((begin + work).max()) * unit
        axes.axvline(ends, color=colour("ink"), linestyle="--", linewidth=1.2)
        waiting = max(0.0, 1 - float(work.sum()) * unit / (ends * devices))
        axes.set_title(fit(f"{layout}: {ends:.3g} {name}; devices wait {waiting:.0%} of the time"), loc="left")
        axes.set(ylim=(len(shown) - 0.4, -0.6), ylabel="device")
        axes.set_yticks(range(len(shown)), [str(device) for device in shown])
    column[-1].set(xlabel=f"{name} since the start of the pass", xlim=(0, longest * unit * 1.03))
    names = {"computing, even steps": Patch(color=colour("blue")), "odd steps": Patch(color=colour("sky"))}
    legend_below(made, {**names, "waiting": Patch(facecolor="none", edgecolor=colour("quiet"))})
    return made


def _bars(axes: Axes, begin: np.ndarray, work: np.ndarray) -> None:
    """Draw a bar per device and step, in alternating colours."""
    for first, shade in enumerate(("blue", "sky")):
        places = [(line, step) for line in range(len(begin)) for step in range(first, begin.shape[1], 2)]
        boxes = [_box(float(begin[at]), at[0] - 0.4, float(begin[at] + work[at]), at[0] + 0.4) for at in places]
        axes.add_patch(PathPatch(Path.make_compound_path(*boxes), facecolor=colour(shade), linewidth=0))


def _box(left: float, top: float, right: float, bottom: float) -> Path:
    return Path([(left, top), (right, top), (right, bottom), (left, bottom), (left, top)], closed=True)

"""Bars: stacked bars, grouped bars, and dots in a row per value."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.ticker as ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from striped_bench.report.curves import Number
from striped_bench.report.style import abreast, colour, figure, fit, legend_below, named, narrow

_BAR, _DOT = 0.23, 0.15  # heights of lines in inches
_SMALLEST = 1e-8  # stands for an error of 0, which a logarithmic axis cannot show


Bar = tuple[str, Mapping[str, Number], str]  # label, parts in percent, note


def stacks(rows: Sequence[Bar], colours: Mapping[str, str], x_label: str) -> Figure:
    """Stacked horizontal bars. A row has a label, percentages by kind, and a note at the end of the bar.

    In a narrow figure the notes are above the bars, after the labels. Kinds that no row has are left out.
    """
    labels = [f"{label}: {text}" if narrow() and text else label for label, _, text in rows]
    notes = ["" if narrow() else text for *_, text in rows]
    made, axes, places = _lines(labels, _BAR)
    left = np.zeros(len(rows))
    for kind, which in colours.items():
        if any(kind in parts for _, parts, _ in rows):
            long = np.array([parts.get(kind, 0.0) for _, parts, _ in rows])
            axes.barh(places, long, left=left, color=colour(which), label=kind, height=_BAR)
            left += long
    for end, place, text in zip(left, places, notes, strict=True):
        axes.annotate(text, (end, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    longest = max(map(len, notes))
    axes.set_xticks(range(0, 101, 20))
    axes.set(xlabel=x_label, xlim=(0, float(left.max()) * (1.03 + 0.0145 * longest)))
    axes.grid(True, axis="x")
    legend_below(made, named([axes]))
    return made


def _lines(labels: Sequence[str], high: float) -> tuple[Figure, Axes, list[float]]:
    """Make axes with a line of some inches per label, and return the lines' places. The y axis is in inches.

    A label is to the left of its line, or above it in a narrow figure.
    """
    texts = [fit(label, 8.5) for label in labels]
    above = [0.15 * (text.count("\n") + 1) * narrow() for text in texts]
    ends = list(itertools.accumulate(high + 0.09 + label for label in above))
    made = figure(0.8 + ends[-1])
    axes = made.subplots()
    places = [end - high / 2 for end in ends]
    axes.set_ylim(ends[-1] + 0.05, 0)
    axes.set_yticks([] if narrow() else places, [] if narrow() else labels)
    for place, text in zip(places, texts, strict=True):
        if narrow():
            at: Any = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
            axes.annotate(text, (0, place - high / 2), (2, 2), fontsize=8.5, va="bottom", **at)
    return made, axes, places


def groups(
    rows: Mapping[str, Mapping[str, Number]],
    bounds: Mapping[str, Number],
    y_label: str,
    colours: Callable[[str], str],
    form: str = ".2f",
) -> Figure:
    """Grouped bars: a bar per name in every group, and a dashed line where the group has a bound."""
    names = list(dict.fromkeys(name for bars in rows.values() for name in bars))
    lines = math.ceil(len(rows) / abreast(0.37 * len(names)))
    each = math.ceil(len(rows) / lines)  # groups in a line
    made = figure(0.4 + 2.8 * lines)
    grid = made.subplots(lines, 1, squeeze=False, sharey=True)[:, 0]
    for line, axes in enumerate(grid):
        shown = list(rows)[line * each : (line + 1) * each]
        _groups(axes, {group: rows[group] for group in shown}, {name: colour(colours(name)) for name in names}, form)
        ends = [(g, bounds[group]) for g, group in enumerate(shown) if group in bounds]
        if ends:
            places = [(g - 0.42, g + 0.42) for g, _ in ends]
            axes.hlines([y for _, y in ends], *zip(*places, strict=True), colour("ink"), "--", label="bound", lw=1.2)
        axes.set_xlim(-0.5, each - 0.5)
        axes.set_ylabel(y_label)
    legend_below(made, named(grid))
    return made


def _groups(axes: Axes, rows: Mapping[str, Mapping[str, Number]], colours: Mapping[str, str], form: str) -> None:
    """Draw the bars of some groups, with the values inside them."""
    thick = 0.8 / len(colours)
    for i, (name, which) in enumerate(colours.items()):
        places = [g + (i - (len(colours) - 1) / 2) * thick for g, bars in enumerate(rows.values()) if name in bars]
        heights = [bars[name] for bars in rows.values() if name in bars]
        axes.bar(places, heights, thick * 0.9, color=which, label=name)
        place: Any = {"textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 8}
        for x, y in zip(places, heights, strict=True):
            axes.annotate(format(y, form), (x, y), (0, -3), color=colour("paper"), **place)
    axes.set_xticks(range(len(rows)), [name.replace("(", "\n(") for name in rows])
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(True, axis="y")


def dots(rows: Sequence[tuple[str, Number, Number | None]], x_label: str) -> Figure:
    """One value per line on a logarithmic axis, with its limit if it has one."""
    made, axes, places = _lines([label for label, *_ in rows], _DOT)
    values = [max(value, _SMALLEST) for _, value, _ in rows]
    axes.scatter(values, places, color=colour("blue"), label="largest error", zorder=3)
    limits = [(limit, place) for place, (*_, limit) in zip(places, rows, strict=True) if limit is not None]
    if limits:
        x, y = zip(*limits, strict=True)
        axes.scatter(x, y, color=colour("orange"), marker="|", s=90, linewidths=2, label="limit of the check", zorder=3)
    axes.set_xscale("log")
    axes.set(xlabel=x_label)
    axes.margins(x=0.08)
    axes.grid(True)
    legend_below(made, named([axes]))
    return made

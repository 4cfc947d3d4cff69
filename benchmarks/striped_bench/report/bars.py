"""Bars: stacked bars, grouped bars, and dots in a row per value."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.ticker as ticker
import numpy as np
from matplotlib.figure import Figure

from striped_bench.report.curves import Number
from striped_bench.report.style import colour, figure, legend_below

_SMALLEST = 1e-8  # stands for an error of 0, which a logarithmic axis cannot show


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

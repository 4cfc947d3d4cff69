"""Context: does a model use its context? Loss by position, during and after training, and needle-in-a-haystack."""

import pathlib
from collections.abc import Sequence

import numpy as np

from striped_bench.report.curves import Line, Number, Panel, curves
from striped_bench.report.maps import shares
from striped_bench.report.read import Document, of
from striped_bench.report.section import Finding, Row, some
from striped_bench.report.text import tokens, words

LINES = 5  # validations drawn per run, including the first and the last


def validation(documents: Sequence[Document]) -> Finding:
    """Loss by position over the course of training runs."""
    runs = some(run for run in of(documents, "train") if len(run.rows("validation")) > 1)
    names = _names([str(run.path) for run in runs])
    panels = []
    for run, name in zip(runs, names, strict=True):
        rows = {row["step"]: row for row in run.rows("validation")}
        chosen = sorted({list(rows)[i] for i in np.linspace(0, len(rows) - 1, LINES).round().astype(int)})
        panels.append(Panel(name, {f"step {step:,}": _line(rows[step]["by_position"]) for step in chosen}))
    first, *_, last = panels[-1].lines.values()
    numbers = {"run": names[-1], "length": tokens(last[-1][0]), "before": first[-1][1], "after": last[-1][1]}
    return Finding(numbers, runs, lambda: curves(panels, *_AXES, x_format=tokens))


def positions(documents: Sequence[Document]) -> Finding:
    """Loss by position of evaluated models, side by side."""
    models = some(one for one in of(documents, "evaluate") if one.rows("perplexity.by_position"))
    names = _models(models)
    lines = {name: _line(one.rows("perplexity.by_position")) for name, one in zip(names, models, strict=True)}
    best = min(lines, key=lambda name: (-lines[name][-1][0], lines[name][-1][1]))
    length, loss = lines[best][-1]
    finding = f"{best} has a loss of {loss:.2f} with contexts of up to {tokens(length)} tokens"
    if others := [f"{line[-1][1]:.2f} of {name}" for name, line in lines.items() if name != best]:
        finding += f", against {words(others)}"
    return Finding({"finding": finding}, models, lambda: curves([Panel("", lines)], *_AXES, x_format=tokens))


def needles(documents: Sequence[Document]) -> Finding:
    """Share of needles that models find, by length and depth."""
    models = some(one for one in of(documents, "evaluate") if one.rows("needle.cells"))
    names = _models(models)
    maps = {name: _shares(one.rows("needle.cells")) for name, one in zip(names, models, strict=True)}
    parts = [f"{name} finds {_found(one.rows('needle.cells')):.0%}" for name, one in zip(names, models, strict=True)]
    draws = max(cell["draws"] for one in models for cell in one.rows("needle.cells"))
    return Finding({"finding": words(parts), "draws": draws}, models, lambda: shares(maps, tokens))


_AXES = ("context: visible tokens of the same document, up to", "loss per token")


def _line(ranges: Sequence[Row]) -> Line:
    return [(one["to"] + 1, one["loss"]) for one in ranges]


def _shares(cells: Sequence[Row]) -> dict[tuple[Number, Number], float]:
    """By length and depth."""
    return {(cell["length"], cell["depth"]): cell["correct"] / cell["draws"] for cell in cells}


def _found(cells: Sequence[Row]) -> float:
    return sum(cell["correct"] for cell in cells) / sum(cell["draws"] for cell in cells)


def _names(paths: Sequence[str]) -> list[str]:
    """Shorten paths to the last parts that tell them apart; repeated paths are numbered."""
    parts = [pathlib.Path(path).parts for path in paths]
    count = next(
        (n for n in range(1, max(map(len, parts))) if len({part[-n:] for part in parts}) == len(set(parts))),
        max(map(len, parts)),
    )
    short = [str(pathlib.Path(*part[-count:])) for part in parts]
    again = [short[:i].count(name) for i, name in enumerate(short)]
    return [f"{name} ({n + 1})" if n else name for name, n in zip(short, again, strict=True)]


def _models(documents: Sequence[Document]) -> list[str]:
    return _names([document.content["configuration"]["model"] for document in documents])

"""Section: one figure of the report with its text, and helpers for making sections."""

import importlib.resources
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from matplotlib.figure import Figure

from striped_bench.report.read import Document

# The two end-to-end results of the paper (arXiv 2311.09431): devices, tokens, speed-up, hardware.
PAPER = ((8, 262_144, 1.45, "8 A100"), (16, 786_432, 1.65, "16 TPUv4"))
WORDS = tomllib.loads((importlib.resources.files("striped_bench.report") / "words.toml").read_text())
# The fields that identify a row of the suites `gpu` and `step`.
ATTENTION = ("members", "length", "heads", "layout")
STEP = ("preset", "length", "members", "layout")
# Figures of these suites compare layouts in rings with these settings. Older results lack the fields.
PLAIN = {"strategy": "ring", "mask": "causal", "kernel": "cudnn", "text": "whole"}
Row = dict[str, Any]
T = TypeVar("T")


class NoData(Exception):
    """The documents have no data for a figure."""


class Table(NamedTuple):
    """The values of a figure as text: column headings and rows."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Finding(NamedTuple):
    """The content of a section: values for its text, the documents they come from, and a function that draws it."""

    numbers: Mapping[str, Any]
    sources: Sequence[Document]
    draw: Callable[[], Figure]
    table: Table | None = None


class Section(NamedTuple):
    """A figure: `title` states the finding, `caption` explains it without knowledge of the paper.

    `number` and `label` are the one measured value of the figure for the summary of the page; empty if it has none.
    """

    name: str
    title: str
    caption: str
    source: str
    draw: Callable[[], Figure]
    table: Table | None = None
    number: str = ""
    label: str = ""


def make_section(name: str, finding: Finding) -> Section:
    """Make a section, with the values filled into its text."""
    fill = lambda text: " ".join(text.format(**WORDS["shared"], **finding.numbers).split())  # noqa: E731
    together: dict[str, list[str]] = {}
    for one in finding.sources:
        together.setdefault(f"{one.hardware}, {one.commit}, {one.date}", []).append(one.path.name)
    source = "Counted by striped plan for this report, not measured."
    if together:
        source = "From " + "; ".join(f"{', '.join(names)} ({what})" for what, names in together.items()) + "."
    title, caption, number, label = (
        fill(WORDS[name].get(part, "")) for part in ("title", "caption", "number", "label")
    )
    return Section(name, title, caption, source, finding.draw, finding.table, number, label)


def newest(documents: Iterable[Document], where: str, key: tuple[str, ...]) -> tuple[list[Row], tuple[Document, ...]]:
    """Return the rows of documents, the newest of each key, and the documents that they come from."""
    rows = [(row, document) for document in documents for row in document.rows(where) if _drawn(row, document)]
    found = {tuple(row[n] for n in key): (row, document) for row, document in rows}
    used = {str(document.path): document for _, document in found.values()}
    return [row for row, _ in found.values()], tuple(used.values())


def _drawn(row: Row, document: Document) -> bool:
    """Whether to draw a row: all but those rows of the suites `gpu` and `step` that do not compare layouts."""
    plain = all(row.get(name, value) == value for name, value in PLAIN.items())
    return document.benchmark not in ("gpu", "step") or (plain and row.get("over_contiguous", True) is not None)


def some(items: Iterable[T]) -> list[T]:
    """Return the items as a list; raise NoData if there are none."""
    if not (found := list(items)):
        raise NoData
    return found


def ratio(row: Row) -> float:
    """Speed-up over contiguous, of forward and backward together where the row has both."""
    found = row["over_contiguous"]
    return float(found["both"] if isinstance(found, dict) else found)


def bound(devices: float) -> float:
    """Best possible speed-up under a causal mask: the busiest device of contiguous does 2 − 1/N times the mean work."""
    return 2 - 1 / devices

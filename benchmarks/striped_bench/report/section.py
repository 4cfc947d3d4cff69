"""Section: one figure of the report, with the words around it; and what the makers of sections share."""

import importlib.resources
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from matplotlib.figure import Figure

from striped_bench.report.read import Document

# The two end-to-end results of the paper (arXiv 2311.09431): devices, tokens, times as fast, and what on.
PAPER = ((8, 262_144, 1.45, "8 A100"), (16, 786_432, 1.65, "16 TPUv4"))
WORDS = tomllib.loads((importlib.resources.files("striped_bench.report") / "words.toml").read_text())
# What tells two rows of the suites `gpu` and `step` apart.
ATTENTION = ("members", "length", "heads", "layout")
STEP = ("preset", "length", "members", "layout")
# Their figures compare layouts in rings; other rows are for tables. Older results have no others, and no such fields.
PLAIN = {"strategy": "ring", "mask": "causal", "kernel": "cudnn", "text": "whole"}
Row = dict[str, Any]
T = TypeVar("T")


class NoData(Exception):
    """These documents have nothing for a figure."""


class Table(NamedTuple):
    """The numbers of a figure, as text: the heads of columns, and rows."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Finding(NamedTuple):
    """What a section is made of: numbers for its words, the documents they are from, and how to draw it."""

    numbers: Mapping[str, Any]
    sources: Sequence[Document]
    draw: Callable[[], Figure]
    table: Table | None = None


class Section(NamedTuple):
    """A figure: `title` states the finding, `caption` explains it to somebody who has not read the paper."""

    name: str
    title: str
    caption: str
    source: str
    draw: Callable[[], Figure]
    table: Table | None = None


def make_section(name: str, finding: Finding) -> Section:
    """A section with all words in place."""
    fill = lambda text: " ".join(text.format(**WORDS["shared"], **finding.numbers).split())  # noqa: E731
    together: dict[str, list[str]] = {}
    for one in finding.sources:
        together.setdefault(f"{one.hardware}, {one.commit}, {one.date}", []).append(one.path.name)
    source = "Counted by striped plan when this report was made; nothing was measured."
    if together:
        source = "From " + "; ".join(f"{', '.join(names)} ({what})" for what, names in together.items()) + "."
    return Section(name, fill(WORDS[name]["title"]), fill(WORDS[name]["caption"]), source, finding.draw, finding.table)


def newest(documents: Iterable[Document], where: str, key: tuple[str, ...]) -> tuple[list[Row], tuple[Document, ...]]:
    """The rows of documents, oldest first; of those with the same key the last. And the documents they are from."""
    rows = [(row, document) for document in documents for row in document.rows(where) if _drawn(row, document)]
    found = {tuple(row[n] for n in key): (row, document) for row, document in rows}
    used = {str(document.path): document for _, document in found.values()}
    return [row for row, _ in found.values()], tuple(used.values())


def _drawn(row: Row, document: Document) -> bool:
    """Whether a row of the suites `gpu` and `step` compares layouts; those of other suites all are drawn."""
    plain = all(row.get(name, value) == value for name, value in PLAIN.items())
    return document.benchmark not in ("gpu", "step") or (plain and row.get("over_contiguous", True) is not None)


def some(items: Iterable[T]) -> list[T]:
    """The items, if there are any: without them there is no figure."""
    if not (found := list(items)):
        raise NoData
    return found


def ratio(row: Row) -> float:
    """Times as fast as contiguous, with the backward pass where the two are told apart."""
    found = row["over_contiguous"]
    return float(found["both"] if isinstance(found, dict) else found)


def bound(devices: float) -> float:
    """What striping can be worth at most under a causal mask: contiguous's busiest device does 2 − 1/N shares."""
    return 2 - 1 / devices

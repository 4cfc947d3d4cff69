"""Section: one figure of the report, with the words around it."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.figure import Figure

from striped_attention.report.read import Document

# The two end-to-end results of the paper (arXiv 2311.09431): devices, tokens, times as fast, and what on.
PAPER = ((8, 262_144, 1.45, "8 A100"), (16, 786_432, 1.65, "16 TPUv4"))


@dataclasses.dataclass(frozen=True)
class Section:
    """A figure: `title` states the finding, `caption` explains it to somebody who has not read the paper."""

    name: str
    title: str
    caption: str
    sources: tuple[Document, ...]
    draw: Callable[[], Figure]

    @property
    def source(self) -> str:
        """Where the numbers come from, in a line."""
        if not self.sources:
            return "Counted by striped plan when this report was made; nothing was measured."
        together: dict[str, list[str]] = {}
        for document in self.sources:
            together.setdefault(f"{document.hardware}, {document.commit}, {document.date}", []).append(
                document.path.name
            )
        return "From " + "; ".join(f"{', '.join(names)} ({what})" for what, names in together.items()) + "."


def newest(
    documents: Iterable[Document], where: str, key: tuple[str, ...]
) -> tuple[list[dict[str, Any]], tuple[Document, ...]]:
    """The rows of documents, oldest first; of those with the same key the last. And the documents they are from."""
    found: dict[tuple[Any, ...], tuple[dict[str, Any], Document]] = {}
    for document in documents:
        for row in document.rows(where):
            found[tuple(row[name] for name in key)] = row, document
    used = tuple({str(document.path): document for _, document in found.values()}.values())
    return [row for row, _ in found.values()], used


def ratio(row: dict[str, Any]) -> float:
    """Times as fast as contiguous, with the backward pass where the two are told apart."""
    found = row["over_contiguous"]
    return float(found["both"] if isinstance(found, dict) else found)


def plain(layout: str) -> str:
    """A layout's name without empty brackets."""
    return layout.removesuffix("()")


def is_striped(layout: str) -> bool:
    return layout.startswith("striped")


def bound(devices: int) -> float:
    """What striping can be worth at most under a causal mask: contiguous's busiest device does 2 − 1/N shares."""
    return 2 - 1 / devices


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Like 1.36 to 1.89."""
    texts = sorted({format(value, form): value for value in values}.items(), key=lambda item: item[1])
    return texts[0][0] if len(texts) == 1 else f"{texts[0][0]} to {texts[-1][0]}"


def tokens(length: int | float) -> str:
    """64k, 1M: in powers of two, as people say them."""
    length = int(length)
    if length % 2**20 == 0:
        return f"{length // 2**20}M"
    return f"{length // 2**10}k" if length % 2**10 == 0 else f"{length:,}"


def words(items: Sequence[Any]) -> str:
    """Like 2, 8 and 16."""
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def number(text: str) -> int:
    """The first number in a text, to sort by; 0 if there is none."""
    found = re.search(r"\d+", text)
    return int(found[0]) if found else 0

"""Text: how numbers and names are written in titles, labels and captions."""

from collections.abc import Iterable, Sequence
from typing import Any


def plain(layout: str) -> str:
    """A layout's name without empty brackets."""
    return layout.removesuffix("()")


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Like 1.36 to 1.89."""
    texts = [format(value, form) for value in sorted(values)]
    return " to ".join(dict.fromkeys((texts[0], texts[-1])))


def tokens(length: float) -> str:
    """64k, 1M: in powers of two, as people say them."""
    length = int(length)
    if length % 2**20 == 0:
        return f"{length // 2**20}M"
    return f"{length // 2**10}k" if length % 2**10 == 0 else f"{length:,}"


def words(items: Sequence[Any]) -> str:
    """Like 2, 8 and 16."""
    *others, last = map(str, items)
    return f"{', '.join(others)} and {last}" if others else last

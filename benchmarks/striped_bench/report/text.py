"""Text: format numbers and names for titles, labels and captions."""

from collections.abc import Iterable, Sequence
from typing import Any


def plain(layout: str) -> str:
    """Remove empty brackets from a layout's name."""
    return layout.removesuffix("()")


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Format the range of values, e.g. 1.36 to 1.89."""
    texts = [format(value, form) for value in sorted(values)]
    return " to ".join(dict.fromkeys((texts[0], texts[-1])))


def tokens(length: float) -> str:
    """Format a token count, e.g. 64k or 1M, with binary prefixes."""
    length = int(length)
    if length % 2**20 == 0:
        return f"{length // 2**20}M"
    return f"{length // 2**10}k" if length % 2**10 == 0 else f"{length:,}"


def words(items: Sequence[Any]) -> str:
    """Join items, e.g. 2, 8 and 16."""
    *others, last = map(str, items)
    return f"{', '.join(others)} and {last}" if others else last

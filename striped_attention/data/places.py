"""Places: describe in words where the rows of a batch lie in their sources, so that a user can inspect them."""

import numpy as np

from striped_attention.data.batch import Data, drawn, whole_rows
from striped_attention.data.corpus import Corpus
from striped_attention.data.mixture import Mixture

SHOWN = 8  # rows that are described individually


def describe_rows(corpus: Data, place: int, rows: range, length: int, seed: int) -> str:
    """Describe the source, pass, tokens and documents of each row at `place`; tokens and documents count from 0.

    For example: row 3 of text.jsonl in pass 2: tokens 6,144 to 8,191, documents 12 to 15
    """
    named = [_name(corpus, place + row, length, seed) for row in rows[:SHOWN]]
    more = f"; and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return "; ".join(named) + more


def _name(corpus: Data, place: int, length: int, seed: int) -> str:
    part, row = drawn(corpus, place, length, seed)
    before = corpus.draw(place, seed)[1] if isinstance(corpus, Mixture) else place
    first = row * length
    text = f"row {row:,} of {part.source} in pass {before // whole_rows(part, length) + 1}"
    return f"{text}: tokens {first:,} to {first + length - 1:,}{_documents(part, first, length)}"


def _documents(part: Corpus, first: int, length: int) -> str:
    """Describe the documents of a row, if their starts are known."""
    if part.starts is None:
        return ""
    one, last = np.searchsorted(part.starts, np.array([first, first + length - 1]), side="right") - 1
    return f", document {one:,}" if one == last else f", documents {one:,} to {last:,}"

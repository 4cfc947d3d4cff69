"""Batches: rows of a corpus, as a pure function of a seed and a place, so that a run resumes anywhere, on any mesh.

A corpus is cut into rows of `length` tokens, which are drawn in an order shuffled anew for every pass. Documents are
packed end to end and never padded: one that crosses the end of a row goes on in another row, as a document of its own.
The target of a token is the next one; the last token of a document has none.
"""

from typing import NamedTuple

import numpy as np

from striped_attention.data.corpus import Corpus
from striped_attention.data.mixture import Mixture
from striped_attention.errors import UsageError

Data = Corpus | Mixture


class Batch(NamedTuple):
    """[rows, length] each, in text order. `weights` is 0 where there is no target, `segments` numbers documents."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segments: np.ndarray

    def visible_pairs(self, window: int | None = None) -> int:
        """Pairs of a query and a key that the documents let meet, and a sliding window."""
        position = np.arange(self.segments.shape[1])
        new = np.diff(self.segments, axis=1, prepend=self.segments[:, :1] - 1) != 0
        start = np.maximum.accumulate(np.where(new, position, 0), axis=1)
        seen = position - start + 1
        return int(np.sum(seen if window is None else np.minimum(seen, window), dtype=np.int64))


def read(corpus: Data, place: int, rows: range, length: int, seed: int) -> Batch:
    """Rows of the batch at `place`, which counts the rows that the run has drawn before it."""
    return _cut([drawn(corpus, place + row, length, seed) for row in rows], length)


def rows_in_order(corpus: Data, first: int, count: int, length: int) -> Batch:
    """`count` rows from row `first` on, in the order of the corpus, as validation reads them.

    After the last whole row the first one follows again; of a mixture, its corpora follow each other.
    """
    parts = _parts(corpus)
    ends = np.cumsum([_rows_of(part, length) for part in parts])
    found = []
    for row in range(first, first + count):
        number = int(np.searchsorted(ends, row % ends[-1], side="right"))
        found.append((parts[number], int(row % ends[-1] - (ends[number - 1] if number else 0))))
    return _cut(found, length)


def whole_rows(corpus: Data, length: int) -> int:
    """How many whole rows a corpus has. Raises if it, or a part of a mixture, has none."""
    return sum(_rows_of(part, length) for part in _parts(corpus))


def drawn(corpus: Data, place: int, length: int, seed: int) -> tuple[Corpus, int]:
    """What a place of the run takes: a row of a corpus, by its number."""
    if isinstance(corpus, Corpus):
        return _shuffled(corpus, place, length, seed)
    number, place = corpus.draw(place, seed)
    return _shuffled(corpus.parts[number], place, length, seed, number)


def _shuffled(corpus: Corpus, place: int, length: int, seed: int, *number: int) -> tuple[Corpus, int]:
    epoch, place = divmod(place, rows := _rows_of(corpus, length))
    return corpus, int(corpus.order(rows, seed, epoch, *number)[place])


def _parts(corpus: Data) -> tuple[Corpus, ...]:
    return corpus.parts if isinstance(corpus, Mixture) else (corpus,)


def _rows_of(corpus: Corpus, length: int) -> int:
    rows = (corpus.size - 1) // length
    if rows < 1:
        raise UsageError(
            f"{corpus.source} holds {corpus.size} tokens, too few for one sequence of {length} and the token "
            f"after it. Give more data with --data or a smaller --sequence-length."
        )
    return rows


def _cut(rows: list[tuple[Corpus, int]], length: int) -> Batch:
    """These rows of corpora, side by side."""
    text = np.empty((len(rows), length + 1), np.int32)
    closes = np.empty((len(rows), length), np.int32)
    weights = np.ones((len(rows), length), np.float32)
    for i, (corpus, row) in enumerate(rows):
        first = row * length
        found = corpus.tokens[first : first + length + 1]
        corpus.check_vocabulary(found)
        text[i], closes[i] = found, corpus.closes(first, length)
        if corpus.counted is not None:
            weights[i] = corpus.counted[first + 1 : first + length + 1]
    segments = np.cumsum(closes, axis=1, dtype=np.int32) - closes
    return Batch(text[:, :-1], text[:, 1:], weights * (closes == 0), segments)

"""Batches: rows of a corpus as a pure function of a seed and a position, so a run can resume anywhere, on any mesh.

A corpus is cut into rows of `length` tokens, which are visited in an order reshuffled every epoch. Documents are packed
end to end without padding. A document that crosses the end of a row continues in another row, as a separate document.
The target of a token is the next token; the last token of a document has no target.
"""

from typing import NamedTuple

import numpy as np

from striped_attention.data.corpus import Corpus
from striped_attention.data.mixture import Mixture
from striped_attention.errors import UsageError

Data = Corpus | Mixture


class Batch(NamedTuple):
    """Arrays [rows, length] in sequence order. `segments` numbers the documents of a row.

    `weights` are the loss weights of the targets: 0 where there is no target or it does not count.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segments: np.ndarray

    def visible_pairs(self, window: int | None = None) -> int:
        """Return the number of (query, key) pairs visible under the causal documents mask and a sliding window."""
        position = np.arange(self.segments.shape[1])
        new = np.diff(self.segments, axis=1, prepend=self.segments[:, :1] - 1) != 0
        start = np.maximum.accumulate(np.where(new, position, 0), axis=1)
        seen = position - start + 1
        return int(np.sum(seen if window is None else np.minimum(seen, window), dtype=np.int64))


def read(corpus: Data, place: int, rows: range, length: int, seed: int) -> Batch:
    """Return `rows` of the batch at `place`, the number of rows that the run has read before this batch."""
    return _cut([drawn(corpus, place + row, length, seed) for row in rows], length)


def rows_in_order(corpus: Data, first: int, count: int, length: int) -> Batch:
    """Return `count` rows from row `first` on, in corpus order, as validation reads them.

    The corpora of a mixture are concatenated. After the last whole row, reading wraps around to the first.
    """
    parts = _parts(corpus)
    ends = np.cumsum([_rows_of(part, length) for part in parts])
    found = []
    for row in range(first, first + count):
        number = int(np.searchsorted(ends, row % ends[-1], side="right"))
        found.append((parts[number], int(row % ends[-1] - (ends[number - 1] if number else 0))))
    return _cut(found, length)


def whole_rows(corpus: Data, length: int) -> int:
    """Return the number of whole rows. Raises if the corpus, or any corpus of a mixture, has none."""
    return sum(_rows_of(part, length) for part in _parts(corpus))


def drawn(corpus: Data, place: int, length: int, seed: int) -> tuple[Corpus, int]:
    """Return the corpus and the row number that position `place` of the run reads."""
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
            f"after it. Give more data with --data or a smaller --length."
        )
    return rows


def _cut(rows: list[tuple[Corpus, int]], length: int) -> Batch:
    """Stack rows, given as (corpus, row number), into a batch."""
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

"""Batches: rows of a corpus, as a pure function of a seed and a place, so that a run resumes anywhere, on any mesh.

A corpus is cut into rows of `length` tokens, which are drawn in an order shuffled anew for every pass. Documents are
packed end to end and never padded: one that crosses the end of a row goes on in another row, as a document of its own.
The target of a token is the next one; the last token of a document has none.
"""

import functools
from typing import NamedTuple

import numpy as np

from striped_attention.data.corpus import Corpus, check_vocabulary
from striped_attention.errors import UsageError


class Batch(NamedTuple):
    """[rows, length] each, in text order. `weights` is 0 where there is no target, `segments` numbers documents."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segments: np.ndarray

    def visible_pairs(self) -> int:
        """Pairs of a query and a key that the documents let meet."""
        position = np.arange(self.segments.shape[1])
        new = np.diff(self.segments, axis=1, prepend=self.segments[:, :1] - 1) != 0
        start = np.maximum.accumulate(np.where(new, position, 0), axis=1)
        return int(np.sum(position - start + 1, dtype=np.int64))


def read(corpus: Corpus, place: int, rows: range, length: int, seed: int) -> Batch:
    """Rows of the batch at `place`, which counts the rows that the run has drawn before it."""
    available = whole_rows(corpus, length)
    return _cut(corpus, [_draw(available, place + row, seed) for row in rows], length)


def rows_in_order(corpus: Corpus, first: int, count: int, length: int) -> Batch:
    """`count` rows from row `first` on, in the order of the corpus, as validation reads them.

    After the last whole row the first one follows again.
    """
    available = whole_rows(corpus, length)
    return _cut(corpus, [row % available for row in range(first, first + count)], length)


def whole_rows(corpus: Corpus, length: int) -> int:
    """How many whole rows a corpus has."""
    available = (len(corpus.tokens) - 1) // length
    if available < 1:
        raise UsageError(
            f"{corpus.source} holds {len(corpus.tokens)} tokens, too few for one sequence of {length} and the token "
            f"after it. Give more data with --data or a smaller --sequence-length."
        )
    return available


def _cut(corpus: Corpus, rows: list[int], length: int) -> Batch:
    """Rows of a corpus, by their numbers."""
    text = np.stack([corpus.tokens[row * length : (row + 1) * length + 1] for row in rows])
    check_vocabulary(corpus, text)
    text = text.astype(np.int32)
    tokens, targets = text[:, :-1], text[:, 1:]
    ended = np.zeros_like(tokens) if corpus.end is None else (tokens == corpus.end).astype(np.int32)
    segments = np.cumsum(ended, axis=1, dtype=np.int32) - ended
    return Batch(tokens, targets, 1 - ended.astype(np.float32), segments)


def _draw(available: int, place: int, seed: int) -> int:
    """The row of the corpus that is drawn at a place."""
    return int(_order(available, place // available, seed)[place % available])


@functools.lru_cache(maxsize=2)
def _order(available: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(available)

"""Mixture: several corpora, and which of them each position of the run reads its row from.

The positions of a run are shuffled within blocks of 1024. In the shuffled order the first corpus, with share w, takes
position q if floor(w (q + 1)) > floor(w q), as its row number floor(w q). The remaining positions are renumbered and
assigned to the other corpora in the same way. So after any n positions each corpus has supplied its share of n, within
a few rows; every row of a corpus is read once per epoch of that corpus; and any position can be computed without those
before it.
"""

import dataclasses
import functools
import pathlib
from fractions import Fraction

import numpy as np

from striped_attention.data.corpus import Corpus

BLOCK = 1024  # positions that are shuffled together


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """Several corpora with positive weights, which need not sum to 1."""

    parts: tuple[Corpus, ...]
    weights: tuple[Fraction, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def documents(self) -> bool:
        return any(part.documents for part in self.parts)

    @property
    def end(self) -> int | None:
        return next((part.end for part in self.parts if part.end is not None), None)

    @property
    def vocabulary(self) -> int:
        return self.parts[0].vocabulary

    @property
    def source(self) -> str:
        total = sum(self.weights)
        shares = zip(self.parts, self.weights, strict=True)
        return ", ".join(f"{part.source} ({float(weight / total):.3g})" for part, weight in shares)

    @property
    def fingerprint(self) -> str:
        shares = zip(self.parts, self.weights, strict=True)
        return "; ".join(f"{part.fingerprint} with weight {weight}" for part, weight in shares)

    @property
    def tokenizer(self) -> pathlib.Path | None:
        """The tokenizer of any part; all parts were made with the same one."""
        return next((part.tokenizer for part in self.parts if part.tokenizer is not None), None)

    def notes(self, length: int) -> list[str]:
        return [note for part in self.parts for note in part.notes(length)]

    def draw(self, place: int, seed: int) -> tuple[int, int]:
        """Return which corpus position `place` reads from, and how many rows that corpus has supplied before."""
        block, inside = divmod(place, BLOCK)
        place = block * BLOCK + int(self._shuffled(seed, block)[inside])
        for number, (share, of) in enumerate(self._shares):
            before = place * share // of
            if (place + 1) * share // of > before:
                return number, before
            place -= before
        raise AssertionError("the last corpus takes every remaining position")

    @functools.cached_property
    def _shares(self) -> list[tuple[int, int]]:
        """The share of each corpus in what those before it leave, as a fraction; the last share is 1."""
        left = [sum(self.weights[i:], Fraction()) for i in range(len(self.weights))]
        return [(weight / rest).as_integer_ratio() for weight, rest in zip(self.weights, left, strict=True)]

    @functools.cached_property
    def _shuffled(self) -> "functools._lru_cache_wrapper[np.ndarray]":
        # Row orders are seeded with [seed, epoch, corpus number]. len(parts) is no corpus number, so seeds differ.
        return functools.lru_cache(maxsize=2)(
            lambda seed, block: np.random.default_rng([seed, block, len(self.parts)]).permutation(BLOCK)
        )

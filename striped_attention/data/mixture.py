"""Mixture: several corpora, and which of them a place of the run takes its row from.

The places of a run are shuffled within blocks of 1024. In the shuffled order the first corpus, with the share w, takes
place q if floor(w (q + 1)) > floor(w q), as its row number floor(w q); the other places are numbered anew and dealt to
the other corpora in the same way. So after n places a corpus has its share of n, give or take a few, whatever n is;
every row of a corpus is drawn once in each pass through it; and any place can be found without those before it.
"""

import dataclasses
import functools
import pathlib
from fractions import Fraction

import numpy as np

from striped_attention.data.corpus import Corpus

BLOCK = 1024  # places that are shuffled together


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """Several corpora with weights above 0, which need not add up to 1."""

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
        """Of any part: they were all made with the same one."""
        return next((part.tokenizer for part in self.parts if part.tokenizer is not None), None)

    def notes(self, length: int) -> list[str]:
        return [note for part in self.parts for note in part.notes(length)]

    def draw(self, place: int, seed: int) -> tuple[int, int]:
        """Which corpus a place takes its row from, and how many rows that corpus has given before."""
        block, inside = divmod(place, BLOCK)
        place = block * BLOCK + int(self._shuffled(seed, block)[inside])
        for number, (share, of) in enumerate(self._shares):
            before = place * share // of
            if (place + 1) * share // of > before:
                return number, before
            place -= before
        raise AssertionError("the last corpus takes every place that is left")

    @functools.cached_property
    def _shares(self) -> list[tuple[int, int]]:
        """The share of each corpus in what those before it have left, as a fraction; that of the last one is 1."""
        left = [sum(self.weights[i:], Fraction()) for i in range(len(self.weights))]
        return [(weight / rest).as_integer_ratio() for weight, rest in zip(self.weights, left, strict=True)]

    @functools.cached_property
    def _shuffled(self) -> "functools._lru_cache_wrapper[np.ndarray]":
        # The orders of the corpora take [seed, pass, number], with numbers below this one.
        return functools.lru_cache(maxsize=2)(
            lambda seed, block: np.random.default_rng([seed, block, len(self.parts)]).permutation(BLOCK)
        )

"""Corpus: all tokens of one source end to end, its document boundaries, and which tokens count in the loss.

Document boundaries are either a list of starts (`starts`) or a token that closes every document (`end` alone, for .npy
and .bin files). The arrays are memory-mapped.
"""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable

import numpy as np

from striped_attention.data.counts import Counts
from striped_attention.errors import UsageError


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens end to end.

    `end` is the token that closes a document, None if there is none. `vocabulary` is the model's. `starts` [documents]
    is the index of each document's first token; `counted` [tokens] is 1 where a token counts in the loss, None if all
    do. `tokenizer` is the tokenizer.json stored with the tokens; `made_with` is the hash of the tokenizer that made
    them, if known. `warning` is shown before training on the corpus.
    """

    tokens: np.ndarray
    end: int | None
    vocabulary: int
    source: str
    warning: str | None = None
    starts: np.ndarray | None = None
    counted: np.ndarray | None = None
    counts: Counts | None = None
    tokenizer: pathlib.Path | None = None
    made_with: str | None = None

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def documents(self) -> bool:
        """Whether document boundaries are known."""
        return self.starts is not None or self.end is not None

    @functools.cached_property
    def fingerprint(self) -> str:
        """The size and a hash of up to 4096 sampled tokens, so that a run is not resumed on other data."""
        text = f"{self.size} tokens, {_sampled(self.tokens)}"
        return text if self.counted is None else f"{text}, loss {_sampled(self.counted)}"

    def closes(self, first: int, length: int) -> np.ndarray:
        """Return a bool array [length]: whether each token from `first` on is the last of its document."""
        if self.starts is None:
            part = self.tokens[first : first + length]
            return np.zeros(length, bool) if self.end is None else np.asarray(part == self.end)
        bounds = np.array([first, first + length], np.int64)
        low, high = np.searchsorted(self.starts, bounds, side="right")
        closes = np.zeros(length, bool)
        closes[self.starts[low:high] - first - 1] = True
        return closes

    def notes(self, length: int) -> list[str]:
        """Return the lines to show before training on sequences of `length` tokens."""
        warning = [] if self.warning is None else [f"Warning: {self.warning}"]
        if self.counts is None or self.starts is None:
            return warning
        return [*self.counts.notes(self.source, length, self._longer(length)), *warning]

    def _longer(self, length: int) -> int:
        """Return the number of documents with more than `length` tokens."""
        assert self.starts is not None
        ends, at_once = np.int64(self.size), 2**20
        parts = (self.starts[i : i + at_once + 1] for i in range(0, len(self.starts), at_once))
        found = (np.diff(part if len(part) > at_once else np.append(part, ends)) > length for part in parts)
        return sum(int(np.count_nonzero(part)) for part in found)

    @functools.cached_property
    def order(self) -> Callable[..., np.ndarray]:
        """`order(rows, *seeds)`: the rows of the corpus in the shuffled order of one epoch. The last two are cached."""
        return functools.lru_cache(maxsize=2)(_order)

    def check_vocabulary(self, tokens: np.ndarray) -> None:
        """Raise if a token is outside the model's vocabulary."""
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= self.vocabulary:
            raise UsageError(
                f"{self.source} contains token {least if least < 0 else most}, but the model's vocabulary is "
                f"{self.vocabulary}. Use tokens of the model's own tokenizer; to train from scratch, set another "
                f"--vocabulary."
            )


def _sampled(numbers: np.ndarray) -> str:
    sample = numbers[:: -(-len(numbers) // 4096)].astype(np.int64)
    return hashlib.sha256(sample.tobytes()).hexdigest()[:16]


def _order(rows: int, *seeds: int) -> np.ndarray:
    return np.random.default_rng(seeds).permutation(rows)

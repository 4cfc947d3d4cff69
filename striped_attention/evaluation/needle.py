"""Needle: haystacks with a sentence hidden in them, and a question at the end that only this sentence answers.

    text text text   The secret number of abcdef is 123456.   text text   The secret number of abcdef is   123456
                     needle, at some depth                                question                         answer

Only the tokens of the answer count. The model has found the needle if every token of the answer is the likeliest one
given all tokens before it, i.e. if greedy decoding after the question yields the answer.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from striped_attention import data
from striped_attention.errors import UsageError
from striped_attention.evaluation.config import EvaluateConfig
from striped_attention.generation.text import Bytes, Tokenizer


@dataclasses.dataclass(frozen=True)
class Cell:
    """The results for haystacks of one length with the needle at one depth."""

    length: int
    depth: int
    draws: int
    correct: int
    loss: float  # mean over haystacks of the answer's total loss


@dataclasses.dataclass(frozen=True)
class Haystacks:
    """Makes haystacks, determined by seed, length, depth and draw. All depths share texts, keys and values."""

    config: EvaluateConfig
    corpus: data.Data
    encoder: Bytes | Tokenizer

    def sequence(self, length: int, depth: int, draw: int) -> tuple[np.ndarray, int]:
        """Return `length` + 1 tokens (the last one only a target), and how many tokens at the end are the answer."""
        random = np.random.default_rng([self.config.seed, length, draw])
        begin, hidden, asked, answer = self._words(random)
        room = length + 1 - sum(map(len, (begin, hidden, asked, answer)))
        if room < 0:
            raise UsageError(
                f"A haystack of {length} tokens has no room for needle, question and answer, which need "
                f"{length - room}. Give longer ones with --lengths."
            )
        text = self._text(random, length, room)
        at = round(room * depth / 100)
        tokens = [*begin, *text[:at], *hidden, *text[at:], *asked, *answer]
        return np.array(tokens, np.int32), len(answer)

    def lengths(self, longest: int) -> tuple[int, ...]:
        """An eighth, a quarter, half and all of `longest`, except lengths of which less than half would be text."""
        least = 2 * sum(map(len, self._words(np.random.default_rng(self.config.seed))))
        return (*(n for n in (longest // 8, longest // 4, longest // 2) if n >= least), longest)

    def _words(self, random: np.random.Generator) -> tuple[list[int], ...]:
        """Tokens of the start of the sequence, the needle, the question and the answer, with a random key and value."""
        key = _word(random, self.config.key_characters, self.config.key_length)
        value = _word(random, self.config.value_characters, self.config.value_length)
        needle, question, answer = (self.config.fill(name, key, value) for name in ("needle", "question", "answer"))
        encode = self.encoder.plain
        asked, both = encode(question), encode(question + answer)
        # The answer is tokenised as the continuation of the question, unless a token would span both.
        end = both[len(asked) :] if both[: len(asked)] == asked else encode(answer)
        return list(self.encoder.begin), encode(needle), asked, end

    def batch(self, cases: Sequence[tuple[int, int, int]], rows: range) -> data.Batch:
        """Rows of a batch of cases (length, depth, draw) of one length. Rows beyond the last case have weight 0."""
        made = []
        for row in rows:
            tokens, answer = self.sequence(*cases[min(row, len(cases) - 1)])
            counts = np.arange(len(tokens)) >= len(tokens) - (answer if row < len(cases) else 0)
            made.append((tokens, counts.astype(np.float32)))
        tokens, counts = (np.stack(x) for x in zip(*made, strict=True))
        return data.Batch(tokens[:, :-1], tokens[:, 1:], counts[:, 1:], np.zeros_like(tokens[:, 1:]))

    def _text(self, random: np.random.Generator, length: int, room: int) -> np.ndarray:
        """Return `room` tokens of the corpus from a random row on, without end-of-document tokens."""
        rows = data.whole_rows(self.corpus, length)
        first, found = int(random.integers(rows)), np.zeros(0, np.int32)
        for row in itertools.count(first):
            if len(found) >= room:
                return found[:room]
            if row == first + rows and not len(found):
                raise UsageError(f"{self.corpus.source} has no text, only end-of-document tokens. Give other --data.")
            tokens = data.rows_in_order(self.corpus, row, 1, length).tokens[0]
            found = np.append(found, tokens if self.corpus.end is None else tokens[tokens != self.corpus.end])
        raise AssertionError("rows wrap around after the last one")


def _word(random: np.random.Generator, characters: str, length: int) -> str:
    return "".join(characters[i] for i in random.integers(len(characters), size=length))

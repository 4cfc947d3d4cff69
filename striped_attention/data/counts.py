"""Counts: what was found in a source while it was tokenised, so that nothing is left out silently."""

import dataclasses

from striped_attention.errors import UsageError

BAD = 0.01  # share of lines that may be bad
FIRST = 100  # so many bad ones at the beginning are enough


@dataclasses.dataclass
class Counts:
    """`rows` are lines of JSON, rows of a table or files of text. Empty and bad ones make no document.

    `counted` is how many tokens count in the loss, `silent` how many documents have none of them.
    """

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    bad: int = 0
    counted: int = 0
    silent: int = 0
    example: str | None = None  # of something bad

    def note_bad(self, where: str, why: str) -> None:
        """A row that cannot be used. Raises if nothing but such rows came from the beginning on."""
        self.bad += 1
        self.example = self.example or f"{where}: {why}"
        if self.bad == self.rows == FIRST:
            raise UsageError(
                f"Lines of data must be usable, but the first {FIRST} are not; the first is {self.example}. Mend them, "
                f"or give another column."
            )

    def check(self, source: str) -> None:
        """Raise if too much was bad, or nothing is left."""
        if self.bad > BAD * self.rows:
            raise UsageError(
                f"At most {BAD:.0%} of the lines of {source} may be bad, but {self.bad:,} of {self.rows:,} are; the "
                f"first is {self.example}. Mend or remove them."
            )
        if self.tokens == 0:
            raise UsageError(f"{source} is empty. Give a file with text or tokens in it.")
        if self.counted == 0:
            raise UsageError(
                f"No token of {source} counts in the loss, so there is nothing to learn. Look at its --loss-column, or "
                f"at the roles of its --chat-column: the answers are those of the assistant."
            )

    def notes(self, source: str, length: int | None = None, longer: int = 0) -> list[str]:
        """What was found, for people. `longer` documents are longer than a sequence of `length` tokens."""
        text = f"{source}: {_many(self.documents, 'document')}, {_many(self.tokens, 'token')}"
        if self.counted < self.tokens:
            text += f", {self.counted / self.tokens:.1%} of which count in the loss"
        if self.silent:
            text += f"; {_many(self.silent, 'document')} without a token that counts"
        if self.empty:
            text += f"; {_many(self.empty, 'empty document')} left out"
        if longer:
            text += f"; {_many(longer, 'document')} longer than a sequence of {length:,}, the rest goes to other rows"
        notes = [f"{text}."]
        if self.bad:
            share = f"{self.bad:,} of {self.rows:,} lines of {source}"
            notes.append(f"Warning: {share} are bad and were left out; the first is {self.example}.")
        return notes


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"

"""Counts: statistics gathered while a source is tokenised, so that nothing is left out silently."""

import dataclasses

from striped_attention.errors import UsageError

BAD = 0.01  # the largest share of lines that may be bad
FIRST = 100  # stop early if this many lines at the beginning are all bad


@dataclasses.dataclass
class Counts:
    """Numbers of rows, documents and tokens. A row is a JSON line, a row of a table or a text file.

    Empty and bad rows yield no document. `counted` is the number of tokens that count in the loss, `silent` the number
    of documents without any such token.
    """

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    bad: int = 0
    counted: int = 0
    silent: int = 0
    example: str | None = None  # the first bad row

    def note_bad(self, where: str, why: str) -> None:
        """Record a row that cannot be used. Raises if the first rows are all bad."""
        self.bad += 1
        self.example = self.example or f"{where}: {why}"
        if self.bad == self.rows == FIRST:
            raise UsageError(
                f"Lines of data must be usable, but the first {FIRST} are not; the first is {self.example}. Fix them, "
                f"or choose another column."
            )

    def check(self, source: str) -> None:
        """Raise if too many rows were bad, or nothing is left to learn from."""
        if self.bad > BAD * self.rows:
            raise UsageError(
                f"At most {BAD:.0%} of the lines of {source} may be bad, but {self.bad:,} of {self.rows:,} are; the "
                f"first is {self.example}. Fix or remove them."
            )
        if self.tokens == 0:
            raise UsageError(f"{source} is empty. Give a file with text or tokens in it.")
        if self.counted == 0:
            raise UsageError(
                f"No token of {source} counts in the loss, so there is nothing to learn. Check its --loss-column, or "
                f"the roles in its --chat-column: only messages of the role assistant count."
            )

    def notes(self, source: str, length: int | None = None, longer: int = 0) -> list[str]:
        """Return a summary in lines. `longer` is the number of documents longer than `length` tokens."""
        text = f"{source}: {_many(self.documents, 'document')}, {_many(self.tokens, 'token')}"
        if self.counted < self.tokens:
            text += f", {self.counted / self.tokens:.1%} of which count in the loss"
        if self.silent:
            text += f"; {_many(self.silent, 'document')} without a token that counts"
        if self.empty:
            text += f"; {_many(self.empty, 'empty document')} left out"
        if longer:
            text += f"; {_many(longer, 'document')} longer than a sequence of {length:,}, split over several rows"
        notes = [f"{text}."]
        if self.bad:
            share = f"{self.bad:,} of {self.rows:,} lines of {source}"
            notes.append(f"Warning: {share} are bad and were left out; the first is {self.example}.")
        return notes


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"

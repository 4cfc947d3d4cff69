"""Columns: the columns of a record that hold its text and the spans of it that count in the loss."""

import dataclasses
from typing import Any, NamedTuple

from striped_attention.errors import UsageError

TEXT = "text"  # the default text column


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of columns: `text` holds the text, `loss` the spans that count; `chat` holds messages, instead of both."""

    text: str | None = None
    loss: str | None = None
    chat: str | None = None

    def __post_init__(self) -> None:
        if self.chat is not None and (self.text, self.loss) != (None, None):
            raise UsageError(
                "--chat-column takes both text and loss spans from messages. Leave out --text-column and --loss-column."
            )

    @property
    def main(self) -> str:
        """The column that every record must have."""
        return self.chat or self.text or TEXT

    @property
    def names(self) -> list[str]:
        return [self.main] if self.loss is None else [self.main, self.loss]

    @property
    def option(self) -> str:
        """The option to name in error messages."""
        return next((f"--{name}-column" for name in ("chat", "loss") if getattr(self, name)), "--text-column")


NO_COLUMNS = Columns()


class Document(NamedTuple):
    """A text and the spans of it that count in the loss: [start, end) in characters; None if all of it counts."""

    text: str
    spans: list[tuple[int, int]] | None = None


class Bad(NamedTuple):
    """The reason why a row cannot be used."""

    why: str


def check_columns(there: list[str], columns: Columns, where: str) -> None:
    """Raise if a record or a table lacks a required column, or has two of the same name."""
    for name in columns.names:
        if there.count(name) > 1:
            raise UsageError(f"{where} must have one column {name!r}, but has {there.count(name)}. Rename the others.")
    missing = [name for name in columns.names if name not in there]
    if missing:
        option = "--chat-column" if columns.chat else "--loss-column" if missing[0] == columns.loss else "--text-column"
        others = ", ".join(there) if there else "none"
        raise UsageError(f"{where} has no column {missing[0]!r}; its columns are {others}. Choose one with {option}.")


def spans_of(found: Any, text: str) -> list[tuple[int, int]] | Bad:
    """Return the spans of a loss column, [[start, end], …], or why they are invalid."""
    try:
        spans = [(start, end) for start, end in found]
    except (TypeError, ValueError):
        return Bad("the loss column is not a list of [start, end]")
    for pair in spans:
        if not all(isinstance(x, int) and not isinstance(x, bool) for x in pair):
            return Bad(f"the loss span {list(pair)} does not consist of integers")
        if not 0 <= pair[0] <= pair[1] <= len(text):
            return Bad(f"the loss span {list(pair)} is outside the text's {len(text)} characters")
    return spans


def text_of(found: Any) -> str | Bad:
    """Return the text of a column, or why it is invalid."""
    if not isinstance(found, str):
        return Bad("the text is missing" if found is None else f"the text is {_kind(found)}, not a string")
    if not found.isascii():
        try:
            found.encode()
        except UnicodeEncodeError:
            return Bad("the text contains half of a surrogate pair, which is not a character")
    return found


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)

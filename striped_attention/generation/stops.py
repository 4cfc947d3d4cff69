"""Stops: generation ends where a text first contains one of some strings, and nothing of that string is shown.

A string may come in pieces, over several tokens, so text that may still become one is held back:

    stop string "###"    pieces "Yes", ".\\n#", "##", " No"    shown "Yes", ".\\n", then the end
"""

from collections.abc import Sequence


class StopStrings:
    """Watches one text. Where it ends does not depend on the pieces in which it comes."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = strings
        self.found = False
        self._held = ""

    def add(self, piece: str) -> str:
        """The text that can be shown now that `piece` has come. Once a string is `found`, nothing more is."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(at + len(string), at) for string in self.strings if (at := text.find(string)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]  # the string that is complete first
        keep = max((_overlap(text, string) for string in self.strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of a text with which a string begins."""
    return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)

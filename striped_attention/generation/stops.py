"""Stops: end generation where the text first contains a stop string. No part of that string is shown.

A stop string may span several tokens, so text that may be its beginning is held back:

    stop string "###"    pieces "Yes", ".\\n#", "##", " No"    shown "Yes", ".\\n", then the end
"""

from collections.abc import Sequence


class StopStrings:
    """Finds stop strings in one text. The result does not depend on how the text is split into pieces."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = strings
        self.found = False
        self._held = ""

    def add(self, piece: str) -> str:
        """Add a piece and return the text that can be shown now: none once a string is `found`."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(at + len(string), at) for string in self.strings if (at := text.find(string)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]  # the string that ends first
        keep = max((_overlap(text, string) for string in self.strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that was held back, as nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `string`."""
    return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)

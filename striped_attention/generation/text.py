"""Text: encode text as tokens, and decode tokens to text as they are generated."""

import codecs
import itertools
import pathlib
from typing import Any

from tokenizers.decoders import DecodeStream

from striped_attention.data import BYTES
from striped_attention.data.tokenizer import end_token, open_tokenizer
from striped_attention.errors import UsageError
from striped_attention.training.source import Source


class Bytes:
    """Bytes as tokens, as in `striped train` without a tokenizer."""

    begin: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def plain(self, text: str) -> list[int]:
        """Return the same as `encode`: bytes have no special tokens."""
        return self.encode(text)

    def special(self, text: str) -> int | None:
        """Return None: bytes have no special tokens."""
        return None

    def show(self, tokens: list[int]) -> str:
        """Return the text of some tokens, for error messages."""
        return bytes(token for token in tokens if token < BYTES).decode(errors="replace")

    def stream(self, prompt: list[int]) -> "ByteStream":
        return ByteStream()


class Tokenizer:
    """A Hugging Face tokenizer.json."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    @property
    def begin(self) -> tuple[int, ...]:
        """Special tokens that the tokenizer puts before every text."""
        example = self._tokenizer.encode("a")
        special = itertools.takewhile(lambda both: both[1], zip(example.ids, example.special_tokens_mask, strict=True))
        return tuple(token for token, _ in special)

    def plain(self, text: str) -> list[int]:
        """Return the tokens of a text without special tokens around it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def special(self, text: str) -> int | None:
        """Return the special token with this name, like <|im_end|>, or None. Decoded text never shows them."""
        added = self._tokenizer.get_added_tokens_decoder()
        return next((number for number, token in added.items() if token.special and token.content == text), None)

    def show(self, tokens: list[int]) -> str:
        """Return the text of some tokens, special ones included, for error messages."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def stream(self, prompt: list[int]) -> "TokenStream":
        return TokenStream(self._tokenizer, prompt)


class ByteStream:
    """Decodes bytes as they are generated; incomplete characters are held back."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """Add a token and return the text that it completes."""
        return self._decoder.decode(bytes([token])) if token < BYTES else ""

    def finish(self) -> str:
        """Return the text that was held back, as no token follows."""
        return self._decoder.decode(b"", final=True)


class TokenStream:
    """Decodes tokens as they are generated; incomplete characters are held back."""

    CONTEXT = 6  # prompt tokens to decode along with the first new ones: a space may belong between them

    def __init__(self, tokenizer: Any, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._go_on_from(prompt[-self.CONTEXT :])

    def _go_on_from(self, shown: list[int]) -> None:
        # If these tokens ended within a character, the library would return all of their text again.
        whole = not self._tokenizer.decode(shown).endswith("\N{REPLACEMENT CHARACTER}")
        self._stream = DecodeStream(shown if whole else [], skip_special_tokens=True)
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """Add a token and return the text that it completes."""
        self._waiting.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception as error:  # the library raises no subclass
            if "Invalid prefix" not in str(error):
                raise
            text = self.finish()  # bytes that formed no character, after one that was already shown
            self._go_on_from(self._waiting)
        if text is not None:
            self._waiting = []
        return text or ""

    def finish(self) -> str:
        """Return the text that was held back, as no token follows."""
        return self._tokenizer.decode(self._waiting)


def load(source: Source, given: pathlib.Path | None, chat: bool = False) -> tuple[Bytes | Tokenizer, list[int]]:
    """Return the tokenizer of a model, or the one at path `given`, and the tokens that end generation.

    In a chat, the tokenizer's own end token ends an answer too: configs of chat models may still name the base model's.
    """
    path = given or source.tokenizer
    if path is not None:
        source.check_tokenizer(path)
        tokenizer = open_tokenizer(path)
        named = end_token(tokenizer, path)
        own = [] if named is None else [named]
        ends = source.stop or own
        return Tokenizer(tokenizer), [*ends, *(end for end in own if chat and end not in ends)]
    if source.model.vocabulary <= BYTES:
        raise UsageError(
            f"Text as bytes needs a vocabulary of {BYTES + 1}, but the model in {source.folder} has one of "
            f"{source.model.vocabulary}. Give the model's own tokenizer with --tokenizer."
        )
    return Bytes(), source.stop or [BYTES]

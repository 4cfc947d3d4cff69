"""Encoder: turn documents into tokens, by a Hugging Face tokenizer or as bytes, and mark which count in the loss.

A token counts if any of its characters lies in a span that counts. The token that closes a document counts if the
document's last character does.
"""

import pathlib
from typing import Any, NamedTuple

import numpy as np

from striped_attention.data.chat import ChatTemplate
from striped_attention.data.columns import NO_COLUMNS, Columns, Document
from striped_attention.data.tokenizer import ENDS, end_token, open_tokenizer, tokenizer_hash, tokens_of
from striped_attention.errors import UsageError

BYTES_HASH = "bytes"  # used in place of a tokenizer's hash
BYTES = 256  # the number of byte values, and the token that closes a document


class Encoded(NamedTuple):
    """The tokens of a document, and whether each counts in the loss; None if all do."""

    tokens: np.ndarray
    counted: np.ndarray | None


class Encoder:
    """Encodes documents as tokens, one per byte. Subclasses use a tokenizer."""

    end: int = BYTES
    vocabulary: int = BYTES + 1
    identity: str | None = None
    name: str = "Text as bytes"
    path: pathlib.Path | None = None

    def __init__(self, columns: Columns, template: ChatTemplate | None = None) -> None:
        self.columns, self.template = columns, template

    @property
    def weighs(self) -> bool:
        """Whether some tokens may not count in the loss."""
        return self.columns.loss is not None or self.template is not None

    def check(self, vocabulary: int) -> None:
        """Raise if a model's vocabulary is too small."""
        if self.vocabulary > vocabulary:
            raise UsageError(
                f"{self.name} needs a vocabulary of at least {self.vocabulary}, but the model's is {vocabulary}. "
                f"Use the model's own tokenizer; to train from scratch, set --vocabulary {self.vocabulary}."
            )

    def encode(self, documents: list[Document]) -> list[Encoded]:
        return [self._bytes(document) for document in documents]

    def _bytes(self, document: Document) -> Encoded:
        content = document.text.encode()
        tokens = np.append(np.frombuffer(content, np.uint8).astype(np.uint16), np.uint16(self.end))
        if document.spans is None:
            return Encoded(tokens, None)
        counted = _characters(document)
        if len(content) > len(document.text):
            counted = np.repeat(counted, [len(character.encode()) for character in document.text])
        return Encoded(tokens, np.append(counted, counted[-1:]))


class TokenizerEncoder(Encoder):
    """Encodes with a Hugging Face tokenizer, on all cores."""

    def __init__(self, path: pathlib.Path, columns: Columns, template: ChatTemplate | None) -> None:
        super().__init__(columns, template)
        self._tokenizer = open_tokenizer(path)
        end = end_token(self._tokenizer, path)
        if end is None:
            raise UsageError(f"{path} has no end-of-text token. Add one of {', '.join(ENDS)}.")
        self.end, self.vocabulary, self.path, self.name = end, tokens_of(self._tokenizer), path, str(path)
        self.identity = tokenizer_hash(path)

    def encode(self, documents: list[Document]) -> list[Encoded]:
        texts, chat = [document.text for document in documents], self.template is not None
        encode = self._tokenizer.encode_batch if self.weighs else self._tokenizer.encode_batch_fast
        try:
            found = encode(texts, add_special_tokens=not chat)  # a chat template adds them itself
        except Exception as error:  # the library raises plain Exception
            raise UsageError(
                f"{self.path} cannot tokenise the data: {error}. Give a tokenizer.json that can encode every text."
            ) from error
        return [self._tokens(*pair) for pair in zip(documents, found, strict=True)]

    def _tokens(self, document: Document, found: Any) -> Encoded:
        tokens = np.array(found.ids, np.uint32)
        close = self.template is None and (len(tokens) == 0 or tokens[-1] != self.end)
        counted = None
        if document.spans is not None:
            characters = _characters(document)
            before = np.append(0, np.cumsum(characters))
            first, last = np.array(found.offsets, np.int64).reshape(-1, 2).T
            counted = (before[last] > before[first]).astype(np.uint8)
            if len(tokens) and first[-1] == last[-1]:  # an end token that the tokenizer has added
                counted[-1] = characters[-1]
            counted = np.append(counted, characters[-1]) if close else counted
        return Encoded(np.append(tokens, np.uint32(self.end)) if close else tokens, counted)


def _characters(document: Document) -> np.ndarray:
    """Return uint8 [characters], 1 where a character counts. The text must not be empty."""
    counted = np.zeros(len(document.text), np.uint8)
    for start, end in document.spans or ():
        counted[start:end] = 1
    return counted


def check_chat(tokenizer: pathlib.Path | None, columns: Columns) -> None:
    """Raise if conversations are given without a model's tokenizer."""
    if columns.chat is not None and tokenizer is None:
        raise UsageError("--chat-column needs --tokenizer, a model's tokenizer.json with the chat template beside it.")


def make_encoder(tokenizer: pathlib.Path | None, columns: Columns = NO_COLUMNS) -> Encoder:
    """Create the encoder for a tokenizer, or for bytes if it is None."""
    check_chat(tokenizer, columns)
    if tokenizer is None:
        return Encoder(columns)
    return TokenizerEncoder(tokenizer, columns, None if columns.chat is None else ChatTemplate.beside(tokenizer))

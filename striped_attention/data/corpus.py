"""Corpus: all tokens of a source end to end, in which the token `end` closes every document.

Sources (`load`):

    nothing               the sources of Python's standard library, as bytes: a corpus without a download
    a text file, a folder UTF-8 text as bytes, or as tokens if a tokenizer.json is given; a file is a document
    .npy                  whole numbers, one dimension, read where they lie (memmap)
    .bin                  raw little-endian uint16, or uint32 where the vocabulary is larger than that
"""

import dataclasses
import functools
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Callable
from typing import Any

import numpy as np

from striped_attention.data.content import check_text
from striped_attention.data.tokenizer import ENDS, end_token, open_tokenizer, tokens_of
from striped_attention.errors import UsageError

TOKENS = (".npy", ".bin")
BYTES = 256  # values of a byte; the token that ends a document comes after them
LOOKS, LOOK = 64, 2**20  # places where tokens are checked before a run starts, and how many at each


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens end to end. `end` is the token that closes a document, None if nothing marks documents.

    `warning` is what a person who trains on it should know.
    """

    tokens: np.ndarray
    end: int | None
    vocabulary: int
    source: str
    warning: str | None = None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Tells one corpus from another, so that a run is not resumed on other data. Looks at 4096 tokens."""
        sample = self.tokens[:: -(-len(self.tokens) // 4096)].astype(np.int64)
        return f"{len(self.tokens)} tokens, {hashlib.sha256(sample.tobytes()).hexdigest()[:16]}"


def check_vocabulary(corpus: Corpus, tokens: np.ndarray) -> None:
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= corpus.vocabulary:
        raise UsageError(
            f"{corpus.source} holds the token {least if least < 0 else most}, but the vocabulary is "
            f"{corpus.vocabulary}. Give the model the data's vocabulary with --vocabulary, or data of the right kind."
        )


def check(path: pathlib.Path | None, tokenizer: pathlib.Path | None, vocabulary: int) -> None:
    """Raise for a corpus that cannot be loaded, as far as that can be seen without reading it."""
    if path is not None and not path.exists():
        raise UsageError(
            f"--data {path} does not exist. Give a text file, a folder of them, or tokens as .npy or .bin."
        )
    if tokenizer is not None:
        _encoder(tokenizer, vocabulary)


def load(path: pathlib.Path | None, tokenizer: pathlib.Path | None, end: int | None, vocabulary: int) -> Corpus:
    """The corpus of a path; without one, Python's standard library."""
    check(path, None, vocabulary)
    if path is not None and path.suffix in TOKENS and path.is_file():
        corpus = _tokens(path, tokenizer, end, vocabulary)
    else:
        if end is not None:
            raise UsageError("--end-token is for .npy and .bin data; text ends its documents by itself. Leave it out.")
        corpus = _text(path, tokenizer, vocabulary)
    if len(corpus.tokens) == 0:
        raise UsageError(f"{corpus.source} is empty. Give a file with text or tokens in it.")
    return _looked_through(corpus)


def _looked_through(corpus: Corpus) -> Corpus:
    """The corpus, after a look at all of it or at many places: are its tokens of the vocabulary, do documents end?"""
    looked = ends = 0
    for place in range(0, len(corpus.tokens), max(LOOK, len(corpus.tokens) // LOOKS)):
        tokens = corpus.tokens[place : place + LOOK]
        check_vocabulary(corpus, tokens)
        looked += len(tokens)
        ends += 0 if corpus.end is None else int(np.count_nonzero(tokens == corpus.end))
    if corpus.end is None or ends > 0:
        return corpus
    where = "" if looked == len(corpus.tokens) else f"the {looked:,} tokens that were looked at of "
    return dataclasses.replace(
        corpus,
        warning=f"--end-token {corpus.end} does not occur in {where}{corpus.source}: all of it counts as one document. "
        f"Is it another token that ends documents there?",
    )


def _tokens(path: pathlib.Path, tokenizer: pathlib.Path | None, end: int | None, vocabulary: int) -> Corpus:
    """Tokens that were made before, read where they lie."""
    if tokenizer is not None:
        raise UsageError(f"{path} holds tokens already: leave out --tokenizer, or give the text itself.")
    if end is not None and not 0 <= end < vocabulary:
        raise UsageError(f"--end-token must be a token of the vocabulary of {vocabulary}; got {end}.")
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise UsageError(f"{path} is not a NumPy file of numbers ({error}). Write it with numpy.save.") from error
        if not isinstance(tokens, np.ndarray):
            tokens.close()
            raise UsageError(f"{path} holds several arrays, as numpy.savez writes them. Write one with numpy.save.")
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise UsageError(
                f"{path} must hold whole numbers in one dimension; got {tokens.dtype} of shape {tokens.shape}. "
                f"Flatten it and save it as uint16 or uint32."
            )
        return Corpus(tokens, end, vocabulary, str(path))
    dtype = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{path} cannot be read: permission denied.")
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise UsageError(
            f"{path} must hold {dtype.name} numbers (that is what a vocabulary of {vocabulary} calls for), but its "
            f"{size} bytes are not a multiple of {dtype.itemsize}. Is it cut short, or of another kind?"
        )
    tokens = np.memmap(path, dtype, mode="r") if size else np.zeros(0, dtype)
    sample = tokens[: LOOK if dtype.itemsize == 2 else 0]
    if len(sample) > 1 and sample[::2].any() and not sample[1::2].any():
        raise UsageError(
            f"{path} looks like uint32 numbers (every other uint16 is 0), but a vocabulary of {vocabulary} calls for "
            f"uint16. Write it as uint16, or as .npy, which knows its own kind."
        )
    return Corpus(tokens, end, vocabulary, str(path))


def _text(path: pathlib.Path | None, tokenizer: pathlib.Path | None, vocabulary: int) -> Corpus:
    """Text files, a document each, as bytes or through a tokenizer."""
    files, source = (_standard_library(), "Python's standard library") if path is None else (_files(path), str(path))
    encode, end = _encoder(tokenizer, vocabulary)
    documents = [np.append(encode(path), end).astype(np.int32) for path in files if path.stat().st_size]
    tokens = np.concatenate(documents) if documents else np.zeros(0, np.int32)
    return Corpus(tokens, end, vocabulary, source)


def _encoder(tokenizer: pathlib.Path | None, vocabulary: int) -> tuple[Callable[[pathlib.Path], np.ndarray], int]:
    """What turns a file into tokens, and the token that ends it."""
    if tokenizer is None:
        encode, end, needed = _encode_bytes, BYTES, BYTES + 1
    else:
        encode, end, needed = _tokenizer(tokenizer)
    if needed > vocabulary:
        raise UsageError(
            f"{tokenizer or 'Text as bytes'} needs a vocabulary of at least {needed}, but the model's is {vocabulary}. "
            f"Set --vocabulary {needed} or choose another tokenizer."
        )
    return encode, end


def _standard_library() -> list[pathlib.Path]:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "test", "tests"}  # tests are there to be odd: other encodings, broken syntax
    own = [path for path in sorted(root.rglob("*.py")) if others.isdisjoint(path.relative_to(root).parts)]
    if not own:
        raise UsageError(f"This Python keeps no sources of its standard library in {root}. Give a text with --data.")
    return own


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    if path.is_file():
        return [path]
    files = [p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    tokens = [p for p in files if p.suffix in TOKENS]
    if tokens:
        raise UsageError(f"{path} holds tokens ({tokens[0].name}); of those give one file, not a folder.")
    return sorted(p for p in files if p.is_file())


def _read(path: pathlib.Path) -> bytes:
    """The text of a file, in UTF-8."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    check_text(path, content)
    return content


def _encode_bytes(path: pathlib.Path) -> np.ndarray:
    return np.frombuffer(_read(path), np.uint8)


def _tokenizer(path: pathlib.Path) -> tuple[Any, int, int]:
    """How a Hugging Face tokenizer.json turns a file into tokens, its end-of-text token, and its vocabulary."""
    tokenizer = open_tokenizer(path)
    end = end_token(tokenizer)
    if end is None:
        raise UsageError(f"{path} has none of the tokens that end a text: {', '.join(ENDS)}. Add one of them.")

    def encode(file: pathlib.Path) -> np.ndarray:
        return np.array(tokenizer.encode(_read(file).decode(), add_special_tokens=False).ids, np.int64)

    return encode, end, tokens_of(tokenizer)

"""Raw tokens: .npy and .bin files, memory-mapped. An optional end token closes every document."""

import dataclasses
import os
import pathlib

import numpy as np

from striped_attention.data.corpus import Corpus
from striped_attention.data.files import TOKENS as TOKENS
from striped_attention.errors import UsageError

LOOKS, LOOK = 64, 2**20  # the number of samples that are checked before a run starts, and tokens per sample


def load(path: pathlib.Path, end: int | None, vocabulary: int) -> Corpus:
    """Open a token file and check samples of its tokens."""
    corpus = _open(path, end, vocabulary)
    if corpus.size == 0:
        raise UsageError(f"{corpus.source} is empty. Give a file with text or tokens in it.")
    return _looked_through(corpus)


def _looked_through(corpus: Corpus) -> Corpus:
    """Check all tokens, or samples of a large corpus: are they in the vocabulary, and does the end token occur?"""
    looked = ends = 0
    for place in range(0, len(corpus.tokens), max(LOOK, len(corpus.tokens) // LOOKS)):
        tokens = corpus.tokens[place : place + LOOK]
        corpus.check_vocabulary(tokens)
        looked += len(tokens)
        ends += 0 if corpus.end is None else int(np.count_nonzero(tokens == corpus.end))
    if corpus.end is None or ends > 0:
        return corpus
    where = "" if looked == len(corpus.tokens) else f"the {looked:,} sampled tokens of "
    return dataclasses.replace(
        corpus,
        warning=f"--end-token {corpus.end} does not occur in {where}{corpus.source}, so all of it counts as one "
        f"document. Does another token end its documents?",
    )


def _open(path: pathlib.Path, end: int | None, vocabulary: int) -> Corpus:
    if end is not None and not 0 <= end < vocabulary:
        raise UsageError(f"--end-token must be a token of the vocabulary of {vocabulary}; got {end}.")
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise UsageError(f"{path} is not a NumPy file of integers ({error}). Write it with numpy.save.") from error
        if not isinstance(tokens, np.ndarray):
            tokens.close()
            raise UsageError(f"{path} holds several arrays, as numpy.savez writes them. Write one with numpy.save.")
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise UsageError(
                f"{path} must hold a one-dimensional array of integers; got {tokens.dtype} of shape {tokens.shape}. "
                f"Flatten it and save it as uint16 or uint32."
            )
        return Corpus(tokens, end, vocabulary, str(path))
    dtype = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{path} cannot be read: permission denied.")
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise UsageError(
            f"{path} must hold {dtype.name} integers (for a vocabulary of {vocabulary}), but its {size} bytes are not "
            f"a multiple of {dtype.itemsize}. Is it cut short, or of another dtype?"
        )
    tokens = np.memmap(path, dtype, mode="r") if size else np.zeros(0, dtype)
    sample = tokens[: LOOK if dtype.itemsize == 2 else 0]
    if len(sample) > 1 and sample[::2].any() and not sample[1::2].any():
        raise UsageError(
            f"{path} looks like uint32 (every other uint16 is 0), but a vocabulary of {vocabulary} requires uint16. "
            f"Write it as uint16, or as .npy, which stores its dtype."
        )
    return Corpus(tokens, end, vocabulary, str(path))

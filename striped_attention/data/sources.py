"""Sources: what --data names, and how each becomes a corpus.

    nothing                       the sources of Python's standard library, as bytes: a corpus without a download
    .npy, .bin                    tokens, read where they lie
    a folder of striped tokenize  tokens and where their documents begin, read where they lie
    text, JSON lines, Parquet,    tokenised once, into the cache
    Arrow, and folders of them

A source is written PATH or PATH=WEIGHT.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from striped_attention.data import cache, raw, store
from striped_attention.data.batch import Data
from striped_attention.data.columns import NO_COLUMNS, Columns
from striped_attention.data.corpus import Corpus
from striped_attention.data.encoder import BYTES_HASH, make_encoder
from striped_attention.data.files import find_files, standard_library
from striped_attention.data.mixture import Mixture
from striped_attention.data.tokenizer import tokenizer_hash
from striped_attention.errors import UsageError

Named = pathlib.Path | str | Sequence[str] | None


class Source(NamedTuple):
    """A path, None for Python's standard library, and its weight, None if none was given."""

    path: pathlib.Path | None
    weight: Fraction | None = None


def parse(sources: Named) -> list[Source]:
    """What --data says."""
    if sources is None:
        return [Source(None)]
    found = [_parse(str(text)) for text in ([sources] if isinstance(sources, str | pathlib.Path) else sources)]
    if not found:
        raise UsageError("--data needs a path. Leave it out to train on Python's standard library.")
    twice = [source.path for i, source in enumerate(found) if source.path in [other.path for other in found[:i]]]
    if twice:
        raise UsageError(f"--data names {twice[0]} twice. Name it once; weights add up.")
    bare = [source.path for source in found if source.weight is None]
    if 0 < len(bare) < len(found):
        raise UsageError(
            f"--data takes a weight for every source or for none, but {bare[0]} has none. Write it as {bare[0]}=WEIGHT."
        )
    return found


def _parse(text: str) -> Source:
    """PATH or PATH=WEIGHT. What exists as a path is one, whatever it contains."""
    path, _, number = text.rpartition("=")
    whole = pathlib.Path(text)
    try:
        weight = Fraction(number) if path else None
    except (ValueError, ZeroDivisionError):
        weight = None
    if weight is None or (whole.exists() and not pathlib.Path(path).exists()):
        return Source(whole)
    if whole.exists():
        raise UsageError(
            f"--data {text} may mean {text} or {path} with the weight {number}, for both exist. Write {text}=1 for the "
            f"first; to mean the second, rename the first."
        )
    if weight <= 0:
        raise UsageError(f"The weight of a source must be above 0; got --data {text}. Leave out what is not wanted.")
    return Source(pathlib.Path(path), weight)


def check(sources: Named, tokenizer: pathlib.Path | None, vocabulary: int) -> None:
    """Raise for sources that cannot be loaded, as far as that can be seen without reading them."""
    for source in parse(sources):
        if source.path is not None and not source.path.exists():
            raise UsageError(
                f"--data {source.path} does not exist. Give text, JSON lines, Parquet or Arrow, a folder of one of "
                f"them or of striped tokenize, or tokens as .npy or .bin."
            )
    if tokenizer is not None:
        make_encoder(tokenizer).check(vocabulary)


def load(
    sources: Named,
    tokenizer: pathlib.Path | None,
    end: int | None,
    vocabulary: int,
    columns: Columns = NO_COLUMNS,
    cache_folder: pathlib.Path | None = None,
) -> Data:
    """The corpus of a source, or the mixture of several. What is not tokenised yet is, into the cache."""
    check(sources, None, vocabulary)
    given = parse(sources)
    _check_used([_kind(source.path) for source in given], tokenizer, end, columns)
    paths = [source.path for source in given]
    corpora = {path: _made_before(path, tokenizer, end, vocabulary) for path in paths if _kind(path) != "text"}
    texts = [path for path in paths if path not in corpora]
    made = [(corpus.made_with, corpus.source) for corpus in corpora.values() if corpus.made_with is not None]
    if texts:
        encoder = make_encoder(tokenizer, columns)
        encoder.check(vocabulary)
        _check_one_tokenizer([*made, (encoder.identity or BYTES_HASH, str(texts[0] or "Python's standard library"))])
        for path in texts:
            files = standard_library() if path is None else find_files(path)
            corpus = cache.open_or_build(files, encoder, cache_folder)
            corpora[path] = dataclasses.replace(corpus, vocabulary=vocabulary)
    _check_one_tokenizer(made)
    parts = tuple(corpora[path] for path in paths)
    weights = (Fraction(part.size) if s.weight is None else s.weight for part, s in zip(parts, given, strict=True))
    return parts[0] if len(parts) == 1 else Mixture(parts, tuple(weights))


def _made_before(path: pathlib.Path | None, tokenizer: pathlib.Path | None, end: int | None, vocabulary: int) -> Corpus:
    """A source that holds tokens already."""
    assert path is not None, "the standard library is text"
    return raw.load(path, end, vocabulary) if _kind(path) == "raw" else _stored(path, tokenizer, vocabulary)


def _check_one_tokenizer(made: list[tuple[str, str]]) -> None:
    """Raise if two sources, by name, have tokens of different kinds, as far as that is known."""
    names = dict(made)
    if len(names) > 1:
        one, other, *_ = names.values()
        raise UsageError(
            f"All sources must have one tokenizer, but {one} and {other} have two. Give that of tokens which were made "
            f"before with --tokenizer, or tokenise them again."
        )


def need_tokenizer(sources: Named) -> bool:
    """Whether any source is text that has to become tokens."""
    return any(_kind(source.path) == "text" for source in parse(sources))


def all_raw(sources: Named) -> bool:
    """Whether all sources are .npy or .bin, for which a tokenizer is no use."""
    return all(_kind(source.path) == "raw" for source in parse(sources))


def has_raw(sources: Named) -> bool:
    """Whether any source holds tokens of which nobody knows how they were made."""
    return any(source.path is not None and source.path.suffix in raw.TOKENS for source in parse(sources))


def _kind(path: pathlib.Path | None) -> str:
    if path is not None and path.suffix in raw.TOKENS and path.is_file():
        return "raw"
    return "store" if path is not None and store.is_store(path) else "text"


def _check_used(kinds: list[str], tokenizer: pathlib.Path | None, end: int | None, columns: Columns) -> None:
    """Raise for an option that none of the sources has a use for."""
    if tokenizer is not None and set(kinds) == {"raw"}:
        raise UsageError(
            "--data holds tokens already, as .npy or .bin: leave out --tokenizer, or give the text itself."
        )
    if end is not None and "raw" not in kinds:
        raise UsageError("--end-token is for .npy and .bin data; text ends its documents by itself. Leave it out.")
    if columns != NO_COLUMNS and "text" not in kinds:
        raise UsageError(
            f"{columns.option} is for JSON lines, Parquet and Arrow, but --data holds tokens already. Leave it out."
        )


def _stored(path: pathlib.Path, tokenizer: pathlib.Path | None, vocabulary: int) -> Corpus:
    """What `striped tokenize` wrote. Raises if the tokenizer or the model is another one."""
    corpus, meta = store.open_store(path)
    if tokenizer is not None and tokenizer_hash(tokenizer) != meta.tokenizer:
        made = "as bytes, without a tokenizer" if meta.tokenizer is None else "with another tokenizer"
        raise UsageError(
            f"{path} was tokenised {made}, not with {tokenizer}. Tokenise it again, or take the tokenizer that made it."
        )
    if meta.vocabulary > vocabulary:
        raise UsageError(
            f"{path} needs a vocabulary of at least {meta.vocabulary}, but the model's is {vocabulary}. "
            f"Set --vocabulary {meta.vocabulary} or give the model's own tokens."
        )
    return dataclasses.replace(corpus, vocabulary=vocabulary, source=str(path))

"""Sources: parse --data and load every source as a corpus.

    nothing                       the sources of Python's standard library, as bytes: a corpus without a download
    .npy, .bin                    tokens, memory-mapped
    a folder of striped tokenize  tokens and document starts, memory-mapped
    text, JSON lines, Parquet,    tokenised once, into the cache
    Arrow, and folders of them

A source is written PATH or PATH=WEIGHT; PATH may be a pattern like data/train-*.parquet.
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
from striped_attention.data.documents import look
from striped_attention.data.encoder import BYTES_HASH, Encoder, check_chat, make_encoder
from striped_attention.data.files import TEXT, find_files, is_there, standard_library
from striped_attention.data.mixture import Mixture
from striped_attention.data.tokenizer import tokenizer_hash
from striped_attention.errors import UsageError

MADE = {"raw", "store"}  # kinds of sources that already hold tokens

Named = pathlib.Path | str | Sequence[str] | None


class Source(NamedTuple):
    """A path (None: Python's standard library) and its weight (None if not given)."""

    path: pathlib.Path | None
    weight: Fraction | None = None


def parse(sources: Named) -> list[Source]:
    """Parse the values of --data."""
    if sources is None:
        return [Source(None)]
    found = [_parse(str(text)) for text in ([sources] if isinstance(sources, str | pathlib.Path) else sources)]
    if not found:
        raise UsageError("--data needs a path. Leave it out to train on Python's standard library.")
    twice = [source.path for i, source in enumerate(found) if source.path in [other.path for other in found[:i]]]
    if twice:
        raise UsageError(f"--data names {twice[0]} twice. Name it once, with the sum of its weights.")
    bare = [source.path for source in found if source.weight is None]
    if 0 < len(bare) < len(found):
        raise UsageError(
            f"--data needs a weight for every source or for none, but {bare[0]} has none. Write {bare[0]}=WEIGHT."
        )
    return found


def _parse(text: str) -> Source:
    """Parse PATH or PATH=WEIGHT. Text that exists as a path is a path, even if it contains "="."""
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
            f"--data {text} is ambiguous: it may mean {text}, or {path} with weight {number}, and both exist. Write "
            f"{text}=1 for the first; to mean the second, rename the first."
        )
    if weight <= 0:
        raise UsageError(f"The weight of a source must be above 0; got --data {text}. Leave out unwanted sources.")
    return Source(pathlib.Path(path), weight)


def check(
    sources: Named,
    tokenizer: pathlib.Path | None,
    end: int | None,
    vocabulary: int,
    columns: Columns = NO_COLUMNS,
    together: Sequence[Named] = (),
) -> None:
    """Raise for sources that cannot be loaded, as far as this shows without reading them completely."""
    given = _there(sources)
    _check_used(together or (sources,), tokenizer, end, columns)
    kinds = {path: _kind(path, columns) for path, _ in given}
    made = [_made_before(path, tokenizer, end, vocabulary) for path, kind in kinds.items() if kind in MADE]
    _check_one_tokenizer([(corpus.made_with, corpus.source) for corpus in made if corpus.made_with is not None])
    for kind in set(kinds.values()) - MADE:
        _encoder(kind, tokenizer, vocabulary, columns)
    for path, kind in kinds.items():
        if path is not None and kind not in MADE:
            for file in find_files(path).files:
                look(file, columns if kind == "records" else NO_COLUMNS)


def load(
    sources: Named,
    tokenizer: pathlib.Path | None,
    end: int | None,
    vocabulary: int,
    columns: Columns = NO_COLUMNS,
    cache_folder: pathlib.Path | None = None,
    together: Sequence[Named] = (),
) -> Data:
    """Load the corpus of a source, or the mixture of several, tokenising into the cache what is not there yet.

    Rejects options that no source uses. `together` is --data and --validation, which share these options.
    """
    given = _there(sources)
    _check_used(together or (sources,), tokenizer, end, columns)
    kinds = {path: _kind(path, columns) for path, _ in given}
    corpora = {path: _made_before(path, tokenizer, end, vocabulary) for path, kind in kinds.items() if kind in MADE}
    made = [(corpus.made_with, corpus.source) for corpus in corpora.values() if corpus.made_with is not None]
    encoders = {kind: _encoder(kind, tokenizer, vocabulary, columns) for kind in set(kinds.values()) - MADE}
    if encoders:
        first = next(path for path, kind in kinds.items() if kind not in MADE)
        identity = encoders[kinds[first]].identity or BYTES_HASH
        _check_one_tokenizer([*made, (identity, str(first or "Python's standard library"))])
    _check_one_tokenizer(made)
    for path, kind in kinds.items():
        if kind in encoders:
            files = standard_library() if path is None else find_files(path)
            corpus = cache.open_or_build(files, encoders[kind], cache_folder)
            corpora[path] = dataclasses.replace(corpus, vocabulary=vocabulary)
    parts = tuple(corpora[source.path] for source in given)
    weights = (Fraction(part.size) if s.weight is None else s.weight for part, s in zip(parts, given, strict=True))
    return parts[0] if len(parts) == 1 else Mixture(parts, tuple(weights))


def _there(sources: Named) -> list[Source]:
    """Parse the values of --data. Raises if a path does not exist."""
    given = parse(sources)
    for path, _ in given:
        if path is not None and not is_there(path):
            raise UsageError(
                f"--data {path} does not exist. Give text, JSON lines, Parquet or Arrow, a folder of one of "
                f"them or of striped tokenize, or tokens as .npy or .bin."
            )
    return given


def _encoder(kind: str, tokenizer: pathlib.Path | None, vocabulary: int, columns: Columns) -> Encoder:
    """Return the encoder for a kind of source; plain text has no columns."""
    encoder = make_encoder(tokenizer, columns if kind == "records" else NO_COLUMNS)
    encoder.check(vocabulary)
    return encoder


def _made_before(path: pathlib.Path | None, tokenizer: pathlib.Path | None, end: int | None, vocabulary: int) -> Corpus:
    """Open a source that already holds tokens."""
    assert path is not None, "the standard library is text"
    return raw.load(path, end, vocabulary) if _kind(path) == "raw" else _stored(path, tokenizer, vocabulary)


def _check_one_tokenizer(made: list[tuple[str, str]]) -> None:
    """Raise if two sources, given as (tokenizer hash, name), were tokenised with different tokenizers."""
    names = dict(made)
    if len(names) > 1:
        one, other, *_ = names.values()
        raise UsageError(
            f"All sources must use the same tokenizer, but {one} and {other} differ. Give the tokenizer of the stored "
            f"tokens with --tokenizer, or tokenise them again."
        )


def need_tokenizer(sources: Named) -> bool:
    """Whether any source is text that must be tokenised."""
    return not {_kind(source.path) for source in parse(sources)} <= MADE


def all_raw(sources: Named) -> bool:
    """Whether all sources are .npy or .bin, which need no tokenizer."""
    return all(_kind(source.path) == "raw" for source in parse(sources))


def has_raw(sources: Named) -> bool:
    """Whether any source is .npy or .bin, whose tokenizer is unknown."""
    return any(source.path is not None and source.path.suffix in raw.TOKENS for source in parse(sources))


def kept_tokenizer(sources: Named) -> pathlib.Path | None:
    """Return the tokenizer.json stored with the tokens of a source, if there is one."""
    paths = [path / store.TOKENIZER for path, _ in parse(sources) if path is not None and _kind(path) == "store"]
    return next((path for path in paths if path.is_file()), None)


def _kind(path: pathlib.Path | None, columns: Columns = NO_COLUMNS) -> str:
    """Classify a source: "raw" or "store" hold tokens; "records" have columns, if some are requested; else "text"."""
    if path is not None and path.suffix in raw.TOKENS and path.is_file():
        return "raw"
    if path is not None and store.is_store(path):
        return "store"
    files = () if path is None or columns == NO_COLUMNS or not is_there(path) else find_files(path).files
    return "records" if files and files[0].kind != TEXT else "text"


def _check_used(together: Sequence[Named], tokenizer: pathlib.Path | None, end: int | None, columns: Columns) -> None:
    """Raise for an option that none of the sources uses."""
    kinds = {path: _kind(path, columns) for sources in together for path, _ in parse(sources)}
    where, s = ("--data and --validation", "") if len(together) > 1 else ("--data", "s")
    if tokenizer is not None and set(kinds.values()) == {"raw"}:
        raise UsageError(
            f"{where} hold{s} tokens already, as .npy or .bin: leave out --tokenizer, or give the text itself."
        )
    if end is not None and "raw" not in kinds.values():
        raise UsageError("--end-token is for .npy and .bin data; other data marks document ends itself. Leave it out.")
    if columns == NO_COLUMNS or "records" in kinds.values():
        return
    texts = [str(path or "Python's standard library") for path, kind in kinds.items() if kind == "text"]
    if texts:
        check_chat(tokenizer, columns)
    what = f"{texts[0]} is text by its name" if texts else f"{where} hold{s} tokens already"
    raise UsageError(
        f"{columns.option} is for JSON lines, Parquet and Arrow, but {what}. Leave it out, or give data that has "
        f"columns."
    )


def _stored(path: pathlib.Path, tokenizer: pathlib.Path | None, vocabulary: int) -> Corpus:
    """Open the output of `striped tokenize`. Raises if it does not match the tokenizer or the model."""
    corpus, meta = store.open_store(path)
    if tokenizer is not None and tokenizer_hash(tokenizer) != meta.tokenizer:
        made = "as bytes, without a tokenizer" if meta.tokenizer is None else "with another tokenizer"
        raise UsageError(
            f"{path} was tokenised {made}, not with {tokenizer}. Tokenise it again, or give the tokenizer it was made "
            f"with."
        )
    if meta.vocabulary > vocabulary:
        raise UsageError(
            f"{path} needs a vocabulary of at least {meta.vocabulary}, but the model's is {vocabulary}. "
            f"Use tokens of the model's own tokenizer; to train from scratch, set --vocabulary {meta.vocabulary}."
        )
    return dataclasses.replace(corpus, vocabulary=vocabulary, source=str(path))

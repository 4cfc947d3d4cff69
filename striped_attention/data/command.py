"""`striped tokenize`: tokenise data ahead of a run, into a folder that --data accepts."""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from striped_attention.data import store
from striped_attention.data.build import build, left_behind
from striped_attention.data.columns import Columns
from striped_attention.data.encoder import make_encoder
from striped_attention.data.files import Files, find_files, is_there
from striped_attention.data.progress import say
from striped_attention.data.raw import TOKENS
from striped_attention.errors import UsageError
from striped_attention.huggingface.writing import BESIDE
from striped_attention.options import Path, Text

SEVERAL = tyro.conf.arg(metavar="SOURCE ...", help_behavior_hint="(required)")


@dataclasses.dataclass(frozen=True)
class TokenizeConfig:
    """Tokenise data ahead of a run; pass the output folder to `striped train` as --data.

    `striped train` also tokenises its data itself, into a cache. Use this command to do so on another machine, or once
    for several runs.
    """

    sources: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional, SEVERAL]
    """Text in UTF-8, JSON lines, Parquet, Arrow, or folders of them. Several sources are concatenated; to mix them with
    weights, tokenise each one separately."""
    output: Annotated[pathlib.Path, tyro.conf.arg(metavar="PATH")]
    """A new or empty folder for the tokens."""
    tokenizer: Path = None
    """A Hugging Face tokenizer.json; a copy is kept with the tokens. Default: bytes are tokens."""
    text_column: Text = None
    """The column of JSON lines, Parquet and Arrow that holds the text. Default: text."""
    loss_column: Text = None
    """The column with the spans of the text that count in the loss: [[start, end], …], in characters, end excluded."""
    chat_column: Text = None
    """A column of conversations instead of text, rendered with the chat template beside --tokenizer; only the answers
    count in the loss."""


def tokenize(config: TokenizeConfig) -> None:
    """Tokenise the sources and print a summary."""
    encoder = make_encoder(config.tokenizer, Columns(config.text_column, config.loss_column, config.chat_column))
    if config.output.exists() and not (config.output.is_dir() and not any(config.output.iterdir())):
        raise UsageError(f"--output {config.output} is not empty. Choose a new folder.")
    if not config.sources:
        raise UsageError("striped tokenize needs a source: text, JSON lines, Parquet, Arrow, or a folder of files.")
    files = _files(config.sources)
    kept = {}
    if config.tokenizer is not None:
        beside = {name: config.tokenizer.with_name(name) for name in BESIDE}
        kept = {store.TOKENIZER: config.tokenizer, **{name: path for name, path in beside.items() if path.is_file()}}
    for path in left_behind(config.output):
        say(f"{path} is incomplete. Remove it unless another striped tokenize is writing {config.output}.")
    counts = build(files, encoder, config.output, kept)
    for note in counts.notes(files.source):
        say(note)
    say(f"Wrote {config.output}: a vocabulary of {encoder.vocabulary:,} tokens, documents closed by {encoder.end}.")


def _files(sources: tuple[pathlib.Path, ...]) -> Files:
    found = []
    for path in sources:
        if not is_there(path):
            raise UsageError(
                f"{path} does not exist. Give text, JSON lines, Parquet, Arrow, or a folder of one of them."
            )
        if path.suffix in TOKENS or store.is_store(path):
            raise UsageError(f"{path} holds tokens already. Give it to striped train as --data.")
        found.append(find_files(path))
    return Files(tuple(file for files in found for file in files.files), ", ".join(files.source for files in found))

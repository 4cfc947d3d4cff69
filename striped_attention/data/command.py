"""`striped tokenize`: text to tokens ahead of a run, as a folder that --data takes."""

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
    """Tokenise data ahead of a run of `striped train`, which then takes the folder as --data.

    `striped train` tokenises what it is given too, into a cache; this does it on another machine, or for several runs.
    """

    sources: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional, SEVERAL]
    """Text in UTF-8, JSON lines, Parquet, Arrow, or folders of them. Several follow each other; to mix them with
    weights, tokenise each on its own."""
    output: Annotated[pathlib.Path, tyro.conf.arg(metavar="PATH")]
    """A new folder for the tokens."""
    tokenizer: Path = None
    """A Hugging Face tokenizer.json; a copy is kept with the tokens. Default: bytes are tokens."""
    text_column: Text = None
    """The column of JSON lines, Parquet and Arrow that holds the text. Default: text."""
    loss_column: Text = None
    """A column that says which parts of the text count in the loss: [[start, end], …], in characters, end excluded."""
    chat_column: Text = None
    """A column of conversations instead of text, for the chat template beside --tokenizer; the answers count."""


def tokenize(config: TokenizeConfig) -> None:
    """Do what is asked, and say what was found."""
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
        say(f"{path} is incomplete. If no other striped tokenize writes {config.output} now, remove it.")
    counts = build(files, encoder, config.output, kept)
    for note in counts.notes(files.source):
        say(note)
    say(f"Written to {config.output}: a vocabulary of {encoder.vocabulary:,}, documents closed by {encoder.end}.")


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

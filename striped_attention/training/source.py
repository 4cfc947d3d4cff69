"""Source: a folder that holds a model, for training, generation and evaluation. Three kinds of folders are supported:

    a run of `striped train`         its newest checkpoint
    the output of `striped import`   a checkpoint without an optimiser
    a Hugging Face model             config.json and safetensors

Finding a model reads only JSON. `arrays` loads its weights onto a mesh later.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any

from striped_attention import data
from striped_attention.data.tokenizer import open_tokenizer, tokens_of
from striped_attention.errors import UsageError
from striped_attention.huggingface import read_config
from striped_attention.huggingface.config import IDS
from striped_attention.huggingface.said import read_json
from striped_attention.huggingface.writing import GENERATION
from striped_attention.models.config import ModelConfig
from striped_attention.training import rope
from striped_attention.training.checkpoint import FORMAT, damage
from striped_attention.training.folder import TOKENIZER

WEIGHTS = "striped_attention weights 1"  # a checkpoint without an optimiser


class NoTokenizer(UsageError):
    """The model's folder has no tokenizer."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A model whose weights are not read yet. `step` is None for a Hugging Face model. `said` is its config.json or
    the metadata of the checkpoint."""

    folder: pathlib.Path
    model: ModelConfig
    step: int | None
    said: dict[str, Any]

    def file(self, name: str | pathlib.Path) -> pathlib.Path | None:
        """Return the path of a file in the folder or below it; None if it does not exist.

        A checkpoint may come from an untrusted source: a link in it must not make `striped export` publish a file of
        this machine. Downloaded Hugging Face models consist of links into a cache, so links are followed there.
        """
        path = self.folder / name
        if self._leads_out(path):
            raise UsageError(
                f"The files of a run must lie in its folder, but {path} is a link to {path.resolve()}. If you trust "
                f"that file, replace the link with a copy, or give the file with --tokenizer."
            )
        return path if path.is_file() else None

    def _leads_out(self, path: pathlib.Path) -> bool:
        """Whether a file of a checkpoint is a link that leads out of the folder."""
        return self.step is not None and not path.resolve().is_relative_to(self.folder.resolve())

    @property
    def length(self) -> int:
        """The sequence length that the model is for."""
        if self.step is None:
            return self._number("max_position_embeddings")
        return max(self._number("length"), self.said.get("positions") or 0)

    @property
    def positions(self) -> int:
        """The longest sequence that the model's rotary positions support, according to its folder."""
        return max(self.length, rope.reach(self.model.rope_scaling) or 0)

    def _number(self, name: str) -> int:
        if not isinstance(self.said.get(name), int):
            raise UsageError(
                f"{self.folder} must give the model's sequence length as {name}; got {self.said.get(name)!r}."
            )
        return self.said[name]

    @property
    def ids(self) -> dict[str, Any]:
        """The model's special tokens: bos_token_id, eos_token_id, pad_token_id."""
        said = self.said | self.said.get("ids", {})  # checkpoints keep them in "ids"
        found = {name: said[name] for name in IDS if said.get(name) is not None}
        if self.step is not None and said.get("end") is not None:  # the token that ends the documents of a run
            found.setdefault("eos_token_id", said["end"])
        return found

    @functools.cached_property
    def generation(self) -> dict[str, Any]:
        """The content of generation_config.json; empty if there is none."""
        path = self.file(GENERATION)
        return {} if path is None else read_json(path)

    @property
    def stop(self) -> list[int]:
        """The stop tokens (eos_token_id) given in the folder; empty if none are given."""
        ids = (self.ids | self.generation).get("eos_token_id")
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(type(i) is int for i in ids):
            raise UsageError(f"{self.folder} must give integers as eos_token_id; got {ids}.")
        return ids

    @property
    def tokenizer(self) -> pathlib.Path | None:
        """The path of the model's tokenizer; None if its tokens are bytes. Raises NoTokenizer if neither is known."""
        path = self.file(TOKENIZER)
        if path is not None:
            return path
        options = self._options
        if options is None or data.has_raw(options.get("data")):
            raise NoTokenizer(f"{self.folder} has no {TOKENIZER}. Give one with --tokenizer.")
        used = options.get("tokenizer")
        if used is not None:
            raise UsageError(
                f"The tokenizer of a run must lie in its folder, and {self.folder} has no {TOKENIZER}. Its run.json "
                f"names {used}: if you trust that file, give it with --tokenizer."
            )
        return None

    def check_tokenizer(self, path: pathlib.Path) -> None:
        """Raise if a tokenizer does not fit this model: it has too many tokens, or a vocabulary unlike the model's own
        tokenizer."""
        given = open_tokenizer(path)
        needed, room = tokens_of(given), self.model.vocabulary
        if needed > room:
            raise UsageError(
                f"{path} needs a vocabulary of {needed}, but that of the model in {self.folder} is {room}: they do not "
                f"belong together. Give the model's own tokenizer with --tokenizer."
            )
        own = self.folder / TOKENIZER
        if self._leads_out(own) or not own.is_file() or own.samefile(path):
            return
        if open_tokenizer(own).get_vocab() != given.get_vocab():
            raise UsageError(
                f"A model needs the tokenizer that it was trained with, but {path} has another vocabulary than {own}. "
                f"Leave --tokenizer out."
            )

    @property
    def _options(self) -> dict[str, Any] | None:
        """The options of the run of `striped train` that wrote the checkpoint."""
        path = self.folder / "run.json"
        if not path.is_file():
            return None
        try:
            options = json.loads(path.read_text())[-1]["options"]
            if not isinstance(options, dict):
                raise TypeError("its options must be an object")
            return options
        except (ValueError, LookupError, TypeError) as error:
            raise UsageError(f"{path} is damaged ({error}). Give the tokenizer with --tokenizer.") from error


def find(folder: pathlib.Path, flag: str = "--model") -> Source:
    """Find the model in a folder. Raises UsageError, naming the option `flag`, if there is none."""
    if not folder.is_dir():
        raise UsageError(
            f"{flag} {folder} is not a folder. Give the folder of a `striped train` run or a Hugging Face model."
        )
    if (folder / "config.json").is_file():
        return Source(folder, read_config(folder), None, read_json(folder / "config.json"))
    if not any(path.name.isdecimal() for path in folder.iterdir()):
        raise UsageError(
            f"{flag} {folder} holds neither a checkpoint (a folder named after its step) nor a Hugging Face model "
            f"(config.json)."
        )
    return _find_checkpoint(folder)


def _find_checkpoint(folder: pathlib.Path) -> Source:
    """Find the newest checkpoint. Its JSON is read without Orbax, which would initialise JAX's devices: a dry run must
    not touch any."""
    newest = max((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    step = int(newest.name)
    try:
        said = json.loads((newest / "place" / "metadata").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"The checkpoint in {folder} cannot be read: {damage(error)}.") from error
    if not isinstance(said, dict) or said.get("format") not in (FORMAT, WEIGHTS):
        raise UsageError(
            f"{newest} was not written by this version of `striped train` or `striped import` (its format "
            f"is {said.get('format') if isinstance(said, dict) else None!r})."
        )
    try:
        return Source(folder, ModelConfig.from_json(said["model"]), step, said)
    except (LookupError, TypeError, ValueError) as error:
        raise UsageError(f"{newest} holds a model that this version does not support: {error}.") from error

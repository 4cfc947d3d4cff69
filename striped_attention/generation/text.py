"""Text: prompts to tokens, and tokens to text as they come."""

import codecs
import json
import pathlib
from typing import Any

from striped_attention.generation.weights import Source
from striped_attention.training.data import BYTES, TOKENS, end_token, open_tokenizer, tokens_of
from striped_attention.training.errors import UsageError


class NoTokenizer(UsageError):
    """A model comes without one."""


class Bytes:
    """Bytes are tokens, as `striped train` has it without a tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def stream(self, prompt: list[int]) -> "ByteStream":
        return ByteStream()


class Tokenizer:
    """A Hugging Face tokenizer.json."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def stream(self, prompt: list[int]) -> "TokenStream":
        return TokenStream(self._tokenizer, prompt)


class ByteStream:
    """Text from bytes as they come; those of half a character wait for the rest."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """The text that a token completes."""
        return self._decoder.decode(bytes([token])) if token < BYTES else ""

    def finish(self) -> str:
        """What is left when no token follows."""
        return self._decoder.decode(b"", final=True)


class TokenStream:
    """Text from tokens as they come.

    What a token stands for depends on those before it: a space, half a character. So some tokens that were shown before
    are decoded with it, of the prompt at first, and the text they make is left out.
    """

    CONTEXT = 6

    def __init__(self, tokenizer: Any, prompt: list[int]) -> None:
        self._decode = tokenizer.decode
        self._tokens = prompt[-self.CONTEXT :]
        self._shown = len(self._tokens)

    def add(self, token: int) -> str:
        """The text that a token completes."""
        self._tokens.append(token)
        text = self._new()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._tokens = self._tokens[-self.CONTEXT :]
        self._shown = len(self._tokens)
        return text

    def finish(self) -> str:
        """What is left when no token follows."""
        return self._new()

    def _new(self) -> str:
        return self._decode(self._tokens)[len(self._decode(self._tokens[: self._shown])) :]


def load(source: Source, given: pathlib.Path | None) -> tuple[Bytes | Tokenizer, list[int]]:
    """The tokenizer of a model, and the tokens that end a text. `given` is one that the user names."""
    path = given or find(source)
    needed, stop = BYTES + 1, source.stop or [BYTES]
    encoder: Bytes | Tokenizer = Bytes()
    if path is not None:
        tokenizer = open_tokenizer(path)
        end = end_token(tokenizer)
        encoder, needed, stop = (
            Tokenizer(tokenizer),
            tokens_of(tokenizer),
            source.stop or ([] if end is None else [end]),
        )
    if needed > source.model.vocabulary:
        raise UsageError(
            f"{path or 'Text as bytes'} needs a vocabulary of {needed}, but that of the model in {source.folder} is "
            f"{source.model.vocabulary}: they do not belong together. Give the model's own with --tokenizer."
        )
    return encoder, stop


def find(source: Source) -> pathlib.Path | None:
    """Where the tokenizer of a model is; None if its tokens are bytes."""
    beside = source.folder / "tokenizer.json"
    if beside.is_file():
        return beside
    options = _options(source)
    if options is None or str(options.get("data")).endswith(TOKENS):
        raise NoTokenizer(f"{source.folder} has no tokenizer.json. Give one with --tokenizer.")
    if options.get("tokenizer") is None:
        return None
    path = pathlib.Path(options["tokenizer"])
    if not path.is_file():
        raise UsageError(
            f"{source.folder} was trained with the tokenizer {path}, which is gone. Give it with --tokenizer."
        )
    return path


def _options(source: Source) -> dict[str, Any] | None:
    """The options of the run of `striped train` that made a checkpoint."""
    path = source.folder / "run.json"
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text())[-1]["options"])
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{path} is damaged ({error}). Give the tokenizer with --tokenizer.") from error


def read_prompts(path: pathlib.Path) -> list[str]:
    """The prompts of a file: of .jsonl the "prompt" of every line, of any other file every line that is not empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path} cannot be read: {error}.") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"--prompts {path} has no prompt in it. Write one a line.")
    return [_prompt(path, number, line) if path.suffix == ".jsonl" else line for number, line in lines]


def _prompt(path: pathlib.Path, number: int, line: str) -> str:
    try:
        said = json.loads(line)
    except ValueError as error:
        raise UsageError(f"Line {number} of {path} is not JSON: {error}.") from error
    if not isinstance(said, dict) or not isinstance(said.get("prompt"), str):
        raise UsageError(f'Line {number} of {path} must be like {{"prompt": "Once upon"}}; got {line[:80]}')
    return said["prompt"]

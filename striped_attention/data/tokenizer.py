"""Tokenizer: a Hugging Face tokenizer.json, for long texts."""

import pathlib
from typing import Any

from striped_attention.errors import UsageError

ENDS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[SEP]")


def open_tokenizer(path: pathlib.Path) -> Any:
    """The tokenizer of a Hugging Face tokenizer.json."""
    try:
        import tokenizers
    except ImportError as error:
        raise UsageError("--tokenizer needs the package tokenizers: pip install striped-attention[train].") from error
    if not path.is_file():
        raise UsageError(f"--tokenizer {path} is not a file. Give a Hugging Face tokenizer.json.")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise UsageError(f"{path} is not a Hugging Face tokenizer.json: {error}.") from error
    tokenizer.no_truncation()  # what suits short texts does not suit long ones
    tokenizer.no_padding()
    return tokenizer


def end_token(tokenizer: Any) -> int | None:
    """The token that ends a text, by its name."""
    return next((token for token in map(tokenizer.token_to_id, ENDS) if token is not None), None)


def tokens_of(tokenizer: Any) -> int:
    """The vocabulary that a tokenizer needs."""
    return max(tokenizer.get_vocab().values()) + 1

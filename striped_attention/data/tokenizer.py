"""Tokenizer: load a Hugging Face tokenizer.json without a length limit, and the settings in the files beside it."""

import hashlib
import json
import pathlib
from typing import Any

from striped_attention.errors import UsageError

ENDS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[SEP]")
CONFIG = "tokenizer_config.json"
BYTE_END = "<|end|>"


def open_tokenizer(path: pathlib.Path) -> Any:
    """Load a Hugging Face tokenizer.json, without truncation and padding."""
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
    tokenizer.no_truncation()  # tokenizer.json may set a maximum length
    tokenizer.no_padding()
    return tokenizer


def end_token(tokenizer: Any, path: pathlib.Path | None = None) -> int | None:
    """Return the token that ends a text: the one set in the files beside tokenizer.json, else one with a usual name."""
    said = None if path is None else _said(path)
    if said is None:
        return next((token for token in map(tokenizer.token_to_id, ENDS) if token is not None), None)
    where, token = said
    number = tokenizer.token_to_id(token) if isinstance(token, str) else token
    if number is None or tokenizer.id_to_token(number) is None:
        raise UsageError(
            f"{where} names {token!r} as the end-of-text token, but {path} has no such token. Do both belong to the "
            f"same model?"
        )
    return number


def _said(path: pathlib.Path) -> tuple[pathlib.Path, str | int] | None:
    """Return the first file beside a tokenizer.json that sets the end-of-text token, and the token's name or id."""
    for name, key in (
        (CONFIG, "eos_token"),
        ("generation_config.json", "eos_token_id"),
        ("config.json", "eos_token_id"),
    ):
        beside = path.with_name(name)
        found = read_beside(beside).get(key)
        found = found[0] if isinstance(found, list) and found else found
        found = found.get("content") if isinstance(found, dict) else found
        if isinstance(found, str | int) and not isinstance(found, bool):
            return beside, found
    return None


def read_beside(path: pathlib.Path) -> dict[str, Any]:
    """Read a JSON file beside a tokenizer.json; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} cannot be read ({error}). Download it again.") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} must hold a JSON object. Download it again.")
    return found


def tokens_of(tokenizer: Any) -> int:
    """Return the vocabulary size that a tokenizer needs."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_hash(path: pathlib.Path) -> str:
    """Return a hash of a tokenizer's content, independent of formatting, truncation and padding."""
    open_tokenizer(path)
    said = json.loads(path.read_bytes())
    said = {key: value for key, value in said.items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_byte_tokenizer(folder: pathlib.Path) -> pathlib.Path:
    """Write the tokenizer of models trained on bytes: a token per byte of UTF-8, and token 256, which ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # ByteLevel writes the printable bytes as themselves, and the others as characters from 256 on, in their order.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = spelled, decoders.ByteLevel()
    tokenizer.add_special_tokens([BYTE_END])
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": BYTE_END}
    config["clean_up_tokenization_spaces"] = False
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"

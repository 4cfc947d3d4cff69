"""Prompts: read prompts from options and files and encode them, plain or in a model's chat template.

--prompt, standard input, lines of a file    "Why is the sky blue?"
lines of a .jsonl                            {"prompt": "Why is the sky blue?", "id": 17}
with --chat also                             {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
"""

import dataclasses
import itertools
import json
import pathlib
from typing import Any

from striped_attention.data.chat import ASSISTANT, FILE, ChatTemplate, Message, Unrendered
from striped_attention.data.tokenizer import CONFIG
from striped_attention.errors import UsageError
from striped_attention.generation.config import GenerateConfig
from striped_attention.generation.text import Bytes, Tokenizer
from striped_attention.training.source import Source

SYSTEM, USER = "system", "user"
FURTHER = ("a", " a", "\n\na", ".", "1")  # continuations that may merge with the last token of a text


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt. `said` is its input: "prompt" or "messages", and further fields, which are copied to the output."""

    said: dict[str, Any]
    where: str  # for errors: "The prompt", "Line 3 of prompts.jsonl"


class Chat:
    """Conversations as tokens. The template writes special tokens itself, so the tokenizer adds none."""

    def __init__(self, template: ChatTemplate, encoder: Tokenizer, system: str | None) -> None:
        self.template, self.encoder = template, encoder
        self.system: list[Message] = [] if system is None else [{"role": SYSTEM, "content": system}]

    @classmethod
    def of(cls, config: GenerateConfig, source: Source, encoder: Bytes | Tokenizer) -> "Chat":
        """Return the chat of a model, or of the tokenizer in --tokenizer."""
        path = config.tokenizer or source.tokenizer
        if path is None or isinstance(encoder, Bytes):
            raise UsageError(
                f"--chat needs a tokenizer with a chat template, but the tokens of the model in {source.folder} are "
                f"bytes. Leave --chat out."
            )
        if config.tokenizer is None:
            for name in (CONFIG, FILE):  # files of a run must lie in its folder
                source.file(name)
        return cls(ChatTemplate.beside(path), encoder, config.system)

    def tokens(self, messages: list[Message], where: str) -> list[int]:
        """Return the tokens of a conversation, up to where the answer begins."""
        try:
            return self.encoder.plain(self.template.render(messages, add_generation_prompt=True))
        except Unrendered as error:
            raise UsageError(
                f"{where}: the chat template in {self.template.source} refuses the conversation ({error}). Change the "
                f"conversation, or generate without --chat."
            ) from error

    def messages(self, prompt: Prompt) -> list[Message]:
        """Return a prompt as a conversation."""
        if "messages" not in prompt.said:
            return [*self.system, {"role": USER, "content": prompt.said["prompt"]}]
        messages = prompt.said["messages"]
        if self.system and any(message["role"] == SYSTEM for message in messages):
            raise UsageError(f"{prompt.where} already has a system message. Remove it there, or leave out --system.")
        return [*self.system, *messages]


def encode(prompt: Prompt, encoder: Bytes | Tokenizer, chat: Chat | None) -> list[int]:
    """Return the tokens of a prompt."""
    try:
        json.dumps(prompt.said, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{prompt.where} cannot be encoded as UTF-8 ({error}).") from error
    if chat is not None:
        return chat.tokens(chat.messages(prompt), prompt.where)
    return encoder.encode(prompt.said["prompt"])


def opening(prompt: Prompt, tokens: list[int], encoder: Bytes | Tokenizer, chat: Chat | None) -> list[int]:
    """Return the tokens of a prompt that stay the same when more text follows.

    A tokenizer may merge the last characters with what follows them, and a template closes the message.
    """
    for text in FURTHER:
        longer = encode(dataclasses.replace(prompt, said=_extended(prompt.said, text)), encoder, chat)
        same = (a == b for a, b in zip(tokens, longer, strict=False))
        tokens = tokens[: sum(1 for _ in itertools.takewhile(bool, same))]
    return tokens


def _extended(said: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the input with further text at the end of the prompt or of the last message."""
    if "messages" not in said:
        return {"prompt": said["prompt"] + text}
    *others, last = said["messages"]
    return {"messages": [*others, {**last, "content": (last.get("content") or "") + text}]}


def read_prompts(path: pathlib.Path, chat: bool = False) -> list[Prompt]:
    """Read the prompts of a file: one per line, as JSON if the file is .jsonl. Empty lines are skipped."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path} cannot be read: {error}.") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"--prompts {path} has no prompts. Write one per line.")
    return [_prompt(path, number, line, chat) for number, line in lines]


def _prompt(path: pathlib.Path, number: int, line: str, chat: bool) -> Prompt:
    where = f"Line {number} of {path}"
    if path.suffix != ".jsonl":
        return Prompt({"prompt": line}, where)
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}.") from error
    if isinstance(said, dict) and "messages" in said and (chat or "prompt" not in said):
        _check_messages(said, where, chat)
    elif not isinstance(said, dict) or not isinstance(said.get("prompt"), str):
        raise UsageError(f'{where} must be like {{"prompt": "Once upon"}}; got {line[:80]}')
    return Prompt(said, where)


def _check_messages(said: dict[str, Any], where: str, chat: bool) -> None:
    if not chat:
        raise UsageError(f"{where} has messages, which require --chat. Give --chat, or replace them by a prompt.")
    if "prompt" in said:
        raise UsageError(f"{where} has both a prompt and messages. Leave one of them out.")
    messages = said["messages"]
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where} must have a list of messages; got {json.dumps(messages)[:80]}.")
    for number, message in enumerate(messages, 1):
        right = isinstance(message, dict) and isinstance(message.get("role"), str)
        # A message of an assistant that calls a tool may have no content.
        if not right or not (isinstance(message.get("content"), str) or message.get("tool_calls")):
            raise UsageError(
                f'{where}: message {number} must be like {{"role": "user", "content": "Hello"}}; got '
                f"{json.dumps(message, ensure_ascii=False)[:80]}."
            )
    if messages[-1]["role"] == ASSISTANT:
        raise UsageError(f"{where} ends with a message of the assistant. End it with the message to be answered.")

"""Conversation: messages typed one by one, each answered as it comes.

The cache is kept between turns. A turn's conversation is rendered as a whole, and if its tokens begin with those in the
cache, only the rest is prefilled. If not, it begins anew, with what was saved if there is --cache: a template may drop
earlier reasoning, and tokens that were generated may not be those that the tokenizer makes of their text.
"""

import sys

from striped_attention.data.chat import ASSISTANT, Message
from striped_attention.errors import UsageError
from striped_attention.generation.prompts import USER, Chat
from striped_attention.generation.run import Answer, Run, show

WHERE = "The conversation"
CAPACITY = 8192  # tokens, if neither --capacity nor the model sets fewer


def check(chat: Chat) -> None:
    """Raise, before weights are read, if the template refuses even the first message."""
    chat.tokens([*chat.system, {"role": USER, "content": "Hello"}], WHERE)


def converse(run: Run, chat: Chat) -> None:
    """Answer line after line, until the first empty one or the end of input."""
    messages: list[Message] = [*chat.system]
    cached: list[int] = []
    while line := _line():
        messages.append({"role": USER, "content": line})
        answer, cached = _turn(run, chat, messages, cached)
        messages.append({"role": ASSISTANT, "content": answer.text})


def _turn(run: Run, chat: Chat, messages: list[Message], cached: list[int]) -> tuple[Answer, list[int]]:
    """Answer the last message; returns the answer, and the tokens in the cache then, none if that is not known."""
    tokens, engine = chat.tokens(messages, WHERE), run.engine
    room = engine.options.capacity - len(tokens)
    if room < 1:
        raise UsageError(
            f"{WHERE} has {len(tokens)} tokens and does not fit in --capacity {engine.options.capacity}. Make that "
            f"larger, or begin a new conversation."
        )
    extends = 0 < len(cached) < len(tokens) and tokens[: len(cached)] == cached
    if run.saved is not None:
        run.saved.check_prompt(tokens, WHERE, run.encoder)
    if not extends and (run.saved is not None or engine.lengths.any()):
        cached = tokens[: run.begin()]
    run.prefill([tokens[len(cached) :]])
    (answer,) = run.decode([tokens], [0], min(run.settings.max_tokens, room), show)
    if answer.finish == "stop":  # the engine may have gone on
        return answer, []
    return answer, [*tokens, *answer.tokens]


def _line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""
    except UnicodeDecodeError as error:
        raise UsageError(f"{sys.stdin.name} gave a line that is not UTF-8 text ({error}).") from error

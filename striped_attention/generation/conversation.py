"""Conversation: interactive chat, one message per line.

The cache is kept between turns. Every turn renders the whole conversation. If its tokens begin with those in the cache,
only the rest is prefilled. If not, prefill starts again, from the saved cache if there is --cache: a template may drop
earlier reasoning, and the tokenizer may split generated text into tokens other than those that were generated.
"""

import sys

from striped_attention.data.chat import ASSISTANT, Message
from striped_attention.errors import UsageError
from striped_attention.generation.prompts import USER, Chat
from striped_attention.generation.run import Answer, Run, show

WHERE = "The conversation"
CAPACITY = 8192  # tokens; the default of --capacity, unless the model's maximum length is less


def check(chat: Chat) -> None:
    """Raise if the template rejects even a first message; called before weights are read."""
    chat.tokens([*chat.system, {"role": USER, "content": "Hello"}], WHERE)


def converse(run: Run, chat: Chat) -> None:
    """Answer each line of input, until an empty line or the end of input."""
    messages: list[Message] = [*chat.system]
    cached: list[int] = []
    while line := _line():
        messages.append({"role": USER, "content": line})
        answer, cached = _turn(run, chat, messages, cached)
        messages.append({"role": ASSISTANT, "content": answer.text})


def _turn(run: Run, chat: Chat, messages: list[Message], cached: list[int]) -> tuple[Answer, list[int]]:
    """Answer the last message. Return the answer and the tokens now in the cache, an empty list if they are unknown."""
    tokens, engine = chat.tokens(messages, WHERE), run.engine
    room = engine.options.capacity - len(tokens)
    if room < 1:
        raise UsageError(
            f"{WHERE} has {len(tokens)} tokens and does not fit in --capacity {engine.options.capacity}. Increase "
            f"--capacity, or start a new conversation."
        )
    extends = 0 < len(cached) < len(tokens) and tokens[: len(cached)] == cached
    if run.saved is not None:
        run.saved.check_prompt(tokens, WHERE, run.encoder)
    if not extends and (run.saved is not None or engine.lengths.any()):
        cached = tokens[: run.begin()]
    run.prefill([tokens[len(cached) :]])
    (answer,) = run.decode([tokens], [0], min(run.settings.max_tokens, room), show)
    if answer.finish == "stop":  # the engine may have decoded further
        return answer, []
    return answer, [*tokens, *answer.tokens]


def _line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""
    except UnicodeDecodeError as error:
        raise UsageError(f"{sys.stdin.name} has a line that is not UTF-8 text ({error}).") from error

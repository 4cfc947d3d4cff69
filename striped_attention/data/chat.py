"""Chat: render conversations as text with a model's chat template, and find the assistant's answers in it.

The template is written in Jinja: chat_template.jinja beside tokenizer.json, or chat_template in tokenizer_config.json.
It is third-party code, so it runs in Jinja's sandbox. It cannot see the date: a conversation always gives the same
tokens.

Only answers count in the loss. If the template marks them with {% generation %} … {% endgeneration %}, the marked text
counts. Otherwise an answer is what follows when the conversation before it, which ends with the generation prompt, is
extended by one message:

    template(messages[:i], add_generation_prompt=True)    "<user>hello<end><assistant>"
    template(messages[:i + 1])                            "<user>hello<end><assistant>good morning<end>"
"""

import json
import pathlib
import re
from typing import Any

from striped_attention.data.columns import Bad, Document
from striped_attention.data.tokenizer import CONFIG, read_beside
from striped_attention.errors import UsageError

FILE = "chat_template.jinja"
ASSISTANT = "assistant"
# Private-use characters that delimit marked text while a conversation is rendered.
OPEN, CLOSE = "\U0010fff0", "\U0010fff1"

Message = dict[str, Any]


class Unrendered(Exception):
    """Raised when a template rejects a conversation."""


class ChatTemplate:
    """A model's chat template. `tokens` maps the names of special tokens to their text; `source` is its file."""

    def __init__(self, text: str, tokens: dict[str, str], source: str) -> None:
        self.text, self.tokens, self.source = text, tokens, source
        self.marks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", text) is not None
        self._render = _compiled(text, source)

    @classmethod
    def beside(cls, tokenizer: pathlib.Path) -> "ChatTemplate":
        """Load the template of the model that a tokenizer.json belongs to."""
        config, file = read_beside(tokenizer.with_name(CONFIG)), tokenizer.with_name(FILE)
        tokens = {name: text for name, value in config.items() if name.endswith("_token") and (text := _text(value))}
        if file.is_file():
            try:
                return cls(file.read_text(), tokens, str(file))
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"{file} cannot be read: {error}.") from error
        found = config.get("chat_template")
        if isinstance(found, list):  # several named templates
            found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = found.get("default")
        if not isinstance(found, str):
            raise UsageError(
                f"Chat needs a template, but there is no {FILE} beside {tokenizer} and no chat_template in {CONFIG}. "
                f"Copy the model's file there."
            )
        return cls(found, tokens, str(tokenizer.with_name(CONFIG)))

    def render(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """Render a conversation as text; `add_generation_prompt` starts an answer at its end. May raise Unrendered."""
        return _without_marks(self._marked(messages, add_generation_prompt))[0]

    def document(self, messages: Any) -> Document | Bad:
        """Render a conversation as a document in which only the answers count."""
        if not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
            return Bad("the conversation is not a list of messages")
        messages = [{key: value for key, value in m.items() if value is not None} for m in messages]
        if not all(isinstance(m.get("role"), str) for m in messages):
            return Bad("a message of the conversation has no role")
        if not messages:
            return Document("")
        try:
            if self.marks:
                return Document(*_without_marks(self._marked(messages)))
            return self._by_prefixes(messages)
        except Unrendered as error:
            return Bad(f"the chat template rejects it ({error})")

    def _by_prefixes(self, messages: list[Message]) -> Document:
        text, spans = self._marked(messages), []
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._marked(messages[:i], True) if i else ""
            after = self._marked(messages[: i + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise UsageError(
                    f"The answers cannot be located with the chat template in {self.source}: rendering the first "
                    f"messages does not give a prefix of the whole conversation. Mark answers in the template with "
                    f"{{% generation %}} and {{% endgeneration %}}, or give conversations that end with their only "
                    f"answer."
                )
            spans.append((len(before), len(after)))
        return Document(text, spans)

    def _marked(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """Render a conversation, with delimiters around the text that the template marks."""
        try:
            text = self._render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
            text.encode()
        except Exception as error:  # a template is a program and may raise anything
            raise Unrendered((str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")) from error
        if text.count(OPEN) + text.count(CLOSE) != (2 * text.count(OPEN) if self.marks else 0):
            raise Unrendered("it contains private-use characters that are reserved for marking answers")
        return text


def _text(token: Any) -> str | None:
    """Return the text of a special token, which is a string or an object with a `content`."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Remove the delimiters. Returns the text and the spans that were marked."""
    spans, parts, length = [], [], 0
    for i, part in enumerate(re.split(f"[{OPEN}{CLOSE}]", text)):
        if i % 2:
            spans.append((length, length + len(part)))
        parts.append(part)
        length += len(part)
    return "".join(parts), spans


def _compiled(text: str, source: str) -> Any:
    """Compile a template as transformers does. Returns its render function."""
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ImportError as error:
        raise UsageError("Chat needs the package jinja2: pip install 'striped-attention[train]'.") from error

    class Generation(jinja2.ext.Extension):
        """{% generation %} … {% endgeneration %}"""

        tags = {"generation"}  # noqa: RUF012  as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(x: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, **options)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """A sandbox that raises on forbidden access. Jinja's own silently renders nothing instead."""

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise jinja2.exceptions.SecurityError(
                f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe"
            )

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(text).render
    except Exception as error:  # including Python's own, for the code that Jinja generates from nested loops
        raise UsageError(
            f"The chat template in {source} is not valid Jinja ({error}). Copy the model's own template."
        ) from error

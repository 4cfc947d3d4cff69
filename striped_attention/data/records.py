"""Records: JSON lines, or one array of JSON, a few records at a time; never a whole file in memory."""

import codecs
import itertools
import json
import re
from collections.abc import Callable, Generator
from typing import Any

from striped_attention.data.columns import Bad
from striped_attention.data.content import check_head
from striped_attention.data.files import HEAD, File
from striped_attention.data.unpack import damaged, opened
from striped_attention.errors import UsageError

LINES_AT_ONCE = 64
CHUNK = 2**18  # bytes of an array that are read at a time; more while a record is longer

Row = dict[str, Any] | Bad
Rows = Generator[tuple[float, list[Row]], None, None]

_SPACE = re.compile(r"\s*")
_ELEMENT = json.JSONDecoder()


def json_rows(file: File) -> Rows:
    """The records of a file, with the share of it that was read."""
    size = max(1, file.path.stat().st_size)
    with opened(file) as (stream, position):
        head = stream.peek(HEAD)[:HEAD]
        check_head(file, head)
        # An array is no record: no JSON lines begin with one.
        is_array = head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        yield from (_array if is_array else _lines)(file, stream, lambda: min(1.0, position() / size))


def _lines(_: File, stream: Any, share: Callable[[], float]) -> Rows:
    """One record per line; blank lines are none."""
    first = next(stream, b"").removeprefix(codecs.BOM_UTF8)
    lines = itertools.chain([first], stream)
    while some := list(itertools.islice(lines, LINES_AT_ONCE)):
        yield share(), [_record(line) for line in some if line.strip()]


def _record(line: bytes) -> Row:
    try:
        return _checked(json.loads(line.decode()))
    except UnicodeDecodeError:
        return Bad("it is not UTF-8")
    except (ValueError, RecursionError):
        return Bad("it is not JSON")


def _checked(found: Any) -> Row:
    return found if isinstance(found, dict) else Bad("it is no JSON object")


def _array(file: File, stream: Any, share: Callable[[], float]) -> Rows:
    """The elements of one array. What is wrong with it makes the whole file damaged: no line says where to go on."""
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    text, more, begun, closed = "", CHUNK, False, False
    try:
        while not closed:
            if not (coming := stream.read(more)):
                raise EOFError("its array does not end, or is no JSON")
            text += decode(coming)
            if not begun:
                begun, text = True, text.replace("[", ",", 1)  # so that a comma is before every element
            rows, at, closed = _elements(text)
            text, more = text[at:], CHUNK if rows else 2 * more
            yield share(), rows
        if (text + decode(stream.read(HEAD))).strip():
            raise ValueError("it goes on after its array")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file.path} must be UTF-8, but is not. Convert it, or keep it out of the data.") from error
    except (EOFError, ValueError, RecursionError) as error:
        raise damaged(file, error) from error


def _elements(text: str) -> tuple[list[Row], int, bool]:
    """The elements that are whole in a part of an array, each with a comma before it, and how much of it they are.

    True if the array ends there.
    """
    rows: list[Row] = []
    at = 0
    while True:
        comma = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        element = _SPACE.match(text, comma + 1).end()  # type: ignore[union-attr]
        for place in (comma, element):
            if text[place : place + 1] == "]":
                return rows, place + 1, True
        if text[comma : comma + 1] not in ("", ","):
            raise ValueError("there is no comma between two elements")
        try:
            found, end = _ELEMENT.raw_decode(text, element)
        except ValueError:
            return rows, at, False  # it may go on
        if end == len(text):
            return rows, at, False  # a number may, too
        rows.append(_checked(found))
        at = end

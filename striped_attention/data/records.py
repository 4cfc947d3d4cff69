"""Records: stream JSON lines or one JSON array, a few records at a time; a file is never in memory as a whole."""

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
CHUNK = 2**18  # bytes of an array that are read at a time; doubled while a record is longer

Row = dict[str, Any] | Bad
Rows = Generator[tuple[float, list[Row]], None, None]

_SPACE = re.compile(r"\s*")
_ELEMENT = json.JSONDecoder()


def json_rows(file: File) -> Rows:
    """Yield the records of a file, with the fraction of it read so far."""
    size = max(1, file.path.stat().st_size)
    with opened(file) as (stream, position):
        head = stream.peek(HEAD)[:HEAD]
        check_head(file, head)
        # A record is an object, so JSON lines never begin with an array.
        is_array = head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        yield from (_array if is_array else _lines)(file, stream, lambda: min(1.0, position() / size))


def _lines(_: File, stream: Any, share: Callable[[], float]) -> Rows:
    """Yield one record per line; blank lines are skipped."""
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
    return found if isinstance(found, dict) else Bad("it is not a JSON object")


def _array(file: File, stream: Any, share: Callable[[], float]) -> Rows:
    """Yield the elements of one array. Any error makes the whole file damaged: there is no next line to resume at."""
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    text, more, begun, closed = "", CHUNK, False, False
    try:
        while not closed:
            if not (coming := stream.read(more)):
                raise EOFError("its array does not end, or is not JSON")
            text += decode(coming)
            if not begun:
                begun, text = True, text.replace("[", ",", 1)  # now a comma precedes every element
            rows, at, closed = _elements(text)
            text, more = text[at:], CHUNK if rows else 2 * more
            yield share(), rows
        if (text + decode(stream.read(HEAD))).strip():
            raise ValueError("it continues after its array")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file.path} must be UTF-8, but is not. Convert it, or keep it out of the data.") from error
    except (EOFError, ValueError, RecursionError) as error:
        raise damaged(file, error) from error


def _elements(text: str) -> tuple[list[Row], int, bool]:
    """Parse the complete elements in a chunk of an array, each preceded by a comma.

    Returns the elements, how many characters they take, and whether the array ends there.
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
            return rows, at, False  # it may be incomplete
        if end == len(text):
            return rows, at, False  # a number may continue in the next chunk
        rows.append(_checked(found))
        at = end

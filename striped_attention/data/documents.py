"""Documents: read the documents of a source's files in order. Unusable rows are counted."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from striped_attention.data.chat import ChatTemplate
from striped_attention.data.columns import Bad, Columns, Document, check_columns, spans_of, text_of
from striped_attention.data.content import check_text
from striped_attention.data.counts import Counts
from striped_attention.data.files import LINES, TEXT, File
from striped_attention.data.records import json_rows
from striped_attention.data.tables import Rows, table_rows
from striped_attention.data.unpack import opened
from striped_attention.errors import UsageError


def documents(
    file: File, columns: Columns, template: ChatTemplate | None, counts: Counts, say: Callable[[float], None]
) -> Iterator[Document]:
    """Yield the non-empty documents of a file. `say` receives the fraction of the file read so far."""
    if file.kind == TEXT:
        yield from _text(file, columns, counts)
        return
    rows, noun = _rows(file, columns)
    number, seen = 0, False
    for share, some in rows:
        for row in some:
            number += 1
            counts.rows += 1
            if not (seen or isinstance(row, Bad)):
                check_columns(list(row), columns, f"{file.path}, {noun} {number},")
                seen = True
            found = row if isinstance(row, Bad) else _document(row, columns, template)
            if isinstance(found, Bad):
                counts.note_bad(f"{file.path}, {noun} {number}", found.why)
            elif found.text:
                counts.documents += 1
                yield found
            else:
                counts.empty += 1
        say(share)


def look(file: File, columns: Columns) -> None:
    """Raise what reading a file would raise, judging by its first rows; for Parquet and Arrow, also by its end."""
    if file.kind == TEXT:
        return
    rows, noun = _rows(file, columns)
    with contextlib.closing(rows):
        _, some = next(rows, (1.0, []))
    for number, row in enumerate(some, 1):
        if not isinstance(row, Bad):
            check_columns(list(row), columns, f"{file.path}, {noun} {number},")
            return


def _rows(file: File, columns: Columns) -> tuple[Rows, str]:
    """Return the rows of a file with columns, and the noun for a row in messages."""
    return (json_rows(file), "line") if file.kind == LINES else (table_rows(file, columns), "row")


def _text(file: File, columns: Columns, counts: Counts) -> Iterator[Document]:
    """Yield a text file as one document, all of which counts in the loss."""
    if columns != Columns():
        raise UsageError(
            f"{columns.option} is for JSON lines, Parquet and Arrow, but {file.path} is text by its name. Leave it "
            f"out, or give data that has columns."
        )
    with opened(file) as (stream, _):
        content = stream.read()
    check_text(file.path, content)
    counts.rows += 1
    if content:
        counts.documents += 1
        yield Document(content.decode())
    else:
        counts.empty += 1


def _document(row: dict[str, Any], columns: Columns, template: ChatTemplate | None) -> Document | Bad:
    """Convert a row to a document."""
    if missing := [name for name in columns.names if name not in row]:
        return Bad(f"it has no column {missing[0]!r}")
    if row[columns.main] is None:
        return Document("")
    if template is not None:
        return template.document(row[columns.main])
    text = text_of(row[columns.main])
    if isinstance(text, Bad) or columns.loss is None:
        return text if isinstance(text, Bad) else Document(text)
    spans = spans_of(row[columns.loss], text)
    return spans if isinstance(spans, Bad) else Document(text, spans)

"""Tables: stream Parquet by row groups and Arrow by batches; a file is never in memory as a whole."""

from typing import Any

from striped_attention.data.columns import Bad, Columns, check_columns
from striped_attention.data.content import STREAM, check_head
from striped_attention.data.files import HEAD, PARQUET, File
from striped_attention.data.records import Row, Rows
from striped_attention.data.unpack import damaged, pyarrow
from striped_attention.errors import UsageError

ROWS = 128  # at a time: documents may be long
STREAM_ENDS = STREAM + b"\0\0\0\0"


def table_rows(file: File, columns: Columns) -> Rows:
    """Yield the rows of a table, a few at a time, with the fraction of the file read so far."""
    pa = pyarrow(f"{file.kind}, like {file.path},")
    head = _head(file)
    check_head(file, head)
    try:
        if file.kind == PARQUET:
            yield from _parquet(file, columns)
        elif head.startswith(STREAM):
            yield from _stream(file, columns, pa)
        else:
            yield from _file(file, columns, pa)
    except (pa.ArrowException, OSError) as error:
        raise damaged(file, error) from error


def _head(file: File) -> bytes:
    """Return the first bytes of a file. Raises for an empty file, and for an Arrow stream that was cut between two
    batches, which would otherwise look complete."""
    try:
        with file.path.open("rb") as raw:
            head = raw.read(HEAD)
            raw.seek(-min(len(head), len(STREAM_ENDS)), 2)
            tail = raw.read()
    except OSError as error:
        raise UsageError(f"{file.path} cannot be read: {error.strerror}.") from error
    if not head:
        raise UsageError(f"{file.path} is empty and so no valid {file.kind} file. Make or download it again.")
    if file.kind != PARQUET and head.startswith(STREAM) and tail != STREAM_ENDS:
        raise damaged(file, EOFError("it lacks the end mark of an Arrow stream"))
    return head


def _parquet(file: File, columns: Columns) -> Rows:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file.path, memory_map=True) as table:
        check_columns(table.schema_arrow.names, columns, str(file.path))
        done, total = 0, max(1, table.metadata.num_rows)
        for batch in table.iter_batches(ROWS, columns=columns.names):
            done += batch.num_rows
            yield done / total, _rows(batch)


def _file(file: File, columns: Columns, pa: Any) -> Rows:
    with pa.memory_map(str(file.path)) as mapped, pa.ipc.open_file(mapped) as reader:
        check_columns(reader.schema.names, columns, str(file.path))
        for number in range(reader.num_record_batches):
            share = (number + 1) / reader.num_record_batches
            yield from _parts(reader.get_batch(number), columns, share, pa)


def _stream(file: File, columns: Columns, pa: Any) -> Rows:
    with pa.memory_map(str(file.path)) as mapped, pa.ipc.open_stream(mapped) as reader:
        check_columns(reader.schema.names, columns, str(file.path))
        for batch in reader:
            yield from _parts(batch, columns, mapped.tell() / mapped.size(), pa)


def _parts(batch: Any, columns: Columns, share: float, pa: Any) -> Rows:
    wanted = batch.select(columns.names)
    for column in wanted.columns:  # offsets in a damaged file may point anywhere in memory
        column.view(_as_binary(column.type, pa)).validate(full=True)
    for first in range(0, batch.num_rows, ROWS):
        yield share, _rows(wanted.slice(first, ROWS))


def _as_binary(kind: Any, pa: Any) -> Any:
    """Return the type with strings replaced by bytes: invalid UTF-8 makes its row bad, not the whole file."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_binary(kind.value_type, pa)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_as_binary(kind.value_type, pa)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_binary(field.type, pa)) for field in kind])
    return kind


def _rows(batch: Any) -> list[Row]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:  # in at least one row: find it
        return [_row(batch.slice(i, 1)) for i in range(batch.num_rows)]


def _row(batch: Any) -> Row:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError:
        return Bad("it is not UTF-8")

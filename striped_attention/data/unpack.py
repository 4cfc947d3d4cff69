"""Unpack: open files as byte streams, compressed or not, and import pyarrow (for zstandard, Parquet and Arrow)."""

import contextlib
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from striped_attention.data.content import check_head
from striped_attention.data.files import HEAD, File
from striped_attention.errors import UsageError


def pyarrow(why: str) -> Any:
    """Import pyarrow, which comes with the extra `train`. `why` names what needs it, for the error."""
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(f"{why} needs the package pyarrow: pip install 'striped-attention[train]'.") from error
    return pyarrow


@contextlib.contextmanager
def opened(file: File) -> Iterator[tuple[Any, Callable[[], int]]]:
    """Yield the uncompressed stream of a file, and a function that returns how many bytes on disk were read.

    Only read inside the `with`: errors raised there are reported as errors of the file.
    """
    try:
        with file.path.open("rb") as raw:
            if file.packed is not None:
                check_head(file, raw.read(HEAD), packed=True)
                raw.seek(0)
            yield _unpacked(file, raw), raw.tell
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(file, error) from error
    except OSError as error:
        if error.errno is None:  # pyarrow sets no errno if decompression fails
            raise damaged(file, error) from error
        raise UsageError(f"{file.path} cannot be read: {error.strerror}.") from error


def _unpacked(file: File, raw: Any) -> Any:
    if file.packed is None:
        return raw
    if file.packed == "gzip":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    return io.BufferedReader(pyarrow(str(file.path)).CompressedInputStream(raw, file.packed), 2**20)


def damaged(file: File, error: Exception) -> UsageError:
    """Return the error for a file that ends too early or was changed."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return UsageError(f"{file.path} is cut short or damaged ({text}). Make or download it again.")

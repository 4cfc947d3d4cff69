"""Content: detect what a file holds from its bytes, and reject files that do not match their name.

Any byte is a valid token, so a model could train on a picture or an archive and the loss would not reveal it.
"""

import codecs
import io
import itertools
import json
import pathlib

from striped_attention.data.files import ARROW, LINES, PARQUET, File
from striped_attention.errors import UsageError

UNPACK, NOT_TEXT = "Unpack it first.", "Keep it out of the data."
NAME = "Give it a name that ends in"
TABLE = "Export its text as JSON lines, or its tokens as .npy."
CONVERT = "Convert it to UTF-8, or keep it out of the data."

# (first bytes, kind of file, what to do about it)
KINDS = (
    (b"\x1f\x8b", "gzip", f"{UNPACK[:-1]}, or give it a name that ends in .gz."),
    (b"PK\x03\x04", "a zip archive (or an office document, or .npz)", UNPACK),
    (b"BZh", "bzip2", UNPACK),
    (b"\xfd7zXZ\x00", "xz", UNPACK),
    (b"\x28\xb5\x2f\xfd", "zstandard", f"{UNPACK[:-1]}, or give it a name that ends in .zst."),
    (b"\x04\x22\x4d\x18", "lz4", UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7-zip archive", UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", UNPACK),
    (b"\x89PNG\r\n\x1a\n", "a PNG picture", NOT_TEXT),
    (b"\xff\xd8\xff", "a JPEG picture", NOT_TEXT),
    (b"GIF8", "a GIF picture", NOT_TEXT),
    (b"RIFF", "a RIFF file (WebP, WAV or AVI)", NOT_TEXT),
    (b"\x7fELF", "a program", NOT_TEXT),
    (b"%PDF-", "PDF", "Extract its text first."),
    (b"PAR1", "Parquet", f"{NAME} .parquet."),
    (b"ARROW1", "Arrow", f"{NAME} .arrow."),
    (b"\x89HDF\r\n\x1a\n", "HDF5", TABLE),
    (b"SQLite format 3\x00", "an SQLite database", TABLE),
    (b"\x93NUMPY", "a NumPy array", "If it holds tokens, give it a name that ends in .npy."),
    (b"\xff\xfe", "UTF-16 text", CONVERT),
    (b"\xfe\xff", "UTF-16 text", CONVERT),
)
TAR, TAR_AT = b"ustar", 257  # the magic bytes of a tar archive and their offset
LOOKED_AT = 8  # lines that are inspected to tell JSON lines from text
STREAM = b"\xff\xff\xff\xff"  # the first bytes of an Arrow stream
BEGINS = {PARQUET: (b"PAR1",), ARROW: (b"ARROW1", STREAM), "gzip": (b"\x1f\x8b",), "zstd": (b"\x28\xb5\x2f\xfd",)}


def check_text(path: pathlib.Path, content: bytes) -> None:
    """Raise unless the content of a file is UTF-8 text and not JSON lines."""
    try:
        zero = content.find(b"\0")
        if zero < 0:
            content.decode()
    except UnicodeDecodeError as error:
        raise _refused(path, *_kind(content, f"not UTF-8 text (byte {error.start:,})", CONVERT)) from error
    if zero >= 0:
        raise _refused(path, *_kind(content, f"not text (byte {zero:,} is 0)", NOT_TEXT))
    if content.startswith(b"%PDF-"):
        raise _refused(path, *_kind(content, "PDF", NOT_TEXT))
    if _json_lines(content):
        raise _refused(path, "JSON lines", f"{NAME} .jsonl.")


def check_head(file: File, head: bytes, packed: bool = False) -> None:
    """Raise if a file's first bytes do not match its name. `packed` checks its compression, not its content."""
    wanted = str(file.packed) if packed else file.kind
    if wanted in BEGINS and head and not head.startswith(BEGINS[wanted]):
        raise _refused(file.path, *_kind(head, "something else", "Is it damaged or misnamed?"), wanted)
    if wanted == LINES and (found := _kind(head, "", ""))[0]:
        raise _refused(file.path, *found, wanted)


def _refused(path: pathlib.Path, kind: str, advice: str, wanted: str = "UTF-8 text") -> UsageError:
    return UsageError(f"By its name {path} must be {wanted}, but it is {kind}. {advice}")


def _kind(content: bytes, otherwise: str, advice: str) -> tuple[str, str]:
    """Identify a non-text file by its first bytes. Returns its kind and what to do about it."""
    found = [(kind, what) for start, kind, what in KINDS if content.startswith(start)]
    if content[TAR_AT : TAR_AT + len(TAR)] == TAR:
        found.append(("a tar archive", UNPACK))
    return found[0] if found else (otherwise, advice)


def _json_lines(content: bytes) -> bool:
    """Whether the first lines are all JSON objects or arrays. A single line may be any small JSON file."""
    lines = (line for line in io.BytesIO(content.removeprefix(codecs.BOM_UTF8)) if line.strip())
    first = list(itertools.islice(lines, LOOKED_AT))
    return len(first) >= 2 and all(map(_is_record, first))


def _is_record(line: bytes) -> bool:
    """Whether a line is a JSON object or array."""
    if not line.lstrip().startswith((b"{", b"[")):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True

"""Events: write TensorBoard event files. The usual writers import PyTorch where it is installed, which takes longer
than the rest of the start-up; so the format is written here.

A file is a sequence of records, each a length and an event, both followed by a checksum. An event is a protocol buffer
(tensorflow/core/util/event.proto), a sequence of fields: number and wire type, then value.

    event      1 wall time (double)   2 step   3 file version (string)   5 summary   7 session log
    summary    1 value: 1 tag (string)  2 simple value (float)
    session    1 status: 1 is START, which makes TensorBoard discard later steps of an earlier run
"""

import struct
import time
from collections.abc import Mapping

VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5  # wire types of fields
START = 1


def first_event() -> bytes:
    """The first event of a file: its version."""
    return _record(_field(3, b"brain.Event:2"))


def start_event(step: int) -> bytes:
    """An event after which steps continue from `step`; later steps of an earlier run are discarded."""
    return _record(_whole(2, step) + _field(7, _whole(1, START)))


def metrics_event(step: int, metrics: Mapping[str, float]) -> bytes:
    """The scalars of a step."""
    values = (
        _field(1, _field(1, name.encode()) + _key(2, FLOAT) + struct.pack("<f", x)) for name, x in metrics.items()
    )
    return _record(_whole(2, step) + _field(5, b"".join(values)))


def _record(event: bytes) -> bytes:
    content = _key(1, DOUBLE) + struct.pack("<d", time.time()) + event
    length = struct.pack("<Q", len(content))
    return b"".join(part + struct.pack("<I", _checksum(part)) for part in (length, content))


def _field(number: int, content: bytes) -> bytes:
    return _key(number, BYTES) + _varint(len(content)) + content


def _whole(number: int, value: int) -> bytes:
    return _key(number, VARINT) + _varint(value)


def _key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(value: int) -> bytes:
    """Encode as a protobuf varint: seven bits per byte, lowest first; the eighth bit is set if more bytes follow."""
    low = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(byte | 128 for byte in low[:-1]), low[-1]])


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_REMAINDERS = tuple(map(_remainder, range(256)))


def _checksum(content: bytes) -> int:
    """CRC-32C, rotated and offset (masked) as in TensorFlow's record format."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _REMAINDERS[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

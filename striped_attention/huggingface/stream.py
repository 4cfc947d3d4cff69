"""Stream: write a safetensors file one tensor at a time, in any order, with one tensor in memory.

The file holds the header's length in eight bytes, the header (JSON: dtype, shape and offsets of every tensor), and the
values. All offsets are known in advance. The safetensors library's own writer needs all tensors in memory.
"""

import json
import math
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {
    "F32": np.dtype("f4"),
    "F16": np.dtype("f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("i4"),
    "U32": np.dtype("u4"),
    "U8": np.dtype("u1"),
}


def begin(
    path: pathlib.Path, tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]
) -> dict[str, int]:
    """Write the header for tensors of these dtypes and shapes. Returns the byte offset of each tensor's values."""
    content, places = header(tensors, metadata)
    path.write_bytes(content)
    return places


def header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Return the header that `begin` writes, including its length, and the byte offset of each tensor's values."""
    said: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for key, (code, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * DTYPES[code].itemsize
        said[key] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(said).encode()
    text += b" " * (-len(text) % 8)
    places = {key: 8 + len(text) + said[key]["data_offsets"][0] for key in tensors}
    return struct.pack("<Q", len(text)) + text, places


def put(path: pathlib.Path, start: int, array: np.ndarray) -> None:
    """Write the values of a tensor at byte `start`."""
    with path.open("r+b") as file:
        file.seek(start)
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

"""Checks of the arguments of attention, before anything runs."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from striped_attention.core.bias import Bias
from striped_attention.core.layout import INT32_MAX, Layout, check_layout, check_whole
from striped_attention.core.mask import Mask

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class Context:
    """Keys that are not those of the queries' own sequence: their number, padded too, in the same layout.

    The query at position p takes the place p + `offset` among them.
    """

    length: int
    padded_length: int
    offset: int = 0


def check_arrays(query: Any, key: Any, value: Any, bias: Any, sinks: Any) -> None:
    """Raise unless the shapes and dtypes are compatible."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not (query.ndim == key.ndim == value.ndim == 4):
        raise ValueError(f"query, key and value must be [batch, length, heads, dim]; got {shapes}.")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"key and value must have the same batch, length and heads; got {shapes}.")
    if query.shape[0] != key.shape[0]:
        raise ValueError(f"query and key must have the same batch; got {shapes}.")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key must have the same dim; got {shapes}.")
    if 0 in (*query.shape, *key.shape, *value.shape):
        raise ValueError(f"query, key and value must not be empty; got {shapes}.")
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads % kv_heads:
        raise ValueError(
            f"The number of query heads must be a multiple of the number of key heads; got {heads} and {kv_heads}."
        )
    dtypes = [str(x.dtype) for x in (query, key, value)]
    if len(set(dtypes)) > 1 or dtypes[0] not in _DTYPES:
        raise ValueError(
            f"query, key and value must have the same dtype, one of {', '.join(_DTYPES)}; got {', '.join(dtypes)}. "
            f"Cast them with .astype."
        )
    if bias is not None and not isinstance(bias, Bias):
        raise ValueError(
            f"bias must be made by alibi(…) or relative_bias(…); got {type(bias).__name__}. Bias arrays have length² "
            f"values, which do not fit on a device of a long sequence."
        )
    if bias is not None and bias.heads != heads:
        raise ValueError(f"The bias must have one entry per query head, {heads}; got {bias.heads}.")
    if sinks is not None and (sinks.shape != (heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        raise ValueError(
            f"sinks must be floating point of shape ({heads},), one per head; got {sinks.dtype}{sinks.shape}."
        )


def check_length(padded_length: int, length: Any, mask: Any, layout: Any, devices: int) -> int:
    """Return the number of real tokens; raise unless it fits the arrays, the mask and the layout."""
    check_layout(layout)
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask must be made by causal(), documents(…) or a similar function; got {type(mask).__name__}. Dense "
            f"boolean masks are not supported: they do not scale to long sequences. If every query sees one range of "
            f"keys, use ranges(lo, hi)."
        )
    layout.positions(0, padded_length, devices)
    if length is None and mask.length is not None:
        fitting = layout.padded_length(mask.length, devices)
        if fitting != padded_length:
            raise ValueError(
                f"The mask was made for a sequence of {mask.length} tokens (the width of its segment ids), which "
                f"{layout!r} pads to {fitting} on {devices} devices; the arrays hold {padded_length}. Make the mask "
                f"from segment ids of the same sequence, or pass length={mask.length} if the rest is padding."
            )
        length = mask.length
    length = check_whole("length", padded_length if length is None else length)
    if length > padded_length:
        raise ValueError(
            f"length, the number of real tokens, must be between 1 and the arrays' length {padded_length}; "
            f"got {length}."
        )
    mask.check_length(length)
    return length


def check_context(
    length: int, slots: int, key_length: Any, key_slots: int, offset: Any, mask: Mask, layout: Layout, devices: int
) -> Context | None:
    """Return the keys' sequence if it is not that of the queries; `slots` and `key_slots` are the padded lengths."""
    offset = check_whole("offset", offset, least=0)
    if key_length is None and key_slots == slots and not offset:
        return None
    layout.positions(0, key_slots, devices)
    key_length = check_whole(
        "key_length", (length if key_slots == slots else key_slots) if key_length is None else key_length
    )
    if key_length > key_slots:
        raise ValueError(
            f"key_length, the number of real keys, must be between 1 and the length of the keys, {key_slots}; got "
            f"{key_length}."
        )
    if offset + slots > INT32_MAX:
        raise ValueError(f"Positions are int32: offset plus length may be at most {INT32_MAX}; got {offset + slots}.")
    if (key_length, offset) == (length, 0) and key_slots == slots:
        return None
    if "documents" in mask.made:
        raise ValueError(
            f"A documents mask is for queries and keys of one sequence; got {length} queries at offset {offset} and "
            f"{key_length} keys. Use ranges(lo, hi) with the keys that each query may see."
        )
    return Context(key_length, key_slots, offset)


def check_batch(mask: Mask, batch: int) -> None:
    for array in (mask.lo, mask.hi):
        if array is not None and array.shape[0] not in (1, batch):
            raise ValueError(
                f"A mask of documents or ranges needs a row for each of the {batch} sequences, or one for all; "
                f"got {array.shape[0]}."
            )


def check_options(scale: Any, softcap: Any, tile: Any) -> tuple[int, int] | None:
    """Return the tile as a pair (queries, keys), or None; raise unless all options are valid."""
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not (isinstance(value, (int, float, np.number)) and math.isfinite(value.real)):
            raise ValueError(f"{name} must be a finite Python number, known at trace time; got {value!r}.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no cap; got {softcap!r}.")
    if tile is None:
        return None
    pair = (tile, tile) if isinstance(tile, (int, np.integer)) else tile
    if not (isinstance(pair, tuple) and len(pair) == 2):
        raise ValueError(f"tile must be a whole number, or a pair (queries, keys) of them; got {tile!r}.")
    return check_whole("tile", pair[0]), check_whole("tile", pair[1])

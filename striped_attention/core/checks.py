"""Checks for mistakes that would silently give wrong results.

A program cannot tell from the arrays alone that they were never permuted, or permuted for another layout. But most
models already have the position of every token, for rotary embeddings, and permute it together with the tokens. If it
is passed as `positions=`, attention compares it with the layout.

Mistakes that are visible at trace time raise at once. Wrong positions that are known only at run time make the result
and its gradients NaN; with the environment variable SA_CHECK=1 the logger `striped_attention` reports the reason as an
error. Traced document ids are checked only with SA_CHECK=1: in a sequence where an id returns after another one, no
query sees any key, the result is 0, and the reason is logged. (A running program cannot raise: the other devices would
wait for this one until the process is aborted.)
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from striped_attention.core.layout import Layout, describe_order


def enabled() -> bool:
    """Return whether the user has enabled checks that cost time (SA_CHECK=1)."""
    return os.environ.get("SA_CHECK", "0") not in ("", "0")


def is_traced(*values: Any) -> bool:
    return any(isinstance(value, jax.core.Tracer) for value in values)


def log_unless(ok: Any, explain: Callable[..., str], *values: Any) -> None:
    """Log explain(*values) as an error at run time unless `ok`."""

    def look(*arrays: Any) -> None:
        # Use NumPy: an operation on JAX arrays would wait for the running program, which waits for this callback.
        ok, *values = map(np.asarray, arrays)
        if not ok.all():
            logging.getLogger("striped_attention").error(explain(*values))

    jax.debug.callback(look, ok, *values)


def check_positions(
    positions: Any, expected: Any, batch: int, length: Any, layout: Layout, devices: int
) -> Array | None:
    """Return whether the positions of real tokens are those that the layout expects, as a traced boolean.

    `positions` and `expected` are [slots] or [batch, slots]; `length` is an integer or [batch, 1]. If all values are
    known at trace time, return None if they match and raise otherwise.
    """
    positions = positions if isinstance(positions, jax.Array) else np.asarray(positions)
    slots = expected.shape[-1]
    fits = positions.shape in ((slots,), (1, slots), (batch, slots))
    if not fits or not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(
            f"positions must be whole numbers, one for each of the {slots} slots, shape [{slots}] or [{batch}, {slots}]"
            f" for this batch; got {positions.dtype}{positions.shape}."
        )
    explain = functools.partial(_explain, layout=layout, devices=devices)
    if not is_traced(positions, expected, length):
        positions, expected, length = (np.asarray(x) for x in (positions, expected, length))
        if not np.all((positions == expected) | (expected >= length)):
            raise ValueError(explain(positions, expected, length))
        return None
    ok = jnp.all((positions == expected) | (expected >= length))
    if enabled():
        log_unless(ok, explain, positions, expected, length)
    return ok


def _explain(positions: Any, expected: Any, length: Any, *, layout: Layout, devices: int) -> str:
    positions, expected, length = (np.asarray(x) for x in (positions, expected, length))
    rows, wanted = np.broadcast_arrays(np.atleast_2d(positions), np.atleast_2d(expected))
    real = wanted < length.reshape(-1, 1)
    wrong = (rows != wanted) & real
    row = int(np.argmax(wrong.any(axis=1)))
    slot = int(np.argmax(wrong[row]))
    seen = f"slot {slot} holds position {rows[row, slot]}, but the layout puts {wanted[row, slot]} there."
    if len(set((rows - wanted)[row, real[row]])) == 1:
        off = int(rows[row, slot] - wanted[row, slot])
        return (
            f"Every position is {abs(off)} too {'large' if off > 0 else 'small'}: {seen} Positions must start at 0 "
            f"for a new sequence, and at the number of tokens in the cache when a sequence is continued."
        )
    order = " ".join(["", describe_order(rows[row] - (wanted[row].min() if expected.ndim == 2 else 0))]).rstrip()
    return (
        f"The tokens are not in the order of {layout!r} on {devices} devices: {seen}{order} Permute tokens, positions "
        f"and targets exactly once with layout.permute(x, mesh=mesh, axis_name=…). If that pads them, pass length= "
        f"(counts= for a cache), the number of real tokens."
    )


def poison(x: Array, ok: Any) -> Array:
    """Set x to NaN where `ok` is False; `ok` is None (all is well) or has the shape of x's leading dimensions."""
    if ok is None:
        return x
    ok = ok.reshape(*ok.shape, *[1] * (x.ndim - ok.ndim))
    return x * jnp.where(ok, 1, jnp.nan).astype(x.dtype)  # a product, so that gradients are NaN too

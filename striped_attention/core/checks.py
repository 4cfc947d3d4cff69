"""Checks: mistakes that would give wrong numbers in silence.

A program cannot see that its arrays were never permuted, or permuted for another layout. But most models have the
position of every token at hand, for rotary embeddings, and permute it together with the tokens: attention compares it
with the layout, if it is passed as `positions=`.

What is known while tracing raises at once. Positions that are known only when a program runs make the result and its
gradients NaN, and with the environment variable SA_CHECK=1 the reason is logged, as an error of the logger
`striped_attention`. Document ids of a running program are looked at only with SA_CHECK=1: a sequence in which an id
comes back sees nothing, its result is 0, and the reason is logged. (Raising out of a running program is no choice: the
other devices would wait for this one, until the process is aborted.)
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
    """Whether checks that cost time are asked for."""
    return os.environ.get("SA_CHECK", "0") not in ("", "0")


def is_traced(*values: Any) -> bool:
    return any(isinstance(value, jax.core.Tracer) for value in values)


def log_unless(ok: Any, explain: Callable[..., str], *values: Any) -> None:
    """Log explain(*values) as an error unless `ok`, while the program runs."""

    def look(*arrays: Any) -> None:
        # NumPy arrays, for an operation on JAX arrays would wait for the program that waits for this callback.
        ok, *values = map(np.asarray, arrays)
        if not ok.all():
            logging.getLogger("striped_attention").error(explain(*values))

    jax.debug.callback(look, ok, *values)


def check_positions(
    positions: Any, expected: Any, batch: int, length: Any, layout: Layout, devices: int
) -> Array | None:
    """Whether the positions of tokens are those that the layout expects, where these are real tokens.

    Both are [slots] or [batch, slots], `length` is a number or [batch, 1]. None if all is known and right; raises if
    all is known and wrong.
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
    seen = f"slot {slot} holds position {rows[row, slot]}, and the layout puts {wanted[row, slot]} there."
    if len(set((rows - wanted)[row, real[row]])) == 1:
        off = int(rows[row, slot] - wanted[row, slot])
        return (
            f"Every position is {abs(off)} too {'large' if off > 0 else 'small'}: {seen} Positions count from the "
            f"beginning of a sequence; in a cache that holds some of it, from the number of tokens that it holds."
        )
    order = " ".join(["", describe_order(rows[row] - (wanted[row].min() if expected.ndim == 2 else 0))]).rstrip()
    return (
        f"The tokens are not in the order of {layout!r} on {devices} devices: {seen}{order} Permute tokens, positions "
        f"and targets alike, once, with layout.permute(x, mesh=mesh, axis_name=…); where that pads them, pass length= "
        f"(for a cache counts=), the number of real tokens."
    )


def poison(x: Array, ok: Any) -> Array:
    """NaN where something is known to be wrong; `ok` is None or like the first dimensions of x."""
    if ok is None:
        return x
    ok = ok.reshape(*ok.shape, *[1] * (x.ndim - ok.ndim))
    return x * jnp.where(ok, 1, jnp.nan).astype(x.dtype)  # a product, so that gradients are NaN too

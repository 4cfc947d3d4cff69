"""The kernels for Hopper in the interpreter, against the oracle.

A program of its own: the threads of a thread block wait for each other inside of callbacks and need a thread each, and
how many there are is settled when JAX starts.
"""

import os

os.environ["NPROC"] = "16"
import tests.conftest  # noqa: F401, I001  strict dtypes
import jax
import jax.numpy as jnp
import numpy as np

import striped_attention as sa
from striped_attention.kernels.contract import Block
from striped_attention.kernels.hopper import kernel
from striped_attention.kernels.hopper.emulation import emulated
from tests.test_kernel_contract import assert_close, oracle

# batch, queries, keys, heads, kv_heads, dim: two tiles of queries; a mask per sequence; odd sizes
CASES = [
    ((1, 200, 150, 2, 1, 64), 1, {}),
    ((2, 100, 190, 1, 1, 40), 2, {"softcap": 2.0, "bias": lambda x: sa.alibi(abs(x[:, 0]) / 100)}),
]
BFLOAT16 = 2.0**-7  # probabilities are rounded before they are multiplied with values


def wide_ranges(rng, rows, queries, keys):
    """Monotone ranges, of which some see everything and some nothing, with tiles inside that need no mask."""
    start = np.sort(rng.integers(-2 * keys, keys + 20, (rows, queries)).clip(0, keys), axis=-1)
    end = np.sort(rng.integers(-20, 3 * keys, (rows, queries)).clip(0, keys), axis=-1)
    return start.astype(np.int32), end.astype(np.int32)


def main() -> None:
    for (batch, queries, keys, heads, kv_heads, dim), rows, options in CASES:
        rng = np.random.default_rng(0)
        q, dout = rng.standard_normal((2, batch, queries, heads, dim)).astype(jnp.bfloat16)
        k, v = rng.standard_normal((2, batch, keys, kv_heads, dim)).astype(jnp.bfloat16)
        weights = rng.standard_normal((heads, 8)).astype(np.float32)
        start, end = wide_ranges(rng, rows, queries, keys)
        assert (start >= end).any()
        positions = tuple(np.sort(rng.choice(400, n, replace=False)).astype(np.int32) for n in (queries, keys))
        rest = {"scale": dim**-0.5, **{name: x for name, x in options.items() if name != "bias"}}
        bias, pull = jax.vjp(options["bias"], weights) if "bias" in options else (None, None)
        block = Block(*map(jnp.asarray, (start, end, *positions)), bias=bias, **rest)
        with emulated():
            out, lse = jax.jit(lambda q, k, v, block: kernel.attend(q)(k, v, block))(q, k, v, block)
            grads = jax.jit(lambda q, o, s, d, k, v, block: kernel.attend_grad(q, o, s, d)(k, v, block))
            *found, dbias = jax.block_until_ready(grads(q, out, lse, dout, k, v, block))
        found = (out, lse, *found, jnp.zeros_like(weights) if pull is None else pull(dbias)[0])
        assert {x.dtype for x in found} == {np.dtype("float32")}
        assert_close(found, oracle((q, k, v, weights), start, end, positions, options, dout), BFLOAT16)
        print("right:", (batch, queries, keys, heads, kv_heads, dim), rows, options, flush=True)


if __name__ == "__main__":
    main()

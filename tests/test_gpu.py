"""What needs an NVIDIA GPU: the cudnn kernel's numbers, and the schedule of a program for 8 GPUs.

Run with `make test-gpu` on a machine that has one; elsewhere these tests are skipped.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention import cudnn, kernel_cudnn
from striped_attention.oracle import dense_partial
from striped_attention.replay import replay
from striped_attention.ring import Ring

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU; see `make test-gpu`")

LAYOUTS = [sa.contiguous(), sa.striped(), sa.zigzag()]


def random(*shape, seed=0, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def error(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize(("dim", "heads", "kv_heads", "dtype"), [(64, 4, 4, jnp.bfloat16), (128, 8, 2, jnp.float16)])
@pytest.mark.parametrize("members", [1, 3])
def test_contract(layout, dim, heads, kv_heads, dtype, members):
    """Every block of a ring, for each mask: out, lse and the gradients, fed with an out and lse of their own."""
    slots = 130
    length = slots * members
    masks = [sa.causal(), sa.full(), *map(sa.sliding_window, (1, 7, slots, slots + 9, 2 * slots, length))]
    q, dout = (random(2, slots, heads, dim, seed=i, dtype=dtype) for i in (0, 1))
    k, v = (random(2, slots, kv_heads, dim, seed=i, dtype=dtype) for i in (2, 3))
    for mask, here, there in itertools.product(masks, range(members), range(members)):
        ring = Ring("s", members, layout, length, length, kernel_cudnn, dim**-0.5)
        block = ring.block(mask, None, here, there, own=here == there)
        out, lse = jax.jit(lambda *x, block=block: kernel_cudnn.attend(x[0])(*x[1:], block))(q, k, v)
        slot = np.arange(slots)
        seen = (block.start[0][:, None] <= slot) & (slot < block.end[0][:, None])
        exact = functools.partial(dense_partial, visible=seen[None], scale=dim**-0.5)
        f32 = [x.astype(jnp.float32) for x in (q, k, v)]
        truth, pull = jax.vjp(lambda q, k, v, exact=exact: exact(q, k, v), *f32)
        empty = ~seen.any(axis=1)
        assert np.isneginf(np.asarray(lse)[:, empty]).all()
        assert (np.asarray(out)[:, empty] == 0).all()
        if empty.all():
            continue
        assert error(out, truth.out) < 6e-3
        assert np.abs(np.asarray(lse - truth.lse)[:, ~empty]).max() < 1e-3
        grads = jax.jit(lambda *x, block=block: kernel_cudnn.attend_grad(x[0], *x[3:])(x[1], x[2], block)[:3])(
            q, k, v, truth.out, truth.lse, dout.astype(jnp.float32)
        )
        expected = pull(type(truth)(dout.astype(jnp.float32), jnp.zeros_like(truth.lse)))
        for name, a, b in zip(("dq", "dk", "dv"), grads, expected, strict=True):
            assert a.dtype == jnp.float32
            assert error(a, b) < 1e-2, (name, mask, here, there)


def sampled_truth(q, k, v, dout, rows):
    """out, dq of some queries and dk, dv of some keys of causal attention, in float64, one head at a time."""
    with jax.enable_x64(True):
        q, k, v, dout = (jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64)[0] for x in (q, k, v, dout))
        length, heads, dim = q.shape
        group = heads // k.shape[1]
        position = jnp.arange(length)

        @jax.jit
        def head(q, k, v, dout):
            def some(args):
                at, q, dout = args  # [chunk, ...]
                s = jnp.where(at[:, None] >= position, q @ k.T * dim**-0.5, -jnp.inf)
                p = jax.nn.softmax(s, axis=-1)
                out = p @ v
                ds = p * (dout @ v.T - jnp.sum(out * dout, axis=-1)[:, None]) * dim**-0.5
                return out, ds @ k, ds[:, rows].T @ q, p[:, rows].T @ dout

            chunks = jax.tree.map(lambda x: x.reshape(-1, 512, *x.shape[1:]), (position, q, dout))
            out, dq, dk, dv = jax.lax.map(some, chunks)
            return out.reshape(q.shape)[rows], dq.reshape(q.shape)[rows], dk.sum(0), dv.sum(0)

        results = [head(q[:, i], k[:, i // group], v[:, i // group], dout[:, i]) for i in range(heads)]
        out, dq, dk, dv = (np.stack([np.asarray(r[j]) for r in results], axis=1) for j in range(4))
        fold = lambda x: x.reshape(len(rows), -1, group, dim).sum(2)  # noqa: E731
        return out, dq, fold(dk), fold(dv)


@pytest.mark.parametrize("members", [2, 4, 8, 16])
def test_bf16_errors_stay_within_twice_those_of_one_gpu(members):
    length, rows = 16_384, np.sort(np.random.default_rng(0).choice(16_384, 64, replace=False))
    q, dout = (random(1, length, 4, 128, seed=i) for i in (0, 1))
    k, v = (random(1, length, 2, 128, seed=i) for i in (2, 3))
    truth = sampled_truth(q, k, v, dout, rows)

    @jax.jit
    def one_gpu(q, k, v, dout):
        out, lse = cudnn.forward(q, k, v, scale=128**-0.5, causal=True)
        return out, *cudnn.backward(q, k, v, out, lse, dout, scale=128**-0.5, causal=True)

    single = [error(x[0, rows], t) for x, t in zip(one_gpu(q, k, v, dout), truth, strict=True)]
    for layout in LAYOUTS:
        ring = replay(q, k, v, dout, kernel=kernel_cudnn, layout=layout, mask=sa.causal(), members=members)
        errors = [error(x[0, rows], t) for x, t in zip(ring, truth, strict=True)]
        shown = "  ".join(
            f"{n} {a:.2e} ({b:.2e})" for n, a, b in zip(["out", "dq", "dk", "dv"], errors, single, strict=True)
        )
        print(f"{members} members, {layout!r}: error of a ring (of one GPU): {shown}")
        assert all(a <= 2 * b for a, b in zip(errors, single, strict=True)), shown

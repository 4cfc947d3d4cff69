"""Tests that need an NVIDIA GPU: the accuracy of kernels, and the schedules of programs for many GPUs.

Run with `make test-gpu` on a machine that has one; elsewhere these tests are skipped.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from striped_bench.bench import gpu, mock
from striped_bench.bench.blocks import replay

import striped_attention as sa
from striped_attention.core.oracle import dense_attention, dense_partial
from striped_attention.core.partial import Partial
from striped_attention.kernels import cudnn
from striped_attention.kernels import decode as kernel_few
from striped_attention.strategies.problem import Problem
from tests.test_kernel_hopper import TILES, check_tiles

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU; see `make test-gpu`")

LAYOUTS = [sa.contiguous(), sa.striped(), sa.zigzag()]


hopper_only = pytest.mark.skipif(getattr(jax.devices()[0], "compute_capability", None) != "9.0", reason="no Hopper GPU")


@hopper_only
@pytest.mark.parametrize("case", TILES)
def test_the_kernel_for_hopper_is_right(case):
    check_tiles(*TILES[case])


@hopper_only
@pytest.mark.parametrize("slots", [128, 1000, 4096])
def test_the_kernel_for_hopper_gives_the_same_bits_again(slots):
    shape = (1, slots, slots, 8, 2, 128, 128)
    first, second = (check_tiles(shape, 1, {}, deterministic=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def random(*shape, seed=0, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def error(a, b, least=0.0):
    """Return |a - b| relative to |b|, or to |least| if larger: where a query sees one key, dq and dk are 0."""
    a, b, least = (np.asarray(x, np.float64) for x in (a, b, least))
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), np.linalg.norm(least))


@jax.jit
def exact(q, k, v, dout, seen):
    """Return out and lse of a block, and the gradients, in float32."""
    q, k, v, dout = (x.astype(jnp.float32) for x in (q, k, v, dout))
    truth, pull = jax.vjp(lambda *x: dense_partial(*x, seen[None], scale=q.shape[-1] ** -0.5), q, k, v)
    return truth, pull(Partial(dout, jnp.zeros_like(truth.lse)))


@jax.jit
def forward(q, k, v, block):
    return cudnn.attend(q)(k, v, block)


@jax.jit
def backward(q, k, v, dout, truth, block):
    return cudnn.attend_grad(q, *truth, dout.astype(jnp.float32))(k, v, block)[:3]


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "dtype"),
    [(64, 4, 4, jnp.bfloat16), (100, 4, 2, jnp.bfloat16), (128, 8, 2, jnp.float16)],
)
@pytest.mark.parametrize(("members", "windows"), [(1, [7]), (3, [1, 130, 139, 270])])
def test_contract(layout, dim, heads, kv_heads, dtype, members, windows):
    """Every block of a ring is right for each mask; the backward pass gets the reference out and lse of the block."""
    slots = 130
    length = slots * members
    q, dout = (random(2, slots, heads, dim, seed=i, dtype=dtype) for i in (0, 1))
    k, v = (random(2, slots, kv_heads, dim, seed=i, dtype=dtype) for i in (2, 3))
    masks = [sa.causal(), sa.full(), *map(sa.sliding_window, windows)]
    for mask, here, there in itertools.product(masks, range(members), range(members)):
        ring = Problem("s", members, layout, length, length, cudnn, dim**-0.5)
        block = ring.meetings(mask, None, here)(there, here == there)
        slot = np.arange(slots)
        seen = (block.start[0][:, None] <= slot) & (slot < block.end[0][:, None])
        truth, expected = exact(q, k, v, dout, seen)
        out, lse = forward(q, k, v, block)
        blind = ~seen.any(axis=1)
        assert np.isneginf(np.asarray(lse)[:, blind]).all()
        assert (np.asarray(out)[:, blind] == 0).all()
        grads = backward(q, k, v, dout, truth, block)
        assert all(x.dtype == jnp.float32 for x in (out, lse, *grads))
        if blind.all():
            assert all((np.asarray(x) == 0).all() for x in grads)
            continue
        assert error(out, truth.out) < 6e-3, (mask, here, there)
        assert np.abs(np.asarray(lse - truth.lse)[:, ~blind]).max() < 1e-3
        for name, a, b in zip(("dq", "dk", "dv"), grads, expected, strict=True):
            assert error(a, b, least=expected[2]) < 1e-2, (name, mask, here, there)


def sampled_truth(q, k, v, dout, rows):
    """Return out, dq, dk and dv of causal attention at positions `rows`, in float64, computed one head at a time."""
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

    single = [error(x[0, rows], t) for x, t in zip(jax.jit(gpu.one_gpu)(q, k, v, dout), truth, strict=True)]
    for layout in LAYOUTS:
        ring = replay(q, k, v, dout, kernel=cudnn, layout=layout, mask=sa.causal(), members=members)
        errors = [error(x[0, rows], t) for x, t in zip(ring, truth, strict=True)]
        shown = "  ".join(
            f"{n} {a:.2e} ({b:.2e})" for n, a, b in zip(["out", "dq", "dk", "dv"], errors, single, strict=True)
        )
        print(f"{members} devices, {layout!r}: error of a ring (of one GPU): {shown}")
        assert all(a <= 2 * b for a, b in zip(errors, single, strict=True)), shown


@pytest.mark.parametrize(("members", "slots"), [(2, 8192), (3, 8192), (4, 8192), (8, 8192), (8, 2048), (16, 8192)])
def test_transfers_are_hidden_behind_attention(members, slots):
    """All transfers, forward and backward, overlap with attention in the program compiled for `members` GPUs."""
    for row in mock.results(gpu.schedule, members, members=members, length=members * slots, heads="32:8"):
        exposed = [t for t in row["transfers"] if not t["hidden"]]
        print(f"{members} devices, {slots} slots, {row['layout']}: {len(exposed)} of {len(row['transfers'])} exposed")
        assert not exposed, f"{row['layout']}: {exposed}"
        assert len(row["transfers"]) >= 4


@pytest.mark.parametrize("heads", ["8:8", "32:8", "4:1"])
def test_decoding_reads_the_cache_as_plain_jax_does(heads):
    """The kernel for few queries matches plain JAX with different sequence lengths, two ranges and odd slot counts."""
    q_heads, kv_heads = map(int, heads.split(":"))
    random = np.random.default_rng(0)
    for queries, slots, dim, dtype in ((1, 5001, 128, "bfloat16"), (3, 700, 64, "float16"), (1, 400, 256, "bfloat16")):
        shapes = (3, queries, q_heads, dim), *[(3, kv_heads, slots, dim)] * 2
        q, k, v = (jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes)
        cuts = np.sort(random.integers(0, slots + 1, (4, 3, queries)), axis=0).astype(np.int32)
        few = kernel_few.Few(jax.tree.map(jnp.asarray, [(cuts[2], cuts[3]), (cuts[0], cuts[1])]), None, None, None, 0.1)
        assert kernel_few.triton_can(q, k, few)
        found, wanted = jax.jit(kernel_few.attend_few)(q, k, v, few), jax.jit(kernel_few.plain)(q, k, v, few)
        assert np.abs(found.lse - wanted.lse).max() < 1e-5
        assert np.abs(found.out - wanted.out).max() < 4e-3


@pytest.mark.filterwarnings("ignore::striped_attention.SlowKernelWarning")  # from the windowed cache
@pytest.mark.parametrize("window", [None, 300])
def test_a_prompt_in_pieces_on_a_gpu(window):
    """Prefill in chunks of two lengths with kernel 'auto', then decoding, has at most twice plain attention's error."""
    mesh = jax.make_mesh((1,), ("sequence",), devices=jax.devices()[:1])
    where = dict(layout=sa.striped(), mesh=mesh, axis_name="sequence")
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.standard_normal((2, 1537, n, 128)), jnp.bfloat16) for n in (8, 2, 2))
    i, j = np.mgrid[:1537, :1537]
    seen = ((j <= i) & (i - j < (window or 1537)))[None]
    with jax.enable_x64(True):
        wanted = np.asarray(dense_attention(*(np.asarray(x, np.float64) for x in (q, k, v)), seen))
    plain = np.abs(np.asarray(dense_attention(q, k, v, seen), np.float64) - wanted).max()
    cache, have, worst = sa.KVCache.empty(2, 2048, 2, 128, window=window, **where), np.zeros(2, int), []
    attend = jax.jit(sa.prefill_attention)
    for counts in ([512, 100], [512, 412], [512, 512], [0, 512]):
        parts = [jnp.stack([jnp.roll(x[r], -have[r], axis=0)[:512] for r in range(2)]) for x in (q, k, v)]
        out, cache = attend(*parts, cache, counts=jnp.asarray(counts, jnp.int32))
        for row, count in enumerate(counts):
            error = np.abs(np.asarray(out[row, :count], np.float64) - wanted[row, have[row] : have[row] + count])
            worst.append(error.max(initial=0))
        have += counts
    cache = cache.append(k[:, 1536:], v[:, 1536:])
    worst.append(np.abs(np.asarray(sa.decode_attention(q[:, 1536:], cache)[:, 0], np.float64) - wanted[:, 1536]).max())
    print(f"largest error {max(worst):.1e}, of plain attention {plain:.1e}")
    assert max(worst) <= 2 * plain

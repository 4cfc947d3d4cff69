"""The KV cache: slots of tokens, rejected input, and attention over growing sequences equal to that over whole ones."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import striped_attention as sa
from striped_attention.core.oracle import dense_attention
from striped_attention.kernels import decode as kernel_few
from tests.compare import FLOAT32_TOLERANCE, mesh_of

LAYOUTS = [sa.contiguous(), sa.striped(), sa.striped(3), sa.zigzag()]
BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 29, 4, 2, 8


def text(length=LENGTH, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, dtype=np.float32):
    """Return random queries, keys and values of two sequences."""
    random = np.random.default_rng(0)
    return tuple(random.standard_normal((BATCH, length, n, dim)).astype(dtype) for n in (heads, kv_heads, kv_heads))


def truth(q, k, v, window=None, **options):
    """Return causal attention in float64."""
    i, j = np.mgrid[: q.shape[1], : q.shape[1]]
    seen = (j <= i) & (i - j < (window or q.shape[1]))
    with jax.enable_x64(True):
        widen = lambda x: x if isinstance(x, float) else np.asarray(x, np.float64)  # noqa: E731
        q, k, v, options = jax.tree.map(widen, (q, k, v, options))
        return np.asarray(dense_attention(q, k, v, seen[None], **options))


def empty(devices, layout, capacity=32, kv_heads=KV_HEADS, dim=DIM, dtype="float32", **options):
    where = dict(layout=layout, mesh=mesh_of(devices), axis_name="sequence")
    return sa.KVCache.empty(BATCH, capacity, kv_heads, dim, dtype=dtype, **where, **options)


@functools.partial(jax.jit, donate_argnums=0)
def decode(cache, q, k, v, **options):
    cache = cache.append(k, v)
    return cache, sa.decode_attention(q, cache, **options)


@functools.partial(jax.jit, donate_argnums=0)
def prefill(cache, q, k, v, counts, **options):
    q, k, v = (cache.layout.permute(x, cache.devices, 1) for x in (q, k, v))
    out, cache = sa.prefill_attention(q, k, v, cache, counts=counts, **options)
    return cache, cache.layout.restore(out, cache.devices, 1)


def assert_close(found, wanted, what=""):
    error = np.abs(np.asarray(found, np.float64) - wanted).max() / np.abs(wanted).max()
    assert error < FLOAT32_TOLERANCE, (what, error)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize(("devices", "window"), [(1, 5), (2, None), (4, 5), (8, None)])
def test_token_by_token_is_attention_over_the_text(layout, devices, window):
    q, k, v = text()
    wanted = truth(q, k, v, window)
    cache = empty(devices, layout, window=window)
    if window is not None:
        assert cache.capacity < LENGTH  # so slots are overwritten
    for i in range(LENGTH):
        cache, out = decode(cache, *(x[:, i : i + 1] for x in (q, k, v)))
        assert_close(out[:, 0], wanted[:, i], i)


@pytest.mark.parametrize(
    ("layout", "devices", "window"),
    [
        *((LAYOUTS[0], 4, None), (LAYOUTS[1], 4, 5), (LAYOUTS[2], 2, None), (LAYOUTS[3], 4, 5)),
        *((LAYOUTS[1], 1, 5), (LAYOUTS[2], 8, 12)),
    ],
    ids=str,
)
def test_a_prompt_in_pieces_and_tokens_after_it(layout, devices, window):
    """Prefill in ragged chunks, one of them empty for one sequence, then decoding, match attention over the whole."""
    q, k, v = text()
    wanted = truth(q, k, v, window)
    cache = empty(devices, layout, window=window)
    have = np.zeros(BATCH, int)
    for counts in ([8, 5], [3, 8], [0, 6]):
        parts = [np.stack([np.roll(x[row], -have[row], axis=0)[:8] for row in range(BATCH)]) for x in (q, k, v)]
        cache, out = prefill(cache, *parts, jnp.asarray(counts, jnp.int32))
        for row, count in enumerate(counts):
            if count:
                assert_close(out[row, :count], wanted[row, have[row] : have[row] + count], counts)
        have += counts
    for _ in range(4):
        parts = [np.stack([x[row, have[row] : have[row] + 1] for row in range(BATCH)]) for x in (q, k, v)]
        cache, out = decode(cache, *parts)
        for row in range(BATCH):
            assert_close(out[row, 0], wanted[row, have[row]], have)
        have += 1
    assert cache.lengths.tolist() == have.tolist()


OPTIONS = {
    "scale": dict(scale=0.3),
    "softcap": dict(softcap=1.5),
    "sinks": dict(sinks=np.linspace(-1, 1, HEADS, dtype=np.float32)),
    "alibi": dict(bias=sa.alibi(np.linspace(0.1, 0.5, HEADS, dtype=np.float32))),
    "t5": dict(
        bias=sa.relative_bias(np.random.default_rng(1).standard_normal((8, HEADS), np.float32), max_distance=16)
    ),
}


@pytest.mark.parametrize(("name", "window"), [*((name, None) for name in OPTIONS), ("alibi", 6)])
def test_options_of_attention(name, window):
    """After 8 cached tokens, a prefill of 8 more and decoding one token apply every option."""
    q, k, v = text()
    options = OPTIONS[name]
    wanted = truth(q, k, v, window, **options)
    cache = empty(2, sa.striped(2), window=window).append(k[:, :8], v[:, :8])

    @jax.jit
    def run(cache, parts, next_q, next_k, next_v):
        out, cache = sa.prefill_attention(*parts, cache, **options)
        return out, sa.decode_attention(next_q, cache.append(next_k, next_v), **options)

    parts = [cache.layout.permute(x[:, 8:16], 2, 1) for x in (q, k, v)]
    prompt, token = run(cache, parts, *(x[:, 16:17] for x in (q, k, v)))
    assert_close(cache.layout.restore(np.asarray(prompt), 2, 1), wanted[:, 8:16])
    assert_close(token[:, 0], wanted[:, 16])


def test_several_tokens_at_once():
    """Tokens appended together, as in speculative decoding, each see those before them."""
    q, k, v = text()
    for window in (None, 5):
        wanted = truth(q, k, v, window)
        cache = empty(4, sa.striped(), window=window, new=3)
        for first in range(0, 27, 3):
            cache, out = decode(cache, *(x[:, first : first + 3] for x in (q, k, v)))
            assert_close(out, wanted[:, first : first + 3], (window, first))


def test_bfloat16_is_as_good_as_plain_attention_in_bfloat16():
    q, k, v = text(dtype=jnp.bfloat16)
    wanted = truth(q, k, v)
    i, j = np.mgrid[:LENGTH, :LENGTH]
    plain = np.abs(np.asarray(dense_attention(*map(jnp.asarray, (q, k, v)), (j <= i)[None]), np.float64) - wanted).max()
    cache, worst = empty(4, sa.striped(), dtype="bfloat16"), 0.0
    for at in range(LENGTH):
        cache, out = decode(cache, *(x[:, at : at + 1] for x in (q, k, v)))
        worst = max(worst, np.abs(np.asarray(out[:, 0], np.float64) - wanted[:, at]).max())
    assert worst <= 2 * plain


def test_heads_and_texts_can_be_split_too():
    q, k, v = text()
    mesh = jax.make_mesh((2, 2, 2), ("data", "sequence", "model"))
    spec = jax.P("data", "sequence", "model", None)
    cache = sa.KVCache.empty(
        BATCH, 32, KV_HEADS, DIM, layout=sa.striped(), mesh=mesh, axis_name="sequence", spec=spec, dtype="float32"
    )
    cache, out = prefill(cache, *(x[:, :16] for x in (q, k, v)), jnp.full(BATCH, 16, jnp.int32))
    wanted = truth(q, k, v)
    assert_close(out, wanted[:, :16])
    cache, out = decode(cache, *(x[:, 16:17] for x in (q, k, v)))
    assert_close(out[:, 0], wanted[:, 16])


@pytest.mark.parametrize("explicit", [False, True])
def test_under_a_mesh_that_was_set(explicit):
    """A cache works with the explicit axes of `jax.make_mesh`, where shardings are part of an array's type."""
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("sequence",), (kind,), devices=jax.devices()[:4])
    q, k, v = text()
    wanted = truth(q, k, v)
    with jax.set_mesh(mesh):
        cache = sa.KVCache.empty(
            BATCH, 32, KV_HEADS, DIM, layout=sa.striped(), mesh=mesh, axis_name="sequence", dtype="float32"
        )
        cache = cache.append(k[:, :8], v[:, :8])
        parts = [sa.striped().permute(x[:, 8:16], 4, 1) for x in (q, k, v)]
        out, cache = jax.jit(sa.prefill_attention)(*parts, cache)
        assert_close(sa.striped().restore(np.asarray(out), 4, 1), wanted[:, 8:16])
        cache, out = decode(cache, *(x[:, 16:17] for x in (q, k, v)))
    assert_close(out[:, 0], wanted[:, 16])


@settings(deadline=None)
@given(devices=st.integers(1, 9), stripe=st.integers(1, 40), room=st.integers(1, 300), tokens=st.integers(0, 300))
def test_the_fullest_device_has_at_most_a_stripe_more(devices, stripe, room, tokens):
    layout = sa.striped(stripe)
    capacity = layout.padded_length(room, devices)
    at = np.array([min(tokens, capacity)], np.int32)
    held = [int(layout.count_before(d, at, capacity, devices)[0]) for d in range(devices)]
    assert sum(held) == min(tokens, capacity)
    assert max(held) - min(held) <= stripe


def test_slots_fill_as_the_layout_says():
    """The arrays hold as many tokens per device as `count_before` returns, in the order of the layout."""
    _, k, v = text()
    layout = sa.striped(2)
    cache = empty(4, layout)
    for i in range(13):
        cache = cache.append(k[:, i : i + 1], v[:, i : i + 1])
    written = np.asarray(cache.key).reshape(BATCH, KV_HEADS, 4, -1, DIM).any(axis=(0, 1, 4))
    held = [int(layout.count_before(d, np.array([13]), cache.capacity, 4)[0]) for d in range(4)]
    assert written.sum(axis=1).tolist() == held == [4, 4, 3, 2]
    in_order = layout.restore(np.asarray(cache.key), 4, 2)[:, :, :13]
    assert np.array_equal(in_order, k[:, :13].swapaxes(1, 2))


def test_shapes_and_shardings_are_declared_once():
    wanted = sa.KVCache.shapes(2, 30, 2, 8, layout=sa.striped(4), mesh=mesh_of(4), axis_name="sequence")
    found = sa.KVCache.empty(2, 30, 2, 8, layout=sa.striped(4), mesh=mesh_of(4), axis_name="sequence")
    assert wanted.capacity == found.capacity == 32
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
    assert wanted.key.shape == (2, 2, 32, 8)
    assert wanted.key.sharding.shard_shape(wanted.key.shape) == (2, 2, 8, 8)


def test_what_does_not_fit_is_refused_before_it_is_written():
    q, k, v = text()
    cache = empty(4, sa.striped(), capacity=8).append(k[:, :6], v[:, :6])
    before = np.asarray(cache.key)
    with pytest.raises(ValueError, match=r"room for 8 tokens per sequence; the longest would have 9\. Nothing was"):
        cache.append(k[:, 6:9], v[:, 6:9])
    with pytest.raises(ValueError, match="the longest would have 10"):
        sa.prefill_attention(q[:, 6:10], k[:, 6:10], v[:, 6:10], cache)
    assert np.array_equal(before, cache.key)
    assert cache.append(k[:, 6:9], v[:, 6:9], jnp.array([2, 0], jnp.int32)).lengths.tolist() == [8, 6]
    traced = jax.jit(lambda cache, *new: cache.append(*new))(cache, k[:, 6:9], v[:, 6:9])  # cannot raise under jit
    kept = sa.striped().restore(np.asarray(traced.key), 4, 2)
    assert np.array_equal(kept, k[:, :8].swapaxes(1, 2))


def test_a_window_keeps_only_the_window():
    cache = empty(4, sa.striped(), capacity=10_000, window=24)
    assert cache.capacity == 24
    assert empty(4, sa.striped(), capacity=10_000, window=24, new=5).capacity == 28
    assert empty(4, sa.striped(), capacity=16, window=24).capacity == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(capacity=0), "capacity must be a whole number of at least 1; got 0"),
        (dict(window=0), "window must be a whole number of at least 1; got 0"),
        (dict(layout="striped"), r"layout must be striped\(\), contiguous\(\) or zigzag\(\); got 'striped'"),
        (dict(axis_name="tokens"), "needs a jax.sharding.Mesh with the axis 'tokens'"),
        (dict(axis_name=("node", "gpu")), r"needs a jax.sharding.Mesh with the axes \('node', 'gpu'\)"),
        (dict(spec=jax.P(None, None, None, None)), "spec must describe arrays"),
    ],
)
def test_bad_caches(change, message):
    options = dict(layout=sa.striped(), mesh=mesh_of(4), axis_name="sequence", capacity=16) | change
    with pytest.raises(ValueError, match=message):
        sa.KVCache.empty(2, options.pop("capacity"), 2, 8, **options)


def test_bad_inputs():
    q, k, v = text()
    cache = empty(4, sa.striped())
    with pytest.raises(ValueError, match=r"must be \[batch, new, kv_heads, dim\], for this cache \[2, new"):
        cache.append(k[:1], v[:1])
    with pytest.raises(ValueError, match=r"counts must have one integer per sequence, shape \(2,\); got \(3,\)"):
        cache.append(k, v, jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match=r"counts must lie between 0 and the 2 new tokens; got \[3, 0\]"):
        cache.append(k[:, :2], v[:, :2], jnp.array([3, 0]))
    with pytest.raises(ValueError, match=r"query must be \[batch, queries, heads, dim\]"):
        sa.decode_attention(q[:1, :1], cache)
    with pytest.raises(ValueError, match="multiple of the number of key heads; got 3 and 2"):
        sa.decode_attention(q[:, :1, :3], cache)
    with pytest.raises(ValueError, match="softcap must be positive"):
        sa.decode_attention(q[:, :1], cache, softcap=-1.0)
    with pytest.raises(ValueError, match="supports at most 1 queries per call"):
        sa.decode_attention(q[:, :2], empty(1, sa.striped(), window=4))
    with pytest.raises(ValueError, match="a multiple of 4; got 6"):
        sa.prefill_attention(q[:, :6], k[:, :6], v[:, :6], cache)


@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "slots", "dim", "two", "softcap"),
    [(1, 4, 2, 500, 64, False, None), (2, 8, 2, 300, 32, True, None), (1, 8, 1, 128, 256, True, 20.0)],
)
def test_the_kernel_for_gpus_as_the_interpreter_runs_it(queries, heads, kv_heads, slots, dim, two, softcap):
    random = np.random.default_rng(0)
    shapes = (2, queries, heads, dim), *[(2, kv_heads, slots, dim)] * 2
    q, k, v = (jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    cuts = np.sort(random.integers(0, slots + 1, (4, 2, queries)), axis=0).astype(np.int32)
    cuts[:, 0, 0] = 0  # a query that sees nothing
    ranges = [(cuts[2], cuts[3]), (cuts[0], cuts[1])] if two else [(cuts[0], cuts[3])]
    few = kernel_few.Few(jax.tree.map(jnp.asarray, ranges), None, None, None, dim**-0.5, softcap)
    assert kernel_few.triton_can(q, k, few)
    wanted, found = (
        kernel_few.plain(q, k, v, few, accelerator=False),
        kernel_few.by_triton(q, k, v, few, interpret=True),
    )
    assert np.array_equal(np.isneginf(wanted.lse), np.isneginf(found.lse))
    assert np.isneginf(found.lse[0, 0]).all()
    np.testing.assert_allclose(np.exp(found.lse), np.exp(wanted.lse), rtol=1e-5)
    np.testing.assert_allclose(found.out, wanted.out, atol=4e-3)


def test_what_the_kernel_for_gpus_leaves_to_the_plain_one(monkeypatch):
    def can(queries=1, slots=512, dim=64, dtype="bfloat16", bias=None):
        shapes = (2, queries, 8, dim), (2, 2, slots, dim)
        q, k = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes)
        return kernel_few.triton_can(q, k, kernel_few.Few([], None, None, bias))

    assert can()
    others = [dict(dtype="float32"), dict(dim=80), dict(slots=100), dict(queries=40), OPTIONS["alibi"]]
    assert not any(can(**other) for other in others)
    monkeypatch.setattr(jax, "__version__", "0.13.0")
    assert not can()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    kernel_few._warn_without_triton.cache_clear()
    with pytest.warns(
        sa.SlowKernelWarning,
        match=r"The Triton kernel for decoding on GPUs requires JAX before 0\.13; this is JAX 0\.13",
    ):
        assert not can()
    assert not can(), "warned only once"


@pytest.mark.parametrize("window", [None, 6])
def test_prefill_attends_to_the_cache_by_the_kernel_that_was_asked_for(monkeypatch, window):
    """The requested kernel, which records its blocks, computes all of them; no other kernel runs."""
    from striped_attention.kernels import choice, xla

    ran = []

    other = types.SimpleNamespace(**{**vars(xla), "attend": lambda q: _noting(ran, q, xla._attend)})
    monkeypatch.setattr(xla, "attend", lambda q: pytest.fail("the kernel xla ran"))
    monkeypatch.setitem(choice.KERNELS, "other", other)
    q, k, v = text(16)
    cache = empty(2, sa.striped(), window=window, new=8)
    for first in (0, 8):
        part = [x[:, first : first + 8] for x in (q, k, v)]
        cache, out = prefill_by("other", cache, *part)
        assert_close(out, truth(q, k, v, window)[:, first : first + 8])
    assert ran


def prefill_by(kernel, cache, *arrays):
    out, cache = sa.prefill_attention(
        *(cache.layout.permute(x, cache.devices, 1) for x in arrays), cache, kernel=kernel
    )
    return cache, cache.layout.restore(out, cache.devices, 1)


def _noting(ran, q, attend):
    def run(k, v, block):
        ran.append(block.start.shape)
        return attend(q, k, v, dataclasses.replace(block, pattern=None), accelerator=None)

    return run


def test_a_kernel_that_cannot_attend_to_the_cache_is_refused():
    from striped_attention.kernels import cudnn

    q, k, v = text(16)
    with cudnn.emulated():
        _, out = prefill_by("cudnn", empty(2, sa.striped()), q, k, v)
        assert_close(out, truth(q, k, v))
        with pytest.raises(NotImplementedError, match=r"Kernel 'cudnn' cannot do this: .* Use kernel='xla'"):
            prefill_by("cudnn", empty(2, sa.striped(), window=4, new=16), q, k, v)

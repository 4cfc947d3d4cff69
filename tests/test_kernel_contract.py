"""The contract that every kernel must satisfy: one block, forward and backward, against the float64 reference.

Every registered kernel runs here on a CPU, in each of its emulation modes. If a kernel's `unsupported` rejects a case,
it must give a reason; all other cases must be exact. These tests treat all kernels alike.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention.core.oracle import dense_partial
from striped_attention.core.partial import Partial, merge
from striped_attention.kernels.choice import KERNELS, refusal
from striped_attention.kernels.contract import Block, Kernel, Pattern, Same, make_request
from striped_attention.kernels.tiles import tile_spans
from striped_attention.strategies.problem import Problem
from tests.compare import FLOAT32_TOLERANCE

WAYS = [(name, way) for name, kernel in KERNELS.items() for way in kernel.EMULATIONS]

# batch, queries, keys, heads, kv_heads, dim, tile
SHAPES = [
    (2, 24, 24, 2, 1, 8, (8, 12)),
    (1, 37, 23, 4, 2, 16, (16, 8)),
    (1, 5, 70, 3, 1, 8, None),
    (2, 64, 16, 2, 2, 4, (64, 16)),
]
OPTIONS = {
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "alibi": {"bias": lambda x: sa.alibi(abs(x[:, 0]) / 16)},
    "relative": {"bias": lambda x: sa.relative_bias(x.T, bidirectional=True, max_distance=40), "softcap": 3.0},
}


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]} {way[1]}")
def kernel(request):
    name, way = request.param
    with KERNELS[name].EMULATIONS[way]():
        yield KERNELS[name]


def refused(kernel, mask=None, bias=None, softcap=None, layout=None, devices=1, slots=64, length=None):
    """Return why a kernel cannot take such blocks in bfloat16 on its own platform; None if it can."""
    (name,) = (name for name, other in KERNELS.items() if other is kernel)
    shape = jax.ShapeDtypeStruct((1, slots, 2, 64), jnp.bfloat16)
    request = make_request(
        shape, shape, mask=mask, layout=layout or sa.striped(), devices=devices, length=length, bias=bias,
        softcap=softcap, platform=next(iter(kernel.RATES)), here=False,
    )  # fmt: skip
    reason = refusal(name, request)
    assert reason is None or (reason.startswith("It ") and reason.endswith(".")) or "cannot" in reason
    return reason


def random_ranges(rng, rows, queries, keys):
    """Return monotone ranges; some are empty, some cover all keys."""
    start, end = np.sort(rng.integers(-keys // 3, keys + keys // 3, (2, rows, queries)).clip(0, keys), axis=-1)
    return start.astype(np.int32), end.astype(np.int32)


def make(shape, seed, dtype="float32"):
    batch, queries, keys, heads, kv_heads, dim, _ = shape
    rng = np.random.default_rng(seed)
    q, dout = rng.standard_normal((2, batch, queries, heads, dim)).astype(dtype)
    k, v = rng.standard_normal((2, batch, keys, kv_heads, dim)).astype(dtype)
    weights = rng.standard_normal((heads, 8)).astype("float32")
    positions = np.sort(rng.choice(90, queries, replace=False)), np.sort(rng.choice(90, keys, replace=False))
    return rng, (q, k, v, weights), dout, tuple(x.astype(np.int32) for x in positions)


def visible_keys(start, end, keys):
    slot = np.arange(keys)
    return (start[..., None] <= slot) & (slot < end[..., None])


def oracle(inputs, start, end, positions, options, dout, dlse=0.0):
    """Return output, lse and gradients in float64."""
    with jax.enable_x64(True):
        *inputs, dout, dlse = (jnp.asarray(np.asarray(x, np.float64)) for x in (*inputs, dout, dlse))
        distance = positions[1][None, :] - positions[0][:, None]
        visible = visible_keys(start, end, inputs[1].shape[1])
        return [np.asarray(x) for x in dense_run(tuple(options.items()), inputs, visible, distance, dout, dlse)]


@functools.partial(jax.jit, static_argnums=0)
def dense_run(options, inputs, visible, distance, dout, dlse):
    rest = dict(options)
    bias = rest.pop("bias", None)

    def forward(q, k, v, weights):
        return dense_partial(q, k, v, visible, bias=bias and bias(weights), distance=distance, **rest)

    partial, pull = jax.vjp(forward, *inputs)
    return (*partial, *pull(Partial(dout, jnp.where(jnp.isneginf(partial.lse), 0, dlse))))


def kernel_run(kernel, tile, inputs, start, end, positions, options, dout, pattern=None, dlse=None):
    q, k, v, weights = (jnp.asarray(x) for x in inputs)
    rest = {"scale": q.shape[-1] ** -0.5, **{name: x for name, x in options.items() if name != "bias"}}
    bias, bias_pull = jax.vjp(options["bias"], weights) if "bias" in options else (None, None)
    arrays = (jnp.asarray(x) for x in (start, end, *positions))
    block = Block(*arrays, bias=bias, tile=tile, pattern=pattern, **rest)
    out, lse = kernel.attend(q)(k, v, block)
    dlse = None if dlse is None else jnp.where(jnp.isneginf(lse), 0, dlse)
    dq, dk, dv, dbias = kernel.attend_grad(q, out, lse, jnp.asarray(dout), dlse)(k, v, block)
    dweights = jnp.zeros_like(weights) if bias is None else bias_pull(dbias)[0]
    return out, lse, dq, dk, dv, dweights


def assert_close(actual, expected, tolerance=FLOAT32_TOLERANCE):
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv", "dbias"), actual, expected, strict=True):
        a = np.asarray(a, np.float64)
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(e), err_msg=name)
        a, e = (np.where(np.isneginf(x), 0, x) for x in (a, e))
        error = np.abs(a - e).max() / max(np.abs(e).max(), 0.1)
        assert error <= tolerance, f"{name}: error {error:.2e}"


def test_every_kernel_has_all_that_the_contract_asks_for(kernel):
    assert isinstance(kernel, Kernel)


@pytest.mark.parametrize("layout", [sa.contiguous(), sa.zigzag(), sa.striped()], ids=repr)
@pytest.mark.parametrize("mask", [sa.causal(), sa.full(), sa.sliding_window(17)], ids=str)
def test_what_every_kernel_must_accept(kernel, layout, mask):
    """Every kernel accepts these masks and layouts; otherwise it could reject every case below."""
    assert refused(kernel, mask, layout=layout, devices=3, slots=12) is None
    assert refused(kernel, mask, layout=sa.striped(4), devices=1, slots=12) is None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arbitrary_ranges(kernel, shape):
    """Arbitrary ranges are exact with one mask for all sequences, and with one per sequence and a gradient of lse."""
    if refused(kernel):
        with pytest.raises(NotImplementedError, match="takes no ranges"):
            kernel.attend(jnp.zeros((1, 8, 2, 8)))(*jnp.zeros((2, 1, 8, 2, 8)), Block(*np.zeros((4, 1, 8), np.int32)))
        return
    for rows, with_lse in ((1, False), (shape[0], True)):
        rng, inputs, dout, positions = make(shape, seed=rows)
        start, end = random_ranges(rng, rows, shape[1], shape[2])
        dlse = rng.standard_normal(dout.shape[:3]).astype("float32") if with_lse else None
        expected = oracle(inputs, start, end, positions, {}, dout, 0.0 if dlse is None else dlse)
        assert_close(kernel_run(kernel, shape[-1], inputs, start, end, positions, {}, dout, dlse=dlse), expected)


@pytest.mark.parametrize("layout", [sa.contiguous(), sa.zigzag(), sa.striped(), sa.striped(3)], ids=repr)
@pytest.mark.parametrize("mask", [sa.causal(), sa.full(), sa.sliding_window(7), sa.sliding_window(17)], ids=str)
def test_the_blocks_of_a_ring(kernel, layout, mask):
    """Blocks of a mask known at trace time are exact; kernels without ranges recognise them by the layout's runs.

    Kernels with ranges treat these like any other ranges, so one block suffices for them.
    """
    devices, slots, dim = 3, 12, 8
    if refused(kernel, mask, layout=layout, devices=devices, slots=slots):
        return
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 1, slots, 2, dim)).astype("float32")
    k, v = rng.standard_normal((2, 1, slots, 1, dim)).astype("float32")
    inputs = (q, k, v, np.zeros((2, 8), "float32"))
    ring = Problem("s", devices, layout, devices * slots, devices * slots, kernel, dim**-0.5)
    for here, there in [(2, 1)] if refused(kernel) is None else [(0, 0), (0, 1), (1, 0), (2, 1)]:
        block = ring.meetings(mask, None, here)(there, here == there)
        assert isinstance(block.pattern, Pattern)
        ranges = (block.start, block.end, (block.query_positions, block.key_positions))
        expected = oracle(inputs, *ranges, {}, dout)
        assert_close(kernel_run(kernel, None, inputs, *ranges, {}, dout, block.pattern), expected)


def test_queries_that_all_see_the_same_keys(kernel):
    """All queries of a sequence see the same first keys, possibly none, as new tokens see a cache. Forward only."""
    shape = (3, 24, 20, 4, 2, 8, None)
    assert refused(kernel, sa.full()) is None
    _, inputs, dout, positions = make(shape, 0)
    end = np.broadcast_to(np.array([[7], [0], [20]], np.int32), (3, 24))
    block = Block(*map(jnp.asarray, (np.zeros_like(end), end, *positions)), pattern=Same(), scale=8**-0.5)
    found = kernel.attend(jnp.asarray(inputs[0]))(jnp.asarray(inputs[1]), jnp.asarray(inputs[2]), block)
    out, lse, *_ = oracle(inputs, np.zeros_like(end), end, positions, {}, dout)
    np.testing.assert_allclose(found.out, out, atol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(found.lse, lse, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize(("name", "shape"), list(zip(OPTIONS, SHAPES, strict=False)), ids=str)
def test_every_option(kernel, name, shape):
    options = OPTIONS[name]
    bias = options["bias"](jnp.ones((2, 8))) if "bias" in options else None
    if refused(kernel, bias=bias, softcap=options.get("softcap")):
        return
    rng, inputs, dout, positions = make(shape, 0)
    start, end = random_ranges(rng, shape[0], shape[1], shape[2])
    expected = oracle(inputs, start, end, positions, options, dout)
    assert_close(kernel_run(kernel, shape[-1], inputs, start, end, positions, options, dout), expected)


def test_a_bias_of_minus_infinity_hides_keys(kernel):
    """A bias of -inf hides whole tiles of keys, and all keys of some queries, although the mask shows every key."""
    shape = (1, 16, 40, 4, 2, 8, (8, 8))
    _, inputs, dout, _ = make(shape, 0)
    start, end = np.zeros((1, 16), np.int32), np.full((1, 16), 40, np.int32)
    positions = np.r_[30:42, 80:84].astype(np.int32), np.arange(40, dtype=np.int32)

    def bias(weights):  # bucket 3, the last of the 4 for keys before the query, has the distant keys
        return sa.relative_bias(weights.T.at[3].set(-jnp.inf), bidirectional=True, max_distance=16)

    if refused(kernel, bias=bias(jnp.ones((2, 8)))):
        return
    expected = oracle(inputs, start, end, positions, {"bias": bias}, dout)
    actual = kernel_run(kernel, shape[-1], inputs, start, end, positions, {"bias": bias}, dout)
    assert np.isneginf(actual[1][0, -4:]).all()
    assert np.isfinite(actual[1][0, :-4]).all()
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_are_float32_for_smaller_inputs(kernel, dtype):
    if dtype == "float16" and "float16" in (refused_dtype(kernel, dtype) or ""):
        return
    _, inputs, dout, positions = make(SHAPES[0], 0, dtype)
    start, end = np.zeros((1, 24), np.int32), np.arange(1, 25, dtype=np.int32)[None]
    pattern = Pattern(sa.striped(), 1, 24, causal=True, window=None, own=True)
    actual = kernel_run(kernel, (8, 12), inputs, start, end, positions, {}, dout, pattern)
    assert {x.dtype for x in actual} == {jnp.float32.dtype}
    # Kernels with float32 tiles have only the rounding of the inputs; others also round probabilities.
    assert_close(actual, oracle(inputs, start, end, positions, {}, dout), 2.0**-7 if dtype == "bfloat16" else 2.0**-10)


def refused_dtype(kernel, dtype):
    (name,) = (name for name, other in KERNELS.items() if other is kernel)
    shape = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.dtype(dtype))
    where = dict(layout=sa.striped(), devices=1, platform=next(iter(kernel.RATES)), here=False)
    return refusal(name, make_request(shape, shape, mask=sa.causal(), **where))


def test_a_cpu_computes_small_inputs_in_float32():
    kernel = KERNELS["xla"]
    rng, inputs, dout, positions = make(SHAPES[0], 0, "bfloat16")
    start, end = random_ranges(rng, 1, 24, 24)
    actual = kernel_run(kernel, (8, 12), inputs, start, end, positions, {}, dout)
    assert_close(actual, oracle(inputs, start, end, positions, {}, dout))


def test_rows_without_keys_give_nothing_and_get_nothing(kernel):
    if refused(kernel):
        return
    _, inputs, dout, positions = make(SHAPES[0], 0)
    nothing = np.full((1, 24), 7, np.int32)
    out, lse, dq, dk, dv, _ = kernel_run(kernel, (8, 12), inputs, nothing, nothing, positions, {}, dout)
    assert np.isneginf(lse).all()
    for x in (out, dq, dk, dv):
        assert (np.asarray(x) == 0).all()


def test_blocks_merge_to_the_whole_and_gradients_add_up(kernel):
    if refused(kernel):
        return
    shape = (1, 24, 40, 2, 1, 8, (8, 8))
    rng, (q, k, v, _), dout, (qp, kp) = make(shape, 3)
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    start, end = random_ranges(rng, 1, 24, 40)
    whole = kernel_run(kernel, shape[-1], (q, k, v, np.zeros((2, 8), "float32")), start, end, (qp, kp), {}, dout)
    pieces, total = [(0, 39), (39, 40)], Partial(jnp.zeros(q.shape), jnp.full(q.shape[:3], -jnp.inf))
    blocks = []
    for first, last in pieces:
        clipped = (jnp.asarray((x - first).clip(0, last - first)) for x in (start, end))
        blocks.append(Block(*clipped, jnp.asarray(qp), jnp.asarray(kp[first:last]), scale=8**-0.5, tile=(8, 8)))
        total = merge(total, kernel.attend(q)(k[:, first:last], v[:, first:last], blocks[-1]))
    grads = [
        kernel.attend_grad(q, *total, jnp.asarray(dout))(k[:, a:b], v[:, a:b], block)
        for (a, b), block in zip(pieces, blocks, strict=True)
    ]
    dq = sum(g[0] for g in grads)
    dk, dv = (jnp.concatenate([g[i] for g in grads], axis=1) for i in (1, 2))
    assert_close((*total, dq, dk, dv, whole[5]), [np.asarray(x, np.float64) for x in whole])


def test_requests_are_all_that_kernels_look_at(kernel):
    """Requests are hashable, and a kernel can choose its default tile from them alone."""
    shape = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    request = make_request(shape, shape, mask=sa.causal(), layout=sa.striped(), devices=2, platform="cpu")
    assert hash(request) == hash(dataclasses.replace(request))
    assert all(isinstance(side, int) for side in kernel.default_tile(request))


def test_merge_is_associative_and_has_an_identity():
    rng = np.random.default_rng(0)
    partials = [
        Partial(
            jnp.asarray(rng.standard_normal((1, 6, 2, 4)), jnp.float32),
            jnp.asarray(rng.normal(0, 30, (1, 6, 2)), jnp.float32),
        )
        for _ in range(3)
    ]
    identity = Partial(jnp.zeros((1, 6, 2, 4)), jnp.full((1, 6, 2), -jnp.inf))
    a, b, c = partials
    for left, right in [(merge(merge(a, b), c), merge(a, merge(b, c))), (merge(a, b), merge(b, a))]:
        np.testing.assert_allclose(left.out, right.out, atol=1e-6)
        np.testing.assert_allclose(left.lse, right.lse, atol=1e-5)
    for same in (merge(a, identity), merge(identity, a)):
        np.testing.assert_array_equal(same.out, a.out)
        np.testing.assert_array_equal(same.lse, a.lse)
    nothing = merge(identity, identity)
    assert (nothing.out == 0).all()
    assert np.isneginf(nothing.lse).all()


def test_merge_has_a_gradient_where_nothing_is_seen():
    nothing = Partial(jnp.zeros((1, 2, 1, 4)), jnp.full((1, 2, 1), -jnp.inf))
    something = Partial(jnp.ones((1, 2, 1, 4)), jnp.zeros((1, 2, 1)))
    for last in (something, nothing):
        grads = jax.grad(lambda a, b, c: merge(merge(a, b), c).out.sum(), argnums=(0, 1, 2))(nothing, nothing, last)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_tile_spans_cover_exactly_what_is_seen():
    rng = np.random.default_rng(0)
    for _ in range(300):
        queries, keys, tile_q, tile_k = (int(x) for x in rng.integers(1, 40, 4))
        start, end = random_ranges(rng, 1, queries, keys)
        spans = tile_spans(start, end, tile_q, tile_k)
        seen = visible_keys(start, end, keys)[0]
        for row, (first, inner_first, inner_last, last) in enumerate(np.stack(spans)[:, 0].T):
            rows = seen[row * tile_q : (row + 1) * tile_q]
            columns = np.flatnonzero(rows.any(axis=0))
            if len(columns):  # from the first visible key to the last, no further
                assert (first, last) == (columns[0] // tile_k, columns[-1] // tile_k + 1)
            else:
                assert first == last
            assert first <= inner_first <= inner_last <= last
            assert rows[:, inner_first * tile_k : inner_last * tile_k].all()
            unmasked = [j for j in range(first, last) if rows[:, j * tile_k : (j + 1) * tile_k].all()]
            whole = [j for j in unmasked if (j + 1) * tile_k <= keys]
            assert inner_last - inner_first == len(whole)

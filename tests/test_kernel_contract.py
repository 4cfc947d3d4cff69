"""The contract that every kernel must pass: one block, arbitrary ranges, forward and backward, against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention.attention import KERNELS
from striped_attention.kernel import Block, Partial, merge, tile_spans
from striped_attention.oracle import dense_partial
from tests.compare import FLOAT32_TOLERANCE, interpreted

RANGES = ["xla", "xla as on accelerators", "pallas_tpu in the interpreter"]  # what takes arbitrary ranges
TABLES = RANGES[:2]  # and a bias by a table

# batch, queries, keys, heads, kv_heads, dim, tile
SHAPES = [
    (2, 24, 24, 4, 2, 8, (8, 4)),
    (1, 37, 23, 6, 2, 16, (8, 8)),
    (1, 5, 70, 4, 1, 8, None),
    (2, 64, 16, 2, 2, 4, (64, 16)),
    (1, 37, 23, 2, 2, 8, (8, 8)),
]
OPTIONS = {
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "alibi": {"bias": lambda x: sa.alibi(abs(x[:, 0]) / 16)},
    "relative": {"bias": lambda x: sa.relative_bias(x.T, bidirectional=True, max_distance=40), "softcap": 3.0},
}


@pytest.fixture(params=RANGES)
def kernel(request, monkeypatch):
    """A kernel; of the two ways that `xla` goes by platform, both are run on this one."""
    name, _, way = request.param.partition(" ")
    if not way:
        yield KERNELS[name]
    elif name == "pallas_tpu":
        with interpreted():
            yield KERNELS[name]
    else:
        taken = []

        def platform_dependent(*args, default, **_):
            taken.append(default)
            return default(*args)

        jax.clear_caches()
        monkeypatch.setattr(jax.lax, "platform_dependent", platform_dependent)
        yield KERNELS[name]
        jax.clear_caches()
        assert len(taken) >= 2, "forward and backward"


def random_ranges(rng, rows, queries, keys):
    """Monotone ranges; some are empty, some cover everything."""
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


def oracle(inputs, start, end, positions, options, dout):
    """Output, lse and gradients in float64."""
    with jax.enable_x64(True):
        inputs = [jnp.asarray(x.astype(np.float64)) for x in inputs]
        distance = positions[1][None, :] - positions[0][:, None]
        visible = visible_keys(start, end, inputs[1].shape[1])

        def forward(q, k, v, weights):
            bias = options["bias"](weights) if "bias" in options else None
            rest = {name: x for name, x in options.items() if name != "bias"}
            return dense_partial(q, k, v, visible, bias=bias, distance=distance, **rest)

        @jax.jit
        def run(inputs, dout):
            partial, pull = jax.vjp(forward, *inputs)
            return (*partial, *pull(Partial(dout, jnp.zeros_like(partial.lse))))

        return [np.asarray(x) for x in run(inputs, jnp.asarray(dout.astype(np.float64)))]


def kernel_run(kernel, tile, inputs, start, end, positions, options, dout):
    q, k, v, weights = (jnp.asarray(x) for x in inputs)
    rest = {"scale": q.shape[-1] ** -0.5, **{name: x for name, x in options.items() if name != "bias"}}
    bias, bias_pull = jax.vjp(options["bias"], weights) if "bias" in options else (None, None)
    block = Block(*(jnp.asarray(x) for x in (start, end, *positions)), bias=bias, tile=tile, **rest)
    out, lse = kernel.attend(q)(k, v, block)
    dq, dk, dv, dbias = kernel.attend_grad(q, out, lse, jnp.asarray(dout))(k, v, block)
    dweights = jnp.zeros_like(weights) if bias is None else bias_pull(dbias)[0]
    return out, lse, dq, dk, dv, dweights


def assert_close(actual, expected, tolerance=FLOAT32_TOLERANCE):
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv", "dbias"), actual, expected, strict=True):
        a = np.asarray(a, np.float64)
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(e), err_msg=name)
        a, e = (np.where(np.isneginf(x), 0, x) for x in (a, e))
        error = np.abs(a - e).max() / max(np.abs(e).max(), 0.1)
        assert error <= tolerance, f"{name}: error {error:.2e}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ["one mask for all", "a mask for each"])
def test_arbitrary_ranges(kernel, shape, rows):
    for seed in range(3):
        rng, inputs, dout, positions = make(shape, seed)
        start, end = random_ranges(rng, 1 if rows == "one mask for all" else shape[0], shape[1], shape[2])
        expected = oracle(inputs, start, end, positions, {}, dout)
        assert_close(kernel_run(kernel, shape[-1], inputs, start, end, positions, {}, dout), expected)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize(
    ("kernel", "name"),
    [(kernel, name) for kernel in RANGES for name in OPTIONS if name != "relative" or kernel in TABLES],
    indirect=["kernel"],
)
def test_every_option(kernel, shape, name):
    rng, inputs, dout, positions = make(shape, 0)
    start, end = random_ranges(rng, shape[0], shape[1], shape[2])
    expected = oracle(inputs, start, end, positions, OPTIONS[name], dout)
    assert_close(kernel_run(kernel, shape[-1], inputs, start, end, positions, OPTIONS[name], dout), expected)


@pytest.mark.parametrize("kernel", TABLES, indirect=True)
def test_a_bias_of_minus_infinity_hides_keys(kernel):
    """Whole tiles of them, for some queries all of them, though the mask shows every key."""
    shape = (1, 16, 40, 4, 2, 8, (8, 8))
    _, inputs, dout, _ = make(shape, 0)
    start, end = np.zeros((1, 16), np.int32), np.full((1, 16), 40, np.int32)
    positions = np.r_[30:42, 80:84].astype(np.int32), np.arange(40, dtype=np.int32)

    def bias(weights):  # far back is the last of the 4 buckets for keys before the query
        return sa.relative_bias(weights.T.at[3].set(-jnp.inf), bidirectional=True, max_distance=16)

    expected = oracle(inputs, start, end, positions, {"bias": bias}, dout)
    actual = kernel_run(kernel, shape[-1], inputs, start, end, positions, {"bias": bias}, dout)
    assert np.isneginf(actual[1][0, -4:]).all()
    assert np.isfinite(actual[1][0, :-4]).all()
    assert_close(actual, expected)


def test_results_are_float32_for_bfloat16_inputs(kernel, request):
    rng, inputs, dout, positions = make(SHAPES[0], 0, "bfloat16")
    start, end = random_ranges(rng, 1, 24, 24)
    actual = kernel_run(kernel, (8, 4), inputs, start, end, positions, {}, dout)
    assert {x.dtype for x in actual} == {jnp.float32.dtype}
    # Tiles are float32 inside, so the inputs' own rounding is the only one; an accelerator rounds probabilities too.
    rounds = request.node.callspec.params["kernel"] != "xla" or jax.default_backend() != "cpu"
    tolerance = 2.0**-8 if rounds else FLOAT32_TOLERANCE
    assert_close(actual, oracle(inputs, start, end, positions, {}, dout), tolerance)


def test_rows_without_keys_give_nothing_and_get_nothing(kernel):
    _, inputs, dout, positions = make(SHAPES[0], 0)
    nothing = np.full((1, 24), 7, np.int32)
    out, lse, dq, dk, dv, _ = kernel_run(kernel, (8, 4), inputs, nothing, nothing, positions, {}, dout)
    assert np.isneginf(lse).all()
    for x in (out, dq, dk, dv):
        assert (np.asarray(x) == 0).all()


def test_blocks_merge_to_the_whole_and_gradients_add_up(kernel):
    shape = (2, 24, 40, 4, 2, 8, (8, 8))
    rng, (q, k, v, _), dout, (qp, kp) = make(shape, 3)
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    start, end = random_ranges(rng, 2, 24, 40)
    whole = kernel_run(kernel, shape[-1], (q, k, v, np.zeros((4, 8), "float32")), start, end, (qp, kp), {}, dout)
    pieces, total = [(0, 13), (13, 14), (14, 40)], Partial(jnp.zeros(q.shape), jnp.full(q.shape[:3], -jnp.inf))
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
            if len(columns):  # from the first key seen to the last one, no further
                assert (first, last) == (columns[0] // tile_k, columns[-1] // tile_k + 1)
            else:
                assert first == last
            assert first <= inner_first <= inner_last <= last
            assert rows[:, inner_first * tile_k : inner_last * tile_k].all()
            unmasked = [j for j in range(first, last) if rows[:, j * tile_k : (j + 1) * tile_k].all()]
            whole = [j for j in unmasked if (j + 1) * tile_k <= keys]
            assert inner_last - inner_first == len(whole)

"""The Hopper kernel without a GPU: its walks, its accuracy in the interpreter, and lowering for GPUs."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention.kernels import choice, hopper
from striped_attention.kernels.choice import choose, choose_stripes
from striped_attention.kernels.contract import Block, make_request
from striped_attention.kernels.hopper import kernel, one_pass, parts, walk
from tests.compare import FLOAT32_TOLERANCE, Shape, errors, expected, on_mesh
from tests.test_kernel_contract import assert_close, kernel_run, oracle, random_ranges, visible_keys


def wide_ranges(rng, rows, queries, keys):
    """Return monotone ranges: some cover all keys, some none, and some tiles inside them need no mask."""
    start = np.sort(rng.integers(-2 * keys, keys + 20, (rows, queries)).clip(0, keys), axis=-1)
    end = np.sort(rng.integers(-20, 3 * keys, (rows, queries)).clip(0, keys), axis=-1)
    return start.astype(np.int32), end.astype(np.int32)


def walks(items):
    return [walk.Walk(*row) for row in np.asarray(items).reshape(-1, walk.FIELDS).tolist()]


@pytest.mark.parametrize("ranges", [random_ranges, wide_ranges])
@pytest.mark.parametrize("by", ["queries", "keys"])
def test_a_walk_visits_what_is_seen_once_and_masks_what_is_not_seen_whole(ranges, by):
    rng = np.random.default_rng(0)
    for tile_q, tile_k, rows in [(4, 8, 1), (8, 4, 2), (5, 3, 2)] * 2:
        queries, keys = tile_q * int(rng.integers(1, 6)), tile_k * int(rng.integers(1, 6))
        start, end = (jnp.asarray(x) for x in ranges(rng, rows, queries, keys))
        tiles = visible_keys(np.asarray(start), np.asarray(end), keys)
        tiles = tiles.reshape(rows, queries // tile_q, tile_q, keys // tile_k, tile_k).transpose(0, 1, 3, 2, 4)
        if by == "queries":
            items = walk.by_queries(start, end, 2, (tile_q, tile_k))
        else:
            items, tiles = walk.by_keys(start, end, keys, 2, (tile_q, tile_k)), tiles.swapaxes(1, 2)
        found = walks(items)
        assert sorted((item.batch, item.own) for item in found) == [
            (b, i) for b in (0, 1) for i in range(tiles.shape[1])
        ]
        assert [item.steps for item in found] == sorted((item.steps for item in found), reverse=True)
        for item in found:
            seen = tiles[item.batch % rows, item.own]
            visited = [int(item.tile(step)) for step in range(item.steps)]
            assert visited == [int(item.tile(step, step < item.masked)) for step in range(item.steps)]
            assert sorted(visited) == list(range(min(visited, default=0), max(visited, default=-1) + 1))
            assert set(np.flatnonzero(seen.any(axis=(1, 2)))) <= set(visited)
            assert all(seen[tile].all() for tile in visited[item.masked :])
            assert not any(seen[tile].all() for tile in visited[: item.masked])


# (batch, queries, keys, heads, kv_heads, dim, value_dim), masks, options
TILES = {
    "grouped heads": ((1, 200, 150, 2, 1, 64, 64), 1, {}),
    "a mask per sequence, ALiBi and softcap": (
        (2, 100, 190, 1, 1, 40, 40), 2, {"softcap": 2.0, "bias": lambda x: sa.alibi(abs(x[:, 0]) / 100)},
    ),
    "narrower values, odd scale": ((1, 60, 150, 1, 1, 192, 128), 1, {"scale": -0.1}),
    "wide heads": ((1, 130, 200, 1, 1, 256, 256), 1, {}),
    "all gradients in one pass": ((2, 130, 200, 4, 2, 128, 128), 2, {}),
    "one pass and softcap": ((1, 130, 200, 1, 1, 120, 120), 1, {"softcap": 2.0}),
}  # fmt: skip


@pytest.mark.parametrize("case", TILES)
def test_several_tiles_in_the_interpreter(case, monkeypatch):
    """More and wider tiles than in the contract's cases match the reference, in bfloat16 as on a GPU."""
    made = count_calls(monkeypatch, one_pass, "gradients")
    with hopper.emulated():
        check_tiles(*TILES[case])
    assert len(made) == ("one pass" in case)


def test_gradients_that_have_to_be_the_same_in_every_run_take_two_passes(monkeypatch):
    made = count_calls(monkeypatch, one_pass, "gradients")
    with hopper.emulated():
        check_tiles(*TILES["one pass and softcap"], deterministic=True)
    assert not made


@pytest.mark.parametrize("case", ["one pass and softcap", "narrower values, odd scale"])
def test_a_whole_block_is_rounded_in_the_kernel(case):
    """Results of a whole block are those of any block, rounded; `lost` is the rounding error of `out`."""
    shape, _, options = TILES[case]
    queries, keys, heads, kv_heads, dim, value_dim = shape[1:]
    rng = np.random.default_rng(0)
    draw = lambda *sizes: jnp.asarray(rng.standard_normal((1, *sizes)), jnp.bfloat16)  # noqa: E731
    q, k, v = draw(queries, heads, dim), draw(keys, kv_heads, dim), draw(keys, kv_heads, value_dim)
    dout = draw(queries, heads, value_dim)
    places = np.arange(queries, dtype=np.int32), np.arange(keys, dtype=np.int32)
    some, whole = (
        Block(*map(jnp.asarray, wide_ranges(np.random.default_rng(1), 1, queries, keys)), *places, **options, whole=one)
        for one in (False, True)
    )
    with hopper.emulated():
        full = kernel.attend(q)(k, v, some)
        found = kernel.attend_whole(q)(k, v, whole, keep=True)
        alone = kernel.attend_whole(q)(k, v, whole, keep=False)
        grads, rounded = (kernel.attend_grad(q, *full, dout)(k, v, block) for block in (some, whole))
    assert alone.lost is None
    for one in (found, alone):
        np.testing.assert_array_equal(one.out, full.out.astype(jnp.bfloat16))
        np.testing.assert_array_equal(one.lse, full.lse)
    both = found.out.astype(jnp.float32) + found.lost.astype(jnp.float32)
    np.testing.assert_allclose(both, full.out, rtol=2.0**-16, atol=1e-30)
    assert rounded[0].dtype == jnp.float32
    for exact, short in zip(grads[1:3], rounded[1:3], strict=True):
        assert short.dtype == jnp.bfloat16
        np.testing.assert_array_equal(short, exact.astype(jnp.bfloat16))


def count_calls(monkeypatch, module, name):
    made, plain = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: made.append(args) or plain(*args))
    return made


def check_tiles(shape, rows, options, **how):
    """Compare the kernel with the float64 reference, on a GPU or in the interpreter; return its results."""
    batch, queries, keys, heads, kv_heads, dim, value_dim = shape
    rng = np.random.default_rng(0)
    q, dout = (rng.standard_normal((batch, queries, heads, n)).astype(jnp.bfloat16) for n in (dim, value_dim))
    k, v = (rng.standard_normal((batch, keys, kv_heads, n)).astype(jnp.bfloat16) for n in (dim, value_dim))
    inputs = (q, k, v, rng.standard_normal((heads, 8)).astype(np.float32))
    start, end = wide_ranges(rng, rows, queries, keys)
    assert (start >= end).any()
    positions = tuple(
        np.sort(rng.choice(max(400, queries, keys), n, replace=False)).astype(np.int32) for n in (queries, keys)
    )
    found = kernel_run(hopper, None, inputs, start, end, positions, options | how, dout)
    assert {x.dtype for x in found} == {np.dtype("float32")}
    # Probabilities are rounded before they are multiplied by values.
    assert_close(found, oracle(inputs, start, end, positions, options, dout), 2.0**-7)
    return found


@pytest.mark.parametrize("sinks", [False, True], ids=["whole", "sinks"])
def test_attention_in_the_interpreter(sinks):
    """`sa.attention` with packed documents is exact, on one device: the interpreter supports no more.

    All keys are in one block, whose result the kernel rounds itself unless there are sinks.
    """
    shape = Shape(batch=1, length=300, heads=2, kv_heads=1, dim=16, tile=None, sinks=sinks)
    arrays = shape.arrays()
    mask = sa.documents(np.sort(np.random.default_rng(0).integers(0, 4, (1, 300)), axis=1))
    with hopper.emulated():
        found = on_mesh(shape, 1, sa.striped(64), kernel="hopper")(arrays, mask)
    assert max(errors(found, expected(shape, arrays, mask.dense(300))).values()) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize(
    ("dim", "options", "kernels"),
    [
        (64, {"alibi": True}, 3),
        (128, {"softcap": 30.0}, 2 if parts.can_add() else 3),
        (128, {"deterministic": True}, 3),
        (256, {}, 4),
    ],
    ids=str,
)
def test_it_lowers_for_gpus(dim, options, kernels):
    """Lowering needs no GPU. The backward pass is one kernel, or separate kernels for queries and for keys."""
    shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    q, k = shape(1, 256, 4, dim), shape(1, 256, 2, dim)
    out, lse = shape(*q.shape, dtype=jnp.float32), shape(1, 256, 4, dtype=jnp.float32)
    bounds, places = shape(1, 256, dtype=jnp.int32), shape(256, dtype=jnp.int32)

    def both(q, k, v, out, lse, dout, start, end, places):
        bias = sa.alibi(jnp.ones(4)) if "alibi" in options else None
        how = {name: x for name, x in options.items() if name != "alibi"}
        block = Block(start, end, places, places, bias=bias, **how)
        return kernel.attend(q)(k, v, block), kernel.attend_grad(q, out, lse, dout)(k, v, block)

    traced = jax.jit(both).trace(q, k, k, out, lse, out, bounds, bounds, places)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == kernels


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_zeros_that_wait_are_zeros_whatever_they_wait_for(dtype):
    for x in (0.0, -1.0, np.inf, np.nan):
        waited = jnp.full((2, 3), x, dtype)
        found = jax.jit(lambda x: parts._zeros_after.bind(x, shape=(5,), dtype=jnp.dtype("float32")))(waited)
        np.testing.assert_array_equal(found, np.zeros(5, np.float32))
        rows = jax.vmap(lambda x: parts._zeros_after.bind(x, shape=(5,), dtype=jnp.dtype("float32")))(waited)
        np.testing.assert_array_equal(rows, np.zeros((2, 5), np.float32))


def request(device="NVIDIA H200", here=False, dtype="bfloat16", dim=128, bias=None, **more):
    shape = jax.ShapeDtypeStruct((1, 8192, 4, dim), jnp.dtype(dtype))
    mask = sa.documents(np.zeros((1, 65_536), np.int32))
    where = dict(mask=mask, layout=sa.striped(128), devices=8, platform="gpu", device_kind=device, here=here)
    return make_request(shape, shape, bias=bias, **where, **more)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (
            {"device": "NVIDIA A100-SXM4-80GB"},
            "It runs on GPUs of compute capability 9.0, e.g. an H100 or H200; this is",
        ),
        ({"dtype": "float32"}, "It computes in bfloat16 or float16; the queries are float32."),
        ({"dim": 257}, "It needs a head dimension of at most 256; got 257."),
        ({"bias": sa.relative_bias(jnp.ones((8, 4)), bidirectional=False)}, "It supports only alibi, not a bias table"),
        ({"tile": (64, 64)}, "It always uses its own tile size: leave out tile."),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_it_refuses(asked, reason):
    with pytest.raises(NotImplementedError, match=re.escape(f"Kernel 'hopper' cannot do this: {reason}")):
        choose("hopper", request(**asked))


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", ""])
def test_it_is_taken_for_packed_documents(device):
    """Without a warning, although `cudnn` would be a little faster for a causal mask."""
    assert choose("hopper", request(device)).name == "hopper"
    assert choose_stripes("hopper", request(device), 8192) == choose_stripes("auto", request(device), 8192)
    assert choose_stripes("auto", request(device), 8192) == sa.striped(128)
    assert choose("auto", request(device, here=True)).name == "hopper"


def test_a_kernel_that_is_not_automatic_is_taken_by_name_alone(monkeypatch):
    """The warning about a slow kernel mentions it."""
    device = "NVIDIA H200"
    monkeypatch.setattr(hopper, "AUTOMATIC", False)
    assert choose("hopper", request(device)).name == "hopper"
    assert choose("auto", request(device)).name == "xla"
    monkeypatch.setattr(choice, "_warned", set())
    with pytest.warns(
        sa.SlowKernelWarning,
        match="'hopper': It supports this, but its speed has not been measured. To use it, pass kernel=",
    ):
        choose("auto", request(device, here=True))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.mosaic_gpu", None)
    kernel._unavailable.cache_clear()
    try:
        assert choice.refusal("hopper", request()) is None
        assert choice.refusal("hopper", request(here=True)).endswith("pip install absl-py.")
    finally:
        kernel._unavailable.cache_clear()


def test_what_is_deterministic():
    plain = dict(layout=sa.zigzag(), devices=2, platform="gpu", here=False, mask=sa.causal())
    shape = jax.ShapeDtypeStruct((1, 8192, 4, 128), jnp.bfloat16)
    assert choose("auto", make_request(shape, shape, **plain)).name == "cudnn"
    asked = make_request(shape, shape, **plain, deterministic=True)
    assert choose("auto", asked).name == "hopper"
    with pytest.raises(NotImplementedError, match="It adds up gradients in an order that changes from run to run"):
        choose("cudnn", asked)

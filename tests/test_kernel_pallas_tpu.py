"""The TPU kernel beyond the contract, in the interpreter: real tile sizes, executed tiles, and rejected requests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import striped_attention as sa
from striped_attention.kernels import tpu
from striped_attention.kernels.choice import KERNELS, choose, refusal
from striped_attention.kernels.contract import Block, make_request
from striped_attention.kernels.tiles import tile_spans
from striped_attention.kernels.tpu import tile_list
from striped_attention.kernels.tpu.emulation import emulated
from tests.test_kernel_contract import assert_close, kernel_run, oracle, random_ranges

WHAT = dict(mask=sa.causal(), layout=sa.striped(), devices=4, platform="tpu")


@pytest.mark.parametrize(("dim", "dtype"), [(64, "float32"), (128, "bfloat16"), (256, "bfloat16")])
def test_heads_and_tiles_as_models_have_them(dim, dtype):
    shape = (1, 200, 300, 4, 2, dim)
    *inputs, dout = wide(shape, dtype)
    start, end = random_ranges(np.random.default_rng(1), 1, 200, 300)
    positions = np.arange(200, dtype=np.int32), np.arange(300, dtype=np.int32)
    with emulated():
        actual = kernel_run(KERNELS["pallas_tpu"], (128, 128), inputs, start, end, positions, {}, dout)
    tolerance = 1e-5 if dtype == "float32" else 2.0**-7  # rounding of inputs and of probabilities
    assert_close(actual, oracle(inputs, start, end, positions, {}, dout), tolerance)


def wide(shape, dtype="float32"):
    """Return q, k, v, the weights of a bias, and dout."""
    batch, queries, keys, heads, kv_heads, dim = shape
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, batch, queries, heads, dim)).astype(dtype)
    k, v = rng.standard_normal((2, batch, keys, kv_heads, dim)).astype(dtype)
    return q, k, v, np.zeros((heads, 8), "float32"), dout


@pytest.mark.parametrize("by_columns", [False, True])
def test_the_list_is_the_planned_tiles(by_columns):
    """The list has each planned tile once, in order, inner ones marked; then a step per row or column without tiles."""
    rng = np.random.default_rng(0)
    for queries, keys in [(24, 24), (85, 13), (5, 70)] * 7:
        start, end = random_ranges(rng, 1, queries, keys)
        block = Block(jnp.asarray(start), jnp.asarray(end), None, None, tile=(8, 4))
        rows, columns = -(-queries // 8), -(-keys // 4)
        found = tile_list.list_tiles(block, rows, columns, by_columns)
        entries = np.asarray(found.entries)[: int(found.steps)]
        spans = [x[0] for x in tile_spans(start, end, 8, 4)]
        wanted = [
            (row, column, 0 if inner_first <= column < inner_last else 1)
            for row, (first, inner_first, inner_last, last) in enumerate(zip(*spans, strict=True))
            for column in range(first, last)
        ]
        outer, within, kind = (
            np.asarray(f(entries)) for f in (tile_list.outer_of, tile_list.within_of, tile_list.kind_of)
        )
        listed = list(zip(*((within, outer) if by_columns else (outer, within)), kind, strict=True))
        assert sorted(listed[: int(found.seen)]) == sorted(wanted)
        assert (np.diff(outer[: int(found.seen)]) >= 0).all()
        lines = range(columns if by_columns else rows)
        assert set(outer[int(found.seen) :]) == set(lines) - set(outer[: int(found.seen)])
        assert (kind[int(found.seen) :] == 2).all()


def test_hidden_tiles_are_no_steps_of_the_grid():
    """The grid has one step per head and visible tile, 10 of 16 in a causal block, forward and backward."""
    steps = []

    def record(token, point, core):
        steps.append((point, core))
        return token

    position = np.arange(64, dtype=np.int32)
    q, k, v, _, dout = map(jnp.asarray, wide((1, 64, 64, 2, 2, 8)))
    block = Block(jnp.zeros((1, 64), jnp.int32), jnp.asarray(position[None] + 1), position, position, tile=(16, 16))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(grid_point_recorder=record)):
        out, lse = jax.block_until_ready(tpu.attend(q)(k, v, block))
        forward = len(steps)
        jax.block_until_ready(tpu.attend_grad(q, out, lse, dout)(k, v, block))
    assert forward == 2 * 10
    assert len(steps) - forward == 2 * 10


def test_what_it_cannot_do_is_said():
    query, key = (jax.ShapeDtypeStruct((1, 1024, heads, 128), jnp.bfloat16) for heads in (8, 2))
    refuse = lambda query=query, key=key, **what: refusal(  # noqa: E731
        "pallas_tpu", make_request(query, key, **{**WHAT, **what})
    )
    assert refuse() is None
    assert refuse(mask=sa.sliding_window(7), layout=sa.striped(256), softcap=3.0, length=4000) is None
    assert refuse(bias=sa.alibi(np.ones(8, np.float32))) is None
    assert "only alibi" in refuse(bias=sa.relative_bias(np.ones((8, 8), np.float32)))
    assert "multiples of 128; got (64, 128)" in refuse(tile=(64, 128))
    assert refuse(platform="cpu") == "It runs on TPUs; this is a cpu."
    wide = jax.ShapeDtypeStruct((1, 1024, 8, 512), jnp.bfloat16)
    assert "at most 256; got 512" in refuse(query=wide)
    half = jax.ShapeDtypeStruct((1, 1024, 8, 128), jnp.float16)
    assert "computes in bfloat16 or float32; the queries are float16" in refuse(query=half)
    long = jax.ShapeDtypeStruct((1, 2**20, 8, 128), jnp.bfloat16)
    assert "at most 250,000 tiles; 1,048,576 queries" in refuse(query=long, key=long)
    wide = jax.ShapeDtypeStruct((1, 360_448, 8, 256), jnp.bfloat16)
    assert "tiles of (512, 512) need more" in refuse(query=wide, key=wide)


def test_auto_takes_it_on_tpus():
    query, key = (jax.ShapeDtypeStruct((1, 1024, heads, 128), jnp.bfloat16) for heads in (8, 2))
    request = make_request(query, key, **WHAT)
    documents = make_request(query, key, **{**WHAT, "mask": sa.documents(np.zeros((1, 4096), np.int32))})
    elsewhere = make_request(query, key, **{**WHAT, "platform": "cpu"})
    assert choose("auto", request).name == choose("auto", documents).name == "pallas_tpu"
    assert choose("auto", elsewhere).name == "xla"
    with pytest.raises(
        NotImplementedError, match=r"Kernel 'pallas_tpu' cannot do this: It runs on TPUs; this is a cpu"
    ):
        choose("pallas_tpu", elsewhere)


def test_the_tile_follows_the_chip():
    query = jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16)
    tile = lambda kind: choose("pallas_tpu", make_request(query, query, **WHAT, device_kind=kind)).tile  # noqa: E731
    assert tile("TPU v4") == (512, 1024)
    assert tile("TPU v5") == tile("") == (1024, 1024)

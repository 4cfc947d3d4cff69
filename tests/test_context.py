"""Keys of another sequence: cross attention, and queries that continue a longer sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention.core.oracle import dense_attention
from striped_attention.kernels.choice import KERNELS, refusal
from striped_attention.kernels.contract import make_request
from tests.compare import FLOAT32_TOLERANCE, factorings, mesh_of, random_segments

QUERIES, DEVICES = 21, 4
LAYOUTS = [sa.contiguous(), sa.striped(2), sa.zigzag(), sa.striped()]
STRATEGIES = factorings(DEVICES)


def masks(keys):
    place = np.arange(QUERIES)
    return [
        (sa.full(), 0),
        (sa.causal(), max(0, keys - QUERIES)),
        (sa.window(5, 3), 10),
        (sa.prefix(30), 7),
        (sa.ranges(place // 4 * 4, place + 20), 0),
    ]


def check(layout, mask, offset, keys, strategy, dtype=np.float32, **options):
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 2, QUERIES, 4, 8)).astype(dtype)
    k, v = rng.standard_normal((2, 2, keys, 2, 8)).astype(dtype)
    lo, hi = (x[..., None] for x in mask.bounds(np.arange(QUERIES, dtype=np.int32), QUERIES, keys, offset))
    visible = (lo <= np.arange(keys)) & (np.arange(keys) < hi)
    distance = np.arange(keys)[None, :] - np.arange(QUERIES)[:, None] - offset

    def ours(q, k, v):
        arrays = (layout.permute(x, DEVICES) for x in (q, k, v))
        where = dict(mesh=mesh_of(DEVICES), axis_name="sequence", layout=layout, strategy=strategy)
        out = sa.attention(*arrays, mask=mask, length=QUERIES, key_length=keys, offset=offset, **where, **options)
        return layout.restore(out, DEVICES, length=QUERIES)

    def run(attend):
        out, pull = jax.vjp(attend, *map(jnp.asarray, (q, k, v)))
        return out, *pull(jnp.asarray(dout))

    dense = lambda *x: dense_attention(*x, visible, distance=distance, **options)  # noqa: E731
    found, wanted = (jax.jit(functools.partial(run, f))() for f in (ours, dense))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2 * FLOAT32_TOLERANCE)


@pytest.mark.parametrize("keys", [5, 21, 50])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_fewer_or_more_keys_under_every_strategy(strategy, keys):
    """Layouts and masks vary by case; with as many keys as queries, an offset makes the difference."""
    which = STRATEGIES.index(strategy)
    for turn in range(2):
        mask, offset = masks(keys)[(which + keys + turn) % 5]
        check(LAYOUTS[(which + turn) % 4], mask, offset, keys, strategy)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_distances_count_from_the_offset(layout):
    slopes = np.linspace(0.1, 1, 4, dtype=np.float32)
    check(layout, sa.causal(), 29, 50, "ring", bias=sa.alibi(slopes))
    check(layout, sa.window(9, 9), 29, 50, "heads", bias=sa.alibi(slopes), softcap=4.0)


def test_chunks_of_queries_give_what_all_of_them_give():
    """A long prompt in chunks, each against all keys up to its end: the same outputs as at once."""
    layout, rng = sa.striped(), np.random.default_rng(0)
    q, k, v = (jnp.asarray(x) for x in rng.standard_normal((3, 1, 32, 2, 8)).astype("float32"))
    attend = functools.partial(
        sa.attention, mesh=mesh_of(DEVICES), axis_name="sequence", layout=layout, mask=sa.causal()
    )
    whole = layout.restore(attend(*(layout.permute(x, DEVICES) for x in (q, k, v))), DEVICES)
    for first in (0, 8, 16, 24):
        chunk = (q[:, first : first + 8], k[:, : first + 8], v[:, : first + 8])
        out = attend(*(layout.permute(x, DEVICES) for x in chunk), offset=first)
        np.testing.assert_allclose(layout.restore(out, DEVICES), whole[:, first : first + 8], atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("width", [3, 20])
def test_values_of_another_width(strategy, width):
    """Values narrower and wider than keys, under every strategy, with gradients; the lse is that of equal widths."""
    layout, rng = LAYOUTS[STRATEGIES.index(strategy) % 4], np.random.default_rng(0)
    q, k = rng.standard_normal((2, 2, QUERIES, 4, 8)).astype("float32")
    v, dout = (rng.standard_normal((2, QUERIES, n, width)).astype("float32") for n in (2, 4))
    k = k[:, :, :2]
    mask = sa.documents(random_segments(rng, 2, QUERIES, longest=9))

    def ours(q, k, v):
        arrays = (layout.permute(x, DEVICES) for x in (q, k, v))
        where = dict(mesh=mesh_of(DEVICES), axis_name="sequence", layout=layout, strategy=strategy)
        return layout.restore(sa.attention(*arrays, mask=mask, **where), DEVICES, length=QUERIES)

    def run(attend):
        out, pull = jax.vjp(attend, *map(jnp.asarray, (q, k, v)))
        return out, *pull(jnp.asarray(dout))

    dense = lambda *x: dense_attention(*x, mask.dense(QUERIES))  # noqa: E731
    found, wanted = (jax.jit(functools.partial(run, f))() for f in (ours, dense))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2 * FLOAT32_TOLERANCE)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_take_values_of_another_width_or_say_why_not(name):
    q, k = (jax.ShapeDtypeStruct((1, 64, heads, 128), jnp.bfloat16) for heads in (8, 2))
    where = dict(mask=sa.causal(), layout=sa.striped(), devices=4, platform=next(iter(KERNELS[name].RATES)), here=False)
    reason = refusal(name, make_request(q, k, **where, value_dim=192))
    takes = {"xla": True, "hopper": True, "cudnn": False, "pallas_tpu": False}[name]
    assert reason is None if takes else "It needs values as wide as keys; got 192 and 128" in reason
    assert "at most 256" in refusal("hopper", make_request(q, k, **where | {"platform": "gpu"}, value_dim=320))


def test_positions_count_from_the_offset():
    layout, q = sa.striped(), jnp.ones((1, 8, 2, 4))
    k = jnp.ones((1, 16, 2, 4))
    call = functools.partial(sa.attention, q, k, k, mesh=mesh_of(4), axis_name="sequence", layout=layout)
    order = layout.permute(np.arange(8), 4, axis=0)
    assert np.isfinite(call(mask=sa.causal(), offset=8, positions=order + 8)).all()
    with pytest.raises(ValueError, match="too small"):
        call(mask=sa.causal(), offset=8, positions=order)


def test_wrong_contexts():
    q, k = jnp.ones((1, 8, 2, 4)), jnp.ones((1, 16, 2, 4))
    call = functools.partial(sa.attention, mesh=mesh_of(4), axis_name="sequence", layout=sa.striped())
    with pytest.raises(ValueError, match="must be between 1 and the length of the keys, 16; got 17"):
        call(q, k, k, mask=sa.full(), key_length=17)
    with pytest.raises(ValueError, match=r"offset must be .*at least 0; got -1"):
        call(q, k, k, mask=sa.full(), offset=-1)
    with pytest.raises(
        ValueError, match="is for queries and keys of one sequence; got 8 queries at offset 8 and 16 keys"
    ):
        call(q, k, k, mask=sa.documents(np.zeros((1, 8), int)), offset=8)
    with pytest.raises(ValueError, match="offset plus length may be at most"):
        call(q, k, k, mask=sa.causal(), offset=2**31 - 4)
    with pytest.raises(ValueError, match="query and key must have the same batch"):
        call(q, jnp.ones((2, 16, 2, 4)), jnp.ones((2, 16, 2, 4)), mask=sa.full())

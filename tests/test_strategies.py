"""Every strategy is exact: heads × gather × ring, for all numbers of devices, layouts, masks and heads."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import striped_attention as sa
from striped_attention.core.oracle import dense_attention
from striped_attention.kernels import cudnn
from striped_attention.runtime.schedule import traffic
from tests.compare import FLOAT32_TOLERANCE, Shape, assert_exact, factorings, mesh_of, random_segments

LAYOUTS = [sa.contiguous(), sa.striped(), sa.striped(4), sa.zigzag()]
LENGTH = 53


def masks(batch):
    ids = random_segments(np.random.default_rng(1), batch, LENGTH, longest=20)
    blocks = sa.ranges(np.maximum(np.arange(LENGTH) - 20, 0), (np.arange(LENGTH) // 8 + 1) * 8)
    one_sided = [sa.sliding_window(7), sa.prefix(11) & sa.documents(ids), sa.causal(), sa.full()]
    return [sa.documents(ids, padding=2), *one_sided, sa.window(9, 5), blocks]


CASES = [(devices, found) for devices in (2, 3, 4, 6, 8) for found in factorings(devices)]


@pytest.mark.parametrize(("devices", "strategy"), CASES, ids=[f"{n} as {s}" for n, s in CASES])
def test_every_factoring_is_exact(devices, strategy):
    """Layouts, masks and heads vary by case: 24 query heads, divisible by every strategy, and 1 to 24 key heads."""
    which = CASES.index((devices, strategy))
    kv_heads = [1, 2, 8, 24, 4, 3, 6, 12][which % 8]
    options = {"bias": "alibi", "softcap": 2.0} if which % 5 == 0 else {"sinks": which % 3 == 0}
    shape = Shape(length=LENGTH, heads=24, kv_heads=kv_heads, dim=4, **options)
    for turn in range(1 + which % 2):
        layout, mask = LAYOUTS[(which + turn) % 4], masks(shape.batch)[(which + 2 * turn) % 7]
        assert_exact(shape, devices, layout, mask, strategy=strategy)


@pytest.mark.parametrize("name", ["ring", "gather", "heads"])
def test_strategies_by_name(name):
    assert_exact(Shape(length=LENGTH), 4, sa.striped(), sa.causal(), strategy=name)


@pytest.mark.parametrize("sizes", [{"heads": 4}, {"gather": 4}, {"heads": 2, "gather": 2}], ids=str)
def test_in_bfloat16(sizes):
    shape = Shape(length=LENGTH, dtype="bfloat16", heads=8, kv_heads=2)
    assert_exact(shape, 4, sa.striped(2), sa.causal(), strategy=sa.strategy(**sizes))


@pytest.mark.parametrize("strategy", ["heads", "gather", sa.strategy(heads=2)], ids=str)
def test_beside_axes_for_batch_and_heads_and_under_remat(strategy):
    """A 2 × 2 × 2 mesh: two sequences over `data`, each sequence over `sequence`, and heads over `model`."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "sequence", "model"))
    layout, length = sa.striped(3), 30
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 2, length, 8, 4)).astype("float32")
    k, v = rng.standard_normal((2, 2, length, 4, 4)).astype("float32")
    mask = sa.documents(random_segments(rng, 2, length, longest=9))

    def ours(q, k, v):
        q, k, v = (layout.permute(x, devices=2) for x in (q, k, v))
        spec = P("data", "sequence", "model", None)
        attend = functools.partial(sa.attention, mesh=mesh, axis_name="sequence", spec=spec, layout=layout, mask=mask)
        return layout.restore(jax.checkpoint(functools.partial(attend, strategy=strategy))(q, k, v), devices=2)

    def run(attend):
        out, pull = jax.vjp(attend, *map(jnp.asarray, (q, k, v)))
        return out, *pull(jnp.asarray(dout))

    found = jax.jit(lambda: run(ours))()
    for actual, wanted in zip(found, run(lambda *x: dense_attention(*x, mask.dense(length))), strict=True):
        np.testing.assert_allclose(actual, wanted, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize(("heads", "kv_heads", "shared_by", "copies"), [
    (32, 8, 8, 1), (32, 8, 4, 1), (32, 8, 16, 2), (32, 8, 32, 4), (8, 1, 4, 4), (12, 4, 6, 3), (24, 8, 4, 1),
])  # fmt: skip
def test_key_heads_are_copied_as_little_as_needed(heads, kv_heads, shared_by, copies):
    assert sa.strategy(heads=shared_by).key_copies(heads, kv_heads) == copies
    share, sent = heads // shared_by, kv_heads * copies
    assert sent % shared_by == 0
    for member in range(shared_by):  # each of its query heads finds its key head among those it received
        got = [i // copies for i in range(member * sent // shared_by, (member + 1) * sent // shared_by)]
        wanted = [head // (heads // kv_heads) for head in range(member * share, (member + 1) * share)]
        assert [got[i // (share // len(got))] for i in range(share)] == wanted


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (8, 2), (12, 6)])
def test_key_heads_are_replicated_where_a_mesh_axis_shards_heads(heads, kv_heads):
    """Tensor parallelism over 4 devices with fewer key heads, or 6: each device gets those of its query heads."""
    mesh = jax.make_mesh((2, 4), ("sequence", "model"))
    layout, length, rng = sa.striped(), 14, np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 2, length, heads, 4)).astype("float32")
    k, v = rng.standard_normal((2, 2, length, kv_heads, 4)).astype("float32")
    slopes = rng.random(heads).astype("float32")

    def ours(q, k, v, slopes):
        q, k, v = (layout.permute(x, devices=2) for x in (q, k, v))
        spec, options = P(None, "sequence", "model", None), dict(mask=sa.causal(), bias=sa.alibi(slopes))
        out = sa.attention(q, k, v, mesh=mesh, axis_name="sequence", spec=spec, layout=layout, **options)
        return layout.restore(out, devices=2)

    def run(attend):
        out, pull = jax.vjp(attend, *map(jnp.asarray, (q, k, v, slopes)))
        return out, *pull(jnp.asarray(dout))

    truth = lambda q, k, v, slopes: dense_attention(q, k, v, sa.causal().dense(length), bias=sa.alibi(slopes))  # noqa: E731
    found = jax.jit(lambda: run(ours))()
    for actual, wanted in zip(found, run(truth), strict=True):
        np.testing.assert_allclose(actual, wanted, atol=FLOAT32_TOLERANCE)


def messages(strategy, devices, tokens, heads, kv_heads, dim, gradients=False):
    """Elements that a device sends, counted in the program for CPUs, which always sends float32."""
    mesh = mesh_of(devices)
    where = jax.sharding.NamedSharding(mesh, P(None, "sequence"))
    q, k = (jax.ShapeDtypeStruct((1, tokens * devices, n, dim), jnp.float32, sharding=where) for n in (heads, kv_heads))

    def both(q, k, v, dout):
        options = dict(mesh=mesh, axis_name="sequence", layout=sa.striped(64), mask=sa.causal(), strategy=strategy)
        out, pull = jax.vjp(functools.partial(sa.attention, **options), q, k, v)
        return (out, pull(dout)) if gradients else out

    sent = traffic(jax.jit(both).lower(q, k, k, q).compile().as_text(), devices)
    return {name: size / 4 for name, size in sent.items()}


def test_what_is_sent():
    """Traffic is as in docs/design.md. These programs have no loops, whose messages would be counted only once."""
    sizes = devices, tokens, heads, kv_heads, dim = 8, 128, 16, 8, 4
    keys = 2 * tokens * kv_heads * dim * (devices - 1)
    assert messages("gather", *sizes) == {"all-gather": keys}
    # Gathered keys are not kept, so the backward pass gathers again, and then sums dK and dV. In a program of both
    # passes the compiler may reuse the gathers of the first two groups of heads.
    both = messages("gather", *sizes, gradients=True)
    assert both.keys() == {"all-gather", "reduce-scatter"}
    assert 1.5 * keys <= both["all-gather"] <= 2 * keys
    assert both["reduce-scatter"] == keys
    all_to_all = tokens * dim * (2 * heads + 2 * kv_heads) * (devices - 1) / devices
    assert messages("heads", *sizes) == {"all-to-all": all_to_all}
    assert messages("heads", *sizes, gradients=True) == {"all-to-all": 2 * all_to_all}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            "rings",
            "must be one of 'auto', 'ring', 'gather', 'heads', or sa.strategy(heads=…, gather=…, inner=…); got",
        ),
        (
            sa.strategy(heads=3),
            "heads · gather · inner of a strategy must divide the 4 devices of the sequence axis",
        ),
        (
            sa.strategy(heads=2, gather=4),
            "the 4 devices of the sequence axis; got heads=2, gather=4, inner=1.",
        ),
        ("heads", "6 heads cannot be shared by 4 devices. Use heads=2, and a ring or gather for the rest."),
        (None, "got None"),
    ],
    ids=str,
)
def test_what_cannot_be(asked, message):
    x = jnp.ones((1, 16, 6, 4))
    with pytest.raises(ValueError, match=re.escape(message)):
        sa.attention(
            x, x, x, mesh=mesh_of(4), axis_name="sequence", layout=sa.striped(), mask=sa.causal(), strategy=asked
        )


def test_sizes_are_whole_numbers():
    with pytest.raises(ValueError, match="gather must be a whole number of at least 1; got 0"):
        sa.strategy(gather=0)


def test_cudnn_sees_larger_devices_with_heads_and_refuses_gathered_keys():
    options = dict(axis_name="sequence", layout=sa.striped(), mask=sa.causal(), kernel="cudnn", mesh=mesh_of(4))
    shape = Shape(length=LENGTH, tile=None, dim=8)
    with cudnn.emulated():
        assert_exact(shape, 4, sa.zigzag(), sa.causal(), strategy=sa.strategy(heads=2), kernel="cudnn")
        assert_exact(shape, 4, sa.striped(2), sa.causal(), strategy="heads", kernel="cudnn")
        x = jnp.ones((1, 16, 4, 8))
        with pytest.raises(NotImplementedError, match="not keys gathered from several devices"):
            sa.attention(x, x, x, strategy="gather", **options)


@pytest.mark.parametrize("strategy", ["ring", sa.strategy(heads=2), sa.strategy(heads=2, gather=2)], ids=str)
@pytest.mark.parametrize("types", ["Auto", "Explicit"])
def test_a_sequence_over_two_mesh_axes(strategy, types):
    """Nodes and their devices; neighbours lie along the last axis."""
    kinds = (getattr(jax.sharding.AxisType, types),) * 2
    mesh = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=kinds)
    layout, names = sa.striped(2), ("node", "gpu")
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 45, 4, 8)).astype("float32")
    mask = sa.documents(random_segments(np.random.default_rng(1), 2, 45, longest=20))

    def ours(q, k, v):
        q, k, v = (layout.permute(x, mesh=mesh, axis_name=names) for x in (q, k, v))
        out = sa.attention(q, k, v, mesh=mesh, axis_name=names, layout=layout, mask=mask, strategy=strategy)
        return layout.restore(out, mesh=mesh, axis_name=names, length=45)

    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(lambda *x: (ours(*x) ** 2).sum(), argnums=(0, 1, 2)))(q, k, v)
    wanted = jax.grad(lambda *x: (dense_attention(*x, mask.dense(45)) ** 2).sum(), argnums=(0, 1, 2))(q, k, v)
    for actual, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(actual, expected, atol=FLOAT32_TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize(
    ("sizes", "names", "strategy"),
    [
        ({"gpu": 4, "node": 2}, ("node", "gpu"), "ring"),
        ({"gpu": 4, "node": 2}, ("node", "gpu"), sa.strategy(heads=2, gather=2)),
        ({"gpu": 4, "node": 2}, ("node", "gpu"), "gather"),
        ({"a": 2, "b": 2, "c": 2}, ("b", "a"), sa.strategy(heads=2)),
        ({"a": 2, "b": 2, "c": 2}, ("c", "a", "b"), sa.strategy(inner=4)),
    ],
    ids=str,
)
def test_mesh_axes_in_another_order_than_the_mesh(sizes, names, strategy):
    """The order of the names determines the neighbours, whatever the order of the axes in the mesh."""
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes))
    layout, length = sa.striped(2), 32
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, length, 4, 4)).astype("float32")

    def ours(q, k, v):
        q, k, v = (layout.permute(x, mesh=mesh, axis_name=names) for x in (q, k, v))
        out = sa.attention(q, k, v, mesh=mesh, axis_name=names, layout=layout, mask=sa.causal(), strategy=strategy)
        return layout.restore(out, mesh=mesh, axis_name=names)

    def run(attend):
        return jax.jit(jax.value_and_grad(lambda *x: (attend(*x) ** 2).sum(), argnums=(0, 1, 2)))(q, k, v)

    visible = sa.causal().dense(length)
    found, wanted = (jax.tree.leaves(run(attend)) for attend in (ours, lambda *x: dense_attention(*x, visible)))
    for actual, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(actual, expected, atol=FLOAT32_TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("names", [("sequence", "gpu"), (), ("sequence", "sequence"), "gpu", ["sequence"]], ids=str)
def test_axes_that_a_mesh_does_not_have(names):
    x = jnp.ones((1, 16, 2, 4))
    with pytest.raises(ValueError, match=r"axis_name must be an axis of the mesh, or a tuple of several; got"):
        sa.attention(x, x, x, mesh=mesh_of(4), axis_name=names, layout=sa.striped(), mask=sa.causal())


def test_vmap_of_traded_heads_and_of_gathered_keys():
    """JAX cannot vmap an all-to-all within groups, so the mapped axis is merged into the batch."""
    shape = Shape(length=16)
    q, k, v = (np.stack([shape.arrays(seed)[name] for seed in (0, 1)]) for name in "qkv")

    def attend(strategy):
        options = dict(mesh=mesh_of(4), axis_name="sequence", layout=sa.contiguous(), mask=sa.causal())
        return lambda *x: sa.attention(*x, strategy=strategy, **options)

    for strategy in ("heads", "gather", sa.strategy(heads=2)):
        found = jax.vmap(attend(strategy))(q, k, v)
        for i in range(2):
            wanted = dense_attention(q[i], k[i], v[i], sa.causal().dense(16))
            np.testing.assert_allclose(found[i], wanted, atol=FLOAT32_TOLERANCE)


def test_deterministic_is_true_or_false():
    x = jnp.ones((1, 16, 2, 4))
    with pytest.raises(ValueError, match=r"deterministic must be True or False; got \[1\]"):
        sa.attention(
            x, x, x, mesh=mesh_of(4), axis_name="sequence", layout=sa.striped(), mask=sa.causal(), deterministic=[1]
        )

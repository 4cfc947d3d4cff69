"""`attention` and `attention_shard` compose with jit, grad, checkpoint, scan and other mesh axes of both types."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import striped_attention as sa
from striped_attention.core.oracle import dense_attention
from striped_attention.kernels import xla
from tests.compare import Shape, assert_exact, errors, expected, mesh_of, random_segments

SHAPE = Shape(batch=2, length=32, heads=4, kv_heads=2)
LAYOUT = sa.striped(2)


def inputs():
    arrays = SHAPE.arrays()
    return tuple(jnp.asarray(arrays[name]) for name in "qkv")


def truth(mask):
    return expected(SHAPE, SHAPE.arrays(), mask.dense(SHAPE.length))


def loss_and_grads(attend, layout, devices):
    """Return a function from q, k, v in original order to output and gradients; `attend` works in layout order."""
    dout = jnp.asarray(SHAPE.arrays()["dout"])

    def run(q, k, v):
        def text_order(q, k, v):
            return layout.restore(attend(*(layout.permute(x, devices, axis=1) for x in (q, k, v))), devices, axis=1)

        out, pull = jax.vjp(text_order, q, k, v)
        return dict(zip(("out", "dq", "dk", "dv"), (out, *pull(dout)), strict=True))

    return run


def assert_true(result, mask):
    found = errors(result, truth(mask))
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize(
    ("axis_type", "under_set_mesh", "jit"),
    [
        *((AxisType.Auto, False, True), (AxisType.Auto, True, True)),
        *((AxisType.Explicit, False, False), (AxisType.Explicit, True, True)),
    ],
)
def test_both_kinds_of_mesh_axes_with_and_without_jit(axis_type, under_set_mesh, jit):
    mesh = jax.make_mesh((4,), ("sequence",), axis_types=(axis_type,), devices=jax.devices()[:4])
    attend = functools.partial(
        sa.attention, axis_name="sequence", layout=LAYOUT, mask=sa.causal(), mesh=None if under_set_mesh else mesh
    )
    run = loss_and_grads(attend, LAYOUT, 4)
    run = jax.jit(run) if jit else run
    if under_set_mesh:
        with jax.set_mesh(mesh):
            assert_true(run(*inputs()), sa.causal())
    else:
        assert_true(run(*inputs()), sa.causal())


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_inputs_that_are_sharded_already_stay_sharded(axis_type):
    mesh = jax.make_mesh((4,), ("sequence",), axis_types=(axis_type,), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, P(None, "sequence"))
    q, k, v = (jax.device_put(LAYOUT.permute(x, 4, axis=1), sharding) for x in inputs())
    attend = functools.partial(sa.attention, axis_name="sequence", layout=LAYOUT, mask=sa.causal(), mesh=mesh)

    @jax.jit
    def run(*x):
        out, pull = jax.vjp(attend, *x)
        return out, pull(out)

    out, grads = run(q, k, v)
    assert out.sharding.is_equivalent_to(sharding, 4)
    assert all(grad.sharding.is_equivalent_to(sharding, 4) for grad in grads)
    np.testing.assert_allclose(LAYOUT.restore(out, 4, axis=1), truth(sa.causal())["out"], atol=1e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_batch_and_heads_on_other_mesh_axes(axis_type):
    mesh = jax.make_mesh((2, 2, 2), ("data", "sequence", "model"), axis_types=(axis_type,) * 3)
    ids = random_segments(np.random.default_rng(0), 2, SHAPE.length, longest=12)
    shape = Shape(batch=2, length=32, heads=4, kv_heads=2, bias="t5", sinks=True)
    arrays = {name: jnp.asarray(x) for name, x in shape.arrays().items()}
    mask = sa.documents(ids)

    @jax.jit
    def run(arrays):
        def text_order(arrays):
            q, k, v = (LAYOUT.permute(arrays[name], 2, axis=1) for name in "qkv")
            out = sa.attention(
                q, k, v, mesh=mesh, axis_name="sequence", layout=LAYOUT, mask=mask,
                spec=P("data", "sequence", "model", None), **shape.options(arrays),
            )  # fmt: skip
            return LAYOUT.restore(out, 2, axis=1)

        out, pull = jax.vjp(text_order, {name: x for name, x in arrays.items() if name != "dout"})
        (grads,) = pull(arrays["dout"])
        return {"out": out, **{f"d{name}": x for name, x in grads.items()}}

    found = errors(run(arrays), expected(shape, shape.arrays(), mask.dense(shape.length)))
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("check_vma", [True, False])
def test_attention_shard_inside_shard_map(check_vma):
    """Documents, a learned bias and sinks may be replicated or sharded; their gradients are complete."""
    devices = 4
    mesh = jax.make_mesh((devices,), ("sequence",), (AxisType.Auto,), devices=jax.devices()[:devices])
    shape = Shape(batch=2, length=32, heads=4, kv_heads=2, bias="alibi", sinks=True)
    arrays = {name: jnp.asarray(x) for name, x in shape.arrays().items()}
    mask = sa.documents(random_segments(np.random.default_rng(0), 2, shape.length, longest=12), causal=False)

    def shard(q, k, v, mask, bias, sinks):
        return sa.attention_shard(
            q, k, v, axis_name="sequence", layout=LAYOUT, mask=mask, bias=sa.alibi(bias), sinks=sinks
        )

    sequence = P(None, "sequence")
    attend = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(sequence, sequence, sequence, sequence, P(), P()),
        out_specs=sequence,
        check_vma=check_vma,
    )

    @jax.jit
    def run(arrays):
        def text_order(q, k, v, bias, sinks):
            q, k, v = (LAYOUT.permute(x, devices, axis=1) for x in (q, k, v))
            return LAYOUT.restore(attend(q, k, v, mask.permute(LAYOUT, devices), bias, sinks), devices, axis=1)

        names = ("q", "k", "v", "bias", "sinks")
        out, pull = jax.vjp(text_order, *(arrays[name] for name in names))
        return {"out": out, **{f"d{name}": x for name, x in zip(names, pull(arrays["dout"]), strict=True)}}

    found = errors(run(arrays), expected(shape, shape.arrays(), mask.dense(shape.length)))
    assert max(found.values()) < 1e-5, found


def test_scan_over_layers_and_checkpoint():
    devices, layers = 2, 3
    mask = sa.sliding_window(10)
    # Small, so that three layers do not amplify rounding errors.
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((layers, 8, 8)) / 6, jnp.float32)
    x = inputs()[0]

    def model(attend, x, weights, remat=False):
        def layer(x, w):
            y = x @ w
            return x + attend(y, y, x), None

        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, weights)[0]

    def on_mesh(x, weights, remat):
        attend = functools.partial(
            sa.attention, mesh=mesh_of(devices), axis_name="sequence", layout=LAYOUT, mask=mask, tile=(4, 4)
        )
        return LAYOUT.restore(model(attend, LAYOUT.permute(x, devices, axis=1), weights, remat), devices, axis=1)

    def dense(x, weights):
        return model(lambda q, k, v: dense_attention(q, k, v, mask.dense(SHAPE.length)), x, weights)

    def results(run, *inputs):
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(run(*a))), argnums=(0, 1)))(*inputs)

    with jax.enable_x64(True):
        wanted = results(dense, *(jnp.asarray(np.asarray(a, np.float64)) for a in (x, weights)))
    for remat in (False, True):
        found = results(functools.partial(on_mesh, remat=remat), x, weights)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


def test_segment_ids_may_be_traced():
    """A mask that is made inside jit from a batch of data compiles once for all batches."""
    devices = 4

    @jax.jit
    def run(q, k, v, ids):
        q, k, v = (LAYOUT.permute(x, devices, axis=1) for x in (q, k, v))
        out = sa.attention(q, k, v, mesh=mesh_of(devices), axis_name="sequence", layout=LAYOUT, mask=sa.documents(ids))
        return LAYOUT.restore(out, devices, axis=1)

    for seed in range(2):
        ids = random_segments(np.random.default_rng(seed), 2, SHAPE.length, longest=12)
        np.testing.assert_allclose(run(*inputs(), ids), truth(sa.documents(ids))["out"], atol=1e-5)
    assert run._cache_size() == 1


def test_documents_with_different_rows_on_a_data_axis():
    """One mask has a row per sequence, the other a single row for all."""
    mesh = jax.make_mesh((2, 2), ("data", "sequence"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    each = random_segments(np.random.default_rng(0), 2, SHAPE.length, longest=12)
    mask = sa.documents(each) & sa.documents(np.zeros((1, SHAPE.length), int), causal=False)
    q, k, v = (LAYOUT.permute(x, 2, axis=1) for x in inputs())
    spec = P("data", "sequence", None, None)
    out = sa.attention(q, k, v, mesh=mesh, axis_name="sequence", layout=LAYOUT, mask=mask, spec=spec)
    np.testing.assert_allclose(LAYOUT.restore(out, 2, axis=1), truth(sa.documents(each))["out"], atol=1e-5)


def test_segment_ids_sharded_over_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("sequence",), (AxisType.Explicit,), devices=jax.devices()[:4])
    ids = random_segments(np.random.default_rng(0), 2, SHAPE.length, longest=12)
    with jax.set_mesh(mesh):
        traced = jax.jit(sa.documents)(jax.device_put(ids, NamedSharding(mesh, P(None, "sequence"))))
    np.testing.assert_array_equal(traced.dense(SHAPE.length), sa.documents(ids).dense(SHAPE.length))


def test_vmap():
    q, k, v = (LAYOUT.permute(x, 4, axis=1)[:, None] for x in inputs())
    attend = functools.partial(
        sa.attention, mesh=mesh_of(4), axis_name="sequence", layout=LAYOUT, mask=sa.causal(), tile=(4, 4)
    )
    out = jax.vmap(attend)(q, k, v)[:, 0]
    np.testing.assert_allclose(LAYOUT.restore(out, 4, axis=1), truth(sa.causal())["out"], atol=1e-5)


def test_float64_inputs_are_computed_in_float64():
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.asarray(x, np.float64)) for x in inputs())
        out = sa.attention(q, k, v, mesh=mesh_of(2), axis_name="sequence", layout=sa.contiguous(), mask=sa.causal())
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, dense_attention(q, k, v, sa.causal().dense(32)), atol=1e-14)


@pytest.mark.parametrize(
    ("devices", "strategy"),
    [(3, "ring"), (2, "auto"), (4, sa.strategy(heads=2, gather=2)), (4, sa.strategy(inner=2))],
    ids=str,
)
def test_64_bit_mode_changes_nothing_for_float32(devices, strategy):
    with jax.enable_x64(True):
        shape = Shape(length=29, bias="t5", sinks=True)
        assert_exact(shape, devices, sa.zigzag(), sa.prefix(6), strategy=strategy)


def hessian_product(attend, x, v):
    return jax.jvp(jax.grad(lambda x: (attend(x) ** 2).sum()), (x,), (v,))[1]


@pytest.mark.parametrize(
    ("mask", "strategy"),
    [
        *((sa.causal(), "ring"), (sa.causal(), sa.strategy(heads=2))),
        (sa.documents(np.repeat(np.arange(3), [3, 9, 4])[None]), "ring"),
    ],
    ids=str,
)
def test_second_derivatives_forward_over_reverse(mask, strategy):
    """On 4 devices some blocks have rows that see no key, whose log-sum-exp must not cause NaN."""
    x, v = (jax.random.normal(jax.random.key(i), (1, 16, 2, 8)) for i in (0, 1))
    visible = mask.dense(16).reshape(-1, 16, 16)

    def attend(x):
        y = LAYOUT.permute(x, 4, 1)
        options = dict(mesh=mesh_of(4), axis_name="sequence", layout=LAYOUT, mask=mask, kernel="xla")
        return LAYOUT.restore(sa.attention(y, y, y, strategy=strategy, **options), 4, 1)

    found = jax.jit(functools.partial(hessian_product, attend))(x, v)
    wanted = hessian_product(lambda x: dense_attention(x, x, x, visible), x, v)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


def test_a_kernel_without_second_derivatives_says_so(monkeypatch):
    monkeypatch.setattr(xla, "DIFFERENTIABLE", False)
    x = jnp.ones((1, 8, 1, 4))
    where = dict(mesh=mesh_of(2), axis_name="sequence", layout=sa.striped(), mask=sa.causal())
    with pytest.raises(NotImplementedError, match=r"no second derivatives\. Use kernel='xla'"):
        hessian_product(lambda x: sa.attention(x, x, x, **where), x, x)


def test_a_whole_hessian():
    x = jax.random.normal(jax.random.key(0), (1, 4, 1, 2))

    def attend(x):
        y = sa.striped().permute(x, 2, 1)
        out = sa.attention(y, y, y, mesh=mesh_of(2), axis_name="sequence", layout=sa.striped(), mask=sa.causal())
        return jnp.sum(sa.striped().restore(out, 2, 1) ** 2)

    visible = sa.causal().dense(4)[None]
    wanted = jax.hessian(lambda x: jnp.sum(dense_attention(x, x, x, visible) ** 2))(x)
    np.testing.assert_allclose(jax.jit(jax.hessian(attend))(x), wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


def test_derivatives_that_are_not_supported_say_so():
    x = jnp.ones((1, 8, 1, 4))
    part = jax.P(None, "sequence")
    shard = lambda x: sa.attention_shard(x, x, x, axis_name="sequence", layout=sa.striped(), mask=sa.causal())  # noqa: E731
    mesh = jax.make_mesh((2,), ("sequence",), (AxisType.Auto,), devices=jax.devices()[:2])
    with pytest.raises(NotImplementedError, match=r"Forward-mode derivatives.*Use jax\.grad or jax\.vjp"):
        jax.jvp(jax.shard_map(shard, mesh=mesh, in_specs=part, out_specs=part), (x,), (x,))
    where = dict(mesh=mesh_of(2), axis_name="sequence", layout=sa.striped(), mask=sa.causal())
    loss = lambda x: sa.attention(x, x, x, **where).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"Forward-mode derivatives.*Use jax\.grad or jax\.vjp"):
        jax.jvp(loss, (x,), (x,))
    with pytest.raises(TypeError, match="forward-mode"):  # raised by JAX itself under jit
        jax.jvp(jax.jit(loss), (x,), (x,))


@pytest.mark.parametrize("strategy", ["ring", "heads", "gather"])
def test_reverse_over_reverse_says_what_to_do(strategy):
    x = jnp.ones((1, 8, 2, 4))
    where = dict(mesh=mesh_of(2), axis_name="sequence", layout=sa.striped(), mask=sa.causal(), strategy=strategy)
    loss = lambda x: sa.attention(x, x, x, **where).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"jax\.grad of jax\.grad are not supported.*jax\.jvp\(jax\.grad"):
        jax.eval_shape(jax.grad(lambda x: jax.grad(loss)(x).sum()), x)

"""Attention with `return_lse=True`: partial results over some of the keys, which merge to the whole, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention.core.oracle import dense_partial
from striped_attention.kernels.choice import choose
from striped_attention.kernels.contract import make_request
from tests.compare import FLOAT32_TOLERANCE, mesh_of, random_segments

LENGTH, DEVICES = 45, 4
CASES = [
    (sa.contiguous(), sa.causal(), "ring", {}),
    (sa.striped(), sa.window(9, 5), "gather", {"softcap": 3.0}),
    (sa.striped(3), "documents", "heads", {"sinks": np.linspace(-1, 1, 4, dtype=np.float32)}),
    (sa.zigzag(), "documents", sa.strategy(heads=2), {"bias": sa.alibi(np.linspace(0.1, 1, 4, dtype=np.float32))}),
    (sa.striped(), sa.prefix(9), sa.strategy(heads=2, gather=2), {}),
]


def arrays(dtype=np.float32):
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 2, LENGTH, 4, 8))
    k, v = rng.standard_normal((2, 2, LENGTH, 2, 8))
    return [x.astype(dtype) for x in (q, k, v, dout, rng.standard_normal((2, LENGTH, 4)))]


def objective(part, dout, dlse):
    """A scalar that depends on both results; rows that see no key have an lse of -inf and do not take part."""
    return jnp.sum(part.out * dout) + jnp.sum(jnp.where(jnp.isneginf(part.lse), 0, part.lse) * dlse)


@pytest.mark.parametrize(("layout", "mask", "strategy", "options"), CASES, ids=lambda value: str(value))
def test_both_results_and_their_gradients_are_exact(layout, mask, strategy, options):
    q, k, v, dout, dlse = arrays()
    if mask == "documents":
        mask = sa.documents(random_segments(np.random.default_rng(1), 2, LENGTH, longest=20), padding=1)
    where = dict(devices=DEVICES, axis=1)

    def ours(q, k, v):
        arrays = (layout.permute(x, **where) for x in (q, k, v))
        asked = dict(axis_name="sequence", layout=layout, mask=mask, strategy=strategy, **options)
        part = sa.attention(*arrays, mesh=mesh_of(DEVICES), return_lse=True, length=LENGTH, **asked)
        assert isinstance(part, sa.Partial)
        return sa.Partial(*(layout.restore(x, **where, length=LENGTH) for x in part))

    truth = lambda q, k, v: dense_partial(q, k, v, mask.dense(LENGTH), **options)  # noqa: E731
    found, wanted = (jax.jit(f)(q, k, v) for f in (ours, truth))
    np.testing.assert_allclose(found.out, wanted.out, atol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(found.lse, wanted.lse, atol=FLOAT32_TOLERANCE)
    grads = (
        jax.jit(jax.grad(lambda *x, f=f: objective(f(*x), dout, dlse), argnums=(0, 1, 2)))(q, k, v)
        for f in (ours, truth)
    )
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, atol=3 * FLOAT32_TOLERANCE)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parts_over_two_halves_of_the_keys_merge_to_the_whole(dtype):
    """Also their gradients, which need that of the lse."""
    layout, (q, k, v, dout, _) = sa.striped(), arrays()
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    first, second = (
        sa.ranges(0, np.full(LENGTH, 20)) & sa.causal(),
        sa.ranges(np.full(LENGTH, 20), LENGTH) & sa.causal(),
    )

    def attend(mask, q, k, v, **options):
        arrays = (layout.permute(x, devices=DEVICES, axis=1) for x in (q, k, v))
        where = dict(mesh=mesh_of(DEVICES), axis_name="sequence", layout=layout, length=LENGTH)
        return sa.attention(*arrays, mask=mask, **where, **options)

    def merged(q, k, v):
        parts = (attend(mask, q, k, v, return_lse=True) for mask in (first, second))
        return layout.restore(sa.merge(*parts).out, devices=DEVICES, axis=1, length=LENGTH)

    def whole(q, k, v):
        return layout.restore(attend(sa.causal(), q, k, v), devices=DEVICES, axis=1, length=LENGTH)

    tolerance = FLOAT32_TOLERANCE if dtype == jnp.float32 else 2**-6
    found, wanted = (jax.jit(f)(q, k, v) for f in (merged, whole))
    assert found.dtype == jnp.float32, "rounded once, after the merge"
    np.testing.assert_allclose(found, wanted.astype(jnp.float32), atol=tolerance)
    scalar = lambda f: lambda *x: jnp.sum(f(*x).astype(jnp.float32) * dout)  # noqa: E731
    grads = (jax.jit(jax.grad(scalar(f), argnums=(0, 1, 2)))(q, k, v) for f in (merged, whole))
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=4 * tolerance)


def test_wrong_positions_poison_both_results():
    q, k, v, *_ = arrays()
    layout, length = sa.striped(), 44
    attend = jax.jit(
        lambda positions: sa.attention(
            *(x[:, :length] for x in (q, k, v)), mesh=mesh_of(DEVICES), axis_name="sequence", layout=layout,
            mask=sa.causal(), positions=positions, return_lse=True,
        )
    )  # fmt: skip
    order = layout.permute(np.arange(length), devices=DEVICES, axis=0)
    assert all(np.isfinite(x).all() for x in attend(order))
    assert all(np.isnan(x).all() for x in attend(np.arange(length)))


def test_cudnn_has_no_gradient_of_the_lse():
    q, k = (jax.ShapeDtypeStruct((1, 64, heads, 128), jnp.bfloat16) for heads in (8, 2))
    asked = make_request(q, k, mask=sa.causal(), layout=sa.striped(), devices=4, platform="gpu", here=False, lse=True)
    with pytest.raises(NotImplementedError, match="no gradient of the log-sum-exp, as return_lse=True needs"):
        choose("cudnn", asked)
    with pytest.raises(ValueError, match="return_lse must be True or False; got 1"):
        sa.attention(*np.ones((3, 1, 8, 1, 4), np.float32), mesh=mesh_of(2), axis_name="sequence",
                     layout=sa.striped(), mask=sa.causal(), return_lse=1)  # fmt: skip

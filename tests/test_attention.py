"""Attention over a mesh is exact: every layout, mask and option, 1 to 8 devices, odd lengths, all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention.core.mask import Mask
from striped_attention.core.oracle import dense_attention
from tests.compare import Shape, assert_exact, mesh_of, random_mask, random_segments

LAYOUTS = [sa.contiguous(), sa.striped(), sa.striped(4), sa.zigzag()]
DEVICES = [1, 2, 3, 4, 5, 8]
OPTIONS = {
    "softcap, negative scale": Shape(softcap=2.0, scale=-1.0),
    "alibi": Shape(bias="alibi"),
    "t5": Shape(bias="t5", scale=1.0),
    "t5-bidirectional, sinks, softcap": Shape(bias="t5-bidirectional", sinks=True, softcap=3.0),
    "sinks": Shape(sinks=True),
    "bfloat16": Shape(dtype="bfloat16"),
    "bfloat16, all options": Shape(dtype="bfloat16", bias="t5", sinks=True, softcap=3.0),
    "float16": Shape(dtype="float16"),
}


def named_masks(length: int, batch: int) -> dict[str, Mask]:
    ids = random_segments(np.random.default_rng(1), batch, length, longest=20)
    return {
        "full": sa.full(),
        "documents": sa.documents(ids),
        "documents, both ways": sa.documents(ids, causal=False),
        "prefix": sa.prefix(20),
        "window to both sides": sa.window(13, 6),
        "window to both sides & prefix": sa.window(30, 6) & sa.prefix(20),
        "blocks": sa.ranges(0, (np.arange(length) // 16 + 1) * 16),
        "rows of other lengths": sa.ranges(0, np.repeat(np.arange(batch)[:, None] * length // batch, length, axis=1)),
        "documents and padding": sa.documents(ids, padding=int(ids[0, 0])),
        "documents & window": sa.documents(ids) & sa.sliding_window(5),
        "prefix & documents, both ways": sa.prefix(9) & sa.documents(ids, causal=False),
        "one row of documents for all": sa.documents(ids[:1]),
    }


@pytest.mark.parametrize(
    ("devices", "layout"),
    [(n, layout) for i, n in enumerate(DEVICES) for j, layout in enumerate(LAYOUTS) if (i + j) % 2 == 0],
    ids=repr,
)
def test_every_layout_on_any_number_of_devices_with_arbitrary_masks(devices, layout):
    """Every other pair of layout and device count is exact here; `make fuzz` covers all pairs."""
    rng = np.random.default_rng(devices)
    shape = Shape()
    for seed in range(6):
        assert_exact(shape, devices, layout, random_mask(rng, shape.batch, shape.length), seed)


@pytest.mark.parametrize("name", named_masks(53, 2))
def test_every_named_mask(name):
    assert_exact(Shape(), 3, sa.striped(4), named_masks(53, 2)[name])


@pytest.mark.parametrize("layout", [sa.contiguous(), sa.zigzag()], ids=repr)
def test_hops_that_a_window_skips_change_nothing(layout):
    assert_exact(Shape(batch=1), 8, layout, sa.sliding_window(7))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name):
    rng = np.random.default_rng(0)
    shape = OPTIONS[name]
    layout = LAYOUTS[list(OPTIONS).index(name) % len(LAYOUTS)]  # `make fuzz` covers all pairs
    assert_exact(shape, 2, layout, sa.documents(random_segments(rng, 2, shape.length, 30), causal=False))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype"),
    [(32, 8, "float32"), (32, 1, "bfloat16"), (6, 3, "float32")],
)
def test_grouped_and_single_key_heads(heads, kv_heads, dtype):
    assert_exact(Shape(batch=1, heads=heads, kv_heads=kv_heads, dtype=dtype), 2, sa.striped(), sa.causal())


@pytest.mark.parametrize(("length", "tile"), [(1, (8, 4)), (7, 1), (9, (3, 16)), (64, (16, 3))])
def test_any_length_and_tile(length, tile):
    assert_exact(Shape(batch=1, length=length, tile=tile), 3, sa.striped(2), sa.sliding_window(20))


def test_a_longer_sequence_with_the_default_tile():
    shape = Shape(batch=1, length=1300, heads=2, kv_heads=1, dim=16, tile=None)
    ids = random_segments(np.random.default_rng(0), 1, shape.length, longest=900)
    assert_exact(shape, 2, sa.striped(128), sa.documents(ids))


@pytest.mark.parametrize(
    ("devices", "options"), [(1, {}), (2, {}), (3, {"sinks": np.zeros(2, np.float32)})], ids=["1", "2", "3, sinks"]
)
def test_a_row_that_sees_no_key_is_zero_and_so_are_its_gradients(devices, options):
    length = 18
    hi = np.where(np.arange(length) < 5, 0, np.arange(1, length + 1)).astype(np.int32)[None]
    mask = Mask(lo=np.zeros_like(hi), hi=hi, length=length)
    layout = sa.striped()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 1, length, 2, 4)), jnp.float32)

    def attend(x):
        q, k, v = layout.permute(x, devices, axis=2)
        out = sa.attention(q, k, v, mesh=mesh_of(devices), axis_name="sequence", layout=layout, mask=mask, **options)
        return layout.restore(out, devices, axis=1)

    @jax.jit
    def run(x):
        out, pull = jax.vjp(attend, x)
        return out, *pull(jnp.ones_like(out))

    out, grad = run(x)
    assert (out[0, :5] == 0).all()
    assert (grad[0, 0, :5] == 0).all()
    assert np.isfinite(grad).all()
    assert (out[0, 5:] != 0).all()


def test_huge_scores_neither_overflow_nor_give_nan():
    """Scores reach ±10,000, where float32 rounds lse, and so merge weights and output, to a precision of 5e-4."""
    length, devices, layout = 24, 4, sa.striped()
    rng = np.random.default_rng(0)
    q, k = rng.choice([-100.0, 100.0], (2, 1, length, 2, 4))
    v, dout = rng.standard_normal((2, 1, length, 2, 4))

    def attend(q, k, v):
        q, k, v = (layout.permute(x, devices, axis=1) for x in (q, k, v))
        out = sa.attention(
            q, k, v, mesh=mesh_of(devices), axis_name="sequence", layout=layout, mask=sa.causal(), scale=0.25
        )
        return layout.restore(out, devices, axis=1)

    def plain(q, k, v):
        return dense_attention(q, k, v, sa.causal().dense(length), scale=0.25)

    def with_gradients(attend):
        @jax.jit
        def run(q, k, v, dout):
            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(dout)

        return lambda sign, dtype: [
            np.asarray(x) for x in run(*(jnp.asarray(x, dtype) for x in (sign * q, k, v, dout)))
        ]

    on_mesh, oracle = map(with_gradients, (attend, plain))
    for sign in (1.0, -1.0):
        with jax.enable_x64(True):
            wanted = oracle(sign, "float64")
        for found, truth in zip(on_mesh(sign, "float32"), wanted, strict=True):
            np.testing.assert_allclose(found, truth, atol=5e-4 * max(1.0, float(np.abs(truth).max())))
        assert all(np.isfinite(x.astype("float32")).all() for x in on_mesh(sign, "bfloat16"))


def test_extreme_sinks_give_finite_gradients():
    x = jnp.ones((1, 8, 2, 4))
    mask = Mask(lo=np.zeros((1, 8), np.int32), hi=np.array([[0, 0, 1, 2, 3, 4, 5, 6]], np.int32), length=8)

    def attend(x, sinks):
        return sa.attention(
            x, x, x, mesh=mesh_of(2), axis_name="sequence", layout=sa.striped(), mask=mask, sinks=sinks
        ).sum()

    gradients = jax.jit(jax.grad(attend, argnums=(0, 1)))
    for sink in (-np.inf, 1e4):
        assert all(np.isfinite(g).all() for g in gradients(x, jnp.full(2, sink, jnp.float32)))


def test_arrays_padded_to_more_than_they_need():
    """A batch may be padded beyond the length of its documents mask if `length` gives the number of real tokens."""
    layout, devices, length, slots = sa.striped(), 4, 9, 16
    ids = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2]])
    x = np.random.default_rng(0).standard_normal((1, slots, 2, 4)).astype("float32")
    q = layout.permute(x, devices, axis=1)
    options = dict(mesh=mesh_of(devices), axis_name="sequence", layout=layout, length=length)
    out = sa.attention(q, q, q, mask=sa.documents(ids), **options)
    wanted = dense_attention(*[x[:, :length]] * 3, sa.documents(ids).dense(length))
    np.testing.assert_allclose(layout.restore(out, devices, axis=1, length=length), wanted, atol=1e-5)


def test_padding_is_never_seen_whatever_lies_in_it():
    length, devices, layout = 13, 4, sa.striped()
    x = np.random.default_rng(0).standard_normal((3, 1, length, 2, 4)).astype("float32")
    real = (layout.order(layout.padded_length(length, devices), devices) < length)[None, :, None, None]
    options = dict(mesh=mesh_of(devices), axis_name="sequence", layout=layout, mask=sa.full(), length=length)

    @jax.jit
    def run(x):
        out, pull = jax.vjp(lambda x: sa.attention(*x, **options), x)
        return out, *pull(jnp.where(real, out, np.nan))

    plain, _ = run(layout.permute(x, devices, axis=2))
    for pad in (1e3, np.nan):
        out, grad = run(layout.permute(x, devices, axis=2, pad=pad))
        np.testing.assert_array_equal(plain, out)
        assert (np.where(real, 0, out) == 0).all()
        assert np.isfinite(grad).all()


def test_the_answer_does_not_depend_on_the_layout_or_the_devices():
    shape = Shape(length=64)
    arrays = shape.arrays()
    results = []
    for layout, devices in [(sa.contiguous(), 1), (sa.striped(), 2), (sa.zigzag(), 4), (sa.striped(4), 8)]:
        q, k, v = (layout.permute(arrays[n], devices, axis=1) for n in "qkv")
        out = sa.attention(q, k, v, mesh=mesh_of(devices), axis_name="sequence", layout=layout, mask=sa.causal())
        results.append(layout.restore(np.asarray(out), devices, axis=1))
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=2e-6)


def test_deterministic_gradients_are_the_same_bits():
    """CPU gradients are always deterministic; elsewhere the option may change the kernel (test_kernel_hopper.py)."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 64, 2, 8)).astype("float32")
    options = dict(mesh=mesh_of(4), axis_name="sequence", layout=sa.striped(), mask=sa.causal())

    def gradients(deterministic):
        loss = lambda *qkv: (sa.attention(*qkv, deterministic=deterministic, **options) ** 2).sum()  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    for first, second in zip(gradients(True), gradients(False), strict=True):
        np.testing.assert_array_equal(first, second)

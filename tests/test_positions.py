"""Common position schemes: a model in layout order, given layout positions, equals the model in sequence order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention.core.oracle import dense_attention
from tests.compare import FLOAT32_TOLERANCE, mesh_of

LENGTH, HEADS, DIM, DEVICES = 301, 4, 16, 4  # past 256, where positions in bfloat16 would collide
RNG = np.random.default_rng(0)
EMBEDDED = jnp.asarray(RNG.standard_normal((2, LENGTH, HEADS * DIM)), jnp.float32)
WEIGHTS = jnp.asarray(RNG.standard_normal((3, HEADS * DIM, HEADS * DIM)) / 8, jnp.float32)
LEARNED = jnp.asarray(RNG.standard_normal((320, HEADS * DIM)), jnp.float32)
SLOPES = jnp.asarray(2.0 ** -np.arange(1, HEADS + 1), jnp.float32)
TABLE = jnp.asarray(RNG.standard_normal((32, HEADS)), jnp.float32)


def rotary(x, positions):
    """Rotate pairs of channels; angles in float32 from integer positions (bfloat16 would round 257 to 256)."""
    frequency = 10000.0 ** (-jnp.arange(0, DIM, 2, dtype=jnp.float32) / DIM)
    angle = (positions.astype(jnp.float32)[:, None] * frequency)[None, :, None, :]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def sinusoidal(positions):
    frequency = 10000.0 ** (-jnp.arange(0, HEADS * DIM, 2, dtype=jnp.float32) / (HEADS * DIM))
    angle = positions.astype(jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


SCHEMES = ["rotary", "learned", "sinusoidal", "alibi", "t5"]


def model(scheme, attend, x, positions):
    """Apply one attention layer to x in any token order; `positions` holds the position of each token."""
    if scheme == "learned":
        x = x + LEARNED[positions].astype(x.dtype)
    if scheme == "sinusoidal":
        x = x + sinusoidal(positions).astype(x.dtype)
    q, k, v = ((x @ w.astype(x.dtype)).reshape(*x.shape[:2], HEADS, DIM) for w in WEIGHTS)
    if scheme == "rotary":
        q, k = rotary(q, positions), rotary(k, positions)
    bias = {"alibi": sa.alibi(SLOPES), "t5": sa.relative_bias(TABLE)}.get(scheme)
    return attend(q, k, v, bias=bias)


@pytest.mark.parametrize(
    ("scheme", "layout"), [*((scheme, sa.striped()) for scheme in SCHEMES), ("rotary", sa.zigzag())], ids=str
)
def test_a_permuted_model_equals_the_unpermuted_one(scheme, layout):
    def permuted(x):
        x = layout.permute(x, DEVICES, axis=1)
        positions = jnp.asarray(layout.order(x.shape[1], DEVICES))
        attend = functools.partial(
            sa.attention, mesh=mesh_of(DEVICES), axis_name="sequence", layout=layout, mask=sa.causal(), length=LENGTH
        )
        return layout.restore(model(scheme, attend, x, positions), DEVICES, axis=1, length=LENGTH)

    def plain(x):
        attend = functools.partial(dense_attention, visible=sa.causal().dense(LENGTH))
        return model(scheme, attend, x, jnp.arange(LENGTH))

    assert_same(permuted, plain, EMBEDDED)


def assert_same(permuted, plain, x):
    """Check output and gradient in float32 on the mesh against float64 in sequence order."""

    def with_gradient(run, x):
        out, pull = jax.vjp(run, x)
        return out, *pull(x.reshape(out.shape))

    out, grad = jax.jit(functools.partial(with_gradient, permuted))(x)
    with jax.enable_x64(True):
        exact = jax.jit(functools.partial(with_gradient, plain))(x.astype(jnp.float64))
        wanted, wanted_grad = map(np.asarray, exact)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=FLOAT32_TOLERANCE * np.abs(wanted).max())
    np.testing.assert_allclose(grad, wanted_grad, rtol=0, atol=FLOAT32_TOLERANCE * np.abs(wanted_grad).max())


def test_positions_inside_shard_map_feed_rotary_embeddings():
    layout = sa.striped(4)
    x = layout.permute(EMBEDDED, DEVICES, axis=1)

    def shard(x):
        positions = layout.positions(jax.lax.axis_index("sequence"), x.shape[1] * DEVICES, DEVICES)
        attend = functools.partial(
            sa.attention_shard, axis_name="sequence", layout=layout, mask=sa.causal(), length=LENGTH
        )
        return model("rotary", attend, x, positions)

    mesh = jax.make_mesh((DEVICES,), ("sequence",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:DEVICES])
    run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=jax.P(None, "sequence"), out_specs=jax.P(None, "sequence")))
    attend = functools.partial(dense_attention, visible=sa.causal().dense(LENGTH))
    wanted = model("rotary", attend, EMBEDDED, jnp.arange(LENGTH))
    np.testing.assert_allclose(layout.restore(run(x), DEVICES, axis=1, length=LENGTH), wanted, atol=1e-5)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5_buckets_follow_the_published_formula(bidirectional):
    """T5 buckets equal the scalar float32 formula of the T5 paper's code at every distance."""
    bias = sa.relative_bias(jnp.arange(32.0)[:, None], bidirectional=bidirectional, max_distance=128)
    for distance in range(-300, 301):
        buckets, found = 32, 0
        if bidirectional:
            buckets, found = 16, 16 if distance > 0 else 0
            near = abs(distance)
        else:
            near = max(-distance, 0)
        exact = buckets // 2
        if near < exact:
            found += near
        else:
            log = np.log(np.float32(near) / np.float32(exact)) / np.float32(np.log(128 / exact))
            found += min(exact + int(log * np.float32(buckets - exact)), buckets - 1)
        one_head = jax.tree.map(lambda x: x[0], bias)
        assert int(one_head.at(jnp.asarray(distance))) == found, distance

"""Striped Attention in your own Equinox model.

The model runs inside `jax.shard_map`, each device on its own tokens. It calls `sa.attention_shard` for attention and
gets its rotary positions from the layout; no other part of the model needs to know about other devices. Packed
documents need no further changes.

    python examples/equinox_model.py        (needs: pip install equinox)
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import striped_attention as sa

DEVICES, LENGTH, VOCABULARY, DIM, HEADS = 8, 500, 64, 64, 4


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.query, self.key, self.value, self.out = (eqx.nn.Linear(DIM, DIM, use_bias=False, key=k) for k in keys)

    def __call__(self, x, positions, attend):
        q, k, v = (apply(layer, x).reshape(*x.shape[:2], HEADS, -1) for layer in (self.query, self.key, self.value))
        q, k = (rotate(y, positions) for y in (q, k))
        return apply(self.out, attend(q, k, v).reshape(x.shape))


class Model(eqx.Module):
    tokens: eqx.nn.Embedding
    attention: list[Attention]
    norm: list[eqx.nn.LayerNorm]
    out: eqx.nn.Linear

    def __init__(self, key):
        first, second, third, fourth = jax.random.split(key, 4)
        self.tokens = eqx.nn.Embedding(VOCABULARY, DIM, key=first)
        self.attention = [Attention(second), Attention(third)]
        self.norm = [eqx.nn.LayerNorm(DIM) for _ in range(2)]
        self.out = eqx.nn.Linear(DIM, VOCABULARY, key=fourth)

    def __call__(self, tokens, positions, attend):
        x = apply(self.tokens, tokens)
        for norm, attention in zip(self.norm, self.attention, strict=True):
            x = x + attention(apply(norm, x), positions, attend)
        return apply(self.out, x)


def apply(layer, x):
    """Apply an Equinox layer to every token of [batch, slots]."""
    return jax.vmap(jax.vmap(layer))(x)


def rotate(x, positions):
    """Apply rotary positions; angles are computed in float32 from integer positions."""
    half = x.shape[-1] // 2
    angle = positions.astype(jnp.float32)[None, :, None, None] * 10_000.0 ** -(jnp.arange(half) / half)
    cos, sin, a, b = jnp.cos(angle), jnp.sin(angle), x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def total_loss(model, tokens, targets, positions, attend):
    """Sum the losses of all tokens; padding has target -1 and is ignored."""
    scores = model(tokens, positions, attend)
    target = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(targets >= 0, jax.nn.logsumexp(scores, axis=-1) - target, 0))


def on_the_mesh(model, tokens, targets, segment_ids):
    """Compute loss and gradients with the sequence sharded over all devices."""
    layout = sa.striped(16)
    mask = sa.documents(segment_ids).permute(layout, DEVICES)
    tokens, targets = (layout.permute(x, DEVICES, axis=1, pad=pad) for x, pad in ((tokens, 0), (targets, -1)))
    slots = tokens.shape[1]
    mesh = jax.make_mesh((DEVICES,), ("sequence",), (jax.sharding.AxisType.Auto,))
    spread = P(None, "sequence")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), spread, spread, spread), out_specs=P())
    def loss(model, tokens, targets, mask):
        attend = functools.partial(sa.attention_shard, axis_name="sequence", layout=layout, mask=mask)
        positions = layout.positions(jax.lax.axis_index("sequence"), slots, DEVICES)
        return jax.lax.psum(total_loss(model, tokens, targets, positions, attend), "sequence")

    return eqx.filter_jit(jax.value_and_grad(loss))(model, tokens, targets, mask)


def on_one_device(model, tokens, targets, segment_ids):
    """Compute the same with dense attention, in sequence order."""
    picture = sa.documents(segment_ids).dense(LENGTH)

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, mask=picture[:, None])

    loss = functools.partial(total_loss, positions=jnp.arange(LENGTH), attend=attend)
    return eqx.filter_jit(jax.value_and_grad(loss))(model, tokens, targets)


def main():
    rng = np.random.default_rng(0)
    text = rng.integers(0, VOCABULARY, (2, LENGTH + 1), dtype=np.int32)
    segment_ids = np.sort(rng.integers(0, 4, (2, LENGTH)), axis=1)
    model = Model(jax.random.key(0))
    loss, gradients = on_the_mesh(model, text[:, :-1], text[:, 1:], segment_ids)
    expected, expected_gradients = on_one_device(model, text[:, :-1], text[:, 1:], segment_ids)
    worst = max(
        float(jnp.abs(a - b).max() / jnp.abs(b).max())
        for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True)
    )
    print(f"loss on {DEVICES} devices {loss / text[:, 1:].size:.6f}, on one {expected / text[:, 1:].size:.6f}")
    print(f"largest difference of a gradient: {worst:.1e} of its size")
    if abs(loss - expected) > 1e-5 * expected or worst > 1e-4:
        raise SystemExit("The results differ: please report this.")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    main()

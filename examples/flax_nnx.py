"""Striped Attention in your own Flax NNX model, as the `attention_fn` of `nnx.MultiHeadAttention`.

`attention_fn` is the only part of the model that changes. It runs inside `jax.shard_map`, each device on its own
tokens, with positions from the layout. Losses and gradients equal those of the same model on one device.

    python examples/flax_nnx.py        (needs: pip install flax)
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import striped_attention as sa

DEVICES, LENGTH, VOCABULARY, DIM, HEADS = 8, 512, 64, 64, 4


class Block(nnx.Module):
    def __init__(self, attention_fn, rngs):
        options = dict(num_heads=HEADS, in_features=DIM, decode=False, keep_rngs=False, attention_fn=attention_fn)
        self.attention = nnx.MultiHeadAttention(**options, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(DIM, rngs=rngs) for _ in range(2)])
        self.up, self.down = nnx.Linear(DIM, 4 * DIM, rngs=rngs), nnx.Linear(4 * DIM, DIM, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x), is_causal=True)
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Model(nnx.Module):
    def __init__(self, attention_fn, rngs):
        self.tokens, self.positions = (nnx.Embed(n, DIM, rngs=rngs) for n in (VOCABULARY, LENGTH))
        self.blocks = nnx.List([Block(attention_fn, rngs) for _ in range(2)])
        self.out = nnx.Linear(DIM, VOCABULARY, rngs=rngs)

    def __call__(self, tokens, positions):
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def total_loss(graph, weights, tokens, targets, positions):
    scores = nnx.merge(graph, weights)(tokens, positions)
    target = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(scores, axis=-1) - target)


def on_the_mesh(tokens, targets):
    """Compute loss and gradients with the sequence sharded over all devices."""
    layout = sa.striped()
    attention_fn = sa.attention_fn(axis_name="sequence", layout=layout, order="layout")
    graph, weights = nnx.split(Model(attention_fn, nnx.Rngs(0)))
    tokens, targets = (layout.permute(x, DEVICES, axis=1) for x in (tokens, targets))
    mesh = jax.make_mesh((DEVICES,), ("sequence",), (jax.sharding.AxisType.Auto,))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(None, "sequence"), P(None, "sequence")), out_specs=P()
    )
    def loss(weights, tokens, targets):
        positions = layout.positions(jax.lax.axis_index("sequence"), LENGTH, DEVICES)[None]
        return jax.lax.psum(total_loss(graph, weights, tokens, targets, positions), "sequence")

    return jax.jit(jax.value_and_grad(loss))(weights, tokens, targets)


def on_one_device(tokens, targets):
    """Compute the same with Flax's own attention, in sequence order."""
    graph, weights = nnx.split(Model(nnx.dot_product_attention, nnx.Rngs(0)))
    loss = functools.partial(total_loss, graph, positions=np.arange(LENGTH)[None])
    return jax.jit(jax.value_and_grad(loss))(weights, tokens, targets)


def main():
    text = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH + 1), dtype=np.int32)
    loss, gradients = on_the_mesh(text[:, :-1], text[:, 1:])
    expected, expected_gradients = on_one_device(text[:, :-1], text[:, 1:])
    worst = max(
        float(jnp.abs(a - b).max() / jnp.abs(b).max())
        for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True)
        if jnp.abs(b).max() > 1e-3  # the key bias does not affect the softmax: its gradient is only rounding
    )
    print(f"loss on {DEVICES} devices {loss / text[:, 1:].size:.6f}, on one {expected / text[:, 1:].size:.6f}")
    print(f"largest difference of a gradient: {worst:.1e} of its size")
    if abs(loss - expected) > 1e-5 * expected or worst > 1e-4:
        raise SystemExit("The results differ: please report this.")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    main()

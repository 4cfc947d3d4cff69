"""Fused: a model's weights in the layout used for generation.

Decoding a token takes as long as reading every weight once. So each layer has four matrices, stored [outputs, inputs].
A GPU multiplies them with one vector at the speed of its memory, and sharded they need only a few short messages:

    qkv        [(heads + 2 kv_heads) · head_dim, dim]    sharded by outputs; products are all-gathered
    output     [dim, heads · head_dim]                   by inputs; products are summed (all-reduce)
    gate_up    [devices, 2, ffn / devices, dim]          by outputs, the same rows of gate and up; no communication
    down       [dim, ffn]                                by inputs; products are summed (all-reduce)

A weight is replicated if the number of devices does not divide the dimension to be sharded.
"""

import functools
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from striped_attention.models.config import ModelConfig, Weights
from striped_attention.models.stages import AXES

P = PartitionSpec

# The sharded dimension of each weight; other weights are replicated.
SPLIT = {"embedding": 0, "unembedding": 1, "qkv": 0, "output": 1, "gate_up": 0, "down": 1}


def fused_shapes(config: ModelConfig, mesh: Mesh, dtype: Any) -> Weights:
    """Return the shapes and shardings of fused weights on a mesh."""

    def one(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        dimension = SPLIT.get(name)
        split = dimension is not None and shape[dimension] % mesh.size == 0
        spec = P(*(AXES.everything if i == dimension else None for i in range(len(shape)))) if split else P()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    shapes = config.shapes
    inside = {name: jax.ShapeDtypeStruct(shape[1:], dtype) for name, shape in shapes.pop("layers").items()}
    fused = jax.eval_shape(functools.partial(fuse_layer, config, mesh.size), inside)
    layer = {name: one(name, x.shape) for name, x in fused.items()}
    return {**{name: one(name, shape) for name, shape in shapes.items()}, "layers": [layer] * config.layers}


def fuse(config: ModelConfig, mesh: Mesh, weights: Weights) -> Weights:
    """Fuse weights that are sharded as `ModelConfig.layer_specs`.

    Layers are taken out of `weights` one at a time, so memory holds at most one layer twice.
    """
    placed = jax.tree.map(lambda x: x.sharding, fused_shapes(config, mesh, jnp.float32))
    layers: list[Weights] = []
    one = jax.jit(functools.partial(fuse_layer, config, mesh.size), out_shardings=placed["layers"][0])
    while weights["layers"]:
        layers.append(one(weights["layers"].pop(0)))
    outside = [name for name in weights if name != "layers"]
    return {**{name: jax.device_put(weights.pop(name), placed[name]) for name in outside}, "layers": layers}


def fuse_layer(config: ModelConfig, devices: int, layer: Weights) -> Weights:
    """Fuse one layer's weights for `devices` devices; norms stay as they are."""
    layer = dict(layer)
    take = lambda *names: [layer.pop(name) for name in names]  # noqa: E731
    fused = {"qkv": jnp.concatenate([x.reshape(config.dim, -1) for x in take("query", "key", "value")], axis=1).T}
    if config.biases:
        fused["qkv_bias"] = jnp.concatenate([x.ravel() for x in take("query_bias", "key_bias", "value_bias")])
    fused["output"] = layer.pop("output").reshape(-1, config.dim).T
    parts = devices if config.ffn % devices == 0 else 1
    both = jnp.stack([x.T.reshape(parts, config.ffn // parts, config.dim) for x in take("gate", "up")], axis=1)
    return {**layer, **fused, "gate_up": both, "down": layer.pop("down").T}


def fingerprint(weights: Weights) -> str:
    """Return a hash of fused weights that does not depend on the number of devices."""
    layers = weights["layers"]
    numbers = [_numbers({name: x for name, x in weights.items() if name != "layers"}), *map(_numbers, layers)]
    said = jax.tree.map(int, jax.device_get(numbers))
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


@jax.jit
def _numbers(weights: Weights) -> dict[str, jax.Array]:
    """Return a checksum of each weight, over its bits and their positions."""
    return {name: _number(x, name == "gate_up") for name, x in weights.items()}


def _number(x: jax.Array, parts: bool) -> jax.Array:
    """Return the sum of all elements' bits times position-dependent odd factors. `parts`: x is laid out as gate_up."""
    places = [lax.broadcasted_iota(jnp.uint32, x.shape, dimension) for dimension in range(x.ndim)]
    if parts:
        devices, gate_or_up, row, column = places
        places = [gate_or_up, devices * jnp.uint32(x.shape[2]) + row, column]
    factor = jnp.ones(x.shape, jnp.uint32)
    for place, odd in zip(places, (2654435761, 2246822519, 3266489917), strict=False):
        factor = factor + 2 * place * jnp.uint32(odd)
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    return jnp.sum(bits * factor, dtype=jnp.uint32)

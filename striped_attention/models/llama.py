"""Model: a LLaMA-style decoder as plain functions on a pytree of arrays, for one device's shard of a long sequence.

Everything except `init` runs inside `jax.shard_map`: a device holds [batch, slots] of the tokens, in
layout order, and a shard of every weight. A layer has three steps:

    q, k, v = before(x)          norm, projections, rotary positions     a stage: position-wise, chunk by chunk
    a = attention(q, k, v)       the ring                                the only step in which positions interact
    x = after(x, a)              projection, norm, SwiGLU                a stage

Thanks to the chunks, no array of size slots × ffn or slots × vocabulary is materialised, forward or backward. Layers
are stacked and scanned, unless they are unrolled. If only some layers have a sliding window, one step of the scan
covers a whole period of that pattern, so the mask of every layer is static and kernels can skip hidden tiles. `REMAT`
selects what a layer keeps for the backward pass, besides its input:

    unrolled    the same as none, with layers compiled one by one: nothing is copied to and from arrays of all layers,
                and the compiler also keeps normalised inputs and gathered weights. Compiling takes longer
    none        the results of all matrix products and of attention: no product is recomputed
    qkv         attention's result and its inputs
    attention   attention's result
    full        nothing
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from striped_attention.attention import attention_shard
from striped_attention.core.layout import Layout
from striped_attention.core.mask import Mask, sliding_window
from striped_attention.models.config import PRESETS as PRESETS
from striped_attention.models.config import ModelConfig, Weights, is_shape
from striped_attention.models.layers import PRODUCT, after, before, lookup, losses, split_layer
from striped_attention.models.stages import AXES, stage, stage_sum
from striped_attention.strategies.ring import SAVED
from striped_attention.strategies.strategy import AUTO, Strategy

# From the most memory and the least recomputation to the opposite.
REMAT = ("unrolled", "none", "qkv", "attention", "full")
KEEP_ALL = ("unrolled", "none")  # nothing is recomputed
SCORES = 2**28  # logits computed at a time, in float32: 1 GiB, enough to keep a device busy


@dataclasses.dataclass(frozen=True)
class Compute:
    """How to run a model, as opposed to its shape. `devices` is the size of the sequence axis."""

    layout: Layout
    devices: int
    length: int
    dtype: Any = jnp.bfloat16
    remat: str = "attention"
    chunk: int = 1024
    kernel: str = "auto"
    tile: tuple[int, int] | None = None
    deterministic: bool = False
    strategy: str | Strategy = AUTO

    @property
    def padded_length(self) -> int:
        return self.layout.padded_length(self.length, self.devices)

    def attend(self, config: ModelConfig, q: Array, k: Array, v: Array, mask: Mask) -> Array:
        """Compute attention over the whole sequence, in a layer of the model `config`."""
        return attention_shard(
            *(q, k, v),
            axis_name=AXES.sequence,
            layout=self.layout,
            mask=mask,
            scale=config.attention_scale,
            softcap=config.softcap,
            kernel=self.kernel,
            tile=self.tile,
            deterministic=self.deterministic,
            strategy=self.strategy,
            length=self.length,
        )

    def positions(self) -> Int[Array, " slots"]:
        return jnp.asarray(self.layout.positions(lax.axis_index(AXES.sequence), self.padded_length, self.devices))


def init(config: ModelConfig, key: Array) -> Weights:
    """Return new float32 weights: normal, standard deviation 0.02, smaller if added to the residual stream."""
    named, structure = jax.tree_util.tree_flatten_with_path(config.shapes, is_leaf=is_shape)
    keys = jax.random.split(key, len(named))

    def one(path: Any, shape: tuple[int, ...], key: Array) -> Array:
        name = path[-1].key
        if name.endswith(("norm", "bias")):
            return jnp.full(shape, name.endswith("norm") and not config.centered_norms, jnp.float32)
        residual = (2 * config.layers) ** -0.5 if name in ("output", "down") else 1.0
        return jax.random.normal(key, shape, jnp.float32) * (0.02 * residual)

    weights = [one(path, shape, key) for (path, shape), key in zip(named, keys, strict=True)]
    return jax.tree.unflatten(structure, weights)


def loss_chunk(chunk: int, vocabulary: int) -> int:
    """Return how many tokens get their logits at a time, when stages take chunks of `chunk` tokens."""
    return min(chunk, max(1024, SCORES // vocabulary))


def token_losses(
    config: ModelConfig,
    compute: Compute,
    weights: Weights,
    specs: Weights,
    tokens: Int[Array, "batch slots"],
    targets: Int[Array, "batch slots"],
    mask: Mask,
    attend: Callable[..., Array] | None = None,
) -> Float[Array, "batch slots"]:
    """Return the cross-entropy of every target, for this device's slots. `attend` replaces the ring in tests."""
    x = last_layer(config, compute, weights, specs, tokens, mask, attend)
    last, last_specs = ({name: tree[name] for name in config.last} for tree in (weights, specs))
    chunk = loss_chunk(compute.chunk, config.vocabulary)
    return stage(functools.partial(losses, config), last, last_specs, x, targets, chunk=chunk, dtype=compute.dtype)


def weighted_loss(
    config: ModelConfig,
    compute: Compute,
    weights: Weights,
    specs: Weights,
    tokens: Int[Array, "batch slots"],
    targets: Int[Array, "batch slots"],
    loss_weights: Float[Array, "batch slots"],
    mask: Mask,
    attend: Callable[..., Array] | None = None,
) -> Float[Array, ""]:
    """Return the sum of `token_losses` times `loss_weights`. Its gradient does not recompute the logits."""

    def weighted(last: Weights, x: Array, constants: tuple[Array, Array]) -> Array:
        targets, loss_weights = constants
        return jnp.sum(losses(config, last, x, targets) * loss_weights)

    x = last_layer(config, compute, weights, specs, tokens, mask, attend)
    last, last_specs = ({name: tree[name] for name in config.last} for tree in (weights, specs))
    chunk = loss_chunk(compute.chunk, config.vocabulary)
    return stage_sum(weighted, last, last_specs, x, (targets, loss_weights), chunk=chunk, dtype=compute.dtype)


def last_layer(
    config: ModelConfig,
    compute: Compute,
    weights: Weights,
    specs: Weights,
    tokens: Int[Array, "batch slots"],
    mask: Mask,
    attend: Callable[..., Array] | None = None,
) -> Float[Array, "batch slots dim"]:
    """Return the last layer's output for this device's slots."""
    config = config.at_length(compute.length)
    keep = PRODUCT if compute.remat in KEEP_ALL else None
    run = functools.partial(stage, chunk=compute.chunk, dtype=compute.dtype, keep=keep)
    positions = jnp.broadcast_to(compute.positions(), tokens.shape)
    layer_specs = {name: PartitionSpec(*spec[1:]) for name, spec in specs["layers"].items()}

    def layer(index: int, x: Array, weights: Weights) -> Array:
        if config.period == 1:
            return of_kind(config.layer(index), x, weights)
        # Slice inside the checkpointed function, which recomputes it: if kept, it would be a copy of every weight.
        return of_kind(config.layer(index), x, {name: w[index] for name, w in weights.items()})

    def of_kind(config: ModelConfig, x: Array, weights: Weights) -> Array:
        first, second = split_layer(weights)
        first_specs, second_specs = split_layer(layer_specs)
        q, k, v = run(functools.partial(before, config), first, first_specs, x, positions)
        masked = mask if config.window is None else mask & sliding_window(config.window)
        attended = (attend or functools.partial(compute.attend, config))(q, k, v, masked)
        return run(functools.partial(after, config), second, second_specs, (x, attended), ())

    layers = [_remat(functools.partial(layer, i), compute.remat) for i in range(config.period)]

    def period(x: Array, weights: Weights) -> tuple[Array, None]:
        for one in layers:
            x = one(x, weights)
        return x, None

    embed = functools.partial(stage, chunk=tokens.shape[1], dtype=compute.dtype)  # one chunk: its gradient is a table
    x = embed(functools.partial(lookup, config), weights["embedding"], specs["embedding"], (), tokens)
    whole, rest = _periods(weights["layers"], config.layers, config.period)
    x, _ = lax.scan(period, x, whole, unroll=compute.remat == "unrolled")
    for one in layers[: config.layers % config.period]:
        x = one(x, rest)
    return x


def _periods(weights: Weights, layers: int, period: int) -> tuple[Weights, Weights]:
    """Return stacked weights as [periods, period, ...], and those of the remaining layers at the end."""
    if period == 1:
        return weights, {}
    left = layers % period
    # split, not slices: the gradient of every slice would be an array of full size, padded with zeros.
    parts = {name: lax.split(w, (layers - left, left)) if left else [w] for name, w in weights.items()}
    whole = {name: part[0].reshape(layers // period, period, *part[0].shape[1:]) for name, part in parts.items()}
    return whole, {name: part[-1] for name, part in parts.items()}


def _remat(layer: Any, kind: str) -> Any:
    """Set what a layer keeps of its forward pass. Without a checkpoint, attention keeps its inputs as well."""
    if kind in (*KEEP_ALL, "qkv"):
        return layer
    names = SAVED if kind == "attention" else ()
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names), prevent_cse=False)

"""Stages: one mesh with two named axes, the sharding of a model over it, and its position-wise computation.

    data       sequences of a batch
    sequence   slots of a sequence, assigned by the layout
    both       weights and optimiser state: a device holds an equal shard of every matrix (FSDP, ZeRO-3)

The position-wise parts of a model run as *stages*. A stage gathers its weights from all devices in the compute dtype,
processes its inputs chunk by chunk, and frees everything but the result. Its backward pass gathers the weights again,
recomputes one chunk at a time, sums the weights' gradients in float32 and reduce-scatters them. So a device never holds
the weights of more than one stage, nor the inner activations of more than one chunk.

If memory allows, a stage instead keeps the results of its matrix products and processes all slots at once; if layers
are unrolled, the compiler then gathers weights only once and keeps them as well. The loss is
a special stage, `stage_sum`: its gradient is computed in the forward pass, so its logits are computed once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

P = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Axes:
    """The names of the mesh axes."""

    batch: str = "data"
    sequence: str = "sequence"

    @property
    def everything(self) -> tuple[str, str]:
        return (self.batch, self.sequence)

    @property
    def tokens(self) -> PartitionSpec:
        """The spec of arrays [batch, slots]."""
        return P(self.batch, self.sequence)

    def weight(self, shape: tuple[int, ...], devices: int, stacked: bool) -> PartitionSpec:
        """Return the spec of a weight: its largest dimension divisible by `devices` is split.

        Vectors, and weights without such a dimension, are replicated. The first dimension of a stacked weight is the
        layer and is not split.
        """
        own = shape[1:] if stacked else shape
        fitting = [size for size in own if size % devices == 0]
        if len(own) < 2 or not fitting:
            return P()
        split = shape.index(max(fitting), len(shape) - len(own))
        return P(*(self.everything if i == split else None for i in range(len(shape))))


AXES = Axes()


def parse_mesh(text: str) -> dict[str, int]:
    """Parse axis sizes like "data=2,sequence=4"; an axis that is left out has size 1."""
    form = f"{AXES.batch}=2,{AXES.sequence}=4"
    sizes = dict.fromkeys(AXES.everything, 1)
    named = set()
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in sizes or name in named or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"The mesh must be written like {form} (each axis once, sizes of 1 or more); got {text!r}."
            )
        named.add(name)
        sizes[name] = int(size)
    return sizes


def check_devices(sizes: dict[str, int], devices: int) -> None:
    """Raise unless a mesh of these sizes uses every device."""
    needed = math.prod(sizes.values())
    if needed != devices:
        axes = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"The mesh {axes} needs {needed} devices, but there are {devices}. Choose sizes with that product."
        )


def stage(
    function: Callable[..., Any],
    weights: Any,
    specs: Any,
    x: Any,
    constants: Any,
    *,
    chunk: int,
    dtype: Any,
    keep: str | None = None,
) -> Any:
    """Apply `function(weights, x, constants)` to chunks of the slots, with weights gathered from their shards.

    x (differentiated) and constants (not differentiated) are pytrees of arrays [batch, slots, ...], and so is the
    result. `specs` is the sharding of the weights. With `keep`, all slots are one chunk, and arrays with this
    `checkpoint_name` are kept for the backward pass instead of being recomputed.
    """
    inner, leaves, dims = _on_leaves(function, weights, specs)
    if keep is None:
        return _stage(inner, dims, chunk, dtype, leaves, x, constants)
    kinds = tuple(leaf.dtype for leaf in leaves)
    policy = jax.checkpoint_policies.save_only_these_names(keep)
    whole = lambda leaves, x: inner(_gathered(dims, dtype, kinds, leaves), x, constants)  # noqa: E731
    return jax.checkpoint(whole, policy=policy, prevent_cse=False)(leaves, x)


def stage_sum(
    function: Callable[..., Any], weights: Any, specs: Any, x: Any, constants: Any, *, chunk: int, dtype: Any
) -> Float[Array, ""]:
    """Sum `function(weights, x, constants)`, a scalar per chunk, over all chunks.

    The gradient is computed in the forward pass, chunk by chunk, so nothing is computed twice.
    """
    inner, leaves, dims = _on_leaves(function, weights, specs)
    return _stage_sum(inner, dims, chunk, dtype, leaves, x, constants)


def _on_leaves(function: Callable[..., Any], weights: Any, specs: Any) -> tuple[Callable[..., Any], Any, Any]:
    """Return the function on a tuple of weights, that tuple, and the dimension in which each weight is split."""
    leaves, structure = jax.tree.flatten(weights)
    dims = tuple(map(_split_dimension, jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, PartitionSpec))))
    whole = functools.partial(jax.tree.unflatten, structure)
    return lambda leaves, x, constants: function(whole(leaves), x, constants), tuple(leaves), dims


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _stage(function: Any, dims: Any, chunk: int, dtype: Any, shards: Any, x: Any, constants: Any) -> Any:
    return _stage_forward(function, dims, chunk, dtype, shards, x, constants)[0]


def _stage_forward(function: Any, dims: Any, chunk: int, dtype: Any, shards: Any, x: Any, constants: Any) -> Any:
    weights = _gather(shards, dims, dtype)
    chunks = _Chunks((x, constants), chunk)
    result = chunks.join(lax.map(lambda part: function(weights, *part), chunks.split((x, constants))))
    return result, (shards, x, constants)


def _stage_backward(function: Any, dims: Any, chunk: int, dtype: Any, residuals: Any, dresult: Any) -> Any:
    shards, x, constants = residuals
    weights = _gather(shards, dims, dtype)
    chunks = _Chunks((x, constants), chunk)

    def step(total: Any, part: Any) -> Any:
        x, constants, dresult = part
        _, gradient = jax.vjp(lambda weights, x: function(weights, x, constants), weights, x)
        dweights, dx = gradient(dresult)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, dweights), dx

    nothing = tuple(jnp.zeros_like(w, dtype=shard.dtype) for w, shard in zip(weights, shards, strict=True))
    total, dx = lax.scan(step, nothing, chunks.split((x, constants, dresult)))
    return _scatter(total, dims), chunks.join(dx), None


_stage.defvjp(_stage_forward, _stage_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _stage_sum(function: Any, dims: Any, chunk: int, dtype: Any, shards: Any, x: Any, constants: Any) -> Array:
    weights = _gather(shards, dims, dtype)
    parts = lax.map(lambda part: function(weights, *part), _Chunks((x, constants), chunk).split((x, constants)))
    return jnp.sum(parts)


def _stage_sum_forward(function: Any, dims: Any, chunk: int, dtype: Any, shards: Any, x: Any, constants: Any) -> Any:
    weights = _gather(shards, dims, dtype)
    chunks = _Chunks((x, constants), chunk)

    def step(total: Any, part: Any) -> Any:
        x, constants = part
        value, (dweights, dx) = jax.value_and_grad(function, argnums=(0, 1))(weights, x, constants)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, (value, dweights)), dx

    kinds = (jnp.float32, tuple(shard.dtype for shard in shards))
    parts = chunks.split((x, constants))
    shapes = jax.eval_shape(function, weights, *jax.tree.map(lambda part: part[0], parts))
    varying = jax.tree.leaves(x)[0]
    nothing = jax.tree.map(lambda like, kind: jnp.zeros_like(varying, kind, like.shape), (shapes, weights), kinds)
    (total, dweights), dx = lax.scan(step, nothing, parts)
    return total, (dweights, chunks.join(dx))


def _stage_sum_backward(function: Any, dims: Any, chunk: int, dtype: Any, gradients: Any, dtotal: Any) -> Any:
    dweights, dx = jax.tree.map(lambda g: (g.astype(dtotal.dtype) * dtotal).astype(g.dtype), gradients)
    return _scatter(dweights, dims), dx, None


_stage_sum.defvjp(_stage_sum_forward, _stage_sum_backward)


class _Chunks:
    """Splits arrays [batch, slots, ...] into equal chunks of the slots, padding the last one, and joins them again."""

    def __init__(self, arrays: Any, chunk: int) -> None:
        self.slots = jax.tree.leaves(arrays)[0].shape[1]
        self.count = -(-self.slots // chunk)
        self.size = -(-self.slots // self.count)

    def split(self, arrays: Any) -> Any:
        def one(x: Array) -> Array:
            x = jnp.pad(x, [(0, 0), (0, self.count * self.size - self.slots), *[(0, 0)] * (x.ndim - 2)])
            return jnp.moveaxis(x.reshape(x.shape[0], self.count, self.size, *x.shape[2:]), 1, 0)

        return jax.tree.map(one, arrays)

    def join(self, chunks: Any) -> Any:
        def one(x: Array) -> Array:
            x = jnp.moveaxis(x, 0, 1)
            return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.slots]

        return jax.tree.map(one, chunks)


def _split_dimension(spec: PartitionSpec) -> int | None:
    return next((i for i, entry in enumerate(spec) if entry is not None), None)


def _gather(shards: tuple[Array, ...], dims: tuple[int | None, ...], dtype: Any) -> tuple[Array, ...]:
    """Gather whole weights from the shards of all devices, in the compute dtype."""

    def one(shard: Array, dim: int | None) -> Array:
        if dim is None:
            return lax.pcast(shard.astype(dtype), AXES.everything, to="varying")
        return lax.all_gather(shard.astype(dtype), AXES.everything, axis=dim, tiled=True)

    return tuple(map(one, shards, dims))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gathered(dims: Any, dtype: Any, kinds: Any, shards: Any) -> Any:
    """`_gather`, with gradients summed in the dtypes of the shards."""
    return _gather(shards, dims, dtype)


def _gathered_backward(dims: Any, dtype: Any, kinds: Any, _: Any, dweights: Any) -> Any:
    return (_scatter(tuple(g.astype(kind) for g, kind in zip(dweights, kinds, strict=True)), dims),)


_gathered.defvjp(lambda dims, dtype, kinds, shards: (_gather(shards, dims, dtype), None), _gathered_backward)


def _scatter(total: tuple[Array, ...], dims: tuple[int | None, ...]) -> tuple[Array, ...]:
    """Sum over all devices and return this device's shard: the transpose of `_gather`, in the dtype of the sums."""

    def one(x: Array, dim: int | None) -> Array:
        if dim is None:
            return lax.psum(x, AXES.everything)
        return lax.psum_scatter(x, AXES.everything, scatter_dimension=dim, tiled=True)

    return tuple(map(one, total, dims))

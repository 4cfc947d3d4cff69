"""Exchanges: what moves among neighbours, inside `shard_map`.

`to_heads` and `from_heads` trade tokens for heads; `gather` and `scatter` are all-gather and reduce-scatter of what
belongs to keys; `send` passes it on along the ring. Arrays are [batch, slots, heads, ...] and stay sorted by position.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from striped_attention.core.mask import Mask
from striped_attention.strategies.problem import Problem


def to_heads(problem: Problem, q: Array, k: Array, v: Array, mask: Mask, bias: Any, sinks: Any) -> Any:
    """All tokens of a group of neighbours, for this device's share of the heads. The mask has no heads."""
    copies = problem.strategy.key_copies(q.shape[2], k.shape[2])
    k, v = (x if copies == 1 else jnp.repeat(x, copies, axis=2) for x in (k, v))
    name, groups = problem.axis_name, _neighbours(problem)
    q, k, v = (
        _join(problem, lax.all_to_all(x, name, split_axis=2, concat_axis=1, tiled=True, axis_index_groups=groups))
        for x in (q, k, v)
    )
    together = lambda x: lax.all_gather(x, name, axis=1, tiled=True, axis_index_groups=groups)  # noqa: E731
    mask = jax.tree.map(lambda x: _join(problem, together(x)), mask)
    member = lax.rem(lax.axis_index(problem.axis_name), problem.strategy.heads)
    mine = lambda x: lax.dynamic_slice_in_dim(x, member * q.shape[2], q.shape[2])  # noqa: E731
    return q, k, v, mask, *jax.tree.map(mine, (bias, sinks))


def from_heads(problem: Problem, out: Array) -> Array:
    """All heads, for this device's own tokens."""
    out = problem.layout.split(out, problem.strategy.heads, problem.padded_length, problem.devices)
    name, groups = problem.axis_name, _neighbours(problem)
    return lax.all_to_all(out, name, split_axis=1, concat_axis=2, tiled=True, axis_index_groups=groups)


def _join(problem: Problem, x: Array) -> Array:
    return problem.layout.join(x, problem.strategy.heads, problem.padded_length, problem.devices)


def _neighbours(problem: Problem) -> list[list[int]] | None:
    """Groups of devices that share out heads; None for all, which `jax.vmap` of an all-to-all needs."""
    heads = problem.strategy.heads
    if heads == problem.devices:
        return None
    return [list(range(first, first + heads)) for first in range(0, problem.devices, heads)]


def gather(problem: Problem, x: Any) -> Any:
    """What the devices that gather together have, of keys."""
    if problem.strategy.gather == 1:
        return x
    size = (problem.strategy.gather, problem.padded_length, problem.query_devices)

    def one(leaf: Array) -> Array:
        groups = _gatherers(problem)
        together = lax.all_gather(leaf, problem.axis_name, axis=1, tiled=True, axis_index_groups=groups)
        return problem.query_layout.join(together, *size)

    return jax.tree.map(one, x)


def scatter(problem: Problem, x: Any) -> Any:
    """Sums, over the devices that gather together, of what belongs to this device's keys: `gather` backwards."""
    if problem.strategy.gather == 1:
        return x
    size = (problem.strategy.gather, problem.padded_length, problem.query_devices)

    def one(leaf: Array) -> Array:
        apart, groups = problem.query_layout.split(leaf, *size), _gatherers(problem)
        return lax.psum_scatter(apart, problem.axis_name, scatter_dimension=1, tiled=True, axis_index_groups=groups)

    return jax.tree.map(one, x)


def _gatherers(problem: Problem) -> list[list[int]]:
    """Groups of devices that gather keys: those of neighbouring groups that have the same heads."""
    heads, group = problem.strategy.heads, problem.strategy.group
    firsts = [first + member for first in range(0, problem.devices, group) for member in range(heads)]
    return [list(range(first, first + group, heads)) for first in firsts]


def send(problem: Problem, x: Any, places: int) -> Any:
    """Pass a pytree `places` on along the ring."""
    step = places * problem.strategy.group
    pairs = [(i, (i + step) % problem.devices) for i in range(problem.devices)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, problem.axis_name, pairs), x)

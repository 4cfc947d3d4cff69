"""Exchanges: what moves among neighbours, inside `shard_map`.

`to_heads` and `from_heads` trade tokens for heads; `gather` and `scatter` are all-gather and reduce-scatter of what
belongs to keys; `send` passes it on along the ring. Arrays are [batch, slots, heads, ...] and stay sorted by position.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array

from striped_attention.core.layout import AxisName
from striped_attention.core.mask import Mask
from striped_attention.strategies.hops import Ring
from striped_attention.strategies.problem import Problem

KEYS = "attention_keys"  # the scope of what is gathered and scattered, in compiled programs


def to_heads(problem: Problem, q: Array, k: Array, v: Array, mask: Mask, bias: Any, sinks: Any) -> Any:
    """All tokens of a group of neighbours, for this device's share of the heads. The mask has no heads."""
    copies = problem.strategy.key_copies(q.shape[2], k.shape[2])
    k, v = (x if copies == 1 else jnp.repeat(x, copies, axis=2) for x in (k, v))
    name, groups = problem.axis_name, _neighbours(problem)
    q, k, v = (_join(problem, _all_to_all(x, name, groups, 2, 1)) for x in (q, k, v))
    together = lambda x: lax.all_gather(x, name, axis=1, tiled=True, axis_index_groups=groups)  # noqa: E731
    mask = jax.tree.map(lambda x: _join(problem, together(x)), mask)
    member = lax.rem(lax.axis_index(problem.axis_name), problem.strategy.heads)
    mine = lambda x: lax.dynamic_slice_in_dim(x, member * q.shape[2], q.shape[2])  # noqa: E731
    return q, k, v, mask, *jax.tree.map(mine, (bias, sinks))


def from_heads(problem: Problem, out: Array) -> Array:
    """All heads, for this device's own tokens."""
    out = problem.layout.split(out, problem.strategy.heads, problem.padded_length, problem.devices)
    return _all_to_all(out, problem.axis_name, _neighbours(problem), 1, 2)


def _join(problem: Problem, x: Array) -> Array:
    return problem.layout.join(x, problem.strategy.heads, problem.padded_length, problem.devices)


def _neighbours(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that share out heads."""
    heads = problem.strategy.heads
    return tuple(tuple(range(first, first + heads)) for first in range(0, problem.devices, heads))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _all_to_all(x: Array, name: AxisName, groups: Any, split: int, concat: int) -> Array:
    """`lax.all_to_all` among groups of devices. JAX has no `vmap` of it: what is mapped joins the batch here."""

    @custom_vmap
    def exchange(x: Array) -> Array:
        return lax.all_to_all(x, name, split_axis=split, concat_axis=concat, tiled=True, axis_index_groups=groups)

    @exchange.def_vmap
    def exchange_all(size: int, _: Any, x: Array) -> tuple[Array, bool]:
        out = exchange(x.reshape(-1, *x.shape[2:]))
        return out.reshape(size, -1, *out.shape[1:]), True

    return exchange(x)


def _back_again(name: AxisName, groups: Any, split: int, concat: int, _: None, dout: Array) -> tuple[Array]:
    return (_all_to_all.fun(dout, name, groups, concat, split),)


# `custom_vmap` has no transpose. The functions themselves are called here, so that second derivatives go through.
_all_to_all.defvjp(lambda *args: (_all_to_all.fun(*args), None), _back_again)


@jax.named_scope(KEYS)
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


@jax.named_scope(KEYS)
def scatter(problem: Problem, x: Any) -> Any:
    """Sums, over the devices that gather together, of what belongs to this device's keys: `gather` backwards."""
    if problem.strategy.gather == 1:
        return x
    size = (problem.strategy.gather, problem.padded_length, problem.query_devices)

    def one(leaf: Array) -> Array:
        apart, groups = problem.query_layout.split(leaf, *size), _gatherers(problem)
        total = lax.psum_scatter(apart, problem.axis_name, scatter_dimension=1, tiled=True, axis_index_groups=groups)
        # If this sum is rounded to the dtype of k and v next, XLA for TPUs would round what it sums as well. This
        # identity keeps it from that.
        exact = jnp.finfo(total.dtype)
        return lax.reduce_precision(total, exact.nexp, exact.nmant)

    return jax.tree.map(one, x)


def _gatherers(problem: Problem) -> list[list[int]]:
    """Groups of devices that gather keys: those of neighbouring groups that have the same heads."""
    heads, group = problem.strategy.heads, problem.strategy.group
    firsts = [first + member for first in range(0, problem.devices, group) for member in range(heads)]
    return [list(range(first, first + group, heads)) for first in firsts]


def send(problem: Problem, x: Any, ring: Ring, places: int) -> Any:
    """Pass a pytree `places` on along a ring."""
    group = problem.strategy.group
    pairs = [(i, ring.shift(i // group, places) * group + i % group) for i in range(problem.devices)]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, problem.axis_name, pairs), x)

"""Exchanges: communication among devices, inside `shard_map`.

`to_heads` and `from_heads` are all-to-all exchanges of heads for tokens; `gather` is the all-gather of keys and values,
`scatter` the reduce-scatter of their gradients; `send` passes either on along the ring. Arrays are
[batch, slots, heads, ...] and stay sorted by position.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from striped_attention.core.mask import Mask
from striped_attention.runtime.sharding import in_mesh_order
from striped_attention.strategies.hops import Ring
from striped_attention.strategies.problem import Problem

KEYS = "attention_keys"  # the name scope of gathers and scatters in compiled programs


def to_heads(problem: Problem, q: Array, k: Array, v: Array, mask: Mask, bias: Any, sinks: Any) -> Any:
    """Return all tokens of a group of neighbours, for this device's share of the heads. The mask has no heads."""
    copies = problem.strategy.key_copies(q.shape[2], k.shape[2])
    k, v = (x if copies == 1 else jnp.repeat(x, copies, axis=2) for x in (k, v))
    where, slots = _neighbours(problem), problem.padded_length
    trade = lambda x, slots: _join(problem, _trade.bind(x, split=2, concat=1, **where), slots)  # noqa: E731
    q, k, v = trade(q, slots), *(trade(x, problem.keys.padded_length) for x in (k, v))
    together = lambda x: lax.all_gather(x, axis=1, tiled=True, **where)  # noqa: E731
    mask = jax.tree.map(lambda x: _join(problem, together(x), slots), mask)
    member = lax.rem(lax.axis_index(problem.axis_name), np.int32(problem.strategy.heads))
    mine = lambda x: lax.dynamic_slice_in_dim(x, member * q.shape[2], q.shape[2])  # noqa: E731
    return q, k, v, mask, *jax.tree.map(mine, (bias, sinks))


def from_heads(problem: Problem, out: Array) -> Array:
    """Return all heads, for this device's own tokens: the inverse of `to_heads`."""
    out = problem.layout.split(out, problem.strategy.heads, problem.padded_length, problem.devices)
    return _trade.bind(out, split=1, concat=2, **_neighbours(problem))


def _join(problem: Problem, x: Array, padded_length: int) -> Array:
    return problem.layout.join(x, problem.strategy.heads, padded_length, problem.devices)


def _neighbours(problem: Problem) -> dict[str, Any]:
    """Return the groups of devices that exchange heads for tokens, as arguments of collectives."""
    heads = problem.strategy.heads
    return _groups(problem, [range(first, first + heads) for first in range(0, problem.devices, heads)])


def _gatherers(problem: Problem) -> dict[str, Any]:
    """Return the groups of devices that gather keys: devices of neighbouring groups that have the same heads."""
    heads, group = problem.strategy.heads, problem.strategy.group
    firsts = [first + member for first in range(0, problem.devices, group) for member in range(heads)]
    return _groups(problem, [range(first, first + group, heads) for first in firsts])


def _groups(problem: Problem, groups: list[range]) -> dict[str, Any]:
    name, numbers = in_mesh_order(problem.axis_name)
    number = (lambda device: device) if numbers is None else numbers.__getitem__
    return dict(axis_name=name, axis_index_groups=tuple(tuple(map(number, group)) for group in groups))


# `lax.all_to_all` among groups of devices, for which JAX has no batching rule (`vmap`).
_trade = Primitive("attention_trade")


def _all_to_all(x: Array, *, split: int, concat: int, **where: Any) -> Array:
    """Exchange along the leading axis, with one transposition before or after. Along inner axes XLA makes two."""
    size = len(where["axis_index_groups"][0])
    shape = (*x.shape[:split], size, x.shape[split] // size, *x.shape[split + 1 :])
    pieces = lax.all_to_all(jnp.moveaxis(x.reshape(shape), split, 0), split_axis=0, concat_axis=0, **where)
    together = jnp.moveaxis(pieces, 0, concat)
    return together.reshape(*together.shape[:concat], -1, *together.shape[concat + 2 :])


def _traded(x: Any, *, split: int, concat: int, axis_index_groups: Any, **_: Any) -> Any:
    """Return the shape and dtype of the result."""
    size, shape = len(axis_index_groups[0]), list(x.shape)
    shape[split] //= size
    shape[concat] *= size
    return x.update(shape=tuple(shape), weak_type=False)


def _trade_back(dout: Array, _: Any, *, split: int, concat: int, **where: Any) -> list[Array]:
    return [_trade.bind(dout, split=concat, concat=split, **where)]


def _trade_all(arrays: Any, dims: Any, *, split: int, concat: int, **where: Any) -> tuple[Array, int]:
    (x,), (dim,) = arrays, dims
    return _trade.bind(x, split=split + (dim <= split), concat=concat + (dim <= concat), **where), dim


_trade.def_abstract_eval(_traded)
mlir.register_lowering(_trade, mlir.lower_fun(_all_to_all, multiple_results=False))
ad.deflinear2(_trade, _trade_back)
batching.primitive_batchers[_trade] = _trade_all


@jax.named_scope(KEYS)
def gather(problem: Problem, x: Any) -> Any:
    """Gather x, which belongs to keys, from all devices of this device's gathering group."""
    if problem.strategy.gather == 1:
        return x
    size = (problem.strategy.gather, problem.keys.padded_length, problem.query_devices)

    def one(leaf: Array) -> Array:
        together = lax.all_gather(leaf, axis=1, tiled=True, **_gatherers(problem))
        return problem.query_layout.join(together, *size)

    return jax.tree.map(one, x)


@jax.named_scope(KEYS)
def scatter(problem: Problem, x: Any) -> Any:
    """Sum x over the devices of a gathering group; return the part of this device's keys: the transpose of `gather`."""
    if problem.strategy.gather == 1:
        return x
    size = (problem.strategy.gather, problem.keys.padded_length, problem.query_devices)

    def one(leaf: Array) -> Array:
        apart = problem.query_layout.split(leaf, *size)
        total = lax.psum_scatter(apart, scatter_dimension=1, tiled=True, **_gatherers(problem))
        # If this sum is then rounded to the dtype of k and v, XLA for TPUs would round its summands too. This identity
        # prevents that.
        exact = jnp.finfo(total.dtype)
        return lax.reduce_precision(total, exact.nexp, exact.nmant)

    return jax.tree.map(one, x)


def send(problem: Problem, x: Any, ring: Ring, places: int) -> Any:
    """Send a pytree `places` places further along a ring."""
    group = problem.strategy.group
    pairs = [(i, ring.shift(i // group, places) * group + i % group) for i in range(problem.devices)]
    name, numbers = in_mesh_order(problem.axis_name)
    if numbers is not None:
        pairs = [(numbers[source], numbers[target]) for source, target in pairs]
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, name, pairs), x)

"""Pipeline: transfers of keys and values, and of their gradients, that overlap with attention to other keys.

Keys that travel a ring may also have to be gathered, one group of heads after another. A device then holds its own
shard and the gathered keys of the first group; every other group is gathered during attention to the group before it.
The gradients of gathered keys are scattered in the same way, those of the last group while the next step computes.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from striped_attention.strategies import exchange
from striped_attention.strategies.head_groups import Heads
from striped_attention.strategies.problem import Problem


class Keys(NamedTuple):
    """Keys and values: the shard that travels, and the first group of heads if it has already been gathered."""

    part: Any
    first: Any = None


class Sums(NamedTuple):
    """Gradients of keys and values, and those of the last group of heads, not yet scattered and added."""

    total: Any
    pending: Any = None


def hold(problem: Problem, groups: list[Heads], part: Any) -> Keys:
    """Return a shard of the keys, ready for attention to its first group of heads."""
    return Keys(part, None if problem.strategy.gather == 1 else exchange.gather(problem, groups[0].of_keys(part)))


def gathered(
    problem: Problem,
    groups: list[Heads],
    keys: Keys,
    computed: Callable[[int], Array],
    settled: Callable[[int], Array],
) -> Iterator[tuple[Heads, Any]]:
    """Yield groups of heads and their keys. While the caller computes one group, the next is gathered.

    The computation of group i waits for `computed(i - 1)`, and its gather for `settled(i - 2)`, which may be the result
    of a transfer. So transfers run one after another, and only two groups are in memory at a time.
    """
    following = exchange.gather(problem, groups[0].of_keys(keys.part)) if keys.first is None else keys.first
    for i, heads in enumerate(groups):
        some = following if i == 0 else after(following, computed(i - 1))
        if i + 1 < len(groups):
            part = groups[i + 1].of_keys(keys.part)
            following = exchange.gather(problem, part if i == 0 else after(part, settled(i - 1)))
        yield heads, some


def settle(problem: Problem, sums: Sums) -> Any:
    """Return the gradients of keys and values, after scattering and adding those that are pending."""
    if sums.pending is None:
        return sums.total

    def one(x: Array, last: Array) -> Array:
        first = x.shape[2] - last.shape[2]
        return jnp.concatenate([x[:, :, :first], x[:, :, first:] + last], axis=2)

    return jax.tree.map(one, sums.total, exchange.scatter(problem, sums.pending))


class Run(NamedTuple):
    """Steps of a ring that form one loop: at each of `offsets`, keys came by a hop of `came` and leave by `places`."""

    offsets: np.ndarray
    places: int
    came: int | None


def runs(offsets: tuple[int, ...], came: int | None = None) -> list[Run]:
    """Group the steps at all offsets but the last, where the hops end, by the hops they make."""
    hops = [b - a for a, b in itertools.pairwise(offsets)]
    steps = zip(offsets, hops, [came, *hops], strict=False)
    return [
        Run(np.array([offset for offset, _, _ in run], np.int32), places, came)
        for (places, came), run in itertools.groupby(steps, key=lambda s: s[1:])
    ]


def add(a: Any, b: Any) -> Any:
    """Add two pytrees; None counts as zero."""
    return b if a is None else a if b is None else jax.tree.map(jnp.add, a, b)


def after(keys: Any, result: Array) -> Any:
    """Return the same keys, made available only after `result` has been computed.

    Otherwise the compiler may send keys all the way round before it computes anything, and most transfers have no
    computation to overlap with. It drops `lax.optimization_barrier` before scheduling. So one element of the keys,
    chosen by the result, is overwritten with itself: in place, at no cost.
    """
    which = (result[(0,) * result.ndim] > 0).astype(jnp.int32)

    def one(x: Array) -> Array:
        index = [which if dim == 1 else jnp.zeros_like(which) for dim in range(x.ndim)]
        return lax.dynamic_update_slice(x, lax.dynamic_slice(x, index, [1] * x.ndim), index)

    return jax.tree.map(one, keys)

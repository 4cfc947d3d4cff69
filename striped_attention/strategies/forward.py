"""Forward pass: attention of this device's queries to keys that travel the rings.

    each step   send the keys on
                attend(q, keys)
                merge into the result

A step sends first, so transfer and computation overlap. The device's own block comes first: it needs no hop, and the
first hop overlaps with it. In a double ring, a step of the outer ring is a whole round of the inner ring.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from striped_attention.core.partial import Partial, merge
from striped_attention.kernels.contract import Block
from striped_attention.strategies import exchange
from striped_attention.strategies.head_groups import Heads
from striped_attention.strategies.hops import Ring
from striped_attention.strategies.pipeline import Keys, after, gathered, hold, runs
from striped_attention.strategies.problem import Problem

Attend = Callable[..., Partial]  # (keys, *offsets in the outer rings)


def attend_rings(
    problem: Problem, rings: tuple[Ring, ...], groups: list[Heads], q: Array, block: Callable[..., Block]
) -> Attend:
    """Return attention to all keys of the rings, the outer one first. `groups` are gathered one after another."""
    if not rings:
        return _attend_block(problem, groups, q, block)
    ring, deeper = rings[0], attend_rings(problem, rings[1:], groups, q, block)
    hops = [b - a for a, b in itertools.pairwise(ring.offsets)]

    def attend(keys: Keys, *outer: Any) -> Partial:
        def step(carry: Any, offset: Any, places: int) -> Any:
            keys, result = carry
            sent = hold(problem, groups, exchange.send(problem, keys.part, ring, places))
            part = deeper(keys, *outer, offset)
            return (after(sent, part.lse), part if result is None else merge(result, part)), None

        if not hops:
            return deeper(keys, *outer, 0)
        carry, _ = step((keys, None), 0, hops[0])
        for run in runs(ring.offsets[1:]):
            carry, _ = lax.scan(functools.partial(step, places=run.places), carry, run.offsets)
        keys, result = carry
        return merge(result, deeper(keys, *outer, ring.offsets[-1]))

    return attend


def _attend_block(problem: Problem, groups: list[Heads], q: Array, block: Callable[..., Block]) -> Attend:
    """Return attention to the keys at one place in the rings, one group of heads after another."""
    kernels = [problem.kernel.attend(q[:, :, heads.queries]) for heads in groups]

    def attend(keys: Keys, *offsets: Any) -> Partial:
        here = block(*offsets)
        parts: list[Partial] = []
        done = lambda i: parts[i].lse  # noqa: E731
        for kernel, (heads, some) in zip(kernels, gathered(problem, groups, keys, done, done), strict=True):
            parts.append(kernel(*some, heads.of_block(here)))
        return parts[0] if len(parts) == 1 else Partial(*(jnp.concatenate(x, axis=2) for x in zip(*parts, strict=True)))

    return attend

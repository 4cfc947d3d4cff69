"""Backward pass: gradients of this device's queries, and of the keys and values that travel the rings.

    each step   send the keys on; receive the sums of dk and dv
                attend_grad(q, keys)
                add to the sums

The sums of dk and dv follow their keys around the ring, one step behind, and make as many hops. A device's own block
needs no hop, so it overlaps with two transfers: half of its heads are computed first, while the first keys arrive, and
the other half last, while the sums travel home. Sums are float32; keys and values travel in their own dtype, key heads
only.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from striped_attention.kernels.contract import Block
from striped_attention.strategies import exchange
from striped_attention.strategies.head_groups import MOST, Heads, halves, join_bias, join_heads, split_heads
from striped_attention.strategies.hops import Ring
from striped_attention.strategies.pipeline import Keys, Sums, add, after, gathered, hold, runs, settle
from striped_attention.strategies.problem import Problem

Gradients = Callable[..., tuple[Any, Sums]]  # (keys, *offsets in the outer rings) -> (dq, dbias), sums of dk and dv


class Rows(NamedTuple):
    """The arrays that belong to this device's queries."""

    q: Array
    out: Array
    lse: Array
    dout: Array
    dlse: Array | None = None

    def of(self, heads: Heads) -> "Rows":
        return jax.tree.map(lambda x: x[:, :, heads.queries], self)


def gradients_of_rings(
    problem: Problem, rings: tuple[Ring, ...], groups: list[Heads], rows: Rows, block: Callable[..., Block]
) -> Gradients:
    """Return the gradients over all keys of the rings, the outer one first. `groups` are gathered one after another."""
    if not rings:
        return _gradients_of_block(problem, groups, rows, block)
    ring = rings[0]
    deeper = gradients_of_rings(problem, rings[1:], groups, rows, block)
    hops = [b - a for a, b in itertools.pairwise(ring.offsets)]
    second = hops[1] if hops[1:] else None

    def step(carry: Any, offset: Any, places: int | None, came: int | None, outer: Any) -> Any:
        keys, stay, travel = carry
        sent = None if places is None else hold(problem, groups, exchange.send(problem, keys.part, ring, places))
        arrived = None if came is None else exchange.send(problem, settle(problem, travel), ring, came)
        mine, sums = deeper(keys, *outer, offset)
        sent = None if sent is None else after(sent, mine[0])
        if problem.kernel.SUMS_LAST and sent is not None and arrived is not None:
            sums = after(sums, sent.part[0])
        return sent, add(stay, mine), Sums(add(arrived, sums.total), sums.pending)

    def gradients(keys: Keys, *outer: Any) -> tuple[Any, Sums]:
        if not hops:
            return deeper(keys, *outer, 0)
        parts = [functools.partial(deeper, keys)] if rings[1:] else _halves(problem, rows, keys.part, block)
        first = hold(problem, groups, exchange.send(problem, keys.part, ring, hops[0]))
        own = [part(*outer, 0) for part in parts[:-1]]
        first = functools.reduce(after, (dq for (dq, _), _ in own), first)
        carry = step((first, None, None), ring.offsets[1], second, None, outer)
        for run in runs(ring.offsets[2:], came=second):
            body = lambda carry, offset, run=run: (step(carry, offset, run.places, run.came, outer), None)  # noqa: E731
            carry, _ = lax.scan(body, carry, run.offsets)
        if second is not None:
            carry = step(carry, ring.offsets[-1], None, hops[-1], outer)
        _, stay, travel = carry
        home = exchange.send(problem, settle(problem, travel), ring, ring.size - ring.offsets[-1])
        own.append(parts[-1](*outer, 0))
        mine, sums = _join(problem, own, keys.part[0].shape[2])
        return add(stay, mine), Sums(add(home, sums))

    return gradients


def _halves(
    problem: Problem, rows: Rows, part: Any, block: Callable[..., Block]
) -> list[Callable[..., tuple[Any, Sums]]]:
    """Return functions for the gradients over a device's own keys, one for each part that `halves` returns."""

    def own(half: Heads) -> Callable[..., tuple[Any, Sums]]:
        some, mine = half.of_keys(part), rows.of(half)
        groups = split_heads(problem.strategy.gather, mine.q.shape[2], some[0].shape[2], MOST // 2)
        gradients = _gradients_of_block(problem, groups, mine, lambda *offsets: half.of_block(block(*offsets)))
        return lambda *offsets: gradients(Keys(some), *offsets)

    return [own(half) for half in halves(problem.strategy.gather, rows.q.shape[2], part[0].shape[2])]


def _join(problem: Problem, parts: list[tuple[Any, Sums]], kv_heads: int) -> tuple[Any, Any]:
    """Combine the gradients of the parts of the heads. A single key head belongs to both, so its sums are added."""
    found = [settle(problem, sums) for _, sums in parts]
    sums = functools.reduce(add, found) if kv_heads == 1 else join_heads(found)
    dq, dbias = zip(*(mine for mine, _ in parts), strict=True)
    return (join_heads(dq), join_bias(dbias)), sums


def _gradients_of_block(problem: Problem, groups: list[Heads], rows: Rows, block: Callable[..., Block]) -> Gradients:
    """Return the gradients over the keys at one place in the rings, one group of heads after another."""
    kernels = [problem.kernel.attend_grad(*rows.of(heads)) for heads in groups]
    together = problem.strategy.gather > 1

    def gradients(keys: Keys, *offsets: Any) -> tuple[Any, Sums]:
        here, mine = block(*offsets), []
        computed: list[Any] = []
        sums: list[Any] = []
        steps = gathered(problem, groups, keys, lambda i: computed[i][0], lambda i: sums[i][0])
        for kernel, (heads, some) in zip(kernels, steps, strict=True):
            dq, dk, dv, dbias = kernel(*some, heads.of_block(here))
            mine.append((dq, dbias))
            computed.append((dk, dv))
            if together and len(computed) < len(groups):
                sums.append(exchange.scatter(problem, (dk, dv)))
        queries, biases = zip(*mine, strict=True)
        found = join_heads(queries), join_bias(biases)
        if not together:
            return found, Sums(computed[0])
        last = jax.tree.map(lambda x: jnp.zeros_like(x, dtype=dk.dtype), groups[-1].of_keys(keys.part))
        return found, Sums(join_heads([*sums, last]), computed[-1])

    return gradients

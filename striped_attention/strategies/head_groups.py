"""Head groups: the heads of a block split into groups, so that keys of one can travel while another is computed."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from striped_attention.kernels.contract import Block

MOST = 4  # groups whose keys are gathered one after another


class Heads(NamedTuple):
    """A group of query heads, and the key heads that they see."""

    queries: slice = slice(None)
    keys: slice = slice(None)

    def of_keys(self, kv: Any) -> Any:
        return jax.tree.map(lambda x: x[:, :, self.keys], kv)

    def of_block(self, block: Block) -> Block:
        return dataclasses.replace(block, bias=jax.tree.map(lambda x: x[self.queries], block.bias))


def split_heads(gather: int, heads: int, kv_heads: int, most: int = MOST) -> list[Heads]:
    """Return all heads as one group; if keys are gathered, as at most `most` equal groups of whole key heads."""
    if gather == 1:
        return [Heads()]
    count = max(n for n in range(1, most + 1) if kv_heads % n == 0)
    size, shared = kv_heads // count, heads // kv_heads
    return [
        Heads(slice(first * shared, (first + size) * shared), slice(first, first + size))
        for first in range(0, kv_heads, size)
    ]


def halves(gather: int, heads: int, kv_heads: int) -> list[Heads]:
    """Split all heads into two halves, or return a single head whole. A single key head is seen by both halves.

    If keys are gathered, heads that share a single key head stay whole, so that it is gathered once.
    """
    if heads == 1 or (gather > 1 and kv_heads == 1):
        return [Heads()]
    if kv_heads == 1:
        return [Heads(slice(heads // 2)), Heads(slice(heads // 2, None))]
    half, shared = kv_heads // 2, heads // kv_heads
    return [Heads(slice(half * shared), slice(half)), Heads(slice(half * shared, None), slice(half, None))]


def join_heads(parts: Sequence[Any]) -> Any:
    """Concatenate arrays [batch, slots, heads, …] of groups of heads into arrays of all heads."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *parts)


def join_bias(parts: Sequence[Any]) -> Any:
    """Concatenate the gradients of a bias, [heads, …], of groups of heads."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

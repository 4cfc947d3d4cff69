"""The kernel `hopper`: blocks on NVIDIA Hopper GPUs (H100, H200). The Pallas kernels are in `forward.py` and
`backward.py`.

It takes ranges of keys as they are, so it does all masks, layouts and stripes: tiles that nobody sees are never
fetched, and only those at the edges of ranges are masked. Partial results are float32.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from striped_attention.core.bias import Bias
from striped_attention.core.partial import Partial
from striped_attention.kernels.contract import Block
from striped_attention.kernels.hopper import backward, forward, parts, walk

WIDTH = 64  # heads are widened to a multiple of this


def attend(q: Float[Array, "batch queries heads dim"]) -> Callable[..., Partial]:
    """Forward pass; see `contract.py`."""
    queries = q.shape[1]
    padded = _widen(_whole(q, parts.TILE))

    def run(k: Array, v: Array, block: Block) -> Partial:
        tile_k = _key_tile(k.shape[-1], v.shape[-1])
        bounds = _bounds(block, padded.shape[1])
        items = walk.by_queries(bounds[:, 0], bounds[:, 1], q.shape[0], (parts.TILE, tile_k))
        keys, values = (_widen(_whole(x, tile_k)) for x in (k, v))
        out, lse = forward.forward(
            padded, keys, values, items, bounds, *_bias(block, padded, keys), _scores(block), tile_k
        )
        return Partial(out[:, :queries, :, : v.shape[-1]], jnp.swapaxes(lse, 1, 2)[:, :queries])

    return run


def attend_grad(
    q: Float[Array, "batch queries heads dim"],
    out: Float[Array, "batch queries heads dim"],
    lse: Float[Array, "batch queries heads"],
    dout: Float[Array, "batch queries heads dim"],
) -> Callable[..., tuple[Array, Array, Array, Bias | None]]:
    """Backward pass; see `contract.py`."""
    queries = q.shape[1]
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    powers = jnp.where(jnp.isneginf(lse), 0, lse) * math.log2(math.e)
    stats = _whole(jnp.stack([powers, delta], axis=2), parts.TILE)  # [batch, queries, 2, heads]
    stats = jnp.transpose(stats, (0, 3, 2, 1))
    padded, grads = (_widen(_whole(x.astype(q.dtype), parts.TILE)) for x in (q, dout))

    def run(k: Array, v: Array, block: Block) -> tuple[Array, Array, Array, Bias | None]:
        bounds = _bounds(block, padded.shape[1])
        ranges, tile = (bounds[:, 0], bounds[:, 1]), (parts.TILE, parts.ROWS)
        keys, values = (_widen(_whole(x, parts.TILE)) for x in (k, v))
        arrays = (padded, keys, values, grads, stats)
        rest = (bounds, *_bias(block, padded, keys), _scores(block), parts.ROWS)
        dq, *dslopes = backward.query_grads(*arrays, walk.by_queries(*ranges, q.shape[0], tile), *rest)
        items = walk.by_keys(*ranges, keys.shape[1], q.shape[0], tile[::-1])
        dk, dv = backward.key_grads(*arrays, items, *rest)
        dbias = None if block.bias is None else Bias(slopes=jnp.sum(dslopes[0], axis=(0, 2)))
        dq, dk, dv = dq[:, :queries, :, : q.shape[-1]], dk[:, : k.shape[1]], dv[:, : k.shape[1]]
        return dq, dk[..., : k.shape[-1]], dv[..., : v.shape[-1]], dbias

    return run


def _key_tile(dim: int, value_dim: int) -> int:
    """Keys of a tile of the forward pass: as many as fit in shared memory and registers."""
    return 128 if max(dim, value_dim) <= 128 else 64


def _scores(block: Block) -> parts.Scores:
    return parts.Scores(block.scale, block.softcap)


def _bounds(block: Block, queries: int) -> Array:
    """Start and end of every row, [rows, 2, queries]; rows that were added see nothing."""
    ranges = jnp.stack([block.start, block.end], axis=1).astype(jnp.int32)
    added = queries - ranges.shape[2]
    if added == 0:
        return ranges
    last = jnp.broadcast_to(ranges[:, 1:, -1:], (*ranges.shape[:2], added))
    return jnp.concatenate([ranges, last], axis=2)


def _bias(block: Block, q: Array, k: Array) -> tuple[Any, Any]:
    """Positions of queries and keys, and the slopes of ALiBi; None without a bias."""
    if block.bias is None:
        return None, None
    places = ((block.query_positions, q), (block.key_positions, k))
    padded = [jnp.pad(jnp.asarray(x, jnp.int32), (0, like.shape[1] - x.shape[0])) for x, like in places]
    return tuple(padded), block.bias.slopes.astype(jnp.float32)


def _whole(x: Array, tile: int) -> Array:
    """Zeros up to a whole number of tiles, along the length."""
    return _pad(x, -x.shape[1] % tile, 1)


def _widen(x: Array) -> Array:
    return _pad(x, -x.shape[-1] % WIDTH, x.ndim - 1)


def _pad(x: Array, after: int, axis: int) -> Array:
    if after == 0:
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, after if i == axis else 0, 0) for i in range(x.ndim)])

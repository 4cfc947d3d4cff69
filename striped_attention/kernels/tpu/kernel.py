"""The kernel `pallas_tpu`: attention over blocks on TPUs. The Pallas kernels themselves are in `pallas.py`.

It supports all masks, layouts and stripes, because it runs exactly the tiles that the key ranges need. Arrays are
passed with heads first; sequences with different masks are processed one after another.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from striped_attention.core.bias import Bias
from striped_attention.core.partial import Partial
from striped_attention.kernels.contract import Block, Request
from striped_attention.kernels.rates import Rate, Rates
from striped_attention.kernels.tpu.tile_list import MOST
from striped_attention.runtime.sharding import current_device

AUTOMATIC = True
FULL_OUT = True
SUMS_LAST = True
DIFFERENTIABLE = False
attend_whole = None
_DTYPES = ("bfloat16", "float32")
LANES = 128  # sides of tiles must be multiples of this
_LIST = 250_000  # tiles whose list fits in a TPU's scalar memory, 1 MiB


class _Chip(NamedTuple):
    """Settings for a generation of TPUs: queries × keys of a tile, and bytes of vector memory that may be used.

    None means the compiler's default.
    """

    tile: tuple[int, int]
    memory: int | None


# A core has 16 MiB of vector memory on older chips, at least 64 MiB on newer ones.
_SMALL, _LARGE = _Chip((512, 1024), None), _Chip((1024, 1024), 48 * 2**20)
_CHIPS = {"tpu v2": _SMALL, "tpu v3": _SMALL, "tpu v4": _SMALL}
# Not measured on a TPU; other fused kernels reach about this fraction of a chip's peak.
# Bytes per query element are counted: a step of a ring writes a float32 partial result and merges it into another.
RATES = {"tpu": Rates(Rate(0.5, 16.0), Rate(0.5, 16.0), "assumed, not measured", lanes=128)}


def default_tile(request: Request) -> tuple[int, int]:
    """Return the default queries × keys of a tile."""
    return _tile_of(_CHIPS.get(request.device_kind.lower(), _LARGE), request.dim)


def _tile_of(chip: _Chip, dim: int) -> tuple[int, int]:
    queries, keys = chip.tile
    return (queries, keys) if dim <= 128 else (queries, min(queries, keys))


def unsupported(request: Request) -> str | None:
    """Return why this kernel cannot run the request, as a sentence; None if it can."""
    if request.dtype not in _DTYPES:
        return f"It computes in {' or '.join(_DTYPES)}; the queries are {request.dtype}."
    if request.value_dim != request.dim:
        return f"It needs values as wide as keys; got {request.value_dim} and {request.dim}."
    if request.dim > 256:
        return f"It needs a head dimension of at most 256; got {request.dim}."
    if request.bias == "values":
        return "It supports only alibi, not a bias table as made by relative_bias."
    if request.tile is not None and any(n % LANES for n in request.tile):
        return f"It needs tiles whose sides are multiples of {LANES}; got {request.tile}."
    sides = request.tile or _tile_of(_SMALL, request.dim)  # the smallest default; newer chips use larger tiles
    sizes = [-(-n // side) for n, side in zip((request.queries, request.keys), sides, strict=True)]
    if math.prod(sizes) > _LIST or max(sizes) > MOST:
        return f"It lists at most {_LIST:,} tiles; {request.queries:,} queries with tiles of {sides} need more."
    return None


def attend(q: Float[Array, "batch queries heads dim"]) -> Callable[..., Partial]:
    """Forward pass; see `contract.py`."""
    q = _heads_first(q)

    def run(k: Array, v: Array, block: Block) -> Partial:
        out, lse = _each_mask("forward", (q,), _heads_first((k, v)), block)
        return Partial(jnp.moveaxis(out, 3, 1), _heads_first(lse))

    return run


def attend_grad(
    q: Float[Array, "batch queries heads dim"],
    out: Float[Array, "batch queries heads dim"],
    lse: Float[Array, "batch queries heads"],
    dout: Float[Array, "batch queries heads dim"],
    dlse: Float[Array, "batch queries heads"] | None = None,
) -> Callable[..., tuple[Array, Array, Array, Bias | None]]:
    """Backward pass; see `contract.py`."""
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    delta = delta if dlse is None else delta - dlse.astype(jnp.float32)
    lse = jnp.where(jnp.isneginf(lse), 0, lse)
    rows = _heads_first((q, dout.astype(q.dtype), lse, delta))

    def run(k: Array, v: Array, block: Block) -> tuple[Array, Array, Array, Bias | None]:
        dq, dk, dv, dslopes = _each_mask("backward", rows, _heads_first((k, v)), block)
        dbias = None if block.bias is None else Bias(slopes=jnp.sum(dslopes, axis=0).reshape(-1))
        return jnp.moveaxis(dq, 3, 1), *_heads_first((dk, dv)), dbias

    return run


def _heads_first(arrays: Any) -> Any:
    """[batch, length, heads, ...] to [batch, heads, length, ...] and back."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), arrays)


def _each_mask(name: str, rows: Any, kv: Any, block: Block) -> Any:
    """Run a pass over all sequences at once if they share a mask, otherwise one after another."""
    from striped_attention.kernels.tpu import pallas

    chip = _CHIPS.get(current_device()[1].lower(), _LARGE)
    run = functools.partial(getattr(pallas, name), memory=chip.memory)
    tile = block.tile or _tile_of(chip, kv[0].shape[-1])
    # No larger than the block, rounded up to a multiple of LANES.
    tile_q, tile_k = (min(t, -(-x.shape[2] // LANES) * LANES) for t, x in zip(tile, (rows[0], kv[0]), strict=True))
    block = dataclasses.replace(block, pattern=None, tile=(tile_q, tile_k))
    if len(block.start) == 1:
        return run(*rows, *kv, block)

    def one(args: Any) -> Any:
        arrays, start, end = args
        own = dataclasses.replace(block, start=start[None], end=end[None])
        return jax.tree.map(lambda x: x[0], run(*(x[None] for x in arrays), own))

    return lax.map(one, ((*rows, *kv), block.start, block.end))

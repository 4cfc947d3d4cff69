"""The kernel `hopper`: attention over blocks on NVIDIA Hopper GPUs (H100, H200).

The Pallas kernels are in `forward.py`, `backward.py` and `one_pass.py`. They accept key ranges directly, so all masks,
layouts and stripes are supported: hidden tiles are never fetched, and only tiles at the edges of ranges are masked.
Partial results are float32.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from striped_attention.core.bias import Bias
from striped_attention.core.partial import Partial
from striped_attention.kernels.contract import Block, Request, Whole
from striped_attention.kernels.hopper import walk
from striped_attention.kernels.hopper.walk import ROWS, TILE
from striped_attention.kernels.rates import Rate, Rates

AUTOMATIC = True
FULL_OUT = True
SUMS_LAST = False
DIFFERENTIABLE = False
DTYPES = ["bfloat16", "float16"]
_REGISTERS = 256  # columns of dk and dv that a warpgroup can accumulate at once
_SHARED = 384  # columns of keys and values of which two tiles fit in shared memory beside those of queries
WIDTH = 64  # head dimensions are padded to a multiple of this
# Fitted to benchmarks/results/gpu_strategies_*.json, by least squares of relative errors; a test repeats the fit. These
# strategies run in a single step. What a ring's steps take in addition is assumed, to be as much as with `cudnn`.
RATES = {
    "gpu": Rates(
        forward=Rate(efficiency=0.627, query_bytes=23.4, seconds=42e-6, merging=78.6e-6),
        backward=Rate(efficiency=0.510, query_bytes=73.6, merging=81.9e-6),
        known="measured on an H200 in single steps",
        lanes=WIDTH,
    )
}
KINDS = ["H20", "H100", "H200", "H800", "GH200"]  # words in a device's name; all have compute capability 9.0
_BROKEN = range(12080, 12091)  # CUDA versions whose ptxas miscompiles masked attention; JAX's own kernel rejects them


def default_tile(request: Request) -> tuple[int, int]:
    """Return queries × keys of a tile of the forward pass."""
    return (TILE, _key_tile(request.dim, request.value_dim))


def unsupported(request: Request) -> str | None:
    """Return why this kernel cannot run the request, as a sentence; None if it can."""
    if request.device_kind and not set(re.findall(r"\w+", request.device_kind.upper())) & set(KINDS):
        return f"It runs on GPUs of compute capability 9.0, e.g. an H100 or H200; this is a {request.device_kind}."
    if request.dtype not in DTYPES:
        return f"It computes in {' or '.join(DTYPES)}; the queries are {request.dtype}."
    if (dim := max(request.dim, request.value_dim)) > 256:
        return f"It needs a head dimension of at most 256; got {dim}."
    if request.bias == "values":
        return "It supports only alibi, not a bias table as made by relative_bias."
    if request.tile is not None:
        return "It always uses its own tile size: leave out tile."
    return _unavailable() if request.here else None


@functools.cache
def _unavailable() -> str | None:
    """Return why the kernel cannot be compiled here, as a sentence; None if it can."""
    from jax._src.lib import cuda_versions  # None without CUDA

    if cuda_versions is not None and cuda_versions.cuda_runtime_get_version() in _BROKEN:
        return "CUDA 12.8 to 12.9.0 miscompiles its masks: use CUDA 12.9.1 or newer."
    try:
        import jax.experimental.pallas.mosaic_gpu  # noqa: F401  JAX 0.10 needs absl-py for it, but does not install it
    except ImportError as error:
        return f"It needs a package that cannot be imported ({error}): pip install absl-py."
    return None


def attend(q: Float[Array, "batch queries heads dim"]) -> Callable[..., Partial]:
    """Forward pass; see `contract.py`."""
    run = _attend(q)

    def attend(k: Array, v: Array, block: Block) -> Partial:
        (out,), lse = run(k, v, block, (jnp.float32,))
        return Partial(out, lse)

    return attend


def attend_whole(q: Float[Array, "batch queries heads dim"]) -> Callable[..., Whole]:
    """Forward pass over all keys at once; see `contract.py`."""
    run = _attend(q)

    def attend(k: Array, v: Array, block: Block, keep: bool) -> Whole:
        (out, *lost), lse = run(k, v, block, (q.dtype,) * (1 + keep))
        return Whole(out, lost[0] if lost else None, lse)

    return attend


def _attend(q: Float[Array, "batch queries heads dim"]) -> Callable[..., tuple[list[Array], Array]]:
    from striped_attention.kernels.hopper import forward

    queries = q.shape[1]
    padded = _widen(_to_tiles(q, TILE))

    def run(k: Array, v: Array, block: Block, dtypes: tuple[Any, ...]) -> tuple[list[Array], Array]:
        tile_k = _key_tile(k.shape[-1], v.shape[-1])
        bounds = _bounds(block, padded.shape[1])
        items = walk.by_queries(bounds[:, 0], bounds[:, 1], q.shape[0], (TILE, tile_k))
        keys, values = (_widen(_to_tiles(x, tile_k)) for x in (k, v))
        places, slopes = _bias(block, padded, keys)
        out, lse = forward.forward(padded, keys, values, items, bounds, places, slopes, _scores(block), tile_k, dtypes)
        return [x[:, :queries, :, : v.shape[-1]] for x in out], jnp.swapaxes(lse, 1, 2)[:, :queries]

    return run


def attend_grad(
    q: Float[Array, "batch queries heads dim"],
    out: Float[Array, "batch queries heads value_dim"],
    lse: Float[Array, "batch queries heads"],
    dout: Float[Array, "batch queries heads value_dim"],
    dlse: Float[Array, "batch queries heads"] | None = None,
) -> Callable[..., tuple[Array, Array, Array, Bias | None]]:
    """Backward pass; see `contract.py`."""
    from striped_attention.kernels.hopper import backward, one_pass, parts

    queries = q.shape[1]
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    delta = delta if dlse is None else delta - dlse.astype(jnp.float32)
    powers = jnp.where(jnp.isneginf(lse), 0, lse) * math.log2(math.e)
    stats = _to_tiles(jnp.stack([powers, delta], axis=2), TILE)  # [batch, queries, 2, heads]
    stats = jnp.transpose(stats, (0, 3, 2, 1))
    padded, grads = (_widen(_to_tiles(x.astype(q.dtype), TILE)) for x in (q, dout))

    def run(k: Array, v: Array, block: Block) -> tuple[Array, Array, Array, Bias | None]:
        bounds = _bounds(block, padded.shape[1])
        ranges, tile = (bounds[:, 0], bounds[:, 1]), (TILE, ROWS)
        keys, values = (_widen(_to_tiles(x, TILE)) for x in (k, v))
        arrays = (padded, keys, values, grads, stats)
        items = walk.by_keys(*ranges, keys.shape[1], q.shape[0], tile[::-1])
        dbias, dtype = None, k.dtype if block.whole else jnp.float32
        if _one_pass(block, padded, values) and parts.can_add():
            dq, dk, dv = one_pass.gradients(*arrays, items, bounds, _scores(block), dtype)
        else:
            width = padded.shape[-1] + grads.shape[-1]
            rest = (bounds, *_bias(block, padded, keys), _scores(block), 2 if width <= _SHARED else 1)
            dq, *dslopes = backward.query_grads(*arrays, walk.by_queries(*ranges, q.shape[0], tile), *rest)
            wanted = [("dk", "dv")] if width <= _REGISTERS else [("dk",), ("dv",)]
            dk, dv = (grad for some in wanted for grad in backward.key_grads(*arrays, items, *rest, some, dtype))
            dbias = None if block.bias is None else Bias(slopes=jnp.sum(dslopes[0], axis=(0, 2)))
        dq, dk, dv = dq[:, :queries, :, : q.shape[-1]], dk[:, : k.shape[1]], dv[:, : k.shape[1]]
        return dq, dk[..., : k.shape[-1]], dv[..., : v.shape[-1]], dbias

    return run


def _one_pass(block: Block, q: Array, v: Array) -> bool:
    """Whether one pass may compute all gradients: faster, but not bitwise reproducible, and for one width only."""
    from striped_attention.kernels.hopper import one_pass

    return not block.deterministic and block.bias is None and (q.shape[-1], v.shape[-1]) == (one_pass.WIDTH,) * 2


def _key_tile(dim: int, value_dim: int) -> int:
    """Return the keys per tile of the forward pass: as many as fit in shared memory and registers."""
    return 128 if max(dim, value_dim) <= 128 else 64


def _scores(block: Block) -> Any:
    from striped_attention.kernels.hopper import parts

    return parts.Scores(block.scale, block.softcap)


def _bounds(block: Block, queries: int) -> Array:
    """Return start and end of every query, [rows, 2, queries]; padding queries see no key."""
    ranges = jnp.stack([block.start, block.end], axis=1).astype(jnp.int32)
    added = queries - ranges.shape[2]
    if added == 0:
        return ranges
    last = jnp.broadcast_to(ranges[:, 1:, -1:], (*ranges.shape[:2], added))
    return jnp.concatenate([ranges, last], axis=2)


def _bias(block: Block, q: Array, k: Array) -> tuple[Any, Any]:
    """Return the positions of queries and keys, and the ALiBi slopes; None without a bias."""
    if block.bias is None:
        return None, None
    places = ((block.query_positions, q), (block.key_positions, k))
    padded = [jnp.pad(jnp.asarray(x, jnp.int32), (0, like.shape[1] - x.shape[0])) for x, like in places]
    return tuple(padded), block.bias.slopes.astype(jnp.float32)


def _to_tiles(x: Array, tile: int) -> Array:
    """Pad the length with zeros to a whole number of tiles."""
    return _pad(x, -x.shape[1] % tile, 1)


def _widen(x: Array) -> Array:
    return _pad(x, -x.shape[-1] % WIDTH, x.ndim - 1)


def _pad(x: Array, after: int, axis: int) -> Array:
    if after == 0:
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, after if i == axis else 0, 0) for i in range(x.ndim)])

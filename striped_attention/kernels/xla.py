"""The `xla` kernel: tiled attention in plain JAX. It runs on any platform, supports every option, and is the reference.

Each head is processed by rows of query tiles. A row runs the key tiles that `tile_spans` lists: the inner ones
unmasked, those at the edges masked, the rest not at all. Only one tile of scores is materialised per head.

The forward pass keeps a running maximum and sum per row (online softmax). The backward pass recomputes the
probabilities of a tile from `lse` and works on *transposed* tiles [keys, queries]. Then dk, dv and dqᵀ are matrix
products without a transposed left operand, which XLA's CPU library runs about twice as fast as products with one.

Tiles are computed in float32 (float64 for float64 inputs), whatever the dtype of q, k and v. Accelerators instead
multiply bfloat16 and float16 inputs directly, with probabilities rounded to the same dtype and float32 sums.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from striped_attention.core.bias import Bias
from striped_attention.core.partial import Partial, accumulator
from striped_attention.kernels.contract import Block, Request
from striped_attention.kernels.rates import ANYWHERE, Rate, Rates
from striped_attention.kernels.tiles import Spans, tile_spans

AUTOMATIC = True
FULL_OUT = True
SUMS_LAST = False
DIFFERENTIABLE = True
attend_whole = None
CPU_TILE = (256, 256)  # queries × keys: 256 KiB of float32 scores, which fit in a core's L2 cache
ACCELERATOR_TILE = (1024, 1024)  # fewer, larger steps, because each step launches several kernels
# Fitted to benchmarks/results/gpu_masks_*.json by least squares of relative errors, both passes together; split into
# forward and backward in the ratio measured with 32,768 tokens. Blocks were timed alone, so merges are not included.
_GPU = Rates(
    forward=Rate(efficiency=0.0855, query_bytes=153.0, seconds=330e-6),
    backward=Rate(efficiency=0.117, query_bytes=159.0, seconds=342e-6),
    known="measured on an H200",
)
RATES = {
    "gpu": _GPU,
    "tpu": dataclasses.replace(_GPU, known="assumed equal to an H200, not measured"),
    # Fitted to benchmarks/results/cpu_balance.json and cpu_balance_8192.json in the same way.
    "cpu": Rates(Rate(0.611), Rate(0.738), "measured on one core of an AMD EPYC"),
    ANYWHERE: dataclasses.replace(_GPU, known="assumed equal to an H200, not measured"),
}
_HALF = (jnp.bfloat16, jnp.float16)
_accelerator: bool | None = None  # which code path to use; None: decided by the platform


def default_tile(request: Request) -> tuple[int, int]:
    """Return the default queries × keys of a tile."""
    return CPU_TILE if request.platform == "cpu" else ACCELERATOR_TILE


def unsupported(request: Request) -> None:
    """Return None: this kernel supports every request."""


@contextlib.contextmanager
def _as_on_accelerators() -> Iterator[None]:
    """Use the code path for accelerators on any platform."""
    global _accelerator
    before, _accelerator = _accelerator, True
    try:
        yield
    finally:
        _accelerator = before


EMULATIONS = {"on CPUs": contextlib.nullcontext, "as on accelerators": _as_on_accelerators}


def attend(q: Float[Array, "batch queries heads dim"]) -> Callable[..., Partial]:
    """Forward pass; see `contract.py`."""
    return lambda k, v, block: _attend(q, k, v, _by_ranges(block), accelerator=_accelerator)


def attend_grad(
    q: Float[Array, "batch queries heads dim"],
    out: Float[Array, "batch queries heads value_dim"],
    lse: Float[Array, "batch queries heads"],
    dout: Float[Array, "batch queries heads value_dim"],
    dlse: Float[Array, "batch queries heads"] | None = None,
) -> Callable[..., tuple[Array, Array, Array, Bias | None]]:
    """Backward pass; see `contract.py`."""
    dtype = accumulator(q.dtype)
    delta = jnp.sum(out.astype(dtype) * dout.astype(dtype), axis=-1)
    delta = delta if dlse is None else delta - dlse.astype(dtype)
    return lambda k, v, block: _attend_grad(q, dout, lse, delta, k, v, _by_ranges(block), accelerator=_accelerator)


def _by_ranges(block: Block) -> Block:
    """Drop the block's pattern. Its ranges suffice, and blocks that differ only in their pattern are traced once."""
    return dataclasses.replace(block, pattern=None)


@functools.partial(jax.jit, static_argnames="accelerator")
def _attend(
    q: Float[Array, "batch queries heads dim"],
    k: Float[Array, "batch keys kv_heads dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    block: Block,
    *,
    accelerator: bool | None,
) -> Partial:
    out, lse = _map_heads(_head_forward, q, k, block, (_grouped(q, k), k, v), accelerator)
    return Partial(out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1]))


@functools.partial(jax.jit, static_argnames="accelerator")
def _attend_grad(
    q: Float[Array, "batch queries heads dim"],
    dout: Float[Array, "batch queries heads value_dim"],
    lse: Float[Array, "batch queries heads"],
    delta: Float[Array, "batch queries heads"],
    k: Float[Array, "batch keys kv_heads dim"],
    v: Float[Array, "batch keys kv_heads value_dim"],
    block: Block,
    *,
    accelerator: bool | None,
) -> tuple[Array, Array, Array, Bias | None]:
    arrays = (*(_grouped(x, k) for x in (q, dout, lse, delta)), k, v)
    dq, dk, dv, dbias = _map_heads(_head_backward, q, k, block, arrays, accelerator)
    dbias = jax.tree.map(lambda x: jnp.sum(x, axis=(0, 1)).reshape(-1, *x.shape[4:]), dbias)
    return dq.reshape(q.shape), dk, dv, dbias


def _grouped(x: Array, k: Array) -> Array:
    """[batch, queries, heads, ...] -> [batch, queries, kv_heads, group, ...]."""
    return x.reshape(*x.shape[:2], k.shape[2], -1, *x.shape[3:])


def _map_heads(
    head: Callable[..., Any],
    q: Array,
    k: Array,
    block: Block,
    arrays: tuple[Array, ...],
    accelerator: bool | None,
) -> Any:
    """Run `head(tiles, *arrays, bias, rows)` for every sequence and key head of arrays [batch, n, kv_heads, ...].

    Sequences may have different masks, and so different tile counts: they run one after another. Heads share a mask. A
    CPU processes heads one by one, slicing the arrays and results in their final memory order, which keeps a tile in
    cache and avoids transposed copies; an accelerator processes all heads at once.
    """
    batch, kv_heads = k.shape[0], k.shape[2]
    split = lambda x: x.astype(accumulator(q.dtype)).reshape(kv_heads, -1, *x.shape[1:])  # noqa: E731
    bias = jax.tree.map(split, block.bias)

    def one_by_one(arrays: Any, block: Block) -> Any:
        tiles = _Tiles(q, k, block, accelerator=False)

        def run(i: Any) -> Any:
            sequence, one = i // kv_heads, i % kv_heads
            own = lambda x: _index(_index(x, sequence, 0), one, 1)  # noqa: E731
            head_bias = jax.tree.map(lambda x: _index(x, one, 0), bias)
            rows = jax.tree.map(lambda x: _index(x, sequence, 0), tiles.rows)
            return head(tiles, *map(own, arrays), head_bias, rows)

        def step(i: Any, results: Any) -> Any:
            place = lambda x: (i // kv_heads, 0, i % kv_heads, *[0] * (x.ndim - 3))  # noqa: E731
            put = lambda x, part: lax.dynamic_update_slice(x, part[None, :, None], place(x))  # noqa: E731
            return jax.tree.map(put, results, run(i))

        def blank(x: Any) -> Array:
            return jnp.zeros_like(arrays[0], shape=(batch, x.shape[0], kv_heads, *x.shape[1:]), dtype=x.dtype)

        return lax.fori_loop(0, batch * kv_heads, step, jax.tree.map(blank, jax.eval_shape(run, 0)))

    def all_at_once(arrays: Any, block: Block) -> Any:
        tiles = _Tiles(q, k, block, accelerator=True)

        def sequence(args: Any) -> Any:
            arrays, rows = args
            over_heads = jax.vmap(lambda arrays, bias: head(tiles, *arrays, bias, rows), in_axes=(1, 0), out_axes=1)
            return over_heads(arrays, bias)

        return lax.map(sequence, (arrays, tiles.rows))

    if accelerator is not None:
        return (all_at_once if accelerator else one_by_one)(arrays, block)
    return lax.platform_dependent(arrays, block, cpu=one_by_one, default=all_at_once)


class _Tiles:
    """Tile sizes and compute dtypes of a block, and the conversion of one head's arrays to tiles and back.

    A key head serves a group of query heads. A row of tiles processes `width` of them together: one on a CPU, whose
    cache would not hold more; the whole group on an accelerator.
    """

    def __init__(self, q: Array, k: Array, block: Block, accelerator: bool) -> None:
        self.block = block
        self.dtype = accumulator(q.dtype)
        self.operand = q.dtype if accelerator and q.dtype in _HALF else self.dtype
        batch, self.n_q, heads, self.dim = q.shape
        self.n_k, kv_heads = k.shape[1:3]
        self.group = heads // kv_heads
        self.width = self.group if accelerator else 1
        tile_q, tile_k = block.tile or (ACCELERATOR_TILE if accelerator else CPU_TILE)
        self.tile_q, self.tile_k = min(tile_q, self.n_q), min(tile_k, self.n_k)
        self.tile_rows = -(-self.n_q // self.tile_q)
        self.query_pad = self.tile_rows * self.tile_q - self.n_q
        self.key_pad = -self.n_k % self.tile_k
        edge = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, self.query_pad)], mode="edge")  # noqa: E731
        everyone = lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:]))  # noqa: E731
        spans = tile_spans(block.start, block.end, self.tile_q, self.tile_k)
        self.rows = jax.tree.map(everyone, (edge(block.start), edge(block.end), spans))
        self.query_positions = edge(block.query_positions)
        self.key_positions = jnp.pad(block.key_positions, (0, self.key_pad))

    def queries(self, x: Array, dtype: Any, edge: bool = True) -> Array:
        """[queries, group, ...] of one head -> [rows of tiles * width * tile_q, ...], one row after the other."""
        x = jnp.swapaxes(x.astype(dtype), 0, 1)
        x = jnp.pad(x, [(0, 0), (0, self.query_pad), *[(0, 0)] * (x.ndim - 2)], mode="edge" if edge else "constant")
        x = x.reshape(-1, self.width, self.tile_rows, self.tile_q, *x.shape[2:])
        return jnp.swapaxes(x, 1, 2).reshape(-1, *x.shape[4:])

    def queries_back(self, x: Array) -> Array:
        """The inverse of `queries`."""
        x = jnp.swapaxes(x.reshape(-1, self.tile_rows, self.width, self.tile_q, *x.shape[1:]), 1, 2)
        return jnp.swapaxes(x.reshape(self.group, -1, *x.shape[4:])[:, : self.n_q], 0, 1)

    def keys(self, x: Array) -> Array:
        """[keys, dim] of one head -> [padded keys, dim]; also for values."""
        return jnp.pad(x.astype(self.operand), [(0, self.key_pad), (0, 0)])

    def keys_back(self, x: Array) -> Array:
        """The inverse of `keys`."""
        return x[: self.n_k]

    def row(self, r: Any) -> tuple[Any, Any]:
        """Split index `r` over all rows into the first query head of its group and its row of query tiles."""
        return r // self.tile_rows * self.width, r % self.tile_rows

    def dot(self, a: Array, b: Array) -> Array:
        """Multiply two matrices with float32 sums: 16-bit operands directly, float32 operands in full precision."""
        precision = None if self.operand in _HALF else lax.Precision.HIGHEST
        a, b = a.astype(self.operand), b.astype(self.operand)
        return jnp.dot(a, b, precision=precision, preferred_element_type=self.dtype)


def _logits(tiles: _Tiles, product: Array, bias: Bias | None, key_first: Array, query_first: Array, axis: int) -> Array:
    """Compute a tile's scores from its products q·k: scale, softcap, bias. Queries lie along `axis` of the tile."""
    block = tiles.block
    product = product * block.scale
    if block.softcap is not None:
        product = block.softcap * jnp.tanh(product / block.softcap)
    if bias is not None:
        query = _slice(tiles.query_positions, query_first, tiles.tile_q)
        key = _slice(tiles.key_positions, key_first, tiles.tile_k)
        distance = jnp.expand_dims(key, axis) - jnp.expand_dims(query, 1 - axis)
        product = product + jax.vmap(lambda b: b.at(distance), out_axes=axis)(bias).reshape(product.shape)
    return product


def _visible(tiles: _Tiles, start: Array, end: Array, key_first: Array, axis: int) -> Array:
    """Return which scores of a tile are visible; queries lie along `axis`."""
    start, end = jnp.tile(start, tiles.width), jnp.tile(end, tiles.width)
    slot = jnp.expand_dims(key_first + jnp.arange(tiles.tile_k, dtype=jnp.int32), axis)
    return (jnp.expand_dims(start, 1 - axis) <= slot) & (slot < jnp.expand_dims(end, 1 - axis))


def _each_tile(spans: Spans, step: Callable[[Any, Any, bool], Any], carry: Any) -> Any:
    """Run `step(tile, carry, masked)` on every key tile of a row: first the inner ones, then those at both edges."""
    carry = lax.fori_loop(spans.inner_first, spans.inner_last, lambda j, c: step(j, c, False), carry)
    before = spans.inner_first - spans.first

    def edge(e: Any, c: Any) -> Any:
        return step(jnp.where(e < before, spans.first + e, spans.inner_last + e - before), c, True)

    return lax.fori_loop(jnp.zeros_like(before), before + spans.last - spans.inner_last, edge, carry)


def _head_forward(tiles: _Tiles, q: Array, k: Array, v: Array, bias: Bias | None, rows: Any) -> tuple[Array, Array]:
    start, end, spans = rows
    tile_q, tile_k, high = tiles.tile_q, tiles.tile_k, tiles.width * tiles.tile_q
    q, k, v = tiles.queries(q, tiles.operand), tiles.keys(k), tiles.keys(v)

    def row(r: Any, carry: Any) -> Any:
        out, lse = carry
        member, i = tiles.row(r)
        query = _slice(q, r * high, high)
        row_start, row_end = (_slice(x, i * tile_q, tile_q) for x in (start, end))
        row_bias = jax.tree.map(lambda x: _slice(x, member, tiles.width), bias)

        def step(j: Any, carry: Any, masked: bool) -> Any:
            top, total, acc = carry
            key, value = (_slice(x, j * tile_k, tile_k) for x in (k, v))
            scores = _logits(tiles, tiles.dot(query, key.T), row_bias, j * tile_k, i * tile_q, axis=0)
            if masked:
                scores = jnp.where(_visible(tiles, row_start, row_end, j * tile_k, axis=0), scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            shift = jnp.where(jnp.isneginf(new_top), 0, new_top)  # avoids -inf - -inf in a row that has seen no key yet
            p = jnp.exp(scores - shift[:, None])
            fade = jnp.exp(top - shift)
            return new_top, total * fade + jnp.sum(p, axis=1), acc * fade[:, None] + tiles.dot(p, value)

        blank = lambda *shape: jnp.zeros_like(q, shape=shape, dtype=tiles.dtype)  # noqa: E731
        nothing = blank(high) - jnp.inf, blank(high), blank(high, v.shape[1])
        top, total, acc = _each_tile(jax.tree.map(lambda x: x[i], spans), step, nothing)
        some = jnp.where(total == 0, 1, total)  # the derivative of log(0) would be NaN, even where it is not used
        row_lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(some))
        return _update(out, acc / some[:, None], r * high), _update(lse, row_lse, r * high)

    empty = tuple(jnp.zeros_like(q, shape=(len(q), *n), dtype=tiles.dtype) for n in ((v.shape[1],), ()))
    out, lse = lax.fori_loop(0, q.shape[0] // high, row, empty)
    return tiles.queries_back(out), tiles.queries_back(lse)


def _head_backward(
    tiles: _Tiles, q: Array, dout: Array, lse: Array, delta: Array, k: Array, v: Array, bias: Bias | None, rows: Any
) -> tuple[Array, Array, Array, Bias | None]:
    start, end, spans = rows
    tile_q, tile_k, high = tiles.tile_q, tiles.tile_k, tiles.width * tiles.tile_q
    # Padding rows repeat the last real q and lse, so their probabilities are finite; their dout and delta are 0.
    q, lse = tiles.queries(q, tiles.operand), tiles.queries(lse, tiles.dtype)
    dout, delta = tiles.queries(dout, tiles.operand, edge=False), tiles.queries(delta, tiles.dtype, edge=False)
    k, v = tiles.keys(k), tiles.keys(v)
    k_transposed = k.T

    def row(r: Any, carry: Any) -> Any:
        dq, dk, dv, dbias = carry
        member, i = tiles.row(r)
        query, row_dout, row_lse, row_delta = (_slice(x, r * high, high) for x in (q, dout, lse, delta))
        row_lse = jnp.where(jnp.isneginf(row_lse), 0, row_lse)
        row_start, row_end = (_slice(x, i * tile_q, tile_q) for x in (start, end))
        row_bias = jax.tree.map(lambda x: _slice(x, member, tiles.width), bias)

        def step(j: Any, carry: Any, masked: bool) -> Any:
            dq_transposed, dk, dv, row_dbias = carry
            key, value = (_slice(x, j * tile_k, tile_k) for x in (k, v))
            logits = lambda product, bias: _logits(tiles, product, bias, j * tile_k, i * tile_q, axis=1)  # noqa: E731
            scores, logits_grad = jax.vjp(logits, tiles.dot(key, query.T), row_bias)
            p = jnp.exp(scores - row_lse[None, :])
            if masked:
                p = jnp.where(_visible(tiles, row_start, row_end, j * tile_k, axis=1), p, 0)
            dscores = p * (tiles.dot(value, row_dout.T) - row_delta[None, :])
            dproduct, tile_dbias = logits_grad(dscores)
            return (
                dq_transposed + tiles.dot(_slice(k_transposed, j * tile_k, tile_k, axis=1), dproduct),
                _add(dk, tiles.dot(dproduct, query), j * tile_k),
                _add(dv, tiles.dot(p, row_dout), j * tile_k),
                jax.tree.map(jnp.add, row_dbias, tile_dbias),
            )

        nothing = jnp.zeros_like(dq, shape=(tiles.dim, high)), dk, dv, jax.tree.map(jnp.zeros_like, row_bias)
        dq_transposed, dk, dv, row_dbias = _each_tile(jax.tree.map(lambda x: x[i], spans), step, nothing)
        dbias = jax.tree.map(lambda total, x: _add(total, x, member), dbias, row_dbias)
        return _update(dq, dq_transposed.T, r * high), dk, dv, dbias

    sums = tuple(jnp.zeros_like(x, dtype=tiles.dtype) for x in (q, k, v))
    dq, dk, dv, dbias = lax.fori_loop(0, q.shape[0] // high, row, (*sums, jax.tree.map(jnp.zeros_like, bias)))
    dbias = jax.tree.map(lambda x: x[None], dbias)  # [n, ...] with n = 1, like the other results
    return tiles.queries_back(dq), tiles.keys_back(dk), tiles.keys_back(dv), dbias


def _index(x: Array, i: Any, axis: int) -> Array:
    return lax.dynamic_index_in_dim(x, i, axis, keepdims=False)


def _slice(x: Array, first: Any, size: int, axis: int = 0) -> Array:
    return lax.dynamic_slice_in_dim(x, first, size, axis)


def _update(x: Array, part: Array, first: Any) -> Array:
    return lax.dynamic_update_slice_in_dim(x, part, first, 0)


def _add(x: Array, part: Array, first: Any) -> Array:
    return _update(x, _slice(x, first, part.shape[0]) + part, first)

"""Pallas for TPUs: the forward and backward kernels behind `kernel.py`.

The tiles that `tile_spans` selects are put in a list, and the list is the grid: every grid step is a visible tile, and
the number of steps is known only at run time. A hidden tile therefore costs nothing, neither a copy nor a step. The
list is in scalar memory, where it also selects what to prefetch of q, k and v while the previous tile is computed.
Tiles in which every query sees every key are computed without a mask.

    forward     by rows of tiles: queries stay, keys and values stream     out and lse of a row are written once
    backward    by columns: keys and values stay, queries stream           dk and dv of a column are written once;
                                                                           dq is summed in HBM, tile by tile

The backward pass computes scores once for all three gradients: five matrix products per tile. Tiles of dq move between
HBM and two buffers: while one is computed, the next is copied in and the previous one is copied out.

Tiles of scores are *transposed*, [keys, queries]. Values per query (maximum, sum, range of keys, lse) are then rows,
which TPUs store and broadcast efficiently. Arrays are [batch, heads, length, dim] here; out and dq are returned as
[batch, heads, dim, length]. Sums are float32; bfloat16 inputs are multiplied directly, with bfloat16 probabilities.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from striped_attention.kernels.contract import Block
from striped_attention.kernels.tpu.tile_list import EDGE, INNER, kind_of, list_tiles, outer_of, within_of

_LANES = 128


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Tile sizes of a block, and the parameters of a tile's arithmetic."""

    queries: int
    keys: int
    tile_q: int
    tile_k: int
    group: int
    scale: float
    softcap: float | None
    alibi: bool
    dtype: Any

    @classmethod
    def of(cls, q: Array, k: Array, block: Block) -> "_Tiles":
        assert block.tile is not None
        sizes = (q.shape[2], k.shape[2], *block.tile, q.shape[1] // k.shape[1])
        return cls(*sizes, block.scale, block.softcap, block.bias is not None, q.dtype)

    @property
    def rows(self) -> int:
        return -(-self.queries // self.tile_q)

    @property
    def columns(self) -> int:
        return -(-self.keys // self.tile_k)

    def pad_queries(self, x: Array, axis: int, mode: str = "edge") -> Array:
        return _pad(x, self.rows * self.tile_q, axis, mode)

    def pad_keys(self, x: Array, axis: int) -> Array:
        return _pad(x, self.columns * self.tile_k, axis, "constant")

    def dot(self, a: Array, b: Array, contract: tuple[int, int] = (1, 0)) -> Array:
        """Multiply two matrices over the given dimension of each, with float32 sums."""
        precision = None if self.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
        numbers = (((contract[0],), (contract[1],)), ((), ()))
        a, b = a.astype(self.dtype), b.astype(self.dtype)
        return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)

    def scores(self, key: Array, query: Array, places: "_Places | None") -> tuple[Array, Array | None]:
        """Return the scores [keys, queries] of a tile and, with a softcap, the factor for their gradient."""
        scores = self.dot(key, query, (1, 1)) * self.scale
        slope = None
        if self.softcap is not None:
            bent = jnp.tanh(scores / self.softcap)
            scores, slope = self.softcap * bent, 1 - bent * bent
        if places is not None:
            scores = scores - places.slope * places.distance()
        return scores, slope

    def visible(self, column: Any, start: Array, end: Array) -> Array:
        """Return which scores of a tile are visible."""
        slot = column * self.tile_k + lax.broadcasted_iota(jnp.int32, (self.tile_k, self.tile_q), 0)
        return (start <= slot) & (slot < end)


class _Places(NamedTuple):
    """Positions of a tile's queries and keys, both as rows, and the head's slope: the inputs of ALiBi."""

    queries: Array
    keys: Array
    slope: Any

    def distance(self) -> Array:
        keys = jnp.broadcast_to(self.keys, (_LANES, self.keys.shape[1])).T[:, :1]  # a column
        return jnp.abs(keys - self.queries).astype(jnp.float32)


def _pad(x: Array, size: int, axis: int, mode: str) -> Array:
    missing = size - x.shape[axis]
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], mode=mode) if missing else x


@functools.partial(jax.jit, static_argnames="memory")
def forward(q: Array, k: Array, v: Array, block: Block, *, memory: int | None) -> tuple[Array, Array]:
    """Return `out` [batch, heads, dim, queries] and `lse` [batch, heads, queries]; all sequences share a mask.

    `memory` is the bytes of a core's vector memory that may be used, None for the compiler's default.
    """
    tiles = _Tiles.of(q, k, block)
    batch, heads, _, dim = q.shape
    todo = list_tiles(block, tiles.rows, tiles.columns, by_columns=False)
    ranges = [tiles.pad_queries(x, 1) for x in (block.start, block.end)]
    v = jnp.swapaxes(v, 2, 3)  # so that a product with probabilities [keys, queries] needs no transpose
    arrays = [tiles.pad_queries(q, 2), tiles.pad_keys(k, 2), tiles.pad_keys(v, 3), *ranges]

    row = lambda s, entries: outer_of(entries[s])  # noqa: E731
    column = lambda s, entries: within_of(entries[s])  # noqa: E731
    in_specs = [
        pl.BlockSpec((1, 1, tiles.tile_q, dim), lambda b, h, s, e: (b, h, row(s, e), 0)),
        pl.BlockSpec((1, 1, tiles.tile_k, dim), lambda b, h, s, e: (b, lax.div(h, tiles.group), column(s, e), 0)),
        pl.BlockSpec((1, 1, dim, tiles.tile_k), lambda b, h, s, e: (b, lax.div(h, tiles.group), 0, column(s, e))),
        *[pl.BlockSpec((1, tiles.tile_q), lambda b, h, s, e: (0, row(s, e)))] * 2,
    ]
    if tiles.alibi:
        arrays += _alibi_arrays(tiles, block)
        in_specs += [
            pl.BlockSpec((1, tiles.tile_q), lambda b, h, s, e: (0, row(s, e))),
            pl.BlockSpec((1, tiles.tile_k), lambda b, h, s, e: (0, column(s, e))),
            pl.BlockSpec(memory_space=pltpu.SMEM),
        ]
    out, lse = pl.pallas_call(
        functools.partial(_forward_step, tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, todo.steps),
            in_specs=in_specs,
            out_specs=[
                pl.BlockSpec((1, 1, dim, tiles.tile_q), lambda b, h, s, e: (b, h, 0, row(s, e))),
                pl.BlockSpec((1, 1, 1, tiles.tile_q), lambda b, h, s, e: (b, h, 0, row(s, e))),
            ],
            scratch_shapes=[
                pltpu.VMEM((1, tiles.tile_q), jnp.float32),
                pltpu.VMEM((1, tiles.tile_q), jnp.float32),
                pltpu.VMEM((dim, tiles.tile_q), jnp.float32),
            ],
        ),
        out_shape=[
            _float32((batch, heads, dim, tiles.rows * tiles.tile_q), q),
            _float32((batch, heads, 1, tiles.rows * tiles.tile_q), q),
        ],
        compiler_params=_parameters(3, memory),
        cost_estimate=_cost(2, q, k),
        name="striped_attention_forward",
    )(todo.entries, *arrays)
    return out[..., : tiles.queries], lse[:, :, 0, : tiles.queries]


def _alibi_arrays(tiles: _Tiles, block: Block) -> list[Array]:
    positions = tiles.pad_queries(block.query_positions[None], 1), tiles.pad_keys(block.key_positions[None], 1)
    return [*positions, block.bias.slopes.astype(jnp.float32)]


def _parameters(dimensions: int, memory: int | None) -> pltpu.CompilerParams:
    """Let sequences and heads run on different cores; tiles run one after another."""
    kinds = (pltpu.PARALLEL, pltpu.PARALLEL, *[pltpu.ARBITRARY] * (dimensions - 2))
    return pltpu.CompilerParams(dimension_semantics=kinds, vmem_limit_bytes=memory)


def _cost(products: int, q: Array, k: Array) -> pl.CostEstimate:
    """Estimate the cost of a causal block, for a compiler that overlaps transfers with computation."""
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] // 2
    arrays = 2 * products * (q.size + k.size)
    return pl.CostEstimate(flops=2 * products * pairs * q.shape[3], transcendentals=pairs, bytes_accessed=arrays)


def _float32(shape: tuple[int, ...], like: Array) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda x: jnp.zeros_like(x, shape=shape, dtype=jnp.float32), like)  # varies as `like` does


def _forward_step(tiles: _Tiles, entries: Any, q: Any, k: Any, v: Any, start: Any, end: Any, *rest: Any) -> None:
    *alibi, out, lse, top, total, acc = rest
    step = pl.program_id(2)
    entry = entries[step]
    kind, row = kind_of(entry), outer_of(entry)

    @pl.when((step == 0) | (outer_of(entries[jnp.maximum(step - 1, 0)]) != row))
    def clear() -> None:
        top[...] = jnp.full_like(top, -jnp.inf)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    def tile(masked: bool) -> None:
        places = _Places(alibi[0][...], alibi[1][...], alibi[2][pl.program_id(1)]) if alibi else None
        scores, _ = tiles.scores(k[0, 0], q[0, 0], places)
        if masked:
            scores = jnp.where(tiles.visible(within_of(entry), start[...], end[...]), scores, -jnp.inf)
        new_top = jnp.maximum(top[...], jnp.max(scores, axis=0, keepdims=True))
        shift = jnp.where(new_top == -jnp.inf, 0, new_top)  # avoids -inf - -inf in a row that has seen no key yet
        p = jnp.exp(scores - shift)
        fade = jnp.exp(top[...] - shift)
        top[...] = new_top
        total[...] = total[...] * fade + jnp.sum(p, axis=0, keepdims=True)
        acc[...] = acc[...] * fade + tiles.dot(v[0, 0], p)

    pl.when(kind == INNER)(lambda: tile(masked=False))
    pl.when(kind == EDGE)(lambda: tile(masked=True))

    @pl.when(outer_of(entries[step + 1]) != row)
    def finish() -> None:
        out[0, 0] = acc[...] / jnp.where(total[...] == 0, 1, total[...])
        lse[0, 0] = jnp.where(total[...] == 0, -jnp.inf, top[...] + jnp.log(total[...]))


@functools.partial(jax.jit, static_argnames="memory")
def backward(
    q: Array, dout: Array, lse: Array, delta: Array, k: Array, v: Array, block: Block, *, memory: int | None
) -> tuple[Array, Array, Array, Array | None]:
    """Return dq [batch, heads, dim, queries], dk and dv [batch, kv_heads, keys, dim], and the gradient of the slopes.

    The latter is [batch, kv_heads, group], or None without ALiBi. `lse` must be finite; `delta` is the sum of
    out · dout of every query.
    """
    tiles = _Tiles.of(q, k, block)
    batch, heads, _, dim = q.shape
    kv_heads = heads // tiles.group
    todo = list_tiles(block, tiles.rows, tiles.columns, by_columns=True)
    # Padding rows repeat the last real q and lse, so their probabilities are finite; their dout and delta are 0.
    arrays = [tiles.pad_queries(q, 2), tiles.pad_queries(dout, 2, "constant")]
    arrays += [tiles.pad_queries(lse[:, :, None], 3), tiles.pad_queries(delta[:, :, None], 3, "constant")]
    arrays += [tiles.pad_queries(x, 1) for x in (block.start, block.end)]
    arrays += [tiles.pad_keys(k, 2), tiles.pad_keys(v, 2)]

    # A grid step is a tile, s, and one of the query heads that share a key head, g.
    row = lambda b, h, s, g, e, _: (b, h * tiles.group + g, within_of(e[s]), 0)  # noqa: E731
    stat = lambda b, h, s, g, e, _: (b, h * tiles.group + g, 0, within_of(e[s]))  # noqa: E731
    ranges = lambda b, h, s, g, e, _: (0, within_of(e[s]))  # noqa: E731
    column = lambda b, h, s, g, e, _: (b, h, outer_of(e[s]), 0)  # noqa: E731
    in_specs = [
        *[pl.BlockSpec((1, 1, tiles.tile_q, dim), row)] * 2,
        *[pl.BlockSpec((1, 1, 1, tiles.tile_q), stat)] * 2,
        *[pl.BlockSpec((1, tiles.tile_q), ranges)] * 2,
        *[pl.BlockSpec((1, 1, tiles.tile_k, dim), column)] * 2,
    ]
    if tiles.alibi:
        arrays += _alibi_arrays(tiles, block)
        in_specs += [
            pl.BlockSpec((1, tiles.tile_q), ranges),
            pl.BlockSpec((1, tiles.tile_k), lambda b, h, s, g, e, _: (0, outer_of(e[s]))),
            pl.BlockSpec(memory_space=pltpu.SMEM),
        ]
    blank = jnp.zeros_like(q, shape=(batch, heads, dim, tiles.rows * tiles.tile_q), dtype=jnp.float32)
    of_keys = (batch, kv_heads, tiles.columns * tiles.tile_k, dim)
    out_specs = [pl.BlockSpec(memory_space=pl.ANY), *[pl.BlockSpec((1, 1, tiles.tile_k, dim), column)] * 2]
    out_shape = [_float32(blank.shape, q), _float32(of_keys, q), _float32(of_keys, q)]
    if tiles.alibi:
        out_specs.append(pl.BlockSpec((1, 1, tiles.group, tiles.tile_q), lambda b, h, *_: (b, h, 0, 0)))
        out_shape.append(_float32((batch, kv_heads, tiles.group, tiles.tile_q), q))
    dq, dk, dv, *dslopes = pl.pallas_call(
        functools.partial(_backward_step, tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads, todo.steps, tiles.group),
            in_specs=[*in_specs, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((dim, tiles.tile_k), k.dtype),
                pltpu.VMEM((tiles.tile_k, dim), jnp.float32),
                pltpu.VMEM((tiles.tile_k, dim), jnp.float32),
                pltpu.VMEM((2, dim, tiles.tile_q), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=out_shape,
        input_output_aliases={2 + len(arrays): 0},
        compiler_params=_parameters(4, memory),
        cost_estimate=_cost(5, q, k),
        name="striped_attention_backward",
    )(todo.entries, todo.seen[None], *arrays, blank)
    dslopes = jnp.sum(dslopes[0], axis=-1) if dslopes else None
    return dq[..., : tiles.queries], *(x[:, :, : tiles.keys] for x in (dk, dv)), dslopes


def _backward_step(tiles: _Tiles, entries: Any, seen: Any, *refs: Any) -> None:
    q, dout, lse, delta, start, end, k, v, *alibi, _ = refs[: 9 + 3 * tiles.alibi]
    dq, dk, dv, *dslopes, k_transposed, dk_sum, dv_sum, dq_sum, copied = refs[9 + 3 * tiles.alibi :]
    sequence, kv_head, step, member = (pl.program_id(i) for i in range(4))
    entry = entries[step]
    kind, column, row = kind_of(entry), outer_of(entry), within_of(entry)
    first_head, last_head = member == 0, member == tiles.group - 1

    @pl.when((step == 0) & first_head)
    def clear_slopes() -> None:
        for x in dslopes:
            x[...] = jnp.zeros_like(x)

    @pl.when(first_head & ((step == 0) | (outer_of(entries[jnp.maximum(step - 1, 0)]) != column)))
    def clear_column() -> None:
        k_transposed[...] = k[0, 0].T
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    # The dq tiles before and after this one, and whether they differ from it. One of two buffers holds the current one.
    earlier, later = jnp.where(first_head, jnp.maximum(step - 1, 0), step), jnp.where(last_head, step + 1, step)
    before = _Tile(within_of(entries[earlier]), jnp.where(first_head, tiles.group, member) - 1)
    after = _Tile(within_of(entries[later]), jnp.where(last_head, 0, member + 1))
    begins, ends = (step == 0) & first_head, (step == seen[0] - 1) & last_head
    comes = begins | (before.row != row) | (tiles.group > 1)
    goes = ends | (after.row != row) | (tiles.group > 1)
    buffer = lax.rem(step * tiles.group + member, 2)

    def copy(tile: _Tile, buffer: Any, out: bool) -> Any:
        """Return the copy of a dq tile out of a buffer or into it."""
        where = pl.ds(pl.multiple_of(tile.row * tiles.tile_q, tiles.tile_q), tiles.tile_q)
        far, near = dq.at[sequence, kv_head * tiles.group + tile.member, :, where], dq_sum.at[buffer]
        return pltpu.make_async_copy(*((near, far) if out else (far, near)), copied.at[int(out)])

    here = _Tile(row, member)
    pl.when(begins & (seen[0] > 0))(lambda: copy(here, buffer, out=False).start())

    def tile(masked: bool) -> None:
        head = kv_head * tiles.group + member
        places = _Places(alibi[0][...], alibi[1][...], alibi[2][head]) if alibi else None
        scores, bend = tiles.scores(k[0, 0], q[0, 0], places)
        p = jnp.exp(scores - lse[0, 0])
        if masked:
            p = jnp.where(tiles.visible(column, start[...], end[...]), p, 0)
        dv_sum[...] += tiles.dot(p, dout[0, 0])
        dscores = p * (tiles.dot(v[0, 0], dout[0, 0], (1, 1)) - delta[0, 0])
        if places is not None:
            dslopes[0][0, 0, pl.ds(member, 1)] -= jnp.sum(dscores * places.distance(), axis=0, keepdims=True)
        if bend is not None:
            dscores = dscores * bend
        dk_sum[...] += tiles.dot(dscores, q[0, 0])
        part = tiles.dot(k_transposed[...], dscores) * tiles.scale

        pl.when(comes)(lambda: copy(here, buffer, out=False).wait())
        pl.when(comes & ~begins)(lambda: copy(before, 1 - buffer, out=True).wait())
        dq_sum[buffer] += part
        pl.when(goes)(lambda: copy(here, buffer, out=True).start())
        pl.when(goes & ~ends)(lambda: copy(after, 1 - buffer, out=False).start())
        pl.when(ends)(lambda: copy(here, buffer, out=True).wait())

        @pl.when(~goes)
        def keep() -> None:
            dq_sum[1 - buffer] = dq_sum[buffer]

    pl.when(kind == INNER)(lambda: tile(masked=False))
    pl.when(kind == EDGE)(lambda: tile(masked=True))

    @pl.when(last_head & (outer_of(entries[step + 1]) != column))
    def finish_column() -> None:
        dk[0, 0] = dk_sum[...] * tiles.scale
        dv[0, 0] = dv_sum[...]


class _Tile(NamedTuple):
    """A tile of dq: its row of tiles, and its query head among those that share a key head."""

    row: Any
    member: Any

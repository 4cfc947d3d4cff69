"""The Pallas kernels for Hopper: forward, dq, and dk with dv. Shapes are padded to whole tiles; `kernel.py` does that.

A thread block has three warpgroups. Two compute, on 64 rows each; the third one fetches tiles into shared memory, so
many steps ahead as there are stages. The computing ones take turns: while one multiplies, the other one does its
softmax. Scores are in powers of two: exp2 is what the hardware has.

    forward        128 queries   visits key tiles    S = QKᵀ, P = exp2(S - top), O += PV; top and total as it goes
    query_grads    128 queries   visits key tiles    S, P from lse, dP = dO Vᵀ, dS = P (dP - delta), dQ += dS K
    key_grads      128 keys      visits query tiles  the same transposed: dV += Pᵀ dO, dK += dSᵀ Q

Gradients take two passes, so that every sum has one writer and an order that never changes: the results are the same
bits every time.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from striped_attention.kernels.hopper import walk

LOG2E = math.log2(math.e)
ROWS = 64  # of a warpgroup
TILE = 2 * ROWS  # of a thread block
COLUMNS = 64  # of a result that are staged in shared memory at a time
STAGES = 2
_BOTH, _ROW, _COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

emulating = False  # whether kernels are traced for the interpreter of Pallas; `emulation.py` sets it


@dataclasses.dataclass(frozen=True)
class Scores:
    """How products of queries and keys become scores, in powers of two."""

    scale: float
    softcap: float | None

    def of(self, products: Array, penalty: Array | None) -> tuple[Array, Array | None]:
        """The scores, and the derivative by the scaled products where it is not 1."""
        slope = None
        if self.softcap is None:
            scores = products * (self.scale * LOG2E)
        else:
            # tanh x = 1 - 2 / (1 + exp 2x); the hardware's own tanh has 11 bits.
            power = jnp.exp2(products * (2 * LOG2E * self.scale / self.softcap))
            tanh = 1 - 2 / (1 + power)
            scores, slope = tanh * (self.softcap * LOG2E), 1 - tanh * tanh
        return (scores if penalty is None else scores - penalty), slope


def forward(
    q: Any, k: Any, v: Any, items: Any, bounds: Any, places: Any, slopes: Any, scores: Scores, tile_k: int
) -> Any:
    """out [batch, queries, heads, value dim] and lse [batch, heads, queries], natural, of a block.

    `bounds` is [rows, 2, queries], start and end. `places`, positions of queries and of keys, and `slopes` of heads are
    there for a bias only.
    """
    batch, queries, heads, dim = q.shape
    value_dim = v.shape[-1]
    group = heads // k.shape[2]
    biased = slopes is not None

    def kernel(*refs: Any) -> None:
        (q_ref, k_ref, v_ref, items_ref, bounds_ref, *bias_refs), rest = refs[: 5 + 3 * biased], refs[5 + 3 * biased :]
        out_ref, lse_ref, q_smem, k_smem, v_smem, out_smem, lse_smem, bounds_smem, *place_smem = rest[: 8 + 2 * biased]
        q_ready, k_ready, v_ready, k_used, v_used, turns = rest[8 + 2 * biased :]
        head, group_id = lax.axis_index("heads"), lax.axis_index("wg")
        item = walk.read(items_ref, lax.axis_index("items"))
        mask_row = item.batch if bounds.shape[0] > 1 else 0
        take_turns = functools.partial(_take_turns, turns)

        @pl.when(group_id < 2)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            own, base = group_id, item.own * TILE + group_id * ROWS
            rows = pl.ds(base, ROWS)
            plgpu.copy_gmem_to_smem(q_ref.at[item.batch, rows, head], q_smem.at[own], q_ready.at[own])
            plgpu.copy_gmem_to_smem(bounds_ref.at[mask_row, :, rows], bounds_smem.at[own], q_ready.at[own])
            if biased:
                plgpu.copy_gmem_to_smem(bias_refs[0].at[rows], place_smem[0].at[own], q_ready.at[own])
            plgpu.barrier_wait(q_ready.at[own])

            @pl.when(item.steps > 0)
            def _() -> None:
                plgpu.barrier_wait(k_ready.at[0])

            pl.when(group_id == 1)(take_turns)

            def step(j: Any, carry: Any, masked: bool) -> Any:
                acc, top, total = carry
                slot = _slot(j)
                products = _product_transposed(q_smem.at[own], k_smem.at[slot], meanwhile=take_turns)
                penalty = None
                if biased:
                    key = _load(place_smem[1].at[slot], _COLUMN)
                    penalty = _penalty(bias_refs[2][head], _load(place_smem[0].at[own], _ROW), key)
                plgpu.barrier_arrive(k_used.at[slot])
                s, _ = scores.of(products, penalty)
                if masked:
                    s = jnp.where(_visible(bounds_smem.at[own], item.tile(j) * tile_k, s.shape, 0), s, -jnp.inf)
                new = jnp.maximum(top, s.max(axis=1))
                shift = jnp.where(new == -jnp.inf, 0.0, new) if masked else new  # nothing was seen so far
                alpha = jnp.exp2(top - shift)
                p = jnp.exp2(s - _across(shift, s.shape, 0))
                acc, total = acc * _across(alpha, acc.shape, 0), total * alpha + p.sum(axis=1)
                weights = p.astype(v.dtype)
                acc, total, new, weights = lax.optimization_barrier((acc, total, new, weights))
                plgpu.barrier_arrive(turns)  # done with the softmax
                plgpu.barrier_wait(v_ready.at[slot])
                plgpu.barrier_wait(turns)

                def wait_for_next() -> None:
                    @pl.when(j + 1 < item.steps)
                    def _() -> None:
                        plgpu.barrier_wait(k_ready.at[_slot(j + 1)])

                acc = _add_product(acc, weights, v_smem.at[slot], meanwhile=wait_for_next)
                plgpu.barrier_arrive(v_used.at[slot])
                return acc, new, total

            carry = _full((ROWS, value_dim), 0.0, _BOTH), _full((ROWS,), -jnp.inf, _ROW), _full((ROWS,), 0.0, _ROW)
            acc, top, total = _edges_then_inside(item.masked, item.steps, step, carry)
            pl.when(group_id == 0)(take_turns)
            seen = total > 0
            total = jnp.where(seen, total, 1.0)
            lse_smem.at[own][...] = jnp.where(seen, top / LOG2E + jnp.log(total), -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(lse_smem.at[own], lse_ref.at[item.batch, head, rows])
            _write(acc * _across(1 / total, acc.shape, 0), out_smem.at[own], out_ref.at[item.batch, rows, head])

        @pl.when(group_id == 2)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            kv_head = lax.div(head, jnp.int32(group))

            def copies(j: Any, slot: Any) -> list[Any]:
                keys = pl.ds(item.tile(j) * tile_k, tile_k)
                places = [(bias_refs[1].at[keys], place_smem[1].at[slot])] if biased else []
                fetched = [(x.at[item.batch, keys, kv_head], y.at[slot]) for x, y in ((k_ref, k_smem), (v_ref, v_smem))]
                return [(k_ready, k_used, [fetched[0], *places]), (v_ready, v_used, [fetched[1]])]

            _fetch(item.steps, copies)

    results = [((batch, queries, heads, value_dim), jnp.float32), ((batch, heads, queries), jnp.float32)]
    shared = [_tiled((2, ROWS, dim), q.dtype), _tiled((STAGES, tile_k, dim), k.dtype)]
    shared += [_tiled((STAGES, tile_k, value_dim), v.dtype), _tiled((2, ROWS, COLUMNS), jnp.float32)]
    shared += [plgpu.SMEM((2, ROWS), jnp.float32), plgpu.SMEM((2, 2, ROWS), jnp.int32)]
    shared += [plgpu.SMEM((2, ROWS), jnp.int32), plgpu.SMEM((STAGES, tile_k), jnp.int32)] if biased else []
    barriers = [(2 + biased, 2), (1 + biased, STAGES), (1, STAGES), (2, STAGES), (2, STAGES), (2, 1)]
    inputs = (q, k, v, items, bounds, *((*places, slopes) if biased else ()))
    return _run(kernel, inputs, results, shared, barriers, heads, items)


def query_grads(
    q: Any, k: Any, v: Any, dout: Any, stats: Any, items: Any, bounds: Any, places: Any, slopes: Any, scores: Scores,
    tile_k: int,
) -> Any:  # fmt: skip
    """dq [batch, queries, heads, dim], and with a bias the gradient of the slopes by query, [batch, heads, queries].

    `stats` is [batch, heads, 2, queries]: lse in powers of two, and delta, the sum of out · dout.
    """
    batch, queries, heads, dim = q.shape
    value_dim = v.shape[-1]
    group = heads // k.shape[2]
    biased = slopes is not None

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, dout_ref, stats_ref, items_ref, bounds_ref, *bias_refs = refs[: 7 + 3 * biased]
        rest = refs[7 + 3 * biased :]
        (dq_ref, *slope_ref), rest = rest[: 1 + biased], rest[1 + biased :]
        q_smem, dout_smem, k_smem, v_smem, dq_smem, stats_smem, bounds_smem, *place_smem = rest[: 7 + 3 * biased]
        ready, k_ready, v_ready, k_used, v_used = rest[7 + 3 * biased :]
        head, group_id = lax.axis_index("heads"), lax.axis_index("wg")
        item = walk.read(items_ref, lax.axis_index("items"))
        mask_row = item.batch if bounds.shape[0] > 1 else 0

        @pl.when(group_id < 2)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            own, base = group_id, item.own * TILE + group_id * ROWS
            rows = pl.ds(base, ROWS)
            copies = [(q_ref.at[item.batch, rows, head], q_smem), (dout_ref.at[item.batch, rows, head], dout_smem)]
            copies += [(stats_ref.at[item.batch, head, :, rows], stats_smem)]
            copies += [(bounds_ref.at[mask_row, :, rows], bounds_smem)]
            copies += [(bias_refs[0].at[rows], place_smem[0])] if biased else []
            for source, target in copies:
                plgpu.copy_gmem_to_smem(source, target.at[own], ready.at[own])
            plgpu.barrier_wait(ready.at[own])
            lse, delta = (_load(stats_smem.at[own, i], _ROW) for i in range(2))

            def step(j: Any, carry: Any, masked: bool) -> Any:
                dq, *dslope = carry
                slot = _slot(j)
                plgpu.barrier_wait(k_ready.at[slot])
                products = _product_transposed(q_smem.at[own], k_smem.at[slot])
                penalty = distance = None
                if biased:
                    key = _load(place_smem[1].at[slot], _COLUMN)
                    distance = _distance(_load(place_smem[0].at[own], _ROW), key)
                    penalty = distance * (bias_refs[2][head] * LOG2E)
                s, slope = scores.of(products, penalty)
                p = jnp.exp2(s - _across(lse, s.shape, 0))
                if masked:
                    p = jnp.where(_visible(bounds_smem.at[own], item.tile(j) * tile_k, s.shape, 0), p, 0.0)
                plgpu.barrier_wait(v_ready.at[slot])
                dp = _product_transposed(dout_smem.at[own], v_smem.at[slot])
                plgpu.barrier_arrive(v_used.at[slot])
                ds = p * (dp - _across(delta, p.shape, 0))
                if distance is not None:
                    dslope = [dslope[0] - (ds * distance).sum(axis=1)]
                ds = ds if slope is None else ds * slope
                dq = _add_product(dq, ds.astype(k.dtype), k_smem.at[slot])
                plgpu.barrier_arrive(k_used.at[slot])
                return dq, *dslope

            carry = [_full((ROWS, dim), 0.0, _BOTH), *([_full((ROWS,), 0.0, _ROW)] if biased else [])]
            dq, *dslope = _edges_then_inside(item.masked, item.steps, step, tuple(carry))
            if biased:
                place_smem[2].at[own][...] = dslope[0]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(place_smem[2].at[own], slope_ref[0].at[item.batch, head, rows])
            _write(dq * scores.scale, dq_smem.at[own], dq_ref.at[item.batch, rows, head])

        @pl.when(group_id == 2)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            kv_head = lax.div(head, jnp.int32(group))

            def copies(j: Any, slot: Any) -> list[Any]:
                keys = pl.ds(item.tile(j) * tile_k, tile_k)
                places = [(bias_refs[1].at[keys], place_smem[1].at[slot])] if biased else []
                fetched = [(x.at[item.batch, keys, kv_head], y.at[slot]) for x, y in ((k_ref, k_smem), (v_ref, v_smem))]
                return [(k_ready, k_used, [fetched[0], *places]), (v_ready, v_used, [fetched[1]])]

            _fetch(item.steps, copies)

    results = [(q.shape, jnp.float32), *([((batch, heads, queries), jnp.float32)] if biased else [])]
    shared = [_tiled((2, ROWS, dim), q.dtype), _tiled((2, ROWS, value_dim), q.dtype)]
    shared += [_tiled((STAGES, tile_k, dim), k.dtype), _tiled((STAGES, tile_k, value_dim), v.dtype)]
    shared += [_tiled((2, ROWS, COLUMNS), jnp.float32), plgpu.SMEM((2, 2, ROWS), jnp.float32)]
    shared += [plgpu.SMEM((2, 2, ROWS), jnp.int32)]
    if biased:
        shared += [plgpu.SMEM((2, ROWS), jnp.int32), plgpu.SMEM((STAGES, tile_k), jnp.int32)]
        shared += [plgpu.SMEM((2, ROWS), jnp.float32)]
    barriers = [(4 + biased, 2), (1 + biased, STAGES), (1, STAGES), (2, STAGES), (2, STAGES)]
    inputs = (q, k, v, dout, stats, items, bounds, *((*places, slopes) if biased else ()))
    return _run(kernel, inputs, results, shared, barriers, heads, items)


def key_grads(
    q: Any, k: Any, v: Any, dout: Any, stats: Any, items: Any, bounds: Any, places: Any, slopes: Any, scores: Scores,
    tile_q: int,
) -> Any:  # fmt: skip
    """dk [batch, keys, kv heads, dim] and dv [batch, keys, kv heads, value dim], summed over the heads of a group."""
    heads, kv_heads, dim = q.shape[2], k.shape[2], k.shape[3]
    value_dim = v.shape[-1]
    group = heads // kv_heads
    biased = slopes is not None

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, dout_ref, stats_ref, items_ref, bounds_ref, *bias_refs = refs[: 7 + 3 * biased]
        dk_ref, dv_ref, k_smem, v_smem, q_smem, dout_smem, grad_smem, stats_smem, bounds_smem, *place_smem = refs[
            7 + 3 * biased : 16 + 5 * biased
        ]
        ready, fetched, used = refs[16 + 5 * biased :]
        kv_head, group_id = lax.axis_index("heads"), lax.axis_index("wg")
        item = walk.read(items_ref, lax.axis_index("items"))
        mask_row = item.batch if bounds.shape[0] > 1 else 0

        @pl.when(group_id < 2)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            own, base = group_id, item.own * TILE + group_id * ROWS
            rows = pl.ds(base, ROWS)
            copies = [(k_ref.at[item.batch, rows, kv_head], k_smem), (v_ref.at[item.batch, rows, kv_head], v_smem)]
            copies += [(bias_refs[1].at[rows], place_smem[1])] if biased else []
            for source, target in copies:
                plgpu.copy_gmem_to_smem(source, target.at[own], ready.at[own])
            plgpu.barrier_wait(ready.at[own])

            def step(j: Any, carry: Any, masked: bool) -> Any:
                dk, dv = carry
                slot = _slot(j)
                plgpu.barrier_wait(fetched.at[slot])
                products = _product_transposed(k_smem.at[own], q_smem.at[slot])
                penalty = None
                if biased:
                    query = _load(place_smem[0].at[slot], _COLUMN)
                    head = kv_head * group + item.visit(j, group)[0]
                    penalty = _penalty(bias_refs[2][head], _load(place_smem[1].at[own], _ROW), query)
                s, slope = scores.of(products, penalty)
                p = jnp.exp2(s - _across(_load(stats_smem.at[slot, 0], _COLUMN), s.shape, 1))
                if masked:
                    p = jnp.where(_visible(bounds_smem.at[slot], base, s.shape, 1), p, 0.0)
                dv = _add_product(dv, p.astype(q.dtype), dout_smem.at[slot])
                dp = _product_transposed(v_smem.at[own], dout_smem.at[slot])
                ds = p * (dp - _across(_load(stats_smem.at[slot, 1], _COLUMN), p.shape, 1))
                ds = ds if slope is None else ds * slope
                dk = _add_product(dk, ds.astype(q.dtype), q_smem.at[slot])
                plgpu.barrier_arrive(used.at[slot])
                return dk, dv

            carry = _full((ROWS, dim), 0.0, _BOTH), _full((ROWS, value_dim), 0.0, _BOTH)
            dk, dv = _edges_then_inside(group * item.masked, group * item.steps, step, carry)
            _write(dk * scores.scale, grad_smem.at[own], dk_ref.at[item.batch, rows, kv_head])
            _write(dv, grad_smem.at[own], dv_ref.at[item.batch, rows, kv_head])

        @pl.when(group_id == 2)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def copies(j: Any, slot: Any) -> list[Any]:
                member, visited = item.visit(j, group)
                rows, head = pl.ds(item.tile(visited) * tile_q, tile_q), kv_head * group + member
                pairs = [(q_ref.at[item.batch, rows, head], q_smem), (dout_ref.at[item.batch, rows, head], dout_smem)]
                pairs += [(stats_ref.at[item.batch, head, :, rows], stats_smem)]
                pairs += [(bounds_ref.at[mask_row, :, rows], bounds_smem)]
                pairs += [(bias_refs[0].at[rows], place_smem[0])] if biased else []
                return [(fetched, used, [(source, target.at[slot]) for source, target in pairs])]

            _fetch(group * item.steps, copies)

    results = [(k.shape, jnp.float32), (v.shape, jnp.float32)]
    shared = [_tiled((2, ROWS, dim), k.dtype), _tiled((2, ROWS, value_dim), v.dtype)]
    shared += [_tiled((STAGES, tile_q, dim), q.dtype), _tiled((STAGES, tile_q, value_dim), q.dtype)]
    shared += [_tiled((2, ROWS, COLUMNS), jnp.float32), plgpu.SMEM((STAGES, 2, tile_q), jnp.float32)]
    shared += [plgpu.SMEM((STAGES, 2, tile_q), jnp.int32)]
    shared += [plgpu.SMEM((STAGES, tile_q), jnp.int32), plgpu.SMEM((2, ROWS), jnp.int32)] if biased else []
    barriers = [(2 + biased, 2), (4 + biased, STAGES), (2, STAGES)]
    inputs = (q, k, v, dout, stats, items, bounds, *((*places, slopes) if biased else ()))
    return _run(kernel, inputs, results, shared, barriers, kv_heads, items)


def _run(kernel: Any, inputs: Any, results: Any, shared: Any, barriers: Any, heads: int, items: Any) -> Any:
    """Start a kernel, all heads of an item before the next item. Barriers are (arrivals, how many)."""
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(*result) for result in results],
        scratch_types=[*shared, *(plgpu.Barrier(num_arrivals=n, num_barriers=count) for n, count in barriers)],
        grid=(heads, items.shape[0] // walk.FIELDS),
        grid_names=("heads", "items"),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*inputs)


def _edges_then_inside(masked: Any, steps: Any, step: Callable[..., Any], carry: Any) -> Any:
    carry = lax.fori_loop(0, masked, functools.partial(step, masked=True), carry)
    return lax.fori_loop(masked, steps, functools.partial(step, masked=False), carry)


def _fetch(steps: Any, copies: Callable[[Any, Any], list[Any]]) -> None:
    """Fetch the tiles of all steps, each as soon as its slot is free.

    `copies` says for a step and a slot: the barrier to report to, the one that says that the slot is free, and pairs of
    source and target.
    """

    def fetch(j: Any, slot: Any, wait: bool) -> None:
        for arrived, used, pairs in copies(j, slot):
            if wait:
                plgpu.barrier_wait(used.at[slot])
            for source, target in pairs:
                plgpu.copy_gmem_to_smem(source, target, arrived.at[slot])

    for i in range(STAGES):
        pl.when(i < steps)(functools.partial(fetch, jnp.int32(i), i, False))

    @pl.loop(STAGES, steps)
    def _(j: Any) -> None:
        fetch(j, _slot(j), True)

    def wait_for_last(slot: int) -> None:
        for _, used, _ in copies(jnp.int32(slot), slot):
            plgpu.barrier_wait(used.at[slot])

    for i in range(STAGES):  # no barrier is left with an arrival that nobody has seen
        pl.when(i < steps)(functools.partial(wait_for_last, i))


def _write(x: Array, staged: Any, ref: Any) -> None:
    """Registers to global memory, some columns at a time, as float32."""
    for first in range(0, x.shape[1], COLUMNS):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the stage is free
        staged[...] = x[:, first : first + COLUMNS]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, ref.at[:, pl.ds(first, COLUMNS)])
    plgpu.wait_smem_to_gmem(0)


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as wgmma wants it."""
    width = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)))


def _slot(step: Any) -> Any:
    return lax.rem(step, jnp.int32(STAGES))


def _take_turns(turns: Any) -> None:
    plgpu.barrier_arrive(turns)
    plgpu.barrier_wait(turns)


def _cast(x: Array, layout: Any) -> Array:
    return x if emulating else plgpu.layout_cast(x, layout)


def _full(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    return _cast(jnp.full(shape, value, jnp.float32), layout)


def _load(ref: Any, layout: Any) -> Array:
    return _cast(ref[...], layout)


def _across(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """A number for each place of an axis, for all of the other."""
    return lax.broadcast_in_dim(x, shape, [axis])


def _visible(bounds: Any, first: Any, shape: tuple[int, ...], axis: int) -> Array:
    """Which pairs of a tile are visible. `axis` is that of the queries; `first` the first of the keys."""
    low, high = (_across(_load(bounds.at[i], _ROW if axis == 0 else _COLUMN), shape, axis) for i in range(2))
    if emulating:
        key = lax.broadcasted_iota(jnp.int32, shape, 1 - axis)
    else:
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1 - axis, layout=_BOTH)
    key = key + first
    return (low <= key) & (key < high)


def _distance(rows: Array, columns: Array) -> Array:
    shape = (rows.shape[0], columns.shape[0])
    return jnp.abs(_across(rows, shape, 0) - _across(columns, shape, 1)).astype(jnp.float32)


def _penalty(slope: Any, rows: Array, columns: Array) -> Array:
    """ALiBi's, in powers of two."""
    return _distance(rows, columns) * (slope * LOG2E)


def _nothing() -> None:
    """What to do meanwhile, if there is nothing to do."""


def _product_transposed(a: Any, b: Any, meanwhile: Callable[[], None] = _nothing) -> Array:
    """a · bᵀ of two arrays in shared memory; `meanwhile` is done while the tensor cores are at it."""
    if emulating:
        found = _plain_product(a[...], b[...].T)
        meanwhile()
        return found

    def multiply(acc: Any) -> Array:
        plgpu.wgmma(acc, a, b.transpose((1, 0)))
        meanwhile()
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def _add_product(acc: Array, a: Array, b: Any, meanwhile: Callable[[], None] = _nothing) -> Array:
    """acc + a · b, with `a` in registers and `b` in shared memory."""
    if emulating:
        acc = acc + _plain_product(a, b[...])
        meanwhile()
        return acc

    def multiply(acc: Any) -> None:
        plgpu.wgmma(acc, a, b)
        meanwhile()

    return pl.run_state(multiply)(plgpu.ACC.init(acc))


def _plain_product(a: Array, b: Array) -> Array:
    """For the interpreter, whose wgmma takes nothing from registers."""
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")

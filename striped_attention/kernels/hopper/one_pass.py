"""One pass: the Pallas kernel for all gradients at once. `kernel.py` pads shapes to whole tiles.

A thread block has 128 keys, 64 per warpgroup, and visits query tiles, like `key_grads` in `backward.py`. From the dS of
both warpgroups, each computes one half of the columns of dQ, which the copy engine (TMA) sums in global memory:

    S = K Qᵀ, P from lse, dV += P dO, dP = V dOᵀ, dS = P (dP - delta), dK += dS Q       64 keys × 64 queries
    dQ += dSᵀ K                                                  64 queries × all 128 keys × half of the columns

This takes five products instead of the seven of two passes. The order in which thread blocks add to dQ differs between
runs, and so do its last bits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from striped_attention.kernels.hopper import parts, walk
from striped_attention.kernels.hopper.parts import BOTH, COLUMN, Scores, Sum
from striped_attention.kernels.hopper.walk import ROWS, TILE

STAGES = 2  # tiles of queries, and of dS, that a thread block buffers
WIDTH = 128  # head dimension of queries, keys and values


def gradients(
    q: Any, k: Any, v: Any, dout: Any, stats: Any, items: Any, bounds: Any, scores: Scores, dtype: Any
) -> Any:
    """Return dq [batch, queries, heads, dim], dk and dv [batch, keys, kv heads, dim], summed over heads of a group.

    dk and dv are rounded to `dtype`. `stats` is [batch, heads, 2, queries]: the base-2 lse, and delta, the sum of
    out · dout.
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    group, half = heads // kv_heads, WIDTH // 2

    def hopper_gradients(q_ref: Any, k_ref: Any, v_ref: Any, dout_ref: Any, stats_ref: Any, items_ref: Any,
                         bounds_ref: Any, dq_ref: Any, dk_ref: Any, dv_ref: Any, *scratch: Any) -> None:  # fmt: skip
        k_smem, v_smem, q_smem, dout_smem, ds_smem, staged, stats_smem, bounds_smem, *barriers = scratch
        ready, fetched, used, met = barriers
        kv_head, group_id = lax.axis_index("heads"), lax.axis_index("wg")
        item = walk.read(items_ref, lax.axis_index("items"))
        mask_row = item.batch if bounds.shape[0] > 1 else 0

        @pl.when(group_id < 2)
        def _() -> None:
            plgpu.set_max_registers(240, action="increase")
            parts.start_sum(dq_ref, half)
            own, base = group_id, item.own * TILE + group_id * ROWS
            rows, own_columns = pl.ds(base, ROWS), pl.ds(pl.multiple_of(own * half, half), half)
            for source, target in ((k_ref, k_smem), (v_ref, v_smem)):
                plgpu.copy_gmem_to_smem(source.at[item.batch, rows, kv_head], target.at[own], ready)
            plgpu.barrier_wait(ready)  # also for the tiles of the other warpgroup

            def step(j: Any, carry: Any, member: Any, slot: Any, masked: bool) -> Any:
                plgpu.barrier_wait(fetched.at[slot])

                def add_all(dk: Sum, dv: Sum) -> None:
                    parts.with_sums([(ROWS, ROWS)] * 2, functools.partial(add_tile, dk, dv))

                def add_tile(dk: Sum, dv: Sum, products: Sum, dp: Sum) -> None:
                    products.add(k_smem.at[own], q_smem.at[slot], turned="b")
                    dp.add(v_smem.at[own], dout_smem.at[slot], turned="b")
                    found, slope = scores.of(products.read(running=1), None)
                    shape = found.shape
                    p = jnp.exp2(found - parts.across(parts.load(stats_smem.at[slot, 0], COLUMN), shape, 1))
                    if masked:
                        p = jnp.where(parts.visible(bounds_smem.at[slot], base, shape, 1), p, 0.0)
                    dv.add(p.astype(q.dtype), dout_smem.at[slot])
                    ds = p * (dp.read(running=1) - parts.across(parts.load(stats_smem.at[slot, 1], COLUMN), shape, 1))
                    ds = (ds if slope is None else ds * slope).astype(q.dtype)
                    ds_smem.at[slot, own][...] = ds
                    plgpu.commit_smem()
                    parts.take_turns(met)  # both warpgroups have written their dS and read the previous one
                    parts.with_sums([(ROWS, half)], functools.partial(add_dq, dk, ds))

                def add_dq(dk: Sum, ds: Any, dq: Sum) -> None:
                    for i in range(2):
                        dq.add(ds_smem.at[slot, i], k_smem.at[i, :, own_columns], turned="a")
                    dk.add(ds, q_smem.at[slot])  # still running while dQ is stored
                    rows, head = pl.ds(item.tile(j, masked) * ROWS, ROWS), kv_head * group + member
                    parts.add(dq.read(running=1), staged.at[own], dq_ref.at[item.batch, rows, head, own_columns])

                carry = parts.go_on(carry, add_all)
                plgpu.barrier_arrive(used.at[slot])
                return carry

            zeros = parts.full((ROWS, WIDTH), 0.0, BOTH)
            dk, dv = parts.visits(item, group, STAGES, step, (zeros, zeros))
            sums = staged if dtype == jnp.float32 else v_smem  # this warpgroup no longer needs its values
            for grad, ref in ((dk * scores.scale, dk_ref), (dv, dv_ref)):
                parts.write(grad, sums.at[own], ref.at[item.batch, rows, kv_head])

        @pl.when(group_id == 2)
        def _() -> None:
            plgpu.set_max_registers(24, action="decrease")

            def copies(visited: Any, member: Any, slot: Any) -> list[Any]:
                rows, head = pl.ds(visited * ROWS, ROWS), kv_head * group + member
                pairs = [(q_ref.at[item.batch, rows, head], q_smem), (dout_ref.at[item.batch, rows, head], dout_smem)]
                pairs += [(stats_ref.at[item.batch, head, :, rows], stats_smem)]
                pairs += [(bounds_ref.at[mask_row, :, rows], bounds_smem)]
                return [(fetched, used, [(source, target.at[slot]) for source, target in pairs])]

            parts.fetch(item, group, STAGES, copies)

    tiles = [(2, ROWS, WIDTH)] * 2 + [(STAGES, ROWS, WIDTH)] * 2 + [(STAGES, 2, ROWS, ROWS)]
    shared = [parts.tiled(shape, q.dtype) for shape in tiles]
    shared += [parts.stage(WIDTH, WIDTH)]
    shared += [plgpu.SMEM((STAGES, 2, ROWS), jnp.float32), plgpu.SMEM((STAGES, 2, ROWS), jnp.int32)]
    barriers = [(4, 1), (4, STAGES), (2, STAGES), (2, 1)]
    results = [(k.shape, dtype), (v.shape, dtype)]
    dq = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    inputs = (q, k, v, dout, stats, items, bounds)
    dq, dk, dv = parts.run_adding(hopper_gradients, inputs, dq, dout, results, shared, barriers, kv_heads, items)
    return dq * scores.scale, dk, dv

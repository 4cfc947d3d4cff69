"""Backward: the Pallas kernels for the gradients, in two passes. `kernel.py` pads shapes to whole tiles.

A thread block has 128 queries or 128 keys and visits the other tiles:

    query_grads    128 queries   visits key tiles    S, P from lse, dP = dO Vᵀ, dS = P (dP - delta), dQ += dS K
    key_grads      128 keys      visits query tiles  the same transposed: dV += Pᵀ dO, dK += dSᵀ Q

Warpgroups share the work as in `forward.py`. With two passes, every sum has one writer and a fixed order, so the
results are bitwise reproducible.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from striped_attention.kernels.hopper import parts, walk
from striped_attention.kernels.hopper.parts import BOTH, COLUMN, LOG2E, ROW, Scores
from striped_attention.kernels.hopper.walk import ROWS, TILE


def query_grads(
    q: Any, k: Any, v: Any, dout: Any, stats: Any, items: Any, bounds: Any, places: Any, slopes: Any, scores: Scores,
    stages: int,
) -> Any:  # fmt: skip
    """Return dq [batch, queries, heads, dim], and with a bias the slopes' gradient per query, [batch, heads, queries].

    `stats` is [batch, heads, 2, queries]: the base-2 lse, and delta, the sum of out · dout.
    """
    batch, queries, heads, dim = q.shape
    value_dim = v.shape[-1]
    group = heads // k.shape[2]
    biased = slopes is not None

    def hopper_query_grads(*refs: Any) -> None:
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
            lse, delta = (parts.load(stats_smem.at[own, i], ROW) for i in range(2))

            def step(j: Any, carry: Any, _: Any, slot: Any, masked: bool) -> Any:
                dq, *dslope = carry
                plgpu.barrier_wait(k_ready.at[slot])
                products = parts.product_transposed(q_smem.at[own], k_smem.at[slot])
                penalty = distance = None
                if biased:
                    key = parts.load(place_smem[1].at[slot], COLUMN)
                    distance = parts.distance(parts.load(place_smem[0].at[own], ROW), key)
                    penalty = distance * (bias_refs[2][head] * LOG2E)
                s, slope = scores.of(products, penalty)
                p = jnp.exp2(s - parts.across(lse, s.shape, 0))
                if masked:
                    p = jnp.where(parts.visible(bounds_smem.at[own], item.tile(j, masked) * ROWS, s.shape, 0), p, 0.0)
                plgpu.barrier_wait(v_ready.at[slot])
                dp = parts.product_transposed(dout_smem.at[own], v_smem.at[slot])
                plgpu.barrier_arrive(v_used.at[slot])
                ds = p * (dp - parts.across(delta, p.shape, 0))
                if distance is not None:
                    dslope = [dslope[0] - (ds * distance).sum(axis=1)]
                ds = ds if slope is None else ds * slope
                dq = parts.add_product(dq, ds.astype(k.dtype), k_smem.at[slot])
                plgpu.barrier_arrive(k_used.at[slot])
                return dq, *dslope

            carry = [
                parts.full((ROWS, dim), 0.0, BOTH),
                *([parts.full((ROWS,), 0.0, ROW)] if biased else []),
            ]
            dq, *dslope = parts.visits(item, 1, stages, step, tuple(carry))
            if biased:
                place_smem[2].at[own][...] = dslope[0]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(place_smem[2].at[own], slope_ref[0].at[item.batch, head, rows])
            parts.write(dq * scores.scale, dq_smem.at[own], dq_ref.at[item.batch, rows, head])

        @pl.when(group_id == 2)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            kv_head = lax.div(head, jnp.int32(group))

            places = (bias_refs[1], place_smem[1]) if biased else None
            key, value = (k_ref, k_smem, k_ready, k_used), (v_ref, v_smem, v_ready, v_used)
            parts.fetch_keys(item, kv_head, key, value, places)

    results = [(q.shape, jnp.float32), *([((batch, heads, queries), jnp.float32)] if biased else [])]
    shared = [parts.tiled((2, ROWS, dim), q.dtype), parts.tiled((2, ROWS, value_dim), q.dtype)]
    shared += [
        parts.tiled((stages, ROWS, dim), k.dtype),
        parts.tiled((stages, ROWS, value_dim), v.dtype),
    ]
    shared += [parts.stage(dim, value_dim), plgpu.SMEM((2, 2, ROWS), jnp.float32)]
    shared += [plgpu.SMEM((2, 2, ROWS), jnp.int32)]
    if biased:
        shared += [plgpu.SMEM((2, ROWS), jnp.int32), plgpu.SMEM((stages, ROWS), jnp.int32)]
        shared += [plgpu.SMEM((2, ROWS), jnp.float32)]
    barriers = [(4 + biased, 2), (1 + biased, stages), (1, stages), (2, stages), (2, stages)]
    inputs = (q, k, v, dout, stats, items, bounds, *((*places, slopes) if biased else ()))
    return parts.run(hopper_query_grads, inputs, results, shared, barriers, heads, items)


def key_grads(
    q: Any, k: Any, v: Any, dout: Any, stats: Any, items: Any, bounds: Any, places: Any, slopes: Any, scores: Scores,
    stages: int, wanted: tuple[str, ...], dtype: Any,
) -> Any:  # fmt: skip
    """Return dk [batch, keys, kv heads, dim] and dv [batch, keys, kv heads, value dim], summed over heads of a group.

    They are rounded to `dtype`. `wanted` lists which of them to return: wide heads leave registers for only one at a
    time.
    """
    heads, kv_heads, dim = q.shape[2], k.shape[2], k.shape[3]
    value_dim = v.shape[-1]
    group = heads // kv_heads
    biased = slopes is not None

    def hopper_key_grads(*refs: Any) -> None:
        q_ref, k_ref, v_ref, dout_ref, stats_ref, items_ref, bounds_ref, *bias_refs = refs[: 7 + 3 * biased]
        grad_refs, rest = refs[7 + 3 * biased :][: len(wanted)], refs[7 + 3 * biased + len(wanted) :]
        k_smem, v_smem, q_smem, dout_smem, grad_smem, stats_smem, bounds_smem, *place_smem = rest[: 7 + 2 * biased]
        ready, fetched, used = rest[7 + 2 * biased :]
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

            def step(j: Any, carry: Any, member: Any, slot: Any, masked: bool) -> Any:
                grads = dict(zip(wanted, carry, strict=True))
                plgpu.barrier_wait(fetched.at[slot])
                products = parts.product_transposed(k_smem.at[own], q_smem.at[slot])
                penalty = None
                if biased:
                    query = parts.load(place_smem[0].at[slot], COLUMN)
                    head = kv_head * group + member
                    penalty = parts.penalty(bias_refs[2][head], parts.load(place_smem[1].at[own], ROW), query)
                s, slope = scores.of(products, penalty)
                p = jnp.exp2(s - parts.across(parts.load(stats_smem.at[slot, 0], COLUMN), s.shape, 1))
                if masked:
                    p = jnp.where(parts.visible(bounds_smem.at[slot], base, s.shape, 1), p, 0.0)
                if "dv" in wanted:
                    grads["dv"] = parts.add_product(grads["dv"], p.astype(q.dtype), dout_smem.at[slot])
                if "dk" in wanted:
                    dp = parts.product_transposed(v_smem.at[own], dout_smem.at[slot])
                    ds = p * (dp - parts.across(parts.load(stats_smem.at[slot, 1], COLUMN), p.shape, 1))
                    ds = ds if slope is None else ds * slope
                    grads["dk"] = parts.add_product(grads["dk"], ds.astype(q.dtype), q_smem.at[slot])
                plgpu.barrier_arrive(used.at[slot])
                return tuple(grads.values())

            carry = tuple(parts.full((ROWS, {"dk": dim, "dv": value_dim}[name]), 0.0, BOTH) for name in wanted)
            found = parts.visits(item, group, stages, step, carry)
            for name, grad, ref in zip(wanted, found, grad_refs, strict=True):
                grad = grad * scores.scale if name == "dk" else grad
                parts.write(grad, grad_smem.at[own], ref.at[item.batch, rows, kv_head])

        @pl.when(group_id == 2)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def copies(visited: Any, member: Any, slot: Any) -> list[Any]:
                rows, head = pl.ds(visited * ROWS, ROWS), kv_head * group + member
                pairs = [(q_ref.at[item.batch, rows, head], q_smem), (dout_ref.at[item.batch, rows, head], dout_smem)]
                pairs += [(stats_ref.at[item.batch, head, :, rows], stats_smem)]
                pairs += [(bounds_ref.at[mask_row, :, rows], bounds_smem)]
                pairs += [(bias_refs[0].at[rows], place_smem[0])] if biased else []
                return [(fetched, used, [(source, target.at[slot]) for source, target in pairs])]

            parts.fetch(item, group, stages, copies)

    results = [({"dk": k.shape, "dv": v.shape}[name], dtype) for name in wanted]
    shared = [parts.tiled((2, ROWS, dim), k.dtype), parts.tiled((2, ROWS, value_dim), v.dtype)]
    shared += [
        parts.tiled((stages, ROWS, dim), q.dtype),
        parts.tiled((stages, ROWS, value_dim), q.dtype),
    ]
    shared += [
        parts.stage(dim, value_dim, dtype),
        plgpu.SMEM((stages, 2, ROWS), jnp.float32),
    ]
    shared += [plgpu.SMEM((stages, 2, ROWS), jnp.int32)]
    shared += [plgpu.SMEM((stages, ROWS), jnp.int32), plgpu.SMEM((2, ROWS), jnp.int32)] if biased else []
    barriers = [(2 + biased, 2), (4 + biased, stages), (2, stages)]
    inputs = (q, k, v, dout, stats, items, bounds, *((*places, slopes) if biased else ()))
    return parts.run(hopper_key_grads, inputs, results, shared, barriers, kv_heads, items)

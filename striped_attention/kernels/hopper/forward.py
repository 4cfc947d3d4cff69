"""Forward: the Pallas kernel for out and lse. `kernel.py` pads shapes to whole tiles.

A thread block has 128 queries and visits key tiles: S = QKᵀ, P = exp2(S - top), O += PV, with the running maximum `top`
and the running sum `total` of each row. It has three warpgroups. Two compute, with 64 rows each; the third prefetches
tiles into shared memory, as many steps ahead as there are stages. The compute warpgroups alternate: while one
multiplies, the other computes its softmax. Scores are in base 2, because the hardware has exp2.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from striped_attention.kernels.hopper import parts, walk
from striped_attention.kernels.hopper.parts import BOTH, COLUMN, LOG2E, ROW, STAGES, Scores
from striped_attention.kernels.hopper.walk import ROWS, TILE


def forward(
    q: Any, k: Any, v: Any, items: Any, bounds: Any, places: Any, slopes: Any, scores: Scores, tile_k: int,
    dtypes: tuple[Any, ...],
) -> Any:  # fmt: skip
    """Return out, as arrays [batch, queries, heads, value dim], and the natural lse [batch, heads, queries].

    The sum of these arrays is the result: with a second dtype, the second is the rounding error of the first. `bounds`
    is [rows, 2, queries], start and end. `places` (positions of queries and of keys) and `slopes` (one per head) are
    set only with a bias.
    """
    batch, queries, heads, dim = q.shape
    value_dim = v.shape[-1]
    group = heads // k.shape[2]
    biased = slopes is not None

    def hopper_forward(*refs: Any) -> None:
        (q_ref, k_ref, v_ref, items_ref, bounds_ref, *bias_refs), rest = refs[: 5 + 3 * biased], refs[5 + 3 * biased :]
        out_refs, lse_ref, rest = rest[: len(dtypes)], rest[len(dtypes)], rest[len(dtypes) + 1 :]
        q_smem, k_smem, v_smem, out_smem, lse_smem, bounds_smem, *place_smem = rest[: 6 + 2 * biased]
        q_ready, k_ready, v_ready, k_used, v_used, turns = rest[6 + 2 * biased :]
        head, group_id = lax.axis_index("heads"), lax.axis_index("wg")
        item = walk.read(items_ref, lax.axis_index("items"))
        mask_row = item.batch if bounds.shape[0] > 1 else 0
        take_turns = functools.partial(parts.take_turns, turns)

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

            def step(j: Any, carry: Any, _: Any, slot: Any, masked: bool) -> Any:
                acc, top, total = carry
                products = parts.product_transposed(q_smem.at[own], k_smem.at[slot], meanwhile=take_turns)
                penalty = None
                if biased:
                    key = parts.load(place_smem[1].at[slot], COLUMN)
                    penalty = parts.penalty(bias_refs[2][head], parts.load(place_smem[0].at[own], ROW), key)
                plgpu.barrier_arrive(k_used.at[slot])
                raw, factor, _ = scores.raw(products, penalty)
                if masked:
                    seen = parts.visible(bounds_smem.at[own], item.tile(j, masked) * tile_k, raw.shape, 0)
                    raw = jnp.where(seen, raw, -jnp.inf)
                new = jnp.maximum(top, raw.max(axis=1) * factor)
                shift = jnp.where(new == -jnp.inf, 0.0, new) if masked else new  # no key seen so far
                alpha = jnp.exp2(top - shift)
                p = jnp.exp2(raw * factor - parts.across(shift, raw.shape, 0))
                acc, total = acc * parts.across(alpha, acc.shape, 0), total * alpha + p.sum(axis=1)
                weights = p.astype(v.dtype)
                acc, total, new, weights = lax.optimization_barrier((acc, total, new, weights))
                plgpu.barrier_arrive(turns)  # done with the softmax
                plgpu.barrier_wait(v_ready.at[slot])
                plgpu.barrier_wait(turns)

                def wait_for_next() -> None:
                    @pl.when(j + 1 < item.steps)
                    def _() -> None:
                        plgpu.barrier_wait(k_ready.at[parts.slot(j + 1)])

                acc = parts.add_product(acc, weights, v_smem.at[slot], meanwhile=wait_for_next)
                plgpu.barrier_arrive(v_used.at[slot])
                return acc, new, total

            carry = (
                parts.full((ROWS, value_dim), 0.0, BOTH),
                parts.full((ROWS,), -jnp.inf, ROW),
                parts.full((ROWS,), 0.0, ROW),
            )
            acc, top, total = parts.visits(item, 1, STAGES, step, carry)
            pl.when(group_id == 0)(take_turns)
            seen = total > 0
            total = jnp.where(seen, total, 1.0)
            lse_smem.at[own][...] = jnp.where(seen, top / LOG2E + jnp.log(total), -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(lse_smem.at[own], lse_ref.at[item.batch, head, rows])
            left = acc * parts.across(1 / total, acc.shape, 0)
            for out_ref, dtype in zip(out_refs, dtypes, strict=True):
                part = left.astype(dtype)
                parts.write(part, out_smem.at[own], out_ref.at[item.batch, rows, head])
                left = left - part.astype(jnp.float32)

        @pl.when(group_id == 2)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            kv_head = lax.div(head, jnp.int32(group))

            places = (bias_refs[1], place_smem[1]) if biased else None
            key, value = (k_ref, k_smem, k_ready, k_used), (v_ref, v_smem, v_ready, v_used)
            parts.fetch_keys(item, kv_head, key, value, places)

    results = [
        *(((batch, queries, heads, value_dim), dtype) for dtype in dtypes),
        ((batch, heads, queries), jnp.float32),
    ]
    shared = [parts.tiled((2, ROWS, dim), q.dtype), parts.tiled((STAGES, tile_k, dim), k.dtype)]
    shared += [
        parts.tiled((STAGES, tile_k, value_dim), v.dtype),
        parts.stage(dim, value_dim, dtypes[0]),
    ]
    shared += [plgpu.SMEM((2, ROWS), jnp.float32), plgpu.SMEM((2, 2, ROWS), jnp.int32)]
    shared += [plgpu.SMEM((2, ROWS), jnp.int32), plgpu.SMEM((STAGES, tile_k), jnp.int32)] if biased else []
    barriers = [
        (2 + biased, 2),
        (1 + biased, STAGES),
        (1, STAGES),
        (2, STAGES),
        (2, STAGES),
        (2, 1),
    ]
    inputs = (q, k, v, items, bounds, *((*places, slopes) if biased else ()))
    *out, lse = parts.run(hopper_forward, inputs, results, shared, barriers, heads, items)
    return out, lse

"""The kernel for Hopper, without a GPU: its walks, its numbers in the interpreter, and that it lowers for GPUs."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention.kernels.contract import Block
from striped_attention.kernels.hopper import kernel, walk
from tests.interpreted_hopper import wide_ranges
from tests.test_kernel_contract import random_ranges, visible_keys

ROOT = pathlib.Path(__file__).parent.parent


def walks(items):
    return [walk.Walk(*row) for row in np.asarray(items).reshape(-1, walk.FIELDS).tolist()]


@pytest.mark.parametrize("ranges", [random_ranges, wide_ranges])
@pytest.mark.parametrize("by", ["queries", "keys"])
def test_a_walk_visits_what_is_seen_once_and_masks_what_is_not_seen_whole(ranges, by):
    rng = np.random.default_rng(0)
    for tile_q, tile_k, rows in [(4, 8, 1), (8, 4, 2), (5, 3, 2)] * 2:
        queries, keys = tile_q * int(rng.integers(1, 6)), tile_k * int(rng.integers(1, 6))
        start, end = (jnp.asarray(x) for x in ranges(rng, rows, queries, keys))
        tiles = visible_keys(np.asarray(start), np.asarray(end), keys)
        tiles = tiles.reshape(rows, queries // tile_q, tile_q, keys // tile_k, tile_k).transpose(0, 1, 3, 2, 4)
        if by == "queries":
            items = walk.by_queries(start, end, 2, (tile_q, tile_k))
        else:
            items, tiles = walk.by_keys(start, end, keys, 2, (tile_q, tile_k)), tiles.swapaxes(1, 2)
        found = walks(items)
        assert sorted((item.batch, item.own) for item in found) == [
            (b, i) for b in (0, 1) for i in range(tiles.shape[1])
        ]
        assert [item.steps for item in found] == sorted((item.steps for item in found), reverse=True)
        for item in found:
            seen = tiles[item.batch % rows, item.own]
            visited = [int(item.tile(step)) for step in range(item.steps)]
            assert sorted(visited) == list(range(min(visited, default=0), max(visited, default=-1) + 1))
            assert set(np.flatnonzero(seen.any(axis=(1, 2)))) <= set(visited)
            assert all(seen[tile].all() for tile in visited[item.masked :])
            assert not any(seen[tile].all() for tile in visited[: item.masked])


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_walk_in_rounds_makes_every_step_in_every_round_masked_ones_first(rounds):
    for masked, steps in [(0, 0), (2, 2), (0, 3), (2, 5)]:
        item = walk.Walk(0, 0, 0, 0, 0, masked, 0, steps)
        made = [tuple(int(x) for x in item.visit(jnp.int32(turn), rounds)) for turn in range(rounds * steps)]
        assert sorted(made) == [(which, step) for which in range(rounds) for step in range(steps)]
        assert all(step < masked for _, step in made[: rounds * masked])


def test_in_the_interpreter_it_is_right():
    """Ranges, odd sizes, a mask per sequence, grouped heads, ALiBi and softcap, forward and backward."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.interpreted_hopper"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("right:") == 2


@pytest.mark.parametrize(("dim", "options"), [(64, {"alibi": True}), (128, {"softcap": 30.0}), (128, {})], ids=str)
def test_it_lowers_for_gpus(dim, options):
    """For which there need be none here."""
    shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    q, k = shape(1, 256, 4, dim), shape(1, 256, 2, dim)
    out, lse = shape(*q.shape, dtype=jnp.float32), shape(1, 256, 4, dtype=jnp.float32)
    bounds, places = shape(1, 256, dtype=jnp.int32), shape(256, dtype=jnp.int32)

    def both(q, k, v, out, lse, dout, start, end, places):
        bias = sa.alibi(jnp.ones(4)) if "alibi" in options else None
        block = Block(start, end, places, places, bias=bias, softcap=options.get("softcap"))
        return kernel.attend(q)(k, v, block), kernel.attend_grad(q, out, lse, dout)(k, v, block)

    traced = jax.jit(both).trace(q, k, k, out, lse, out, bounds, bounds, places)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu") >= 3

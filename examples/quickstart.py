"""Quickstart: run Striped Attention on 8 virtual CPU devices, check the result, and see how stripes balance the work.

python examples/quickstart.py
"""

import jax
import numpy as np

import striped_attention as sa
from striped_attention.core.oracle import dense_attention
from striped_attention.kernels.xla import CPU_TILE
from striped_attention.planning.work import count_tiles

DEVICES, LENGTH = 8, 4096


def check() -> None:
    """Compare attention over the mesh with dense attention on one device."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((1, LENGTH, 4, 64), np.float32)
    key, value = rng.standard_normal((2, 1, LENGTH, 2, 64), np.float32)

    mesh = jax.make_mesh((DEVICES,), ("sequence",))
    layout = sa.striped()
    q, k, v = (layout.permute(x, devices=DEVICES, axis=1) for x in (query, key, value))
    out = sa.attention(q, k, v, mesh=mesh, axis_name="sequence", layout=layout, mask=sa.causal())
    out = layout.restore(out, devices=DEVICES, axis=1)

    error = float(np.abs(out - dense_attention(query, key, value, sa.causal().dense(LENGTH))).max())
    print(f"{LENGTH} tokens on {DEVICES} devices, {layout}: largest difference from dense attention {error:.1e}")
    if error > 1e-5:
        raise SystemExit("The result differs from dense attention: please report this.")
    print("The result equals dense attention.\n")


def show_work() -> None:
    """Show the tiles that each device runs, and the critical path: every step waits for its busiest device."""
    length, tile = 65_536, CPU_TILE
    print(f"Tiles of {tile[0]} × {tile[1]} that each device runs for {length} tokens (causal, one head):\n")
    print(f"{'layout':14}" + "".join(f"{f'dev {d}':>8}" for d in range(DEVICES)) + f"{'critical path':>16}")
    paths = []
    for layout in (sa.contiguous(), sa.striped(), sa.zigzag()):
        tiles = count_tiles(layout, sa.causal(), length, DEVICES, tile)
        paths.append(int(tiles.max(axis=0).sum()))
        row = "".join(f"{n:>8}" for n in tiles.sum(axis=1))
        print(f"{layout!r:14}{row}{paths[-1]:>16}  ({paths[0] / paths[-1]:.2f}× contiguous)")
    print("\nThe critical path sums the busiest device of every step: it bounds the time on 8 real devices.")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    check()
    show_work()

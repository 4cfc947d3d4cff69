"""Compare rings of TPUs, run by the Pallas interpreter, with the oracle.

This is a separate program, because devices that wait for each other inside callbacks need a thread each, and the number
of threads is fixed when JAX starts. The interpreter does not support check_vma.
"""

import os

os.environ["NPROC"] = "16"
import tests.conftest  # noqa: F401, I001  eight devices, strict dtypes
import functools
import unittest.mock

import jax
import numpy as np

import striped_attention as sa
from striped_attention.kernels.tpu.emulation import emulated
from tests.compare import FLOAT32_TOLERANCE, Shape, errors, expected, on_mesh

LENGTH, DEVICES = 700, 4
SEGMENTS = np.sort(np.random.default_rng(0).integers(0, 6, (1, LENGTH)), axis=1)
CASES = [
    (sa.striped(128), sa.causal(), {"heads": 2}),
    (sa.striped(1), sa.documents(SEGMENTS), {"sinks": True, "softcap": 2.0}),
    (sa.zigzag(), sa.sliding_window(150), {"bias": "alibi"}),
    (sa.contiguous(), sa.prefix(200) & sa.documents(SEGMENTS), {}),
    (sa.striped(64), sa.full(), {}),
]


def main() -> None:
    on_tpus = unittest.mock.patch("striped_attention.attention.current_device", return_value=("tpu", "TPU v5"))
    unchecked = unittest.mock.patch("jax.shard_map", functools.partial(jax.shard_map, check_vma=False))
    with emulated(), on_tpus, unchecked:
        for layout, mask, options in CASES:
            shape = Shape(batch=1, length=LENGTH, dim=16, tile=128, **options)
            arrays = shape.arrays()
            found = on_mesh(shape, DEVICES, layout)(arrays, mask)
            wrong = errors(found, expected(shape, arrays, mask.dense(LENGTH)))
            print(layout, mask, options, {name: f"{error:.1e}" for name, error in wrong.items()}, flush=True)
            assert max(wrong.values()) <= FLOAT32_TOLERANCE
    print("no races")


if __name__ == "__main__":
    main()

"""Emulation: the kernels in the interpreter of Pallas, on a CPU.

Threads of a thread block wait for each other inside of callbacks, so JAX must have threads enough when it starts:
NPROC=16 in the environment. Products are plain ones: the interpreter's tensor cores take nothing from registers.
"""

import contextlib
from collections.abc import Iterator

from striped_attention.kernels.hopper import parts


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """A context in which the kernel runs on a CPU."""
    from jax._src.pallas.mosaic_gpu.interpret import params  # public from JAX 0.11.2 on

    parts.emulating = True
    try:
        with params.force_gpu_interpret_mode(params.InterpretGPUParams()):
            yield
    finally:
        parts.emulating = False

"""Emulation: the kernels in the interpreter of Pallas, on a CPU.

Threads of a thread block wait for each other inside of callbacks, so JAX must have threads enough when it starts:
NPROC=16 in the environment. Products are plain ones: the interpreter's tensor cores take nothing from registers.
"""

import contextlib
import os
from collections.abc import Iterator

from striped_attention.kernels.hopper import kernel

_THREADS = 16


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """A context in which the kernel runs on a CPU, in float32 as well."""
    from jax._src.pallas.mosaic_gpu.interpret import params  # public from JAX 0.11.2 on

    from striped_attention.kernels.hopper import parts

    if int(os.environ.get("NPROC", os.cpu_count() or 1)) < _THREADS:
        raise RuntimeError(f"Interpreted kernels would wait for each other for ever: start with NPROC={_THREADS}.")
    parts.emulating = True
    kernel.RATES["cpu"] = kernel.RATES["gpu"]
    kernel.DTYPES.append("float32")
    kernel.KINDS.append("CPU")
    try:
        with params.force_gpu_interpret_mode(params.InterpretGPUParams()):
            yield
    finally:
        parts.emulating = False
        del kernel.RATES["cpu"]
        kernel.DTYPES.remove("float32")
        kernel.KINDS.remove("CPU")

"""Emulation: the kernels in Pallas's interpreter, on a CPU.

Threads of a thread block wait for each other inside callbacks, so JAX must start with enough threads: set NPROC=16 in
the environment. Matrix products are plain ones, because the interpreter's wgmma does not accept register operands.
"""

import contextlib
import os
from collections.abc import Iterator

from striped_attention.kernels.hopper import kernel

_THREADS = 16


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Context manager in which the kernel runs on a CPU and also supports float32."""
    from jax._src.pallas.mosaic_gpu.interpret import params  # public since JAX 0.11.2

    from striped_attention.kernels.hopper import parts

    if int(os.environ.get("NPROC", os.cpu_count() or 1)) < _THREADS:
        raise RuntimeError(f"Interpreted kernels would deadlock for lack of threads: start with NPROC={_THREADS}.")
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

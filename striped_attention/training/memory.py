"""Memory: how much device memory a run may use, and a program that stays within it.

Estimates choose what a step keeps for its backward pass; the compiler decides. If the compiled program needs more
memory than allowed, the next choice, which keeps less, is compiled instead.
"""

import dataclasses
import os
import platform
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from striped_attention.planning import budget
from striped_attention.planning.cost import gigabytes
from striped_attention.runtime.hardware import hardware_of
from striped_attention.training.config import TrainConfig
from striped_attention.training.step import Program

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
MEGABYTE = 2**20


def reserve(share: float) -> None:
    """Let JAX use this share of a GPU's memory, unless the environment sets it. Call before any device is used."""
    os.environ.setdefault(FRACTION, f"{share:g}")


def available(share: float) -> float:
    """Bytes that a program may use per device: `share` of its memory. The minimum over all processes, because all of
    them compile the same program."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if device.platform == "cpu":  # virtual devices share the machine's memory
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        mine = share * machine / (jax.local_device_count() * _processes_here())
    elif limit is None:  # some allocators report no limit
        mine = share * hardware_of(device.platform, device.device_kind).memory
    elif device.platform == "gpu":
        mine = float(limit)  # the share set by `reserve`
    else:
        mine = share * limit
    if jax.process_count() == 1:
        return mine
    return float(_of_everybody(int(mine // MEGABYTE)).min()) * MEGABYTE


def _processes_here() -> int:
    """How many of a cluster's processes share this machine."""
    name = zlib.crc32(platform.node().encode()) % 2**31
    return int(np.sum(_of_everybody(name) == name))


def _of_everybody(number: int) -> np.ndarray:
    """Gather an integer below 2³¹ from every process."""
    return np.atleast_1d(multihost_utils.process_allgather(np.array(number, np.int32)))


def needed(program: Program) -> int | None:
    """Peak bytes per device of the compiled step; None if the compiler runs out of memory."""
    return peak(lambda: program.compiled)


def peak(compiled: Callable[[], Any]) -> int | None:
    """The same for any program; `compiled` compiles and returns it."""
    try:
        stats = compiled().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return int(kept + stats.temp_size_in_bytes)


def fitting(program: Program, asked: TrainConfig, room: float, say: Callable[[str], None]) -> Program:
    """Return the compiled program, or one that keeps less for the backward pass if this one needs more than `room`.

    `asked` are the options before --remat and --chunk were settled. If no choice needs less memory, warn and return the
    last program.
    """
    sizes = {str(axis): size for axis, size in program.mesh.shape.items()}
    while (need := needed(program)) is None or need > room:
        asked = dataclasses.replace(asked, strategy=program.config.strategy)
        less = budget.frugal(program.config, asked, sizes, program.platform)
        if less is None:
            if need is not None:
                say(
                    f"Warning: the step needs {gigabytes(need)} of memory per device, more than the "
                    f"{gigabytes(int(room))} that --memory allows, and no setting that needs less is left. Use more "
                    f"devices, a shorter --length or a larger --accumulate."
                )
            break
        said = "too much" if need is None else f"{gigabytes(need)} of {gigabytes(int(room))}"
        say(f"The compiled step needs {said} of memory per device: trying --remat {less.remat} --chunk {less.chunk} …")
        program = dataclasses.replace(program, config=less)
    return program

"""Compiler: options for `jax.jit` with which XLA overlaps transfers with attention.

    step = jax.jit(step, compiler_options=sa.compiler_options())

On GPUs XLA starts one transfer at a time unless it is told otherwise, but a step of a ring has up to four: k, v, dk and
dv. Small ones it would combine, also those of two steps, and then cannot overlap them.

On TPUs rings overlap without options, but XLA waits for every all-gather. With these options a v4 gathers k and v while
attention runs. Later TPUs ignore them: there a SparseCore has to gather (docs/tpu.md).
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

GPU_OPTIONS = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": "4",
    "xla_gpu_collective_permute_combine_threshold_bytes": "0",
}
TPU_OPTIONS = {
    "xla_enable_async_all_gather": "true",
    "xla_max_concurrent_async_all_gathers": "2",
}
# Adds up in the same order every time, also what is scattered, as the gradients of embeddings are. Slower.
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}


def compiler_options(
    platform: str | None = None, deterministic: bool = False, device: Any = None
) -> dict[str, str | bool]:
    """Options for `jax.jit(…, compiler_options=…)` on a platform, by default JAX's own: none but on GPUs and TPUs.

    `deterministic` asks for programs that give the same bits in every run; elsewhere than on GPUs all do.
    `device` is one to compile for that is not here, of a topology; its platform counts.

    An option for overlap that the installed XLA does not know is left out, with a warning: programs compile, but
    transfers may not overlap with attention. One for `deterministic` is not: such a program does not compile.
    """
    if device is not None:
        platform = device.platform
    platform = jax.default_backend() if platform is None else platform
    if platform == "tpu":
        # Only the compiler for TPUs knows its options. Where it is not at hand they are taken as known.
        if device is None and jax.default_backend() != "tpu":
            return dict(TPU_OPTIONS)
        return {name: value for name, value in TPU_OPTIONS.items() if _is_known(name, value, device)}
    if platform not in ("gpu", "cuda"):
        return {}
    known = {name: value for name, value in GPU_OPTIONS.items() if _is_known(name, value)}
    return {**known, **(DETERMINISTIC if deterministic else {})}


@functools.cache
def _is_known(name: str, value: str, device: Any = None) -> bool:
    """Whether XLA takes an option: it refuses a program with one that it does not know."""
    sharding = None if device is None else SingleDeviceSharding(device)
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)
    try:
        jax.jit(lambda x: x).lower(number).compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if name not in str(error):
            raise
        warnings.warn(
            f"This XLA does not know the option {name}, so transfers may not overlap with attention: "
            f"{str(error).splitlines()[0]}",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True

"""Compiler: options for `jax.jit` with which XLA overlaps transfers with attention.

    step = jax.jit(step, compiler_options=sa.compiler_options())

On GPUs, XLA runs one transfer at a time by default, but a step of a ring has up to four: k, v, dk and dv. By default it
also combines small transfers, even those of different steps, which then cannot overlap with attention.

On TPUs, rings overlap without options, but XLA waits for every all-gather. With these options a v4 gathers k and v
while attention runs. Later TPUs ignore them: there a SparseCore must do the gather (docs/tpu.md).
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
# Fixes the order of all sums, including scatters such as the gradients of embeddings. Slower.
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}


def compiler_options(
    platform: str | None = None, deterministic: bool = False, device: Any = None
) -> dict[str, str | bool]:
    """Return options for `jax.jit(…, compiler_options=…)`; empty except on GPUs and TPUs. Default platform: JAX's own.

    `deterministic` requests programs that are bitwise reproducible; only GPUs need an option for it. `device` is a
    device to compile for that is not on this machine, taken from a topology; its platform is used.

    An overlap option that the installed XLA does not know is left out with a warning: programs compile, but transfers
    may not overlap with attention. The option for `deterministic` is always passed: an XLA without it does not compile.
    """
    if device is not None:
        platform = device.platform
    platform = jax.default_backend() if platform is None else platform
    if platform == "tpu":
        # Only the TPU compiler can check its options. Where it is not available, they are assumed to be known.
        if device is None and jax.default_backend() != "tpu":
            return dict(TPU_OPTIONS)
        return {name: value for name, value in TPU_OPTIONS.items() if _is_known(name, value, device)}
    if platform not in ("gpu", "cuda"):
        return {}
    known = {name: value for name, value in GPU_OPTIONS.items() if _is_known(name, value)}
    return {**known, **(DETERMINISTIC if deterministic else {})}


@functools.cache
def _is_known(name: str, value: str, device: Any = None) -> bool:
    """Return whether XLA knows an option, by compiling with it: XLA rejects unknown options."""
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

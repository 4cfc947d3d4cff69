"""Compiler: options for `jax.jit` with which XLA overlaps the transfers of a ring with attention.

    step = jax.jit(step, compiler_options=sa.compiler_options())

On GPUs XLA starts one transfer at a time unless it is told otherwise, but a step of a ring has up to four: k, v, dk and
dv. Small ones it would combine, also those of two steps, and then cannot overlap them. Elsewhere nothing is needed.
"""

import functools
import warnings

import jax

GPU_OPTIONS = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": "4",
    "xla_gpu_collective_permute_combine_threshold_bytes": "0",
}
# Adds up in the same order every time, also what is scattered, as the gradients of embeddings are. Slower.
DETERMINISTIC = {"xla_gpu_deterministic_ops": True}


def compiler_options(platform: str | None = None, deterministic: bool = False) -> dict[str, str | bool]:
    """Options for `jax.jit(…, compiler_options=…)` on a platform, by default JAX's own: none but on GPUs.

    `deterministic` asks for programs that give the same bits in every run; elsewhere than on GPUs all do.

    An option for overlap that the installed XLA does not know is left out, with a warning: programs compile, but
    transfers may not overlap with attention. One for `deterministic` is not: such a program does not compile.
    """
    platform = jax.default_backend() if platform is None else platform
    if platform not in ("gpu", "cuda"):
        return {}
    known = {name: value for name, value in GPU_OPTIONS.items() if _is_known(name, value)}
    return {**known, **(DETERMINISTIC if deterministic else {})}


@functools.cache
def _is_known(name: str, value: str) -> bool:
    """Whether XLA takes an option: it refuses a program with one that it does not know."""
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(0.0).compile()
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

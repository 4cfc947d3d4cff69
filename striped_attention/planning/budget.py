"""Budget: choose what a step keeps for its backward pass (`remat`), and the chunk size of its stages.

The more a step keeps, the less it recomputes. Larger chunks, up to a point, keep a device busier. The choice is the
first of `options` whose estimated memory is within the budget: from keeping everything, where there is memory to spare,
to full recomputation, which fits the longest sequences.
"""

import dataclasses
from typing import TypeVar

from striped_attention.models.llama import KEEP_ALL, REMAT
from striped_attention.planning.cost import Job, estimate

AUTO = "auto"
# Tokens of a chunk. More hardly keep a device busier, and near the memory limit XLA stops overlapping transfers
# (docs/tpu.md); fewer save little memory.
LARGE, LEAST = 8192, 1024

AnyJob = TypeVar("AnyJob", bound=Job)


def options(remat: str, chunk: int | None, tokens: int, platform: str) -> list[tuple[str, int]]:
    """Return pairs of `remat` and `chunk`, the fastest first, for `tokens` per device.

    Layers are unrolled only on GPUs, where a loop copies what layers keep to and from arrays of all layers. A chunk
    that is too small costs more than recomputing attention's inputs, and less than recomputing attention.
    """
    kinds = (REMAT if platform == "gpu" else REMAT[1:]) if remat == AUTO else (remat,)
    if chunk is not None:
        return [(kind, chunk) for kind in kinds]
    large = min(LARGE, tokens)
    small = [large // part for part in (2, 4, 8) if large // part >= LEAST]
    found = []
    for kind in kinds:
        found.append((kind, tokens if kind in KEEP_ALL else large))  # with those, only the loss is chunked
        if kind == kinds[-1] or kind == "attention":
            found += [(kind, size) for size in small]
    return found


def within(job: AnyJob, mesh: dict[str, int], budget: float, platform: str) -> AnyJob:
    """Return the job with its fastest options within `budget` bytes per device, or the most frugal ones if none fit."""
    tokens = -(-job.batch // mesh["data"] // job.accumulate) * -(-job.sequence_length // mesh["sequence"])
    tried = [_with(job, *pair) for pair in options(job.remat, job.chunk, tokens, platform)]
    return next((one for one in tried if estimate(one, mesh).total_memory <= budget), tried[-1])


def frugal(job: AnyJob, asked: AnyJob, mesh: dict[str, int], platform: str) -> AnyJob | None:
    """Return `asked` with the fastest options that need less memory than the estimate for `job`; None if none do."""
    needs = estimate(job, mesh).total_memory
    least = within(asked, mesh, needs - 1.0, platform)
    return least if estimate(least, mesh).total_memory < needs else None


def _with(job: AnyJob, remat: str, chunk: int) -> AnyJob:
    return dataclasses.replace(job, remat=remat, chunk=chunk)  # type: ignore[type-var]

"""Budget: what a step keeps for its backward pass, and how many tokens its stages take at a time.

The more a step keeps, the less it computes twice; the larger its chunks, up to a size, the busier a device is. The
choice is the first of `options` whose estimated memory is within a budget: from "keep everything" on a roomy device to
the frugal plan that fits the longest sequences.
"""

import dataclasses
from typing import TypeVar

from striped_attention.models.llama import REMAT
from striped_attention.planning.cost import Job, estimate

AUTO = "auto"
# Tokens. More make a device hardly busier, and near the limit of memory XLA hides no transfers (docs/tpu.md); fewer
# save little memory.
LARGE, LEAST = 8192, 1024

AnyJob = TypeVar("AnyJob", bound=Job)


def options(remat: str, chunk: int | None, tokens: int) -> list[tuple[str, int]]:
    """Pairs of `remat` and `chunk`, the fastest first; `tokens` are those of a device.

    A chunk that is too small costs more than attention's inputs computed again, and less than attention itself.
    """
    kinds = REMAT if remat == AUTO else (remat,)
    if chunk is not None:
        return [(kind, chunk) for kind in kinds]
    large = min(LARGE, tokens)
    small = [large // part for part in (2, 4, 8) if large // part >= LEAST]
    found = []
    for kind in kinds:
        found.append((kind, tokens if kind == "none" else large))  # with none only the loss works in chunks
        if kind == kinds[-1] or kind == "attention":
            found += [(kind, size) for size in small]
    return found


def within(job: AnyJob, mesh: dict[str, int], budget: float) -> AnyJob:
    """The job with the fastest options that need at most `budget` bytes per device, or else those that need least."""
    tokens = -(-job.batch // mesh["data"] // job.accumulate) * -(-job.sequence_length // mesh["sequence"])
    tried = [_with(job, *pair) for pair in options(job.remat, job.chunk, tokens)]
    return next((one for one in tried if estimate(one, mesh).total_memory <= budget), tried[-1])


def frugal(job: AnyJob, asked: AnyJob, mesh: dict[str, int]) -> AnyJob | None:
    """What `asked` comes to with the next options that need less memory than `job` is estimated to; None if none do."""
    needs = estimate(job, mesh).total_memory
    least = within(asked, mesh, needs - 1.0)
    return least if estimate(least, mesh).total_memory < needs else None


def _with(job: AnyJob, remat: str, chunk: int) -> AnyJob:
    return dataclasses.replace(job, remat=remat, chunk=chunk)  # type: ignore[type-var]

"""Mock: run one device of a ring of GPUs on a single GPU.

JAX can mock a topology of N GPUs (`jax_mock_gpu_topology`): it compiles the real program for N GPUs and runs the part
of one. Transfers then take no time and return uninitialised memory, mostly zeros and NaN, on which a GPU computes
faster. So the timed program replaces collectives by local stand-ins that keep what the device would send (`at_home`):

    collective                          stand-in
    ppermute of k and v                 the device's own k and v, with heads reversed (a copy)
    ppermute of sums of dk and dv       the device's own sums; with `sums`, a copy with heads reversed as well
    all_to_all                          the device's own chunks, as if it had received them
    all_gather of keys or weights       the device's own shard, repeated for every device of the group
    all_gather of the mask's ranges     the real ranges of the group, because the amount of work depends on them
    psum_scatter                        the device's shard of its own contribution

Small sums over the ring (loss, norms) are kept: only the optimiser uses them.
"""

import concurrent.futures
import contextlib
import itertools
import os
import unittest.mock
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from striped_attention.core.mask import Mask
from striped_attention.errors import UsageError
from striped_attention.kernels.cudnn import binding as cudnn
from striped_attention.runtime.record import usable_cores
from striped_attention.training import memory
from striped_attention.training.config import TrainConfig
from striped_bench.bench.workers import Team

PROCESSES = 4  # processes that check answers in parallel


class Task:
    """The object in a GPU suite's worker process: an iterator over the results of a function."""

    def __init__(
        self, function: Callable[..., Iterable[Any]], mocked: int | None, share: float, options: Any, **_: Any
    ) -> None:
        if mocked is not None:  # sharded autotuning would wait for the mocked GPUs
            os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_shard_autotuning=false"
            jax.config.update("jax_mock_gpu_topology", f"{mocked}x1x1")
        memory.reserve(share)
        if (reason := cudnn.unavailable()) is not None:
            raise UsageError(f"This suite needs cuDNN, at least as the baseline. {reason}")
        self._results = iter(function(**options))

    def next(self) -> Any:
        return next(self._results, None)


def results(
    function: Callable[..., Iterable[Any]],
    mocked: int | None = None,
    share: float = TrainConfig.memory,
    **options: Any,
) -> Iterator[Any]:
    """Yield a function's results from a separate process: the number of GPUs that JAX sees is fixed when it starts.

    The process gets the fraction `share` of the GPU's memory.
    """
    with Team(Task, [set(usable_cores())], function=function, mocked=mocked, share=share, options=options) as team:
        while (found := team.ask("next")[0]) is not None:
            yield found


def side_by_side(function: Callable[..., Iterable[Any]], cases: Sequence[Any], **options: Any) -> Iterator[Any]:
    """Yield a function's results for `cases`, distributed over processes that run in parallel.

    The processes share the GPU, so use this for checks, not for timing.
    """
    count = min(len(cases), PROCESSES)

    def some(first: int) -> list[Any]:
        return list(results(function, share=TrainConfig.memory / count, cases=cases[first::count], **options))

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        yield from itertools.chain.from_iterable(pool.map(some, range(count)))


@contextlib.contextmanager
def at_home(mask: Mask | None = None, sums: bool = True) -> Iterator[None]:
    """Trace programs with stand-ins for collectives (see above). `mask`: of the whole sequence, in layout order."""

    def ppermute(x: Any, axis_name: Any, perm: Any) -> Any:
        return lax.rev(x, (2,)) if sums or x.dtype != jnp.float32 else lax.optimization_barrier(x)

    def all_to_all(x: Any, axis_name: Any, split_axis: int, concat_axis: int, *, axis_index_groups: Any = None) -> Any:
        assert split_axis == concat_axis == 0
        assert len(x) == _groups(axis_name, axis_index_groups).shape[1]  # one chunk per device
        return lax.optimization_barrier(x)

    def all_gather(x: Any, axis_name: Any, *, axis: int, tiled: bool, axis_index_groups: Any = None) -> Any:
        assert tiled
        groups = _groups(axis_name, axis_index_groups)
        own = lax.optimization_barrier(jnp.concatenate([x] * groups.shape[1], axis=axis))
        return _ranges(mask, own, axis_name, groups) if x.dtype == jnp.int32 else own

    def psum_scatter(
        x: Any, axis_name: Any, *, scatter_dimension: int, tiled: bool, axis_index_groups: Any = None
    ) -> Any:
        assert tiled
        parts = _groups(axis_name, axis_index_groups).shape[1]
        size = x.shape[scatter_dimension] // parts
        first = lax.axis_index(axis_name) % parts * size
        return lax.dynamic_slice_in_dim(lax.optimization_barrier(x), first, size, scatter_dimension)

    # The barriers hide the stand-ins' contents: otherwise the compiler could skip part of the arithmetic.
    stand_ins: dict[str, Any] = dict(
        ppermute=ppermute, all_to_all=all_to_all, all_gather=all_gather, psum_scatter=psum_scatter
    )
    jax.clear_caches()  # before and after: the patch is not part of JAX's cache key
    try:
        with unittest.mock.patch.multiple(lax, **stand_ins):
            yield
    finally:
        jax.clear_caches()


def _groups(axis_name: Any, groups: Any) -> np.ndarray:
    """Groups of devices that exchange data, one group per row."""
    return np.array([range(lax.axis_size(axis_name))] if groups is None else groups, np.int32)


def _ranges(mask: Mask | None, own: Any, axis_name: Any, groups: np.ndarray) -> Any:
    """Return what an all-gather of the mask's only array, [rows, slots], would give."""
    (whole,) = map(np.asarray, jax.tree.leaves(mask))
    group_of = groups[np.argsort(groups.reshape(-1)) // groups.shape[1]]  # by device
    shards = whole.reshape(len(whole), groups.size, -1)
    found = jnp.take(shards, jnp.take(group_of, lax.axis_index(axis_name), axis=0), axis=1)
    return found.reshape(own.shape) + 0 * own  # varies over the mesh like `own`


def gpu() -> dict[str, Any]:
    """Describe the real GPU."""
    device = jax.local_devices()[0]
    limit = device.memory_stats()["bytes_limit"]
    return {"name": device.device_kind, "memory_for_jax": limit, "cudnn": cudnn.version()}

"""Mock: one device of a ring of GPUs, on one GPU.

JAX can pretend that there are N GPUs (`jax_mock_gpu_topology`): it compiles the real program for N, and runs the part
of one device. A transfer then takes no time and brings whatever lay in memory, mostly zeros and NaN, on which a GPU is
faster. So in the program that is timed a device keeps what it would send (`at_home`):

    collective                          stand-in
    ppermute of k and v                 its own, heads in another order
    ppermute of sums of dk and dv       its own; with `sums` heads in another order, a copy like that of k and v
    all_to_all                          its own pieces, as if it had received them
    all_gather of keys or weights       its own, once for every device of the group
    all_gather of the mask's ranges     the real ones of the group: the amount of work depends on them
    psum_scatter                        its own part of what it would add to the sum

Small sums over the ring (loss, norms) are left alone: only the optimiser sees them.
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

PROCESSES = 4  # that check answers at the same time


class Task:
    """What a worker of a suite for GPUs holds: the results of a function, made one by one."""

    def __init__(
        self, function: Callable[..., Iterable[Any]], mocked: int | None, share: float, options: Any, **_: Any
    ) -> None:
        if mocked is not None:  # sharded autotuning waits for GPUs that are not there
            os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_shard_autotuning=false"
            jax.config.update("jax_mock_gpu_topology", f"{mocked}x1x1")
        memory.reserve(share)
        if (reason := cudnn.unavailable()) is not None:
            raise UsageError(f"This suite measures cuDNN, at least to compare with. {reason}")
        self._results = iter(function(**options))

    def next(self) -> Any:
        return next(self._results, None)


def results(
    function: Callable[..., Iterable[Any]],
    mocked: int | None = None,
    share: float = TrainConfig.memory,
    **options: Any,
) -> Iterator[Any]:
    """What a function yields in a process of its own, for how many GPUs JAX sees is settled when it starts.

    The process gets this `share` of the GPU's memory.
    """
    with Team(Task, [set(usable_cores())], function=function, mocked=mocked, share=share, options=options) as team:
        while (found := team.ask("next")[0]) is not None:
            yield found


def side_by_side(function: Callable[..., Iterable[Any]], cases: Sequence[Any], **options: Any) -> Iterator[Any]:
    """What a function yields for its `cases`, shared out among processes that work at the same time.

    They share the GPU too, so it is for what is checked, not for what is timed.
    """
    count = min(len(cases), PROCESSES)

    def some(first: int) -> list[Any]:
        return list(results(function, share=TrainConfig.memory / count, cases=cases[first::count], **options))

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        yield from itertools.chain.from_iterable(pool.map(some, range(count)))


@contextlib.contextmanager
def at_home(mask: Mask | None = None, sums: bool = True) -> Iterator[None]:
    """Trace programs whose devices keep what they would send; see above. `mask` is the whole one, in layout order."""

    def ppermute(x: Any, axis_name: Any, perm: Any) -> Any:
        return lax.rev(x, (2,)) if sums or x.dtype != jnp.float32 else lax.optimization_barrier(x)

    def all_to_all(
        x: Any, axis_name: Any, split_axis: int, concat_axis: int, *, tiled: bool, axis_index_groups: Any = None
    ) -> Any:
        assert tiled
        pieces = jnp.split(x, _groups(axis_name, axis_index_groups).shape[1], axis=split_axis)
        return lax.optimization_barrier(jnp.concatenate(pieces, axis=concat_axis))

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

    # Barriers, because a compiler that knew what the stand-ins are made of could do with a part of the arithmetic.
    stand_ins: dict[str, Any] = dict(
        ppermute=ppermute, all_to_all=all_to_all, all_gather=all_gather, psum_scatter=psum_scatter
    )
    jax.clear_caches()  # before and after: this is no argument that JAX could see
    try:
        with unittest.mock.patch.multiple(lax, **stand_ins):
            yield
    finally:
        jax.clear_caches()


def _groups(axis_name: Any, groups: Any) -> np.ndarray:
    """The devices that exchange something with each other, a row for each group."""
    return np.array([range(lax.axis_size(axis_name))] if groups is None else groups, np.int32)


def _ranges(mask: Mask | None, own: Any, axis_name: Any, groups: np.ndarray) -> Any:
    """What gathering the mask's only array, [rows, slots], would bring."""
    (whole,) = map(np.asarray, jax.tree.leaves(mask))
    group_of = groups[np.argsort(groups.reshape(-1)) // groups.shape[1]]  # by device
    shards = whole.reshape(len(whole), groups.size, -1)
    found = jnp.take(shards, jnp.take(group_of, lax.axis_index(axis_name), axis=0), axis=1)
    return found.reshape(own.shape) + 0 * own  # varies over the mesh like `own`


def gpu() -> dict[str, Any]:
    """The one that exists."""
    device = jax.local_devices()[0]
    limit = device.memory_stats()["bytes_limit"]
    return {"name": device.device_kind, "memory_for_jax": limit, "cudnn": cudnn.version()}

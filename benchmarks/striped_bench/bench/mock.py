"""Mock: one member of a ring of GPUs, on one GPU.

JAX can pretend that there are N GPUs (`jax_mock_gpu_topology`): it compiles the real program for N, and runs the part
of one member. A transfer then takes no time and brings whatever lay in memory, mostly zeros and NaN, on which a GPU is
faster. So in the program that is timed a member keeps what it would send: a copy on the GPU stands for the transfer.

    sent in the ring             stands in                                       with
    k and v                      its own, heads in another order                 keys_at_home
    sums of dk and dv            its own, heads in another order                 all_at_home
    shards of weights            its own, as often as there are members          all_at_home
    sums of weights' gradients   its own part of what it would add to the sum    all_at_home

Small sums over the ring (loss, norms) are left alone: only the optimiser sees them.
"""

import contextlib
import os
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from striped_attention.errors import UsageError
from striped_attention.kernels.cudnn import binding as cudnn
from striped_attention.models import stages as parallel
from striped_attention.models.stages import AXES
from striped_attention.runtime.record import usable_cores
from striped_attention.strategies import ring
from striped_attention.strategies.problem import Problem
from striped_bench.bench.workers import Team


class Task:
    """What a worker of a suite for GPUs holds: the results of a function, made one by one."""

    def __init__(self, function: Callable[..., Iterable[Any]], mocked: int | None, options: Any, **_: Any) -> None:
        if mocked is not None:  # sharded autotuning waits for GPUs that are not there
            os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_shard_autotuning=false"
            jax.config.update("jax_mock_gpu_topology", f"{mocked}x1x1")
        if (reason := cudnn.unavailable()) is not None:
            raise UsageError(f"This suite measures the cudnn kernel. {reason}")
        self._results = iter(function(**options))

    def next(self) -> Any:
        return next(self._results, None)


def results(function: Callable[..., Iterable[Any]], mocked: int | None = None, **options: Any) -> Iterator[Any]:
    """What a function yields in a process of its own, for how many GPUs JAX sees is settled when it starts."""
    with Team(Task, [set(usable_cores())], function=function, mocked=mocked, options=options) as team:
        while (found := team.ask("next")[0]) is not None:
            yield found


@contextlib.contextmanager
def keys_at_home(sums: bool = False) -> Iterator[None]:
    """Let members keep their keys and values instead of sending them, and with `sums` those of dk and dv too."""
    send = ring.send

    def stay(problem: Problem, x: Any, places: int) -> Any:
        sent = lambda leaf: leaf.dtype == jnp.float32 and not sums  # noqa: E731
        return jax.tree.map(lambda leaf: send(problem, leaf, places) if sent(leaf) else lax.rev(leaf, (2,)), x)

    jax.clear_caches()  # before and after: this is no argument that JAX could see
    try:
        with unittest.mock.patch.object(ring, "send", stay):
            yield
    finally:
        jax.clear_caches()


@contextlib.contextmanager
def all_at_home() -> Iterator[None]:
    """Let members keep keys, values and the sums of their gradients, and work with their own shards of weights."""

    # Barriers, because a compiler that knew what the stand-ins are made of could do with a part of the arithmetic.
    def gather(shards: Any, dims: Any, dtype: Any) -> Any:
        def one(shard: Any, dim: int | None) -> Any:
            if dim is None:
                return lax.pcast(shard.astype(dtype), AXES.everything, to="varying")
            copies = [shard.astype(dtype)] * lax.axis_size(AXES.everything)
            return lax.optimization_barrier(jnp.concatenate(copies, axis=dim))

        return tuple(map(one, shards, dims))

    def scatter(total: Any, dims: Any) -> Any:
        def one(x: Any, dim: int | None) -> Any:
            if dim is None:
                return lax.psum(x, AXES.everything)
            size = x.shape[dim] // lax.axis_size(AXES.everything)
            first = lax.axis_index(AXES.everything) * size
            return lax.dynamic_slice_in_dim(lax.optimization_barrier(x), first, size, dim)

        return tuple(map(one, total, dims))

    with keys_at_home(sums=True), unittest.mock.patch.multiple(parallel, _gather=gather, _scatter=scatter):
        yield


def gpu() -> dict[str, Any]:
    """The one that exists."""
    device = jax.local_devices()[0]
    memory = device.memory_stats()["bytes_limit"]
    return {"name": device.device_kind, "memory_for_jax": memory, "cudnn": cudnn.version()}

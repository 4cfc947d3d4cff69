"""Launch: run one process or several.

JAX detects a cluster by itself (SLURM, Open MPI, Kubernetes, Cloud TPU); --coordinator, --num-processes and
--process-id describe any other. --local-processes starts several processes on this machine and monitors them. When a
process dies, the others stop within a minute: the parent process kills local ones, and JAX's heartbeats end those of a
cluster.
"""

import contextlib
import dataclasses
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax

from striped_attention.errors import UsageError
from striped_attention.training.output import hide_gloo

HEARTBEAT = 30  # seconds without a heartbeat after which a process counts as dead
GRACE = 10  # seconds a process has to exit by itself after another one failed


@runtime_checkable
class Processes(Protocol):
    """The options of a command that can run in several processes."""

    @property
    def cpu_devices(self) -> int | None: ...
    @property
    def local_processes(self) -> int | None: ...
    @property
    def coordinator(self) -> str | None: ...
    @property
    def num_processes(self) -> int | None: ...
    @property
    def process_id(self) -> int | None: ...


def connect(config: Processes) -> None:
    """Set up JAX: virtual CPU devices if requested, and the connection to other processes. Call before any device is
    used."""
    if config.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    if config.coordinator is not None:
        _initialize(
            config,
            coordinator_address=config.coordinator,
            num_processes=config.num_processes,
            process_id=config.process_id,
        )
    elif in_cluster(os.environ) or (config.cpu_devices is None and _on_cloud_tpu()):
        _initialize(config)


def _initialize(config: Processes, **where: Any) -> None:
    if config.cpu_devices is not None:
        hide_gloo()
    try:
        jax.distributed.initialize(**where, heartbeat_timeout_seconds=HEARTBEAT)
    except (ValueError, RuntimeError, OSError) as error:
        raise UsageError(
            f"The processes could not connect: {str(error).splitlines()[0].rstrip('.')}. Give --coordinator, "
            f"--num-processes and --process-id; on Kubernetes JAX finds them if the package kubernetes is installed."
        ) from error


def in_cluster(environment: Any) -> bool:
    """Whether a scheduler started this process as one of several."""
    several = lambda name: environment.get(name, "1") not in ("", "1")  # noqa: E731
    return (
        several("SLURM_STEP_NUM_TASKS")
        or several("OMPI_COMM_WORLD_SIZE")
        or "JAX_COORDINATOR_ADDRESS" in environment
        or {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= set(environment)
        or "," in environment.get("TPU_WORKER_HOSTNAMES", "")
    )


def _on_cloud_tpu() -> bool:
    """Whether this is a VM with TPU chips, perhaps one of several. There JAX queries Google's metadata server."""
    if "TPU_SKIP_MDS_QUERY" in os.environ or importlib.util.find_spec("libtpu") is None:
        return False
    return any(pathlib.Path("/dev").glob("accel*")) or any(pathlib.Path("/dev/vfio").glob("[0-9]*"))


def start_local(config: Any, run: Callable[[Any], int]) -> int:
    """Run a command in several processes on this machine. Return the exit code of the first that failed, or 0."""
    with reserved_port() as port:
        return _start_local(config, run, f"127.0.0.1:{port}")


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free port: a socket with SO_REUSEPORT stays bound to it, so no other program is given it. The
    coordinator of process 0 can still listen on it, because gRPC sets SO_REUSEPORT too. The socket itself does not
    listen, so every connection reaches the coordinator."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _start_local(config: Any, run: Callable[[Any], int], address: str) -> int:
    count = config.local_processes or 1
    context = multiprocessing.get_context("spawn")
    cores = _share_cores(count)
    processes = []
    for i in range(count):
        own = dataclasses.replace(config, local_processes=None, coordinator=address, num_processes=count, process_id=i)
        processes.append(context.Process(target=_child, args=(own, cores[i], run), name=f"process {i}"))
    for process in processes:
        process.start()

    def forward(*_: Any) -> None:
        for process in processes:
            process.terminate()

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _watch(processes)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(processes: list[Any]) -> int:
    """Wait for all processes; when one fails, stop the others."""
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                _end(process, list(running.values()))
                return process.exitcode if process.exitcode > 0 else 1
    return 0


def _end(dead: Any, others: list[Any]) -> None:
    if dead.exitcode < 0:
        how = f"was killed by {signal.Signals(-dead.exitcode).name}"
    else:
        how = f"ended with exit code {dead.exitcode}"
    print(f"striped: {dead.name} {how}; stopping the other {len(others)}.", file=sys.stderr, flush=True)
    deadline = time.monotonic() + GRACE
    for process in others:  # they would wait forever for the dead one, in a collective operation
        process.join(max(0, deadline - time.monotonic()) if dead.exitcode > 0 else 0)
        if process.is_alive():
            process.kill()
            process.join()


def _child(config: Any, cores: set[int], run: Callable[[Any], int]) -> None:
    os.setsid()  # Ctrl-C reaches only the parent, which forwards it as one signal
    threading.Thread(target=_follow_parent, daemon=True).start()
    if cores:
        os.sched_setaffinity(0, cores)
    sys.exit(run(config))


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _share_cores(count: int) -> list[set[int]]:
    """Divide the cores among the processes. Empty sets if the system cannot pin processes or has too few cores."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // count
    return [set(cores[i * each : (i + 1) * each]) for i in range(count)]

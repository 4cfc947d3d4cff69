"""Workers: processes that hold an object to be timed and, when idle, use no CPU time.

Contestants in one process would share its thread pools, and a pool that another library left spinning distorts a
measurement. So each contestant gets a `Team`: one process, or several that run in parallel and communicate (`ranks`).
Each rank is a pool of one process, pinned to its cores. The parent calls methods of the object in each process:

    with Team(Sdpa, cores=[{0, 1}]) as team:          Team(Ours, cores=[{0}, {1}]) has two ranks with a core each
        team.ask("prepare", 2048)
        seconds = max(team.ask("run", "forward"))     one answer per rank

If a process dies or, with several ranks, raises, the whole team is killed: the other ranks would wait forever.
"""

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from striped_attention.errors import UsageError
from striped_attention.runtime.record import usable_cores

_starting = threading.Lock()  # lets a team tell its own processes from those that other threads start


class WorkerError(RuntimeError):
    """A call raised an exception, or its process died. A team of one rank survives an exception."""


class Team(contextlib.ExitStack):
    """Processes that each hold `kind(rank=, ranks=, port=, **options)`; `cores` is the set of cores of each rank."""

    def __init__(self, kind: Callable[..., Any], cores: Sequence[set[int]], **options: Any) -> None:
        super().__init__()
        self._log: Any = self.enter_context(tempfile.NamedTemporaryFile("w+"))  # noqa: SIM115
        self.callback(self._end)
        self._processes: list[Any] = []
        self._futures: list[concurrent.futures.Future[Any]] = []
        spawned = functools.partial(concurrent.futures.ProcessPoolExecutor, 1, multiprocessing.get_context("spawn"))
        self._pools = [spawned(_begin, (self._log.name, own)) for own in cores]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place = {"ranks": len(cores), "port": probe.getsockname()[1]}
        for rank, pool in enumerate(self._pools):
            with _starting:
                others = set(multiprocessing.active_children())
                self._futures.append(pool.submit(_answer, kind, {"rank": rank, **place, **options}))
                self._processes += set(multiprocessing.active_children()) - others
        try:
            self._collect()
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the object in every process; return the answers by rank."""
        if not self.alive:
            raise WorkerError("the process has already ended")
        self._futures = [pool.submit(_answer, method, arguments) for pool in self._pools]
        return self._collect()

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def _collect(self) -> list[Any]:
        """Return an answer from every rank, or raise as soon as one of them fails."""
        concurrent.futures.wait(self._futures, return_when=concurrent.futures.FIRST_EXCEPTION)
        ended = [(rank, future.exception()) for rank, future in enumerate(self._futures) if future.done()]
        rank, error = next((found for found in ended if found[1] is not None), (0, None))
        if error is None:
            return [future.result() for future in self._futures]
        if isinstance(error, BrokenProcessPool):
            self._pools[rank].shutdown()
            code = self._processes[rank].exitcode
            ending = "was killed; out of memory?" if code == -signal.SIGKILL else f"ended, exit code {code}"
            error = WorkerError(f"process {rank} {ending}")
        if len(self._futures) > 1 or not self.alive:
            self._kill()
        if not isinstance(error, UsageError):
            self._log.seek(0)
            print(error.__cause__ or self._log.read()[-4000:], file=sys.stderr)
        raise error

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _end(self) -> None:
        """End the processes: kill them if they are busy, shut them down otherwise."""
        if not all(future.done() for future in self._futures):
            self._kill()
        for pool in self._pools:
            pool.shutdown(wait=False)  # all of them before waiting: ranks wait for each other when they end
        for process in self._processes:
            process.join(10)
        self._kill()


def _begin(log: str, cores: set[int]) -> None:
    """Pin the process before libraries size their thread pools by its cores; existing threads (NumPy's) move too."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel should kill this process, not another one
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)


_held: list[Any] = []  # the object of this process


def _answer(what: Callable[..., Any] | str, arguments: Any) -> Any:
    """Make the object, or call a method of it. Errors become one line, with the traceback as the cause."""
    try:
        return getattr(_held[0], what)(*arguments) if isinstance(what, str) else _held.append(what(**arguments))
    except UsageError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise WorkerError(f"{type(error).__name__}: {first}"[:300]) from error


def pick_cores(count: int) -> list[int]:
    """Return the `count` cores to run on; others stay unused."""
    usable = usable_cores()
    if len(usable) < count or not hasattr(os, "sched_setaffinity"):
        rule = f"This suite needs Linux and {count} cores, to pin processes to cores"
        raise UsageError(f"{rule}; this process may use {len(usable)}. Run it on a larger machine.")
    return usable[:count]


def check_pinned() -> None:
    """Raise if threads of this process may use more than one core, which would hide load imbalance."""
    cores = set[int]().union(*(os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")))
    if len(cores) != 1:
        raise RuntimeError(f"A process must be pinned to one core; threads of this one may use {sorted(cores)}.")

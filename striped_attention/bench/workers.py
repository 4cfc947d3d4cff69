"""Workers: processes that hold something to be timed, and wait without using the CPU until they are asked.

Contestants that share a process share its thread pools, and a pool that another library left spinning spoils a
measurement. So each contestant gets a `Team`: one process, or several that talk to each other (`ranks`). The parent
calls methods of the object that lives in them:

    with Team(Sdpa, cores=[{0, 1}]) as team:          Team(Ours, cores=[{0}, {1}]) has two ranks, a core each
        team.ask("prepare", 2048)
        seconds = max(team.ask("run", "forward"))     one answer a rank

A team is killed as a whole as soon as one of its processes dies or, with several ranks, fails: the others would wait
for it for ever.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from striped_attention.training.errors import UsageError

_MENDABLE = f"{UsageError.__name__}: "  # begins the one line of an error that the user can mend


class WorkerError(RuntimeError):
    """The method that was asked for raised an exception; the team still lives if it has one rank."""


class WorkerDied(WorkerError):
    """A process of the team ended on its own (the kernel ends the largest process when memory runs out)."""


class Team:
    """Processes that each hold `kind(rank, ranks, port, **options)`; `cores` is the set of cores of each rank."""

    def __init__(self, kind: type, cores: Sequence[set[int]], **options: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._log = tempfile.NamedTemporaryFile(mode="w+", prefix="striped-bench-", suffix=".log")  # noqa: SIM115
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._waiting = False
        port = free_port()
        for rank, own in enumerate(cores):
            ours, theirs = spawn.Pipe()
            arguments = (theirs, self._log.name, kind, dict(rank=rank, ranks=len(cores), port=port, **options))
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            with _on_cores(own):
                process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        try:
            self._collect()
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the object in every process; the answers, by rank."""
        if not self.alive:
            raise WorkerDied("the process ended earlier")
        for connection in self._connections:
            with contextlib.suppress(OSError):  # a process that is gone is found out below
                connection.send((method, arguments))
        return self._collect()

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End the processes: at once if they are busy or one of them is gone, politely otherwise."""
        polite = self.alive and not self._waiting
        for connection, process in zip(self._connections, self._processes, strict=True):
            if polite:
                with contextlib.suppress(OSError):
                    connection.send(None)
            else:
                process.kill()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()
        self._connections, self._processes = [], []
        self._log.close()

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self) -> list[Any]:
        """An answer from every rank, or an exception as soon as one of them cannot give any."""
        self._waiting = True
        answers: dict[int, Any] = {}
        while len(answers) < len(self._connections):
            open_ = [rank for rank in range(len(self._connections)) if rank not in answers]
            wait([self._connections[r] for r in open_] + [self._processes[r].sentinel for r in open_])
            for rank in open_:
                connection, process = self._connections[rank], self._processes[rank]
                if connection.poll():
                    answers[rank] = self._receive(rank)
                elif not process.is_alive():
                    self._die(self._ending(rank))
        self._waiting = False
        return [answers[rank] for rank in range(len(answers))]

    def _receive(self, rank: int) -> Any:
        try:
            fine, answer = self._connections[rank].recv()
        except (EOFError, ConnectionResetError):
            self._die(self._ending(rank))
        if not fine:
            message, details = answer
            if message.startswith(_MENDABLE):
                raise UsageError(message.removeprefix(_MENDABLE))
            print(details, file=sys.stderr)
            if len(self._connections) > 1:
                self._die(message)
            self._waiting = False
            raise WorkerError(message)
        return answer

    def _ending(self, rank: int) -> str:
        self._processes[rank].join(10)
        code = self._processes[rank].exitcode
        return f"process {rank} was killed; out of memory?" if code == -9 else f"process {rank} ended, exit code {code}"

    def _die(self, message: str) -> NoReturn:
        self._log.seek(0)
        print(self._log.read()[-2000:], file=sys.stderr)
        for process in self._processes:
            process.kill()
            process.join()
        raise WorkerDied(message)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _on_cores(cores: set[int]) -> Iterator[None]:
    """A process started here has these cores from its first moment, before any library counts them for its threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _serve(connection: Connection, log: str, kind: type, options: dict[str, Any]) -> None:
    """What a process of a team does: answer until it is told to stop, or until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    _be_first_to_go()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    idle = Idle()
    try:
        subject = kind(**options)
    except BaseException as error:
        connection.send((False, _describe(error)))
        return
    connection.send((True, None))
    while True:
        idle.begin()
        try:
            request = connection.recv()
        except EOFError:
            return
        idle.end()
        if request is None:
            return
        method, arguments = request
        try:
            answer = idle.share if method == "idle" else getattr(subject, method)(*arguments)
        except Exception as error:
            connection.send((False, _describe(error)))
        else:
            connection.send((True, answer))


class Idle:
    """How busy a process was while it waited for a request: 0 unless some thread spins. 1 is one whole core."""

    def __init__(self) -> None:
        self._cpu = self._wall = 0.0

    def begin(self) -> None:
        self._since = time.process_time(), time.perf_counter()

    def end(self) -> None:
        self._cpu += time.process_time() - self._since[0]
        self._wall += time.perf_counter() - self._since[1]

    @property
    def share(self) -> float:
        return self._cpu / self._wall if self._wall else 0.0


def _describe(error: BaseException) -> tuple[str, str]:
    """One line for the record and the whole traceback for the screen."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300], "".join(traceback.format_exception(error))


def _be_first_to_go() -> None:
    """When memory runs out, let the kernel end this process rather than one of the machine's others."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass

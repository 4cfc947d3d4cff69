"""The suite `peers`: CPU speed compared with the alternatives available today (`contestants.py`), on 2 cores.

JAX libraries run in both ways that JAX offers on a CPU: on 2 virtual devices of one process, which share a thread pool,
and on 2 processes with a core each. Each contestant has its own processes. All answers are checked first, gradients
included; a library whose answers are wrong as shipped is timed, but marked wrong. In each round a contestant runs one
untimed forward pass to wake up, and is then timed once. Compilation and placing the inputs are not timed. Takes about
an hour on an idle machine.
"""

import contextlib
import functools
import importlib.util
import statistics
import time
from typing import Any

from striped_attention.core.layout import striped
from striped_attention.errors import UsageError
from striped_attention.runtime import record
from striped_bench.bench import contestants, problem
from striped_bench.bench.run import Options, Progress, Record, Row, interleaved, paired_ratio, say, tabulate
from striped_bench.bench.workers import Team, WorkerError, pick_cores

INSTALL = "pip install 'striped-attention[peers]'"
PACKAGES = ("torch", "ringattention", "ring-attention-pytorch")
MULTIPLE = 1024  # lengths must be multiples of it: 2 devices, chunks of 512
JAX_PEERS = ("ringattention", "plain-jax")


class Entry:
    """A contestant: how to start it, and `row`, its status and results for the record."""

    def __init__(
        self, name: str, family: str, kind: type, package: str = "jax", ranks: int = 1, **options: Any
    ) -> None:
        self.kind, self.package, self.options = kind, package, options
        self.team: Team | None = None
        self.row: Row = {"name": name, "family": family, "status": "not checked", "ranks": ranks, "wrong": []}
        self.row |= {"checks": [], "options": {key: str(value) for key, value in options.items()}, "lengths": {}}
        self.row |= {"peak_bytes_by_rank": None, "cores_used_while_idle_by_rank": None}

    def start(self, cores: list[int]) -> None:
        """Start the contestant's processes, or record why they do not start."""
        try:
            own = [set(cores)] if self.row["ranks"] == 1 else [{core} for core in cores]
            self.team = Team(self.kind, own, **self.options)
        except WorkerError as error:
            self.row["status"] = f"does not start: {error}"
        say(f"{self.row['name']}: {'started' if self.team else self.row['status']}")

    def failed(self, length: int) -> bool:
        return self.team is None or "failed" in self.row["lengths"].get(length, {})

    def ask(self, length: int, method: str, *arguments: Any) -> list[Any] | None:
        """Return the team's answers, or None if it fails at this length; a failure is recorded."""
        try:
            return None if self.team is None or self.failed(length) else self.team.ask(method, *arguments)
        except WorkerError as error:
            self.fail(length, str(error))
            return None

    def fail(self, length: int, message: str) -> None:
        self.row["lengths"][length] = {"failed": message}
        say(f"{length:,} tokens, {self.row['name']}: {message}")

    def check(self, length: int, truth: problem.Answer) -> None:
        """Compare the contestant's answer with the reference. A wrong answer of this library raises."""
        answers, row = self.ask(length, "check"), self.row
        if answers is not None:
            judge = functools.partial(problem.check, what=row["name"]) if row["family"] == "ours" else problem.judge
            row["checks"].append(judge(problem.join(answers), truth))
            row["wrong"] = sorted({name for check in row["checks"] for name in check["wrong"]})
            row["status"] = "wrong" if row["wrong"] else "right"
            say(f"{length:,} tokens, {row['name']}: {row['status']}, errors {row['checks'][-1]['errors']}")

    def sample(self, length: int) -> dict[str, float]:
        """Measure seconds by kind; kinds that fail are missing."""
        self.ask(length, "run", problem.KINDS[0])  # untimed: the processes slept while the others ran
        found = {}
        for kind in problem.KINDS:
            time.sleep(0.02)  # threads of the previous contestant spin for some milliseconds before they sleep
            if (answers := self.ask(length, "run", kind)) is not None:
                found[kind] = max(answers)
        return found


def entries() -> list[Entry]:
    ours = functools.partial(Entry, family="ours", kind=contestants.Ours, layout=striped())
    ring = functools.partial(Entry, family="ringattention", kind=contestants.RingAttentionJax, package="ringattention")
    torch_ring = {"family": "ring-attention-pytorch", "package": "ring_attention_pytorch"}
    two = contestants.DEVICES
    return [
        ours("ours, striped(1), 2 processes", ranks=two),
        ours("ours, striped(1)"),
        ring("ringattention, chunks 128", chunk=128),
        ring("ringattention, chunks 512", chunk=512),
        ring("ringattention, chunks 128, 2 processes", chunk=128, ranks=two),
        ring("ringattention, chunks 512, 2 processes", chunk=512, ranks=two),
        Entry("plain JAX, sharded sequence", "plain-jax", contestants.PlainJax),
        Entry("ring-attention-pytorch, striped", kind=contestants.RingAttentionTorch, ranks=two, **torch_ring),
        Entry("torch SDPA, 2 threads", "torch-sdpa", contestants.Sdpa, package="torch"),
    ]


def peers(options: Options, result: Record) -> Progress:
    lengths = options["lengths"]
    if wrong := [length for length in lengths if length < 1 or length % MULTIPLE]:
        raise UsageError(f"--lengths must be multiples of {MULTIPLE} for this suite; got {wrong[0]}.")
    field = [entry for entry in entries() if entry.row["family"] in {"ours", *options["peers"]}]
    if missing := sorted({e.row["family"] for e in field if importlib.util.find_spec(e.package) is None}):
        raise UsageError(f"--peers {' '.join(missing)}: not installed. {INSTALL}, or choose other peers.")
    result["configuration"] |= {**problem.CPU.configuration(), "mask": "causal", "devices": contestants.DEVICES}
    result["versions"] |= {package: record.version(package) for package in PACKAGES}
    result |= {"contestants": [entry.row for entry in field], "fastest_jax_peer": {}}
    cores = pick_cores(contestants.DEVICES)
    with contextlib.ExitStack() as teams:
        for entry in field:
            entry.start(cores)
            if entry.team is not None:
                teams.callback(entry.team.close)
        for length in lengths:
            compete(field, length, options["rounds"])
            result["fastest_jax_peer"][length] = {kind: fastest(field, length, kind) for kind in problem.KINDS}
            yield f"{length:,} tokens: done"
    for kind in problem.KINDS:
        timed = [
            (row, n, times[kind])
            for row in result["contestants"]
            for n, times in row["lengths"].items()
            if kind in times
        ]
        shown = [{**row, "kind": kind, "length": length, **times} for row, length, times in timed]
        yield tabulate(shown, "kind", "length", "name", "status", "median_seconds", "times_ours")


def compete(field: list[Entry], length: int, rounds: int) -> None:
    """Run all checks and measurements at one length."""
    # Plain attention materialises float32 scores: 6 arrays (measured: 5.7 in the backward pass at 4096 tokens).
    need, have = 6 * 4 * problem.CPU.heads * length * length, record.available_memory()
    for entry in field:
        if entry.kind is contestants.PlainJax and need > have:
            entry.fail(length, f"out of memory: the scores need {need / 1e9:.0f} GB, {have / 1e9:.0f} GB are free")
        entry.ask(length, "prepare", length)
    truth = problem.oracle(problem.make_inputs(length))
    for entry in field:
        entry.check(length, truth)
    able = [entry for entry in field if not entry.failed(length)]
    found = interleaved(able, rounds, lambda entry: entry.sample(length))
    base = found[field[0]] if field[0] in able and not field[0].failed(length) else None
    for entry in able:
        for kind in () if entry.failed(length) else problem.KINDS:
            seconds = [turn[kind] for turn in found[entry]]
            over = None if base is None else paired_ratio(seconds, [turn[kind] for turn in base])
            times = {"median_seconds": statistics.median(seconds), "times_ours": over, "seconds": seconds}
            entry.row["lengths"].setdefault(length, {})[kind] = times
    for entry in field:
        if entry.team is not None and entry.team.alive:
            entry.row["peak_bytes_by_rank"] = entry.team.ask("peak")
            entry.row["cores_used_while_idle_by_rank"] = entry.team.ask("idle")


def fastest(field: list[Entry], length: int, kind: str) -> Row | None:
    """Return the fastest JAX peer whose answers are right."""
    able = [entry.row for entry in field if entry.row["family"] in JAX_PEERS and entry.row["status"] == "right"]
    timed = [(row["lengths"][length][kind], row["name"]) for row in able if kind in row["lengths"].get(length, {})]
    best = min(timed, key=lambda found: found[0]["median_seconds"], default=None)
    return best and {"name": best[1], "times_ours": best[0]["times_ours"]}

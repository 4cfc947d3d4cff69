"""Speed on the CPU beside what a user could pick today.

Causal attention, 1 sequence, 8 heads × 64, float32, on 2 devices (2 cores), forward and forward+backward:

    ours                     this library, striped
    ringattention            PyPI's ringattention, contiguous, two chunk sizes
    plain-jax                jax.nn.dot_product_attention on a sharded sequence, XLA inserting the communication
    ring-attention-pytorch   PyPI's ring-attention-pytorch, striped, 2 processes over gloo, one thread each
    torch-sdpa               torch's CPU flash kernel, one process with 2 threads: the yardstick

The first two run both ways that JAX offers on a CPU: 2 virtual devices in one process, which share a pool of threads,
and 2 processes with a core each. Every contestant lives in processes of its own. Each answer is checked first,
gradients too, and one that is wrong as shipped is timed but called wrong. Then rounds: in every round each contestant
wakes up with an untimed forward pass and is timed once, in a new order, so that a machine that slows down slows all of
them; medians over the rounds are shown. Neither compiling nor placing the inputs counts. Wants an idle machine and an
hour, most of it for T = 16384.
"""

import argparse
import dataclasses
import functools
import importlib.util
import random
import statistics
import sys
import time
from typing import Any

import contestants
import numpy as np
import problem
import record
from workers import Team, WorkerError

INSTALL = "pip install -e .[peers]"
JAX_PEERS = ("ringattention", "plain-jax")


@dataclasses.dataclass
class Entry:
    """A contestant: how to start it, and what became of it."""

    name: str
    family: str
    kind: type
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    package: str = "jax"
    ranks: int = 1
    team: Team | None = None
    status: str = "not checked"
    checks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    failures: dict[int, str] = dataclasses.field(default_factory=dict)
    samples: dict[int, dict[str, list[float]]] = dataclasses.field(default_factory=dict)
    process: dict[str, list[Any]] = dataclasses.field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        return sorted({name for check in self.checks for name in check["wrong"]})

    def ask(self, length: int, method: str, *arguments: Any) -> list[Any] | None:
        """The team's answers; None if it has failed at this length, which is then on record."""
        if self.team is None or length in self.failures:
            return None
        try:
            return self.team.ask(method, *arguments)
        except WorkerError as error:
            self.fail(length, str(error))
            return None

    def fail(self, length: int, message: str) -> None:
        self.failures[length] = message
        self.samples.pop(length, None)
        record.progress(f"T = {length}", self.name, message)

    def median(self, length: int, kind: str) -> float:
        return statistics.median(self.samples[length][kind])


def entries() -> list[Entry]:
    ours = functools.partial(Entry, family="ours", kind=contestants.Ours)
    ringattention = functools.partial(
        Entry, family="ringattention", kind=contestants.RingAttentionJax, package="ringattention"
    )
    processes = {"ranks": contestants.DEVICES}
    return [
        ours("ours, striped(1), 2 processes", options={"layout": "striped"}, **processes),
        ours("ours, striped(1)", options={"layout": "striped"}),
        ringattention("ringattention, chunks 128", options={"chunk": 128}),
        ringattention("ringattention, chunks 512", options={"chunk": 512}),
        ringattention("ringattention, chunks 128, 2 processes", options={"chunk": 128}, **processes),
        ringattention("ringattention, chunks 512, 2 processes", options={"chunk": 512}, **processes),
        Entry("plain JAX, sharded sequence", "plain-jax", contestants.PlainJax),
        Entry(
            *("ring-attention-pytorch, striped", "ring-attention-pytorch", contestants.RingAttentionTorch),
            package="ring_attention_pytorch",
            ranks=contestants.DEVICES,
        ),
        Entry("torch SDPA, 2 threads", "torch-sdpa", contestants.Sdpa, package="torch"),
    ]


def start(entry: Entry, cores: list[int], seed: int) -> None:
    """Start a contestant's processes, or say why there are none."""
    if importlib.util.find_spec(entry.package) is None:
        entry.status = "not installed"
        record.progress(entry.name, f"not installed, left out; to include it: {INSTALL}")
        return
    record.progress("starting", entry.name)
    try:
        own = [set(cores)] if entry.ranks == 1 else [{core} for core in cores]
        entry.team = Team(entry.kind, own, seed=seed, **entry.options)
    except WorkerError as error:
        entry.status = f"does not start: {error}"
        record.progress(entry.name, entry.status)


def prepare(entry: Entry, length: int) -> None:
    """Compile and warm up, unless that would take more memory than there is."""
    need, have = contestants.score_bytes(length), record.available_memory()
    if entry.kind is contestants.PlainJax and need > have:
        entry.fail(length, f"out of memory: its scores need about {need / 1e9:.0f} GB, {have / 1e9:.0f} GB are free")
    else:
        record.progress(f"T = {length}", "preparing", entry.name)
        entry.ask(length, "prepare", length)


def check(field: list[Entry], length: int, seed: int, rows: np.ndarray | None) -> None:
    """Compare every answer with float64: the whole of it, or a few rows."""
    inputs = problem.make_inputs(length, seed)
    truth: Any = problem.oracle(inputs) if rows is None else problem.oracle_rows(inputs, rows)
    for entry in field:
        answers = entry.ask(length, "check", rows)
        if answers is None:
            continue
        answer = problem.join(answers)
        verdict = problem.judge_whole(answer, truth) if rows is None else problem.judge_rows(answer, truth, length)
        entry.checks.append(verdict)
        entry.status = "wrong" if entry.wrong else "right"
        record.progress(f"T = {length}", "checked", entry.name, problem.describe(verdict))


def measure(field: list[Entry], length: int, rounds: int, seed: int) -> None:
    """Time everybody, round by round."""
    shuffle = random.Random(seed).shuffle
    for entry in field:
        entry.samples[length] = {kind: [] for kind in problem.KINDS}
    for round_ in range(rounds):
        order = list(field)
        shuffle(order)
        for entry in order:
            entry.ask(length, "run", problem.KINDS[0])  # untimed: its processes have slept while the others ran
            for kind in problem.KINDS:
                time.sleep(0.02)  # threads of the one before spin for some milliseconds before they sleep
                answers = entry.ask(length, "run", kind)
                if answers is not None:
                    entry.samples[length][kind].append(max(answers))
            if length not in entry.failures:
                last = " / ".join(record.seconds(entry.samples[length][kind][-1]) for kind in problem.KINDS)
                record.progress(f"T = {length}", f"round {round_ + 1}/{rounds}", entry.name, f"{last} s")


def compete(field: list[Entry], arguments: argparse.Namespace) -> None:
    """All checks and measurements; the processes are gone afterwards, whatever happens."""
    cores = record.cores(contestants.DEVICES)
    try:
        for entry in field:
            start(entry, cores, arguments.seed)
        for length in dict.fromkeys((arguments.check_length, *arguments.lengths)):
            running = [entry for entry in field if entry.team is not None]
            for entry in running:
                prepare(entry, length)
            if length == arguments.check_length:
                check(running, length, arguments.seed, rows=None)
            if length in arguments.lengths:
                check(running, length, arguments.seed, problem.sample_rows(length))
                measure([e for e in running if length not in e.failures], length, arguments.rounds, arguments.seed)
        for entry in field:
            if entry.team is not None and entry.team.alive:
                entry.process = {name: entry.team.ask(name) for name in ("peak", "idle")}
    finally:
        for entry in field:
            if entry.team is not None:
                entry.team.close()


def report(field: list[Entry], lengths: list[int]) -> str:
    """What a person reads: times, ratios to ours, the fastest JAX peer and the yardstick."""
    ours = field[0]
    rows = [["", *(f"T = {length}" for length in lengths)]]
    for entry in field:
        label = f"{entry.name} (WRONG: {', '.join(entry.wrong)})" if entry.wrong else entry.name
        rows.append([label, *(_cell(entry, ours, length) for length in lengths)])
    rows.append(["fastest right JAX peer, ratio", *(_peer_cell(field, length) for length in lengths)])
    torch = next((entry for entry in field if entry.family == "torch-sdpa"), None)
    rows.append(["ours over torch SDPA, ratio", *(_over(ours, torch, length) for length in lengths)])
    return (
        "Median seconds, forward / forward+backward, and in brackets how many times as long as the first line\n"
        "(the median of that ratio over the rounds).\n\n" + record.table(rows)
    )


def fastest_jax_peer(field: list[Entry], length: int, kind: str) -> Entry | None:
    able = [e for e in field if e.family in JAX_PEERS and length in e.samples and e.status == "right"]
    return min(able, key=lambda entry: entry.median(length, kind), default=None)


def ratio(a: Entry, b: Entry, length: int, kind: str) -> float | None:
    if length not in a.samples or length not in b.samples:
        return None
    return record.paired_ratio(a.samples[length][kind], b.samples[length][kind])


def _cell(entry: Entry, ours: Entry, length: int) -> str:
    if length not in entry.samples:
        return entry.failures.get(length, entry.status).split(":")[0]
    times = " / ".join(record.seconds(entry.median(length, kind)) for kind in problem.KINDS)
    return times if entry is ours else f"{times}  ({_over(entry, ours, length)})"


def _peer_cell(field: list[Entry], length: int) -> str:
    peers = [fastest_jax_peer(field, length, kind) for kind in problem.KINDS]
    ratios = [p and ratio(p, field[0], length, kind) for p, kind in zip(peers, problem.KINDS, strict=True)]
    return " / ".join("–" if x is None else f"{x:.2f}×" for x in ratios)


def _over(a: Entry, b: Entry | None, length: int) -> str:
    ratios = [b and ratio(a, b, length, kind) for kind in problem.KINDS]
    return " / ".join("–" if x is None else f"{x:.2f}×" for x in ratios)


def results(field: list[Entry], lengths: list[int]) -> dict[str, Any]:
    """The same for the record, with every sample."""
    return {"contestants": [_entry(e, field[0]) for e in field], "fastest_jax_peer": _fastest(field, lengths)}


def _entry(entry: Entry, ours: Entry) -> dict[str, Any]:
    lengths: dict[int, Any] = {length: {"failed": message} for length, message in entry.failures.items()}
    for length, samples in entry.samples.items():
        lengths[length] = {
            kind: {
                "median_seconds": entry.median(length, kind),
                "times_ours": ratio(entry, ours, length, kind),
                "seconds": seconds,
            }
            for kind, seconds in samples.items()
        }
    return {
        **{name: getattr(entry, name) for name in ("name", "family", "status", "options", "ranks", "wrong", "checks")},
        "lengths": dict(sorted(lengths.items())),
        "peak_bytes_by_rank": entry.process.get("peak"),
        "cores_used_while_idle_by_rank": entry.process.get("idle"),
    }


def _fastest(field: list[Entry], lengths: list[int]) -> dict[int, Any]:
    peers = {length: {kind: fastest_jax_peer(field, length, kind) for kind in problem.KINDS} for length in lengths}
    return {
        length: {
            kind: peer and {"name": peer.name, "times_ours": ratio(peer, field[0], length, kind)}
            for kind, peer in kinds.items()
        }
        for length, kinds in peers.items()
    }


def parse() -> argparse.Namespace:
    families = list(dict.fromkeys(entry.family for entry in entries()))
    epilog = f"The peers are an optional extra: {INSTALL}. Those that are missing are left out."
    parser = record.parser("cpu_peers", __doc__, rounds=7, epilog=epilog)
    parser.add_argument("--only", nargs="+", choices=families, default=families, help="contestants; ours always runs")
    return record.parse(parser, 1024, "2 devices can share in chunks of 512")


def main() -> int:
    arguments = parse()
    configuration = {name: value for name, value in vars(arguments).items() if name != "output"}
    document = record.metadata("cpu_peers", {**configuration, **problem.SHAPE, "devices": contestants.DEVICES})
    field = [entry for entry in entries() if entry.family in {"ours", *arguments.only}]
    compete(field, arguments)
    print(report(field, arguments.lengths), end="\n\n")
    record.write({**document, **results(field, arguments.lengths)}, arguments.output)
    return 0 if all(entry.status == "right" for entry in field if entry.family == "ours") else 1


if __name__ == "__main__":
    sys.exit(main())

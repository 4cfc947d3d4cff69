"""The suite `peers`: speed on the CPU beside what a user could pick today.

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

import dataclasses
import functools
import importlib.util
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import rich.table

from striped_attention.bench import blocks, contestants, problem, record
from striped_attention.bench.config import BenchConfig
from striped_attention.bench.run import document, path, say, write
from striped_attention.bench.workers import Team, WorkerError
from striped_attention.layout import striped
from striped_attention.training.errors import UsageError

INSTALL = "pip install 'striped-attention[peers]'"
PACKAGES = ("torch", "ringattention", "ring-attention-pytorch")
MULTIPLE = 1024  # of lengths, which 2 devices can share in chunks of 512
JAX_PEERS = ("ringattention", "plain-jax")


def run(config: BenchConfig) -> None:
    """Check, measure, print a table and write the JSON, after every length."""
    lengths = config.options["lengths"]
    if any(length < 1 or length % MULTIPLE for length in lengths):
        raise UsageError(
            f"--lengths must be multiples of {MULTIPLE} for this suite; got {', '.join(map(str, lengths))}."
        )
    field = [entry for entry in entries() if entry.family in {"ours", *config.options["peers"]}]
    if missing := sorted({e.family for e in field if importlib.util.find_spec(e.package) is None}):
        raise UsageError(f"--peers {' '.join(missing)}: not installed. {INSTALL}, or choose others.")
    shape = {**problem.CPU.configuration(), "mask": "causal", "devices": contestants.DEVICES}
    result = document(config, {**config.options, **shape}, PACKAGES)
    cores = blocks.pick_cores(contestants.DEVICES)
    try:
        for entry in field:
            start(entry, cores)
        for count, length in enumerate(lengths, 1):
            compete(field, length, config.options["rounds"])
            write(result | results(field, lengths[:count]), config)
    finally:
        for entry in field:
            if entry.team is not None:
                entry.team.close()
    say(table(field, lengths))
    say(str(path(config)))


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
        say(f"{length:,} tokens, {self.name}: {message}")

    def median(self, length: int, kind: str) -> float:
        return statistics.median(self.samples[length][kind])


def entries() -> list[Entry]:
    ours = functools.partial(Entry, family="ours", kind=contestants.Ours)
    ringattention = functools.partial(
        Entry, family="ringattention", kind=contestants.RingAttentionJax, package="ringattention"
    )
    processes: dict[str, Any] = {"ranks": contestants.DEVICES}
    return [
        ours("ours, striped(1), 2 processes", options={"layout": striped()}, **processes),
        ours("ours, striped(1)", options={"layout": striped()}),
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


def start(entry: Entry, cores: list[int]) -> None:
    """Start a contestant's processes, or say why there are none."""
    say(f"starting {entry.name}")
    try:
        own = [set(cores)] if entry.ranks == 1 else [{core} for core in cores]
        entry.team = Team(entry.kind, own, seed=0, **entry.options)
    except WorkerError as error:
        entry.status = f"does not start: {error}"
        say(f"{entry.name} {entry.status}")


def prepare(entry: Entry, length: int) -> None:
    """Compile and warm up, unless that would take more memory than there is."""
    need, have = contestants.score_bytes(length), record.available_memory()
    if entry.kind is contestants.PlainJax and need > have:
        entry.fail(length, f"out of memory: its scores need about {need / 1e9:.0f} GB, {have / 1e9:.0f} GB are free")
    else:
        say(f"{length:,} tokens, {entry.name}: preparing")
        entry.ask(length, "prepare", length)


def check(field: list[Entry], length: int) -> None:
    """Compare every answer with float64. One of ours that is wrong ends the suite."""
    truth = problem.oracle(problem.make_inputs(length))
    for entry in field:
        answers = entry.ask(length, "check")
        if answers is None:
            continue
        judge = functools.partial(problem.check, what=entry.name) if entry.family == "ours" else problem.judge
        entry.checks.append(judge(problem.join(answers), truth))
        entry.status = "wrong" if entry.wrong else "right"
        say(f"{length:,} tokens, {entry.name}: {problem.describe(entry.checks[-1])}")


def measure(field: list[Entry], length: int, rounds: int) -> None:
    """Time everybody, round by round."""
    shuffle = random.Random(0).shuffle
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
                say(f"{length:,} tokens, {entry.name}: {last} s, round {round_ + 1} of {rounds}")


def compete(field: list[Entry], length: int, rounds: int) -> None:
    """All checks and measurements of one length."""
    running = [entry for entry in field if entry.team is not None]
    for entry in running:
        prepare(entry, length)
    check(running, length)
    measure([entry for entry in running if length not in entry.failures], length, rounds)
    for entry in running:
        if entry.team is not None and entry.team.alive:
            entry.process = {name: entry.team.ask(name) for name in ("peak", "idle")}


def table(field: list[Entry], lengths: Sequence[int]) -> rich.table.Table:
    """What a person reads: times, ratios to ours, the fastest JAX peer and the yardstick."""
    ours = field[0]
    shown = rich.table.Table(
        "seconds, forward / both (× the first line)", *(f"{length:,} tokens" for length in lengths)
    )
    for entry in field:
        label = f"{entry.name} (WRONG: {', '.join(entry.wrong)})" if entry.wrong else entry.name
        shown.add_row(label, *(_cell(entry, ours, length) for length in lengths))
    shown.add_row("fastest right JAX peer, ratio", *(_peer_cell(field, length) for length in lengths))
    torch = next((entry for entry in field if entry.family == "torch-sdpa"), None)
    shown.add_row("ours over torch SDPA, ratio", *(_over(ours, torch, length) for length in lengths))
    return shown


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


def results(field: list[Entry], lengths: Sequence[int]) -> dict[str, Any]:
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
        **{name: getattr(entry, name) for name in ("name", "family", "status", "ranks", "wrong", "checks")},
        "options": {name: str(value) for name, value in entry.options.items()},
        "lengths": dict(sorted(lengths.items())),
        "peak_bytes_by_rank": entry.process.get("peak"),
        "cores_used_while_idle_by_rank": entry.process.get("idle"),
    }


def _fastest(field: list[Entry], lengths: Sequence[int]) -> dict[int, Any]:
    peers = {length: {kind: fastest_jax_peer(field, length, kind) for kind in problem.KINDS} for length in lengths}
    return {
        length: {
            kind: peer and {"name": peer.name, "times_ours": ratio(peer, field[0], length, kind)}
            for kind, peer in kinds.items()
        }
        for length, kinds in peers.items()
    }

"""What balance is worth: striped and zigzag over contiguous, on two processes that own a core each.

Under a causal mask the last device of a contiguous layout (Ring Attention) sees everything and the first one almost
nothing, and each step of the ring takes as long as its busiest device. With n tokens a device and 2 devices:

                 step 0 (own keys)      step 1 (the other's keys)      sum of the busiest
    contiguous   n²/2, n²/2             0, n²                          1.5 n²
    striped      n²/2, n²/2             n²/2, n²/2                     1.0 n²              so at best 1.5 times as fast

Virtual devices of one process share a thread pool, where the idle device's threads help the busy one and hide the
difference. So here are two real processes, each pinned to a core before JAX starts (its pool then has one thread),
connected by jax.distributed over gloo. Both hold all layouts; rounds run each of them once, in a new order, and ratios
are medians over rounds. The bound printed beside them is counted by `striped_attention.count`, the pairs of the busiest
device added up over the steps. Answers are checked first. Wants an idle machine.
"""

import argparse
import os
import random
import statistics
import sys
from typing import Any

import numpy as np
import problem
import record
from contestants import DEVICES, Ours
from workers import Team, WorkerError

LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {"layout": "contiguous"},
    "striped(1)": {"layout": "striped"},
    "striped(256)": {"layout": "striped", "stripe": 256},
    "zigzag": {"layout": "zigzag"},
}
Samples = dict[str, dict[str, list[float]]]


class AllLayouts:
    """This library with every layout, in one process of the two: what a worker holds."""

    def __init__(self, rank: int, ranks: int, port: int, seed: int) -> None:
        place: dict[str, Any] = {"rank": rank, "ranks": ranks, "port": port}
        self._layouts = {name: Ours(seed=seed, **place, **options) for name, options in LAYOUTS.items()}

    def prepare(self, length: int) -> None:
        for layout in self._layouts.values():
            layout.prepare(length)

    def check(self, name: str, rows: np.ndarray | None) -> problem.Answer:
        return self._layouts[name].check(rows)

    def run(self, name: str, kind: str) -> float:
        return self._layouts[name].run(kind)

    def place(self) -> dict[str, Any]:
        """The core of every thread of this process; with several the measurement would mean nothing."""
        threads = [int(name) for name in os.listdir("/proc/self/task")]
        cores = sorted(set().union(*(os.sched_getaffinity(thread) for thread in threads)))
        if len(cores) != 1:
            raise RuntimeError(f"A process must be pinned to one core; threads of this one may use {cores}.")
        return {"cores": cores}


def bound(name: str, length: int) -> float:
    """The most that a layout can gain over contiguous: the busiest device's pairs, added up over the steps."""
    import striped_attention as sa
    from striped_attention.count import count_pairs

    def critical_path(options: dict[str, Any]) -> int:
        layout = getattr(sa, options["layout"])(*([options["stripe"]] if "stripe" in options else []))
        return int(count_pairs(layout, sa.causal(), length, DEVICES).max(axis=0).sum())

    return critical_path(LAYOUTS["contiguous"]) / critical_path(LAYOUTS[name])


def check(team: Team, length: int, seed: int, rows: np.ndarray | None) -> list[dict[str, Any]]:
    """Compare the answers of both processes with float64; a wrong one ends the benchmark."""
    inputs = problem.make_inputs(length, seed)
    truth: Any = problem.oracle(inputs) if rows is None else problem.oracle_rows(inputs, rows)
    verdicts = []
    for name in LAYOUTS:
        answer = problem.join(team.ask("check", name, rows))
        verdict = problem.judge_whole(answer, truth) if rows is None else problem.judge_rows(answer, truth, length)
        record.progress(f"T = {length}", "checked", name, problem.describe(verdict))
        if verdict["wrong"]:
            raise SystemExit(f"{name} gives a wrong answer at T = {length}: {verdict['errors']}")
        verdicts.append({"layout": name, **verdict})
    return verdicts


def measure(team: Team, length: int, rounds: int, seed: int) -> Samples:
    """Time all layouts, round by round; a run lasts until the slower process is ready."""
    shuffle = random.Random(seed).shuffle
    samples: Samples = {name: {kind: [] for kind in problem.KINDS} for name in LAYOUTS}
    for round_ in range(rounds):
        order = list(LAYOUTS)
        shuffle(order)
        for name in order:
            for kind in problem.KINDS:
                samples[name][kind].append(max(team.ask("run", name, kind)))
            last = " / ".join(record.seconds(samples[name][kind][-1]) for kind in problem.KINDS)
            record.progress(f"T = {length}", f"round {round_ + 1}/{rounds}", name, f"{last} s")
    return samples


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """All checks and measurements; the processes are gone afterwards, whatever happens."""
    pinned = [{core} for core in record.cores(DEVICES)]
    checks: list[dict[str, Any]] = []
    samples: dict[int, Samples] = {}
    record.progress("starting two processes")
    with Team(AllLayouts, pinned, seed=arguments.seed) as team:
        for length in dict.fromkeys((arguments.check_length, *arguments.lengths)):
            record.progress(f"T = {length}", "preparing")
            team.ask("prepare", length)
            if length == arguments.check_length:
                checks += check(team, length, arguments.seed, rows=None)
            if length in arguments.lengths:
                checks += check(team, length, arguments.seed, problem.sample_rows(length))
                samples[length] = measure(team, length, arguments.rounds, arguments.seed)
        processes = [
            {**place, "cores_used_while_idle": idle}
            for place, idle in zip(team.ask("place"), team.ask("idle"), strict=True)
        ]
    return {"processes": processes, "checks": checks, "lengths": {n: _summary(n, s) for n, s in samples.items()}}


def _summary(length: int, samples: Samples) -> dict[str, Any]:
    """By layout: the bound, and by kind the median, the gain over contiguous and every sample."""
    return {
        name: {
            "bound": bound(name, length),
            **{
                kind: {
                    "median_seconds": statistics.median(seconds),
                    "times_as_fast_as_contiguous": record.paired_ratio(samples["contiguous"][kind], seconds),
                    "seconds": seconds,
                }
                for kind, seconds in kinds.items()
            },
        }
        for name, kinds in samples.items()
    }


def report(lengths: dict[int, Any]) -> str:
    """What a person reads: times, gains and bounds."""
    rows = [["", *(f"T = {length}" for length in lengths)]]
    for name in LAYOUTS:
        rows.append([f"{name}, seconds"])
        for layouts in lengths.values():
            medians = (layouts[name][kind]["median_seconds"] for kind in problem.KINDS)
            rows[-1].append(" / ".join(record.seconds(x) for x in medians))
    for name in list(LAYOUTS)[1:]:
        rows.append([f"{name} over contiguous (bound)"])
        for layouts in lengths.values():
            gains = (layouts[name][kind]["times_as_fast_as_contiguous"] for kind in problem.KINDS)
            rows[-1].append(" / ".join(f"{x:.2f}×" for x in gains) + f"  ({layouts[name]['bound']:.2f}×)")
    return "Two pinned processes, forward / forward+backward: medians.\n\n" + record.table(rows)


def main() -> int:
    parser = record.parser("cpu_balance", __doc__, rounds=9)
    arguments = record.parse(parser, 4, "zigzag on 2 devices needs")
    configuration = {name: value for name, value in vars(arguments).items() if name != "output"}
    document = record.metadata("cpu_balance", {**configuration, **problem.SHAPE, "devices": DEVICES})
    try:
        results = compare(arguments)
    except WorkerError as error:
        print(f"Stopped, both processes ended: {error}", file=sys.stderr)
        return 1
    print(report(results["lengths"]), end="\n\n")
    record.write({**document, **results}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())

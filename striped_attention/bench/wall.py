"""Wall: what balance is worth on the clock, on two processes that own a core each.

Under a causal mask the last device of a contiguous layout (Ring Attention) sees everything and the first one almost
nothing, and each step of the ring takes as long as its busiest device. With n tokens a device and 2 devices:

                 step 0 (own keys)      step 1 (the other's keys)      sum of the busiest
    contiguous   n²/2, n²/2             0, n²                          1.5 n²
    striped      n²/2, n²/2             n²/2, n²/2                     1.0 n²              so at best 1.5 times as fast

Virtual devices of one process share a thread pool, where the idle device's threads help the busy one and hide the
difference. So here are two real processes, each pinned to a core before JAX starts (its pool then has one thread),
connected by jax.distributed over gloo. Both hold all layouts; rounds run each of them once, in a new order, and ratios
are medians over rounds. Wants an idle machine.
"""

import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from striped_attention.bench import blocks, problem, record
from striped_attention.bench.contestants import DEVICES, Ours
from striped_attention.bench.run import say
from striped_attention.bench.workers import Team
from striped_attention.layout import Layout, contiguous
from striped_attention.mask import causal

HOW = (
    "Wall-clock: two processes, each pinned to a core, connected by jax.distributed; a run lasts until the slower one "
    "is ready. Medians of interleaved rounds; over_contiguous is the median of the rounds' ratios."
)
Samples = dict[Layout, dict[str, list[float]]]


class AllLayouts:
    """This library with every layout, in one process of the two: what a worker holds."""

    def __init__(self, rank: int, ranks: int, port: int, layouts: list[Layout], seed: int) -> None:
        place: dict[str, Any] = {"rank": rank, "ranks": ranks, "port": port}
        self._layouts = {layout: Ours(layout, seed=seed, **place) for layout in layouts}

    def prepare(self, length: int) -> None:
        for layout in self._layouts.values():
            layout.prepare(length)

    def check(self, layout: Layout) -> problem.Answer:
        blocks.check_pinned()
        return self._layouts[layout].check()

    def run(self, layout: Layout, kind: str) -> float:
        return self._layouts[layout].run(kind)


def measure(
    layouts: list[Layout], lengths: Sequence[int], rounds: int, checks: list[dict[str, Any]], seed: int = 0
) -> Iterator[dict[str, Any]]:
    """A row for every length and layout, once its answers are checked."""
    pinned = [{core} for core in blocks.pick_cores(DEVICES)]
    with Team(AllLayouts, pinned, layouts=layouts, seed=seed) as team:
        for length in lengths:
            team.ask("prepare", length)
            truth = problem.oracle(problem.make_inputs(length, seed))
            for layout in layouts:
                answer = problem.join(team.ask("check", layout))
                verdict = problem.check(answer, truth, f"{layout!r} on two processes")
                checks.append({"layout": repr(layout), "devices": DEVICES, "processes": DEVICES, **verdict})
            yield from _rows(length, _time(team, layouts, length, rounds, seed))


def _time(team: Team, layouts: list[Layout], length: int, rounds: int, seed: int) -> Samples:
    shuffle = random.Random(seed).shuffle
    samples: Samples = {layout: {kind: [] for kind in problem.KINDS} for layout in layouts}
    for round_ in range(rounds):
        order = list(layouts)
        shuffle(order)
        for layout in order:
            for kind in problem.KINDS:
                samples[layout][kind].append(max(team.ask("run", layout, kind)))
        say(f"two processes, {length:,} tokens: round {round_ + 1} of {rounds}")
    return samples


def _rows(length: int, samples: Samples) -> Iterator[dict[str, Any]]:
    base = samples[contiguous()]
    for layout, kinds in samples.items():
        yield {
            **{"length": length, "layout": repr(layout)},
            **{kind: statistics.median(seconds) for kind, seconds in kinds.items()},
            "samples": kinds,
            "over_contiguous": {kind: record.paired_ratio(base[kind], seconds) for kind, seconds in kinds.items()},
            "bound": blocks.bound(blocks.Case(layout, causal(), DEVICES, length)),
        }

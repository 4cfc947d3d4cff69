"""Blocks: what a ring of more devices than cores would take, from its blocks one by one.

A step of a ring takes as long as its busiest device. So where devices cannot run at the same time, each block (the
queries of device d with the keys that it holds at step j) is run by itself, by a process that owns a core, and

    critical path = sum over steps of the largest seconds[device, step]

is how long the ring would compute: nobody waits for a wire, and merges, some percent of a step, are left out. The
blocks and the kernel are the ring's own. Rings to be compared take turns, and a block's seconds are the median of its
rounds. One GPU can stand for many in the same way.
"""

import dataclasses
import functools
import os
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from striped_attention.attention import KERNELS
from striped_attention.bench import problem, record
from striped_attention.bench.run import say
from striped_attention.bench.workers import Team
from striped_attention.count import Counts, count_pairs
from striped_attention.kernel import Block, merge
from striped_attention.layout import Layout, contiguous
from striped_attention.mask import Mask
from striped_attention.ring import Ring
from striped_attention.training.errors import UsageError

HOW = (
    "Critical path: every block timed by itself on one core or GPU, without transfers and merges; "
    "the sum over steps of the busiest device's seconds, not wall-clock."
)
KERNEL = KERNELS["xla"]
PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A ring to be timed; `tile` is a side of the kernel's tiles, None for its own choice."""

    layout: Layout
    mask: Mask
    devices: int
    length: int
    tile: int | None = None
    shape: problem.Shape = problem.CPU

    def __str__(self) -> str:
        tile = "" if self.tile is None else f", tiles of {self.tile}"
        return f"{self.layout!r} on {self.devices} devices{tile}"

    @property
    def ring(self) -> Ring:
        tile = None if self.tile is None else (self.tile, self.tile)
        sizes = (self.devices, self.layout, self.length, self.length)
        return Ring("timed", *sizes, KERNEL, self.shape.dim**-0.5, tile=tile)

    def blocks(self) -> list[list[tuple[int, Block]]]:
        """By device and step: whose keys are met, and the block, as in the ring."""
        ring, slots = self.ring, self.length // self.devices
        placed = self.mask.permute(self.layout, self.devices)

        def row(here: int) -> Iterator[tuple[int, Block]]:
            own = jax.tree.map(lambda x: np.asarray(x)[:, here * slots : (here + 1) * slots], placed)
            for offset in ring.offsets(self.mask):
                there = (here - offset) % self.devices
                yield there, ring.block(own, None, here, there, offset == 0)

        return [list(row(here)) for here in range(self.devices)]


class Core:
    """What a process with a core or a GPU of its own holds: rings that are ready to be timed."""

    def __init__(self, rank: int, ranks: int, port: int, platform: str) -> None:
        jax.config.update("jax_platforms", PLATFORMS[platform])
        try:
            jax.devices()
        except (AssertionError, RuntimeError) as error:  # the first where JAX has no package for it at all
            raise UsageError(
                f"--platform {platform} needs an NVIDIA GPU and JAX's packages for it; JAX finds none here. "
                f"{str(error).splitlines()[0] if str(error) else ''}".strip()
            ) from error
        self._runs: dict[str, _Run] = {}

    def prepare(self, name: str, case: Case, seed: int) -> problem.Answer:
        """Compile and run all blocks once; the answer to be checked."""
        self._runs[name] = _Run(case, seed)
        return self._runs[name].answer()

    def seconds(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Of every block (device × step), forward and backward."""
        if jax.default_backend() == "cpu":
            check_pinned()
        return self._runs[name].seconds()

    def temporary_bytes(self, name: str) -> int:
        return self._runs[name].temporary_bytes()

    def gpu(self) -> str | None:
        """What it is called; None if this is a core."""
        return None if jax.default_backend() == "cpu" else jax.devices()[0].device_kind

    def forget(self) -> None:
        self._runs.clear()


class _Run:
    """The arrays of one ring, by device, and its blocks."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.blocks = case, jax.tree.map(jnp.asarray, case.blocks())
        inputs = problem.make_inputs(case.length, seed, case.shape)
        split = lambda x: jnp.split(case.layout.permute(jnp.asarray(x), case.devices, 1), case.devices, 1)  # noqa: E731
        self.q, self.k, self.v, self.dout, self.few = map(split, (*inputs, inputs.few))
        self.results = [self._forward(here) for here in range(case.devices)]

    def _forward(self, here: int) -> Any:
        attend = KERNEL.attend(self.q[here])
        return functools.reduce(merge, (attend(self.k[there], self.v[there], b) for there, b in self.blocks[here]))

    def _backward(self, here: int, dout: list[Any]) -> Any:
        out, lse = self.results[here]
        return KERNEL.attend_grad(self.q[here], out, lse, dout[here])

    def answer(self) -> problem.Answer:
        devices, layout = self.case.devices, self.case.layout
        dq: list[Any] = [0.0] * devices
        dk, dv = list(dq), list(dq)
        for here, row in enumerate(self.blocks):
            gradients = self._backward(here, self.few)
            for there, block in row:
                for total, at, part in zip(
                    (dq, dk, dv), (here, there, there), gradients(self.k[there], self.v[there], block), strict=False
                ):
                    total[at] = total[at] + part
        parts = ([out for out, _ in self.results], dq, dk, dv)
        whole = [layout.restore(jnp.concatenate(part, axis=1), devices, 1) for part in parts]
        rows = problem.sample_rows(self.case.length)
        judged = whole[0][:, rows], whole[1][:, rows], *whole[2:]
        return problem.Answer(np.arange(self.case.length), *map(np.asarray, judged))

    def seconds(self) -> tuple[np.ndarray, np.ndarray]:
        forward = np.zeros((self.case.devices, len(self.blocks[0])))
        backward = np.zeros_like(forward)
        for here, row in enumerate(self.blocks):
            attend, gradients = KERNEL.attend(self.q[here]), self._backward(here, self.dout)
            _timed(attend, self.k[here], self.v[here], row[0][1])  # whatever was still going on is over after that
            for step, (there, block) in enumerate(row):
                forward[here, step] = _timed(attend, self.k[there], self.v[there], block)
                backward[here, step] = _timed(gradients, self.k[there], self.v[there], block)
        return forward, backward

    def temporary_bytes(self) -> int:
        """What a block's backward pass, the larger one, needs besides its arguments and results."""

        def backward(q: Any, out: Any, lse: Any, dout: Any, k: Any, v: Any, block: Block) -> Any:
            return KERNEL.attend_grad(q, out, lse, dout)(k, v, block)

        there, block = self.blocks[0][0]
        arrays = (self.q[0], *self.results[0], self.dout[0], self.k[there], self.v[there])
        memory: Any = jax.jit(backward).lower(*arrays, block).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)


def _timed(function: Any, *arguments: Any) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - begun


def check_pinned() -> list[int]:
    """The core of every thread of this process; with several a measurement of balance would mean nothing."""
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    cores = sorted(set().union(*(os.sched_getaffinity(thread) for thread in threads)))
    if len(cores) != 1:
        raise RuntimeError(f"A process must be pinned to one core; threads of this one may use {cores}.")
    return cores


def pick_cores(count: int) -> list[int]:
    """The cores to run on; a machine with more is used as if it had `count`."""
    usable = record.usable_cores()
    if len(usable) < count or not hasattr(os, "sched_setaffinity"):
        raise UsageError(
            f"This suite needs {count} cores on Linux, where a process can be tied to one; this one may use "
            f"{len(usable)}. Run it on a larger machine."
        )
    return usable[:count]


def core(platform: str = "cpu") -> Team:
    """A process with a core of its own, or with a GPU."""
    jax.config.update("jax_platforms", "cpu")  # what is worked out here must not take the GPU's memory
    return Team(Core, [set(pick_cores(1) if platform == "cpu" else record.usable_cores())], platform=platform)


def hardware(team: Team) -> dict[str, str]:
    """What the record says besides about where a team works."""
    (gpu,) = team.ask("gpu")
    return {} if gpu is None else {"gpu": gpu}


@dataclasses.dataclass(frozen=True)
class Path:
    """The seconds of a ring's blocks, device × step, and its critical path."""

    case: Case
    forward_blocks: np.ndarray
    both_blocks: np.ndarray

    @property
    def forward(self) -> float:
        return critical_path(self.forward_blocks)

    @property
    def both(self) -> float:
        return critical_path(self.both_blocks)


def critical_path(blocks: np.ndarray) -> Any:
    """The busiest device's share of every step, added up."""
    return blocks.max(axis=0).sum().item()


def truth_of(case: Case, seed: int = 0) -> problem.Answer:
    """The answer of every ring of a text."""
    return problem.oracle(problem.make_inputs(case.length, seed, case.shape), case.mask)


def measure(
    team: Team,
    cases: Sequence[Case],
    rounds: int,
    checks: list[dict[str, Any]],
    truth: problem.Answer | None = None,
    seed: int = 0,
) -> list[Path]:
    """Check rings of one text, which must share length and mask, and time them in turns, in a new order every round."""
    truth, dtype = truth or truth_of(cases[0], seed), cases[0].shape.dtype
    team.ask("forget")
    for case in cases:
        say(f"  checking {case}")
        (answer,) = team.ask("prepare", str(case), case, seed)
        verdict = problem.check(answer, truth, str(case), dtype)
        checks.append({"layout": repr(case.layout), "devices": case.devices, "tile": case.tile, **verdict})
    found: dict[str, list[Any]] = {str(case): [] for case in cases}
    shuffle = random.Random(seed).shuffle
    for turn in range(rounds):
        say(f"  round {turn + 1} of {rounds}")
        order = list(found)
        shuffle(order)
        for name in order:
            found[name] += team.ask("seconds", name)
    paths = []
    for case in cases:
        forward, backward = (np.median(blocks, axis=0) for blocks in zip(*found[str(case)], strict=True))
        paths.append(Path(case, forward, forward + backward))
    return paths


def pairs(case: Case) -> Counts:
    """Visible pairs of a query and a key, by device and step."""
    return count_pairs(case.layout, case.mask, case.length, case.devices)


def bound(case: Case) -> float:
    """The most that a layout can gain over contiguous: the critical path of each, in visible pairs."""
    base = dataclasses.replace(case, layout=contiguous())
    return critical_path(pairs(base)) / max(1, critical_path(pairs(case)))

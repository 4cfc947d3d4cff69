"""Blocks: what a ring of more devices than cores would take, from its blocks one by one.

A step of a ring takes as long as its busiest device. So where devices cannot run at the same time, each block (the
queries of device d with the keys that it holds at step j) is run by itself, by a process that owns a core, and

    critical path = sum over steps of the largest seconds[device, step]

is how long the ring would compute: nobody waits for a transfer, and merges, some percent of a step, are left out. Rings
to be compared take turns, and a block's seconds are the median of its rounds. One GPU can stand for many likewise.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from striped_attention.core.layout import Layout, contiguous
from striped_attention.core.mask import Mask
from striped_attention.core.partial import Partial, merge
from striped_attention.errors import UsageError
from striped_attention.kernels.choice import KERNELS
from striped_attention.kernels.contract import Block, Kernel
from striped_attention.planning.work import count_pairs
from striped_attention.runtime.record import usable_cores
from striped_attention.strategies.problem import Problem
from striped_attention.strategies.strategy import RING, Strategy
from striped_bench.bench import problem
from striped_bench.bench.run import Row, interleaved, say, seconds
from striped_bench.bench.workers import Team, check_pinned, pick_cores

HOW = (
    "Critical path: every block timed by itself on one core or GPU, without transfers and merges; "
    "the sum over steps of the busiest device's seconds, not wall-clock."
)
PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A ring to be timed; `tile` is a side of the kernel's tiles, None for its own choice.

    With a strategy, the heads of `shape` are those that one device has after the exchanges.
    """

    layout: Layout
    mask: Mask
    devices: int
    length: int
    tile: int | None = None
    shape: problem.Shape = problem.CPU
    strategy: Strategy = RING

    def __str__(self) -> str:
        tile = "" if self.tile is None else f", tiles of {self.tile}"
        return f"{self.layout!r} on {self.devices} devices{tile}"

    @property
    def queries(self) -> tuple[Layout, int]:
        """How queries lie after the exchanges: their layout, and on how many groups of devices."""
        return self.layout.grouped(self.strategy.heads), self.devices // self.strategy.heads

    @property
    def keys(self) -> tuple[Layout, int]:
        """How keys lie."""
        return self.layout.grouped(self.strategy.group), self.devices // self.strategy.group

    def blocks(self, kernel: Kernel, here: int) -> Iterator[tuple[int, Block]]:
        """Of a group's queries, step by step: whose keys are met, and the block, as in the ring."""
        tile = None if self.tile is None else (self.tile, self.tile)
        sizes = (self.devices, self.layout, self.length, self.length)
        ring = Problem("timed", *sizes, kernel, self.shape.dim**-0.5, tile=tile, strategy=self.strategy)
        layout, groups = self.queries
        held = slice(here * self.length // groups, (here + 1) * self.length // groups)
        own = jax.tree.map(lambda x: np.asarray(x)[:, held], self.mask.permute(layout, groups))
        meet = ring.meetings(own, None, here)
        for offset in ring.offsets(self.mask):
            there = (here // self.strategy.gather - offset) % self.keys[1]
            yield there, meet(there, offset == 0)

    def pairs(self) -> np.ndarray:
        """Visible pairs of a query and a key, by device and step."""
        return count_pairs(self.layout, self.mask, self.length, self.devices)

    def bound(self) -> float:
        """The most that the layout can gain over contiguous: the critical path of each, in visible pairs."""
        base = dataclasses.replace(self, layout=contiguous())
        return critical_path(base.pairs()) / max(1, critical_path(self.pairs()))


class Blocks:
    """The arrays of a ring, by device, and the blocks and results of some of its devices."""

    def __init__(
        self, case: Case, devices: Sequence[int], kernel: Kernel, inputs: problem.Inputs | None = None
    ) -> None:
        inputs = inputs or problem.make_inputs(case.length, case.shape)

        def split(x: Any, layout: Layout, groups: int) -> list[Any]:
            return jnp.split(layout.permute(jnp.asarray(x), groups, 1), groups, 1)

        self.case, self.kernel, self.q = case, kernel, split(inputs.q, *case.queries)
        self.k, self.v = (split(x, *case.keys) for x in (inputs.k, inputs.v))
        douts = (split(x, *case.queries) for x in (inputs.dout, inputs.few))
        self.dout, self.few = ([x.astype(jnp.float32) for x in dout] for dout in douts)
        self.blocks = {here: jax.tree.map(jnp.asarray, list(case.blocks(kernel, here))) for here in devices}
        self.results = {here: self._result(here) for here in devices}

    def forward(self, here: int) -> list[functools.partial[Partial]]:
        """A device's forward pass, one function per block."""
        q = self.kernel, self.q[here]
        return [functools.partial(_attend, *q, self.k[there], self.v[there], b) for there, b in self.blocks[here]]

    def backward(self, here: int, dout: list[Any]) -> list[functools.partial[Any]]:
        """A device's backward pass, one function per block: its parts of dq, dk and dv."""
        q = self.kernel, self.q[here], *self.results[here], dout[here]
        return [functools.partial(_gradients, *q, self.k[there], self.v[there], b) for there, b in self.blocks[here]]

    def _result(self, here: int) -> Partial:
        """A device's output, with as many digits as its kernel has use for in the backward pass."""
        out, lse = functools.reduce(merge, (run() for run in self.forward(here)))
        return Partial(out if self.kernel.FULL_OUT else out.astype(self.q[here].dtype).astype(out.dtype), lse)

    def answer(self, dout: list[Any]) -> list[Any]:
        """Output and gradients of the whole ring, in sequence order."""
        lies = (self.case.queries, self.case.queries, self.case.keys, self.case.keys)
        _, dq, dk, dv = ([0.0] * groups for _, groups in lies)  # type: tuple[Any, list[Any], list[Any], list[Any]]
        for here, blocks in self.blocks.items():
            for (there, _), run in zip(blocks, self.backward(here, dout), strict=True):
                add_q, add_k, add_v = run()
                dq[here], dk[there], dv[there] = dq[here] + add_q, dk[there] + add_k, dv[there] + add_v
        parts = ([out for out, _ in self.results.values()], dq, dk, dv)
        return [lie[0].restore(jnp.concatenate(x, axis=1), lie[1], 1) for x, lie in zip(parts, lies, strict=True)]

    def seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every block (device × step), forward and backward."""
        if jax.default_backend() == "cpu":
            check_pinned()
        found = []
        for here in self.blocks:
            forward, backward = self.forward(here), self.backward(here, self.dout)
            seconds(forward[0])  # whatever was still going on is over after that
            found.append([(seconds(a), seconds(b)) for a, b in zip(forward, backward, strict=True)])
        return tuple(np.moveaxis(np.array(found), -1, 0))

    def temporary_bytes(self) -> int:
        """What a block's backward pass, the larger one, needs besides its arguments and results."""
        memory: Any = _gradients.lower(*self.backward(0, self.dout)[0].args).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)


@functools.partial(jax.jit, static_argnums=0)
def _attend(kernel: Kernel, q: Any, k: Any, v: Any, block: Block) -> Partial:
    return kernel.attend(q)(k, v, block)


@functools.partial(jax.jit, static_argnums=0)
def _gradients(kernel: Kernel, q: Any, out: Any, lse: Any, dout: Any, k: Any, v: Any, block: Block) -> Any:
    return kernel.attend_grad(q, out, lse, dout)(k, v, block)[:3]


def replay(
    *inputs: Any, kernel: Kernel, layout: Layout, mask: Mask, members: int, strategy: Strategy = RING
) -> tuple[Any, ...]:
    """out, dq, dk and dv from q, k, v and dout on a ring, its members one after the other: for checks on a single GPU.

    With a strategy, shares of the heads come one after the other, and gradients of a key head's copies are added up.
    """
    q, k = inputs[:2]
    copies = strategy.key_copies(q.shape[2], k.shape[2])
    repeated = [jnp.repeat(jnp.asarray(x), n, axis=2) for x, n in zip(inputs, (1, copies, copies, 1), strict=True)]
    shares = []
    for some in zip(*(jnp.split(x, strategy.heads, axis=2) for x in repeated), strict=True):
        shape = problem.Shape(some[0].shape[2], some[1].shape[2], q.shape[3], str(q.dtype))
        case = Case(layout, mask, members, q.shape[1], shape=shape, strategy=strategy)
        ring = Blocks(case, range(case.queries[1]), kernel, problem.Inputs(*some))
        shares.append(ring.answer(ring.dout))
    out, dq, *dkv = (jnp.concatenate(x, axis=2) for x in zip(*shares, strict=True))
    dk, dv = (x.reshape(*x.shape[:2], -1, copies, x.shape[3]).sum(axis=3) for x in dkv)
    return tuple(x.astype(q.dtype) for x in (out, dq, dk, dv))


class Core:
    """What a process with a core or a GPU of its own holds: rings of one sequence, ready to be timed."""

    def __init__(self, platform: str, **_: Any) -> None:
        jax.config.update("jax_platforms", PLATFORMS[platform])
        try:
            jax.devices()
        except (AssertionError, RuntimeError) as error:  # the first where JAX has no package for it at all
            why = (str(error).splitlines() or [""])[0]
            rule = f"--platform {platform} needs an NVIDIA GPU and JAX's packages for it"
            raise UsageError(f"{rule}; JAX finds none here. {why}".strip()) from error
        self.rings: list[Blocks] = []

    def prepare(self, cases: Sequence[Case]) -> list[problem.Answer]:
        """Compile and run all blocks once; the answers to be checked."""
        self.rings = []  # let go of the last ones first
        self.rings = [Blocks(case, range(case.devices), KERNELS["xla"]) for case in cases]
        answers, rows = [ring.answer(ring.few) for ring in self.rings], problem.sample_rows(cases[0].length)
        few = ((out[:, rows], dq[:, rows], dk, dv) for out, dq, dk, dv in answers)
        return [problem.Answer(np.arange(cases[0].length), *map(np.asarray, answer)) for answer in few]

    def ask(self, index: int, method: str) -> Any:
        return getattr(self.rings[index], method)()

    def gpu(self) -> dict[str, str]:
        """What the record says besides about the hardware."""
        return {} if jax.default_backend() == "cpu" else {"gpu": jax.devices()[0].device_kind}


def core(platform: str = "cpu") -> Team:
    """A process with a core of its own, or with a GPU."""
    jax.config.update("jax_platforms", "cpu")  # what is worked out here must not take the GPU's memory
    return Team(Core, [set(pick_cores(1) if platform == "cpu" else usable_cores())], platform=platform)


class Path(NamedTuple):
    """The critical path of a ring in seconds, and those of its blocks, device × step, forward and backward together."""

    case: Case
    forward: float
    both: float
    blocks: np.ndarray


def critical_path(blocks: np.ndarray) -> Any:
    """The busiest device's share of every step, added up."""
    return blocks.max(axis=0).sum().item()


def measure(team: Team, cases: Sequence[Case], rounds: int, checks: list[Row]) -> list[Path]:
    """Check rings of one sequence, which must share length and mask, and time them in turns."""
    first = cases[0]
    truth = problem.oracle(problem.make_inputs(first.length, first.shape), first.mask)
    for case, answer in zip(cases, team.ask("prepare", cases)[0], strict=True):
        verdict = problem.check(answer, truth, str(case), case.shape.dtype)
        checks.append({"layout": repr(case.layout), "devices": case.devices, "tile": case.tile, **verdict})
    say(f"  answers checked: {', '.join(map(str, cases))}")
    found = interleaved(range(len(cases)), rounds, lambda index: team.ask("ask", index, "seconds")[0])
    paths = []
    for index, case in enumerate(cases):
        forward, backward = (np.median(blocks, axis=0) for blocks in zip(*found[index], strict=True))
        paths.append(Path(case, critical_path(forward), critical_path(forward + backward), forward + backward))
    return paths

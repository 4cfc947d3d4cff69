"""Blocks: estimate how long a ring of more devices than cores would take, by timing its blocks one at a time.

A step of a ring takes as long as its busiest device. Where the devices cannot run at the same time, each block (the
queries of device d with the keys that it holds at step j) is timed on its own, in a process pinned to one core, and

    critical path = sum over steps of the largest seconds[device, step]

estimates how long the ring would compute. It leaves out transfers and merges; merges take a few percent of a step.
Rings to be compared are timed in interleaved rounds, and a block's time is the median over rounds. One GPU can stand in
for many in the same way.
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
    "Critical path: each block is timed on its own on one core or GPU, without transfers and merges. "
    "The sum over steps of the busiest device's seconds, not wall-clock time."
)
PLATFORMS = {"cpu": "cpu", "gpu": "cuda"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A ring to be timed. `tile` is the side of the kernel's tiles; None means the kernel's default.

    With a strategy, `shape` has the heads that one device holds after the all-to-all exchange.
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
        """Layout of the queries after the exchanges, and the number of device groups that hold them."""
        return self.layout.grouped(self.strategy.heads), self.devices // self.strategy.heads

    @property
    def keys(self) -> tuple[Layout, int]:
        """Layout of the keys after the exchanges, and the number of device groups that hold them."""
        return self.layout.grouped(self.strategy.group), self.devices // self.strategy.group

    def blocks(self, kernel: Kernel, here: int) -> Iterator[tuple[int, Block]]:
        """For the queries of group `here`, yield for each step of the ring whose keys it meets, and the block."""
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
        """Count visible query-key pairs, device × step."""
        return count_pairs(self.layout, self.mask, self.length, self.devices)

    def bound(self) -> float:
        """Upper bound on the speed-up over contiguous: the ratio of critical paths, counted in visible pairs."""
        base = dataclasses.replace(self, layout=contiguous())
        return critical_path(base.pairs()) / max(1, critical_path(self.pairs()))


class Blocks:
    """The arrays of a ring by device, and the blocks and results of the given `devices`."""

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
        """Return a device's forward pass as one function per block."""
        q = self.kernel, self.q[here]
        return [functools.partial(_attend, *q, self.k[there], self.v[there], b) for there, b in self.blocks[here]]

    def backward(self, here: int, dout: list[Any]) -> list[functools.partial[Any]]:
        """Return a device's backward pass as one function per block; each gives its contributions to dq, dk and dv."""
        q = self.kernel, self.q[here], *self.results[here], dout[here]
        return [functools.partial(_gradients, *q, self.k[there], self.v[there], b) for there, b in self.blocks[here]]

    def _result(self, here: int) -> Partial:
        """Compute a device's output, in the precision that its kernel uses in the backward pass."""
        out, lse = functools.reduce(merge, (run() for run in self.forward(here)))
        return Partial(out if self.kernel.FULL_OUT else out.astype(self.q[here].dtype).astype(out.dtype), lse)

    def answer(self, dout: list[Any]) -> list[Any]:
        """Compute output and gradients of the whole ring, in sequence order."""
        lies = (self.case.queries, self.case.queries, self.case.keys, self.case.keys)
        _, dq, dk, dv = ([0.0] * groups for _, groups in lies)  # type: tuple[Any, list[Any], list[Any], list[Any]]
        for here, blocks in self.blocks.items():
            for (there, _), run in zip(blocks, self.backward(here, dout), strict=True):
                add_q, add_k, add_v = run()
                dq[here], dk[there], dv[there] = dq[here] + add_q, dk[there] + add_k, dv[there] + add_v
        parts = ([out for out, _ in self.results.values()], dq, dk, dv)
        return [lie[0].restore(jnp.concatenate(x, axis=1), lie[1], 1) for x, lie in zip(parts, lies, strict=True)]

    def seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Time every block: forward and backward, each an array of device × step."""
        if jax.default_backend() == "cpu":
            check_pinned()
        found = []
        for here in self.blocks:
            forward, backward = self.forward(here), self.backward(here, self.dout)
            seconds(forward[0])  # warm-up: earlier asynchronous work has finished after this
            found.append([(seconds(a), seconds(b)) for a, b in zip(forward, backward, strict=True)])
        return tuple(np.moveaxis(np.array(found), -1, 0))

    def temporary_bytes(self) -> int:
        """Temporary memory of a block's backward pass (the larger pass), beyond its arguments and results."""
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
    """Compute out, dq, dk and dv from q, k, v and dout, running the devices of a ring one after another on one GPU.

    Used for checks. With a strategy, the head groups also run one after another, and the gradients of copied key heads
    are summed.
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
    """The object in a process with its own core or GPU: rings over one sequence, ready to be timed."""

    def __init__(self, platform: str, **_: Any) -> None:
        jax.config.update("jax_platforms", PLATFORMS[platform])
        try:
            jax.devices()
        except (AssertionError, RuntimeError) as error:  # AssertionError: no GPU plugin of JAX is installed
            why = (str(error).splitlines() or [""])[0]
            rule = f"--platform {platform} needs an NVIDIA GPU and JAX's packages for it"
            raise UsageError(f"{rule}; JAX found none. {why}".strip()) from error
        self.rings: list[Blocks] = []

    def prepare(self, cases: Sequence[Case]) -> list[problem.Answer]:
        """Compile and run all blocks once, and return the answers to be checked."""
        self.rings = []  # free the previous ones first
        self.rings = [Blocks(case, range(case.devices), KERNELS["xla"]) for case in cases]
        answers, rows = [ring.answer(ring.few) for ring in self.rings], problem.sample_rows(cases[0].length)
        few = ((out[:, rows], dq[:, rows], dk, dv) for out, dq, dk, dv in answers)
        return [problem.Answer(np.arange(cases[0].length), *map(np.asarray, answer)) for answer in few]

    def ask(self, index: int, method: str) -> Any:
        return getattr(self.rings[index], method)()

    def gpu(self) -> dict[str, str]:
        """Return the GPU's name for the hardware record; empty on CPUs."""
        return {} if jax.default_backend() == "cpu" else {"gpu": jax.devices()[0].device_kind}


def core(platform: str = "cpu") -> Team:
    """Start a process with its own core, or with the GPU."""
    jax.config.update("jax_platforms", "cpu")  # the parent process must not take the GPU's memory
    return Team(Core, [set(pick_cores(1) if platform == "cpu" else usable_cores())], platform=platform)


class Path(NamedTuple):
    """Critical path of a ring in seconds; `blocks` are seconds by device × step, forward and backward together."""

    case: Case
    forward: float
    both: float
    blocks: np.ndarray


def critical_path(blocks: np.ndarray) -> Any:
    """Sum over steps of the busiest device's value."""
    return blocks.max(axis=0).sum().item()


def measure(team: Team, cases: Sequence[Case], rounds: int, checks: list[Row]) -> list[Path]:
    """Check rings that share length and mask, and time them in interleaved rounds."""
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

"""The suite `step`: a whole training step of one member of a ring of GPUs, measured on one (see `mock.py` how).

The step is the one of `striped train`, optimiser included, on text without documents and in bfloat16. A row is one
member's step with one layout: the last member, which has the most to do where tokens are dealt in one piece, and where
they are striped also the first. One more row is the step *without attention*. It does not depend on the layout, and the
difference to a whole step is what attention takes.

The timed step may only begin with a fresh state: what it leaves behind has seen sums that came over no wire. Memory and
transfers are those of the real program. A real step takes this long and whatever the wire takes that is not hidden:
`hidden` counts the ring's transfers that are, `wire_bytes` is all that a member sends.

Whether rings give the right answers is what the suite `gpu` checks; this one checks that in a whole step on one GPU the
kernel `cudnn` gives those of `xla`.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich.table
from jax.sharding import Mesh

from striped_attention.attention import choose_kernel
from striped_attention.bench import mock
from striped_attention.bench.config import BenchConfig
from striped_attention.bench.run import document, main, path, say, stream, write
from striped_attention.cost import attention_flops, causal_pairs, estimate, matrix_flops
from striped_attention.hardware import peak_flops
from striped_attention.model import PRESETS
from striped_attention.parallel import AXES
from striped_attention.schedule import transfers
from striped_attention.training import data
from striped_attention.training.config import TrainConfig
from striped_attention.training.errors import UsageError
from striped_attention.training.step import Inputs, Program

MODULE = "striped_attention.bench.step"
SAMPLES = 3
LONG = 2.0  # seconds of a step of which one sample will do
TOLERANCE = 2e-2  # of loss and gradient norm, between kernels in bfloat16
WEIGHT_TOLERANCE = 0.1  # of a weight's gradient: rounding makes 0.01, a wrong mask 0.3 to 0.8, yet of the loss 0.0001


def run(config: BenchConfig) -> None:
    """Check, measure, print a table and write the JSON, after every row: steps can be long."""
    options = config.options
    fixed = {"batch": 1, "dtype": "bfloat16", "remat": TrainConfig.remat, "kernel": "cudnn"}
    asked = {name: options[name] for name in ("presets", "members", "lengths")}
    result = document(config, {**asked, "chunk": options["chunk"], **fixed})
    result["checks"] = list(stream(MODULE, "check", **asked))
    say(f"answers checked: a step on one GPU, cudnn against xla, {result['checks'][0]['worst']:.1e}")
    result["gpu"] = result["checks"][0]["gpu"]
    result["steps"] = []
    for preset, length, members in itertools.product(options["presets"], options["lengths"], options["members"]):
        ring = {"preset": preset, "length": length, "members": members}
        say(f"{preset}, {length:,} tokens, {members} members: compiling …")
        for row in stream(MODULE, "measure", **ring, chunk=options["chunk"]):
            result["steps"].append(row)
            result["summary"] = summary(result["steps"])
            write(result, config)
            say(_line(row))
    say(table(result["summary"]))
    say(str(path(config)))


def _line(row: dict[str, Any]) -> str:
    what = f"{row['layout']}, rank {row['rank']}" if row["attention"] else "without attention"
    if not row["fits"]:
        needed = "" if row["needed_bytes"] is None else f", it needs {row['needed_bytes'] / 1e9:.1f} GB"
        return f"  {what}: does not fit{needed}"
    return f"  {what}: {row['seconds']:.3f} s, {row['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU"


class Case(NamedTuple):
    """A model, a text and a ring; `devices` are those of the ring, not all of which need to exist."""

    preset: str
    length: int
    members: int
    chunk: int
    kernel: str
    devices: list[Any]

    def program(self, layout: str, rank: int, attend: Any = None) -> Program:
        """The training step with the first device as the member `rank`."""
        options: dict[str, Any] = dict(preset=self.preset, sequence_length=self.length, layout=layout)
        config = TrainConfig(**options, chunk=self.chunk, kernel=self.kernel)
        mesh = Mesh(mock.in_place(self.devices, rank).reshape(1, self.members), AXES.everything)
        return Program(config, mesh, attend, documents=False)

    def rates(self, seconds: float, attention: bool) -> dict[str, float | None]:
        """What a member does a second, and how much of that is useful work, against its device's best."""
        model = PRESETS[self.preset]
        flops = matrix_flops(model, self.length)
        if attention:
            flops += attention_flops(model, causal_pairs(self.length))
        peak = peak_flops(self.devices[0].device_kind)
        mfu = None if peak is None else flops / self.members / seconds / peak
        return {"tokens_per_second_per_gpu": self.length / self.members / seconds, "mfu": mfu}


def without_attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """In place of attention: something without work of which q, k and v all have gradients.

    Their weights differ, else two of the gradients would be equal, and the compiler would compute one.
    """
    return q + jnp.repeat(k / 2 + v / 4, q.shape[2] // k.shape[2], axis=2)


def measure(case: Case, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Rows, in the order of how much they are worth if there is no time for all. `limit` is a device's memory."""
    last = case.members - 1
    parts = [("contiguous", last, True), ("striped", last, True), ("striped", last, False), ("striped", 0, True)]
    real: dict[str, dict[str, Any]] = {}
    fresh: dict[int, Any] = {}
    for layout, rank, attention in parts:
        program = case.program(layout, rank, None if attention else without_attention)
        row: dict[str, Any] = {"preset": case.preset, "length": case.length, "members": case.members}
        row |= {"layout": repr(program.compute.layout), "rank": rank, "attention": attention}
        found = None
        try:
            if layout not in real:
                real[layout] = _real(case.program(layout, rank))
            if limit is None or real[layout]["needed_bytes"] <= limit:
                fresh[rank] = fresh.get(rank) or _fresh(program)
                found = timed(program, fresh[rank])
                found |= case.rates(found["seconds"], attention) | (real[layout] if attention else {})
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
        needed = real.get(layout, {}).get("needed_bytes")
        yield row | ({"fits": False, "needed_bytes": needed} if found is None else {"fits": True, **found})


def _real(program: Program) -> dict[str, Any]:
    """What the program says that is not timed: the memory it needs, and its transfers around the ring."""
    compiled = program.compiled
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    sent = transfers(str(compiled.as_text()))
    mesh = {str(axis): size for axis, size in program.mesh.shape.items()}
    return {
        "needed_bytes": kept + memory.temp_size_in_bytes,
        **{"transfers": len(sent), "hidden": sum(transfer.hidden for transfer in sent)},
        "wire_bytes": estimate(program.config, mesh).wire,
    }


def _fresh(program: Program) -> Callable[[], Any]:
    """What makes the state before the first step. Compiled once: JAX forgets what it compiled for stand-ins."""
    key = jax.random.key(program.config.seed)
    make = program.fresh.lower(key).compile()
    return lambda: make(key)


def timed(program: Program, fresh: Callable[[], Any]) -> dict[str, Any]:
    """A step with stand-ins, from a fresh state: its seconds, and the most memory that this process has used so far."""
    begun = time.perf_counter()
    with mock.all_at_home():
        step = program.compiled
    compiling = time.perf_counter() - begun
    inputs = _inputs(program)
    times = sample(lambda: _seconds(step, fresh, inputs))
    memory = jax.local_devices()[0].memory_stats() or {}
    return {**times, "compile_seconds": compiling, "process_peak_bytes": memory.get("peak_bytes_in_use")}


def sample(seconds: Callable[[], float]) -> dict[str, Any]:
    """The median of some samples after one to warm up, or only one sample if it is long."""
    warm_up = seconds()
    samples = [seconds()]
    if samples[0] < LONG:
        samples += [seconds() for _ in range(SAMPLES - 1)]
    return {"seconds": statistics.median(samples), "samples": samples, "warm_up_seconds": warm_up}


def _seconds(step: Any, fresh: Callable[[], Any], inputs: Inputs) -> float:
    state = jax.block_until_ready(fresh())
    begun = time.perf_counter()
    jax.block_until_ready(step(state, inputs))
    return time.perf_counter() - begun


def _inputs(program: Program) -> Inputs:
    """Random tokens: a step takes as long with them as with any others."""
    config = program.config
    tokens = np.random.default_rng(0).integers(0, config.model.vocabulary, config.sequence_length + 1, np.int32)
    corpus = data.Corpus(tokens, None, config.model.vocabulary, "random tokens")
    return program.place(data.read(corpus, 0, program.rows, config.sequence_length, config.seed))


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The busiest member of every ring and layout: what attention takes of its step, and what striping is worth.

    `bound` is what striping can be worth where there is nothing but attention, `step_bound` what it can in this step.
    """
    rings: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        rings.setdefault((row["preset"], row["length"], row["members"]), []).append(row)
    return [line for (_, _, members), ring in rings.items() for line in _ring_summary(members, ring)]


def _ring_summary(members: int, ring: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    outside = next((row["seconds"] for row in ring if row["fits"] and not row["attention"]), None)
    layouts: dict[str, list[dict[str, Any]]] = {}
    for row in ring:
        if row["attention"]:
            layouts.setdefault(row["layout"], []).append(row)
    busiest = {name: max(ranks, key=lambda row: row.get("seconds", math.inf)) for name, ranks in layouts.items()}
    contiguous = busiest.get("contiguous()", {}).get("seconds")
    bound = 2 - 1 / members
    for row in busiest.values():
        line = {name: value for name, value in row.items() if name not in ("attention", "samples")} | {"bound": bound}
        if row["fits"]:
            seconds = row["seconds"]
            line["over_contiguous"] = None if contiguous is None else contiguous / seconds
            line["outside_attention_seconds"] = outside
            line["attention_share"] = None if outside is None else 1 - outside / seconds
            line["step_bound"] = None
            if contiguous is not None and outside is not None:
                line["step_bound"] = contiguous / (outside + (contiguous - outside) / bound)
        yield line


def table(rows: list[dict[str, Any]]) -> rich.table.Table:
    shown = rich.table.Table(
        *("preset", "tokens", "members", "layout", "seconds", "tokens/s a GPU", "MFU", "attention", "outside s"),
        *("× contiguous", "bound", "GB", "hidden"),
    )

    def cell(row: dict[str, Any], name: str, form: str) -> str:
        return "—" if row.get(name) is None else format(row[name], form)

    for row in rows:
        memory = "—" if row["needed_bytes"] is None else f"{row['needed_bytes'] / 1e9:.1f}"
        shown.add_row(
            *(row["preset"], f"{row['length']:,}", str(row["members"]), row["layout"]),
            cell(row, "seconds", ".3f") if row["fits"] else "does not fit",
            *(cell(row, "tokens_per_second_per_gpu", ",.0f"), cell(row, "mfu", ".1%")),
            *(cell(row, "attention_share", ".1%"), cell(row, "outside_attention_seconds", ".3f")),
            *(cell(row, "over_contiguous", ".3f"), cell(row, "step_bound", ".3f"), memory),
            f"{row['hidden']}/{row['transfers']}" if row["fits"] else "—",
        )
    return shown


def _measure(preset: str, length: int, members: int, chunk: int) -> Iterator[dict[str, Any]]:
    """The task of a worker."""
    case = Case(preset, length, members, chunk, "cudnn", jax.devices())
    return measure(case, mock.gpu()["memory_for_jax"])


def _check(presets: list[str], members: list[int], lengths: list[int]) -> Iterator[dict[str, Any]]:
    """The kernel can do all that will be asked, and gives right answers on one GPU."""
    for preset, count, length in itertools.product(presets, members, lengths):
        config = TrainConfig(preset=preset, sequence_length=length, layout="contiguous")  # type: ignore[arg-type]
        layout = config.make_layout(count, False, jax.default_backend())
        query, key, what = config.attention(layout, count, False, jax.default_backend())
        try:
            choose_kernel("cudnn", query, key, **what)
        except NotImplementedError as error:
            raise UsageError(f"--presets {preset}: {error}") from error
    yield {**compare(answers("cudnn"), answers("xla")), "gpu": mock.gpu()}


def answers(kernel: str) -> dict[str, Any]:
    """Of one step of a small model on one device: loss, norm of the gradient, and gradients up to a factor."""
    config = TrainConfig(preset="debug", dim=256, heads=4, kv_heads=2, sequence_length=1024, kernel=kernel)
    program = Program(config, Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), AXES.everything), documents=False)
    state, metrics = program.compiled(program.fresh_state(), _inputs(program))
    moments = optax.tree.get(state.optimiser, "mu")  # AdamW's first is a tenth of the clipped gradient
    named = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(moments)}
    return {name: float(metrics[name]) for name in ("loss", "gradient_norm")} | {"gradients": named}


def compare(found: dict[str, Any], truth: dict[str, Any]) -> dict[str, Any]:
    """How far two answers are from each other; raises if it is more than rounding."""
    apart = {name: abs(found[name] / truth[name] - 1) for name in ("loss", "gradient_norm")}
    for name, x in truth["gradients"].items():
        apart[name] = float(np.linalg.norm(found["gradients"][name] - x) / np.linalg.norm(x))
    for name, difference in apart.items():
        if not difference < (TOLERANCE if name in truth else WEIGHT_TOLERANCE):  # NaN is not
            raise RuntimeError(f"{name} of a step with cudnn differs from that with xla by {difference:.1e}.")
    return {"loss": found["loss"], "worst": max(apart.values()), "apart": apart}


if __name__ == "__main__":
    main({"check": _check, "measure": _measure}, mocked=("measure",))

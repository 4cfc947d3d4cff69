"""The suite `step`: a whole training step of one device of a ring of GPUs, measured on one GPU (see `mock.py`).

The step is that of `striped train`, optimiser included, in bfloat16, by kernel, strategy and layout. Its settings are
chosen for the memory of the GPU; rows report the chosen strategy (for `auto`), remat and chunk. There are rows for

    the last device, with each layout   the busiest one with contiguous tokens and a causal mask
    the first device                    with layouts other than contiguous
    a step *without attention*          the difference is the time of attention

Memory and transfers are those of the real program, which takes as long as the timed one plus the transfers that do not
overlap with computation. `hidden` counts the ring's transfers that do, `wire_bytes` are all bytes that a device sends,
and `planned_transfer_seconds` is the planner's estimate for them. The checks compare a step on one GPU, each kernel
against `xla`, and attention with every strategy, as in the suite `gpu`.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import striped_attention as sa
from striped_attention import data
from striped_attention.core.mask import Mask, causal, packed
from striped_attention.errors import UsageError
from striped_attention.kernels.choice import choose
from striped_attention.models.config import PRESETS
from striped_attention.models.stages import AXES
from striped_attention.planning.cost import attention_flops, estimate, matrix_flops
from striped_attention.planning.setting import Setting
from striped_attention.runtime.hardware import hardware_of, peak_flops
from striped_attention.runtime.schedule import transfers
from striped_attention.strategies.choice import TileCount, assess
from striped_attention.training import memory
from striped_attention.training.config import TrainConfig
from striped_attention.training.settle import settle
from striped_attention.training.step import Program
from striped_bench.bench import gpu, mock
from striped_bench.bench.problem import visible_pairs
from striped_bench.bench.run import Options, Progress, Record, Row, grouped, keep, require, seconds, tabulate

RING = ("preset", "length", "members", "kernel", "text")
SAMPLES = 3
LONG = 2.0  # seconds; a longer step is sampled once
TOLERANCE = 2e-2  # of loss and gradient norm, between kernels in bfloat16
WEIGHT_TOLERANCE = 0.1  # of a weight's gradient: rounding gives 0.01, a wrong mask 0.3 to 0.8 (in the loss 0.0001)


def step(options: Options, result: Record) -> Progress:
    result["configuration"] |= {"batch": 1, "dtype": "bfloat16"}
    result["checks"] = list(mock.results(check, **{name: options[name] for name in options if name != "chunk"}))
    result["gpu"] = result["checks"][0]["gpu"]
    result["steps"] = []
    yield f"answers checked: steps on one GPU, strategies; errors up to {max(c['worst'] for c in result['checks']):.1e}"
    shared = {name: options[name] for name in ("chunk", "strategies", "layouts", "text")}
    asked = (options[name] for name in ("presets", "lengths", "members", "kernels"))
    for preset, length, members, kernel in itertools.product(*asked):
        case = {"preset": preset, "length": length, "members": members, "kernel": kernel, **shared}
        for row in keep(result["steps"], mock.results(measure, members, **case)):
            result["summary"] = list(summary(result["steps"]))
            yield row
    ring = (*RING, "strategy", "layout")
    rates = ("seconds", "tokens_per_second_per_gpu", "mfu", "attention_share", "outside_attention_seconds")
    others = ("over_contiguous", "step_bound", "remat", "fits", "needed_bytes", "hidden", "transfers")
    yield tabulate(result["summary"], *ring, *rates, *others, "planned_transfer_seconds")


class Case(NamedTuple):
    """A model, a sequence length and a ring. `devices` are those of the ring; not all of them need to exist.

    A step may use `room` bytes of a device; None means what a training run plans with on such devices.
    """

    preset: str
    length: int
    members: int
    chunk: int | str  # tokens, or "auto": what training chooses
    kernel: str
    devices: list[Any]
    strategies: Sequence[str] = ("ring",)
    text: str = "whole"
    layouts: Sequence[str] = ("contiguous", "striped")
    room: float | None = None

    @property
    def documents(self) -> bool:
        return self.text == "documents"

    def asked(self, layout: str, strategy: str = "ring") -> TrainConfig:
        """Return the corresponding options of `striped train`."""
        options: dict[str, Any] = dict(preset=self.preset, sequence_length=self.length, **layout_options(layout))
        chunk = self.chunk if isinstance(self.chunk, int) else None
        return TrainConfig(**options, chunk=chunk, kernel=self.kernel, strategy=strategy)

    def program(self, layout: str, rank: int, attend: Any = None, strategy: str = "ring") -> Program:
        """Make the training step with the first device as rank `rank`."""
        mesh = Mesh(np.roll(np.array(self.devices), rank).reshape(1, self.members), AXES.everything)
        device, sizes = self.devices[0], {str(axis): size for axis, size in mesh.shape.items()}
        where = (sizes, self.documents, device.platform, device.device_kind, self.room)
        return Program(settle(self.asked(layout, strategy), *where), mesh, attend, documents=self.documents)

    def real(self, layout: str, rank: int, strategy: str) -> tuple[TrainConfig, dict[str, Any]]:
        """Return the settings that fit, found by compiling as in training, and facts about the real program."""
        program = self.program(layout, rank, strategy=strategy)
        if self.room is not None:
            program = memory.fitting(program, self.asked(layout, strategy), self.room, print)
        return program.config, _real(program)

    def rates(self, taken: float, attention: bool) -> dict[str, float | None]:
        """Return tokens per second per GPU, and MFU."""
        model = PRESETS[self.preset]
        flops = matrix_flops(model, self.length)
        if attention:
            mask = packed(self.length) if self.documents else causal()
            flops += attention_flops(model, visible_pairs(mask, self.length))
        peak = peak_flops(self.devices[0].device_kind)
        mfu = None if peak is None else flops / self.members / taken / peak
        return {"tokens_per_second_per_gpu": self.length / self.members / taken, "mfu": mfu}


def layout_options(layout: str) -> dict[str, Any]:
    """Return the options of `striped train` for a layout; without a stripe width, training chooses it."""
    name, _, stripe = layout.strip(" )").partition("(")
    return {"layout": name, "stripe": int(stripe) if stripe else None}


def without_attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Stand-in for attention without its work. The gradients of q, k and v differ, or the compiler would merge them."""
    return q + jnp.repeat(k / 2 + v / 4, q.shape[2] // k.shape[2], axis=2)


def measure(preset: str, length: int, members: int, chunk: int | str, kernel: str, **more: Any) -> Iterator[Row]:
    """Measure one ring of GPUs; yield its rows."""
    room = float(mock.gpu()["memory_for_jax"])
    return measure_case(Case(preset, length, members, chunk, kernel, jax.devices(), room=room, **more))


def measure_case(case: Case) -> Iterator[Row]:
    """Yield rows, the most useful ones first in case time runs out."""
    last, others = case.members - 1, [layout for layout in case.layouts if layout != "contiguous"]
    parts = [(layout, last, True) for layout in case.layouts]
    parts += [(case.layouts[-1], last, False), *((layout, 0, True) for layout in others)]
    real: dict[Any, tuple[TrainConfig, dict[str, Any]]] = {}
    fresh: dict[int, Any] = {}
    done = set()
    for (layout, rank, attention), asked in itertools.product(parts, case.strategies):
        program = case.program(layout, rank, None if attention else without_attention, asked)
        strategy = program.config.strategy  # "auto" is resolved
        if (part := (layout, rank, attention and strategy)) in done:
            continue
        done.add(part)
        found, same = None, (layout, strategy)
        try:
            if same not in real:
                real[same] = case.real(layout, rank, strategy)
            program = dataclasses.replace(program, config=real[same][0])
            if case.room is None or real[same][1]["needed_bytes"] <= case.room:
                fresh[rank] = fresh.get(rank) or _fresh(program)
                found = timed(program, fresh[rank])
                found |= case.rates(found["seconds"], attention) | (real[same][1] if attention else {})
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
        row: dict[str, Any] = {name: getattr(case, name) for name in RING}
        row |= {"strategy": strategy, "layout": repr(program.compute.layout), "rank": rank, "attention": attention}
        row |= {"remat": program.config.remat, "chunk": program.config.chunk}
        needed = real[same][1]["needed_bytes"] if same in real else None
        yield row | ({"fits": False, "needed_bytes": needed} if found is None else {"fits": True, **found})


def _real(program: Program) -> dict[str, Any]:
    """Return what is known without timing: the memory that the program needs, and its transfers."""
    compiled = program.compiled
    stats = compiled.memory_analysis()
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    sent = transfers(str(compiled.as_text()))
    mesh = {str(axis): size for axis, size in program.mesh.shape.items()}
    by_kind = estimate(program.config, mesh).sent
    return {
        "needed_bytes": kept + stats.temp_size_in_bytes,
        **{"transfers": len(sent), "hidden": sum(transfer.hidden for transfer in sent)},
        "wire_bytes": by_kind,
        **_planned(program, sum(size for what, size in by_kind.items() if what.startswith("weights"))),
    }


def _planned(program: Program, weights: int) -> dict[str, Any]:
    """Plan the seconds of a step's transfers, overlapped or not; `weights` are bytes of weights and their gradients."""
    config, compute, device = program.config, program.compute, program.mesh.devices.flat[0]
    hardware = hardware_of(device.platform, device.device_kind)
    mask = packed(compute.length) if program.documents else causal()
    setting = Setting(compute.devices, compute.length, mask, hardware, config.model, precision=config.dtype)
    chosen = {name: getattr(compute, name) for name in ("layout", "kernel", "remat", "chunk", "strategy")}
    workload = dataclasses.replace(setting, **chosen).workload
    forward, backward = gpu.transfer_seconds(assess(workload, TileCount(mask, compute.length)))
    again = forward if compute.remat == "full" else 0.0
    attention = config.model.layers * (forward + backward + again)
    return {
        "planned_for": hardware.name,
        "planned_transfer_seconds": attention + weights / hardware.gather_bandwidth(compute.devices),
    }


def _fresh(program: Program) -> Callable[[], Any]:
    """Return a function that makes the initial state. Compiled once, because the stand-ins clear JAX's caches."""
    key = jax.random.key(program.config.seed)
    make = program.fresh.lower(key).compile()
    return lambda: make(key)


def timed(program: Program, fresh: Callable[[], Any]) -> dict[str, Any]:
    """Time a step with stand-ins for collectives, from a fresh state; also return the peak memory of this process."""
    begun, batch = time.perf_counter(), _batch(program)
    with mock.at_home(_mask(program, batch)):
        compiled = program.compiled
    compiling = time.perf_counter() - begun
    inputs = program.place(batch)
    times = sample(lambda: seconds(compiled, jax.block_until_ready(fresh()), inputs))
    used = jax.local_devices()[0].memory_stats() or {}
    return {**times, "compile_seconds": compiling, "process_peak_bytes": used.get("peak_bytes_in_use")}


def sample(once: Callable[[], float]) -> dict[str, Any]:
    """Return the median of several samples after a warm-up, or a single sample if it is long."""
    warm_up, *samples = once(), once()
    if samples[0] < LONG:
        samples += [once() for _ in range(SAMPLES - 1)]
    return {"seconds": statistics.median(samples), "samples": samples, "warm_up_seconds": warm_up}


def _batch(program: Program) -> data.Batch:
    """Make a batch of random tokens, which do not affect the time; documents are as long as in `striped plan`."""
    config, length = program.config, program.config.sequence_length
    tokens = np.random.default_rng(0).integers(1, config.model.vocabulary, length + 1, np.int32)
    if program.documents:
        first = np.unique(packed(length).lo)
        tokens[first[1:] - 1] = 0
    corpus = data.Corpus(tokens, 0 if program.documents else None, config.model.vocabulary, "random tokens")
    return data.read(corpus, 0, program.rows, length, config.seed)


def _mask(program: Program, batch: data.Batch) -> Mask:
    """Return the mask of the whole sequence, in layout order."""
    compute, mask = program.compute, sa.documents(batch.segments) if program.documents else causal()
    return mask.permute(compute.layout, compute.devices)


def summary(rows: list[Row]) -> Iterator[Row]:
    """Yield the busiest device by ring and layout. `bound`, `step_bound`: best speed-up of attention, of the step."""
    for (_, _, members, *_), ring in grouped(rows, *RING).items():
        outside = next((row["seconds"] for row in ring if row["fits"] and not row["attention"]), None)
        layouts = grouped((row for row in ring if row["attention"]), "strategy", "layout")
        busiest = {name: max(ranks, key=lambda row: row.get("seconds", math.inf)) for name, ranks in layouts.items()}
        bound = 2 - 1 / members
        for (strategy, _), row in busiest.items():
            contiguous = busiest.get((strategy, "contiguous()"), {}).get("seconds")
            least = contiguous and outside and outside + (contiguous - outside) / bound
            line = {name: value for name, value in row.items() if name not in ("attention", "samples")}
            if row["fits"]:
                line["over_contiguous"] = contiguous and contiguous / row["seconds"]
                line["outside_attention_seconds"] = outside
                line["attention_share"] = outside and 1 - outside / row["seconds"]
                line["step_bound"] = least and contiguous / least
            yield {**line, "bound": bound}


def check(
    presets: list[str],
    members: list[int],
    lengths: list[int],
    kernels: list[str],
    strategies: list[str],
    layouts: list[str],
    text: str,
) -> Iterator[Row]:
    """Check that the kernels support all cases and compute a step correctly on one GPU, as does every strategy."""
    documents, platform, kind = text == "documents", jax.default_backend(), jax.local_devices()[0].device_kind
    room = memory.available(TrainConfig.memory)
    cases = []
    asked = itertools.product(presets, members, lengths, kernels, strategies, layouts)
    for preset, count, length, kernel, strategy, name in asked:
        options: dict[str, Any] = dict(preset=preset, sequence_length=length, kernel=kernel)
        config = TrainConfig(**options, **layout_options(name), strategy=strategy)
        try:
            config = settle(config, {"data": 1, "sequence": count}, documents, platform, kind, room)
            layout = config.make_layout(count, documents, platform, kind)
            choose(kernel, config.request(layout, count, documents, platform, kind))
        except NotImplementedError as error:
            raise UsageError(f"--presets {preset} --strategies {strategy}: {error}") from error
        heads = f"{config.model.heads}:{config.model.kv_heads}"
        mask = "documents(1800)" if documents else "causal"
        cases.append(gpu.Case(count, length, heads, mask, kernel, config.strategy, repr(layout)))
    for kernel in kernels:
        found = compare(answers(kernel, documents), answers("xla", documents), kernel)
        yield {"kernel": kernel, **found, "gpu": mock.gpu()}
    yield from gpu.check(cases)


def answers(kernel: str, documents: bool = False) -> dict[str, Any]:
    """Run one step of a small model on one device: loss, gradient norm, and gradients up to a factor."""
    config = TrainConfig(preset="debug", dim=256, heads=4, kv_heads=2, sequence_length=1024, kernel=kernel)
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), AXES.everything)
    program = Program(config, mesh, documents=documents)
    state, metrics = program.compiled(program.fresh_state(), program.place(_batch(program)))
    moments = optax.tree.get(state.optimiser, "mu")  # AdamW's first moment is a tenth of the clipped gradient
    named = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(moments)}
    return {name: float(metrics[name]) for name in ("loss", "gradient_norm")} | {"gradients": named}


def compare(found: dict[str, Any], truth: dict[str, Any], kernel: str) -> dict[str, Any]:
    """Compare two answers; raise if they differ by more than the tolerance."""
    apart = {name: abs(found[name] / truth[name] - 1) for name in ("loss", "gradient_norm")}
    for name, x in truth["gradients"].items():
        apart[name] = float(np.linalg.norm(found["gradients"][name] - x) / np.linalg.norm(x))
    for name, difference in apart.items():
        require(
            f"{name} of a step, {kernel} against xla,", difference, TOLERANCE if name in truth else WEIGHT_TOLERANCE
        )
    return {"loss": found["loss"], "worst": max(apart.values()), "apart": apart}

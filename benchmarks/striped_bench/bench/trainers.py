"""The suite `trainers`: `striped train` with its defaults against a plain PyTorch trainer, on one device.

Both start from the same weights and see the same batches. First the losses of the first steps must agree. Then steps
are timed, data loading and optimiser included. The trainers run one after the other in separate processes, since each
needs most of a GPU's memory. On a CPU, use small presets; they run in float32.

The row of striped train is saved before PyTorch starts. If PyTorch runs out of memory, it runs again with every layer
recomputed in the backward pass (`recompute`). If that does not fit either, its row has `fits: false`, and the losses of
striped train are not checked.
"""

import functools
import itertools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from striped_attention import huggingface
from striped_attention.core.mask import packed
from striped_attention.data import Batch
from striped_attention.models.config import PRESETS
from striped_attention.models.stages import AXES
from striped_attention.planning.cost import attention_flops, matrix_flops
from striped_attention.runtime.hardware import memory_in_use, peak_flops
from striped_attention.runtime.record import usable_cores, version
from striped_attention.training import memory
from striped_attention.training.config import TrainConfig
from striped_attention.training.settle import settle
from striped_attention.training.step import Program, learning_rate
from striped_attention.training.trainer import choose
from striped_bench.bench.run import Options, Progress, Record, Row, keep, require, say, tabulate
from striped_bench.bench.workers import Team, WorkerError

CHECKED = 20  # steps over which losses must agree
TOLERANCE = 1e-2  # relative, in bfloat16; 1e-4 in float32
SCHEDULE: Row = dict(learning_rate=1e-4, warmup=CHECKED)  # so gentle that rounding errors do not grow
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "OutOfMemoryError")  # JAX, torch
SETTLED = ("dtype", "remat", "chunk", "strategy")


def trainers(options: Options, result: Record) -> Progress:
    result["configuration"] |= {"batch": 1, "checked_steps": CHECKED, **SCHEDULE}
    result["versions"] |= {"torch": version("torch")}
    result["trainers"] = []
    for preset, length in itertools.product(options["presets"], options["lengths"]):
        for row in keep(result["trainers"], compare(preset, length, options["text"], options["rounds"])):
            result["gpu"] = {"name": result["trainers"][0].get("device")}
            yield row
    case = ("preset", "length", "text", "trainer", "kernel", "remat", "chunk", "recompute", "fits")
    yield tabulate(result["trainers"], *case, "tokens_per_second", "mfu", "over_torch", "loss_difference", "memory")


def compare(preset: str, length: int, text: str, rounds: int) -> Iterator[Row]:
    """Yield the row of striped train, then PyTorch's. Both get the difference of their losses; raise if it is large."""
    case = {"preset": preset, "length": length, "text": text}
    with tempfile.TemporaryDirectory() as folder:
        job = {**case, "folder": folder, "steps": CHECKED + rounds}
        ours = {**case, "trainer": "striped", **measure(Ours, job)}
        yield ours
        theirs = {**case, "trainer": "torch", **measure(Torch, job)}
        if not theirs["fits"]:
            theirs |= measure(Torch, {**job, "recompute": True})
    if ours["fits"] and theirs["fits"]:
        mine, torch = (np.array(row["losses"][:CHECKED]) for row in (ours, theirs))
        tolerance = TOLERANCE if ours["dtype"] == "bfloat16" else 1e-4
        apart = np.abs(mine / torch - 1)
        worst = int(apart.argmax())
        what = f"The loss of a step (of steps from 0 {mine}, PyTorch's {torch})"
        difference = require(what, float(apart[worst]), tolerance)
        for row in (ours, theirs):
            over = row["tokens_per_second"] / theirs["tokens_per_second"]
            row |= {"over_torch": over, "loss_difference": difference}
    yield theirs


def measure(kind: Any, job: dict[str, Any]) -> Row:
    """Run a trainer: return its settings, the losses of all steps, and the speed after the checked steps."""
    name = f"  {kind.name}, {job['preset']}, {job['length']:,} tokens, {job['text']}"
    row: Row = {}
    try:
        with Team(kind, cores=[set(usable_cores())], **job) as team:
            say(f"{name}: compiling")
            row |= team.ask("prepare")[0]
            say(f"{name}: {', '.join(f'{key} {x}' for key, x in row.items())}; {CHECKED} checked steps")
            losses, warm = team.ask("train", 0, CHECKED)[0]
            say(f"{name}: {losses[0]:.4f} to {losses[-1]:.4f}, {warm[-1]:.3f} s per step; timed steps")
            more, samples = team.ask("train", CHECKED, job["steps"])[0]
            row["memory"] = team.ask("memory")[0]
    except WorkerError as error:
        if not any(what in str(error) for what in OUT_OF_MEMORY):
            raise
        say(f"{name}: out of memory")
        return {**row, "fits": False}
    taken = statistics.median(samples)
    times = {"seconds": taken, "samples": samples, "losses": losses + more}
    return {**row, "fits": True, **rates(job, taken, row["device"]), **times}


def rates(job: dict[str, Any], taken: float, kind: str) -> Row:
    """Return tokens per second, and MFU."""
    model, length = PRESETS[job["preset"]], job["length"]
    pairs = batch(model.vocabulary, length, job["text"], 0).visible_pairs()
    flops, peak = matrix_flops(model, length) + attention_flops(model, pairs), peak_flops(kind)
    return {"tokens_per_second": length / taken, "mfu": None if peak is None else flops / taken / peak}


def batch(vocabulary: int, length: int, text: str, step: int) -> Batch:
    """Make a batch of repeated phrases, which can be learned: documents of about 1,800 tokens, or one ("whole")."""
    phrases = np.random.default_rng(0).integers(1, vocabulary, (64, 8), np.int32)
    random = np.random.default_rng([1, step])
    tokens = phrases[random.integers(len(phrases), size=-(-(length + 1) // 8))].reshape(-1)[: length + 1]
    first = _first_tokens(length) if text == "documents" else np.zeros(1, np.int64)
    segments = np.zeros(length, np.int32)
    segments[first[1:]] = 1
    weights = np.ones(length, np.float32)
    weights[first[1:] - 1] = 0  # the last token of a document has no target
    return Batch(tokens[None, :-1], tokens[None, 1:], weights[None], np.cumsum(segments, dtype=np.int32)[None])


@functools.cache
def _first_tokens(length: int) -> np.ndarray:
    """Where documents begin. Cached: drawing their lengths takes longer than the rest of a batch."""
    return np.unique(packed(length).lo)


class Trainer:
    """Base class of both trainers. `step` trains on a batch and returns its loss once the step is done."""

    def __init__(self, rank: int, ranks: int, port: int, **job: Any) -> None:
        self.job, self.documents = job, job["text"] == "documents"
        self.weights = pathlib.Path(job["folder"]) / "weights"

    def step(self, inputs: Batch) -> float:
        raise NotImplementedError

    def train(self, first: int, end: int) -> tuple[list[float], list[float]]:
        """Return losses and seconds of the steps in [first, end); the time includes making the batches."""
        losses, seconds, vocabulary = [], [], PRESETS[self.job["preset"]].vocabulary
        for number in range(first, end):
            begun = time.perf_counter()
            losses.append(self.step(batch(vocabulary, self.job["length"], self.job["text"], number)))
            seconds.append(time.perf_counter() - begun)
        return losses, seconds


class Ours(Trainer):
    """`striped train` with its defaults. It writes the weights that both trainers start from."""

    name = "striped"

    def prepare(self) -> Row:
        memory.reserve(TrainConfig.memory)
        job, platform, device = self.job, jax.default_backend(), jax.local_devices()[0]
        dtype = "float32" if platform == "cpu" else "bfloat16"
        options: dict[str, Any] = dict(preset=job["preset"], sequence_length=job["length"], dtype=dtype)
        asked = TrainConfig(**options, **SCHEDULE, steps=job["steps"])
        sizes, room = {AXES.batch: 1, AXES.sequence: 1}, memory.available(asked.memory)
        config = settle(asked, sizes, self.documents, platform, device.device_kind, room)
        kernel = choose(config, sizes, self.documents, platform, device.device_kind)
        mesh = jax.sharding.Mesh(np.array([[device]]), AXES.everything)
        self.program = memory.fitting(Program(config, mesh, documents=self.documents), asked, room, print)
        self.state = self.program.fresh_state()
        write_weights(self.program, self.state.weights, self.weights)
        settled = {name: getattr(self.program.config, name) for name in SETTLED}
        return {"device": device.device_kind, **settled, "kernel": kernel}

    def step(self, inputs: Batch) -> float:
        self.state, metrics = self.program.compiled(self.state, self.program.place(inputs))
        return float(metrics["loss"])

    def memory(self) -> int | None:
        """Return the device's peak memory in bytes, if known."""
        used = memory_in_use(jax.local_devices()[:1])
        return None if used is None else used[0]


class Torch(Trainer):
    """The PyTorch trainer, started from the weights that `Ours` wrote."""

    name = "torch"

    def prepare(self) -> Row:
        import torch

        from striped_bench.bench import torch_trainer

        cuda, recompute = torch.cuda.is_available(), self.job.get("recompute", False)
        self.cuda = torch.cuda if cuda else None
        jax.config.update("jax_platforms", "cpu")  # leave the GPU's memory to PyTorch
        config = TrainConfig(preset=self.job["preset"], **SCHEDULE, steps=self.job["steps"])
        with jax.numpy_dtype_promotion("standard"):
            rates = [float(learning_rate(config)(step)) for step in range(config.steps)]
        self.trainer = torch_trainer.Trainer(config.model, self.weights, rates, bfloat16=cuda, recompute=recompute)
        kind = torch.cuda.get_device_name() if cuda else "cpu"
        return {"device": kind, "dtype": "bfloat16" if cuda else "float32", "recompute": recompute}

    def step(self, inputs: Batch) -> float:
        return self.trainer.step(tuple(inputs), documents=self.documents)

    def memory(self) -> int | None:
        """Return the device's peak memory in bytes, if known."""
        return None if self.cuda is None else self.cuda.max_memory_allocated()


def write_weights(program: Program, weights: Any, folder: pathlib.Path) -> None:
    """Write the weights to a Hugging Face folder in float32."""

    def named() -> Iterator[tuple[str, int | None, np.ndarray]]:
        for name, x in weights.items():
            if name != "layers":
                yield name, None, np.asarray(x)
        for name, x in weights["layers"].items():
            yield from ((name, layer, np.asarray(x[layer])) for layer in range(program.model.layers))

    huggingface.write(folder, program.model, named(), "float32", length=program.config.sequence_length)

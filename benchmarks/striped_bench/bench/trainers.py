"""The suite `trainers`: `striped train` with its defaults against a plain PyTorch trainer, on one device.

Both start from equal weights and see the same batches. The answer is checked first: over the first steps their losses
must agree. Then steps are timed, batches and optimizer included. One after the other, each in a process of its own, for
each wants most of a GPU's memory. A CPU is for small presets, in float32.
"""

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
from striped_attention.models.llama import PRESETS
from striped_attention.models.stages import AXES
from striped_attention.planning.cost import attention_flops, matrix_flops
from striped_attention.runtime.hardware import memory_in_use, peak_flops
from striped_attention.runtime.record import usable_cores
from striped_attention.training import memory
from striped_attention.training.config import TrainConfig
from striped_attention.training.step import Program
from striped_bench.bench.run import Options, Progress, Record, Row, keep, require, tabulate
from striped_bench.bench.workers import Team

CHECKED = 20  # steps over which losses must agree
TOLERANCE = 1e-2  # relative, in bfloat16; 1e-4 in float32
LEARNING_RATE = 3e-4


def trainers(options: Options, result: Record) -> Progress:
    result["configuration"] |= {"batch": 1, "checked_steps": CHECKED, "learning_rate": LEARNING_RATE}
    result["trainers"] = []
    for preset, length in itertools.product(options["presets"], options["lengths"]):
        yield from keep(result["trainers"], compare(preset, length, options["text"], options["rounds"]))
    names = (
        "preset",
        "length",
        "text",
        "trainer",
        "tokens_per_second",
        "mfu",
        "over_torch",
        "loss_difference",
        "memory",
    )
    yield tabulate(result["trainers"], *names)


def compare(preset: str, length: int, text: str, rounds: int) -> Iterator[Row]:
    """Rows of both trainers, once their losses agree."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"preset": preset, "length": length, "text": text, "folder": folder, "steps": CHECKED + rounds}
        found = {}
        for name, kind in (("striped", Ours), ("torch", Torch)):
            with Team(kind, cores=[set(usable_cores())], **job) as team:
                found[name] = team.ask("run")[0]
    ours, theirs = (np.array(found[name]["losses"][:CHECKED]) for name in ("striped", "torch"))
    tolerance = TOLERANCE if found["striped"]["dtype"] == "bfloat16" else 1e-4
    difference = require("The loss of a step", float(np.abs(ours / theirs - 1).max()), tolerance)
    for name, row in found.items():
        over = row["tokens_per_second"] / found["torch"]["tokens_per_second"]
        what = {"preset": preset, "length": length, "text": text, "trainer": name}
        yield {**what, **row, "over_torch": over, "loss_difference": difference}


def batch(vocabulary: int, length: int, text: str, step: int) -> Batch:
    """Tokens with something to learn, phrases that come again; documents of about 1,800 tokens, or one text."""
    phrases = np.random.default_rng(0).integers(1, vocabulary, (64, 8), np.int32)
    random = np.random.default_rng([1, step])
    tokens = phrases[random.integers(len(phrases), size=-(-(length + 1) // 8))].reshape(-1)[: length + 1]
    first = np.unique(packed(length).lo) if text == "documents" else np.zeros(1, np.int64)
    segments = np.zeros(length, np.int32)
    segments[first[1:]] = 1
    weights = np.ones(length, np.float32)
    weights[first[1:] - 1] = 0  # the last token of a document has no target
    return Batch(tokens[None, :-1], tokens[None, 1:], weights[None], np.cumsum(segments, dtype=np.int32)[None])


class Ours:
    """`striped train` with its defaults. It makes the weights that both start from."""

    def __init__(self, rank: int, ranks: int, port: int, **job: Any) -> None:
        self.job = job

    def run(self) -> Row:
        job = self.job
        memory.reserve(TrainConfig.memory)
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        options: dict[str, Any] = dict(preset=job["preset"], sequence_length=job["length"], dtype=dtype)
        config = TrainConfig(**options, learning_rate=LEARNING_RATE, steps=job["steps"])
        mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), AXES.everything)
        asked, program = config, Program(config, mesh, documents=job["text"] == "documents")
        program = memory.fitting(program, asked, memory.available(config.memory), print)
        state = program.fresh_state()
        write_weights(program, state.weights, pathlib.Path(job["folder"]) / "weights")

        def step(number: int) -> float:
            nonlocal state
            inputs = program.place(batch(program.model.vocabulary, job["length"], job["text"], number))
            state, metrics = program.compiled(state, inputs)
            return float(metrics["loss"])

        timed = measure(step, job, program.mesh.devices.flat[0].device_kind)
        used = memory_in_use(jax.local_devices()[:1])
        settled = {name: getattr(program.config, name) for name in ("dtype", "remat", "chunk", "kernel", "strategy")}
        return {**timed, **settled, "memory": None if used is None else used[0]}


class Torch:
    """The PyTorch trainer, from the weights that `Ours` has written."""

    def __init__(self, rank: int, ranks: int, port: int, **job: Any) -> None:
        self.job = job

    def run(self) -> Row:
        import torch

        from striped_bench.bench.torch_trainer import Trainer

        job, cuda = self.job, torch.cuda.is_available()
        config = TrainConfig(preset=job["preset"], learning_rate=LEARNING_RATE, steps=job["steps"])
        jax.config.update("jax_platforms", "cpu")  # the GPU's memory is torch's here
        mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), AXES.everything)
        rates = [Program(config, mesh).learning_rate(step) for step in range(job["steps"])]
        trainer = Trainer(config.model, pathlib.Path(job["folder"]) / "weights", rates, bfloat16=cuda)

        def step(number: int) -> float:
            some = batch(config.model.vocabulary, job["length"], job["text"], number)
            return trainer.step(tuple(some), documents=job["text"] == "documents")

        timed = measure(step, job, torch.cuda.get_device_name() if cuda else "cpu")
        used = torch.cuda.max_memory_allocated() if cuda else None
        return {**timed, "dtype": "bfloat16" if cuda else "float32", "memory": used}


def measure(step: Any, job: dict[str, Any], kind: str) -> Row:
    """The losses of all steps, and how fast those after the checked ones were."""
    losses, seconds = [], []
    for number in range(job["steps"]):
        begun = time.perf_counter()
        losses.append(step(number))  # reads the loss, so the step is done
        seconds.append(time.perf_counter() - begun)
    model, length = PRESETS[job["preset"]], job["length"]
    pairs = batch(model.vocabulary, length, job["text"], 0).visible_pairs()
    taken, peak = statistics.median(seconds[CHECKED:]), peak_flops(kind)
    flops = matrix_flops(model, length) + attention_flops(model, pairs)
    return {
        "tokens_per_second": length / taken,
        "mfu": None if peak is None else flops / taken / peak,
        "seconds": taken,
        "samples": seconds[CHECKED:],
        "losses": losses,
    }


def write_weights(program: Program, weights: Any, folder: pathlib.Path) -> None:
    """As a Hugging Face folder in float32."""

    def named() -> Iterator[tuple[str, int | None, np.ndarray]]:
        for name, x in weights.items():
            if name != "layers":
                yield name, None, np.asarray(x)
        for name, x in weights["layers"].items():
            yield from ((name, layer, np.asarray(x[layer])) for layer in range(program.model.layers))

    huggingface.write(folder, program.model, named(), "float32", length=program.config.sequence_length)

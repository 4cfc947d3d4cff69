"""Forward: forward passes of a model on a mesh, for sequences of one length, without an optimiser.

Without --chunk, stages process as many tokens at a time as fit in memory by the estimates for training, without the
parts for the backward pass and the optimiser. If the compiled program needs more memory than that, chunks shrink.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from striped_attention.errors import UsageError
from striped_attention.evaluation.config import EvaluateConfig
from striped_attention.models.config import ModelConfig
from striped_attention.models.layers import logits
from striped_attention.models.llama import last_layer, loss_chunk
from striped_attention.models.stages import AXES, stage
from striped_attention.options import parse_asked
from striped_attention.planning import budget
from striped_attention.planning.cost import estimate
from striped_attention.runtime.compiler import compiler_options
from striped_attention.strategies.choice import choose_strategy
from striped_attention.strategies.strategy import RING
from striped_attention.training import memory, trainer
from striped_attention.training.config import TrainConfig
from striped_attention.training.loss_by_position import input_specs
from striped_attention.training.step import Inputs, Program
from striped_attention.training.validation import HeldOut

BACKWARD = ("optimiser", "gradients", "kept for the backward pass")  # memory that only training needs


def make_program(
    config: EvaluateConfig, model: ModelConfig, mesh: Mesh, length: int, documents: bool, room: float = math.inf
) -> Program:
    """Build a program for sequences of `length` tokens, planned to fit in `room` bytes per device.

    Raises UsageError for unsupported options, before anything is compiled.
    """
    sizes, device = dict(mesh.shape), mesh.devices.flat[0]
    run = plain_config(config, model, length)
    devices, ring = sizes[AXES.sequence], dataclasses.replace(run, strategy=str(RING))
    layout = ring.make_layout(devices, documents, device.platform, device.device_kind)
    request = ring.request(layout, devices, documents, device.platform, device.device_kind)
    try:
        strategy = choose_strategy(parse_asked(config.strategy), request, config.kernel, forward_only=True)
    except ValueError as error:
        raise UsageError(f"--strategy {config.strategy}: {error}") from error
    run = dataclasses.replace(run, strategy=str(strategy))
    # Raises if the kernel does not support it.
    trainer.choose(run, sizes, documents, device.platform, device.device_kind)
    parts = estimate(run, sizes).memory
    run = budget.within(run, sizes, room + sum(parts[name] for name in BACKWARD), device.platform)
    return Program(run, mesh, documents=documents)


def plain_config(config: EvaluateConfig, model: ModelConfig, length: int) -> TrainConfig:
    """The training options that correspond to these evaluation options."""
    names = (
        "batch",
        "devices",
        "mesh",
        "layout",
        "stripe",
        "strategy",
        "kernel",
        "dtype",
        "memory",
        "chunk",
        "cpu_devices",
    )
    shared = {name: getattr(config, name) for name in names}
    return TrainConfig(shape=model, sequence_length=length, remat="full", **shared)


class Answers(NamedTuple):
    """Per sequence of a batch: the number of counted targets that are not the likeliest token, and their total loss."""

    wrong: Any
    loss: Any


def answers(program: Program, weights: Any, inputs: Inputs) -> Answers:
    """Score a batch by a forward pass over the whole mesh. To be compiled by the caller.

    Greedy decoding yields exactly the targets if and only if each one is the likeliest token given those before it.
    """
    model, compute = program.model, program.compute

    def score(last: Any, x: Array, targets: Array) -> Answers:
        scores = logits(model, last, x)
        target = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
        wrong = jnp.argmax(scores, axis=-1) != targets
        return Answers(wrong.astype(jnp.int32), jax.nn.logsumexp(scores, axis=-1) - target)

    def shard(weights: Any, inputs: Inputs) -> Answers:
        x = last_layer(model, compute, weights, program.specs, inputs.tokens, inputs.mask, program.attend)
        last, specs = ({name: tree[name] for name in model.last} for tree in (weights, program.specs))
        chunk = loss_chunk(compute.chunk, model.vocabulary)
        found = stage(score, last, specs, x, inputs.targets, chunk=chunk, dtype=compute.dtype)
        total = lambda x: lax.psum(jnp.sum(jnp.where(inputs.weights > 0, x, 0), axis=1), AXES.sequence)  # noqa: E731
        return jax.tree.map(total, found)

    specs, rows = (program.specs, input_specs(inputs)), PartitionSpec(AXES.batch)
    return jax.shard_map(shard, mesh=program.mesh, in_specs=specs, out_specs=Answers(rows, rows))(weights, inputs)


@dataclasses.dataclass(frozen=True, eq=False)
class Answering:
    """A program that computes `Answers`."""

    program: Program

    @functools.cached_property
    def compiled(self) -> Any:
        """`compiled(weights, inputs) -> Answers`, replicated on all devices."""
        program = self.program
        everywhere = jax.NamedSharding(program.mesh, PartitionSpec())
        step = jax.jit(functools.partial(answers, program), out_shardings=everywhere)
        return step.lower(program.state.weights, program.inputs).compile(compiler_options=compiler_options())


AnyForward = TypeVar("AnyForward", HeldOut, Answering)


def fitting(forward: AnyForward, asked: EvaluateConfig, room: float) -> AnyForward:
    """Return the compiled `forward`, with smaller chunks if it needs more than `room` bytes per device.

    Chunks shrink only without --chunk. If no smaller chunk helps, the last one is returned.
    """
    while (need := memory.peak(functools.partial(getattr, forward, "compiled"))) is None or need > room:
        program = forward.program
        sizes = {str(axis): size for axis, size in program.mesh.shape.items()}
        whole = dataclasses.replace(program.config, chunk=asked.chunk)
        less = budget.frugal(program.config, whole, sizes, program.platform)
        if less is None:
            break
        forward = dataclasses.replace(forward, program=dataclasses.replace(program, config=less))
    return forward

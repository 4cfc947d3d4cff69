"""Trainer: a run from its options to its end. All options are validated before anything is written."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax

from striped_attention import data
from striped_attention.errors import UsageError
from striped_attention.kernels import choice
from striped_attention.models.stages import AXES, check_devices, parse_mesh
from striped_attention.planning.cost import estimate, gigabytes
from striped_attention.runtime.mesh import make_mesh
from striped_attention.training import arrays, folder, memory, start, validation, weights_and_biases
from striped_attention.training.checkpoint import Checkpoints, Place
from striped_attention.training.config import TrainConfig
from striped_attention.training.loop import Run
from striped_attention.training.settle import settled
from striped_attention.training.signals import Signals
from striped_attention.training.step import Program, State, learning_rate
from striped_attention.training.watch import Watch
from striped_attention.training.weights_and_biases import WandbRun


def train(config: TrainConfig) -> State:
    """Train on all available devices and return the final state. Raises UsageError and Diverged.

    Everything that can be checked is checked before anything is written and before minutes of compilation.
    """
    main = jax.process_index() == 0
    if main:
        weights_and_biases.check(config)
    sizes = mesh_sizes(config, jax.device_count())
    begin = start.look(config)
    config = begin.config
    folder.check(config)
    validation.check(config)  # before tokenising, which can take hours
    corpus = load_data(config)
    config, begin = _with_tokenizer(config, begin, corpus)
    documents = corpus.documents
    asked_for, room = config, memory.available(config.memory)
    kind = jax.local_devices()[0].device_kind
    config, reasons = settled(config, sizes, documents, jax.default_backend(), kind, room)
    config.make_strategy(sizes[AXES.sequence])  # raises if it is not possible
    kernel = choose(config, sizes, documents, jax.default_backend(), kind)
    program = Program(config, make_mesh(sizes), documents=documents)
    held_out = validation.held_out(program)
    with Signals() as asked, _room(config, sizes), _checkpoints(config) as checkpoints:
        place, runs = _look(program, corpus, begin, checkpoints)
        wandb = None if config.wandb is None or not main else WandbRun(config)
        with Watch(place.step, config.steps, quiet=not main, wandb=wandb) as watch:
            asked.acknowledge_with(watch.stopping)
            watch.say(describe(program, corpus, kernel))
            held = [] if held_out is None else held_out.corpus.notes(config.sequence_length)
            schedule = _schedule_change(config, runs, place.step)
            for line in (*reasons, *begin.lines, *schedule, *corpus.notes(config.sequence_length), *held):
                watch.say(line)
            state = None
            if checkpoints is not None and place.step > 0:
                state = checkpoints.restore(place.step, program.state)
            elif begin.source is not None:
                state = program.start_state(arrays.read_stacked(begin.source, program.mesh, watch.loaded))
            watch.say("Compiling …")
            program = memory.fitting(program, asked_for, room, watch.say)
            run = Run(program, corpus, watch, place, held_out)
            state = program.fresh_state() if state is None else state
            if config.resume:
                watch.say(f"Resuming from step {place.step}.")
            if checkpoints is not None and main:
                checkpoints.clean()
                folder.begin(checkpoints.folder, runs, asked_for, program.config, sizes, place.step, begin.files)
                watch.keep(checkpoints.folder)
            return run.loop(state, checkpoints, asked)


def load_data(config: TrainConfig) -> data.Data:
    """Load the training data. Raises UsageError for data that cannot be trained on."""
    corpus = config.load(config.data)
    data.read(corpus, 0, range(1), config.sequence_length, config.seed)
    data.whole_rows(corpus, config.sequence_length)
    return corpus


def _with_tokenizer(config: TrainConfig, begin: start.Start, corpus: data.Data) -> tuple[TrainConfig, start.Start]:
    """Add the tokenizer that comes with the data's tokens to the run's files, unless --tokenizer is given."""
    if config.tokenizer is not None or corpus.tokenizer is None:
        return config, begin
    files = {**folder.tokenizer_files(corpus.tokenizer), **begin.files}
    config = dataclasses.replace(config, own_tokenizer=config.own_tokenizer or corpus.tokenizer)
    return config, dataclasses.replace(begin, files=files)


def _checkpoints(config: TrainConfig) -> contextlib.AbstractContextManager[Checkpoints | None]:
    """The run's checkpoints; None without --checkpoint-dir."""
    return (
        contextlib.nullcontext() if config.checkpoint_dir is None else Checkpoints(config.checkpoint_dir, config.keep)
    )


def _look(
    program: Program, corpus: data.Data, begin: start.Start, checkpoints: Checkpoints | None
) -> tuple[Place, list[Any]]:
    """Return where the run begins and the records of earlier runs. Raises if its folder is full or damaged."""
    place, runs = _start(program.config, corpus, begin), []
    if checkpoints is not None and program.config.resume:
        place = checkpoints.place(like=place)
        runs = folder.read_record(checkpoints.folder)
        folder.check_files(checkpoints.folder)
    if checkpoints is not None and place.step < program.config.steps:
        checkpoints.check_room(program.state)
    return place, runs


def _schedule_change(config: TrainConfig, runs: list[Any], step: int) -> list[str]:
    """Say so if the learning rate jumps at a resume, because options such as --steps redraw its schedule."""
    names = ("learning_rate", "schedule", "warmup", "steps")
    options = runs[-1].get("options", {}) if runs else {}
    if not step or step >= config.steps or not set(names) <= set(options):
        return []
    before = learning_rate(dataclasses.replace(config, **{name: options[name] for name in names}))
    last, now, next_one = float(before(step - 1)), float(learning_rate(config)(step)), float(before(step))
    if abs(now - next_one) <= 0.01 * max(now, next_one):
        return []
    return [
        f"Warning: the learning rate continues at {now:.3g}; it was {last:.3g} at step {step}. Its schedule depends on "
        f"--steps, --warmup, --schedule and --learning-rate."
    ]


def _start(config: TrainConfig, corpus: data.Data, begin: start.Start) -> Place:
    """The metadata of a new run at step 0."""
    return Place(
        step=0,
        rows=0,
        model=dataclasses.asdict(config.model),
        corpus=corpus.fingerprint,
        seed=config.seed,
        length=config.sequence_length,
        end=corpus.end,
        positions=begin.positions,
        ids=dict(begin.ids),
    )


def mesh_sizes(config: TrainConfig, devices: int | None) -> dict[str, int]:
    """Return the sizes of the mesh axes. Raises UsageError if they do not fit `devices` (None: any number) or the
    batch."""
    try:
        sizes = parse_mesh(config.mesh or f"{AXES.sequence}={config.devices or devices or 1}")
        if devices is not None:
            check_devices(sizes, devices)
    except ValueError as error:
        raise UsageError(f"{error} On a CPU, --cpu-devices creates any number of virtual devices.") from error
    if config.batch % (sizes[AXES.batch] * config.accumulate):
        raise UsageError(
            f"--batch must be a multiple of {sizes[AXES.batch] * config.accumulate}, the mesh's {AXES.batch} axis "
            f"({sizes[AXES.batch]}) times --accumulate ({config.accumulate}); got {config.batch}."
        )
    if config.sequence_length < sizes[AXES.sequence]:
        raise UsageError(
            f"--length must be at least the {sizes[AXES.sequence]} devices on the mesh's {AXES.sequence} "
            f"axis; got {config.sequence_length}."
        )
    return sizes


def choose(config: TrainConfig, sizes: dict[str, int], documents: bool, platform: str | None, kind: str = "") -> str:
    """Return the name of the run's attention kernel, or several if layers differ. Raises if the requested kernel does
    not support the run. Without a platform, as in a dry run, no device is touched."""
    devices, here = sizes[AXES.sequence], platform is not None
    layout = config.make_layout(devices, documents, platform, kind)
    platform, kind = config.platform_and_kind(platform, kind)
    ask = functools.partial(config.request, layout, devices, documents, platform, kind, here)
    try:
        names = [choice.choose(config.kernel, ask(mask=mask)).name for mask, _ in config.known_masks()]
        return " and ".join(dict.fromkeys(names))
    except NotImplementedError as error:
        raise UsageError(str(error)) from error


@contextlib.contextmanager
def _room(config: TrainConfig, sizes: dict[str, int]) -> Iterator[None]:
    """Turn an out-of-memory error of the devices into a UsageError with advice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        need = gigabytes(estimate(config, sizes).total_memory)
        raise UsageError(
            f"The devices' memory is too small: a step of {config.batch} × {config.sequence_length} tokens needs about "
            f"{need} per device. Use more devices or a shorter --length; --dry-run shows the breakdown."
        ) from error


def describe(program: Program, corpus: data.Data, kernel: str) -> str:
    """Describe a run in one line."""
    config, compute = program.config, program.compute
    axes = ", ".join(f"{name} {size}" for name, size in program.mesh.shape.items())
    kind = program.mesh.devices.flat[0].device_kind
    return (
        f"{config.model.parameters:,} parameters, {config.batch} × {config.sequence_length:,} tokens per step, "
        f"{compute.layout!r} on {program.mesh.size} {kind} device{'s' * (program.mesh.size > 1)} ({axes}), "
        f"{config.dtype}, strategy {config.strategy}, kernel {kernel}, remat {config.remat}, chunks of "
        f"{compute.chunk:,} tokens; {corpus.source}, {corpus.size:,} tokens"
    )

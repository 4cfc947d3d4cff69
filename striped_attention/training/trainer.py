"""Trainer: the loop around a step. It resumes, feeds, watches, saves, and leaves in order when it is asked to."""

import concurrent.futures
import contextlib
import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from striped_attention import data
from striped_attention.errors import Diverged, UsageError
from striped_attention.kernels import choice
from striped_attention.models.stages import AXES, check_devices, parse_mesh
from striped_attention.planning.cost import attention_flops, estimate, gigabytes, matrix_flops
from striped_attention.runtime.hardware import memory_in_use, peak_flops
from striped_attention.runtime.mesh import make_mesh
from striped_attention.training import arrays, folder, memory, start
from striped_attention.training.checkpoint import Checkpoints, Place
from striped_attention.training.config import TrainConfig
from striped_attention.training.pace import Pace
from striped_attention.training.settle import settle
from striped_attention.training.step import Inputs, Program, State
from striped_attention.training.validation import EVERY, HeldOut, held_out
from striped_attention.training.watch import Watch
from striped_attention.training.weights_and_biases import WandbRun

PROFILED = range(2, 5)  # steps of this run, counted from 0: the first ones warm up


def train(config: TrainConfig) -> State:
    """Train as asked, on all devices there are; the state at the end. Raises UsageError and Diverged.

    What can be refused is refused before anything is written, and before minutes of compiling.
    """
    sizes = mesh_sizes(config, jax.device_count())
    begin = start.look(config)
    config = begin.config
    folder.check(config)
    corpus = load_data(config)
    config, begin = _with_tokenizer(config, begin, corpus)
    documents = corpus.documents
    asked_for, room = config, memory.available(config)
    config = settle(config, sizes, documents, jax.default_backend(), jax.local_devices()[0].device_kind, room)
    config.make_strategy(sizes[AXES.sequence])  # refuses what cannot be
    kernel = choose(config, sizes, documents, jax.default_backend())
    program = Program(config, make_mesh(sizes), documents=documents)
    validation = held_out(program)
    main = jax.process_index() == 0
    with _Signals() as asked, _room(config, sizes), _checkpoints(config) as checkpoints:
        place, runs = _look(program, corpus, begin, checkpoints)
        wandb = None if config.wandb is None or not main else WandbRun(config)
        with Watch(place.step, config.steps, quiet=not main, wandb=wandb) as watch:
            watch.display.stopping = lambda: asked.name
            watch.say(describe(program, corpus, kernel))
            held = [] if validation is None else validation.corpus.notes(config.sequence_length)
            for line in (*begin.lines, *corpus.notes(config.sequence_length), *held):
                watch.say(line)
            state = None
            if checkpoints is not None and place.step > 0:
                state = checkpoints.restore(place.step, program.state)
            elif begin.source is not None:
                state = program.start_state(arrays.read_stacked(begin.source, program.mesh, watch.loaded))
            watch.say("Compiling …")
            program = memory.fitting(program, asked_for, room, watch.say)
            run = _Run(program, corpus, watch, place, validation)
            state = program.fresh_state() if state is None else state
            if config.resume:
                watch.say(f"Going on from step {place.step}.")
            if checkpoints is not None and main:
                checkpoints.clean()
                folder.begin(checkpoints.folder, runs, program.config, sizes, place.step, begin.files)
                watch.keep(checkpoints.folder)
            return run.loop(state, checkpoints, asked)


def load_data(config: TrainConfig) -> data.Data:
    """What a run trains on. Raises UsageError for data that cannot be trained on."""
    corpus = config.load(config.data)
    data.read(corpus, 0, range(1), config.sequence_length, config.seed)
    data.whole_rows(corpus, config.sequence_length)
    return corpus


def _with_tokenizer(config: TrainConfig, begin: start.Start, corpus: data.Data) -> tuple[TrainConfig, start.Start]:
    """The same run, which keeps the tokenizer that its tokens came with, if it has no other."""
    if config.tokenizer is not None or corpus.tokenizer is None:
        return config, begin
    files = {**folder.tokenizer_files(corpus.tokenizer), **begin.files}
    config = dataclasses.replace(config, own_tokenizer=config.own_tokenizer or corpus.tokenizer)
    return config, dataclasses.replace(begin, files=files)


def _checkpoints(config: TrainConfig) -> contextlib.AbstractContextManager[Checkpoints | None]:
    """The run's checkpoints; None if none are kept."""
    return (
        contextlib.nullcontext() if config.checkpoint_dir is None else Checkpoints(config.checkpoint_dir, config.keep)
    )


def _look(
    program: Program, corpus: data.Data, begin: start.Start, checkpoints: Checkpoints | None
) -> tuple[Place, list[Any]]:
    """Where the run begins, and the record of the runs before it. Raises if its folder has no room or is damaged."""
    place, runs = _start(program.config, corpus, begin), []
    if checkpoints is not None and program.config.resume:
        place = checkpoints.place(like=place)
        runs = folder.read_record(checkpoints.folder)
        folder.check_files(checkpoints.folder)
    if checkpoints is not None and place.step < program.config.steps:
        checkpoints.check_room(program.state)
    return place, runs


def _start(config: TrainConfig, corpus: data.Data, begin: start.Start) -> Place:
    """Where a new run begins, and what it is a run of."""
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
    """Sizes of the mesh's axes, or what is wrong with them. Without `devices` any number of them will do."""
    try:
        sizes = parse_mesh(config.mesh or f"{AXES.sequence}={devices or 1}")
        if devices is not None:
            check_devices(sizes, devices)
    except ValueError as error:
        raise UsageError(f"{error} On a CPU --cpu-devices makes as many virtual devices as you like.") from error
    if config.batch % (sizes[AXES.batch] * config.accumulate):
        times = f" times --accumulate, {config.accumulate}" if config.accumulate > 1 else ""
        raise UsageError(
            f"--batch must be a multiple of the mesh's {AXES.batch} axis, {sizes[AXES.batch]}{times}; got "
            f"{config.batch}."
        )
    if config.sequence_length < sizes[AXES.sequence]:
        raise UsageError(
            f"--sequence-length must be at least the {sizes[AXES.sequence]} devices on the mesh's {AXES.sequence} "
            f"axis; got {config.sequence_length}."
        )
    return sizes


def choose(config: TrainConfig, sizes: dict[str, int], documents: bool, platform: str) -> str:
    """The kernel that the attention of this run takes. Raises if the one that was asked for cannot do it."""
    devices = sizes[AXES.sequence]
    layout = config.make_layout(devices, documents, platform)
    try:
        return choice.choose(config.kernel, config.request(layout, devices, documents, platform)).name
    except NotImplementedError as error:
        raise UsageError(str(error)) from error


@contextlib.contextmanager
def _room(config: TrainConfig, sizes: dict[str, int]) -> Iterator[None]:
    """Say what to do when the devices' memory is too small."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        need = gigabytes(estimate(config, sizes).total_memory)
        raise UsageError(
            f"The devices' memory is too small: a step of {config.batch} × {config.sequence_length} tokens needs about "
            f"{need} on each. Use more devices or a shorter --sequence-length; --dry-run shows the parts."
        ) from error


def describe(program: Program, corpus: data.Data, kernel: str) -> str:
    """A run in a line."""
    config, compute = program.config, program.compute
    axes = ", ".join(f"{name} {size}" for name, size in program.mesh.shape.items())
    kind = program.mesh.devices.flat[0].device_kind
    return (
        f"{config.model.parameters:,} parameters, {config.batch} × {config.sequence_length:,} tokens a step, "
        f"{compute.layout!r} on {program.mesh.size} {kind} device{'s' * (program.mesh.size > 1)} ({axes}), "
        f"{config.dtype}, strategy {config.strategy}, kernel {kernel}, remat {config.remat}, chunks of "
        f"{compute.chunk:,} tokens; {corpus.source}, {corpus.size:,} tokens"
    )


class _Run:
    """One run of the loop, compiled."""

    def __init__(
        self, program: Program, corpus: data.Data, watch: Watch, place: Place, validation: HeldOut | None
    ) -> None:
        self.program, self.corpus, self.watch, self.place = program, corpus, watch, place
        self.validation = validation
        self.config = program.config
        self.checkpoints: Checkpoints | None = None
        self.profiling = self.profiled = False
        self.pace = Pace()
        peak = peak_flops(program.mesh.devices.flat[0].device_kind)
        self.peak = None if peak is None else peak * program.mesh.size
        self.step = program.compiled
        if validation is not None:
            validation.compile()

    def loop(self, state: State, checkpoints: Checkpoints | None, asked: "_Signals") -> State:
        """All steps that are left, or fewer if somebody asks to stop."""
        config, self.checkpoints = self.config, checkpoints
        stop = False
        if self.place.step == 0:
            self._validate(0, state)
        with concurrent.futures.ThreadPoolExecutor(1) as ahead:
            inputs = ahead.submit(self._inputs, self.place.rows)
            for done, step in enumerate(range(self.place.step + 1, config.steps + 1)):
                self._profile(done)
                begun = time.perf_counter()
                batch, pairs = inputs.result()
                waited = time.perf_counter() - begun
                rows = self.place.rows + config.batch
                inputs = ahead.submit(self._inputs, rows)
                state, metrics = self.step(state, batch._replace(stop=self.program.flags(asked.stop)))
                metrics = jax.tree.map(float, jax.device_get(metrics))
                stop = metrics.pop("stop") > 0
                self._check(step, metrics, self._batch_text)
                seconds = time.perf_counter() - begun
                self._remark(step, seconds, waited)
                self.place = dataclasses.replace(self.place, step=step, rows=rows)
                self.watch.step(self._measured(step, metrics, seconds, pairs))
                if not stop:
                    self._validate(step, state)
                if checkpoints is not None and (stop or step == config.steps or step % config.checkpoint_every == 0):
                    checkpoints.save(state, self.place)
                self._show_checkpoint()
                if stop:
                    break
        self._finish((asked.name or "Another process was asked to stop") if stop else None)
        return state

    def _inputs(self, place: int) -> tuple[Inputs, int]:
        """The batch from a place on, on the mesh, and how many pairs of a query and a key are visible in it."""
        config, rows = self.config, self.program.rows
        batch = data.read(self.corpus, place, rows, config.sequence_length, config.seed)
        return self.program.place(batch), batch.visible_pairs() * config.batch // len(rows)

    def _validate(self, step: int, state: State) -> None:
        """Take the loss on held-out data after a step, if it is time."""
        every = self.config.validate_every or EVERY
        if self.validation is None or (step % every and step < self.config.steps):
            return
        losses = self.validation.losses(state.weights)
        self._check(step, {"validation_loss": losses.loss})
        self.watch.validation(step, losses)

    def _batch_text(self) -> str:
        """Where the batch of the step that comes after `place` lies in the data."""
        config = self.config
        rows = range(config.batch)
        return data.describe_rows(self.corpus, self.place.rows, rows, config.sequence_length, config.seed)

    def _remark(self, step: int, seconds: float, waited: float) -> None:
        """Say so if a step was slow, and what its batch was."""
        if (text := self.pace.remark(step, seconds, waited)) is not None:
            self.watch.say(f"{text}. Its batch: {self._batch_text()}.")

    def _check(self, step: int, metrics: dict[str, float], batch: Callable[[], str] | None = None) -> None:
        """Stop before a broken state is saved. `batch` says where a step's batch lies in the data."""
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        if not broken:
            return
        last = "There is no good checkpoint"
        if self.checkpoints is not None:
            self.checkpoints.wait()
            # Step s starts from the weights of checkpoint s - 1: they may be what is broken.
            good = [saved for saved in self.checkpoints.steps() if saved < step - 1]
            last = f"The last good checkpoint is step {good[-1]}'s" if good else last
            if step - 1 in self.checkpoints.steps():
                last += f" (move {self.checkpoints.folder / str(step - 1)} away: its weights led here)"
        what, its_batch = " and ".join(broken).replace("_", " "), "" if batch is None else f" Its batch: {batch()}."
        raise Diverged(
            f"{what} of step {step} is not finite ({metrics[broken[0]]}).{its_batch} {last}. "
            f"Try a smaller --learning-rate or --clip, a longer --warmup, or --dtype float32 if precision is the cause."
        )

    def _measured(self, step: int, metrics: dict[str, float], seconds: float, pairs: int) -> dict[str, Any]:
        config = self.config
        tokens = config.batch * config.sequence_length
        flops = matrix_flops(config.model, tokens) + attention_flops(config.model, pairs)
        memory = memory_in_use(self.program.mesh.local_devices)
        if memory is not None:
            metrics, self.watch.display.memory_limit = {**metrics, "memory_bytes": memory[0]}, memory[1]
        return {
            "step": step,
            **metrics,
            "learning_rate": self.program.learning_rate(step - 1),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "tokens": self.place.rows * config.sequence_length,
            "mfu": None if self.peak is None else flops / seconds / self.peak,
        }

    def _show_checkpoint(self) -> None:
        if self.checkpoints is not None:
            self.watch.display.checkpoint = self.checkpoints.newest

    def _finish(self, signal_name: str | None) -> None:
        self._stop_profile()
        if self.config.profile is not None and not self.profiled:
            self.watch.say(f"No trace was written: it needs {PROFILED.start + 1} steps or more, and there were fewer.")
        if self.checkpoints is not None:
            self.checkpoints.wait()
            self._show_checkpoint()
        if self.place.step >= self.config.steps:
            self.watch.say(f"All {self.config.steps} steps are done.")
        elif signal_name is not None:
            kept = "Nothing is kept without --checkpoint-dir."
            if self.checkpoints is not None:
                kept = f"Saved in {self.checkpoints.folder}; go on with --resume."
            self.watch.say(f"{signal_name}: stopped after step {self.place.step}. {kept}")

    def _profile(self, done: int) -> None:
        if self.config.profile is not None and done == PROFILED.start:
            jax.profiler.start_trace(str(self.config.profile))
            self.profiling = self.profiled = True
        if done == PROFILED.stop:
            self._stop_profile()

    def _stop_profile(self) -> None:
        if self.profiling:
            jax.profiler.stop_trace()
            self.profiling = False
            self.watch.say(f"Trace written to {self.config.profile}.")


class _Signals:
    """Turns the first SIGTERM or Ctrl-C into a wish to stop after the step; the second one ends the process at once."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[int, Any] = {}

    @property
    def stop(self) -> bool:
        return self.name is not None

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._notice)
        return self

    def _notice(self, number: int, _: Any) -> None:
        if self.stop:
            os._exit(128 + number)
        self.name = signal.Signals(number).name

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

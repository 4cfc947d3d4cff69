"""Loop: the training loop. Feeds batches, logs metrics, validates, saves checkpoints and stops on a signal."""

import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax

from striped_attention import data
from striped_attention.errors import Diverged
from striped_attention.planning.cost import layer_flops, matrix_flops
from striped_attention.runtime.hardware import memory_in_use, peak_flops
from striped_attention.training.checkpoint import Checkpoints, Place
from striped_attention.training.pace import Pace
from striped_attention.training.signals import Signals
from striped_attention.training.step import Inputs, Program, State
from striped_attention.training.validation import EVERY, HeldOut
from striped_attention.training.watch import Watch

PROFILED = range(2, 5)  # steps of this run, counted from 0; the first two are warm-up


class Run:
    """The training loop of one run, with its programs compiled."""

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

    def loop(self, state: State, checkpoints: Checkpoints | None, asked: Signals) -> State:
        """Run the remaining steps, or fewer if any process is asked to stop. Return the final state."""
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
        """The batch from row `place` on, on the mesh, and its visible query-key pairs, summed over all layers."""
        config, rows = self.config, self.program.rows
        batch = data.read(self.corpus, place, rows, config.sequence_length, config.seed)
        pairs = sum(batch.visible_pairs(layer.window) * count for layer, count in config.model.kinds.items())
        return self.program.place(batch), pairs * config.batch // len(rows)

    def _validate(self, step: int, state: State) -> None:
        """Compute the validation loss after a step if it is due."""
        every = self.config.validate_every or EVERY
        if self.validation is None or (step % every and step < self.config.steps):
            return
        losses = self.validation.losses(state.weights)
        self._check(step, {"validation_loss": losses.loss})
        self.watch.validation(step, losses)

    def _batch_text(self) -> str:
        """Describe where the next batch, the one at `self.place`, lies in the data."""
        config = self.config
        rows = range(config.batch)
        return data.describe_rows(self.corpus, self.place.rows, rows, config.sequence_length, config.seed)

    def _remark(self, step: int, seconds: float, waited: float) -> None:
        """Report a slow step and its batch."""
        if (text := self.pace.remark(step, seconds, waited)) is not None:
            self.watch.say(f"{text}. Its batch: {self._batch_text()}.")

    def _check(self, step: int, metrics: dict[str, float], batch: Callable[[], str] | None = None) -> None:
        """Raise Diverged if a metric is not finite, before a broken state is saved. `batch` describes the batch."""
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        if not broken:
            return
        last = "There is no good checkpoint"
        if self.checkpoints is not None:
            self.checkpoints.wait()
            # Step s starts from the weights of checkpoint s - 1, which may be broken already.
            good = [saved for saved in self.checkpoints.steps() if saved < step - 1]
            last = f"The last good checkpoint is that of step {good[-1]}" if good else last
            if step - 1 in self.checkpoints.steps():
                last += f" (move {self.checkpoints.folder / str(step - 1)} away: this step started from its weights)"
        what, its_batch = " and ".join(broken).replace("_", " "), "" if batch is None else f" Its batch: {batch()}."
        raise Diverged(
            f"{what} of step {step} is not finite ({metrics[broken[0]]}).{its_batch} {last}. "
            f"Try a smaller --learning-rate or --clip, a longer --warmup, or --dtype float32 if precision is the cause."
        )

    def _measured(self, step: int, metrics: dict[str, float], seconds: float, pairs: int) -> dict[str, Any]:
        config = self.config
        tokens = config.batch * config.sequence_length
        flops = matrix_flops(config.model, tokens) + layer_flops(config.model, pairs)
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
            self.watch.say(f"No trace was written: --profile needs at least {PROFILED.start + 1} steps; it got fewer.")
        if self.checkpoints is not None:
            self.checkpoints.wait()
            self._show_checkpoint()
        if self.place.step >= self.config.steps:
            steps = self.config.steps
            self.watch.say("The only step is done." if steps == 1 else f"All {steps} steps are done.")
        elif signal_name is not None:
            kept = "Nothing was saved, as there is no --checkpoint-dir."
            if self.checkpoints is not None:
                kept = f"Saved in {self.checkpoints.folder}; continue with --resume."
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

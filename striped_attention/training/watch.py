"""Watch: show the progress of a run and log its metrics.

Shows a live display on a terminal, and a line every 10 s elsewhere. Logs to `metrics.jsonl` and TensorBoard files in
the run's folder, if it has one, and to Weights & Biases, if requested.
"""

import contextlib
import json
import pathlib
import platform
import time
from collections.abc import Mapping
from typing import Any

import rich.console
import rich.live

from striped_attention.errors import UsageError
from striped_attention.training.checkpoint import write_whole
from striped_attention.training.display import Display, duration
from striped_attention.training.events import first_event, metrics_event, start_event
from striped_attention.training.folder import EVENTS, METRICS
from striped_attention.training.loss_by_position import Losses
from striped_attention.training.weights_and_biases import WandbRun

LINE_EVERY = 10.0  # seconds between lines where there is no terminal


class Watch:
    """Shows and logs the metrics of each step. Prints nothing if `quiet`, as in every process but the first."""

    def __init__(self, first: int, steps: int, quiet: bool, wandb: WandbRun | None = None) -> None:
        self.console = rich.console.Console(quiet=quiet, highlight=False, markup=False)
        live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.console.soft_wrap = not live  # no line wrapping in logs
        self._first, self._steps, self._last_line = first, steps, 0.0
        self._folder: pathlib.Path | None = None
        self._file = self._tensorboard = None
        self._wandb = wandb
        self.display = Display(first, steps)
        self._live = rich.live.Live(self.display, console=self.console) if live and not quiet else None

    def __enter__(self) -> "Watch":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._live is not None:
            self.display.stopping = None  # the run has stopped already
            self._live.stop()
        for kept in (self._file, self._tensorboard):
            with contextlib.suppress(OSError):  # every step was flushed, and a failed flush was reported
                if kept is not None:
                    kept.close()
        if self._wandb is not None:
            self._wandb.close(failed=kind is not None)

    def keep(self, folder: pathlib.Path) -> None:
        """Log metrics to this folder from now on."""
        self._folder = folder
        try:
            self._file = _open_metrics(folder / METRICS, self._first)
            self._tensorboard = _open_tensorboard(folder / EVENTS, self._first)
            if self._wandb is not None:
                self._wandb.keep(folder)
        except OSError as error:
            raise _cannot_write(folder, error) from error

    def say(self, text: str) -> None:
        """Print one line for the user."""
        self.console.print(text)

    def stopping(self, signal: str) -> None:
        """Acknowledge a signal that asks to stop; another thread may call this."""
        self.display.stopping = signal
        if self._live is None:
            self.say(self.display.acknowledgement)

    def loaded(self, done: int, total: int) -> None:
        """Report how many of a model's parameters were read, every 10 s and at the end."""
        now = time.monotonic()
        self._last_line = self._last_line or now
        if now - self._last_line > LINE_EVERY or done == total:
            self._last_line = now
            self.say(f"Read {done:,} of {total:,} parameters.")

    def step(self, metrics: dict[str, Any]) -> None:
        """Show and log the metrics of a finished step."""
        self.display.update(metrics)
        now = time.monotonic()
        if self._live is None and (now - self._last_line > LINE_EVERY or metrics["step"] == self._steps):
            self._last_line = now
            self.say(self._line(metrics))
        try:
            self._write(metrics, {name: value for name, value in metrics.items() if name != "step"})
        except OSError as error:
            raise _cannot_write(self._folder, error) from error

    def validation(self, step: int, found: Losses) -> None:
        """Show and log the validation losses after a step. They get their own line in metrics.jsonl."""
        self.say(f"step {step}/{self._steps} · validation loss {found}")
        self.display.validated(step, found.loss)
        try:
            self._write({"step": step, "validation": found.as_json()}, found.tags())
        except OSError as error:
            raise _cannot_write(self._folder, error) from error

    def _line(self, metrics: dict[str, Any]) -> str:
        """Describe a step in one line, for logs."""
        text = f"step {metrics['step']}/{self._steps} · loss {metrics['loss']:.4f}"
        text += f" · {metrics['tokens_per_second']:,.0f} tokens/s"
        if metrics["mfu"] is not None:
            text += f" · MFU {metrics['mfu']:.1%}"
        if self.display.left is not None and metrics["step"] < self._steps:
            text += f" · {duration(self.display.left)} left"
        return text

    def _write(self, line: dict[str, Any], tags: Mapping[str, float | None]) -> None:
        shown = {name: value for name, value in tags.items() if value is not None}
        if self._wandb is not None:
            self._wandb.write(line["step"], shown, self.say)
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        if self._tensorboard is not None:
            self._tensorboard.write(metrics_event(line["step"], shown))
            self._tensorboard.flush()


def _open_metrics(path: pathlib.Path, first: int) -> Any:
    """Open the file for appending, after removing truncated lines and lines of steps that will be repeated."""
    if path.exists():
        kept = []
        for line in path.read_text(errors="replace").splitlines():
            try:
                if 0 < first >= json.loads(line)["step"]:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue  # a process was killed while writing this line; its step will be repeated
        write_whole(path, "".join(kept))
    return path.open("a")


def _open_tensorboard(folder: pathlib.Path, first: int) -> Any:
    """Open a new event file, which makes TensorBoard discard later steps of an earlier run."""
    folder.mkdir(exist_ok=True)
    file = (folder / f"events.out.tfevents.{time.time():.6f}.{platform.node()}").open("wb")
    file.write(first_event() + start_event(first + 1))
    file.flush()
    return file


def _cannot_write(folder: pathlib.Path | None, error: OSError) -> UsageError:
    return UsageError(
        f"Metrics cannot be written to {folder}: {error.strerror or error}. Make room or choose another "
        f"--checkpoint-dir; --resume continues from the last complete checkpoint."
    )

"""Display: live progress of a run, in a few lines at the bottom of the terminal.

    ━━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━  4,312 of 10,000 steps · 3:02:10 left
    loss           2.3412 (smoothed 2.3511)    step time   1.92 s
    gradient norm  0.83                        tokens/s    34,133
    learning rate  2.41e-04                    MFU         45.1 %
    checkpoint     step 4,300                  memory      61.2 of 139.1 GB
    validation     2.4102 (step 4,000)

Unknown values are left out: CPUs report neither memory nor peak FLOP/s, and most runs begin without a checkpoint. The
time left is estimated from the last steps, including the saves and validations between them.
"""

import collections
import itertools
import time
from collections.abc import Callable
from typing import Any

import rich.console
import rich.progress_bar
import rich.table
import rich.text

SMOOTHING = 0.95  # weight of the past in the smoothed loss: about the last 20 steps
RECENT = 50  # steps used to estimate the time left
TWO_COLUMNS = 78  # characters needed for both columns; a narrower terminal gets one column
LATE, LATE_BY = 3, 5.0  # a step is late after 3 average step times plus 5 s


class Display:
    """The state of a run, redrawn several times per second. Only the training loop's thread changes it."""

    def __init__(self, first: int, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.step, self.steps, self._clock = first, steps, clock
        self.checkpoint: int | None = None  # step of the newest checkpoint
        self.memory_limit: int | None = None  # bytes of a device that JAX may use
        self.stopping: str | None = None  # name of the signal that asked to stop, if any
        self._metrics: dict[str, Any] = {}
        self._validation: tuple[int, float] | None = None  # step and loss
        self._sum = self._weight = 0.0
        self._ends: collections.deque[float] = collections.deque(maxlen=RECENT + 1)
        self._begun = clock()
        self._each: float | None = None  # average seconds from the end of one step to the end of the next

    def update(self, metrics: dict[str, Any]) -> None:
        """Record the metrics of a finished step."""
        self._sum = SMOOTHING * self._sum + (1 - SMOOTHING) * metrics["loss"]
        self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        self._begun = self._clock()
        self._ends.append(self._begun)
        if len(self._ends) > 1:
            self._each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        self.step, self._metrics = metrics["step"], metrics

    def validated(self, step: int, loss: float) -> None:
        """Record the validation loss after a step; the next step begins now."""
        self._validation, self._begun = (step, loss), self._clock()

    @property
    def left(self) -> float | None:
        """Estimated seconds until the end of the run; None before the second step."""
        return None if self._each is None else self._each * (self.steps - self.step)

    def __rich_console__(self, _: rich.console.Console, options: rich.console.ConsoleOptions) -> Any:
        yield self._head(options.max_width)
        if self._metrics:
            yield self._table(options.max_width < TWO_COLUMNS)
        else:
            yield rich.text.Text(f"waiting for the first step: {duration(self._clock() - self._begun)}")
        if self.stopping is not None:
            yield rich.text.Text(self.acknowledgement)

    @property
    def acknowledgement(self) -> str:
        """What a signal that asks to stop does."""
        when = "this step" if self._metrics else "the first step"
        return f"{self.stopping}: stopping after {when}. A second signal exits at once, without saving."

    def _table(self, narrow: bool) -> rich.table.Table:
        left, right = self._learning(), self._machine()
        table = rich.table.Table.grid(padding=(0, 2, 0, 0))
        table.add_column(min_width=13)
        table.add_column(min_width=0 if narrow else 25)  # keeps the right half in place
        if narrow:
            for name, value in (*left, *right):
                table.add_row(_name(name), value)
        else:
            for (name, value), (other, beside) in itertools.zip_longest(left, right, fillvalue=("", "")):
                table.add_row(_name(name), value, _name(other), beside)
        return table

    def _head(self, width: int) -> Any:
        text = f"{self.step:,} of {self.steps:,} steps"
        if self.left is not None and self.step < self.steps:
            text += f" · {duration(self.left)} left"
        bar = rich.progress_bar.ProgressBar(total=self.steps, completed=self.step, width=max(8, width - len(text) - 2))
        head = rich.table.Table.grid(padding=(0, 2, 0, 0))
        head.add_row(bar, rich.text.Text(text, no_wrap=True))
        return head

    def _learning(self) -> list[tuple[str, str]]:
        metrics = self._metrics
        rows = [
            ("loss", f"{metrics['loss']:.4f} (smoothed {self._sum / self._weight:.4f})"),
            ("gradient norm", f"{metrics['gradient_norm']:.3g}"),
            ("learning rate", f"{metrics['learning_rate']:.2e}"),
        ]
        if self.checkpoint is not None:
            rows.append(("checkpoint", f"step {self.checkpoint:,}"))
        if self._validation is not None:
            step, loss = self._validation
            rows.append(("validation", f"{loss:.4f} (step {step:,})"))
        return rows

    def _machine(self) -> list[tuple[str, str]]:
        metrics = self._metrics
        rows = [("step time", self._step_time()), ("tokens/s", f"{metrics['tokens_per_second']:,.0f}")]
        if metrics["mfu"] is not None:
            rows.append(("MFU", f"{100 * metrics['mfu']:.1f} %"))
        if "memory_bytes" in metrics:
            of = "" if self.memory_limit is None else f" of {self.memory_limit / 1e9:.1f}"
            rows.append(("memory", f"{metrics['memory_bytes'] / 1e9:.1f}{of} GB"))
        return rows

    def _step_time(self) -> str:
        text = seconds_text(self._metrics["seconds"])
        running = self._clock() - self._begun
        if self._each is not None and self.step < self.steps and running > LATE * self._each + LATE_BY:
            text += f" (now {duration(running)})"
        return text


def _name(text: str) -> rich.text.Text:
    return rich.text.Text(text, style="dim")


def seconds_text(seconds: float) -> str:
    """Format the time of a step with three significant digits."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 100 else duration(seconds)


def duration(seconds: float) -> str:
    """Format a duration, e.g. 0:07, 4:03:10 or 2 days 3:00:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    text = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{days} day{'s' * (days > 1)} {text}" if days else text

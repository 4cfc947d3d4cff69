"""Progress of tokenisation: a bar on a terminal, an occasional line elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import rich.console
import rich.progress

from striped_attention.data.files import File, Files

LINE_EVERY = 10.0  # seconds between lines without a terminal


class Progress:
    """Progress through the bytes of several files. `tokens` is the number of tokens so far."""

    def __init__(self, files: Files) -> None:
        self.tokens = 0
        self._total = sum(file.path.stat().st_size for file in files.files)
        self._done, self._line = 0.0, time.monotonic()
        self._source = files.source
        self._console = rich.console.Console(highlight=False, markup=False, soft_wrap=True)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("Tokenising"),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=self._total)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    @contextlib.contextmanager
    def file(self, file: File) -> Iterator[Callable[[float], None]]:
        """While a file is read, yield a callback that takes the fraction of it read so far."""
        before, size = self._done, file.path.stat().st_size
        yield lambda share: self._show(before + share * size)
        self._show(before + size)

    def _show(self, done: float) -> None:
        self._done = done
        self._bar.update(self._task, completed=done, description=f"{self.tokens:,} tokens")
        now = time.monotonic()
        if not self._console.is_terminal and now - self._line > LINE_EVERY:
            self._line = now
            share = done / max(1, self._total)
            self._console.print(f"Tokenising {self._source}: {share:.0%}, {self.tokens:,} tokens")


def say(text: str) -> None:
    """Print one line."""
    rich.console.Console(highlight=False, markup=False, soft_wrap=True).print(text)

"""Signals: stop a run cleanly on SIGTERM or Ctrl-C."""

import os
import signal
from typing import Any


class Signals:
    """Turns the first SIGTERM or Ctrl-C into a request to stop after the current step; a second one exits at once."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[int, Any] = {}

    @property
    def stop(self) -> bool:
        return self.name is not None

    def __enter__(self) -> "Signals":
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

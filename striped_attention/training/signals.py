"""Signals: stop a run cleanly on SIGTERM or Ctrl-C."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any


class Signals:
    """Turns the first SIGTERM or Ctrl-C into a request to stop after the current step; a second one exits at once.

    While a program compiles or runs, Python calls no signal handlers. So a thread of its own is woken by every signal:
    it calls `notify` with the first one's name, and ends the process at the second.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.notify: Callable[[str], None] = lambda name: None
        self._before: dict[int, Any] = {}

    @property
    def stop(self) -> bool:
        return self.name is not None

    def __enter__(self) -> "Signals":
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._listen, args=(read,), daemon=True)
        self._thread.start()
        self._wakeup = signal.set_wakeup_fd(self._write)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._set_name)
        return self

    def _set_name(self, number: int, _: Any = None) -> None:
        self.name = self.name or signal.Signals(number).name

    def _listen(self, read: int) -> None:
        """Handle signals, of which the pipe receives the numbers, until it is closed."""
        notified = False
        while received := os.read(read, 1):
            if received[0] not in self._before:
                continue
            if notified:
                os._exit(128 + received[0])
            self._set_name(received[0])
            notified = True
            self.notify(signal.Signals(received[0]).name)
        os.close(read)

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._write)
        self._thread.join()

"""Signals: stop a run cleanly on SIGTERM or Ctrl-C."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any


class Signals:
    """Turns the first SIGTERM or Ctrl-C into a request to stop after the current step; a second one exits at once.

    While a program compiles or runs, Python calls no signal handlers. So a thread of its own is woken by every signal:
    it acknowledges the first one, and ends the process at the second.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[int, Any] = {}
        self._notify: Callable[[str], None] | None = None
        self._pending, self._lock = False, threading.Lock()

    @property
    def stop(self) -> bool:
        return self.name is not None

    def acknowledge_with(self, notify: Callable[[str], None]) -> None:
        """Call `notify` with the name of the first signal, at once if it has come already."""
        with self._lock:
            self._notify = notify
            if self._pending:
                self._acknowledge()

    def _acknowledge(self) -> None:
        self._pending = self._notify is None
        if self._notify is not None and self.name is not None:
            try:
                self._notify(self.name)
            except OSError:  # nobody reads the output any more; the request to stop stands
                return

    def __enter__(self) -> "Signals":
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self._thread = threading.Thread(target=self._listen, args=(read,), daemon=True)
        self._thread.start()
        self._wakeup = signal.set_wakeup_fd(self._write)
        _in_use.add(self._write)
        for number in self._before:
            signal.signal(number, self._set_name)
        return self

    def _set_name(self, number: int, _: Any = None) -> None:
        self.name = self.name or signal.Signals(number).name

    def _listen(self, read: int) -> None:
        """Handle signals, of which the pipe receives the numbers, until it is closed."""
        received_one = False
        while received := os.read(read, 1):
            if received[0] not in self._before:
                continue
            if received_one:
                os._exit(128 + received[0])
            received_one = True
            self._set_name(received[0])
            with self._lock:
                self._acknowledge()
        os.close(read)

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        _in_use.discard(self._write)
        os.close(self._write)
        self._thread.join()


_in_use: set[int] = set()  # pipes that signals of this process are written to


def _leave_the_pipe_to_the_parent() -> None:
    if _in_use:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_the_pipe_to_the_parent)

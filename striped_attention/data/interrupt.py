"""Interrupt: Ctrl-C while a source is tokenised.

Python raises KeyboardInterrupt wherever it happens to be. That may be a callback of JAX's, whose exceptions are printed
and dropped, so tokenising would go on. Here Ctrl-C is noted, and raised between two batches.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """A function that raises KeyboardInterrupt if Ctrl-C was pressed. A second Ctrl-C raises it at once."""
    pressed = threading.Event()

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    def notice(number: int, _: object) -> None:
        signal.signal(number, signal.default_int_handler)
        pressed.set()

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # others have a meaning of their own
    if not usual or threading.current_thread() is not threading.main_thread():
        yield check
        return
    signal.signal(signal.SIGINT, notice)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()

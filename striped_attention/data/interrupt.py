"""Interrupt: handle Ctrl-C while a source is tokenised.

Python raises KeyboardInterrupt wherever execution happens to be. Inside a JAX callback, the exception is printed and
dropped, so tokenisation would continue. Here Ctrl-C sets a flag, which is checked between documents and batches.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt if Ctrl-C was pressed. A second Ctrl-C raises it immediately."""
    pressed = threading.Event()

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    def notice(number: int, _: object) -> None:
        signal.signal(number, signal.default_int_handler)
        pressed.set()

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # keep custom handlers
    if not usual or threading.current_thread() is not threading.main_thread():
        yield check
        return
    signal.signal(signal.SIGINT, notice)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()

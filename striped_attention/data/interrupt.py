"""Interrupt: handle Ctrl-C while a source is tokenised.

Python raises KeyboardInterrupt wherever execution happens to be. Inside a JAX callback, the exception is printed and
dropped, so tokenisation would continue. Here Ctrl-C sets a flag, which is checked between documents and batches.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from striped_attention.runtime.stop import is_usual


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

    before = signal.getsignal(signal.SIGINT)
    if not is_usual(before) or threading.current_thread() is not threading.main_thread():
        yield check
        return
    signal.signal(signal.SIGINT, notice)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
    check()

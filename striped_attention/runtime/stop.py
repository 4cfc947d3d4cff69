"""Stop: what Ctrl-C does until a command handles it in its own way.

Python raises KeyboardInterrupt wherever execution happens to be. If that is a callback of JAX or of the garbage
collector, the exception is printed and dropped, and the program continues. Ending the process is reliable.
"""

import os
import signal
import sys
import threading
from typing import Any


def stop_now(number: int, _: Any) -> None:
    """Handle a signal by ending the process with a message."""
    print("\nstriped: stopped by Ctrl-C.", file=sys.stderr, flush=True)
    os._exit(128 + number)


def stop_on_ctrl_c() -> None:
    """Let Ctrl-C end the process at once, unless the caller has set a handler of its own."""
    if threading.current_thread() is threading.main_thread() and is_usual(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, stop_now)


def is_usual(handler: Any) -> bool:
    """Whether a handler of SIGINT is Python's or that of a command, which others may replace."""
    return handler in (signal.default_int_handler, stop_now)

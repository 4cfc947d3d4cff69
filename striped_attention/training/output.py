"""Output: standard output without the messages of libraries that write to it by themselves."""

import atexit
import os
import sys
import threading

GLOO = b"peer ranks"  # in "[Gloo] Rank 0 is connected to 1 peer ranks. …", a line or more per group of processes


def hide_gloo() -> None:
    """Leave out the messages that Gloo, which connects processes on CPUs, writes to standard output.

    Python writes to a duplicate of the file descriptor; what native code writes to the original one is passed on line
    by line, except for these messages.
    """
    if sys.stdout is None:  # it was closed before Python began
        return
    sys.stdout.flush()
    standard, (read, write) = os.dup(1), os.pipe()
    os.dup2(write, 1)
    os.close(write)
    encoding, errors, buffered = sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering
    sys.stdout = open(  # noqa: SIM115  (open until the process ends)
        standard, "w", encoding=encoding, errors=errors, buffering=1 if buffered else -1, closefd=False
    )

    def pass_on() -> None:
        with os.fdopen(read, "rb") as lines:
            for line in lines:
                if GLOO not in line:
                    os.write(standard, line)

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()

    def finish() -> None:
        """Pass on what is left. The thread ends when the last write end of the pipe is closed."""
        sys.stdout.flush()
        os.dup2(standard, 1)
        thread.join(timeout=1)

    atexit.register(finish)

"""Guard: turns errors that a user can mend into one line and an exit code."""

import os
import signal
import sys
from collections.abc import Callable

import jax

from striped_attention.errors import Diverged, UsageError


def guard(run: Callable[[], int], process: int | None = None) -> int:
    """Run a command. Its errors are printed as one line, which names the process if there are several."""
    try:
        return run()
    except (UsageError, Diverged) as error:
        message, code = str(error), 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:  # the reader of the output is gone, e.g. in `striped plan … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        message, code = "stopped by Ctrl-C.", 130
    except Exception as error:
        if not (jax.distributed.is_initialized() and _lost_contact(error)):
            raise
        message, code = f"another process is gone: {str(error).splitlines()[0]}", 1
    name = "striped" if process is None else f"striped, process {process}"
    print(f"{name}: {message}", file=sys.stderr, flush=True)
    if jax.distributed.is_initialized():
        os._exit(code)  # JAX's own way out waits minutes for the other processes, who may be waiting for this one
    return code


def _lost_contact(error: Exception) -> bool:
    """Whether an error says that a collective operation had nobody to work with."""
    return any(word in str(error) for word in ("Gloo", "NCCL", "heartbeat", "Connection closed by peer"))

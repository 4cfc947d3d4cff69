"""Signals: the first one is acknowledged although Python runs no handlers, the second one ends the process."""

import signal
import subprocess
import sys
import threading

import pytest

from striped_attention.training.signals import Signals

# The main thread is inside C code for minutes, as while JAX compiles: Python calls no signal handlers.
BUSY = """
import hashlib
from striped_attention.training.signals import Signals
with Signals() as asked:
    asked.notify = lambda name: print(name, flush=True)
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_handled_while_the_main_thread_is_busy(number):
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name}\n"
        process.send_signal(number)
        assert process.wait() == 128 + number


STARTING = """
import gc, signal, sys
from striped_attention import cli
from striped_attention.cli import train
def busy(*_):
    print("ready", flush=True)
    while True: pass
gc.callbacks.append(busy)  # exceptions here are printed and dropped
train.run = lambda config: gc.collect()
sys.argv = ["striped", "train"]
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(cli.main())
"""


def test_ctrl_c_ends_a_run_that_starts_wherever_execution_is():
    with subprocess.Popen(
        [sys.executable, "-c", STARTING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read().endswith("striped: stopped by Ctrl-C.\n")


def test_a_request_to_stop_is_known_at_once_and_kept():
    acknowledged, names = threading.Event(), []
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as asked:
        asked.notify = lambda name: (names.append(name), acknowledged.set())
        assert not asked.stop
        signal.raise_signal(signal.SIGTERM)
        assert asked.stop
        assert asked.name == "SIGTERM"
        assert acknowledged.wait(60)
    assert names == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is before

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
    asked.acknowledge_with(lambda name: print(name, flush=True))
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
        asked.acknowledge_with(lambda name: (names.append(name), acknowledged.set()))
        assert not asked.stop
        signal.raise_signal(signal.SIGTERM)
        assert asked.stop
        assert asked.name == "SIGTERM"
        assert acknowledged.wait(60)
    assert names == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_before_there_is_a_display_is_acknowledged_later_and_an_unread_output_does_no_harm():
    names = []
    with Signals() as asked:
        signal.raise_signal(signal.SIGTERM)
        acknowledged = threading.Event()
        while not asked._pending:
            threading.Event().wait(0.01)
        asked.acknowledge_with(lambda name: (names.append(name), acknowledged.set()))
        assert acknowledged.is_set()
    assert names == ["SIGTERM"]

    def unread(_):
        raise BrokenPipeError

    with Signals() as asked:
        asked.acknowledge_with(unread)
        signal.raise_signal(signal.SIGTERM)
        assert asked.stop
        assert asked._thread.is_alive()


def test_a_forked_child_leaves_the_signals_to_its_parent():
    """A signal to the whole group counts once in the parent: the child does not write to the same pipe."""
    code = """
import os, signal, time
from striped_attention.training.signals import Signals
os.setpgrp()
with Signals() as asked:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"x")
        time.sleep(0.5)
        os._exit(0)
    os.read(read, 1)
    os.killpg(0, signal.SIGINT)
    os.waitpid(child, 0)
    time.sleep(0.2)
    print(asked.name)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "SIGINT\n"), done.stderr

"""The live display of a run on terminals of any width, with a fake clock and without training."""

import io
import types

import pytest
import rich.console

from striped_attention.runtime.hardware import memory_in_use
from striped_attention.training.display import Display, duration
from striped_attention.training.watch import Watch


def metrics(step, **others):
    numbers = dict(loss=4.0 - step / 100, gradient_norm=0.8312, learning_rate=3e-4, seconds=1.924, mfu=None)
    return {"step": step, **numbers, "tokens_per_second": 34_133.3, "tokens": 65_536 * step, **others}


def shown(display, width):
    console = rich.console.Console(file=io.StringIO(), width=width, height=40, legacy_windows=False)
    console.print(display)
    return console.file.getvalue()


@pytest.fixture
def display():
    """A display after 20 of 1,000 steps of 2 seconds each; tests change the time through `display.now`."""
    now = [0.0]
    display = Display(0, 1000, clock=lambda: now[0])
    display.now = now
    for step in range(1, 21):
        now[0] = 30.0 + 2.0 * step  # compiling took 30 seconds
        display.update(metrics(step, mfu=0.451, memory_bytes=61_200_000_000))
    display.validated(1000, 2.4102)
    display.checkpoint, display.memory_limit = 1200, 139_100_000_000
    return display


def test_a_wide_terminal_shows_everything_that_is_known(display):
    text = shown(display, 100)
    facts = (
        "20 of 1,000 steps · 32:40 left",
        "3.8000 (smoothed 3.8",
        "0.831",
        "3.00e-04",
        "1.92 s",
        "34,133",
        "45.1 %",
    )
    for fact in (*facts, "61.2 of 139.1 GB", "step 1,200", "2.4102 (step 1,000)"):
        assert fact in text
    assert len(text.splitlines()) == 6


@pytest.mark.parametrize("width", [60, 40])
def test_a_narrow_terminal_shows_the_same_below_each_other(display, width):
    narrow = shown(display, width)
    assert words(narrow) == words(shown(display, 100))
    assert max(map(len, narrow.splitlines())) <= width


def words(text):
    return {word for word in text.split() if word[0] not in "━╸╺"}


def test_a_wish_to_stop_is_acknowledged(display):
    display.stopping = "SIGINT"
    assert "SIGINT: stopping after this step." in shown(display, 100)
    display = Display(0, 10, clock=lambda: 0.0)
    display.stopping = "SIGTERM"
    assert "SIGTERM: stopping after the first step." in shown(display, 100)


def test_what_is_not_known_is_not_shown():
    display = Display(0, 10, clock=lambda: 0.0)
    assert "waiting for the first step: 0:00" in shown(display, 100)
    display.update(metrics(1))
    text = shown(display, 100)
    assert all(name not in text for name in ("MFU", "memory", "checkpoint", "validation", "left"))


def test_the_smoothed_loss_follows_slowly():
    display = Display(0, 10, clock=lambda: 0.0)
    display.update(metrics(1, loss=2.0))
    assert "2.0000 (smoothed 2.0000)" in shown(display, 100)
    display.update(metrics(2, loss=4.0))
    assert f"4.0000 (smoothed {(0.95 * 2 + 4) / 1.95:.4f})" in shown(display, 100)


def test_a_step_that_does_not_end_is_seen(display):
    display.now[0] += 10.9
    assert "now" not in shown(display, 100)
    display.now[0] += 50
    assert "1.92 s (now 1:01)" in shown(display, 100)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0:00"), (67.0, "1:07"), (3600.0, "1:00:00"), (86_399.7, "1 day 0:00:00"), (2e5, "2 days 7:33:20")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_memory_is_that_of_the_fullest_device_and_of_none_that_does_not_say():
    def device(stats):
        return types.SimpleNamespace(memory_stats=lambda: stats)

    silent, half, full = device(None), device({"peak_bytes_in_use": 5, "bytes_limit": 10}), {"peak_bytes_in_use": 9}
    assert memory_in_use([silent]) is None
    assert memory_in_use([silent, half]) == (5, 10)
    assert memory_in_use([half, device(full)]) == (9, None)


def test_a_log_gets_whole_lines_and_a_terminal_the_display(monkeypatch):
    with Watch(0, 1, quiet=False) as watch:
        watch.console.file = io.StringIO()
        watch.say("a line " * 30)
        watch.step(metrics(1))
    lines = watch.console.file.getvalue().splitlines()
    assert lines == [("a line " * 30), "step 1/1 · loss 3.9900 · 34,133 tokens/s"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Watch(0, 1, quiet=False)
    terminal.console.file = io.StringIO()
    with terminal:
        terminal.step(metrics(1))
        terminal.say("said above it")
    assert "said above it" in terminal.console.file.getvalue()
    assert "1 of 1 steps" in terminal.console.file.getvalue()


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    with Watch(0, 1, quiet=False) as watch:
        watch.console.file = io.StringIO()
        watch.step(metrics(1))
    assert watch.console.file.getvalue() == "step 1/1 · loss 3.9900 · 34,133 tokens/s\n"

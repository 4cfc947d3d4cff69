"""Run: helpers shared by all suites.

A suite is a generator function with the name used on the command line. It receives its options and the record of the
run, fills in the record, and yields what to print: each row once it is measured, and a table at the end. The record is
saved at every yield, so finished rows are safe while the next one is measured.
"""

import importlib
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import rich.console
import rich.table

from striped_attention.errors import UsageError
from striped_attention.runtime import record
from striped_bench.bench.command import MODULES, BenchConfig

Options = Mapping[str, Any]
Row = dict[str, Any]
Record = dict[str, Any]
Progress = Iterator[Row | str | rich.table.Table]


def run(config: BenchConfig) -> None:
    """Run a suite and write its result."""
    path = config.output or pathlib.Path(f"{config.suite}.json")
    _check_writable(path)
    module = importlib.import_module(f"striped_bench.bench.{MODULES.get(config.suite, config.suite)}")
    result = record.metadata(config.suite, dict(config.options))
    for new in getattr(module, config.suite)(config.options, result):
        record.write(result, path)
        say(", ".join(f"{name} {_cell(x)}" for name, x in new.items() if _cell(x)) if isinstance(new, dict) else new)
    say(str(path))


def _check_writable(path: pathlib.Path) -> None:
    """Raise before hours of measuring if the output cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}.") from error


def say(what: Any) -> None:
    width = None if sys.stdout.isatty() else 160  # a table that goes to a file need not fit a terminal
    rich.console.Console(highlight=False, soft_wrap=True, width=width).print(what)


def tabulate(rows: Iterable[Row], *names: str) -> rich.table.Table:
    """Make a table of these fields; if a field has a value per kind, show that of "both"."""
    table = rich.table.Table(*(name.replace("_", " ") for name in names))
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in names))
    return table


def _cell(value: Any) -> str:
    """Format a field for a table; lists become empty."""
    if isinstance(value, dict):
        value = value.get("both")
    if isinstance(value, list) or value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def require(what: str, error: float, tolerance: float) -> float:
    """Return `error`; raise if it exceeds the tolerance or is NaN."""
    if not error <= tolerance:
        raise RuntimeError(f"{what} is wrong by {error:.1e}, more than {tolerance:g}. It is not timed.")
    return error


def seconds(function: Callable[..., Any], *arguments: Any, times: int = 1) -> float:
    """Seconds per call until the result is ready. `times` calls are queued, so a GPU does not wait for the host."""
    begun = time.perf_counter()
    for _ in range(times):
        result = function(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - begun) / times


def keep(rows: list[Row], new: Iterable[Row]) -> Iterator[Row]:
    """Append rows to `rows` and pass them on."""
    for row in new:
        rows.append(row)
        yield row


def interleaved(names: Sequence[Any], rounds: int, sample: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Sample all names in rounds, each in a new random order, so that a machine that slows down affects all equally."""
    found: dict[Any, list[Any]] = {name: [] for name in names}
    generator = random.Random(0)
    for turn in range(rounds):
        for name in generator.sample(list(names), len(names)):
            found[name].append(sample(name))
        say(f"  round {turn + 1} of {rounds}")
    return found


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by the values of these fields."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median over rounds of a / b, which is more stable than the ratio of the two medians."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))

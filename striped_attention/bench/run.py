"""Run: what all suites share. A suite asks workers for results, row by row, and writes them down as they come.

A worker of a suite for GPUs is a process of its own, `python -m` the suite's module with a task in JSON: how many GPUs
JAX pretends to have is settled when it starts, and so is its memory. The suite itself never touches the GPU. Those of
the suites for CPUs own a core; see `workers.py`.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import rich.console

from striped_attention import cudnn
from striped_attention.bench import mock, record
from striped_attention.bench.config import BenchConfig
from striped_attention.training.errors import UsageError

_RESULT = "result: "  # begins a worker's lines that are results; libraries may print others


def stream(module: str, task: str, **options: Any) -> Iterator[Any]:
    """The results of a task of a suite's module, each as soon as the worker has it."""
    command = [sys.executable, "-m", module, json.dumps({"task": task, **options})]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith(_RESULT):
                        yield json.loads(line.removeprefix(_RESULT))
            except BaseException:  # whoever asked has lost interest, and would wait for the worker
                process.kill()
                raise
        errors.seek(0)
        said = errors.read()
    if process.returncode == 2:
        raise UsageError(said.strip().splitlines()[-1])
    if process.returncode:
        raise RuntimeError(f"The task {task} {options} failed:\n{said[-4000:]}")


def main(tasks: dict[str, Callable[..., Iterable[Any]]], mocked: tuple[str, ...]) -> None:
    """What a worker does: the task on its command line. Those in `mocked` see as many GPUs as they have members."""
    options = json.loads(sys.argv[1])
    task = options.pop("task")
    if task in mocked:
        mock.pretend(options["members"])
    try:
        if (reason := cudnn.unavailable("gpu")) is not None:
            raise UsageError(f"This suite measures the cudnn kernel. {reason}")
        for result in tasks[task](**options):
            print(_RESULT + json.dumps(result), flush=True)
    except UsageError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def document(config: BenchConfig, configuration: dict[str, Any], packages: Sequence[str] = ()) -> dict[str, Any]:
    """What a result says before there is one. Raises if it could not be written."""
    try:
        path(config).parent.mkdir(parents=True, exist_ok=True)
        existed = path(config).exists()
        with path(config).open("a"):
            pass
        if not existed:
            path(config).unlink()
    except OSError as error:
        raise UsageError(f"--output {path(config)} cannot be written: {error.strerror}.") from error
    return record.metadata(config.suite, configuration, packages)


def path(config: BenchConfig) -> pathlib.Path:
    """Where the result goes."""
    return config.output or pathlib.Path(f"{config.suite}.json")


def write(result: dict[str, Any], config: BenchConfig) -> None:
    """Put down what there is so far."""
    record.write(result, path(config))


def say(what: Any) -> None:
    width = None if sys.stdout.isatty() else 160  # a table in a file need not fit a terminal
    rich.console.Console(highlight=False, soft_wrap=True, width=width).print(what)

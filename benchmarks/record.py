"""Record: the options all benchmarks share, what they write down beside their numbers, and how they print them.

A result is one JSON document: hardware, versions, configuration, commit, every sample. Reports only read that file.
"""

import argparse
import datetime
import functools
import json
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from striped_attention.bench.record import git, version

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("striped-attention", "jax", "jaxlib", "numpy", "torch", "ringattention", "ring-attention-pytorch")


def parser(benchmark: str, description: str | None, rounds: int, **more: Any) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **more
    )
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("--lengths", nargs="+", default=[2048, 4096, 8192, 16384], help="texts to time (2048 4096 8192 16384)")
    add("--rounds", default=rounds, help=f"runs of each contestant, length and kind ({rounds})")
    add("--check-length", default=2048, help="text on which output and gradients are compared with float64 (2048)")
    add("--seed", default=0, help="of the inputs and of the order within a round (0)")
    path = RESULTS / f"{benchmark}.json"
    parser.add_argument("--output", type=pathlib.Path, default=path, help="where the JSON goes (benchmarks/results/)")
    return parser


def parse(parser: argparse.ArgumentParser, multiple: int, why: str) -> argparse.Namespace:
    """The options of this run, with lengths that every contestant can do."""
    arguments = parser.parse_args()
    if any(length < 1 or length % multiple for length in (*arguments.lengths, arguments.check_length)):
        parser.error(f"lengths must be multiples of {multiple}, which {why}")
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


def metadata(benchmark: str, configuration: dict[str, Any]) -> dict[str, Any]:
    """Everything but the measurements; to be taken before them."""
    return {
        "benchmark": benchmark,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "git": git(),
        "configuration": configuration,
    }


def hardware() -> dict[str, Any]:
    """Processor, cores, memory, and how busy the machine is already: a benchmark wants a load of 0."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "hardware_threads_of_one_core": _siblings(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_available_bytes": available_memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_at_start": os.getloadavg()[0],
    }


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    return int((_field("/proc/meminfo", "MemAvailable") or "0 kB").split()[0]) * 1024


def write(document: dict[str, Any], path: pathlib.Path) -> None:
    """Write the document, and print where it is as the last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    print(path)


def cores(count: int) -> list[int]:
    """The cores to run on; a machine with more is used as if it had `count`."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < count:
        raise SystemExit(f"This benchmark needs {count} cores; this process may use {len(usable)}.")
    return usable[:count]


def progress(*words: object) -> None:
    print(" · ".join(str(word) for word in words), file=sys.stderr, flush=True)


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """How many times b fits into a: the median over rounds, each round's two samples taken next to each other.

    A machine that slows down for a while slows both, so this is steadier than the quotient of two medians.
    """
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def table(rows: Iterable[Sequence[object]]) -> str:
    """Columns of equal width, the first one left-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = []
    for row in cells:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("   ".join([first.strip().ljust(widths[0]), *rest]))
    return "\n".join(line.rstrip() for line in lines)


def seconds(value: float) -> str:
    """Three significant digits: 0.0123, 0.456, 12.3."""
    return f"{value:.{max(0, 2 - _magnitude(value))}f}"


def _magnitude(value: float) -> int:
    return int(f"{value:e}".split("e")[1])


def _field(path: str, name: str) -> str | None:
    try:
        with open(path) as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith(name)), None)
    except OSError:
        return None


def _siblings() -> list[str]:
    """Which logical cores share a physical one, such as ["0-1"] or ["0", "1"]; two that do are not two cores."""
    paths = pathlib.Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    return sorted({path.read_text().strip() for path in paths})

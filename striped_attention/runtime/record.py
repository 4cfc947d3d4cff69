"""Record: the metadata stored with a benchmark's results: hardware, versions, commit, configuration."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Sequence
from typing import Any

PACKAGES = ("striped-attention", "jax", "jaxlib", "numpy")


def metadata(benchmark: str, configuration: dict[str, Any], packages: Sequence[str] = ()) -> dict[str, Any]:
    """Collect everything but the measurements; call it before measuring. `packages`: others whose versions matter."""
    return {
        "benchmark": benchmark,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in (*PACKAGES, *packages)}},
        "git": git(),
        "configuration": configuration,
    }


def write(document: dict[str, Any], path: pathlib.Path) -> None:
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def version(package: str) -> str | None:
    """Return the installed version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git() -> dict[str, Any]:
    """Return the commit, and whether the source differs from it. Results, which benchmarks write, are ignored.

    Both are None outside a repository.
    """

    def ask(*arguments: str) -> str:
        here = pathlib.Path(__file__).parent.parent.parent
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = ask("status", "--porcelain", "--", ".", ":!benchmarks/results")
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def hardware() -> dict[str, Any]:
    """Return processor, cores, memory and the current load: a CPU benchmark should start at a load of 0."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": os.cpu_count(),
        "cores_usable": len(usable_cores()),
        "hardware_threads_of_one_core": _siblings(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "memory_available_bytes": available_memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_at_start": os.getloadavg()[0],
    }


def usable_cores() -> list[int]:
    """Return the cores that this process may use; all cores if the system does not report them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def available_memory() -> int:
    """Return the bytes available without swapping; 0 if the system does not report them."""
    return int((_field("/proc/meminfo", "MemAvailable") or "0 kB").split()[0]) * 1024


def _field(path: str, name: str) -> str | None:
    try:
        with open(path) as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith(name)), None)
    except OSError:
        return None


def _siblings() -> list[str]:
    """Return groups of logical cores that share a physical core, e.g. ["0-1"]; ["0", "1"] are two full cores."""
    paths = pathlib.Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    return sorted({path.read_text().strip() for path in paths})

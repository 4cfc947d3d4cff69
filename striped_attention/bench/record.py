"""Record: what a benchmark writes down beside its numbers."""

import datetime
import importlib.metadata
import pathlib
import platform
import subprocess
from typing import Any

PACKAGES = ("striped-attention", "jax", "jaxlib", "numpy")


def metadata(benchmark: str, configuration: dict[str, Any]) -> dict[str, Any]:
    """Everything but the measurements; to be taken before them."""
    return {
        "benchmark": benchmark,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "git": git(),
        "configuration": configuration,
    }


def version(package: str) -> str | None:
    """The installed version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git() -> dict[str, Any]:
    """The commit, and whether the source differs from it; results do not count, a benchmark writes them itself.

    None where there is no repository.
    """

    def ask(*arguments: str) -> str:
        here = pathlib.Path(__file__).parent.parent.parent
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = ask("status", "--porcelain", "--", ".", ":!benchmarks/results")
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}

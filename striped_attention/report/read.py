"""Read: result files, checked before anything is drawn from them.

A result is one JSON object that says which benchmark wrote it, when, with which versions and which commit. What the
benchmarks of this package write is in `KNOWN`: the lists that figures are made from, and what their rows must have.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from striped_attention._version import __version__
from striped_attention.training.errors import UsageError

_FIELDS = ("benchmark", "started", "versions", "git", "configuration")
_ATTENTION = ("members", "length", "heads", "layout", "both", "over_contiguous", "bound", "of_ideal")
_PATH = ("devices", "length", "layout", "both", "seconds", "over_contiguous", "bound")
# Benchmark: where its rows are, and what a row must have.
KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "gpu": {"summary": _ATTENTION, "members": ("members", "length", "heads", "layout", "both", "where"), "checks": ()},
    "step": {"summary": ("preset", "length", "members", "layout", "fits")},
    "plan": {"choices": ("layout", "tiles", "timelines", "imbalance")},
    "tests": {"tests": ("test", "outcome", "printed")},
    "cpu_balance": {"lengths": (), "checks": ("layout", "errors", "tolerance")},
    "cpu_peers": {"contestants": ("name", "family", "status")},
    "peers": {"contestants": ("name", "family", "status")},
    "train_control": {"runs": ("layout", "devices", "largest_difference")},
    "train_memory": {"bytes_per_device": ("length", "devices", "together")},
    "layouts": {"wall.rows": ("length", "layout", "over_contiguous", "bound"), "critical_path.rows": _PATH},
    "tiles": {"rows": ("platform", "mask", "tile", "length", "devices", "layout", "both", "over_contiguous", "bound")},
    "masks": {"rows": ("platform", "mask", "devices", "length", "layout", "over_contiguous", "bound")},
    "overhead": {"rows": ("length", "what", "seconds", "times")},
    "decode": {"rows": ("what", "batch", "cached", "seconds")},
    "scale": {"rows": ("preset", "length", "devices", "hardware", "layout", "tokens_per_second", "measured")},
    "positions": {"rows": ("positions", "length", "layout", "devices", "error")},
}


@dataclasses.dataclass(frozen=True)
class Document:
    """One result file."""

    path: pathlib.Path
    content: dict[str, Any]

    @property
    def benchmark(self) -> str:
        return self.content["benchmark"]

    @property
    def hardware(self) -> str:
        """What it was measured on, in a few words."""
        content = self.content
        known = content.get("hardware") or {}
        if self.benchmark == "plan":
            return f"counted for {content['configuration'].get('devices')} × {known.get('name')}"
        if devices := content["configuration"].get("devices") if self.benchmark == "tests" else None:
            return ", ".join(dict.fromkeys(devices))
        gpu = content.get("gpu", {}).get("name") or known.get("gpu")
        cpu = f"{known['cpu']}, {known['cores_usable']} cores" if {"cpu", "cores_usable"} <= set(known) else None
        return gpu or cpu or "hardware not recorded"

    @property
    def commit(self) -> str:
        """Short, with a word if the source differed from it."""
        commit = self.content["git"].get("commit")
        changed = ", changed" if self.content["git"].get("dirty") else ""
        return "commit unknown" if commit is None else f"commit {commit[:7]}{changed}"

    @property
    def date(self) -> str:
        return str(self.content["started"])[:10]

    def rows(self, where: str) -> Any:
        """What is at `where`, like wall.rows."""
        return functools.reduce(lambda found, name: found[name], where.split("."), self.content)


def read(paths: Iterable[pathlib.Path]) -> list[Document]:
    """Every result in these files and folders, the oldest first; later ones count where two say the same."""
    files: list[pathlib.Path] = []
    for path in paths:
        found = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not found:
            raise UsageError(
                f"The folder {path} has no .json file. `striped bench` and `striped plan --output` write some."
            )
        files += found
    documents = [_document(path) for path in dict.fromkeys(files)]
    return sorted(documents, key=lambda document: str(document.content["started"]))


def _document(path: pathlib.Path) -> Document:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Give a result file or a folder of them.") from error
    except ValueError as error:
        raise UsageError(
            f"{path} is not JSON ({str(error).splitlines()[0]}). Give what `striped bench` wrote."
        ) from error
    missing = [name for name in _FIELDS if not isinstance(content, dict) or name not in content]
    if missing or not all(isinstance(content[name], dict) for name in _FIELDS[2:]):
        lacks = f"it has no {missing[0]!r}" if missing else "its versions, git or configuration are not objects"
        raise UsageError(f"{path} is no result of this package: {lacks}. Give what `striped bench` wrote.")
    document = Document(path, content)
    _check_version(document)
    _check_rows(document)
    return document


def _check_version(document: Document) -> None:
    """Refuse what another version wrote. A source tree that is not installed has no version; that is let through."""
    version = document.content["versions"].get("striped-attention")
    if isinstance(version, str) and _release(version) != _release(__version__):
        raise UsageError(
            f"{document.path} was written by striped-attention {version}, and this is {__version__}. Measure again, "
            f"or draw it with version {version}."
        )


def _release(version: str) -> list[str]:
    return version.split(".")[:2]


def _check_rows(document: Document) -> None:
    for where, names in KNOWN.get(document.benchmark, {}).items():
        try:
            rows = document.rows(where)
        except (KeyError, TypeError):
            raise _broken(document, f"it has no {where!r}") from None
        if not isinstance(rows, list | dict) or (names and not all(isinstance(row, dict) for row in rows)):
            raise _broken(document, f"its {where!r} are not rows")
        for name in names:
            if any(name not in row for row in rows):
                raise _broken(document, f"a row of {where!r} has no {name!r}")


def _broken(document: Document, why: str) -> UsageError:
    return UsageError(f"{document.path} says it is a result of {document.benchmark!r}, but {why}. Measure it again.")


def of(documents: Sequence[Document], *benchmarks: str) -> list[Document]:
    """Those of some benchmarks."""
    return [document for document in documents if document.benchmark in benchmarks]

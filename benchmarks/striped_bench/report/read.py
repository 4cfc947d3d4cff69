"""Read: load result files, and validate them before anything is drawn.

A result is one JSON object that records the benchmark, the time, package versions and the commit. The fields that the
figures need are in results.toml.
"""

import functools
import importlib.resources
import json
import math
import pathlib
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from striped_attention._version import __version__
from striped_attention.errors import UsageError

METRICS = "metrics.jsonl"  # in the run's folder
_FIELDS = ("benchmark", "started", "versions", "git", "configuration")
KNOWN = tomllib.loads((importlib.resources.files("striped_bench.report") / "results.toml").read_text())


class Document(NamedTuple):
    """One result file."""

    path: pathlib.Path
    content: dict[str, Any]

    @property
    def benchmark(self) -> str:
        return self.content["benchmark"]

    @property
    def hardware(self) -> str:
        """Short description of the hardware."""
        known, options = self.content.get("hardware") or {}, self.content["configuration"]
        if self.benchmark == "plan":
            return f"counted for {options.get('devices')} × {known.get('name')}"
        if self.benchmark == "compile":
            return f"compiled for {self.content.get('devices')} × {self.content.get('device')}"
        if self.benchmark == "tests" and options.get("devices"):
            return ", ".join(dict.fromkeys(options["devices"]))
        devices = self.content.get("devices") or {}
        if self.benchmark in ("train", "evaluate") and devices.get("kind", "cpu") != "cpu":
            return f"{math.prod(devices['mesh'].values())} × {devices['kind']}"
        gpu = self.content.get("gpu", {}).get("name") or known.get("gpu")
        gpu = None if gpu == "cpu" else gpu  # the suite `trainers` without a GPU
        cpu = f"{known['cpu']}, {known['cores_usable']} cores" if {"cpu", "cores_usable"} <= set(known) else None
        return gpu or cpu or "hardware not recorded"

    @property
    def commit(self) -> str:
        """Short commit hash, with a note if the source tree had uncommitted changes."""
        commit = self.content["git"].get("commit")
        changed = ", changed" if self.content["git"].get("dirty") else ""
        return "commit unknown" if commit is None else f"commit {commit[:7]}{changed}"

    @property
    def date(self) -> str:
        return str(self.content["started"])[:10]

    def rows(self, where: str) -> Any:
        """Return the content at the dotted path `where`, e.g. wall.rows."""
        return functools.reduce(lambda found, name: found[name], where.split("."), self.content)


def read(paths: Iterable[pathlib.Path]) -> list[Document]:
    """Read all results in these files and folders, oldest first; newer results replace older ones of the same case."""
    files: list[pathlib.Path] = []
    for path in paths:
        found = [path] if _is_run(path) or not path.is_dir() else sorted(path.glob("*.json"))
        if not found:
            raise UsageError(f"The folder {path} has no .json file. `striped bench` and `striped plan` write them.")
        files += found
    documents = [_document(path) for path in dict.fromkeys(files)]
    return sorted(documents, key=lambda document: str(document.content["started"]))


def of(documents: Sequence[Document], *benchmarks: str) -> list[Document]:
    """Select the documents of these benchmarks."""
    return [document for document in documents if document.benchmark in benchmarks]


def _is_run(path: pathlib.Path) -> bool:
    """Whether a folder is the run folder of a `striped train` run."""
    return (path / METRICS).is_file() and (path / "run.json").is_file()


def _run(folder: pathlib.Path) -> dict[str, Any]:
    """Convert the files of a training run to a result. Of repeated validations the last counts."""
    last = json.loads((folder / "run.json").read_text())[-1]
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    validation = {line["step"]: {"step": line["step"], **line["validation"]} for line in lines if "validation" in line}
    return {
        **{"benchmark": "train", "started": last["started"], "git": {"commit": None}},
        **{"versions": {"striped-attention": last["versions"]["striped_attention"]}, "configuration": last["options"]},
        **{"devices": {"kind": last["device"], "mesh": last["mesh"]}, "validation": list(validation.values())},
    }


def _document(path: pathlib.Path) -> Document:
    try:
        document = Document(path, _run(path) if path.is_dir() else json.loads(path.read_text()))
    except (LookupError, TypeError) as error:
        raise UsageError(f"The run in {path} cannot be read: its files are damaged ({error!r}).") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Give a result file or a folder of them.") from error
    except ValueError as error:
        raise UsageError(
            f"{path} is not JSON ({str(error).splitlines()[0]}). Give a file that `striped bench` wrote."
        ) from error
    if (fault := next(_faults(document), None)) is not None:
        raise UsageError(f"{path} {fault}")
    return document


def _faults(document: Document) -> Iterator[str]:
    """Yield the reasons why a file cannot be drawn, each with a remedy."""
    content = document.content
    for name in _FIELDS:
        if not isinstance(content, dict) or name not in content:
            yield f"is not a result of this package: it has no {name!r}. Give a file that `striped bench` wrote."
    if not all(isinstance(content[name], dict) for name in _FIELDS[2:]):
        yield "is not a result of this package: its versions, git or configuration are not objects."
    # A source tree that is not installed has no version; it is accepted.
    version = str(content["versions"].get("striped-attention") or __version__)
    if version.split(".")[:2] != __version__.split(".")[:2]:
        yield f"was written by striped-attention {version}, but this is {__version__}. Measure again."
    for where, names in KNOWN.get(document.benchmark, {}).items():
        says = f"claims to be a result of {document.benchmark!r}, but"
        try:
            rows = document.rows(where)
        except (KeyError, TypeError):
            yield f"{says} it has no {where!r}. Measure it again."
        if not isinstance(rows, list | dict) or (names and not all(isinstance(row, dict) for row in rows)):
            yield f"{says} its {where!r} are not rows. Measure it again."
        for name in names:
            if any(name not in row for row in rows):
                yield f"{says} a row of {where!r} has no {name!r}. Measure it again."

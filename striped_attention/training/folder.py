"""Folder: the files in a run's folder other than checkpoints and metrics.

run.json                 the options of this run and of the runs that it resumed
wandb.json               the run's id on Weights & Biases, with --wandb
tokenizer.json           a copy of --tokenizer or of the tokenizer of --start-from, with its companion files
generation_config.json   a copy of the one of --start-from

`striped generate` and `striped export` therefore need only this folder, and never open a file elsewhere just because
run.json names it.
"""

import dataclasses
import json
import os
import pathlib
import platform
import shutil
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils

from striped_attention._version import __version__
from striped_attention.errors import UsageError
from striped_attention.huggingface.writing import BESIDE
from striped_attention.training.checkpoint import write_whole
from striped_attention.training.config import TrainConfig

TOKENIZER, METRICS, EVENTS, WANDB = "tokenizer.json", "metrics.jsonl", "tensorboard", "wandb.json"


def check(config: TrainConfig) -> None:
    """Raise if the run would overwrite another one, or if there is no folder to resume from. Writes nothing."""
    folder = config.checkpoint_dir
    if folder is None:
        return
    if config.resume and not folder.is_dir():
        why = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"--resume needs the folder of an earlier run, but --checkpoint-dir {folder} {why}.")
    if not config.resume and folder.is_dir() and any(folder.iterdir()):
        raise UsageError(
            f"--checkpoint-dir {folder} is not empty. Add --resume to continue the run in it, or choose a new folder."
        )
    multihost_utils.sync_global_devices("no process writes before all have checked the folder")


def read_record(folder: pathlib.Path) -> list[Any]:
    """Return the records of earlier runs from run.json."""
    path = folder / "run.json"
    try:
        runs = json.loads(path.read_text()) if path.exists() else []
        if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
            raise ValueError("it must be a list of objects")
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} is damaged ({error}). Move it away and continue with --resume.") from error
    return runs


def check_files(folder: pathlib.Path) -> None:
    """Raise if a path that the run writes to is of the wrong kind or not writable."""
    for name, kind, right in (
        *((name, "a file", pathlib.Path.is_file) for name in ("run.json", METRICS, TOKENIZER, WANDB)),
        (EVENTS, "a folder", pathlib.Path.is_dir),
    ):
        path = folder / name
        if path.exists() and not (right(path) and os.access(path, os.W_OK)):
            raise UsageError(f"{path} must be {kind} that can be written. Move it away and continue with --resume.")


def begin(
    folder: pathlib.Path,
    runs: list[Any],
    config: TrainConfig,
    settled: TrainConfig,
    mesh: dict[str, int],
    step: int,
    files: Mapping[str, pathlib.Path],
) -> None:
    """Record a run that begins after `step`. `runs` are the records of earlier runs; `files` maps the names of further
    files to the paths that they are copied from."""
    run = {
        "from_step": step,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "options": config.record(),
        "settled": {name: getattr(settled, name) for name in ("strategy", "layout", "stripe", "remat", "chunk")},
        "model": dataclasses.asdict(config.model),
        "mesh": mesh,
        "processes": jax.process_count(),
        "device": jax.devices()[0].device_kind,
        "versions": {"striped_attention": __version__, "jax": jax.__version__, "python": platform.python_version()},
    }
    try:
        for name, path in (tokenizer_files(config.tokenizer) | dict(files)).items():
            _keep(path, folder / name)
        write_whole(folder / "run.json", json.dumps([*runs, run], indent=2) + "\n")
    except OSError as error:
        raise UsageError(
            f"The record of the run cannot be written to {folder}: {error.strerror or error}. Make room or choose "
            f"another --checkpoint-dir."
        ) from error


def tokenizer_files(tokenizer: pathlib.Path | None) -> dict[str, pathlib.Path]:
    """A tokenizer and its companion files, by their names in a run's folder."""
    if tokenizer is None:
        return {}
    beside = filter(pathlib.Path.is_file, map(tokenizer.with_name, BESIDE))
    return {TOKENIZER: tokenizer, **{path.name: path for path in beside}}


def _keep(path: pathlib.Path, target: pathlib.Path) -> None:
    if not (target.exists() and os.path.samefile(path, target)):
        shutil.copyfile(path, target.with_name(target.name + ".tmp"))
        target.with_name(target.name + ".tmp").replace(target)

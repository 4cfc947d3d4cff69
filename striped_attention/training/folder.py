"""Folder: the folder of a run, apart from its checkpoints and metrics.

run.json                 the options of this run, and of those that it goes on from
wandb.json               the run's id on Weights & Biases, with --wandb
tokenizer.json           a copy of --tokenizer or of --start-from's, with the files that belong to it
generation_config.json   a copy of --start-from's

So `striped generate` and `striped export` need nothing but the folder, and take no file from elsewhere on the word of a
run.json.
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
    """Refuse to write over a run, or to resume none. Writes nothing."""
    folder = config.checkpoint_dir
    if folder is None:
        return
    if config.resume and not folder.is_dir():
        why = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"--resume needs the folder of a run, but --checkpoint-dir {folder} {why}.")
    if not config.resume and folder.is_dir() and any(folder.iterdir()):
        raise UsageError(
            f"--checkpoint-dir {folder} is not empty. Add --resume to go on with the run in it, or choose a new folder."
        )
    multihost_utils.sync_global_devices("nobody writes before everybody has looked")


def read_record(folder: pathlib.Path) -> list[Any]:
    """What run.json says of the runs before this one."""
    path = folder / "run.json"
    try:
        runs = json.loads(path.read_text()) if path.exists() else []
        if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
            raise ValueError("it is no list of runs")
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} is damaged ({error}). Move it away and go on with --resume.") from error
    return runs


def check_files(folder: pathlib.Path) -> None:
    """Raise if something else has the place of a file that a run writes, or it may not be written."""
    for name, kind, right in (
        *((name, "a file", pathlib.Path.is_file) for name in ("run.json", METRICS, TOKENIZER, WANDB)),
        (EVENTS, "a folder", pathlib.Path.is_dir),
    ):
        path = folder / name
        if path.exists() and not (right(path) and os.access(path, os.W_OK)):
            raise UsageError(f"{path} must be {kind} that can be written. Move it away and go on with --resume.")


def begin(
    folder: pathlib.Path,
    runs: list[Any],
    config: TrainConfig,
    mesh: dict[str, int],
    step: int,
    files: Mapping[str, pathlib.Path],
) -> None:
    """Write down a run that begins after `step`. `runs` are those that it goes on from, `files` what else is copied, by
    name."""
    run = {
        "from_step": step,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "options": config.record(),
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
    """A tokenizer and what belongs to it, by the names that they have in the folder of a run."""
    if tokenizer is None:
        return {}
    beside = filter(pathlib.Path.is_file, map(tokenizer.with_name, BESIDE))
    return {TOKENIZER: tokenizer, **{path.name: path for path in beside}}


def _keep(path: pathlib.Path, target: pathlib.Path) -> None:
    if not (target.exists() and os.path.samefile(path, target)):
        shutil.copyfile(path, target.with_name(target.name + ".tmp"))
        target.with_name(target.name + ".tmp").replace(target)

"""Weights: convert Hugging Face models to checkpoints and back."""

import dataclasses
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from striped_attention._version import __version__
from striped_attention.errors import UsageError
from striped_attention.huggingface import write
from striped_attention.huggingface.writing import BESIDE, GENERATION
from striped_attention.training.arrays import read_stacked
from striped_attention.training.checkpoint import checksums, first_line
from striped_attention.training.folder import TOKENIZER
from striped_attention.training.source import WEIGHTS, Source
from striped_attention.training.storage import open_steps


def import_model(source: Source, output: pathlib.Path, mesh: Mesh) -> None:
    """Write a Hugging Face model as a checkpoint, all or nothing."""
    if source.step is not None:
        raise UsageError(f"--model {source.folder} is already a checkpoint; striped import takes Hugging Face models.")
    _check_new(output)
    state = {"weights": read_stacked(source, mesh)}
    said = {
        "format": WEIGHTS,
        "written_by": __version__,
        "model": dataclasses.asdict(source.model),
        "length": source.length,
        **source.ids,
        "checksums": {f".weights{name}": number for name, number in checksums(state["weights"]).items()},
    }
    arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), place=ocp.args.JsonSave(said))
    existed = output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        with open_steps(output) as manager:
            manager.save(0, args=arguments, force=True)
            manager.wait_until_finished()
            manager.check_for_errors()
        for name in (TOKENIZER, *BESIDE, GENERATION):
            if (path := source.file(name)) is not None:
                shutil.copyfile(path, output / name)
    except BaseException as error:  # clean up after Ctrl-C as well
        for path in output.iterdir() if output.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if output.exists() and not existed:
            output.rmdir()
        if not isinstance(error, Exception):
            raise
        raise UsageError(f"--output {output} could not be written: {first_line(error)}. No files were left.") from error


def export_model(source: Source, output: pathlib.Path, dtype: str, tokenizer: pathlib.Path | None, mesh: Mesh) -> None:
    """Write a checkpoint as a Hugging Face model, all or nothing."""
    if source.step is None:
        raise UsageError(f"--model {source.folder} is already a Hugging Face model; striped export takes checkpoints.")
    _check_new(output)
    generation = source.file(GENERATION)
    stacked = read_stacked(source, mesh)

    def named() -> Iterator[tuple[str, int | None, np.ndarray]]:
        for name in stacked:
            if name != "layers":
                yield name, None, np.asarray(stacked[name])
        for layer in range(source.model.layers):
            for name, x in stacked["layers"].items():
                yield name, layer, np.asarray(x[layer])

    write(
        *(output, source.model, named(), dtype, tokenizer),
        length=source.length,
        ids=source.ids,
        generation=generation,
    )


def _check_new(output: pathlib.Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output} already exists and is not empty. Choose a new folder.")

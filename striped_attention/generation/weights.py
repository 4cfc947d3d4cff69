"""Weights: a folder in, weights on the mesh out, and back. Three kinds of folders:

    a run of `striped train`      its newest checkpoint
    what `striped import` wrote   a checkpoint too, without an optimiser
    a Hugging Face model          config.json and safetensors

Checkpoints hold float32, all layers of a weight stacked; an engine wants every layer by itself, in its own dtype.
"""

import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding

from striped_attention._version import __version__
from striped_attention.errors import UsageError
from striped_attention.generation.engine import layer_specs
from striped_attention.huggingface import read_config, tensors, write
from striped_attention.huggingface.config import IDS, read_json
from striped_attention.huggingface.writing import BESIDE
from striped_attention.models.llama import ModelConfig, Weights
from striped_attention.training.checkpoint import FORMAT, checksums, first_line
from striped_attention.training.folder import TOKENIZER
from striped_attention.training.storage import open_steps, read_arrays

WEIGHTS = "striped_attention weights 1"  # a checkpoint without an optimiser


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder with a model in it, looked at but not yet read. `step` is None for a Hugging Face model."""

    folder: pathlib.Path
    model: ModelConfig
    step: int | None
    said: dict[str, Any]

    def read(self, mesh: Mesh, dtype: Any) -> Weights:
        """The weights, each layer's by themselves, on the mesh."""
        return _read_hub(self, mesh, dtype) if self.step is None else _read_checkpoint(self, mesh, dtype)

    def file(self, name: str | pathlib.Path) -> pathlib.Path | None:
        """A file of the folder or of one inside it, None if it is not there.

        Checkpoints come from strangers too, and a link in one must not make `striped export` publish a file of this
        machine. Downloads of Hugging Face models are links into a cache: those are followed.
        """
        path = self.folder / name
        if self.step is not None and not path.resolve().is_relative_to(self.folder.resolve()):
            raise UsageError(
                f"The files of a run must lie in its folder, but {path} is a link to {path.resolve()}. If you trust "
                f"that file, put a copy in place of the link, or give it with --tokenizer."
            )
        return path if path.is_file() else None

    @property
    def length(self) -> int:
        """Of the longest texts that the model is for."""
        name = "max_position_embeddings" if self.step is None else "length"
        if not isinstance(self.said.get(name), int):
            raise UsageError(f"{self.folder} must say the length of its texts as {name}; got {self.said.get(name)!r}.")
        return self.said[name]

    @property
    def stop(self) -> list[int]:
        """The tokens that end a text, as far as the folder says."""
        ids = self.said.get("eos_token_id")
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if not all(type(i) is int for i in ids):
            raise UsageError(f"{self.folder} must give whole numbers as eos_token_id; got {ids}.")
        return ids


def find(folder: pathlib.Path) -> Source:
    """What kind of model a folder holds. Raises UsageError if it holds none."""
    if not folder.is_dir():
        raise UsageError(
            f"--model {folder} is not a folder. Give that of a run of `striped train` or of a Hugging Face model."
        )
    if (folder / "config.json").is_file():
        said: dict[str, Any] = {}
        for name in ("config.json", "generation_config.json"):
            if (folder / name).is_file():
                said |= read_json(folder / name)
        return Source(folder, read_config(folder), None, said)
    if not any(path.name.isdecimal() for path in folder.iterdir()):
        raise UsageError(
            f"--model {folder} holds neither a checkpoint (a folder named after its step) nor a Hugging Face model "
            f"(config.json)."
        )
    return _find_checkpoint(folder)


def _read_hub(source: Source, mesh: Mesh, dtype: Any) -> Weights:
    specs = layer_specs(source.model, mesh)
    weights: Weights = {"layers": [{} for _ in range(source.model.layers)]}
    for name, layer, array in tensors(source.folder, source.model):
        spec = specs[name] if layer is None else specs["layers"][layer][name]
        part = functools.partial(_part, array, dtype)
        placed = jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), part)
        (weights if layer is None else weights["layers"][layer])[name] = placed
    return weights


def _part(array: np.ndarray, dtype: Any, index: Any) -> np.ndarray:
    return np.ascontiguousarray(array[index].astype(dtype))


def _find_checkpoint(folder: pathlib.Path) -> Source:
    try:
        with open_steps(folder, read_only=True) as manager:
            step = manager.latest_step()
            if step is None:
                raise ValueError("no save was finished")
            said = manager.restore(step, args=ocp.args.Composite(place=ocp.args.JsonRestore()))["place"]
    except Exception as error:
        raise UsageError(f"The checkpoint in {folder} cannot be read: {first_line(error)}.") from error
    if not isinstance(said, dict) or said.get("format") not in (FORMAT, WEIGHTS):
        raise UsageError(
            f"{folder / str(step)} was not written by this version of `striped train` or `striped import` (its format "
            f"is {said.get('format') if isinstance(said, dict) else None!r})."
        )
    try:
        return Source(folder, ModelConfig.from_json(said["model"]), step, said)
    except (LookupError, TypeError, ValueError) as error:
        raise UsageError(f"{folder / str(step)} holds a model that this version does not know: {error}.") from error


def _read_checkpoint(source: Source, mesh: Mesh, dtype: Any) -> Weights:
    stacked = read_stacked(source, mesh)
    specs = layer_specs(source.model, mesh)

    def unstack(name: str) -> list[Any]:
        split = jax.jit(
            lambda x: [x[i].astype(dtype) for i in range(source.model.layers)],
            out_shardings=[NamedSharding(mesh, layer[name]) for layer in specs["layers"]],
        )
        return split(stacked["layers"].pop(name))

    by_name = {name: unstack(name) for name in list(stacked["layers"])}
    whole = {name: stacked.pop(name).astype(dtype) for name in list(stacked) if name != "layers"}
    return {**whole, "layers": [{name: x[i] for name, x in by_name.items()} for i in range(source.model.layers)]}


def read_stacked(source: Source, mesh: Mesh) -> Weights:
    """A checkpoint's weights as they are in it, and checked: float32, all layers stacked."""
    place = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))  # noqa: E731
    shapes, specs = source.model.shapes, source.model.specs(mesh.size)
    wanted = {"weights": jax.tree.map(place, shapes, specs, is_leaf=lambda x: isinstance(x, tuple))}
    where = source.folder / str(source.step)
    try:
        found = read_arrays(where / "state", wanted, part=True)["weights"]
    except Exception as error:
        raise UsageError(f"{where} cannot be read, it is damaged or foreign: {first_line(error)}.") from error
    numbers = {f".weights{name}": number for name, number in checksums(found).items()}
    wrong = [name for name, number in numbers.items() if source.said["checksums"].get(name) != number]
    if wrong:
        raise UsageError(f"{where} is damaged: {', '.join(wrong)} is not what was saved.")
    return found


def import_model(source: Source, output: pathlib.Path, mesh: Mesh) -> None:
    """Write a Hugging Face model as a checkpoint. All or nothing."""
    if source.step is not None:
        raise UsageError(f"--model {source.folder} is a checkpoint already; striped import takes Hugging Face models.")
    _check_new(output)
    weights = _read_hub(source, mesh, jnp.float32)
    layers, specs = weights.pop("layers"), source.model.specs(mesh.size)

    def stack(name: str) -> Any:
        join = jax.jit(lambda parts: jnp.stack(parts), out_shardings=NamedSharding(mesh, specs["layers"][name]))
        return join([layer.pop(name) for layer in layers])

    state = {"weights": {**weights, "layers": {name: stack(name) for name in list(layers[0])}}}
    said = {
        "format": WEIGHTS,
        "written_by": __version__,
        "model": dataclasses.asdict(source.model),
        "length": source.length,
        **{name: source.said.get(name) for name in IDS},
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
        for name in (TOKENIZER, *BESIDE):
            if (path := source.file(name)) is not None:
                shutil.copyfile(path, output / name)
    except BaseException as error:  # also Ctrl-C leaves nothing
        for path in output.iterdir() if output.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if output.exists() and not existed:
            output.rmdir()
        if not isinstance(error, Exception):
            raise
        raise UsageError(f"--output {output} could not be written: {first_line(error)}. Nothing was left.") from error


def export_model(source: Source, output: pathlib.Path, dtype: str, tokenizer: pathlib.Path | None, mesh: Mesh) -> None:
    """Write a checkpoint as a Hugging Face model. All or nothing."""
    if source.step is None:
        raise UsageError(f"--model {source.folder} is a Hugging Face model already; striped export takes checkpoints.")
    _check_new(output)
    stacked = read_stacked(source, mesh)

    def named() -> Iterator[tuple[str, int | None, np.ndarray]]:
        for name in stacked:
            if name != "layers":
                yield name, None, np.asarray(stacked[name])
        for layer in range(source.model.layers):
            for name, x in stacked["layers"].items():
                yield name, layer, np.asarray(x[layer])

    ids = {name: source.said[name] for name in IDS if source.said.get(name) is not None}
    write(output, source.model, named(), dtype, tokenizer, length=source.length, ids=ids)


def _check_new(output: pathlib.Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output {output} is there already and not empty. Choose a new folder.")

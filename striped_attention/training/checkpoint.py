"""Checkpoint: save a run's state while it goes on, and find it again, whole.

A checkpoint is a folder named after its step. Orbax writes it in the background under another name and renames it when
all of it is on disk, so what carries a number is complete: a process that is killed while saving loses that save only.
Beside the arrays it holds a small JSON: the model's shape, the place in the data, what the data was, and a checksum of
every array, so that a disk that has changed a byte is found out.
"""

import contextlib
import dataclasses
import math
import pathlib
import shutil
import tempfile
import threading
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import lax

from striped_attention._version import __version__
from striped_attention.errors import UsageError
from striped_attention.models.llama import ModelConfig
from striped_attention.training.step import State
from striped_attention.training.storage import open_steps, read_arrays

FORMAT = "striped_attention training state 1"


@dataclasses.dataclass(frozen=True)
class Place:
    """What a checkpoint says besides its arrays. `rows` counts sequences drawn from the data so far.

    `positions` is the longest sequence that the model's rotary positions are made for, if that is known, and `ids` are
    its special tokens, like eos_token_id: what the config.json of an export says. Older checkpoints have neither.
    """

    step: int
    rows: int
    model: dict[str, Any]
    corpus: str
    seed: int
    length: int
    end: int | None
    positions: int | None = None
    ids: dict[str, Any] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "written_by": __version__, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> "Place":
        older: dict[str, Any] = {"positions": None, "ids": {}}
        return cls(**{field.name: (older | said)[field.name] for field in dataclasses.fields(cls)})


class Checkpoints:
    """The checkpoints of one run in one folder. Leave it as a context: an error gives a save that is under way time."""

    def __init__(self, folder: pathlib.Path, keep: int) -> None:
        self.folder = folder.absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):  # a folder that cannot be written to is told now
                pass
            self._manager = open_steps(self.folder, max_to_keep=keep, enable_async_checkpointing=True)
        except OSError as error:
            raise UsageError(
                f"--checkpoint-dir {folder} cannot be used: {error.strerror or error}. Choose a folder that can be "
                f"written to."
            ) from error
        self.saved: int | None = self._manager.latest_step()
        self._saving: int | None = None
        self._checksums: dict[str, int] = {}

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self._manager.close()
        else:
            self._abandon()

    def save(self, state: State, place: Place) -> None:
        """Start to save; returns as soon as the arrays are copied. Waits for the save before it."""
        self.wait()
        self._saving = place.step
        if lack := self._lack(state):
            raise self._failed(OSError(lack))
        said = {**place.as_json(), "checksums": checksums(state)}
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), place=ocp.args.JsonSave(said))
        try:
            self._manager.save(place.step, args=arguments, force=True)
        except Exception as error:
            raise self._failed(error) from error

    def check_room(self, state: State) -> None:
        """Raise if the disk is too full for a checkpoint. `state` may hold shapes and shardings only."""
        if lack := self._lack(state):
            raise UsageError(
                f"--checkpoint-dir {self.folder} has no room for a checkpoint: {lack}. Make room or choose another."
            )

    def _lack(self, state: State) -> str | None:
        """What this process's part of a checkpoint needs and the disk does not have."""
        needed = sum(map(_bytes_here, jax.tree.leaves(state)))
        free = shutil.disk_usage(self.folder).free
        if free >= needed:
            return None
        return f"it needs up to {needed / 1e6:,.1f} MB and the disk has {free / 1e6:,.1f} MB left"

    def wait(self) -> None:
        """Return when everything is on disk, or say what was not."""
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._failed(error) from error
        self.saved, self._saving = self._saving, None

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint that is whole on disk, without waiting for one that is being written."""
        under_way = self._saving
        done = under_way is not None and (self.folder / str(under_way)).is_dir()  # Orbax renames it when it is whole
        return under_way if done else self.saved

    def _failed(self, error: Exception) -> UsageError:
        step, self._saving = self._saving, None
        kept = "No checkpoint was finished before" if self.saved is None else f"That of step {self.saved} is whole"
        return UsageError(
            f"The checkpoint of step {step} could not be written to {self.folder}: {first_line(error)}. {kept}. Make "
            f"room or choose another --checkpoint-dir, and go on with --resume."
        )

    def place(self, like: Place) -> Place:
        """What the newest checkpoint says of itself. It must be of the same model and data as `like`, the beginning."""
        step = self._manager.latest_step()
        if step is None and (self.folder / "run.json").exists():
            return like  # a run that was interrupted before its first checkpoint
        if step is None:
            raise UsageError(
                f"--resume found no checkpoint in {self.folder}. Is it the right folder? Without --resume a run starts "
                f"at step 0."
            )
        try:
            arguments = ocp.args.Composite(place=ocp.args.JsonRestore())
            said = self._manager.restore(step, args=arguments)["place"]
        except Exception as error:
            raise self._unreadable(step, error) from error
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            raise UsageError(
                f"{self.folder / str(step)} was not written by this version of `striped train` (its format is "
                f"{said.get('format') if isinstance(said, dict) else None!r}, not {FORMAT!r}). It was left as it is."
            )
        self._checksums = said["checksums"]
        place = Place.from_json(said)
        _check_same_run(place, like, self.folder)
        return place

    def clean(self) -> None:
        """Remove what saves of a killed process have left half-written. Once it is sure that the run is ours."""
        for leftover in self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(leftover, ignore_errors=True)  # it hinders nobody

    def restore(self, step: int, state: State) -> State:
        """The state of the step that `place` named, laid out like `state`, which holds shapes and shardings only."""
        try:
            found = read_arrays(self.folder / str(step) / "state", state)
        except Exception as error:
            if out_of_memory(error):
                raise
            raise self._unreadable(step, error) from error
        wrong = [name for name, number in checksums(found).items() if self._checksums.get(name) != number]
        if wrong:
            raise self._unreadable(step, ValueError(f"{', '.join(wrong)} is not what was saved"))
        return found

    def _unreadable(self, step: int, error: Exception) -> UsageError:
        others = [other for other in self._manager.all_steps() if other != step]
        advice = f"Move it away to go on from step {max(others)}." if others else "There is no other one here."
        return UsageError(
            f"The checkpoint {self.folder / str(step)} cannot be read, it is damaged or foreign: {first_line(error)}. "
            f"It was left as it is. {advice}"
        )

    def steps(self) -> list[int]:
        """The steps of all whole checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def _abandon(self, seconds: float = 30) -> None:
        """Give a save that is under way time to finish. What goes wrong with it is not told: another error is."""

        def finish() -> None:
            with contextlib.suppress(Exception):
                self._manager.close()

        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        thread.join(seconds)


def _bytes_here(x: Any) -> int:
    """Bytes of an array, or of a described one, on the devices of this process."""
    shard = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return shard * len(x.sharding.addressable_devices)


def checksums(state: Any) -> dict[str, int]:
    """A number for every array of a state, or of a part of it. It changes when a bit or the order of an array changes,
    and is the same on every mesh."""
    named, _ = jax.tree_util.tree_flatten_with_path(state)
    numbers = jax.device_get(_checksums([x for _, x in named]))
    return {jax.tree_util.keystr(path): int(n) for (path, _), n in zip(named, numbers, strict=True)}


@jax.jit
def _checksums(arrays: list[jax.Array]) -> list[jax.Array]:
    def one(x: jax.Array) -> jax.Array:
        weight = jnp.ones(x.shape, jnp.uint32)
        for dimension, odd in zip(range(x.ndim), (2654435761, 2246822519, 3266489917, 668265263), strict=False):
            weight = weight + 2 * lax.broadcasted_iota(jnp.uint32, x.shape, dimension) * jnp.uint32(odd)
        return jnp.sum(lax.bitcast_convert_type(x, jnp.uint32) * weight, dtype=jnp.uint32)

    return list(map(one, arrays))


def _check_same_run(place: Place, wanted: Place, folder: pathlib.Path) -> None:
    """Raise unless a run with these options can go on from a checkpoint."""
    there = dataclasses.asdict(ModelConfig.from_json(place.model))
    if there != wanted.model:
        other = [f"{k} {there[k]} there, {v} here" for k, v in wanted.model.items() if there[k] != v]
        raise UsageError(
            f"The checkpoint in {folder} is of another model: {', '.join(other)}. Give it the same options."
        )
    flags = {"corpus": "--data", "seed": "--seed", "length": "--sequence-length", "end": "--end-token"}
    for name, flag in flags.items():
        there, here = getattr(place, name), getattr(wanted, name)
        if there != here:
            raise UsageError(
                f"The checkpoint in {folder} was trained with another {flag} ({there} there, {here} here). Give the "
                f"same, or start a new run in another folder."
            )


def write_whole(path: pathlib.Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def out_of_memory(error: Exception) -> bool:
    """Whether devices had no room, which says nothing about what was read."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def first_line(error: Exception) -> str:
    """What an error says, for the middle of a line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300].rstrip(".")

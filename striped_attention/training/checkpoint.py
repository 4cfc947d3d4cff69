"""Checkpoint: save the state of a run in the background, and restore it.

A checkpoint is a folder named after its step. Orbax writes it in the background under a temporary name and renames it
once it is complete on disk. Every folder with a number is therefore complete: a process killed while saving loses only
that save. Besides the arrays, a checkpoint holds a small JSON file: the model's shape, the position in the data, the
data's fingerprint, and a checksum of every array, which detects corruption on disk.
"""

import contextlib
import dataclasses
import math
import pathlib
import re
import shutil
import tempfile
import textwrap
import threading
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import lax

from striped_attention._version import __version__
from striped_attention.errors import UsageError
from striped_attention.models.config import ModelConfig
from striped_attention.training.step import State
from striped_attention.training.storage import open_steps, read_arrays

FORMAT = "striped_attention training state 1"


@dataclasses.dataclass(frozen=True)
class Place:
    """The metadata of a checkpoint. `rows` counts the sequences taken from the data so far.

    `positions` is the longest sequence that the model's rotary positions support, if known. `ids` are the model's
    special tokens, e.g. eos_token_id. Both go into config.json on export; older checkpoints have neither.
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
    """The checkpoints of one run, in one folder. As a context manager, it lets a running save finish on an error."""

    def __init__(self, folder: pathlib.Path, keep: int) -> None:
        self.folder = folder.absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):  # fail now if the folder is not writable
                pass
            self._manager = open_steps(self.folder, max_to_keep=keep, enable_async_checkpointing=True)
        except OSError as error:
            raise UsageError(
                f"--checkpoint-dir {folder} cannot be used: {error.strerror or error}. Choose a writable folder."
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
        """Start a save, after waiting for the previous one. Returns as soon as the arrays are copied."""
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
        """Raise if the disk is too full for a checkpoint. `state` may consist of shapes and shardings only."""
        if lack := self._lack(state):
            raise UsageError(
                f"--checkpoint-dir {self.folder} has no room for a checkpoint: {lack}. Make room or choose another "
                f"folder."
            )

    def _lack(self, state: State) -> str | None:
        """Describe the missing disk space for this process's shards of a checkpoint; None if there is enough."""
        needed = sum(map(_bytes_here, jax.tree.leaves(state)))
        free = shutil.disk_usage(self.folder).free
        if free >= needed:
            return None
        return f"it needs up to {needed / 1e6:,.1f} MB and the disk has {free / 1e6:,.1f} MB left"

    def wait(self) -> None:
        """Wait until the save is complete on disk. Raise UsageError if it failed."""
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
        """The step of the newest checkpoint that is complete on disk. Does not wait for a running save."""
        under_way = self._saving
        done = under_way is not None and (self.folder / str(under_way)).is_dir()  # Orbax renames it once complete
        return under_way if done else self.saved

    def _failed(self, error: Exception) -> UsageError:
        step, self._saving = self._saving, None
        kept = "There is no earlier one" if self.saved is None else f"The checkpoint of step {self.saved} is complete"
        return UsageError(
            f"The checkpoint of step {step} could not be written to {self.folder}: {first_line(error)}. {kept}. Make "
            f"room or choose another --checkpoint-dir, then continue with --resume."
        )

    def place(self, like: Place) -> Place:
        """Return the metadata of the newest checkpoint, which must have the model and data of `like`, a new run."""
        step = self._manager.latest_step()
        if step is None and (self.folder / "run.json").exists():
            return like  # a run that was interrupted before its first checkpoint
        if step is None:
            raise UsageError(
                f"--resume found no checkpoint in {self.folder}. Check --checkpoint-dir, or leave out --resume to "
                f"start at step 0."
            )
        try:
            arguments = ocp.args.Composite(place=ocp.args.JsonRestore())
            said = self._manager.restore(step, args=arguments)["place"]
        except Exception as error:
            raise self._unreadable(step, error) from error
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            raise UsageError(
                f"{self.folder / str(step)} was not written by this version of `striped train` (its format is "
                f"{said.get('format') if isinstance(said, dict) else None!r}, not {FORMAT!r}). It was left unchanged."
            )
        self._checksums = said["checksums"]
        place = Place.from_json(said)
        _check_same_run(place, like, self.folder)
        return place

    def clean(self) -> None:
        """Remove unfinished saves of killed processes. Call only once the folder is known to belong to this run."""
        for leftover in self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(leftover, ignore_errors=True)  # a leftover does no harm

    def restore(self, step: int, state: State) -> State:
        """Return the state of the step that `place` found, sharded like `state` (shapes and shardings only)."""
        try:
            found = read_arrays(self.folder / str(step) / "state", state)
        except Exception as error:
            if out_of_memory(error):
                raise
            raise self._unreadable(step, error) from error
        wrong = [name for name, number in checksums(found).items() if self._checksums.get(name) != number]
        if wrong:
            raise self._unreadable(step, ValueError(f"the checksum of {', '.join(wrong)} does not match"))
        return found

    def _unreadable(self, step: int, error: Exception) -> UsageError:
        others = [other for other in self._manager.all_steps() if other != step]
        advice = f"Move it away to resume from step {max(others)}." if others else "There is no other checkpoint here."
        return UsageError(
            f"The checkpoint {self.folder / str(step)} is damaged or has another format: {damage(error)}. It was left "
            f"unchanged. {advice}"
        )

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def _abandon(self, seconds: float = 30) -> None:
        """Give a running save time to finish. Its errors are dropped: the caller already reports another one."""

        def finish() -> None:
            with contextlib.suppress(Exception):
                self._manager.close()

        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        thread.join(seconds)


def _bytes_here(x: Any) -> int:
    """Bytes of an array or ShapeDtypeStruct on the devices of this process."""
    shard = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return shard * len(x.sharding.addressable_devices)


def checksums(state: Any) -> dict[str, int]:
    """Return a checksum of every array of a state or of a part of it. A checksum depends on every bit and on the order
    of the elements, but not on the mesh."""
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
    """Raise unless a run with these options can resume from a checkpoint."""
    there = dataclasses.asdict(ModelConfig.from_json(place.model))
    if there != wanted.model:
        other = [f"{k} {there[k]} there, {v} here" for k, v in wanted.model.items() if there[k] != v]
        raise UsageError(
            f"The checkpoint in {folder} is of another model: {', '.join(other)}. Use the options of that run."
        )
    flags = {"corpus": "--data", "seed": "--seed", "length": "--length", "end": "--end-token"}
    for name, flag in flags.items():
        there, here = getattr(place, name), getattr(wanted, name)
        if there != here:
            raise UsageError(
                f"The checkpoint in {folder} was trained with another {flag} ({there} there, {here} here). Use the "
                f"same {flag}, or start a new run in another folder."
            )


def write_whole(path: pathlib.Path, text: str) -> None:
    """Write a file atomically: it is complete or unchanged."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def out_of_memory(error: Exception) -> bool:
    """Whether the devices ran out of memory, in which case the data that was read may be fine."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def first_line(error: BaseException) -> str:
    """The first line of an error message, for use inside a sentence."""
    text = str(error).strip() or type(error).__name__
    return textwrap.shorten(text.splitlines()[0], 300, placeholder=" …").rstrip(".")


def damage(error: BaseException) -> str:
    """What is wrong with a checkpoint: the file that cannot be read, if this error or one of its causes names one."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    files = [name for one in causes for name in re.findall(r'local file "([^"]*[^"/])"', str(one))]
    if files:
        return f"{files[0]} cannot be read"
    if "reading array index" in str(error):
        return "an array in it cannot be read"  # TensorStore's message shows a Python object
    return first_line(error).split(" [tensorstore_spec")[0]

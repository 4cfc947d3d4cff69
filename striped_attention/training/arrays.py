"""Arrays: load the weights of a source onto a mesh, in the form that training uses.

No process or device holds more than its own shards. For a Hugging Face model, each shard is read from the files on its
own, one shard at a time. Checkpoints and training both use float32 with all layers of a weight stacked.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from striped_attention.errors import UsageError
from striped_attention.huggingface import Files
from striped_attention.models.config import Weights
from striped_attention.training.checkpoint import checksums, damage, out_of_memory
from striped_attention.training.source import Source
from striped_attention.training.storage import read_arrays

Say = Callable[[int, int], None]  # called with the parameters read so far and their total


def read_stacked(source: Source, mesh: Mesh, say: Say | None = None) -> Weights:
    """Return the weights for training: float32, with all layers of each weight stacked."""
    if source.step is not None:
        return _read_checkpoint(source, mesh)
    shapes, specs = source.model.shapes, source.model.specs(mesh.size)
    inside, done = shapes.pop("layers"), 0
    with Files(source.folder, source.model) as files:

        def one(name: str, shape: tuple[int, ...], spec: Any, stacked: bool) -> jax.Array:
            def read(index: tuple[slice, ...], into: np.ndarray) -> None:
                if not stacked:
                    into[...] = files.part(name, None, index)
                    return
                for layer in range(source.model.layers):
                    into[layer] = files.part(name, layer, index[1:])

            nonlocal done
            placed = place(shape, NamedSharding(mesh, spec), np.float32, read)
            done += placed.size
            if say is not None:
                say(done, source.model.parameters)
            return placed

        return {
            **{name: one(name, shape, specs[name], stacked=False) for name, shape in shapes.items()},
            "layers": {name: one(name, shape, specs["layers"][name], stacked=True) for name, shape in inside.items()},
        }


def check(source: Source) -> None:
    """Raise if the headers of the files do not match config.json. Reads no weights."""
    if source.step is None:
        Files(source.folder, source.model)


def place(
    shape: tuple[int, ...], sharding: NamedSharding, dtype: Any, read: Callable[[tuple[slice, ...], np.ndarray], None]
) -> jax.Array:
    """Build a sharded array on the devices of this process, one shard at a time. `read` fills in a shard."""
    parts: list[jax.Array] = []
    before, part = None, np.empty(0)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        if index != before:  # a replicated shard is read once
            before, part = index, np.empty(sharding.shard_shape(shape), dtype)
            read(index, part)
        parts.append(jax.device_put(part, device, may_alias=False))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _read_checkpoint(source: Source, mesh: Mesh) -> Weights:
    """Return the weights of a checkpoint, with their checksums verified."""
    place = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))  # noqa: E731
    shapes, specs = source.model.shapes, source.model.specs(mesh.size)
    wanted = {"weights": jax.tree.map(place, shapes, specs, is_leaf=lambda x: isinstance(x, tuple))}
    where = source.folder / str(source.step)
    try:
        found = read_arrays(where / "state", wanted, part=True)["weights"]
    except Exception as error:
        if out_of_memory(error):
            raise
        raise UsageError(f"{where} is damaged or has another format: {damage(error)}.") from error
    numbers = {f".weights{name}": number for name, number in checksums(found).items()}
    wrong = [name for name, number in numbers.items() if source.said["checksums"].get(name) != number]
    if wrong:
        raise UsageError(f"{where} is damaged: the checksum of {', '.join(wrong)} does not match.")
    return found

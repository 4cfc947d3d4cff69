"""Arrays: the weights of a source on a mesh, as training has them. No process and no device ever holds a whole copy.

Of a Hugging Face model every device is given its part of each weight, cut out of the files, one part after the other.
Checkpoints hold float32, all layers of a weight stacked, and so does training.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from striped_attention.errors import UsageError
from striped_attention.huggingface import Files
from striped_attention.models.llama import Weights
from striped_attention.training.checkpoint import checksums, first_line, out_of_memory
from striped_attention.training.source import Source
from striped_attention.training.storage import read_arrays

Say = Callable[[int, int], None]  # told how many numbers of how many were read


def read_stacked(source: Source, mesh: Mesh, say: Say | None = None) -> Weights:
    """The weights for training: float32, all layers of one name stacked."""
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
    """Raise if the files do not hold what config.json says, as far as their headers tell; reads no weight."""
    if source.step is None:
        Files(source.folder, source.model)


def place(
    shape: tuple[int, ...], sharding: NamedSharding, dtype: Any, read: Callable[[tuple[slice, ...], np.ndarray], None]
) -> jax.Array:
    """An array whose parts are read one after the other, for the devices of this process. `read` fills one in."""
    parts: list[jax.Array] = []
    before, part = None, np.empty(0)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        if index != before:  # what lies everywhere is read once
            before, part = index, np.empty(sharding.shard_shape(shape), dtype)
            read(index, part)
        parts.append(jax.device_put(part, device, may_alias=False))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _read_checkpoint(source: Source, mesh: Mesh) -> Weights:
    """A checkpoint's weights as they are in it, and checked."""
    place = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))  # noqa: E731
    shapes, specs = source.model.shapes, source.model.specs(mesh.size)
    wanted = {"weights": jax.tree.map(place, shapes, specs, is_leaf=lambda x: isinstance(x, tuple))}
    where = source.folder / str(source.step)
    try:
        found = read_arrays(where / "state", wanted, part=True)["weights"]
    except Exception as error:
        if out_of_memory(error):
            raise
        raise UsageError(f"{where} cannot be read, it is damaged or foreign: {first_line(error)}.") from error
    numbers = {f".weights{name}": number for name, number in checksums(found).items()}
    wrong = [name for name, number in numbers.items() if source.said["checksums"].get(name) != number]
    if wrong:
        raise UsageError(f"{where} is damaged: {', '.join(wrong)} is not what was saved.")
    return found

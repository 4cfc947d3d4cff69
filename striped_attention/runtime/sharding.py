"""Sharding: how the arrays of attention are sharded over a mesh."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from striped_attention.core.annotations import checks_itself
from striped_attention.core.layout import AxisName, Layout, check_layout, count_devices
from striped_attention.core.mask import Mask
from striped_attention.runtime.hardware import hardware_of


def mesh_for(mesh: Any, *arrays: Array) -> Any:
    """Return the mesh with the axis types that match the caller.

    `jax.make_mesh` makes explicit axes, whose shardings are part of an array's type. Callers that do not use such types
    (no jax.set_mesh, plain arrays) get automatic axes, with which results behave like any other array.
    """
    ambient = jax.sharding.get_abstract_mesh()
    if not ambient.empty and ambient.axis_names == mesh.axis_names:
        types = ambient.axis_types
    elif any(name is not None for x in arrays for name in jax.typeof(x).sharding.spec):
        types = mesh.axis_types
    else:
        types = (AxisType.Auto,) * len(mesh.axis_names)
    if types == mesh.axis_types or isinstance(mesh, AbstractMesh):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def reshard(x: Array, mesh: Any, spec: PartitionSpec) -> Array:
    """Reshard an array as `shard_map` requires, if shardings are part of types."""
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    if not explicit:
        return x
    keep = PartitionSpec(*(entry if set(_names(entry)) <= explicit else None for entry in spec))
    return jax.reshard(x, NamedSharding(mesh, keep))


@checks_itself
def shard_batch(
    batch: Any,
    *,
    layout: Layout,
    axis_name: AxisName,
    mesh: Mesh | None = None,
    batch_axis: AxisName | None = None,
    pad: int | Mapping[Any, int] = 0,
) -> Any:
    """Pad, permute and shard everything that belongs to the tokens of a batch, so that all arrays have the same order.

    Args:
      batch: arrays [batch, length, ...] or [length], in sequence order, such as tokens, targets, positions and segment
        ids, in a dictionary or any other pytree. Masks are permuted and sharded too. In a cluster, every process passes
        the whole batch.
      layout, axis_name, mesh: as `attention` takes them.
      batch_axis: the mesh axis, or several, that shards the batch dimension.
      pad: the value of padding; for a dictionary also by name, {"targets": -1}, and 0 for others.

    Returns:
      The same pytree of global arrays in layout order. Shift targets by one token before, in sequence order.
    """
    if mesh is None:
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            raise ValueError("shard_batch needs a mesh: pass mesh=…, or call it under jax.set_mesh(mesh).")
    check_layout(layout)
    devices = count_devices(None, mesh, axis_name)
    leaves, structure = jax.tree.flatten_with_path(batch, is_leaf=lambda x: isinstance(x, Mask))
    lengths = {jax.tree_util.keystr(path): _length(path, x) for path, x in leaves}
    if len(set(lengths.values()) - {None}) > 1:
        each = ", ".join(f"{path} {length}" for path, length in lengths.items() if length is not None)
        raise ValueError(f"All arrays of a batch must have the same length; got {each}.")
    if isinstance(pad, Mapping) and not isinstance(batch, Mapping):
        raise ValueError("pad has values by name, but the batch is not a dictionary. Pass one value.")
    if isinstance(pad, Mapping) and (unknown := set(pad) - set(batch)):
        raise ValueError(f"pad names {sorted(map(str, unknown))}, but the batch has no such arrays.")

    def put(x: Any, rows: Any) -> jax.Array:
        spec = PartitionSpec(axis_name) if x.ndim == 1 else PartitionSpec(rows, axis_name)
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

    def place(path: Any, x: Any) -> Any:
        if isinstance(x, Mask):
            one = lambda x: put(np.asarray(x), batch_axis if x.shape[0] > 1 else None)  # noqa: E731
            return jax.tree.map(one, x.permute(layout, devices))
        value = pad.get(getattr(path[0], "key", None), 0) if isinstance(pad, Mapping) else pad
        if np.asarray(value).astype(np.asarray(x).dtype) != value:
            raise ValueError(f"pad must be a value of dtype {np.asarray(x).dtype}; got {value!r}.")
        return put(layout.permute(np.asarray(x), devices, axis=min(1, np.ndim(x) - 1), pad=value), batch_axis)

    return jax.tree.unflatten(structure, [place(path, x) for path, x in leaves])


def _length(path: Any, x: Any) -> int | None:
    """Return the length of an array of a batch; None for masks that fit any length."""
    if isinstance(x, Mask):
        return x.length
    if np.ndim(x) == 0:
        raise ValueError(
            f"Arrays of a batch must be [batch, length, ...] or [length]; {jax.tree_util.keystr(path) or 'it'} is a "
            f"scalar."
        )
    return int(np.shape(x)[min(1, np.ndim(x) - 1)])


def check_spec(
    spec: PartitionSpec, axis_name: str | tuple[str, ...], mesh: Any, batch: int, heads: int, what: str = "query heads"
) -> int:
    """Raise ValueError unless arrays [batch, length, heads, dim] can be sharded by `spec`. Return the shards of heads.

    `what` says what `heads` counts.
    """
    if len(spec) != 4 or _names(spec[1]) != _names(axis_name) or spec[3] is not None:
        raise ValueError(
            f"spec must describe arrays [batch, length, heads, dim], with length sharded over {axis_name!r} and dim "
            f"not sharded, e.g. P(None, {axis_name!r}, None, None); got {spec}."
        )
    names = [name for entry in spec for name in _names(entry)]
    if len(set(names)) < len(names):
        raise ValueError(f"spec may use each mesh axis only once; got {spec}.")
    parts = 1
    for name, size, entry in (("batch", batch, spec[0]), (what, heads, spec[2])):
        unknown = [name for name in _names(entry) if name not in mesh.axis_names]
        if unknown:
            raise ValueError(f"spec names the axis {unknown[0]!r}, but the mesh has {tuple(mesh.axis_names)}.")
        parts = math.prod(mesh.shape[name] for name in _names(entry))
        if size % parts:
            raise ValueError(
                f"spec shards the {name} over {parts} devices, so that dimension must be divisible by {parts}; got "
                f"{size}. Use another size, or leave that mesh axis out of spec."
            )
    return parts


def current_device() -> tuple[str, str]:
    """Return the platform and kind of the device that the program being traced will run on."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend(), jax.devices()[0].device_kind
    return device.platform, device.device_kind


def fast_neighbours(axis_name: str | tuple[str, ...], platform: str, kind: str) -> int:
    """Return how many consecutive devices of an axis of the current mesh share a fast interconnect.

    This is the size of a node or pod, divided by the sizes of the mesh axes after this one: consecutive devices of the
    mesh fill a node. Of several axes, the last is a node of GPUs, whatever its size; on TPUs only the last is fast,
    unless the whole mesh fits in one pod.
    """
    sizes, group = dict(jax.sharding.get_abstract_mesh().shape), hardware_of(platform, kind).group
    names = _names(axis_name)
    if platform == "gpu" and len(names) > 1:
        return sizes[names[-1]]
    if math.prod(sizes.values()) <= group:
        return group
    order = list(sizes)
    near = max(1, group // math.prod(sizes[name] for name in order[order.index(names[-1]) + 1 :]))
    return near if len(names) == 1 else min(near, sizes[names[-1]])


def is_mesh_axis(axis_name: str | tuple[str, ...]) -> bool:
    """Return whether this is an axis of the mesh of the program being traced, not one of `jax.vmap`."""
    return set(_names(axis_name)) <= set(jax.sharding.get_abstract_mesh().axis_names)


def in_mesh_order(axis_name: str | tuple[str, ...]) -> tuple[str | tuple[str, ...], list[int] | None]:
    """Return the axis name to pass to collectives, and each device's index there; None if indices do not change.

    `lax.axis_index` numbers the devices of several axes in the order of the names, `lax.ppermute` in the order of the
    mesh. With the names in mesh order, all collectives agree.
    """
    shape, names = jax.sharding.get_abstract_mesh().shape, _names(axis_name)
    ordered = tuple(name for name in shape if name in names)
    if len(names) == 1 or ordered == names:
        return axis_name, None
    numbers = np.arange(math.prod(shape[name] for name in names)).reshape([shape[name] for name in ordered])
    return ordered, numbers.transpose([ordered.index(name) for name in names]).reshape(-1).tolist()


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)

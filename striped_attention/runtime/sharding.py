"""Sharding: how the arrays of attention lie on a mesh."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from striped_attention.runtime.hardware import hardware_of


def mesh_for(mesh: Any, *arrays: Array) -> Any:
    """The mesh with the axis types that fit the caller.

    `jax.make_mesh` makes explicit axes, whose shardings are part of an array's type. Callers who do not use such types
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
    """An array as `shard_map` wants it, where shardings are part of types."""
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    if not explicit:
        return x
    keep = PartitionSpec(*(entry if set(_names(entry)) <= explicit else None for entry in spec))
    return jax.reshard(x, NamedSharding(mesh, keep))


def check_spec(spec: PartitionSpec, axis_name: str | tuple[str, ...], mesh: Any, batch: int, kv_heads: int) -> None:
    """Raise unless arrays [batch, length, heads, dim] can be sharded like that."""
    if len(spec) != 4 or _names(spec[1]) != _names(axis_name) or spec[3] is not None:
        raise ValueError(
            f"spec must say how [batch, length, heads, dim] are sharded, the length over {axis_name!r} and dim over "
            f"nothing, like P(None, {axis_name!r}, None, None); got {spec}."
        )
    names = [name for entry in spec for name in _names(entry)]
    if len(set(names)) < len(names):
        raise ValueError(f"spec may name every mesh axis once; got {spec}.")
    for what, size, entry in (("batch", batch, spec[0]), ("key heads", kv_heads, spec[2])):
        unknown = [name for name in _names(entry) if name not in mesh.axis_names]
        if unknown:
            raise ValueError(f"spec names the axis {unknown[0]!r}, but the mesh has {tuple(mesh.axis_names)}.")
        parts = math.prod(mesh.shape[name] for name in _names(entry))
        if size % parts:
            raise ValueError(
                f"spec splits the {what} over {parts} devices, which must divide them; got {size}. Use another {what} "
                f"count, or leave that axis out of spec."
            )


def current_device() -> tuple[str, str]:
    """Platform and kind of the device that the program being traced will run on."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend(), jax.devices()[0].device_kind
    return device.platform, device.device_kind


def fast_neighbours(axis_name: str | tuple[str, ...], platform: str, kind: str) -> int:
    """How many consecutive devices of a mesh axis share a fast interconnect, in the mesh of the program being traced.

    As many as a node or pod has room for, if consecutive devices of the mesh fill it: axes after this one take their
    share. Of several axes the last one is a node of GPUs, whatever its size; on TPUs it alone is fast if not all of the
    mesh has room in a pod.
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
    """Whether it is an axis of the mesh of the program being traced, and not one of `jax.vmap`."""
    return set(_names(axis_name)) <= set(jax.sharding.get_abstract_mesh().axis_names)


def in_mesh_order(axis_name: str | tuple[str, ...]) -> tuple[str | tuple[str, ...], list[int] | None]:
    """The name to give to collectives, and the number there of each device; None if the numbers stay the same.

    `lax.axis_index` counts the devices of several axes in the order of the names, `lax.ppermute` in the order of the
    mesh. With the names in mesh order all collectives agree.
    """
    shape, names = jax.sharding.get_abstract_mesh().shape, _names(axis_name)
    ordered = tuple(name for name in shape if name in names)
    if len(names) == 1 or ordered == names:
        return axis_name, None
    numbers = np.arange(math.prod(shape[name] for name in names)).reshape([shape[name] for name in ordered])
    return ordered, numbers.transpose([ordered.index(name) for name in names]).reshape(-1).tolist()


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)

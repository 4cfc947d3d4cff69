"""The two entries: `attention` for global arrays on a mesh, `attention_shard` for code already inside `jax.shard_map`.

Both check everything that can be checked before anything runs, choose a kernel and start the ring.
"""

import functools
import logging
import math
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from striped_attention import kernel_cudnn, kernel_pallas_tpu, kernel_xla
from striped_attention.bias import Bias
from striped_attention.layout import Layout, check_whole
from striped_attention.mask import Mask
from striped_attention.ring import Ring, ring_attention

# "auto" takes the first that can
KERNELS: dict[str, Any] = {"cudnn": kernel_cudnn, "pallas_tpu": kernel_pallas_tpu, "xla": kernel_xla}
_DTYPES = ("float32", "bfloat16", "float16", "float64")


@no_type_check  # the checks below say more than a type checker would
def attention(
    query: Float[Array, "batch length heads dim"],
    key: Float[Array, "batch length kv_heads dim"],
    value: Float[Array, "batch length kv_heads dim"],
    *,
    axis_name: str,
    layout: Layout,
    mask: Mask,
    mesh: Mesh | AbstractMesh | None = None,
    spec: PartitionSpec | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Float[Array, " heads"] | None = None,
    kernel: str = "auto",
    tile: int | tuple[int, int] | None = None,
    length: int | None = None,
) -> Float[Array, "batch length heads dim"]:
    """Exact attention over one long sequence that is spread over the devices of a mesh axis.

    Shapes and names follow `jax.nn.dot_product_attention`. The arrays are global and in layout order along their length
    (`layout.permute`); so is the result.

    Args:
      axis_name: the mesh axis that the sequence is spread over.
      layout: `striped()`, `striped(stripe)`, `contiguous()` or `zigzag()`, the same that permuted the arrays.
      mask: which keys a query sees, in text order: `causal()`, `documents(segment_ids)`, …; it is permuted for you.
      mesh: the device mesh; by default the one of `jax.set_mesh`.
      spec: how query, key and value are sharded, for example P("data", "sequence", "model", None).
      scale: what scores are multiplied with; 1/√dim by default.
      softcap: scores become softcap · tanh(score / softcap).
      bias: `alibi(slopes)` or `relative_bias(table)`, added to the scores.
      sinks: one logit a head that takes part in the softmax and has no value (attention sinks).
      kernel: "auto", "xla" (plain JAX: everything, everywhere), "cudnn" (NVIDIA GPUs) or "pallas_tpu" (TPUs). What
        "auto" takes, the fastest that can do what is asked, it says through `logging`, at level INFO.
      tile: the kernel's tile, queries × keys, or one number for a square; the kernel knows a good default.
      length: the number of real tokens, when the arrays were padded; what lies past it is never seen. A `documents`
        mask knows it already, unless the arrays were padded further than they need.

    Returns:
      An array of the shape and dtype of `query`. Rows that see no key, padding among them, are 0.
    """
    mesh = _check_mesh(mesh, axis_name)
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"axis_name must be an axis of the mesh; got {axis_name!r}, and the mesh has {tuple(mesh.axis_names)}."
        )
    spec = PartitionSpec(*((None, axis_name, None, None) if spec is None else spec))
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    sinks = None if sinks is None else jnp.asarray(sinks)
    devices = mesh.shape[axis_name]
    check_arrays(query, key, value, bias, sinks)
    check_spec(spec, axis_name, mesh, query.shape[0], key.shape[2])
    length = _check_length(query.shape[1], length, mask, layout, devices)
    _check_batch(mask, query.shape[0])
    tile = check_options(scale, softcap, kernel, tile)
    options = dict(
        axis_name=axis_name, layout=layout, scale=scale, softcap=softcap, kernel=kernel, tile=tile, length=length
    )
    return _on_mesh(
        *(query, key, value, mask.permute(layout, devices, query.shape[1]), bias, sinks),
        mesh=mesh_for(mesh, query, key, value),
        spec=spec,
        options=tuple(options.items()),
    )


@no_type_check
def attention_shard(
    query: Float[Array, "batch slots heads dim"],
    key: Float[Array, "batch slots kv_heads dim"],
    value: Float[Array, "batch slots kv_heads dim"],
    *,
    axis_name: str,
    layout: Layout,
    mask: Mask,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Float[Array, " heads"] | None = None,
    kernel: str = "auto",
    tile: int | tuple[int, int] | None = None,
    length: int | None = None,
) -> Float[Array, "batch slots heads dim"]:
    """`attention` for code that is already inside `jax.shard_map`: every array is this device's part.

    The arguments mean what they mean there. A `documents` mask enters `shard_map` as `mask.permute(layout, devices)`,
    sharded like [batch, length]; bias and sinks hold this device's heads.
    """
    try:
        devices = lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name must be a mesh axis of the shard_map around this call; {axis_name!r} is not. Outside of "
            f"shard_map call `attention`."
        ) from None
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    sinks = None if sinks is None else jnp.asarray(sinks)
    check_arrays(query, key, value, bias, sinks)
    padded_length = query.shape[1] * devices
    length = _check_length(padded_length, length, mask, layout, devices)
    if mask.length is not None and mask.placed != (layout, devices):
        raise ValueError(
            f"A documents mask must enter shard_map in the order of {layout!r} on {devices} devices; this one is "
            f"{'in text order' if mask.placed is None else f'in that of {mask.placed[0]!r} on {mask.placed[1]}'}. "
            f"Pass mask.permute(layout, devices) through shard_map's in_specs."
        )
    for array in (mask.lo, mask.hi):
        if array is not None and array.shape[1] != query.shape[1]:
            raise ValueError(
                f"The mask's part on this device covers {array.shape[1]} slots, the query's {query.shape[1]}. Give "
                f"shard_map the same spec for the mask as for [batch, length] of the query, and if the arrays were "
                f"padded further than they need, mask.permute(layout, devices, slots={padded_length})."
            )
    _check_batch(mask, query.shape[0])
    tile = check_options(scale, softcap, kernel, tile)
    what = dict(softcap=softcap, bias=bias, mask=mask, layout=layout, devices=devices, tile=tile)
    kernel = choose_kernel(kernel, query, key, padded=padded_length != length, platform=platform(), **what)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)
    ring = Ring(axis_name, devices, layout, length, padded_length, KERNELS[kernel], scale, softcap, tile)
    return ring_attention(ring, query, key, value, mask, bias, sinks)


@functools.partial(jax.jit, static_argnames=("mesh", "spec", "options"))
def _on_mesh(
    query: Array, key: Array, value: Array, mask: Mask, bias: Any, sinks: Any, *, mesh: Any, spec: Any, options: Any
) -> Array:
    batch, sequence, heads, _ = spec
    per_head = PartitionSpec(heads)
    mask_specs = jax.tree.map(lambda x: PartitionSpec(batch if x.shape[0] == len(query) else None, sequence), mask)
    inputs = (query, key, value, mask, bias, sinks)
    specs = (spec, spec, spec, mask_specs, jax.tree.map(lambda _: per_head, bias), None if sinks is None else per_head)
    inputs = jax.tree.map(lambda x, spec: reshard(x, mesh, spec), inputs, specs)

    def shard(query: Array, key: Array, value: Array, mask: Mask, bias: Any, sinks: Any) -> Array:
        return attention_shard(query, key, value, mask=mask, bias=bias, sinks=sinks, **dict(options))

    return jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=spec)(*inputs)


def _check_mesh(mesh: Any, axis_name: str) -> Any:
    """The mesh, by default the ambient one."""
    ambient = jax.sharding.get_abstract_mesh()
    if axis_name in ambient.manual_axes:
        raise ValueError(f"This code is inside a shard_map over {axis_name!r}: call `attention_shard` here.")
    if mesh is None and ambient.empty:
        raise ValueError("attention needs a mesh: pass mesh=…, or call it under jax.set_mesh(mesh).")
    if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ValueError(f"mesh must be a jax.sharding.Mesh; got {mesh!r}. jax.make_mesh makes one.")
    return ambient if mesh is None else mesh


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


def check_spec(spec: PartitionSpec, axis_name: str, mesh: Any, batch: int, kv_heads: int) -> None:
    """Raise unless arrays [batch, length, heads, dim] can be sharded like that."""
    if len(spec) != 4 or spec[1] != axis_name or spec[3] is not None:
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


def check_arrays(query: Any, key: Any, value: Any, bias: Any, sinks: Any) -> None:
    """Raise unless shapes and dtypes fit each other."""
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not (query.ndim == key.ndim == value.ndim == 4):
        raise ValueError(f"query, key and value must be [batch, length, heads, dim]; got {shapes}.")
    if key.shape != value.shape:
        raise ValueError(f"key and value must have one shape; got {shapes}.")
    if query.shape[:2] != key.shape[:2]:
        raise ValueError(f"query and key must have the same batch and length; got {shapes}.")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key must have the same dim; got {shapes}.")
    if 0 in query.shape or 0 in key.shape:
        raise ValueError(f"query, key and value must not be empty; got {shapes}.")
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads % kv_heads:
        raise ValueError(
            f"The number of query heads must be a multiple of the number of key heads; got {heads} and {kv_heads}."
        )
    dtypes = [str(x.dtype) for x in (query, key, value)]
    if len(set(dtypes)) > 1 or dtypes[0] not in _DTYPES:
        raise ValueError(
            f"query, key and value must have one dtype out of {', '.join(_DTYPES)}; got {', '.join(dtypes)}. "
            f"Cast them with .astype."
        )
    if bias is not None and not isinstance(bias, Bias):
        raise ValueError(f"bias must be made by alibi(…) or relative_bias(…); got {type(bias).__name__}.")
    if bias is not None and bias.heads != heads:
        raise ValueError(f"The bias must have one entry per query head, {heads}; got {bias.heads}.")
    if sinks is not None and (sinks.shape != (heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        raise ValueError(
            f"sinks must be floating point of shape ({heads},), one a head; got {sinks.dtype}{sinks.shape}."
        )


def _check_length(padded_length: int, length: Any, mask: Any, layout: Any, devices: int) -> int:
    """The number of real tokens."""
    if not isinstance(layout, Layout):
        raise ValueError(f"layout must be striped(), contiguous() or zigzag(); got {layout!r}.")
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask must be made by causal(), documents(…) and the like; got {type(mask).__name__}. Dense boolean masks "
            f"do not fit long sequences."
        )
    layout.positions(0, padded_length, devices)
    if length is None and mask.length is not None:
        fitting = layout.padded_length(mask.length, devices)
        if fitting != padded_length:
            raise ValueError(
                f"The mask was made for a text of {mask.length} tokens (the width of its segment ids), which "
                f"{layout!r} pads to {fitting} on {devices} devices; the arrays hold {padded_length}. Make the mask "
                f"from segment ids of the same text, or pass length={mask.length} if the rest is padding."
            )
        length = mask.length
    length = check_whole("length", padded_length if length is None else length)
    if length > padded_length:
        raise ValueError(
            f"length, the number of real tokens, must be between 1 and the arrays' length {padded_length}; "
            f"got {length}."
        )
    mask.check_length(length)
    return length


def _check_batch(mask: Mask, batch: int) -> None:
    for array in (mask.lo, mask.hi):
        if array is not None and array.shape[0] not in (1, batch):
            raise ValueError(
                f"A documents mask needs a row of segment ids for each of the {batch} sequences, or one for all; "
                f"got {array.shape[0]}."
            )


def check_options(scale: Any, softcap: Any, kernel: str, tile: Any) -> tuple[int, int] | None:
    """The tile as a pair."""
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not (isinstance(value, (int, float, np.number)) and math.isfinite(value.real)):
            raise ValueError(f"{name} must be a plain, finite number, known while tracing; got {value!r}.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, or None for no cap; got {softcap!r}.")
    if kernel not in ("auto", *KERNELS):
        raise ValueError(f"kernel must be one of {['auto', *KERNELS]}; got {kernel!r}.")
    if tile is None:
        return None
    pair = (tile, tile) if isinstance(tile, (int, np.integer)) else tile
    if not (isinstance(pair, tuple) and len(pair) == 2):
        raise ValueError(f"tile must be a whole number, or a pair (queries, keys) of them; got {tile!r}.")
    return check_whole("tile", pair[0]), check_whole("tile", pair[1])


def choose_kernel(name: str, query: Any, key: Any, **what: Any) -> str:
    """The name of the kernel to use: for "auto" the first that can do what is asked. Raises if a named one cannot.

    Looks only at the shapes and dtypes of query and key. What "auto" chose, and why, is logged at level INFO.
    """
    if name != "auto" and KERNELS[name].unsupported(query, key, **what) is None:
        return name
    refusals = {other: kernel.unsupported(query, key, **what) for other, kernel in KERNELS.items()}
    able = [other for other, reason in refusals.items() if reason is None]
    if name == "auto":
        others = "".join(f" Not {other!r}: {reason}" for other, reason in refusals.items() if reason is not None)
        logging.getLogger("striped_attention").info("kernel='auto' takes %r.%s", able[0], others)
        return able[0]
    raise NotImplementedError(f"Kernel {name!r} cannot do this: {refusals[name]} Use kernel={able[0]!r}.")


def platform() -> str:
    """What the program that is being traced will run on."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)

"""Public entry points: `attention` for global arrays on a mesh, `attention_shard` for code inside `jax.shard_map`.

Both validate their arguments before anything runs, choose a strategy and a kernel, and run them.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from striped_attention.core.annotations import checks_itself
from striped_attention.core.arguments import check_arrays, check_batch, check_context, check_length, check_options
from striped_attention.core.bias import Bias
from striped_attention.core.checks import check_positions, poison
from striped_attention.core.layout import AxisName, Layout, check_axis, count_devices
from striped_attention.core.mask import Mask
from striped_attention.core.partial import Partial
from striped_attention.kernels.choice import check_name, choose
from striped_attention.kernels.contract import make_request
from striped_attention.runtime.sharding import (
    check_spec,
    current_device,
    fast_neighbours,
    is_mesh_axis,
    mesh_for,
    reshard,
)
from striped_attention.strategies.choice import choose_strategy
from striped_attention.strategies.problem import Problem
from striped_attention.strategies.ring import ring_attention
from striped_attention.strategies.strategy import AUTO, Strategy, check_strategy, exchanged


@checks_itself
def attention(
    query: Float[Array | np.ndarray, "batch length heads dim"],
    key: Float[Array | np.ndarray, "batch key_length kv_heads dim"],
    value: Float[Array | np.ndarray, "batch key_length kv_heads value_dim"],
    *,
    axis_name: AxisName,
    layout: Layout,
    mask: Mask,
    mesh: Mesh | AbstractMesh | None = None,
    spec: PartitionSpec | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Float[Array | np.ndarray, " heads"] | None = None,
    strategy: str | Strategy = AUTO,
    kernel: str = "auto",
    tile: int | tuple[int, int] | None = None,
    deterministic: bool = False,
    length: int | None = None,
    positions: Int[Array | np.ndarray, "*rows length"] | None = None,
    return_lse: bool = False,
    key_length: int | None = None,
    offset: int = 0,
) -> Float[Array, "batch length heads value_dim"]:
    """Compute exact attention over sequences that are sharded over a mesh axis.

    Shapes and names follow `jax.nn.dot_product_attention`. All arrays are global. Inputs and output are in layout order
    along the sequence dimension (`layout.permute`).

    Args:
      axis_name: the mesh axis that shards the sequence; or several, e.g. ("node", "gpu"), the last one with the fastest
        interconnect.
      layout: `striped()`, `striped(stripe)`, `contiguous()` or `zigzag()`; the layout that permuted the arrays.
      mask: which keys a query sees, in sequence order: `causal()`, `documents(segment_ids)`, …; permuted automatically.
      mesh: the device mesh; by default the one set by `jax.set_mesh`.
      spec: how query, key and value are sharded, e.g. P("data", "sequence", "model", None). Key heads that are too few
        for an axis that shards heads (GQA, MQA) are replicated as little as needed.
      scale: the factor that scores are multiplied by; 1/√dim by default.
      softcap: scores become softcap · tanh(score / softcap).
      bias: `alibi(slopes)` or `relative_bias(table)`, added to the scores.
      sinks: attention sinks, one logit per head; each takes part in the softmax but has no value.
      strategy: how queries meet the keys of other devices. "ring": keys and values travel from device to device.
        "heads": each device gets the whole sequence for its share of the heads (Ulysses). "gather": each device gathers
        all keys and values. `sa.strategy(heads=…, gather=…, inner=…)` combines them; `inner` makes a double ring. All
        strategies give the same result. "auto" takes the one that the planner's cost model expects to be fastest for
        these shapes, mask and hardware, of those that fit in memory, and logs it at level INFO.
      kernel: "auto", "xla" (plain JAX: supports everything on any platform), "cudnn" (NVIDIA GPUs), "hopper" (H100 and
        H200) or "pallas_tpu" (TPUs). "auto" takes the fastest kernel that supports the call and logs it at level INFO.
        If another would be much faster but does not support the call, a `SlowKernelWarning` gives the reason.
      tile: the kernel's tile (queries, keys), or one integer for a square tile; every kernel has a good default.
      deterministic: whether gradients must be bitwise identical in every run on the same devices and software versions.
        Excludes kernels that sum in varying order, such as `cudnn`. The forward pass is always deterministic.
      length: the number of real tokens if the arrays were padded; padding is never attended to. A `documents` mask
        already knows it, unless the arrays were padded further than necessary.
      positions: optional, and only checked: the position of the token in every slot, [length] or [batch, length],
        permuted together with the tokens. Raises if the arrays are not in the expected order (not permuted, permuted
        for another layout or number of devices, or with padding that counts as real). If positions are known only at
        run time, the result is NaN instead, and SA_CHECK=1 logs the reason.
      return_lse: return a `Partial`: the output in float32, and the log-sum-exp of every row's scores. `merge` combines
        it with attention to other keys. Both have gradients.
      key_length: the number of real keys, if key and value belong to another sequence than query (cross attention),
        permuted by the same layout. By default, all of them if there are fewer or more than queries.
      offset: the place of the first query among the keys, for queries that continue a longer sequence.

    Returns:
      An array of the dtype of `query`, with heads as wide as those of `value`. Rows that see no key are 0, such as
      padding.
    """
    mesh = _check_mesh(mesh, axis_name)
    spec = PartitionSpec(*((None, axis_name, None, None) if spec is None else spec))
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    sinks = None if sinks is None else jnp.asarray(sinks)
    devices = count_devices(None, mesh, axis_name)
    check_arrays(query, key, value, bias, sinks)
    parts = check_spec(spec, axis_name, mesh, query.shape[0], query.shape[2])
    length = check_length(query.shape[1], length, mask, layout, devices)
    check_context(length, query.shape[1], key_length, key.shape[1], offset, mask, layout, devices)
    check_batch(mask, query.shape[0])
    check_name(kernel)
    check_strategy(strategy, devices)
    _check_flag("deterministic", deterministic)
    tile = check_options(scale, softcap, tile)
    ok = None
    if positions is not None:
        expected = layout.order(query.shape[1], devices) + np.int32(offset)
        ok = check_positions(positions, expected, query.shape[0], length + offset, layout, devices)
    options = dict(
        axis_name=axis_name,
        layout=layout,
        scale=scale,
        softcap=softcap,
        strategy=strategy,
        kernel=kernel,
        tile=tile,
        deterministic=deterministic,
        length=length,
        return_lse=_check_flag("return_lse", return_lse),
        key_length=key_length,
        offset=offset,
    )
    with _forward_mode_refused():
        out = _on_mesh(
            *(query, key, value, mask.permute(layout, devices, query.shape[1]), bias, sinks),
            mesh=mesh_for(mesh, query, key, value),
            spec=spec,
            copies=Strategy(heads=parts).key_copies(query.shape[2], key.shape[2]),
            options=tuple(options.items()),
        )
    return jax.tree.map(lambda x: poison(x, ok), out)


@checks_itself
def attention_shard(
    query: Float[Array | np.ndarray, "batch slots heads dim"],
    key: Float[Array | np.ndarray, "batch key_slots kv_heads dim"],
    value: Float[Array | np.ndarray, "batch key_slots kv_heads value_dim"],
    *,
    axis_name: AxisName,
    layout: Layout,
    mask: Mask,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Float[Array | np.ndarray, " heads"] | None = None,
    strategy: str | Strategy = AUTO,
    kernel: str = "auto",
    tile: int | tuple[int, int] | None = None,
    deterministic: bool = False,
    length: int | None = None,
    positions: Int[Array | np.ndarray, "*rows slots"] | None = None,
    return_lse: bool = False,
    key_length: int | None = None,
    offset: int = 0,
) -> Float[Array, "batch slots heads value_dim"]:
    """Compute `attention` inside `jax.shard_map`, where every array is this device's shard.

    The arguments are those of `attention`. A `documents` mask enters `shard_map` as `mask.permute(layout, devices)`,
    sharded like [batch, length]; bias and sinks hold this device's heads.
    """
    try:
        devices = lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name must be a mesh axis of the shard_map around this call; {axis_name!r} is not. Outside "
            f"shard_map, call `attention`."
        ) from None
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    sinks = None if sinks is None else jnp.asarray(sinks)
    check_arrays(query, key, value, bias, sinks)
    padded_length = query.shape[1] * devices
    length = check_length(padded_length, length, mask, layout, devices)
    if mask.length is not None and mask.placed != (layout, devices):
        raise ValueError(
            f"A documents mask must enter shard_map in the order of {layout!r} on {devices} devices; this one is in "
            f"{'sequence order' if mask.placed is None else f'the order of {mask.placed[0]!r} on {mask.placed[1]}'}. "
            f"Pass mask.permute(layout, devices) through shard_map's in_specs."
        )
    for array in (mask.lo, mask.hi):
        if array is not None and array.shape[1] != query.shape[1]:
            raise ValueError(
                f"The mask's shard on this device must cover as many slots as the query's, {query.shape[1]}; got "
                f"{array.shape[1]}. Give shard_map the same spec for the mask as for [batch, length] of the query. If "
                f"the arrays were padded further than necessary, use mask.permute(layout, devices, "
                f"slots={padded_length})."
            )
    slots = key.shape[1] * devices
    context = check_context(length, padded_length, key_length, slots, offset, mask, layout, devices)
    check_batch(mask, query.shape[0])
    tile = check_options(scale, softcap, tile)
    platform, kind = current_device()
    plain = make_request(
        query,
        key,
        mask=mask,
        layout=layout,
        devices=devices,
        length=length,
        bias=bias,
        softcap=softcap,
        deterministic=deterministic,
        lse=_check_flag("return_lse", return_lse),
        context=context is not None,
        value_dim=value.shape[3],
        tile=tile,
        platform=platform,
        device_kind=kind,
    )
    if is_mesh_axis(axis_name):
        chosen = choose_strategy(strategy, plain, kernel, neighbours=fast_neighbours(axis_name, platform, kind))
    else:
        chosen = _of_vmap(choose_strategy("ring" if strategy == AUTO else strategy, plain, kernel), axis_name)
    attend = choose(kernel, exchanged(chosen, plain)).kernel
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)
    problem = Problem(
        *(axis_name, devices, layout, length, padded_length, attend, scale, softcap, tile, chosen),
        deterministic=deterministic,
        lse=return_lse,
        context=context,
    )
    ok = None
    if positions is not None:
        expected = layout.positions(lax.axis_index(axis_name), padded_length, devices) + np.int32(offset)
        ok = check_positions(positions, expected, query.shape[0], length + offset, layout, devices)
    with _forward_mode_refused():
        out = ring_attention(problem, query, key, value, mask, bias, sinks)
    return jax.tree.map(lambda x: poison(x, ok), out)


def _check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False; got {value!r}.")
    return value


def _of_vmap(chosen: Strategy, axis_name: AxisName) -> Strategy:
    """Return the strategy; raise if it needs collectives that JAX does not have for axes of `jax.vmap`."""
    if chosen.group > 1 or (isinstance(axis_name, tuple) and len(axis_name) > 1):
        raise ValueError(
            f"Over axes of jax.vmap, attention must use a ring over a single axis; got strategy {chosen} and "
            f"axis_name={axis_name!r}. Pass strategy='ring', or use jax.shard_map."
        )
    return chosen


@contextlib.contextmanager
def _forward_mode_refused() -> Iterator[None]:
    """Replace JAX's error about a missing forward-mode derivative with one that names the alternatives.

    Under an outer `jit`, and for `jax.linearize`, JAX detects this only after the call and raises its own TypeError.
    """
    try:
        yield
    except (TypeError, NotImplementedError) as error:
        if not any(word in str(error) for word in ("forward-mode", "custom_lin", "'Unhashable'")):
            raise
        raise NotImplementedError(
            "Forward-mode derivatives of attention (jax.jvp, jax.jacfwd) are not supported. Use jax.grad or jax.vjp; "
            "for Hessian-vector products use jax.jvp(jax.grad(f), (x,), (v,)) with kernel='xla'."
        ) from error


@functools.partial(jax.jit, static_argnames=("mesh", "spec", "copies", "options"))
def _on_mesh(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    bias: Any,
    sinks: Any,
    *,
    mesh: Any,
    spec: Any,
    copies: int,
    options: Any,
) -> Any:
    batch, sequence, heads, _ = spec
    if copies > 1:
        whole = PartitionSpec(batch, sequence, None, None)
        key, value = (jnp.repeat(reshard(x, mesh, whole), copies, axis=2) for x in (key, value))
    per_head = PartitionSpec(heads)
    mask_specs = jax.tree.map(lambda x: PartitionSpec(batch if x.shape[0] == len(query) else None, sequence), mask)
    inputs = (query, key, value, mask, bias, sinks)
    specs = (spec, spec, spec, mask_specs, jax.tree.map(lambda _: per_head, bias), None if sinks is None else per_head)
    inputs = jax.tree.map(lambda x, spec: reshard(x, mesh, spec), inputs, specs)

    def shard(query: Array, key: Array, value: Array, mask: Mask, bias: Any, sinks: Any) -> Any:
        return attention_shard(query, key, value, mask=mask, bias=bias, sinks=sinks, **dict(options))

    per_row: Any = PartitionSpec(*spec[:3])
    out_specs: Any = Partial(spec, per_row) if dict(options)["return_lse"] else spec
    return jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=out_specs)(*inputs)


def _check_mesh(mesh: Any, axis_name: Any) -> Any:
    """Return the mesh, by default the one set by `jax.set_mesh`; raise unless it has the axis."""
    ambient = jax.sharding.get_abstract_mesh()
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if any(name in tuple(ambient.manual_axes) for name in names):
        raise ValueError(f"This code is inside a shard_map over {axis_name!r}: call `attention_shard` here.")
    if mesh is None and ambient.empty:
        raise ValueError("attention needs a mesh: pass mesh=…, or call it under jax.set_mesh(mesh).")
    mesh = ambient if mesh is None else mesh
    check_axis(mesh, axis_name)
    return mesh

"""The two entries: `attention` for global arrays on a mesh, `attention_shard` for code already inside `jax.shard_map`.

Both check everything that can be checked before anything runs, choose a kernel and follow the strategy.
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
from striped_attention.core.arguments import check_arrays, check_batch, check_length, check_options
from striped_attention.core.bias import Bias
from striped_attention.core.checks import check_positions, poison
from striped_attention.core.layout import AxisName, Layout, check_axis, count_devices
from striped_attention.core.mask import Mask
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
    key: Float[Array | np.ndarray, "batch length kv_heads dim"],
    value: Float[Array | np.ndarray, "batch length kv_heads dim"],
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
) -> Float[Array, "batch length heads dim"]:
    """Exact attention over one long sequence that is spread over the devices of a mesh axis.

    Shapes and names follow `jax.nn.dot_product_attention`. The arrays are global and in layout order along their length
    (`layout.permute`); so is the result.

    Args:
      axis_name: the mesh axis that the sequence is spread over; or several, like ("node", "gpu"), the last one with
        the fastest interconnect.
      layout: `striped()`, `striped(stripe)`, `contiguous()` or `zigzag()`, the same that permuted the arrays.
      mask: which keys a query sees, in text order: `causal()`, `documents(segment_ids)`, …; it is permuted for you.
      mesh: the device mesh; by default the one of `jax.set_mesh`.
      spec: how query, key and value are sharded, for example P("data", "sequence", "model", None).
      scale: what scores are multiplied with; 1/√dim by default.
      softcap: scores become softcap · tanh(score / softcap).
      bias: `alibi(slopes)` or `relative_bias(table)`, added to the scores.
      sinks: one logit per head that takes part in the softmax and has no value (attention sinks).
      strategy: how queries and keys come to meet. "ring": keys travel from device to device. "heads": each device gets
        the whole sequence for its share of the heads (Ulysses). "gather": each device gathers all keys. Or
        `sa.strategy(heads=…, gather=…, inner=…)`, groups of neighbours and a ring of groups, with `inner` a double
        ring. All give the same answer. "auto" takes the one that the planner's cost model expects to be fastest for
        these shapes, this mask and this hardware, of those that fit in memory, and logs it at level INFO.
      kernel: "auto", "xla" (plain JAX: everything, everywhere), "cudnn" (NVIDIA GPUs), "hopper" (H100 and H200; not
        measured yet, so "auto" does not take it) or "pallas_tpu" (TPUs). What "auto" takes, the fastest that can do
        what is asked, it says through `logging`, at level INFO; where that is a slow one on a GPU or TPU, a
        `SlowKernelWarning` says why.
      tile: the kernel's tile, queries × keys, or one number for a square; the kernel knows a good default.
      deterministic: whether gradients must be the same bits in every run, on the same devices and versions. Kernels
        that add up in changing order, `cudnn` among them, are not used then. The forward pass always is.
      length: the number of real tokens, when the arrays were padded; what lies past it is never seen. A `documents`
        mask knows it already, unless the arrays were padded further than they need.
      positions: optional, and only checked: the position of the token in every slot, [length] or [batch, length],
        permuted by you together with the tokens. Arrays that are in another order than attention expects (not
        permuted, for another layout or number of devices, or with padding that counts as real) then raise; where
        positions are known only when the program runs, the result is NaN, and with SA_CHECK=1 the reason is logged.

    Returns:
      An array of the shape and dtype of `query`. Rows that see no key, padding among them, are 0.
    """
    mesh = _check_mesh(mesh, axis_name)
    spec = PartitionSpec(*((None, axis_name, None, None) if spec is None else spec))
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    sinks = None if sinks is None else jnp.asarray(sinks)
    devices = count_devices(None, mesh, axis_name)
    check_arrays(query, key, value, bias, sinks)
    check_spec(spec, axis_name, mesh, query.shape[0], key.shape[2])
    length = check_length(query.shape[1], length, mask, layout, devices)
    check_batch(mask, query.shape[0])
    check_name(kernel)
    check_strategy(strategy, devices)
    if not isinstance(deterministic, bool):
        raise ValueError(f"deterministic must be True or False; got {deterministic!r}.")
    tile = check_options(scale, softcap, tile)
    ok = None
    if positions is not None:
        expected = layout.order(query.shape[1], devices)
        ok = check_positions(positions, expected, query.shape[0], length, layout, devices)
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
    )
    with _forward_mode_refused():
        out = _on_mesh(
            *(query, key, value, mask.permute(layout, devices, query.shape[1]), bias, sinks),
            mesh=mesh_for(mesh, query, key, value),
            spec=spec,
            options=tuple(options.items()),
        )
    return poison(out, ok)


@checks_itself
def attention_shard(
    query: Float[Array | np.ndarray, "batch slots heads dim"],
    key: Float[Array | np.ndarray, "batch slots kv_heads dim"],
    value: Float[Array | np.ndarray, "batch slots kv_heads dim"],
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
    length = check_length(padded_length, length, mask, layout, devices)
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
        axis_name, devices, layout, length, padded_length, attend, scale, softcap, tile, chosen, deterministic
    )
    ok = None
    if positions is not None:
        expected = layout.positions(lax.axis_index(axis_name), padded_length, devices)
        ok = check_positions(positions, expected, query.shape[0], length, layout, devices)
    with _forward_mode_refused():
        out = ring_attention(problem, query, key, value, mask, bias, sinks)
    return poison(out, ok)


def _of_vmap(chosen: Strategy, axis_name: AxisName) -> Strategy:
    """The same strategy; raises if it needs collectives that JAX does not have for axes of `jax.vmap`."""
    if chosen.group > 1 or (isinstance(axis_name, tuple) and len(axis_name) > 1):
        raise ValueError(
            f"Over an axis of jax.vmap attention can only be a ring, and over a single axis; got strategy {chosen} and "
            f"axis_name={axis_name!r}. Pass strategy='ring', or use jax.shard_map."
        )
    return chosen


@contextlib.contextmanager
def _forward_mode_refused() -> Iterator[None]:
    """Say what to do instead where JAX finds no forward-mode derivative.

    Under an outer `jit`, and for `jax.linearize`, JAX finds out after this call, and raises a TypeError of its own.
    """
    try:
        yield
    except (TypeError, NotImplementedError) as error:
        if not any(word in str(error) for word in ("forward-mode", "custom_lin", "'Unhashable'")):
            raise
        raise NotImplementedError(
            "Forward-mode derivatives of attention (jax.jvp, jax.jacfwd of it) are not supported. Use "
            "jax.grad or jax.vjp; for products with a Hessian jax.jvp(jax.grad(f), (x,), (v,)), with kernel='xla'."
        ) from error


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


def _check_mesh(mesh: Any, axis_name: Any) -> Any:
    """The mesh, by default the ambient one."""
    ambient = jax.sharding.get_abstract_mesh()
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if any(name in tuple(ambient.manual_axes) for name in names):
        raise ValueError(f"This code is inside a shard_map over {axis_name!r}: call `attention_shard` here.")
    if mesh is None and ambient.empty:
        raise ValueError("attention needs a mesh: pass mesh=…, or call it under jax.set_mesh(mesh).")
    mesh = ambient if mesh is None else mesh
    check_axis(mesh, axis_name)
    return mesh

"""Adapters: attention with the signatures that models call, of `jax.nn.dot_product_attention` and of Flax.

What they cannot honour they refuse: dense masks and bias arrays have length² entries, and dropout needs the attention
weights, which are never materialised. Instead of a dense mask they take one of this library, such as
`documents(segment_ids)`, in the same argument.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from striped_attention.attention import attention, attention_shard
from striped_attention.core.annotations import checks_itself
from striped_attention.core.bias import Bias
from striped_attention.core.layout import BASELINE, INT32_MAX, AxisName, Layout, count_devices
from striped_attention.core.mask import Mask, causal, full, ranges, window
from striped_attention.core.partial import Partial

KERNELS = {None: "auto", "xla": "xla", "cudnn": "cudnn"}  # by `implementation` of jax.nn.dot_product_attention


@checks_itself
def attention_fn(
    *,
    axis_name: AxisName,
    layout: Layout,
    mask: Mask | None = None,
    order: Literal["sequence", "layout"] = "sequence",
    **options: Any,
) -> Callable[..., Array]:
    """Return a function for `attention_fn=` of Flax's attention modules, NNX and Linen.

    Args:
      axis_name: the mesh axis that shards the sequence. The mesh is the one set by `jax.set_mesh`, or `mesh=`.
      layout: how tokens are distributed over its devices.
      mask: which keys a query sees; by default all, or those up to its own position if the module asks for
        `is_causal`. The module's argument `mask` may be another one, as for packed documents, and both apply.
      order: "sequence" if the model's arrays are in sequence order: they are permuted and restored around every call.
        "layout" if the model permutes its tokens once, before the first layer, which is faster.
      options: further options of `attention`, such as strategy, kernel, softcap or bias.

    The function accepts [batch, length, heads, dim], with any number of batch dimensions. It refuses mask and bias
    arrays, dropout of attention weights, and requests to return these weights.
    """
    _check(mask, order)

    def attend(
        query: Array,
        key: Array,
        value: Array,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        is_causal: bool = False,
    ) -> Array:
        del broadcast_dropout, dropout_rng, precision, force_fp32_for_softmax  # scores are always summed in float32
        if dropout_rate > 0 and not deterministic:
            raise ValueError(
                f"Attention weights are never materialised, so they cannot be dropped out; got dropout_rate="
                f"{dropout_rate}. Construct the attention module with dropout_rate=0; dropout after it works."
            )
        if module is not None:
            raise ValueError("Attention weights are never materialised, so they cannot be sown. Leave out sow_weights.")
        if any(x is not None for x in (einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)):
            raise ValueError("Products of this attention run in its own kernels. Leave out the module's einsums.")
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        arrays = jnp.asarray(query, dtype), jnp.asarray(key, dtype), jnp.asarray(value, dtype)
        masks = [asked, causal() if is_causal else None]
        return _run(*arrays, bias, mask, masks, order, where, options)

    asked, where = mask, dict(axis_name=axis_name, layout=layout)
    return attend


@checks_itself
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    axis_name: AxisName,
    layout: Layout = BASELINE,
    order: Literal["sequence", "layout"] = "sequence",
    **options: Any,
) -> Any:
    """Compute `jax.nn.dot_product_attention` over a mesh axis that shards the sequence.

    Takes all its arguments, except that `mask` and `bias` must be of this library. Queries beyond `query_seq_lengths`
    are 0. By default the sequence is in contiguous shards. `axis_name`, `order` and `options` are those of
    `attention_fn`, for example functools.partial(sa.dot_product_attention, axis_name="sequence", layout=sa.striped()).
    """
    _check(None, order)
    if implementation not in KERNELS:
        raise ValueError(f"implementation must be None, 'xla' or 'cudnn'; got {implementation!r}.")
    arrays = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    _check_rank(*arrays)
    if implementation is not None and "kernel" in options:
        raise ValueError("implementation and kernel name the same thing. Leave one of them out.")
    if _is_inside(axis_name) and not (query_seq_lengths is None and key_value_seq_lengths is None):
        raise ValueError(
            "Inside shard_map a mask of sequence lengths must be permuted: pass mask=sa.ranges(0, hi).permute(layout, "
            "devices) through in_specs, sharded like [batch, length]."
        )
    batch = math.prod(arrays[0].shape[:-3])
    length = options.get("length") or arrays[0].shape[-3]
    masks: list[Mask | None] = [causal() if is_causal else None]
    if local_window_size is not None:
        sides = local_window_size if isinstance(local_window_size, tuple) else (local_window_size, local_window_size)
        masks.append(window(*sides))
    if key_value_seq_lengths is not None:
        masks.append(ranges(0, _per_row("key_value_seq_lengths", key_value_seq_lengths, batch, length)))
    if query_seq_lengths is not None:
        xp: Any = jnp if isinstance(query_seq_lengths, jax.Array) else np
        beyond = np.arange(length) >= _per_row("query_seq_lengths", query_seq_lengths, batch, length)
        masks.append(ranges(xp.where(beyond, INT32_MAX, 0), INT32_MAX))
    options = {"scale": scale, "kernel": KERNELS[implementation], "return_lse": return_residual, **options}
    where = dict(axis_name=axis_name, layout=layout)
    return _run(*arrays, bias, mask, masks, order, where, options)


def _per_row(name: str, lengths: Any, batch: int, length: int) -> Any:
    """Return lengths [batch] as [batch, length]."""
    xp: Any = jnp if isinstance(lengths, jax.Array) else np
    lengths = xp.asarray(lengths)
    if lengths.shape != (batch,):
        raise ValueError(f"{name} must have one length for each of the {batch} sequences; got shape {lengths.shape}.")
    return xp.broadcast_to(lengths[:, None], (batch, length))


def _check_rank(query: Array, key: Array, value: Array) -> None:
    if min(x.ndim for x in (query, key, value)) < 3:
        raise ValueError(
            f"query, key and value must be [batch, length, heads, dim], with any number of batch dimensions; got "
            f"{query.shape}, {key.shape} and {value.shape}."
        )


def _is_inside(axis_name: AxisName) -> bool:
    """Whether this code is inside a shard_map over the axis, or one of several axes."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    return any(name in jax.sharding.get_abstract_mesh().manual_axes for name in names)


def _check(mask: Any, order: Any) -> None:
    if order not in ("sequence", "layout"):
        raise ValueError(f"order must be 'sequence' or 'layout', the order of the tokens in the arrays; got {order!r}.")
    if not (mask is None or isinstance(mask, Mask)):
        raise ValueError(f"mask must be a mask of this library, such as sa.causal(); got {type(mask).__name__}.")


def _run(
    query: Array, key: Array, value: Array, bias: Any, mask: Any, masks: list[Any], order: str, where: Any, options: Any
) -> Any:
    """Run attention on arrays with any number of batch dimensions; `mask` is the caller's, `masks` are further ones."""
    if not (mask is None or isinstance(mask, Mask)):
        raise ValueError(
            f"A mask array of length² entries does not fit on a device of a long sequence; got shape "
            f"{np.shape(mask)}. Pass a mask of this library instead: sa.causal(), sa.documents(segment_ids), "
            f"sa.window(left, right), sa.ranges(lo, hi) or an intersection of them, as mask= of this call or of "
            f"attention_fn."
        )
    if not (bias is None or isinstance(bias, Bias)):
        raise ValueError(
            f"A bias array of length² entries does not fit on a device of a long sequence; got shape {np.shape(bias)}. "
            f"Pass bias=sa.alibi(slopes) or sa.relative_bias(table), whose entries are computed where they are needed."
        )
    if bias is not None and options.get("bias") is not None:
        raise ValueError("Attention has a bias already, given to attention_fn. Pass one bias only.")
    if bias is not None:
        options = {**options, "bias": bias}
    _check_rank(query, key, value)
    visible = full()
    for one in (mask, *masks):
        visible = visible if one is None else visible & one
    batch = query.shape[:-3]
    flat = tuple(x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in (query, key, value))
    result = _ordered(flat, visible, order, {**where, **options})
    whole = lambda x: x.reshape(*batch, *x.shape[1:])  # noqa: E731
    if isinstance(result, Partial):
        return whole(result.out).astype(query.dtype), whole(result.lse)
    return whole(result)


def _ordered(arrays: tuple[Array, ...], mask: Mask, order: str, options: dict[str, Any]) -> Any:
    """Run attention on query, key and value, [batch, length, heads, dim], in the given order."""
    axis_name, layout = options["axis_name"], options["layout"]
    if _is_inside(axis_name):
        if "mesh" in options or "spec" in options:
            raise ValueError("Inside shard_map the mesh and the sharding are known. Leave out mesh and spec.")
        if order == "sequence":
            raise ValueError(
                f"Inside a shard_map over {axis_name!r} every array is a device's shard, in layout order. Permute the "
                f"tokens before the model and pass order='layout'."
            )
        return attention_shard(*arrays, mask=mask, **options)
    mesh = options.get("mesh") or jax.sharding.get_abstract_mesh()
    if order == "layout" or mesh.empty:  # without a mesh, `attention` raises
        return attention(*arrays, mask=mask, **options)
    lengths = {"length": (length := arrays[0].shape[1]), "key_length": arrays[1].shape[1]}
    devices = count_devices(None, mesh, axis_name)
    permuted = (layout.permute(x, devices, axis=1) for x in arrays)
    result = attention(*permuted, mask=mask, **{**lengths, **options})
    return jax.tree.map(lambda x: layout.restore(x, devices, axis=1, length=length), result)

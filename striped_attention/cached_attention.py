"""Attention of texts that grow: of a prompt, of a further piece of it, of the token that was written last.

    out, cache = prefill_attention(q, k, v, cache)     many new tokens, in layout order: a prompt, or a piece of one
    cache = cache.append(k, v)                         a new token of every text, or a few
    out = decode_attention(q, cache)                   and its attention

Prefill is the ring of training among the new tokens; for those that were there before it is the other way round:
queries go to every device, which attends to its own slots, and partial results come back. Decoding is the same for one
query. On the wire are then the partial results alone, heads × (dim + 1) numbers a query and device; no keys.
"""

import functools
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from striped_attention import kernel_cudnn, kernel_xla
from striped_attention.attention import KERNELS, check_arrays, check_options, choose_kernel, platform
from striped_attention.bias import Bias
from striped_attention.cache import KVCache, over_mesh
from striped_attention.kernel import Block, Partial, add_sinks, merge, merge_all
from striped_attention.kernel_few import Few, attend_few
from striped_attention.mask import causal, sliding_window
from striped_attention.ring import Ring, ring_partial

P = PartitionSpec


@no_type_check
def decode_attention(
    query: Float[Array, "batch queries heads dim"],
    cache: KVCache,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch queries heads dim"]:
    """Causal attention of the last token of every text, or the last few, to all that is in the cache.

    Args:
      query: of the last tokens that every text has, in text order.
      cache: what `append` returned: the tokens' own keys and values are in it.
      scale, softcap, bias, sinks: as for `attention`.

    Returns:
      An array of the shape and dtype of `query`, on every device of the sequence axis.
    """
    query, sinks = jnp.asarray(query), None if sinks is None else jnp.asarray(sinks)
    _check_query(query, cache, bias, sinks)
    check_options(scale, softcap, "auto", None)
    return _decode(query, cache, bias, sinks, options=(("scale", scale), ("softcap", softcap)))


@functools.partial(jax.jit, static_argnames="options")
def _decode(query: Array, cache: KVCache, bias: Any, sinks: Any, *, options: Any) -> Array:
    batch, _, heads, _ = cache.spec
    whole, per_head = P(batch, None, heads, None), lambda _: P(heads)
    specs = (whole, cache.specs, jax.tree.map(per_head, bias), jax.tree.map(per_head, sinks))

    def shard(query: Any, cache: KVCache, bias: Any, sinks: Any) -> Any:
        return decode_attention_shard(query, cache, bias=bias, sinks=sinks, **dict(options))

    return over_mesh(cache, shard, specs, whole)(query, cache, bias, sinks)


@no_type_check
def decode_attention_shard(
    query: Float[Array, "batch queries heads dim"],
    cache: KVCache,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch queries heads dim"]:
    """`decode_attention` for code that is already inside `jax.shard_map`: every device has the same queries."""
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    part = _attend_last(query, cache, scale, softcap, bias)
    together = lax.all_gather(jnp.concatenate([part.out, part.lse[..., None]], axis=-1), cache.axis_name)
    part = merge_all(Partial(together[..., :-1], together[..., -1]))
    return add_sinks(part, sinks).out.astype(query.dtype)


@no_type_check
def prefill_attention(
    query: Float[Array, "batch new heads dim"],
    key: Float[Array, "batch new kv_heads dim"],
    value: Float[Array, "batch new kv_heads dim"],
    cache: KVCache,
    *,
    counts: Int[Array, " batch"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Float[Array, " heads"] | None = None,
    kernel: str = "auto",
    tile: int | tuple[int, int] | None = None,
) -> tuple[Float[Array, "batch new heads dim"], KVCache]:
    """Causal attention of many new tokens to one another and to what is in the cache, and the cache with them in it.

    Args:
      query, key, value: of the tokens that follow in every text, in layout order (`cache.layout.permute`).
      counts: how many of a text's new tokens are real, its first ones (in text order); by default all are. Where
        `permute` has padded them, say so here: padding that counts as real is written into the cache.
      scale, softcap, bias, sinks, kernel, tile: as for `attention`.

    Returns:
      An array of the shape and dtype of `query`, in layout order, and the cache. Outside of `jit` it raises if the
      tokens do not fit; inside call `cache.check_room` before.
    """
    query, sinks = jnp.asarray(query), None if sinks is None else jnp.asarray(sinks)
    key, value, counts = cache.check_new(key, value, counts)
    check_arrays(query, key, value, bias, sinks)
    tile = check_options(scale, softcap, kernel, tile)
    cache.layout.positions(0, query.shape[1], cache.devices)
    options = dict(scale=scale, softcap=softcap, kernel=kernel, tile=tile)
    return _prefill((query, key, value), cache, counts, bias, sinks, options=tuple(options.items()))


@functools.partial(jax.jit, static_argnames="options")
def _prefill(new: Any, cache: KVCache, counts: Array, bias: Any, sinks: Any, *, options: Any) -> tuple[Array, KVCache]:
    batch, _, heads, _ = cache.spec
    per_head = lambda _: P(heads)  # noqa: E731
    rest = (P(batch), jax.tree.map(per_head, bias), jax.tree.map(per_head, sinks))

    def shard(new: Any, cache: KVCache, counts: Any, bias: Any, sinks: Any) -> Any:
        return prefill_attention_shard(*new, cache, counts=counts, bias=bias, sinks=sinks, **dict(options))

    specs = ((cache.spec,) * 3, cache.specs, *rest)
    return over_mesh(cache, shard, specs, (cache.spec, cache.specs))(new, cache, counts, bias, sinks)


@no_type_check
def prefill_attention_shard(
    query: Float[Array, "batch slots heads dim"],
    key: Float[Array, "batch slots kv_heads dim"],
    value: Float[Array, "batch slots kv_heads dim"],
    cache: KVCache,
    *,
    counts: Int[Array, " batch"],
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Float[Array, " heads"] | None = None,
    kernel: str = "auto",
    tile: tuple[int, int] | None = None,
) -> tuple[Float[Array, "batch slots heads dim"], KVCache]:
    """`prefill_attention` for code that is already inside `jax.shard_map`: every array is this device's part."""
    devices, new = cache.devices, query.shape[1] * cache.devices
    order = cache.layout.order(new, devices)
    mine = cache.layout.positions(lax.axis_index(cache.axis_name), new, devices)
    real = (mine < counts[:, None])[..., None, None]
    query, key, value = (jnp.where(real, x, 0) for x in (query, key, value))  # 0 · NaN is NaN, also where it is hidden
    mask = causal() if cache.window is None else sliding_window(cache.window)
    what = dict(softcap=softcap, bias=bias, mask=mask, layout=cache.layout, devices=devices, tile=tile)
    chosen = KERNELS[choose_kernel(kernel, query, key, padded=False, platform=platform(), **what)]
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    ring = Ring(cache.axis_name, devices, cache.layout, new, new, chosen, scale, softcap, tile)
    among = ring_partial(ring, query, key, value, mask, bias)
    attend_before = lambda: merge(among, _attend_before(ring, query, cache, bias))  # noqa: E731
    part = lax.cond(jnp.any(cache.lengths > 0), attend_before, lambda: among)
    gather = lambda x: lax.all_gather(x, cache.axis_name, axis=1, tiled=True)  # noqa: E731
    out = add_sinks(part, sinks).out.astype(query.dtype)
    return out, cache.append_shard(gather(key), gather(value), counts, jnp.asarray(order))


def _attend_before(ring: Ring, query: Array, cache: KVCache, bias: Bias | None) -> Partial:
    """Attention of the queries of new tokens to what was in the cache before them.

    Every device attends to its own slots with everybody's queries; then the partial results go where these came from.
    """
    here = lax.axis_index(cache.axis_name)
    everybody = lax.all_gather(query, cache.axis_name)  # [devices, batch, slots, heads, dim]
    if ring.kernel is kernel_cudnn and cache.window is None and cache.key.dtype == query.dtype:
        # Without a window all see all that is there.
        counts = cache.ranges(here, cache.lengths[:, None])[0][1][:, 0]
        together = jnp.moveaxis(everybody, 0, 1).reshape(query.shape[0], -1, *query.shape[2:])
        found = kernel_cudnn.attend_first(together, cache.key, cache.value, counts, ring.scale)
        apart = lambda x: jnp.moveaxis(x.reshape(x.shape[0], cache.devices, -1, *x.shape[2:]), 1, 0)  # noqa: E731
        parts = jax.tree.map(apart, found)
    else:
        parts = _attend_ranges(ring, everybody, cache, bias)
    return merge_all(jax.tree.map(lambda x: lax.all_to_all(x, cache.axis_name, 0, 0, tiled=True), parts))


def _attend_ranges(ring: Ring, everybody: Array, cache: KVCache, bias: Bias | None) -> Partial:
    """Attention of everybody's new queries to this device's slots, each to what it sees of them.

    One device's queries after the other's, for these are sorted by position, and one text after the other, for they may
    differ in length.
    """
    here = lax.axis_index(cache.axis_name)
    held = cache.positions(here)

    def row(args: Any) -> Partial:
        query, key, value, positions, held, ranges = args
        attend = kernel_xla.attend(query[None])
        keys = [jnp.swapaxes(x, 0, 1)[None] for x in (key, value)]
        blocks = [
            Block(start[None], end[None], positions, held, bias, None, ring.scale, ring.softcap, ring.tile)
            for start, end in ranges
        ]
        return jax.tree.map(lambda x: x[0], functools.reduce(merge, [attend(*keys, block) for block in blocks]))

    def source(args: Any) -> Partial:
        device, query = args
        positions = cache.lengths[:, None] + cache.layout.positions(device, ring.padded_length, cache.devices)
        return lax.map(row, (query, cache.key, cache.value, positions, held, cache.ranges(here, positions)))

    return lax.map(source, (jnp.arange(cache.devices, dtype=jnp.int32), everybody))


def _attend_last(query: Array, cache: KVCache, scale: float, softcap: Any, bias: Any) -> Partial:
    """Attention of the last tokens of every text to this device's slots."""
    here = lax.axis_index(cache.axis_name)
    positions = cache.lengths[:, None] - query.shape[1] + jnp.arange(query.shape[1], dtype=jnp.int32)
    few = Few(cache.ranges(here, positions), positions, cache.positions(here), bias, scale, softcap)
    return attend_few(query, cache.key, cache.value, few)


def _check_query(query: Array, cache: KVCache, bias: Any, sinks: Any) -> None:
    batch, kv_heads, _, dim = cache.key.shape
    if query.ndim != 4 or query.shape[0] != batch or query.shape[3] != dim:
        raise ValueError(f"query must be [batch, queries, heads, dim], [{batch}, …, {dim}] here; got {query.shape}.")
    likeness = jax.ShapeDtypeStruct((batch, query.shape[1], kv_heads, dim), query.dtype)
    check_arrays(query, likeness, likeness, bias, sinks)
    room = cache.capacity if cache.window is None or not cache.wraps else cache.capacity - cache.window + 1
    if query.shape[1] > room:
        raise ValueError(
            f"This cache can serve the last {room} tokens at most, for older slots are written over; got "
            f"{query.shape[1]} queries. Make it with new={query.shape[1]}, or use prefill_attention."
        )

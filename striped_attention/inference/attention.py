"""Attention with a KV cache: prefill of a prompt or a chunk of one, and decoding.

    out, cache = prefill_attention(q, k, v, cache)     many new tokens, in layout order: a prompt, or a chunk of one
    cache = cache.append(k, v)                         one or a few new tokens of every sequence
    out = decode_attention(q, cache)                   and their attention

Among the new tokens, prefill is attention as in training, with the same strategies. For tokens already in the cache,
queries travel instead of keys: they go to every device, which attends to its own slots, and partial results come back.
Decoding does the same for one query. It sends only partial results, heads × (dim + 1) elements per query and device,
and no keys.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from striped_attention.core.annotations import checks_itself
from striped_attention.core.arguments import check_arrays, check_options
from striped_attention.core.bias import Bias
from striped_attention.core.checks import check_positions, poison
from striped_attention.core.layout import Layout
from striped_attention.core.mask import Mask, causal, full, sliding_window
from striped_attention.core.partial import Partial, add_sinks, merge, merge_all
from striped_attention.inference.cache import KVCache, over_mesh
from striped_attention.kernels.choice import check_name, choose
from striped_attention.kernels.contract import Block, Request, Same, make_request
from striped_attention.kernels.decode import Few, attend_few
from striped_attention.runtime.sharding import current_device, fast_neighbours
from striped_attention.strategies.choice import choose_strategy
from striped_attention.strategies.exchange import from_heads, to_heads
from striped_attention.strategies.problem import Problem
from striped_attention.strategies.ring import ring_partial
from striped_attention.strategies.strategy import AUTO, Strategy, check_strategy, exchanged

P = PartitionSpec


@checks_itself
def decode_attention(
    query: Float[Array | np.ndarray, "batch queries heads dim"],
    cache: KVCache,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Float[Array | np.ndarray, " heads"] | None = None,
) -> Float[Array, "batch queries heads dim"]:
    """Compute causal attention of the last one or few tokens of every sequence to the cache.

    Args:
      query: the queries of the last tokens of every sequence, in sequence order.
      cache: the result of `append`, which already holds these tokens' own keys and values.
      scale, softcap, bias, sinks: as for `attention`.

    Returns:
      An array of the shape and dtype of `query`, on every device of the sequence axis.
    """
    query, sinks = jnp.asarray(query), None if sinks is None else jnp.asarray(sinks)
    _check_query(query, cache, bias, sinks)
    check_options(scale, softcap, None)
    return _decode(query, cache, bias, sinks, options=(("scale", scale), ("softcap", softcap)))


@functools.partial(jax.jit, static_argnames="options")
def _decode(query: Array, cache: KVCache, bias: Any, sinks: Any, *, options: Any) -> Array:
    batch, _, heads, _ = cache.spec
    whole, per_head = P(batch, None, heads, None), lambda _: P(heads)
    specs = (whole, cache.specs, jax.tree.map(per_head, bias), jax.tree.map(per_head, sinks))

    def shard(query: Any, cache: KVCache, bias: Any, sinks: Any) -> Any:
        return decode_attention_shard(query, cache, bias=bias, sinks=sinks, **dict(options))

    return over_mesh(cache, shard, specs, whole)(query, cache, bias, sinks)


@checks_itself
def decode_attention_shard(
    query: Float[Array, "batch queries heads dim"],
    cache: KVCache,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch queries heads dim"]:
    """Compute `decode_attention` inside `jax.shard_map`; every device has the same queries."""
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    part = _attend_last(query, cache, scale, softcap, bias)
    if cache.devices > 1:
        together = lax.all_gather(jnp.concatenate([part.out, part.lse[..., None]], axis=-1), cache.axis_name)
        part = merge_all(Partial(together[..., :-1], together[..., -1]))
    return poison(add_sinks(part, sinks).out.astype(query.dtype), cache.fits)


@checks_itself
def prefill_attention(
    query: Float[Array | np.ndarray, "batch new heads dim"],
    key: Float[Array | np.ndarray, "batch new kv_heads dim"],
    value: Float[Array | np.ndarray, "batch new kv_heads dim"],
    cache: KVCache,
    *,
    counts: Int[Array | np.ndarray, " batch"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Float[Array | np.ndarray, " heads"] | None = None,
    strategy: str | Strategy = AUTO,
    kernel: str = "auto",
    tile: int | tuple[int, int] | None = None,
    positions: Int[Array | np.ndarray, "batch new"] | None = None,
) -> tuple[Float[Array, "batch new heads dim"], KVCache]:
    """Compute causal attention of many new tokens to one another and to the cache, and append them to the cache.

    Args:
      query, key, value: of the next tokens of every sequence, in layout order (`cache.layout.permute`).
      counts: how many of a sequence's new tokens are real, the first ones in sequence order; by default all. Required
        if `permute` padded them: padding that counts as real is written into the cache.
      scale, softcap, bias, sinks, kernel, tile: as for `attention`.
      strategy: as for `attention`, for attention among the new tokens. "auto" takes the fastest forward pass.
      positions: optional, and only checked, as for `attention`: the position of every new token in its sequence,
        [batch, new] in layout order, as for rotary embeddings.

    Returns:
      An array of the shape and dtype of `query`, in layout order, and the updated cache. Outside `jit`, raises if the
      tokens do not fit. Inside `jit` it cannot raise, and the result of a sequence that does not fit is NaN: call
      `cache.check_room` first.
    """
    query, sinks = jnp.asarray(query), None if sinks is None else jnp.asarray(sinks)
    key, value, counts = cache.check_new(key, value, counts)
    check_arrays(query, key, value, bias, sinks)
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query, key and value must hold the same new tokens; got query {query.shape} and key {key.shape}."
        )
    check_name(kernel)
    check_strategy(strategy, cache.devices)
    tile = check_options(scale, softcap, tile)
    cache.layout.positions(0, query.shape[1], cache.devices)
    ok = None
    if positions is not None:
        order, held = cache.layout.order(query.shape[1], cache.devices), cache.lengths[:, None]
        expected, length = held + order, held + counts[:, None]
        ok = check_positions(positions, expected, query.shape[0], length, cache.layout, cache.devices)
    options = dict(scale=scale, softcap=softcap, strategy=strategy, kernel=kernel, tile=tile)
    out, cache = _prefill((query, key, value), cache, counts, bias, sinks, options=tuple(options.items()))
    return poison(out, ok), cache


@functools.partial(jax.jit, static_argnames="options")
def _prefill(new: Any, cache: KVCache, counts: Array, bias: Any, sinks: Any, *, options: Any) -> tuple[Array, KVCache]:
    batch, _, heads, _ = cache.spec
    per_head = lambda _: P(heads)  # noqa: E731
    rest = (P(batch), jax.tree.map(per_head, bias), jax.tree.map(per_head, sinks))

    def shard(new: Any, cache: KVCache, counts: Any, bias: Any, sinks: Any) -> Any:
        query, key, value = new
        return prefill_attention_shard(query, key, value, cache, counts=counts, bias=bias, sinks=sinks, **dict(options))

    specs = ((cache.spec,) * 3, cache.specs, *rest)
    return over_mesh(cache, shard, specs, (cache.spec, cache.specs))(new, cache, counts, bias, sinks)


@checks_itself
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
    strategy: str | Strategy = AUTO,
    kernel: str = "auto",
    tile: tuple[int, int] | None = None,
) -> tuple[Float[Array, "batch slots heads dim"], KVCache]:
    """Compute `prefill_attention` inside `jax.shard_map`, where every array is this device's shard."""
    devices, new = cache.devices, query.shape[1] * cache.devices
    order = cache.layout.order(new, devices)
    mine = cache.layout.positions(lax.axis_index(cache.axis_name), new, devices)
    real = (mine < counts[:, None])[..., None, None]
    query, key, value = (jnp.where(real, x, 0) for x in (query, key, value))  # 0 · NaN is NaN, even if masked
    platform, kind = current_device()
    among, before = prefill_requests(
        query,
        key,
        cache.key,
        layout=cache.layout,
        devices=devices,
        window=cache.window,
        bias=bias,
        softcap=softcap,
        tile=tile,
        platform=platform,
        device_kind=kind,
    )
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    mask = causal() if cache.window is None else sliding_window(cache.window)
    neighbours = fast_neighbours(cache.axis_name, platform, kind)
    chosen = choose_strategy(strategy, among, kernel, neighbours=neighbours, forward_only=True)
    attend = choose(kernel, exchanged(chosen, among)).kernel
    problem = Problem(cache.axis_name, devices, cache.layout, new, new, attend, scale, softcap, tile, chosen)
    result = _attend_new(problem, query, key, value, mask, bias)
    of_cache = dataclasses.replace(problem, kernel=choose(kernel, before).kernel)
    attend_before = lambda: merge(result, _attend_before(of_cache, query, cache, bias))  # noqa: E731
    part = lax.cond(jnp.any(cache.lengths > 0), attend_before, lambda: result)
    gather = lambda x: lax.all_gather(x, cache.axis_name, axis=1, tiled=True)  # noqa: E731
    cache = cache.append_shard(gather(key), gather(value), counts, jnp.asarray(order))
    return poison(add_sinks(part, sinks).out.astype(query.dtype), cache.fits), cache


def prefill_requests(
    query: Any, key: Any, cached: Any, *, layout: Layout, devices: int, window: int | None, **options: Any
) -> tuple[Request, Request]:
    """Return the two kernel requests of prefill: attention among new tokens, by a ring, and to a shard of the cache.

    `query` and `key` are a device's share of the new tokens, `cached` is [batch, kv_heads, slots, dim]. Without a
    window or a bias, all new tokens see the whole cache and attend to it in one call; otherwise each sees a range.
    """
    mask = causal() if window is None else sliding_window(window)
    among = make_request(query, key, mask=mask, layout=layout, devices=devices, **options)
    together = window is None and options.get("bias") is None
    slots = query.shape[1] * (devices if together else 1)
    queries = jax.ShapeDtypeStruct((query.shape[0], slots, *query.shape[2:]), query.dtype)
    keys = jax.ShapeDtypeStruct((cached.shape[0], cached.shape[2], cached.shape[1], cached.shape[3]), query.dtype)
    before = make_request(queries, keys, mask=full() if together else None, layout=layout, devices=1, **options)
    return among, before


def _attend_new(problem: Problem, q: Array, k: Array, v: Array, mask: Mask, bias: Bias | None) -> Partial:
    """Compute attention among the new tokens, with exchanges of heads for tokens if the strategy has them."""
    if problem.strategy.heads == 1:
        return ring_partial(problem, q, k, v, mask, bias)
    q, k, v, mask, bias, _ = to_heads(problem, q, k, v, mask, bias, None)
    part = ring_partial(problem, q, k, v, mask, bias)
    both = from_heads(problem, jnp.concatenate([part.out, part.lse[..., None]], axis=-1))  # in one exchange
    return Partial(both[..., :-1], both[..., -1])


def _attend_before(problem: Problem, query: Array, cache: KVCache, bias: Bias | None) -> Partial:
    """Compute attention of the new tokens' queries to what was in the cache before them.

    Every device attends to its own slots with the queries of all devices, then sends each partial result back to the
    device its queries came from.
    """
    everybody = lax.all_gather(query, cache.axis_name)  # [devices, batch, slots, heads, dim]
    together = cache.window is None and bias is None
    parts = _attend_all(problem, everybody, cache) if together else _attend_ranges(problem, everybody, cache, bias)
    return merge_all(jax.tree.map(lambda x: lax.all_to_all(x, cache.axis_name, 0, 0, tiled=True), parts))


def _attend_all(problem: Problem, everybody: Array, cache: KVCache) -> Partial:
    """Compute attention of all devices' new queries to everything in this device's slots."""
    devices, batch, slots = everybody.shape[:3]
    counts = cache.ranges(lax.axis_index(cache.axis_name), cache.lengths[:, None])[0][1]
    together = jnp.moveaxis(everybody, 0, 1).reshape(batch, devices * slots, *everybody.shape[3:])
    end = jnp.broadcast_to(counts, (batch, devices * slots))
    nowhere = jnp.zeros(devices * slots, jnp.int32), jnp.zeros(cache.key.shape[2], jnp.int32)  # unused without bias
    block = Block(jnp.zeros_like(end), end, *nowhere, None, Same(), problem.scale, problem.softcap, problem.tile)
    keys = (jnp.swapaxes(x, 1, 2).astype(everybody.dtype) for x in (cache.key, cache.value))
    found = problem.kernel.attend(together)(*keys, block)
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(batch, devices, slots, *x.shape[2:]), 1, 0), found)


def _attend_ranges(problem: Problem, everybody: Array, cache: KVCache, bias: Bias | None) -> Partial:
    """Compute attention of all devices' new queries to this device's slots, each query to the range that it sees.

    Devices are processed one after another, because only the queries of one device are sorted by position; sequences
    likewise, because they may differ in length.
    """
    here = lax.axis_index(cache.axis_name)
    held = cache.positions(here)

    def row(args: Any) -> Partial:
        query, key, value, positions, held, ranges = args
        attend = problem.kernel.attend(query[None])
        keys = [jnp.swapaxes(x, 0, 1)[None].astype(query.dtype) for x in (key, value)]
        blocks = [
            Block(start[None], end[None], positions, held, bias, None, problem.scale, problem.softcap, problem.tile)
            for start, end in ranges
        ]
        return jax.tree.map(lambda x: x[0], functools.reduce(merge, [attend(*keys, block) for block in blocks]))

    def source(args: Any) -> Partial:
        device, query = args
        positions = cache.lengths[:, None] + cache.layout.positions(device, problem.padded_length, cache.devices)
        return lax.map(row, (query, cache.key, cache.value, positions, held, cache.ranges(here, positions)))

    return lax.map(source, (jnp.arange(cache.devices, dtype=jnp.int32), everybody))


def _attend_last(query: Array, cache: KVCache, scale: float, softcap: Any, bias: Any) -> Partial:
    """Compute attention of the last tokens of every sequence to this device's slots."""
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
            f"This cache supports at most {room} queries per call, because older slots are overwritten; got "
            f"{query.shape[1]}. Make the cache with new={query.shape[1]}, or use prefill_attention."
        )

"""Cache: the keys and values of sequences so far, distributed over the devices by the layout.

Position p is stored on the device and in the slot that the layout assigns to it among `capacity` positions. So a cache
that grows token by token stays as balanced as its layout: with `striped(g)`, no device ever holds more than g tokens
more than another. Appending moves no cached tokens: each device writes the new tokens that it owns.

Slots are sorted by position, so a query sees a range of a device's slots, as in training. A model with a sliding window
keeps only the window: position p overwrites position p - capacity, which no later query can see. A device's slots are
then two sorted runs, the newest round and what is left of the one before, so a query sees two ranges.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from striped_attention.core.annotations import checks_itself
from striped_attention.core.layout import AxisName, Layout, check_layout, check_whole, count_devices
from striped_attention.runtime.sharding import check_spec, mesh_for, reshard

P = PartitionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer for a batch of sequences. Created by `KVCache.empty`.

    `key` and `value` are [batch, kv_heads, capacity, dim], with the capacity in layout order; `lengths` [batch] counts
    the tokens of every sequence so far. Inside `shard_map` the arrays are this device's shards, by `specs`.
    """

    key: Any
    value: Any
    lengths: Any
    layout: Layout = dataclasses.field(metadata={"static": True})
    mesh: Mesh = dataclasses.field(metadata={"static": True})
    spec: PartitionSpec = dataclasses.field(metadata={"static": True})
    capacity: int = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})
    wraps: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    @checks_itself
    def shapes(
        cls,
        batch: int,
        capacity: int,
        kv_heads: int,
        dim: int,
        *,
        layout: Layout,
        mesh: Mesh,
        axis_name: AxisName,
        spec: PartitionSpec | None = None,
        window: int | None = None,
        new: int = 1,
        dtype: DTypeLike = jnp.bfloat16,
    ) -> "KVCache":
        """Return a cache of `jax.ShapeDtypeStruct`: the shape, dtype and sharding of every array, without its values.

        The arguments are those of `empty`.
        """
        sizes = {"batch": batch, "capacity": capacity, "kv_heads": kv_heads, "dim": dim, "new": new}
        batch, capacity, kv_heads, dim, new = (check_whole(name, size) for name, size in sizes.items())
        check_layout(layout)
        names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
        if not isinstance(mesh, Mesh) or not set(names) <= set(mesh.axis_names):
            what = "axes" if len(names) > 1 else "axis"
            raise ValueError(f"A cache needs a jax.sharding.Mesh with the {what} {axis_name!r}; got {mesh!r}.")
        mesh = mesh_for(mesh)
        spec = P(*((None, axis_name, None, None) if spec is None else spec))
        check_spec(spec, axis_name, mesh, batch, kv_heads, "key heads")
        kept = capacity if window is None else min(capacity, check_whole("window", window) + new - 1)
        room = layout.padded_length(kept, count_devices(None, mesh, axis_name))
        array = lambda dtype, spec, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
        entry = array(jnp.dtype(dtype), _heads_first(spec), batch, kv_heads, room, dim)
        return cls(entry, entry, array(jnp.int32, P(spec[0]), batch), layout, mesh, spec, room, window, kept < capacity)

    @classmethod
    @checks_itself
    def empty(
        cls,
        batch: int,
        capacity: int,
        kv_heads: int,
        dim: int,
        *,
        layout: Layout,
        mesh: Mesh,
        axis_name: AxisName,
        spec: PartitionSpec | None = None,
        window: int | None = None,
        new: int = 1,
        dtype: DTypeLike = jnp.bfloat16,
    ) -> "KVCache":
        """Create an empty cache.

        Args:
          capacity: the maximum tokens per sequence; rounded up to a length that the layout can divide equally.
          layout, axis_name, mesh: as for `attention`.
          spec: as for `attention`: how [batch, length, kv_heads, dim] is sharded.
          window: how many tokens a query sees, its own included. If this is less than the capacity, sequences may have
            any length, and the cache keeps slots for the window and `new` tokens only.
          new: with a window, the maximum number of tokens that are appended before they attend.
        """
        where: dict[str, Any] = dict(layout=layout, mesh=mesh, axis_name=axis_name, spec=spec)
        shapes = cls.shapes(batch, capacity, kv_heads, dim, **where, window=window, new=new, dtype=dtype)
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
        return jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))()

    @property
    def fits(self) -> Bool[Array, " batch"]:
        """Whether a sequence has never exceeded the capacity. Attention to one that has is NaN."""
        return jnp.ones_like(self.lengths, bool) if self.wraps else self.lengths <= self.capacity

    @property
    def axis_name(self) -> AxisName:
        return self.spec[1]

    @property
    def devices(self) -> int:
        """The number of devices that share a sequence."""
        return count_devices(None, self.mesh, self.axis_name)

    @property
    def specs(self) -> "KVCache":
        """The partition specs of the arrays, for `shard_map`."""
        return dataclasses.replace(
            self, key=_heads_first(self.spec), value=_heads_first(self.spec), lengths=P(self.spec[0])
        )

    def check_room(self, new: Any) -> None:
        """Raise unless every sequence has room for `new` more tokens, one integer or [batch]. Not inside `jit`."""
        longest = int((jax.device_get(self.lengths) + jax.device_get(new)).max())
        if longest > self.capacity and not self.wraps:
            raise ValueError(
                f"The cache has room for {self.capacity} tokens per sequence; the longest would have {longest}. "
                f"Nothing was written. Increase the capacity, or shorten the sequence."
            )

    @checks_itself
    def append(
        self,
        key: Float[Array, "batch new kv_heads dim"],
        value: Float[Array, "batch new kv_heads dim"],
        counts: Int[Array, " batch"] | None = None,
    ) -> "KVCache":
        """Return the cache with the next tokens of every sequence appended, given in sequence order.

        The first `counts` new tokens of a sequence are real; by default all are. Outside `jit`, raises if they do not
        fit. Inside `jit` it cannot raise: call `check_room` first. Tokens that do not fit are not written, and
        attention to that sequence is NaN from then on. Donate the cache to `jit` to update it in place.
        """
        return _append(self, *self.check_new(key, value, counts))

    def check_new(self, key: Any, value: Any, counts: Any) -> tuple[Array, Array, Array]:
        """Return new keys, values and counts as arrays; raise if they do not fit, where that is known at trace time."""
        key, value = jnp.asarray(key), jnp.asarray(value)
        batch, kv_heads, _, dim = self.key.shape
        if key.shape != value.shape or key.shape != (batch, *key.shape[1:2], kv_heads, dim):
            raise ValueError(
                f"key and value must be [batch, new, kv_heads, dim], for this cache [{batch}, new, {kv_heads}, {dim}]; "
                f"got key {key.shape}, value {value.shape}."
            )
        counts = jnp.full(batch, key.shape[1], jnp.int32) if counts is None else jnp.asarray(counts, jnp.int32)
        if counts.shape != (batch,):
            raise ValueError(f"counts must have one integer per sequence, shape ({batch},); got {counts.shape}.")
        if not any(isinstance(x, jax.core.Tracer) for x in (self.lengths, counts)):
            if not 0 <= int(counts.min()) <= int(counts.max()) <= key.shape[1]:
                raise ValueError(f"counts must lie between 0 and the {key.shape[1]} new tokens; got {counts.tolist()}.")
            self.check_room(counts)
        return key, value, counts

    def append_shard(self, key: Array, value: Array, counts: Array, order: Array) -> "KVCache":
        """Do `append` inside `jax.shard_map`. Every device has all new tokens.

        They may come in any order: `order` [new] is the index of each token among the new ones in sequence order.
        """
        device, slots = lax.axis_index(self.axis_name), self.key.shape[2]
        position = self.lengths[:, None] + order
        lengths = self.lengths + counts
        kept = order < counts[:, None]
        kept &= position >= lengths[:, None] - self.capacity if self.wraps else position < self.capacity
        index = position % self.capacity
        slot = self._count(device, index)
        held = self.layout.position(device, jnp.minimum(slot, slots - 1), self.capacity, self.devices)
        slot = jnp.where(kept & (held == index), slot, slots)  # past the end: not written
        rows = jnp.arange(len(key), dtype=jnp.int32)[:, None]
        write = lambda old, new: old.at[rows, :, slot].set(new.astype(old.dtype), mode="drop")  # noqa: E731
        return dataclasses.replace(self, key=write(self.key, key), value=write(self.value, value), lengths=lengths)

    def positions(self, device: Any) -> Int[Array, "batch slots"]:
        """Return the position of each slot of a device; for an empty slot, one that no query sees yet."""
        index = jnp.asarray(self.layout.positions(device, self.capacity, self.devices))
        last = self.lengths[:, None] - 1
        return last - (last - index) % self.capacity if self.wraps else jnp.broadcast_to(index, (len(last), len(index)))

    def ranges(self, device: Any, positions: Int[Array, "batch queries"]) -> list[tuple[Array, Array]]:
        """Return the ranges of a device's slots that queries at these positions see: one per query, or two."""
        count = functools.partial(self._count, device)
        length = self.lengths[:, None]
        lo = jnp.zeros_like(positions) if self.window is None else jnp.maximum(positions - self.window + 1, 0)
        hi = jnp.minimum(positions + 1, length)
        if not self.wraps:
            return [(count(lo), count(hi))]
        base = jnp.maximum(length - 1, 0) // self.capacity * self.capacity  # where the newest round begins
        old_lo = jnp.maximum(lo - base + self.capacity, length - base)  # what is left of the round before it
        old_hi = jnp.where(base == 0, old_lo, hi - base + self.capacity)
        return [(count(lo - base), count(hi - base)), (count(old_lo), count(jnp.maximum(old_lo, old_hi)))]

    def _count(self, device: Any, index: Any) -> Any:
        return self.layout.count_before(device, index, self.capacity, self.devices)


@jax.jit
def _append(cache: KVCache, key: Array, value: Array, counts: Array) -> KVCache:
    new = P(cache.spec[0], None, *cache.spec[2:])
    order = jnp.arange(key.shape[1], dtype=jnp.int32)
    in_specs = (cache.specs, new, new, P(cache.spec[0]), P())
    return over_mesh(cache, KVCache.append_shard, in_specs, cache.specs)(cache, key, value, counts, order)


def over_mesh(cache: KVCache, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Apply `shard_map` over the cache's mesh, with automatic axes, or explicit ones if the caller uses them."""

    def run(*inputs: Any) -> Any:
        mesh = mesh_for(cache.mesh, *jax.tree.leaves(inputs))
        inputs = jax.tree.map(lambda x, spec: reshard(x, mesh, spec), inputs, in_specs)
        mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return mapped(*inputs)

    return run


def _heads_first(spec: PartitionSpec) -> PartitionSpec:
    batch, sequence, heads, dim = spec
    return P(batch, heads, sequence, dim)

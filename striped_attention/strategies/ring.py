"""Ring: who meets whom, and when.

Every device keeps its queries. Keys and values travel round the ring; after j hops a device holds those of the device j
places before it. N devices need N - 1 hops, and fewer where the mask shows while tracing that nobody needs a block.

A step first sends what it holds, then computes on it: the transfer does not wait for the arithmetic nor the arithmetic
for the transfer, so the compiler can run both at once. Partial results are joined by `merge`.

    forward    send kv on                   backward   send kv on; the sum of dk, dv is on its way here
               attend(q, kv)                           attend_grad(q, kv)
               merge into the result                   add to the sum that arrived

Forward, the device's own block comes first: it needs no hop, and hides the first one. Backward half of its heads come
first, for the same reason, and the others last: meanwhile the travelled sums of its dk and dv come home. So these make
N - 1 hops too. They are float32; k and v travel in their own dtype, key heads only. (See also `sends_backward`.)
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from striped_attention.core.bias import Bias
from striped_attention.core.layout import Layout
from striped_attention.core.mask import Mask
from striped_attention.core.partial import Partial, accumulator, add_sinks, merge
from striped_attention.kernels.contract import Block, Kernel, Pattern
from striped_attention.strategies.hops import needed_hops

# What a backward pass needs of a forward pass besides q, k and v. jax.checkpoint with the policy
# jax.checkpoint_policies.save_only_these_names(*SAVED) recomputes everything else, but never the ring.
SAVED = ("attention_out", "attention_lost", "attention_lse")


@dataclasses.dataclass(frozen=True)
class Ring:
    """Everything about a ring that is known while tracing."""

    axis_name: str
    devices: int
    layout: Layout
    length: int
    padded_length: int
    kernel: Kernel
    scale: float
    softcap: float | None = None
    tile: tuple[int, int] | None = None

    def offsets(self, mask: Mask) -> tuple[int, ...]:
        """How many places back the keys come from, step by step."""
        return needed_hops(self.layout, mask.window, mask.prefix, self.length, self.padded_length, self.devices)

    def blocks(self, mask: Mask, bias: Bias | None) -> Callable[[Any], Block]:
        """A function from an offset to the block of this device's queries with the keys from `offset` places back."""
        here = lax.axis_index(self.axis_name)
        meet = self.meetings(mask, bias, here)

        def block(offset: Any) -> Block:
            own = isinstance(offset, int) and offset == 0
            return meet(here if own else (here - offset) % self.devices, own)

        return block

    def meetings(self, mask: Mask, bias: Bias | None, here: Any) -> Callable[[Any, bool], Block]:
        """A function from another device to the block of `here`'s queries with its keys, and whether it is the same.

        What does not change from block to block is computed once. `mask` is that of `here`'s queries.
        """
        place = functools.partial(self.layout.positions, length=self.padded_length, devices=self.devices)
        positions = place(here)
        lo, hi = mask.bounds(positions, self.length)
        known = mask.lo is None and mask.hi is None and mask.prefix in (None, 0)
        shape = (self.layout, self.devices, self.padded_length)

        def block(there: Any, own: bool) -> Block:
            count = functools.partial(self.layout.count_before, there, length=self.padded_length, devices=self.devices)
            pattern = Pattern(*shape, causal=mask.prefix == 0, window=mask.window, own=own) if known else None
            ranges = count(lo), count(hi), positions, positions if own else place(there)
            return Block(*ranges, bias, pattern, self.scale, self.softcap, self.tile)

        return block

    def send(self, x: Any, places: int) -> Any:
        """Pass a pytree `places` on along the ring."""
        pairs = [(i, (i + places) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self.axis_name, pairs), x)


class _Run(NamedTuple):
    """Steps that hop alike, for one loop: at each of `offsets`, send k and v on by `places`, having come by `came`."""

    offsets: np.ndarray
    places: int
    came: int | None


def ring_attention(
    ring: Ring,
    q: Float[Array, "batch slots heads dim"],
    k: Float[Array, "batch slots kv_heads dim"],
    v: Float[Array, "batch slots kv_heads dim"],
    mask: Mask,
    bias: Bias | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch slots heads dim"]:
    """Exact attention of this device's queries over the keys of the whole ring; to be called inside `shard_map`."""
    # Adding a zero that varies over every mesh axis that some input varies over makes all inputs vary alike, as loops
    # under shard_map's check_vma demand. It costs nothing, and its transpose sums the gradients of replicated inputs.
    inputs = (q, k, v, mask, bias, sinks)
    zero = lax.axis_index(ring.axis_name) * 0
    for leaf in jax.tree.leaves(inputs):
        zero = zero + jnp.zeros_like(leaf, shape=(), dtype=zero.dtype)
    inputs = jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), inputs)
    if ring.length == ring.padded_length:
        return _ring_attention(ring, *inputs)
    # Nothing may come out of padding, not even the NaN that a model may have made there of zeros: 0 · NaN is NaN.
    held = ring.layout.positions(lax.axis_index(ring.axis_name), ring.padded_length, ring.devices)
    blank = lambda x: jnp.where((held < ring.length)[None, :, None, None], x, 0)  # noqa: E731
    return blank(_ring_attention(ring, *map(blank, inputs[:3]), *inputs[3:]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attention(ring: Ring, q: Any, k: Any, v: Any, mask: Mask, bias: Any, sinks: Any) -> Array:
    return _forward(ring, q, k, v, mask, bias, sinks)[0]


def ring_partial(ring: Ring, q: Any, k: Any, v: Any, mask: Mask, bias: Any) -> Partial:
    """The forward pass alone, with the log of the sums that its result was divided by."""
    block = ring.blocks(mask, bias)
    offsets = ring.offsets(mask)
    attend = ring.kernel.attend(q)

    def step(carry: Any, offset: Any, places: int) -> Any:
        kv, result = carry
        sent = ring.send(kv, places)
        part = attend(*kv, block(offset))
        return (_after(sent, part.lse), merge(result, part)), None

    if len(offsets) == 1:
        return attend(k, v, block(0))
    sent = ring.send((k, v), offsets[1])
    result = attend(k, v, block(0))
    kv = _after(sent, result.lse)
    for run in _runs(offsets[1:]):
        (kv, result), _ = lax.scan(functools.partial(step, places=run.places), (kv, result), run.offsets)
    return merge(result, attend(*kv, block(offsets[-1])))


def _forward(ring: Ring, q: Any, k: Any, v: Any, mask: Mask, bias: Any, sinks: Any) -> tuple[Array, Any]:
    dtype = accumulator(q.dtype)
    result = add_sinks(ring_partial(ring, q, k, v, mask, bias), sinks)
    out = checkpoint_name(result.out.astype(q.dtype), SAVED[0])
    # dq and dk are small differences of large numbers, one of them out · dout, so the backward pass needs all of out.
    # What rounding takes from it is kept in the inputs' dtype, at half the cost of keeping out in float32.
    lost = None
    if q.dtype != dtype and ring.kernel.FULL_OUT:
        lost = checkpoint_name((result.out - out.astype(dtype)).astype(q.dtype), SAVED[1])
    lse = checkpoint_name(result.lse, SAVED[2])
    return out, (q, k, v, mask, bias, sinks, out, lost, lse)


def _backward(ring: Ring, residuals: Any, dout: Array) -> Any:
    dq, dk, dv, dbias, dsinks = _gradients(ring, residuals, dout)
    return dq, dk, dv, None, dbias, dsinks


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(ring: Ring, residuals: Any, dout: Array) -> Any:
    """The gradients of q, k, v, bias and sinks."""
    q, k, v, mask, bias, sinks, out, lost, lse = residuals
    out, dout = out.astype(lse.dtype), dout.astype(lse.dtype)
    if lost is not None:
        out = out + lost.astype(lse.dtype)
    block = ring.blocks(mask, bias)
    offsets = ring.offsets(mask)
    attend_grad = ring.kernel.attend_grad(q, out, lse, dout)

    def step(kv: Any, stay: Any, travel: Any, offset: Any, places: int | None, came: int | None) -> Any:
        sent = None if places is None else ring.send(kv, places)
        arrived = None if came is None else ring.send(travel, came)
        dq, dk, dv, dbias = attend_grad(*kv, block(offset))
        sent, part = _after(sent, dq), (dk, dv)
        if ring.kernel.SUMS_LAST and sent is not None and arrived is not None:
            part = _after(part, sent[0])
        return sent, _add(stay, (dq, dbias)), _add(arrived, part)

    def loop(carry: Any, offset: Any, run: _Run) -> Any:
        kv, stay, travel = carry
        return step(kv, stay, travel, offset, run.places, run.came), None

    hops = [b - a for a, b in itertools.pairwise(offsets)]
    second = hops[1] if hops[1:] else None
    own = functools.partial(_own_gradients, ring, block(0), (q, out, lse, dout), (k, v))
    *early, late = _halves(q.shape[2], k.shape[2]) if hops else [_Heads()]
    kv = ring.send((k, v), hops[0]) if hops else None
    parts = [own(heads) for heads in early]
    stay = arrived = None
    if hops:
        kv = functools.reduce(_after, (dq for dq, *_ in parts), kv)
        kv, stay, travel = step(kv, None, None, offsets[1], second, None)
        joined = sends_backward(len(hops)) > len(hops)
        inner = (*offsets[2:], offsets[-1] + hops[-1]) if joined else offsets[2:]
        for run in _runs(inner, came=second):
            (kv, stay, travel), _ = lax.scan(functools.partial(loop, run=run), (kv, stay, travel), run.offsets)
        if second is not None and not joined:
            _, stay, travel = step(kv, stay, travel, offsets[-1], None, hops[-1])
        arrived = ring.send(travel, ring.devices - offsets[-1])
    dq, dk, dv, dbias = _join_heads([*parts, own(late)], k.shape[2])
    (dq, dbias), (dk, dv) = _add(stay, (dq, dbias)), _add(arrived, (dk, dv))
    dsinks = None if sinks is None else _sinks_gradient(sinks, out, lse, dout)
    cast = functools.partial(jax.tree.map, lambda grad, x: grad.astype(x.dtype))
    return (*cast((dq, dk, dv), (q, k, v)), cast(dbias, bias), cast(dsinks, sinks))


@_gradients.defjvp
def _gradients_jvp(ring: Ring, primals: Any, tangents: Any) -> Any:
    """Second derivatives, forward over reverse, with kernels in plain JAX. Reverse over reverse says that it is not."""
    if not ring.kernel.DIFFERENTIABLE:
        raise NotImplementedError("This kernel has no second derivatives. Use kernel='xla'.")
    found, tangents = jax.jvp(functools.partial(_gradients.fun, ring), primals, tangents)
    return found, jax.tree.map(_forward_only.bind, tangents)


def _refuse_reverse(*_: Any) -> Any:
    raise NotImplementedError(
        "Second derivatives of attention by jax.grad of jax.grad are not supported: how many tiles run is not known "
        "while tracing. Use forward over reverse, jax.jvp(jax.grad(f), (x,), (v,)), with kernel='xla'."
    )


# The identity, of which there is no transpose: JAX asks for one when it is to differentiate in reverse.
_forward_only = Primitive("attention_forward_only")
_forward_only.def_impl(lambda x: x)
_forward_only.def_abstract_eval(lambda x: x)
ad.deflinear2(_forward_only, _refuse_reverse)
batching.primitive_batchers[_forward_only] = lambda arrays, dims: (_forward_only.bind(*arrays), *dims)
mlir.register_lowering(_forward_only, lambda _, x: [x])

_ring_attention.defvjp(_forward, _backward)


def _runs(offsets: tuple[int, ...], came: int | None = None) -> list[_Run]:
    """The steps at all offsets but the last, which is where the hops end, grouped by the hops they make."""
    hops = [b - a for a, b in itertools.pairwise(offsets)]
    arrivals = [came, *hops]
    steps = zip(offsets, hops, arrivals, strict=False)
    return [
        _Run(np.array([offset for offset, _, _ in run], np.int32), places, came)
        for (places, came), run in itertools.groupby(steps, key=lambda s: s[1:])
    ]


def _add(a: Any, b: Any) -> Any:
    return b if a is None else jax.tree.map(jnp.add, a, b)


def sends_backward(hops: int) -> int:
    """How often a device sends k and v on in the backward pass of a ring of so many hops.

    Once a hop. Three hops would leave a loop of a single step, which is no loop to a compiler, and it may wait for
    transfers again. So there the last step joins the loop, and sends on what nobody needs, behind its own arithmetic.
    """
    return hops + 1 if hops == 3 else hops


class _Heads(NamedTuple):
    """Some query heads, and the key heads that they see."""

    queries: slice = slice(None)
    keys: slice = slice(None)


def _halves(heads: int, kv_heads: int) -> list[_Heads]:
    """All heads in two parts, or in one if there is but one. A single key head is seen by both parts."""
    if heads == 1:
        return [_Heads()]
    if kv_heads == 1:
        return [_Heads(slice(heads // 2)), _Heads(slice(heads // 2, None))]
    half, shared = kv_heads // 2, heads // kv_heads
    return [_Heads(slice(half * shared), slice(half)), _Heads(slice(half * shared, None), slice(half, None))]


def _own_gradients(ring: Ring, block: Block, rows: Any, kv: Any, heads: _Heads) -> tuple[Array, Array, Array, Any]:
    """dq, dk, dv and dbias of a device's own block, for some heads."""
    attend_grad = ring.kernel.attend_grad(*(x[:, :, heads.queries] for x in rows))
    block = dataclasses.replace(block, bias=jax.tree.map(lambda x: x[heads.queries], block.bias))
    return attend_grad(*(x[:, :, heads.keys] for x in kv), block)


def _join_heads(parts: list[Any], kv_heads: int) -> tuple[Array, Array, Array, Any]:
    """The gradients of all heads from those of some."""
    dq, dk, dv, dbias = zip(*parts, strict=True)
    join = functools.partial(jnp.concatenate, axis=2)
    dbias = jax.tree.map(lambda *halves: jnp.concatenate(halves), *dbias)
    return join(dq), *(sum(x[1:], x[0]) if kv_heads == 1 else join(x) for x in (dk, dv)), dbias


def _sinks_gradient(sinks: Array, out: Array, lse: Array, dout: Array) -> Array:
    share = jnp.where(jnp.isneginf(lse), 0, jnp.exp(sinks.astype(lse.dtype) - lse))
    return -jnp.sum(share * jnp.sum(out * dout, axis=-1), axis=(0, 1))


def _after(kv: Any, result: Array) -> Any:
    """kv as it is, but not before `result` is there.

    Nothing else keeps a compiler from sending keys all the way round before it begins to compute, which leaves most
    transfers nothing to hide behind; it drops `lax.optimization_barrier` before it puts a program in order. So one
    number of kv, which one depends on the result, is written over with itself: in place, in no time.
    """
    which = (result[(0,) * result.ndim] > 0).astype(jnp.int32)

    def one(x: Array) -> Array:
        index = [which if dim == 1 else jnp.zeros_like(which) for dim in range(x.ndim)]
        return lax.dynamic_update_slice(x, lax.dynamic_slice(x, index, [1] * x.ndim), index)

    return jax.tree.map(one, kv)

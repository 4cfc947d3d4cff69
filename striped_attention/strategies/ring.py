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

import functools
import itertools
from collections.abc import Callable, Iterator
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
from striped_attention.core.mask import Mask
from striped_attention.core.partial import Partial, accumulator, add_sinks, merge
from striped_attention.kernels.contract import Block
from striped_attention.strategies.exchange import from_heads, gather, scatter, send, to_heads
from striped_attention.strategies.head_groups import Heads, halves, join_heads, split_heads
from striped_attention.strategies.problem import Problem

# What a backward pass needs of a forward pass besides q, k and v. jax.checkpoint with the policy
# jax.checkpoint_policies.save_only_these_names(*SAVED) recomputes everything else, but never the ring.
SAVED = ("attention_out", "attention_lost", "attention_lse")


class _Keys(NamedTuple):
    """What a device holds of k and v: the part that travels, and what is gathered of it, None where nothing is."""

    part: Any
    gathered: Any

    @property
    def all(self) -> Any:
        return self.part if self.gathered is None else self.gathered


def _hold(problem: Problem, part: Any) -> _Keys:
    return _Keys(part, None if problem.strategy.gather == 1 else gather(problem, part))


class _Run(NamedTuple):
    """Steps that hop alike, for one loop: at each of `offsets`, send k and v on by `places`, having come by `came`."""

    offsets: np.ndarray
    places: int
    came: int | None


def ring_attention(
    problem: Problem,
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
    zero = lax.axis_index(problem.axis_name) * 0
    for leaf in jax.tree.leaves(inputs):
        zero = zero + jnp.zeros_like(leaf, shape=(), dtype=zero.dtype)
    inputs = jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), inputs)
    if problem.length == problem.padded_length:
        return _exchanged(problem, *inputs)
    # Nothing may come out of padding, not even the NaN that a model may have made there of zeros: 0 · NaN is NaN.
    held = problem.layout.positions(lax.axis_index(problem.axis_name), problem.padded_length, problem.devices)
    blank = lambda x: jnp.where((held < problem.length)[None, :, None, None], x, 0)  # noqa: E731
    return blank(_exchanged(problem, *map(blank, inputs[:3]), *inputs[3:]))


def _exchanged(problem: Problem, *inputs: Any) -> Array:
    """With tokens traded for heads, and back."""
    if problem.strategy.heads == 1:
        return _ring_attention(problem, *inputs)
    return from_heads(problem, _ring_attention(problem, *to_heads(problem, *inputs)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attention(problem: Problem, q: Any, k: Any, v: Any, mask: Mask, bias: Any, sinks: Any) -> Array:
    return _forward(problem, q, k, v, mask, bias, sinks)[0]


def ring_partial(problem: Problem, q: Any, k: Any, v: Any, mask: Mask, bias: Any) -> Partial:
    """The forward pass alone, with the log of the sums that its result was divided by."""
    block = problem.blocks(mask, bias)
    offsets = problem.offsets(mask)
    if len(offsets) == 1:
        return _own_partial(problem, block(0), q, (k, v))
    attend = problem.kernel.attend(q)

    def step(carry: Any, offset: Any, places: int) -> Any:
        keys, result = carry
        sent = _hold(problem, send(problem, keys.part, places))
        part = attend(*keys.all, block(offset))
        return (_after(sent, part.lse), merge(result, part)), None

    keys = _hold(problem, (k, v))
    sent = _hold(problem, send(problem, (k, v), offsets[1]))
    result = attend(*keys.all, block(0))
    keys = _after(sent, result.lse)
    for run in _runs(offsets[1:]):
        (keys, result), _ = lax.scan(functools.partial(step, places=run.places), (keys, result), run.offsets)
    return merge(result, attend(*keys.all, block(offsets[-1])))


def _own_partial(problem: Problem, block: Block, q: Array, kv: Any) -> Partial:
    """Attention to the keys of this device and of those that it gathers from, where no others are needed.

    Gathered keys come by groups of heads: while some are on their way, attention to the ones before runs.
    """
    parts: list[Partial] = []
    groups = split_heads(problem.strategy.gather, q.shape[2], kv[0].shape[2])
    done = lambda i: parts[i].lse  # noqa: E731
    for heads, keys in _gathered(problem, groups, kv, done, done):
        parts.append(problem.kernel.attend(q[:, :, heads.queries])(*keys, heads.of_block(block)))
    return parts[0] if len(parts) == 1 else Partial(*(jnp.concatenate(x, axis=2) for x in zip(*parts, strict=True)))


def _gathered(
    problem: Problem,
    groups: list[Heads],
    kv: Any,
    computed: Callable[[int], Array],
    settled: Callable[[int], Array],
) -> Iterator[tuple[Heads, Any]]:
    """Groups of heads and their gathered keys, each on its way while the group before it is worked on.

    Group i is worked on when `computed(i - 1)` is there, and gathered when `settled(i - 2)` is, which may be what comes
    back of transfers: so these come one after the other, and two groups are in memory at a time.
    """
    following = gather(problem, groups[0].of_keys(kv))
    for i, heads in enumerate(groups):
        keys = following if i == 0 else _after(following, computed(i - 1))
        if i + 1 < len(groups):
            part = groups[i + 1].of_keys(kv)
            following = gather(problem, part if i == 0 else _after(part, settled(i - 1)))
        yield heads, keys


def _forward(problem: Problem, q: Any, k: Any, v: Any, mask: Mask, bias: Any, sinks: Any) -> tuple[Array, Any]:
    dtype = accumulator(q.dtype)
    result = add_sinks(ring_partial(problem, q, k, v, mask, bias), sinks)
    out = checkpoint_name(result.out.astype(q.dtype), SAVED[0])
    # dq and dk are small differences of large numbers, one of them out · dout, so the backward pass needs all of out.
    # What rounding takes from it is kept in the inputs' dtype, at half the cost of keeping out in float32.
    lost = None
    if q.dtype != dtype and problem.kernel.FULL_OUT:
        lost = checkpoint_name((result.out - out.astype(dtype)).astype(q.dtype), SAVED[1])
    lse = checkpoint_name(result.lse, SAVED[2])
    return out, (q, k, v, mask, bias, sinks, out, lost, lse)


def _backward(problem: Problem, residuals: Any, dout: Array) -> Any:
    dq, dk, dv, dbias, dsinks = _gradients(problem, residuals, dout)
    return dq, dk, dv, None, dbias, dsinks


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(problem: Problem, residuals: Any, dout: Array) -> Any:
    """The gradients of q, k, v, bias and sinks."""
    q, k, v, mask, bias, sinks, out, lost, lse = residuals
    out, dout = out.astype(lse.dtype), dout.astype(lse.dtype)
    if lost is not None:
        out = out + lost.astype(lse.dtype)
    block = problem.blocks(mask, bias)
    offsets = problem.offsets(mask)
    attend_grad = problem.kernel.attend_grad(q, out, lse, dout)

    def step(keys: Any, stay: Any, travel: Any, offset: Any, places: int | None, came: int | None) -> Any:
        sent = None if places is None else _hold(problem, send(problem, keys.part, places))
        arrived = None if came is None else send(problem, travel, came)
        dq, dk, dv, dbias = attend_grad(*keys.all, block(offset))
        sent, part = _after(sent, dq), scatter(problem, (dk, dv))
        if problem.kernel.SUMS_LAST and sent is not None and arrived is not None:
            part = _after(part, sent.part[0])
        return sent, _add(stay, (dq, dbias)), _add(arrived, part)

    def loop(carry: Any, offset: Any, run: _Run) -> Any:
        keys, stay, travel = carry
        return step(keys, stay, travel, offset, run.places, run.came), None

    hops = [b - a for a, b in itertools.pairwise(offsets)]
    second = hops[1] if hops[1:] else None
    own = functools.partial(_own_gradients, problem, block(0), (q, out, lse, dout))
    *early, late = [(heads, heads.of_keys((k, v))) for heads in halves(problem.strategy.gather, q.shape[2], k.shape[2])]
    keys = _hold(problem, send(problem, (k, v), hops[0])) if hops else None
    parts = [own(heads, gather(problem, some)) for heads, some in early] if hops else []
    stay = arrived = None
    if hops:
        keys = functools.reduce(_after, (dq for dq, *_ in parts), keys)
        keys, stay, travel = step(keys, None, None, offsets[1], second, None)
        joined = sends_backward(len(hops)) > len(hops)
        inner = (*offsets[2:], offsets[-1] + hops[-1]) if joined else offsets[2:]
        for run in _runs(inner, came=second):
            (keys, stay, travel), _ = lax.scan(functools.partial(loop, run=run), (keys, stay, travel), run.offsets)
        if second is not None and not joined:
            _, stay, travel = step(keys, stay, travel, offsets[-1], None, hops[-1])
        arrived = send(problem, travel, problem.ring - offsets[-1])
        parts.append(own(late[0], gather(problem, late[1])))
        parts = [(dq, *scatter(problem, (dk, dv)), dbias) for dq, dk, dv, dbias in parts]
    else:
        groups = split_heads(problem.strategy.gather, q.shape[2], k.shape[2])
        computed: list[Array] = []
        for heads, some in _gathered(problem, groups, (k, v), lambda i: computed[i], lambda i: parts[i][1]):
            dq, dk, dv, dbias = own(heads, some)
            computed.append(dk)
            parts.append((dq, *scatter(problem, (dk, dv)), dbias))
    dq, dk, dv, dbias = join_heads(parts, k.shape[2])
    (dq, dbias), (dk, dv) = _add(stay, (dq, dbias)), _add(arrived, (dk, dv))
    dsinks = None if sinks is None else _sinks_gradient(sinks, out, lse, dout)
    cast = functools.partial(jax.tree.map, lambda grad, x: grad.astype(x.dtype))
    return (*cast((dq, dk, dv), (q, k, v)), cast(dbias, bias), cast(dsinks, sinks))


@_gradients.defjvp
def _gradients_jvp(problem: Problem, primals: Any, tangents: Any) -> Any:
    """Second derivatives, forward over reverse, with kernels in plain JAX. Reverse over reverse says that it is not."""
    if not problem.kernel.DIFFERENTIABLE:
        raise NotImplementedError("This kernel has no second derivatives. Use kernel='xla'.")
    found, tangents = jax.jvp(functools.partial(_gradients.fun, problem), primals, tangents)
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


def _own_gradients(problem: Problem, block: Block, rows: Any, heads: Heads, keys: Any) -> Any:
    """dq, dk, dv and dbias of a device's own block, for some heads and all of their keys in it."""
    return problem.kernel.attend_grad(*(x[:, :, heads.queries] for x in rows))(*keys, heads.of_block(block))


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

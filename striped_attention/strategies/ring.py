"""Ring: exact attention over the devices of a mesh axis, and its derivative.

Every device keeps its queries, or first exchanges heads for tokens with its neighbours. Keys and values travel: after j
hops of a ring a device holds those of the device j places before it. N devices need N - 1 hops, or fewer if the mask
shows at trace time that no device needs some of them. `forward` and `backward` describe each step.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from striped_attention.core.bias import Bias
from striped_attention.core.mask import Mask
from striped_attention.core.partial import Partial, accumulator, add_sinks
from striped_attention.strategies import exchange
from striped_attention.strategies.backward import Rows, gradients_of_rings
from striped_attention.strategies.forward import attend_rings
from striped_attention.strategies.head_groups import split_heads
from striped_attention.strategies.pipeline import Keys, settle
from striped_attention.strategies.problem import Problem

# What the backward pass needs from the forward pass besides q, k and v. With the policy
# jax.checkpoint_policies.save_only_these_names(*SAVED), jax.checkpoint recomputes everything else, but never the ring.
SAVED = ("attention_out", "attention_lost", "attention_lse")


def ring_attention(
    problem: Problem,
    q: Float[Array, "batch slots heads dim"],
    k: Float[Array, "batch key_slots kv_heads dim"],
    v: Float[Array, "batch key_slots kv_heads value_dim"],
    mask: Mask,
    bias: Bias | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch slots heads value_dim"] | Partial:
    """Compute exact attention of this device's queries to the keys of the whole ring, inside `shard_map`.

    If `problem.lse`, the result is a `Partial`, in float32 for any input dtype but float64.
    """
    # Loops under shard_map's check_vma require all inputs to vary over the same mesh axes. So add a zero that varies
    # over every axis that any input varies over. It costs nothing; its transpose sums gradients of replicated inputs.
    inputs = (q, k, v, mask, bias, sinks)
    zero = lax.axis_index(problem.axis_name) * 0
    for leaf in jax.tree.leaves(inputs):
        zero = zero + jnp.zeros_like(leaf, shape=(), dtype=zero.dtype)
    inputs = jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), inputs)
    # Padding must not affect the result. A model may have turned zeros into NaN there, and 0 · NaN is NaN.
    keys = problem.keys
    real, seen = (
        _real(problem, *sizes) for sizes in ((problem.length, problem.padded_length), (keys.length, keys.padded_length))
    )
    q, k, v, *rest = inputs
    result = _exchanged(problem, _blank(q, real), _blank(k, seen), _blank(v, seen), *rest)
    if problem.lse:
        return Partial(_blank(result.out, real), _blank(result.lse, real, -jnp.inf))
    return _blank(result, real)


def _real(problem: Problem, length: int, padded_length: int) -> Any:
    """Return which slots of this device hold real tokens; None if all do."""
    if length == padded_length:
        return None
    held = problem.layout.positions(lax.axis_index(problem.axis_name), padded_length, problem.devices)
    return held < length


def _blank(x: Array, real: Array | None, value: float = 0) -> Array:
    """Return an array [batch, slots, ...] with `value` in padding."""
    return x if real is None else jnp.where(real.reshape(1, -1, *[1] * (x.ndim - 2)), x, value)


def _exchanged(problem: Problem, *inputs: Any) -> Any:
    """Run the ring between the exchanges of heads for tokens and back, if the strategy has them."""
    if problem.strategy.heads == 1:
        return _ring_attention(problem, *inputs)
    result = _ring_attention(problem, *exchange.to_heads(problem, *inputs))
    return jax.tree.map(functools.partial(exchange.from_heads, problem), result)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attention(problem: Problem, q: Any, k: Any, v: Any, mask: Mask, bias: Any, sinks: Any) -> Any:
    return _forward(problem, q, k, v, mask, bias, sinks, keep=False)[0]


def ring_partial(problem: Problem, q: Any, k: Any, v: Any, mask: Mask, bias: Any) -> Partial:
    """Compute the forward pass alone, as a partial result with its lse."""
    groups = split_heads(problem.strategy.gather, q.shape[2], k.shape[2])
    attend = attend_rings(problem, problem.rings(mask), groups, q, problem.blocks(mask, bias))
    return attend(Keys((k, v)))


def _forward(
    problem: Problem, q: Any, k: Any, v: Any, mask: Mask, bias: Any, sinks: Any, keep: bool = True
) -> tuple[Any, Any]:
    """Return the result, and what the backward pass needs if `keep`."""
    if problem.lse:
        result = add_sinks(ring_partial(problem, q, k, v, mask, bias), sinks)
        result = Partial(checkpoint_name(result.out, SAVED[0]), checkpoint_name(result.lse, SAVED[2]))
        return result, (q, k, v, mask, bias, sinks, result.out, None, result.lse)
    # dq and dk are small differences of large terms, one of which is out · dout, so the backward pass needs `out` in
    # full precision. Its rounding error is kept in the inputs' dtype, at half the cost of keeping `out` in float32.
    keep = keep and q.dtype != accumulator(q.dtype) and problem.kernel.FULL_OUT
    if problem.kernel.attend_whole is not None and sinks is None and problem.whole(mask):
        block = problem.blocks(mask, bias)(*[0] * len(problem.rings(mask)))
        # Without the barrier, XLA for GPUs may run the kernel twice: once to use its results, once to store them.
        out, lost, lse = lax.optimization_barrier(problem.kernel.attend_whole(q)(k, v, block, keep))
    else:
        full, lse = add_sinks(ring_partial(problem, q, k, v, mask, bias), sinks)
        out = full.astype(q.dtype)
        lost = (full - out.astype(full.dtype)).astype(q.dtype) if keep else None
    lost = None if lost is None else checkpoint_name(lost, SAVED[1])
    out, lse = checkpoint_name(out, SAVED[0]), checkpoint_name(lse, SAVED[2])
    return out, (q, k, v, mask, bias, sinks, out, lost, lse)


def _backward(problem: Problem, residuals: Any, dout: Any) -> Any:
    if problem.kernel.DIFFERENTIABLE:
        dq, dk, dv, dbias, dsinks = _forward_differentiable(problem, residuals, dout)
    else:  # no custom_jvp: kernels cannot write to mutable arrays inside one
        *saved, out, lost, lse = residuals
        residuals = (*saved, _first_only.bind(out), lost, lse)
        dq, dk, dv, dbias, dsinks = _gradients(problem, residuals, dout)
    return dq, dk, dv, None, dbias, dsinks


def _gradients(problem: Problem, residuals: Any, dout: Any) -> Any:
    """Compute the gradients of q, k, v, bias and sinks from that of the result."""
    q, k, v, mask, bias, sinks, out, lost, lse = residuals
    dlse = None
    if problem.lse:
        dout, dlse = dout.out, jnp.where(jnp.isneginf(lse), 0, dout.lse)  # rows that see no key have no gradient
    out, dout = out.astype(lse.dtype), dout.astype(lse.dtype)
    if lost is not None:
        out = out + lost.astype(lse.dtype)
    groups = split_heads(problem.strategy.gather, q.shape[2], k.shape[2])
    rows, block = Rows(q, out, lse, dout, dlse), problem.blocks(mask, bias)
    gradients = gradients_of_rings(problem, problem.rings(mask), groups, rows, block)
    (dq, dbias), sums = gradients(Keys((k, v)))
    dk, dv = settle(problem, sums)
    dsinks = None if sinks is None else _sinks_gradient(sinks, out, lse, dout, dlse)
    cast = functools.partial(jax.tree.map, lambda grad, x: grad.astype(x.dtype))
    return (*cast((dq, dk, dv), (q, k, v)), cast(dbias, bias), cast(dsinks, sinks))


_forward_differentiable = jax.custom_jvp(_gradients, nondiff_argnums=(0,))


@_forward_differentiable.defjvp
def _gradients_jvp(problem: Problem, primals: Any, tangents: Any) -> Any:
    """Compute second derivatives, forward over reverse. Reverse over reverse raises."""
    found, tangents = jax.jvp(functools.partial(_gradients, problem), primals, tangents)
    return found, jax.tree.map(_forward_only.bind, tangents)


def _refuse_second(*_: Any) -> Any:
    raise NotImplementedError("This kernel has no second derivatives. Use kernel='xla'.")


def _refuse_reverse(*_: Any) -> Any:
    raise NotImplementedError(
        "Second derivatives of attention by jax.grad of jax.grad are not supported: the number of tiles is not known "
        "at trace time. Use forward over reverse, jax.jvp(jax.grad(f), (x,), (v,)), with kernel='xla'."
    )


def _identity(name: str) -> Primitive:
    """Return an identity primitive, whose differentiation rules are to be set by the caller."""
    same = Primitive(name)
    same.def_impl(lambda x: x)
    same.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[same] = lambda arrays, dims: (same.bind(*arrays), *dims)
    mlir.register_lowering(same, lambda _, x: [x])
    return same


_forward_only = _identity("attention_forward_only")  # reverse mode needs its transpose, which raises
ad.deflinear2(_forward_only, _refuse_reverse)
_first_only = _identity("attention_first_only")
ad.primitive_jvps[_first_only] = _refuse_second

_ring_attention.defvjp(_forward, _backward)


def _sinks_gradient(sinks: Array, out: Array, lse: Array, dout: Array, dlse: Array | None) -> Array:
    share = jnp.where(jnp.isneginf(lse), 0, jnp.exp(sinks.astype(lse.dtype) - lse))
    delta = jnp.sum(out * dout, axis=-1)
    return -jnp.sum(share * (delta if dlse is None else delta - dlse), axis=(0, 1))

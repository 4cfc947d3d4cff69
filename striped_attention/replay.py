"""Replay: all members of a ring on one device, one after the other, with nothing on the wire.

The same blocks, kernels and merges as in a ring of real devices, so the same numbers but for the order in which dk and
dv are added up: for checks where there is one GPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from striped_attention.kernel import Kernel, merge
from striped_attention.layout import Layout
from striped_attention.mask import Mask
from striped_attention.ring import Ring


def replay(
    q: Float[Array, "batch length heads dim"],
    k: Float[Array, "batch length kv_heads dim"],
    v: Float[Array, "batch length kv_heads dim"],
    dout: Float[Array, "batch length heads dim"],
    *,
    kernel: Kernel,
    layout: Layout,
    mask: Mask,
    members: int,
) -> tuple[Array, Array, Array, Array]:
    """out, dq, dk and dv of a ring, in text order, for arrays in text order and a mask without documents."""
    length = q.shape[1]
    ring = Ring("replayed", members, layout, length, length, kernel, q.shape[-1] ** -0.5)
    qs, ks, vs, douts = (jnp.split(layout.permute(x, members, 1), members, axis=1) for x in (q, k, v, dout))
    offsets = ring.offsets(mask)
    member = jax.jit(functools.partial(_member, ring, mask, offsets))
    outs, dqs = [], []
    dkvs: list[Any] = [None] * members
    for here in range(members):
        theres = [(here - offset) % members for offset in offsets]
        out, dq, parts = member(jnp.int32(here), qs[here], douts[here], [(ks[there], vs[there]) for there in theres])
        outs.append(out)
        dqs.append(dq)
        for there, part in zip(theres, parts, strict=True):
            dkvs[there] = part if dkvs[there] is None else jax.tree.map(jnp.add, dkvs[there], part)
    dks, dvs = zip(*dkvs, strict=True)
    back = lambda parts, x: layout.restore(jnp.concatenate(parts, axis=1), members, 1).astype(x.dtype)  # noqa: E731
    return back(outs, q), back(dqs, q), back(dks, k), back(dvs, v)


def _member(ring: Ring, mask: Mask, offsets: Any, here: Any, q: Any, dout: Any, kvs: Any) -> Any:
    """One member: its output and dq, and what it adds to the dk and dv of each block it meets."""
    blocks = [ring.block(mask, None, here, (here - offset) % ring.devices, offset == 0) for offset in offsets]
    attend = ring.kernel.attend(q)
    result = functools.reduce(merge, (attend(*kv, block) for kv, block in zip(kvs, blocks, strict=True)))
    out = result.out.astype(q.dtype)
    kept = result.out if ring.kernel.FULL_OUT else out.astype(result.out.dtype)
    attend_grad = ring.kernel.attend_grad(q, kept, result.lse, dout.astype(result.out.dtype))
    grads = [attend_grad(*kv, block) for kv, block in zip(kvs, blocks, strict=True)]
    return out, sum(grad[0] for grad in grads), [grad[1:3] for grad in grads]

"""Emulation: cuDNN's attention in plain JAX, so that the kernel can be tested on a CPU."""

import contextlib
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from striped_attention.core.oracle import dense_partial
from striped_attention.core.partial import accumulator
from striped_attention.kernels.cudnn import binding, kernel


def forward(q: Array, k: Array, v: Array, *, scale: float, causal: bool, window: int | None = None) -> list[Array]:
    """Emulate `binding.forward`."""
    assert q.shape[-1] % 8 == 0, "cuDNN requires a head dimension that is a multiple of 8"
    dtype, (q, k, v) = q.dtype, (x.astype(accumulator(x.dtype)) for x in (q, k, v))
    out, lse = dense_partial(q, k, v, _visible(q, k, causal, window)[None], scale=scale)
    return [out.astype(dtype), jnp.swapaxes(lse, 1, 2)]


def forward_lengths(q: Array, k: Array, v: Array, lengths: Array, *, scale: float) -> list[Array]:
    """Emulate `binding.forward_lengths`: heads first, and rows see the first `lengths` keys."""
    visible = (jnp.arange(k.shape[2]) < lengths[:, None])[:, None, :]
    visible = jnp.broadcast_to(visible, (len(lengths), q.shape[2], k.shape[2]))
    dtype, (q, k, v) = q.dtype, (jnp.swapaxes(x, 1, 2).astype(accumulator(x.dtype)) for x in (q, k, v))
    out, lse = dense_partial(q, k, v, visible, scale=scale)
    return [jnp.swapaxes(out, 1, 2).astype(dtype), jnp.swapaxes(lse, 1, 2)]


def backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> list[Array]:
    """Emulate `binding.backward`."""
    dtype, (q, k, v, out, dout) = q.dtype, (x.astype(accumulator(x.dtype)) for x in (q, k, v, out, dout))
    group = q.shape[2] // k.shape[2]
    heads = lambda x: jnp.repeat(x, group, axis=2)  # noqa: E731
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, heads(k)) * scale
    p = jnp.where(_visible(q, k, causal, window), jnp.exp(scores - lse[..., None]), 0)
    delta = jnp.swapaxes(jnp.sum(out * dout, axis=-1), 1, 2)
    ds = p * (jnp.einsum("bqhd,bkhd->bhqk", dout, heads(v)) - delta[..., None]) * scale
    fold = lambda x: x.reshape(*x.shape[:2], k.shape[2], group, -1).sum(3)  # noqa: E731
    dq = jnp.einsum("bhqk,bkhd->bqhd", ds, heads(k))
    dk, dv = fold(jnp.einsum("bhqk,bqhd->bkhd", ds, q)), fold(jnp.einsum("bhqk,bqhd->bkhd", p, dout))
    return [x.astype(dtype) for x in (dq, dk, dv)]


def _visible(q: Array, k: Array, causal: bool, window: int | None) -> np.ndarray:
    i, j = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])[None, :]
    seen = (j <= i) if causal else np.ones((q.shape[1], k.shape[1]), bool)
    return seen if window is None else seen & (j > i - window)


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Context manager in which the kernel runs on a CPU and also supports float32."""
    played = {"forward": forward, "forward_lengths": forward_lengths, "backward": backward}
    real = {name: getattr(binding, name) for name in played}
    try:
        for name, function in played.items():
            setattr(binding, name, function)
        kernel.RATES["cpu"] = kernel.RATES["gpu"]
        kernel.DTYPES.append("float32")
        binding.EMULATED = True
        yield
    finally:
        for name, function in real.items():
            setattr(binding, name, function)
        del kernel.RATES["cpu"]
        kernel.DTYPES.remove("float32")
        binding.EMULATED = False

"""cuDNN's fused attention, through the private entry points of JAX that the `cudnn` kernel needs.

`jax.nn.dot_product_attention` runs cuDNN too, but its backward pass always uses its own `out` and `lse`. A ring needs
the gradients of a block with the `out` and `lse` of the whole row, so this module calls the two underlying primitives.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

EMULATED = False  # True while tests run the kernel without a GPU
WORKS = ((0, 10), (0, 13))  # supported versions of JAX: from the first up to, but not including, the second
CUDNN = 91100  # 9.11: the first version that supports every GPU from Ampere to Blackwell


def unavailable() -> str | None:
    """Return why cuDNN cannot be used on this machine's GPUs, as a sentence; None if it can."""
    if EMULATED:
        return None
    jax_version = tuple(map(int, jax.__version__.split(".")[:2]))
    if not WORKS[0] <= jax_version < WORKS[1]:
        first, last = (".".join(map(str, v)) for v in WORKS)
        return f"It supports JAX {first} up to, but not including, {last}; this is JAX {jax.__version__}."
    if jax.default_backend() != "gpu":
        return f"It needs an NVIDIA GPU, and JAX runs on a {jax.default_backend()}."
    device = jax.local_devices()[0]
    if "cuda" not in device.client.platform_version:
        return f"It needs an NVIDIA GPU; this is a {device.device_kind}."
    if float(device.compute_capability) < 8:
        return f"It needs compute capability 8.0 (Ampere) or newer; this GPU has {device.compute_capability}."
    if version() < CUDNN:
        return f"It needs cuDNN {CUDNN} or newer; JAX has {version() or 'no cuDNN'}."
    return None


def version() -> int:
    """Return the version of cuDNN as an integer, e.g. 91900 for 9.19.0; 0 without cuDNN."""
    from jax._src.lib import cuda_versions

    return 0 if cuda_versions is None else int(cuda_versions.cudnn_get_version())


def forward(
    q: Float[Array, "batch queries heads dim"],
    k: Float[Array, "batch keys kv_heads dim"],
    v: Float[Array, "batch keys kv_heads dim"],
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> list[Array]:
    """Return the output in the dtype of q, and the log-sum-exp of the scores, [batch, heads, queries].

    With `causal`, row i sees the keys up to i; with a window, only the last `window` of those.
    """
    fused = _jax()
    nothing = jnp.zeros(0, q.dtype)
    return fused._dot_product_attention_fwd_p_wrapper.bind(
        *(q, k, v, *[nothing] * 7), **_options(fused, scale, causal, window), is_training=True
    )


def forward_lengths(
    q: Float[Array, "batch heads queries dim"],
    k: Float[Array, "batch kv_heads keys dim"],
    v: Float[Array, "batch kv_heads keys dim"],
    lengths: Int[Array, " batch"],
    *,
    scale: float,
) -> list[Array]:
    """Return the output, like q, and the log-sum-exp [batch, heads, queries]. Rows see the first `lengths` ≥ 1 keys."""
    fused = _jax()
    nothing = jnp.zeros(0, q.dtype)
    options = _options(fused, scale, causal=False, window=None)
    options |= dict(mask_type=fused.MaskType.PADDING, layout=fused.AttentionLayout.BNTH.value)
    rows = jnp.full(q.shape[0], q.shape[2], jnp.int32)
    return fused._dot_product_attention_fwd_p_wrapper.bind(
        *(q, k, v, nothing, rows, lengths, *[nothing] * 4), **options, is_training=True
    )


def backward(
    q: Float[Array, "batch queries heads dim"],
    k: Float[Array, "batch keys kv_heads dim"],
    v: Float[Array, "batch keys kv_heads dim"],
    out: Float[Array, "batch queries heads dim"],
    lse: Float[Array, "batch heads queries"],
    dout: Float[Array, "batch queries heads dim"],
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> list[Array]:
    """Return dq, dk, dv in the dtype of q, for any given `out` and `lse`."""
    fused = _jax()
    nothing = jnp.zeros(0, q.dtype)
    return fused._dot_product_attention_bwd_p_wrapper.bind(
        *(q, k, v, *[nothing] * 7, lse, out, dout), **_options(fused, scale, causal, window)
    )


def _jax() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _options(fused: Any, scale: float, causal: bool, window: int | None) -> dict[str, Any]:
    options = dict(
        scale=scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=window,
    )
    if tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12):
        options["score_mod"] = None
    return options

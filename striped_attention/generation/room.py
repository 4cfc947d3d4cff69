"""Room: sizes of caches and of prefill chunks.

Programs are compiled for fixed sizes and kept between runs. So sizes are rounded up to a few values, four per power of
two: 4096, 5120, 6144, 7168, 8192. Larger chunks keep the devices busier and take more memory, mostly for attention of
new tokens to the caches:

    per new token, on every device    its query in `dtype` and a float32 result, and the device's share of activations
    per chunk                         one layer's weights, its caches as kernels need them, a stage's activations
"""

import math
from typing import Any

import jax.numpy as jnp

from striped_attention.models.config import ModelConfig

LEAST, LARGEST = 1024, 65_536  # tokens of a chunk: in all, and per device
STAGE = 8192  # tokens of all sequences that a stage processes at a time


def coarse(size: int) -> int:
    """Round up to one of a few sizes: at most a quarter larger; up to 64, the next power of two."""
    power = 1 << (size - 1).bit_length()
    step = power // 8 if size > 64 else power
    return -(-size // step) * step


def stage_chunk(batch: int) -> int:
    """Return the number of tokens per sequence that a stage processes at a time."""
    return max(STAGE // batch, 256)


def weight_bytes(config: ModelConfig, devices: int, dtype: Any) -> int:
    """Estimate the bytes of weights per device."""
    return config.parameters * jnp.dtype(dtype).itemsize // devices


def cache_bytes(config: ModelConfig, devices: int, batch: int, capacity: int, dtype: Any) -> int:
    """Return the bytes of all layers' caches per device."""
    kept = sum(min(capacity, layer.window or capacity) * number for layer, number in config.kinds.items())
    return 2 * batch * kept * config.kv_heads * config.head_dim * jnp.dtype(dtype).itemsize // devices


def prefill_bytes(config: ModelConfig, devices: int, batch: int, capacity: int, chunk: int, dtype: Any) -> int:
    """Estimate the bytes per device that prefill of a chunk takes besides weights and caches."""
    width, tokens = jnp.dtype(dtype).itemsize, batch * chunk
    queries = config.heads * config.head_dim
    everybody = tokens * queries * (2 * width + 6)
    mine = tokens * (3 * queries * width + 2 * config.dim * width) // devices
    cache = cache_bytes(config, devices, batch, capacity, dtype) // config.layers
    outside = config.vocabulary * config.dim * (1 if config.tied else 2)
    layer = (config.parameters - outside) // config.layers * width
    stage = batch * min(stage_chunk(batch), -(-chunk // devices)) * 3 * config.ffn * width
    return everybody + mine + cache + layer + stage


def prefill_chunk(
    config: ModelConfig, devices: int, batch: int, capacity: int, longest: int, dtype: Any, budget: float
) -> int:
    """Return the largest chunk, in tokens per sequence, whose prefill fits in `budget` bytes per device."""
    fixed = weight_bytes(config, devices, dtype) + cache_bytes(config, devices, batch, capacity, dtype)
    chunk = 1 << math.ceil(math.log2(max(min(longest, LARGEST * devices), LEAST)))
    while chunk > LEAST and fixed + prefill_bytes(config, devices, batch, capacity, chunk, dtype) > budget:
        chunk //= 2
    return chunk

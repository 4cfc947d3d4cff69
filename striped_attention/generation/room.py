"""Room: how long caches are, and how many tokens of a prompt are prefilled at a time.

Programs are compiled for sizes, and compiled programs are kept between runs. So sizes are rounded up to few different
ones, four from each power of two to the next: 4096, 5120, 6144, 7168, 8192. The larger the chunks of a prompt, the
busier the devices, and the more memory they take, mostly for attention of all new tokens to what is in the caches:

    per device, of every new token    its query, in whichever dtype, and a float32 result; what is local besides
    besides                           one layer's weights, its caches as kernels want them, a stage's activations
"""

import math
from typing import Any

import jax.numpy as jnp

from striped_attention.models.llama import ModelConfig

LEAST, LARGEST = 1024, 65_536  # tokens of a chunk, per device the latter
STAGE = 8192  # tokens of all sequences that a stage takes at a time


def coarse(size: int) -> int:
    """The next of few sizes: at most a quarter larger, or up to 64 the next power of two."""
    power = 1 << (size - 1).bit_length()
    step = power // 8 if size > 64 else power
    return -(-size // step) * step


def stage_chunk(batch: int) -> int:
    """Tokens per sequence that a stage takes at a time."""
    return max(STAGE // batch, 256)


def weight_bytes(config: ModelConfig, devices: int, dtype: Any) -> int:
    """Of a device, about."""
    return config.parameters * jnp.dtype(dtype).itemsize // devices


def cache_bytes(config: ModelConfig, devices: int, batch: int, capacity: int, dtype: Any) -> int:
    """Of a device, all layers."""
    kept = sum(min(capacity, layer.window or capacity) * number for layer, number in config.kinds.items())
    return 2 * batch * kept * config.kv_heads * config.head_dim * jnp.dtype(dtype).itemsize // devices


def prefill_bytes(config: ModelConfig, devices: int, batch: int, capacity: int, chunk: int, dtype: Any) -> int:
    """What prefill of a chunk takes on a device besides weights and caches, about."""
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
    """Tokens per sequence that are prefilled at a time: as many as `budget` bytes per device allow."""
    fixed = weight_bytes(config, devices, dtype) + cache_bytes(config, devices, batch, capacity, dtype)
    chunk = 1 << math.ceil(math.log2(max(min(longest, LARGEST * devices), LEAST)))
    while chunk > LEAST and fixed + prefill_bytes(config, devices, batch, capacity, chunk, dtype) > budget:
        chunk //= 2
    return chunk

"""Cost: FLOPs, memory and communication of a training step, from shapes alone. Nothing is compiled or allocated.

FLOPs are model FLOPs, as in MFU, without recomputation: 2 per weight and token forward and 4 backward; for attention
4 · dim per visible pair and head forward, and twice that backward.
"""

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from striped_attention.core.layout import Layout
from striped_attention.core.mask import Mask
from striped_attention.kernels.choice import KERNELS
from striped_attention.kernels.contract import make_request
from striped_attention.models.config import ModelConfig
from striped_attention.models.llama import KEEP_ALL, loss_chunk
from striped_attention.strategies.messages import FLOAT32, Messages
from striped_attention.strategies.strategy import Strategy
from striped_attention.strategies.workload import adapted, messages_of


@runtime_checkable
class Job(Protocol):
    """Everything that a step's cost depends on; the options of `striped train` provide it."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def remat(self) -> str: ...
    @property
    def chunk(self) -> int | None: ...
    @property
    def accumulate(self) -> int: ...
    @property
    def kernel(self) -> str: ...

    def make_layout(self, devices: int) -> Layout: ...
    def make_strategy(self, devices: int) -> Strategy: ...
    def known_masks(self) -> list[tuple[Mask, int]]: ...


def visible_pairs(mask: Mask, length: int) -> int:
    """Count the visible (query, key) pairs under a mask's rule; documents, which reduce them, are ignored."""
    rule = mask.rule
    hidden = length - min(length, length if rule.window is None else rule.window)
    prefix = length if rule.prefix is None else min(rule.prefix, length)
    later = max(0, prefix - 1)  # keys after its own that the first query may see, the second sees one less, and so on
    ahead = later if rule.ahead is None else min(rule.ahead, later)
    triangle = lambda n: n * (n + 1) // 2  # noqa: E731
    return triangle(length) + triangle(ahead) + (later - ahead) * ahead - triangle(hidden)


def matrix_flops(model: ModelConfig, tokens: int) -> int:
    """Model FLOPs of a step outside attention. An untied embedding is a lookup and counts nothing."""
    looked_up = 0 if model.tied else model.vocabulary * model.dim
    return 6 * (model.parameters - looked_up) * tokens


def attention_flops(model: ModelConfig, pairs: int) -> int:
    """Model FLOPs of a step's attention in all layers, for the visible pairs of all sequences."""
    return model.layers * layer_flops(model, pairs)


def layer_flops(model: ModelConfig, pairs: int) -> int:
    """Model FLOPs of one layer's attention; layers with different windows have different pairs."""
    return 12 * model.heads * model.head_dim * pairs


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of one step, per device. `memory` has bytes by purpose, `sent` bytes by kind of message."""

    parameters: int
    devices: int
    layout: str
    padded_length: int
    memory: dict[str, int]
    matrix_flops: int
    attention_flops: int
    attention_share: float
    sent: dict[str, int]
    hop_bytes: int
    hops: int
    replicated: tuple[str, ...]

    @property
    def total_memory(self) -> int:
        return sum(self.memory.values())


def estimate(config: Job, mesh: dict[str, int]) -> Cost:
    """Estimate a step of this run on a mesh of these sizes, without documents, which is the most work.

    `remat` must not be auto (see `budget.within`). Without a chunk, stages process all tokens at once.
    """
    model, sequence = config.model, mesh["sequence"]
    devices = math.prod(mesh.values())
    layout = config.make_layout(sequence)
    padded = layout.padded_length(config.sequence_length, sequence)
    specs = model.specs(devices)
    sizes = _sizes(model)
    shards = {name: size // devices if _is_split(specs, name) else size for name, size in sizes.items()}
    sequences = config.batch // mesh["data"] // config.accumulate  # per micro-batch
    tokens = sequences * padded // sequence
    width = 2 if config.dtype == "bfloat16" else FLOAT32
    masks, length = config.known_masks(), config.sequence_length
    attention = sum(n * layer_flops(model, config.batch * visible_pairs(mask, length)) for mask, n in masks)
    matrices = matrix_flops(model, config.batch * config.sequence_length)
    query, key = (
        jax.ShapeDtypeStruct((sequences, padded // sequence, heads, model.head_dim), config.dtype)
        for heads in (model.heads, model.kv_heads)
    )
    messages = []
    for mask, layers in masks:
        plain = make_request(
            query,
            key,
            mask=mask,
            layout=layout,
            devices=sequence,
            length=config.sequence_length,
            softcap=model.softcap,
            platform="cpu",  # nothing here depends on it
            here=False,
        )
        messages.append((messages_of(plain, adapted(config.make_strategy(sequence), plain)), layers))
    most = max((one for one, _ in messages), key=lambda one: one.memory)
    return Cost(
        parameters=model.parameters,
        devices=devices,
        layout=repr(layout),
        padded_length=padded,
        memory=_memory(config, model, tokens, width, sizes, sum(shards.values()), most),
        matrix_flops=matrices // devices,
        attention_flops=attention // devices,
        attention_share=_attention_share(config, attention, matrices),
        sent=_sent(config, sizes, specs, devices, width, messages),
        hop_bytes=messages[0][0].hop,
        hops=messages[0][0].hops,
        replicated=tuple(name for name in sizes if not name.endswith("norm") and not _is_split(specs, name)),
    )


def _attention_share(config: Job, attention: int, matrices: int) -> float:
    """Attention's share of all FLOPs executed, recomputation included; backward recomputes each tile's scores."""
    done = attention * (4.5 if config.remat == "full" else 3.5) / 3
    return done / (done + matrices * matrix_work(config.model, config.remat))


def matrix_work(model: ModelConfig, remat: str) -> float:
    """Return the ratio of executed to model FLOPs in matrix products.

    The forward pass is a third of the model FLOPs. Unless products are kept, layers are computed twice; the projections
    of queries, keys and values are computed three times where their outputs are not kept.
    """
    if remat in KEEP_ALL:
        return 1.0
    layer = {name: size for name, size in _sizes(model).items() if name not in _OUTER}
    first, layers = sum(layer[name] for name in ("query", "key", "value")), sum(layer.values())
    again = layers if remat == "qkv" else layers + first
    return 1 + again / (layers + model.vocabulary * model.dim) / 3


def _memory(
    config: Job, model: ModelConfig, tokens: int, width: int, sizes: dict[str, int], shard: int, messages: Messages
) -> dict[str, int]:
    layer = {name: size // model.layers for name, size in sizes.items() if name not in _OUTER}
    queries, keys = messages.queries, messages.keys
    # The rounding error of the result, which `cudnn` does not need; assumed kept if the kernel is not known.
    full_out = config.kernel not in KERNELS or KERNELS[config.kernel].FULL_OUT
    lost = 1 if width < FLOAT32 and full_out else 0
    kept_result = queries * width * (1 + lost) + tokens * model.heads * FLOAT32
    inputs = (queries + 2 * keys) * width
    normed = (queries + keys) * (model.head_norms or model.wide_norms) + tokens * model.dim * (model.norms != "before")
    products = (tokens * (model.dim + 2 * model.ffn) + normed) * width
    kept = {"full": 0, "attention": kept_result, "qkv": kept_result + inputs}
    kept["none"] = kept["qkv"] + products
    kept["unrolled"] = kept["none"] + (2 * tokens * model.dim + sum(layer.values())) * width
    stages = [
        sum(layer[name] for name in ("query", "key", "value")),
        sum(layer[name] for name in ("output", "gate", "up", "down")),
    ]
    # Embedding, gathered, and a chunk's gradient; the sum of gradients, its scaled copy, and one temporary.
    vocabulary = sizes["embedding"] * (2 * width + 3 * FLOAT32)
    chunk = min(config.chunk or tokens, tokens)
    scores = min(loss_chunk(chunk, model.vocabulary), tokens) * model.vocabulary
    chunk = tokens if config.remat in KEEP_ALL else chunk
    periods = _memory_of_periods(config, model, sum(layer.values()), shard, width)
    return {
        "weights": shard * FLOAT32,
        "optimiser": 2 * shard * FLOAT32,
        "gradients": shard * FLOAT32 * (2 if config.accumulate > 1 else 1),
        "kept for the backward pass": model.layers * (tokens * model.dim * width + kept[config.remat]),
        "gathered weights and their gradient": max(max(stages) * (width + FLOAT32), vocabulary),
        "attention and communication": messages.memory + 2 * tokens * model.dim * width,  # plus x and its gradient
        "activations of one chunk": max(chunk * 3 * model.ffn * (width + FLOAT32), scores * 2 * FLOAT32),
        **({"layers of a period": periods} if periods else {}),
    }


def _memory_of_periods(config: Job, model: ModelConfig, layer: int, shard: int, width: int) -> int:
    """Extra memory of a scan over periods of several layers, compared to one over layers, as XLA for CPUs compiles it.

    The compiler may gather the weights of all layers of a period at once, and sum their gradients at once. Without
    rematerialisation, each layer's slice of the period's weights is kept. Layers left over after the last whole period
    are sliced off as copies, and so are their gradients.
    """
    if model.period == 1 or config.remat == "unrolled":
        return 0
    copies = (1 if config.remat in ("none", "qkv") else 0) + (2 if model.layers % model.period else 0)
    return (model.period - 1) * layer * (width + 2 * FLOAT32) + copies * shard * FLOAT32


def _sent(
    config: Job, sizes: dict[str, int], specs: Any, devices: int, width: int, messages: list[tuple[Messages, int]]
) -> dict[str, int]:
    """Bytes that a device sends in a step; `messages` has pairs of a layer's messages and a number of such layers."""
    parts = config.accumulate
    all_to_all, forward = (
        sum(n * size(one) for one, n in messages) for size in (lambda m: m.all_to_all, lambda m: m.forward)
    )
    gathered = parts * sum(size for name, size in sizes.items() if _is_split(specs, name)) * (devices - 1) // devices
    # Once forward, once backward for the gradients, and once more where the forward pass is recomputed.
    times = 3 if config.remat in ("attention", "full") else 2
    exchanged = {"heads, all-to-all": times * parts * all_to_all} if all_to_all else {}
    gathers, often = (1, "once") if config.remat == "unrolled" else (2, "twice")
    return {
        **exchanged,
        "keys and values, forward": parts * forward,
        "keys and values, backward": parts * forward,
        "gradients of keys and values": parts * forward // width * FLOAT32,
        f"weights, gathered {often}": gathers * gathered * width,
        "weights' gradients": gathered * FLOAT32,
    }


_OUTER = ("embedding", "norm", "unembedding")


def _sizes(model: ModelConfig) -> dict[str, int]:
    """Return the number of elements of each weight, summed over layers."""
    named = jax.tree_util.tree_leaves_with_path(model.shapes, is_leaf=lambda x: isinstance(x, tuple))
    return {path[-1].key: int(np.prod(shape)) for path, shape in named}


def _is_split(specs: Any, name: str) -> bool:
    spec = specs[name] if name in _OUTER else specs["layers"][name]
    return any(entry is not None for entry in spec)


def gigabytes(size: int) -> str:
    """Format a number of bytes for display."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"

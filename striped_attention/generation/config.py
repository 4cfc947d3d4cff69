"""Config: every option of `striped generate`, `striped import` and `striped export`, once."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import tyro

from striped_attention.core.layout import BASELINE, DEFAULT, Layout, LayoutName, has_stripes, named_layout
from striped_attention.errors import UsageError
from striped_attention.generation.sample import Sampling
from striped_attention.inference.attention import prefill_requests
from striped_attention.kernels.choice import choose, choose_stripes
from striped_attention.kernels.contract import Request
from striped_attention.models.llama import ModelConfig
from striped_attention.options import Path, Text, Whole, check_at_least, check_shared, parse_asked
from striped_attention.strategies.choice import choose_strategy
from striped_attention.strategies.strategy import AUTO, RING, Strategy, exchanged

Folder = Annotated[pathlib.Path, tyro.conf.arg(metavar="PATH")]


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Let a model write on. Prompts may be longer than one device can hold: the cache is dealt to all devices.

    The text of one prompt is shown as it comes; of several, one line of JSON each is written when they are done.
    """

    model: Folder
    """Folder of a run of `striped train`, of what `striped import` wrote, or of a Hugging Face model (Llama, Mistral,
    Qwen: config.json, safetensors, tokenizer.json)."""
    prompt: Text = None
    """Text to go on from. Default: what comes through standard input."""
    prompts: Path = None
    """A file of prompts: one a line, or in a .jsonl lines like {"prompt": "Once upon"}."""
    output: Path = None
    """Where lines of JSON go, one a prompt. Default: of --prompts to standard output."""
    max_tokens: int = 256
    """Tokens to write, at most."""
    temperature: float = 0.0
    """0 takes the likeliest token every time; 1 draws by the model's probabilities; more is more daring."""
    top_k: Whole = None
    """Draw from this many of the likeliest tokens. Default: from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities add up to this."""
    seed: int = 0
    """Of what is drawn. The same seed gives the same text, whatever the batch."""
    batch: int = 8
    """Prompts at a time."""
    capacity: Whole = None
    """Tokens a text may have, prompt included: what the cache is made for. Default: as the prompts need."""
    chunk: int = 8192
    """Tokens of a prompt that are read at a time; less needs less memory."""
    tokenizer: Path = None
    """A Hugging Face tokenizer.json. Default: the model's own; bytes if it was trained on bytes."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights, cache and arithmetic."""
    layout: LayoutName = DEFAULT
    """How tokens, and so the cache, are dealt to the devices. striped is balanced at every length."""
    stripe: Whole = None
    """Tokens of a stripe. Default: 1 with the kernel cudnn, else a tile, or less where a device has few tokens."""
    strategy: str = AUTO
    """How queries and keys of a prompt meet: ring (keys travel), heads (each device takes all new tokens for its share
    of the heads), gather (each device gathers all new keys), or groups of neighbours and a ring of groups, like heads=2
    or heads=2,inner=4 (a double ring). auto: what is planned to be the fastest of those that fit in memory."""
    kernel: str = "auto"
    """Attention kernel for prompts: xla, cudnn (NVIDIA GPUs) or pallas_tpu (TPUs); auto takes the fastest that can."""

    cpu_devices: Whole = None
    """Run on this many virtual CPU devices (of each process)."""
    local_processes: Whole = None
    """Start this many processes on this machine, connected like a cluster; each gets cores of its own."""
    coordinator: Text = None
    """Address host:port of process 0, where JAX does not find the others by itself."""
    num_processes: Whole = None
    """How many processes there are in all."""
    process_id: Whole = None
    """Which of them this one is, from 0."""

    def __post_init__(self) -> None:
        check_shared(self)
        check_at_least(
            self, {"temperature": 0} | dict.fromkeys(("max_tokens", "batch", "chunk", "top_k", "capacity"), 1)
        )
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p must be above 0 and at most 1; got {self.top_p}.")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise UsageError("--top-k and --top-p are for drawing: give a --temperature above 0 too, like 1.")
        if self.prompt is not None and self.prompts is not None:
            raise UsageError("--prompt and --prompts exclude each other: leave one of them out.")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)

    def settle(
        self, model: ModelConfig, devices: int, batch: int, capacity: int, platform: str, kind: str
    ) -> tuple[Layout, Strategy]:
        """The layout of prompts and cache, and the strategy of prefill; raises if the kernel cannot follow them."""
        ask = functools.partial(self._requests, model, devices, batch, capacity, platform, kind)
        among, _ = ask(self._layout(ask, RING))
        try:
            strategy = choose_strategy(parse_asked(self.strategy), among, self.kernel, forward_only=True)
        except ValueError as error:
            raise UsageError(f"--strategy {self.strategy}: {error}") from error
        layout = self._layout(ask, strategy)
        among, before = ask(layout)
        try:
            for request in (exchanged(strategy, among), before):
                choose(self.kernel, request)
        except NotImplementedError as error:
            raise UsageError(str(error).replace(f"Kernel {self.kernel!r}", f"--kernel {self.kernel}", 1)) from error
        return layout, strategy

    def _layout(self, ask: Callable[[Layout], tuple[Request, Request]], strategy: Strategy) -> Layout:
        if self.stripe is not None or not has_stripes(self.layout):
            return named_layout(self.layout, self.stripe or 1)
        among, _ = ask(BASELINE)
        return choose_stripes(self.kernel, exchanged(strategy, among), among.queries, strategy.heads)

    def _requests(
        self, model: ModelConfig, devices: int, batch: int, capacity: int, platform: str, kind: str, layout: Layout
    ) -> tuple[Request, Request]:
        """What prefill asks of attention kernels: among new tokens, by a ring, and of new tokens to the cache."""
        new = layout.padded_length(min(capacity, self.chunk), devices) // devices
        room = layout.padded_length(capacity, devices) // devices
        dtype = jnp.dtype(self.dtype)
        query, key = (
            jax.ShapeDtypeStruct((batch, new, n, model.head_dim), dtype) for n in (model.heads, model.kv_heads)
        )
        cached = jax.ShapeDtypeStruct((batch, model.kv_heads, room, model.head_dim), dtype)
        return prefill_requests(
            *(query, key, cached),
            layout=layout,
            devices=devices,
            window=model.window,
            platform=platform,
            device_kind=kind,
        )


@dataclasses.dataclass(frozen=True)
class ImportConfig:
    """Turn a Hugging Face model (Llama, Mistral, Qwen; safetensors) into a checkpoint of ours."""

    model: Folder
    """The model's folder: config.json, safetensors, and tokenizer.json if it has one."""
    output: Folder
    """A new folder for the checkpoint."""


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Turn a checkpoint of `striped train` or `striped import` into a Hugging Face model."""

    model: Folder
    """The run's folder; its newest checkpoint is taken."""
    output: Folder
    """A new folder for config.json, safetensors and tokenizer.json."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of the weights in the files."""
    tokenizer: Path = None
    """A tokenizer.json to put beside them. Default: the run's own, if it has one."""

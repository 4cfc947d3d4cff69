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
from striped_attention.inference.attention import prefill_requests
from striped_attention.kernels.choice import choose, choose_stripes
from striped_attention.kernels.contract import Request
from striped_attention.models.llama import ModelConfig
from striped_attention.options import (
    Count,
    Number,
    Path,
    Strings,
    Text,
    Whole,
    check_at_least,
    check_shared,
    parse_asked,
)
from striped_attention.strategies.choice import choose_strategy
from striped_attention.strategies.strategy import AUTO, RING, Strategy, exchanged

Folder = Annotated[pathlib.Path, tyro.conf.arg(metavar="PATH")]


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Generate text from a model. Prompts may be longer than one device can hold: all devices share the cache.

    The text that follows one prompt is shown as it is generated; of several prompts each gives one line of JSON.
    """

    model: Folder
    """Folder of a run of `striped train`, of what `striped import` wrote, or of a Hugging Face model (Llama, Mistral,
    Qwen, Gemma 2 and 3, Phi-3 and 4, OLMo 2: config.json, safetensors, tokenizer.json)."""
    prompt: Text = None
    """The prompt. Default: standard input."""
    prompts: Path = None
    """A file of prompts: one per line, or a .jsonl with lines like {"prompt": "Once upon"}, whose further fields are
    kept in the output, or with --chat {"messages": [{"role": "user", "content": "Hello"}]}."""
    chat: bool = False
    """Make each prompt the user's message of a conversation, in the model's own chat template. Without a prompt, on a
    terminal: an interactive conversation, until an empty line."""
    system: Text = None
    """System message at the beginning of a conversation, with --chat."""
    save_cache: Path = None
    """Save the cache of the prompt in this new file (safetensors), for --cache. There must be one prompt."""
    cache: Path = None
    """Go on from a file of --save-cache: prompts, which must begin with the text that was saved, are prefilled from
    there on. The model, its weights and --dtype must be those of the file; devices and layout may be others."""
    output: Path = None
    """File for lines of JSON, one per prompt. Default: standard output for --prompts."""
    max_tokens: Whole = None
    """Generate at most this many tokens per prompt. Default: max_new_tokens of generation_config.json, else 256."""
    stop: Strings = ()
    """End the text before this string, wherever it appears; may be given several times. Default: stop_strings of
    generation_config.json."""
    temperature: Number = None
    """0 takes the likeliest token every time; 1 samples from the model's probabilities; higher is more random. Default:
    that of generation_config.json if its do_sample is true, else 0."""
    top_k: Whole = None
    """Sample from this many of the likeliest tokens. Default: that of generation_config.json, else from all."""
    top_p: Number = None
    """Sample from the fewest tokens whose probabilities add up to this. Default: that of generation_config.json, else
    1: from all."""
    min_p: Number = None
    """Sample from tokens at least this many times as likely as the likeliest. Default: that of generation_config.json,
    else 0: from all."""
    seed: int = 0
    """Seed of sampling. The same seed gives the same text, whatever the batch."""
    logprobs: Count = None
    """Add the log probability of every token to the lines of JSON, and of the N likeliest tokens in its place. They are
    those of the model itself: before temperature, top-k, top-p and min-p, in float32."""
    batch: int = 8
    """Prompts at a time."""
    capacity: Whole = None
    """Tokens per sequence, prompt included, that the cache has room for. Default: as many as the prompts need; for an
    interactive conversation 8192, or the model's length if that is less."""
    chunk: Whole = None
    """Tokens of a prompt that are prefilled at a time. Default: as many as --memory allows."""
    memory: float = 0.9
    """The part of each device's memory that may be used. --chunk follows from it."""
    tokenizer: Path = None
    """A Hugging Face tokenizer.json. Default: the model's own; bytes if it was trained on bytes."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of weights, cache and arithmetic."""
    layout: LayoutName = DEFAULT
    """How tokens, and so the cache, are sharded over the devices. striped is balanced at every length."""
    stripe: Whole = None
    """Tokens per stripe. Default: 1 with the kernel cudnn, else a tile, or less where a device has few tokens."""
    strategy: str = AUTO
    """How queries and keys of a prompt meet across devices: ring (keys travel), heads (each device takes all new tokens
    for its share of the heads), gather (each device gathers all new keys), or groups of neighbours and a ring of
    groups, like heads=2 or heads=2,inner=4 (a double ring). auto: what is planned to be the fastest of those that fit
    in memory."""
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
        counts = ("max_tokens", "batch", "chunk", "top_k", "capacity")
        check_at_least(self, {"temperature": 0, "min_p": 0} | dict.fromkeys(counts, 1))
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p must be above 0 and at most 1; got {self.top_p}.")
        if self.min_p is not None and self.min_p > 1:
            raise UsageError(f"--min-p must be at most 1; got {self.min_p}.")
        if not 0 < self.memory <= 1:
            raise UsageError(f"--memory must be above 0 and at most 1, a part of a device's memory; got {self.memory}.")
        if self.prompt is not None and self.prompts is not None:
            raise UsageError("--prompt and --prompts exclude each other: leave one of them out.")
        if self.system is not None and not self.chat:
            raise UsageError("--system is the first message of a conversation: give --chat too.")
        if "" in self.stop:
            raise UsageError("--stop must not be empty: every text contains the empty string.")
        self._check_logprobs()

    def _check_logprobs(self) -> None:
        if self.logprobs is None:
            return
        if len(self.logprobs) > 1 or min(self.logprobs, default=0) < 0:
            numbers = " ".join(map(str, self.logprobs))
            raise UsageError(f"--logprobs takes one number of alternatives, at least 0, or none; got {numbers}.")
        if self.prompts is None and self.output is None:
            raise UsageError("--logprobs are written in lines of JSON: give --output or --prompts.")

    @property
    def interactive(self) -> bool:
        """Whether prompts are typed one after the other; see `command.with_prompt`."""
        return self.chat and self.prompt is None and self.prompts is None

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens --logprobs asks for; None without --logprobs."""
        return None if self.logprobs is None else (*self.logprobs, 0)[0]

    def settle(
        self, model: ModelConfig, devices: int, batch: int, capacity: int, platform: str, kind: str
    ) -> tuple[Layout, Strategy]:
        """The layout of prompts and cache, and the strategy of prefill; raises if the kernel cannot follow them."""
        layers = [*model.kinds]  # those without a window first: they are what takes the time
        of_layer = lambda layer: functools.partial(  # noqa: E731
            self._requests, layer, devices, batch, capacity, platform, kind
        )
        ask = of_layer(layers[0])
        among, _ = ask(self._layout(ask, RING))
        try:
            strategy = choose_strategy(parse_asked(self.strategy), among, self.kernel, forward_only=True)
        except ValueError as error:
            raise UsageError(f"--strategy {self.strategy}: {error}") from error
        layout = self._layout(ask, strategy)
        try:
            for layer in layers:
                among, before = of_layer(layer)(layout)
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
        assert self.chunk is not None  # settled
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
            softcap=model.softcap,
            platform=platform,
            device_kind=kind,
        )


@dataclasses.dataclass(frozen=True)
class ImportConfig:
    """Turn a Hugging Face model (Llama, Mistral, Qwen, Gemma, Phi, OLMo; safetensors) into a checkpoint of ours."""

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
    """Data type of the weights in the files."""
    tokenizer: Path = None
    """A tokenizer.json to put beside them. Default: the run's own, if it has one."""

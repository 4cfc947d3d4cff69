"""Config: the command-line options of `striped generate`, `striped import` and `striped export`."""

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
from striped_attention.models.config import ModelConfig
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
    """Generate text from a model. Prompts may be longer than one device can hold: all devices share the KV cache.

    With one prompt, the text is printed as it is generated; with --prompts or --output, each prompt gives one line of
    JSON.
    """

    model: Folder
    """Folder of a `striped train` run, of a checkpoint from `striped import`, or of a Hugging Face model (Llama,
    Mistral, Qwen, Gemma 2 and 3, Phi-3 and 4, OLMo 2: config.json, safetensors, tokenizer.json)."""
    prompt: Text = None
    """The prompt. Default: standard input."""
    prompts: Path = None
    """A file of prompts: one per line, or a .jsonl with lines like {"prompt": "Once upon"} or, with --chat,
    {"messages": [{"role": "user", "content": "Hello"}]}. Further fields of a line are copied to the output."""
    chat: bool = False
    """Send each prompt as a user message, in the model's own chat template. Without a prompt, on a terminal: chat
    interactively, until an empty line."""
    system: Text = None
    """System message at the beginning of each conversation; requires --chat."""
    save_cache: Path = None
    """Save the KV cache of the prompt to this new file (safetensors), for --cache. Requires exactly one prompt."""
    cache: Path = None
    """Continue from a file of --save-cache. Prompts must begin with the saved text; only the rest is prefilled. The
    model, its weights and --dtype must be those of the file; devices and layout may differ."""
    output: Path = None
    """Write one line of JSON per prompt to this file. Default with --prompts: standard output."""
    max_tokens: Whole = None
    """Maximum number of new tokens per prompt. Default: max_new_tokens of generation_config.json, else 256."""
    stop: Strings = ()
    """Stop before this string when it appears in the generated text; may be given several times. Default: stop_strings
    of generation_config.json."""
    temperature: Number = None
    """0 always takes the most likely token; 1 samples from the model's distribution; higher is more random. Default:
    that of generation_config.json if its do_sample is true, else 0."""
    top_k: Whole = None
    """Sample from this many most likely tokens. Default: that of generation_config.json, else all tokens."""
    top_p: Number = None
    """Sample from the smallest set of most likely tokens whose probabilities add up to this. Default: that of
    generation_config.json, else 1 (all tokens)."""
    min_p: Number = None
    """Sample from tokens whose probability is at least this fraction of the highest one. Default: that of
    generation_config.json, else 0 (all tokens)."""
    seed: int = 0
    """Random seed for sampling. The same seed gives the same text, whatever --batch is."""
    logprobs: Count = None
    """Add the log probability of every generated token to the lines of JSON, and those of the N most likely tokens at
    its position. They are the model's own, in float32, before temperature, top-k, top-p and min-p."""
    batch: int = 8
    """Prompts processed at a time."""
    capacity: Whole = None
    """Cache capacity in tokens per sequence, prompt included. Default: the longest prompt and --max-tokens; for an
    interactive conversation 8192, or the model's maximum length if that is less."""
    chunk: Whole = None
    """Tokens per prompt that are prefilled at a time. Default: as many as --memory allows."""
    memory: float = 0.9
    """Fraction of each device's memory that may be used; it sets the default of --chunk."""
    tokenizer: Path = None
    """A Hugging Face tokenizer.json. Default: the model's own, or bytes if it was trained on bytes."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of weights, cache and computation."""
    layout: LayoutName = DEFAULT
    """How tokens, and with them the cache, are sharded over devices. striped is balanced at every length."""
    stripe: Whole = None
    """Tokens per stripe. Default: 1 with the kernel cudnn, else one tile, or less where a device has few tokens."""
    strategy: str = AUTO
    """Sequence parallelism of prefill: ring (keys and values travel round a ring), heads (each device takes all new
    tokens for its share of the heads), gather (each device gathers all new keys), or groups of neighbouring devices
    and a ring of groups, like heads=2 or heads=2,inner=4 (a double ring). auto takes the strategy that is planned to
    be the fastest of those that fit in memory."""
    kernel: str = "auto"
    """Attention kernel for prefill: xla, cudnn (NVIDIA GPUs), pallas_tpu (TPUs) or auto (the fastest that works)."""

    cpu_devices: Whole = None
    """Run on this many virtual CPU devices per process."""
    local_processes: Whole = None
    """Start this many processes on this machine, connected like a cluster; each gets its own CPU cores."""
    coordinator: Text = None
    """Address host:port of process 0, for clusters that JAX does not detect by itself."""
    num_processes: Whole = None
    """Total number of processes."""
    process_id: Whole = None
    """Index of this process, from 0."""

    def __post_init__(self) -> None:
        check_shared(self)
        counts = ("max_tokens", "batch", "chunk", "top_k", "capacity")
        check_at_least(self, {"temperature": 0, "min_p": 0} | dict.fromkeys(counts, 1))
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p must be above 0 and at most 1; got {self.top_p}.")
        if self.min_p is not None and self.min_p > 1:
            raise UsageError(f"--min-p must be at most 1; got {self.min_p}.")
        if not 0 < self.memory <= 1:
            raise UsageError(
                f"--memory must be above 0 and at most 1, a fraction of a device's memory; got {self.memory}."
            )
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
            raise UsageError(f"--logprobs takes at most one number, at least 0; got {numbers}.")
        if self.prompts is None and self.output is None:
            raise UsageError("--logprobs requires lines of JSON as output: give --output or --prompts.")

    @property
    def interactive(self) -> bool:
        """Whether prompts are typed interactively; see `command.with_prompt`."""
        return self.chat and self.prompt is None and self.prompts is None

    @property
    def alternatives(self) -> int | None:
        """Number of most likely tokens that --logprobs asks for; None without --logprobs."""
        return None if self.logprobs is None else (*self.logprobs, 0)[0]

    def settle(
        self, model: ModelConfig, devices: int, batch: int, capacity: int, platform: str, kind: str
    ) -> tuple[Layout, Strategy]:
        """Return the layout of prompts and cache, and the prefill strategy. Raise if the kernel cannot do them."""
        layers = [*model.kinds]  # layers without a window first: they take the most time
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
        """Return the kernel requests of prefill: among new tokens, by a ring, and of new tokens to the cache."""
        assert self.chunk is not None  # set by `command`
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
    """Convert a Hugging Face model (Llama, Mistral, Qwen, Gemma, Phi, OLMo; safetensors) to a `striped` checkpoint."""

    model: Folder
    """Folder of the model: config.json, safetensors, and tokenizer.json if it has one."""
    output: Folder
    """New folder for the checkpoint."""


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Convert a checkpoint of `striped train` or `striped import` to a Hugging Face model."""

    model: Folder
    """Folder of the run; its newest checkpoint is exported."""
    output: Folder
    """New folder for config.json, safetensors and tokenizer.json."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of the weights in the files."""
    tokenizer: Path = None
    """A tokenizer.json to include. Default: the run's own, if it has one."""

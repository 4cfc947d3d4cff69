"""Config: all options of `striped train`: flags, help, defaults and the record kept with a run."""

import dataclasses
import math
import os
import pathlib
from typing import Annotated, Any, Literal, cast

import jax
import numpy as np
import tyro

import striped_attention as sa
from striped_attention.core.layout import BASELINE, DEFAULT, Layout, LayoutChoice, has_stripes, named_layout
from striped_attention.core.mask import Mask
from striped_attention.data import Columns, Data, Named, all_raw, check, kept_tokenizer, load
from striped_attention.errors import UsageError
from striped_attention.kernels.choice import choose_stripes, layouts_for
from striped_attention.kernels.contract import Request, make_request
from striped_attention.models.config import PRESETS, ModelConfig
from striped_attention.options import Length, Number, Path, Paths, Sources, Text, Whole, check_at_least, check_shared
from striped_attention.runtime.hardware import HARDWARE, Hardware, hardware_of
from striped_attention.strategies.strategy import AUTO, Strategy, exchanged, parse_strategy, resolve
from striped_attention.strategies.workload import adapted
from striped_attention.training.rope import parse_scaling, scaled

# Options for the shape of a model trained from scratch.
SHAPE = ("preset", "layers", "dim", "ffn", "heads", "kv_heads", "vocabulary")
Hidden = Annotated[Any, tyro.conf.Suppress, tyro.conf.Fixed]  # not a command-line option: set before a run begins


Preset = Annotated[
    Literal["debug", "1b", "3b", "7b", "llama3-8b"] | None,
    tyro.conf.arg(metavar="{debug,1b,3b,7b,llama3-8b}", help_behavior_hint=""),
]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a causal language model on sequences longer than one device can hold.

    Without options, a small model is trained on the source code of Python's standard library, on all available devices.
    To try several devices on one CPU: striped train --cpu-devices 8
    """

    preset: Preset = None
    """Shape of a model trained from scratch. 1b, 3b and 7b are the LLaMA shapes of the Striped Attention paper;
    llama3-8b uses grouped-query attention. Default: debug, a small one."""
    start_from: Path = None
    """Folder of a model to start from: a Hugging Face model (Llama, Mistral, Qwen, Gemma 2 and 3, Phi-3 and 4, OLMo 2),
    the output of `striped import`, or a run of `striped train`. The run takes over its weights, shape, vocabulary and
    tokenizer; the optimiser state is fresh. Default: random weights."""
    rope_theta: Number = None
    """Base of the rotary position embeddings; a larger one suits longer sequences. For Gemma 3 it applies to the layers
    without a window. Default: the model's own; 10000 for most presets."""
    rope_scaling: Text = None
    """Scale rotary positions for sequences longer than the model was trained on: linear:4, yarn:8, llama3:8, or none.
    Replaces any scaling that the model has. The length before scaling is the model's own; yarn:8,original=8192 sets
    another one. Models from scratch need it for yarn and llama3. Default: the model's scaling."""
    sequence_length: Length = 2048
    """Tokens per sequence, such as 786432, 256k (× 1024) or 1M (× 1024²). Any number works: sequences are padded to
    divide equally over the devices, and padding is masked out."""
    batch: int = 1
    """Sequences per step, over all devices."""
    accumulate: int = 1
    """Gradient accumulation: split each batch into this many parts, processed one after the other. The update is that
    of the whole batch."""
    devices: Whole = None
    """Devices that share each sequence, the same as --mesh sequence=N. Default: all devices, or those of --mesh."""
    mesh: Text = None
    """Devices per mesh axis, like data=2,sequence=4: the sequences of a batch are split over data, the tokens of a
    sequence over sequence. Default: all devices on sequence."""
    layout: LayoutChoice = "auto"
    """How tokens are distributed over the devices of the sequence axis. contiguous is plain Ring Attention; striped and
    zigzag balance the load of causal attention. auto: the one that is planned to be the fastest for the mask, strategy
    and hardware."""
    stripe: Whole = None
    """Tokens per stripe. Default: about a tile, 256 on CPUs and 1024 elsewhere; a smaller power of two if a device has
    few tokens; 1 for the kernel cudnn."""
    strategy: str = AUTO
    """Sequence parallelism: ring (keys and values travel round a ring), heads (all-to-all: each device takes the whole
    sequence for its share of the heads), gather (each device gathers all keys and values), or groups of neighbouring
    devices and a ring of groups, like heads=2 or heads=2,gather=4; inner=8 makes a double ring. auto takes the strategy
    that is planned to be the fastest of those that fit in memory."""
    steps: int = 100
    """Total steps of the run, including those before a resume."""
    seed: int = 0
    """Seed of the initial weights and the order of the data."""

    data: Sources = None
    """Training data: UTF-8 text, JSON lines, Parquet or Arrow (text and JSON lines also as .gz or .zst); a folder of
    files of one of these kinds, or saved by the library datasets; the output of `striped tokenize`; or tokens as .npy
    or .bin (raw uint16, or uint32 for a vocabulary above 65536). Several sources are mixed by weight, like a=0.7 b=0.3,
    or else by size. Default: the source code of Python's standard library, as bytes."""
    text_column: Text = None
    """Column of JSON lines, Parquet and Arrow that holds the text. Default: text."""
    loss_column: Text = None
    """Column with the spans of the text that count in the loss: [[start, end], …], in characters, end excluded.
    Default: all tokens count."""
    chat_column: Text = None
    """Column with conversations, [{"role": …, "content": …}, …], instead of text. The chat template beside --tokenizer
    formats them, and only the assistant's messages count in the loss."""
    data_cache: Path = None
    """Folder that caches the tokens of --data, so that it is tokenised only once. Default: striped_attention/tokens in
    the user's cache folder, $XDG_CACHE_HOME or ~/.cache."""
    tokenizer: Path = None
    """A Hugging Face tokenizer.json for text; a copy is kept in --checkpoint-dir. Default: the tokenizer of
    --start-from, or else one token per byte."""
    end_token: Whole = None
    """Token that ends a document in .npy and .bin data. Without it, all of the data is one document."""

    validation: Paths = None
    """Held-out data: one or more sources in the formats of --data. Its loss, overall and by position, is computed
    before the first step, every --validate-every steps and after the last step. Default: no validation."""
    validate_every: Whole = None
    """Steps between validations. Default: 100."""
    validation_sequences: Whole = None
    """Sequences per validation, spread evenly over the held-out data. Default: 32, or all if there are fewer."""

    checkpoint_dir: Path = None
    """Folder of the run: checkpoints, run.json with its options, metrics.jsonl and TensorBoard files. Default: nothing
    is saved."""
    checkpoint_every: int = 100
    """Steps between checkpoints. One is also saved after the last step and on SIGTERM or Ctrl-C."""
    keep: int = 2
    """Number of checkpoints to keep: the newest ones."""
    resume: bool = False
    """Resume from the newest checkpoint in --checkpoint-dir, with the options in its run.json; options given here
    override them. The mesh and the layout may change."""

    learning_rate: float = 3e-4
    """Peak learning rate, reached after warm-up."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after warm-up: cosine decay to a tenth of the peak at the last step, or constant."""
    warmup: Whole = None
    """Steps of learning rate warm-up. Default: a tenth of the steps, at most 100."""
    weight_decay: float = 0.1
    """Weight decay of AdamW, for matrices only."""
    clip: float = 1.0
    """Gradient clipping: the largest global norm. Larger gradients are scaled down to it."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the model's computation. Weights, gradient sums and optimiser state are always float32."""
    memory: float = 0.9
    """Fraction of each device's memory that the run may use. It determines the defaults of --remat and --chunk."""
    remat: Literal["auto", "unrolled", "none", "qkv", "attention", "full"] = "auto"
    """What each layer keeps for the backward pass; it recomputes the rest. none keeps every matrix product, qkv keeps
    attention's output and inputs, attention keeps its output, full keeps nothing. unrolled is none without a loop over
    layers, for GPUs: fewer copies, but more memory and longer compiling. auto keeps as much as fits into --memory."""
    chunk: Whole = None
    """Tokens per device that the feed-forward layers and the loss process at a time. Default: as many as fit into
    --memory."""
    kernel: str = "auto"
    """Attention kernel: xla runs everywhere, pallas_tpu on TPUs, hopper on NVIDIA Hopper GPUs, cudnn on NVIDIA GPUs for
    data without documents. auto takes the fastest usable."""
    tile: Whole = None
    """Side length of the kernel's tiles, in tokens. Default: the kernel's own."""
    deterministic: bool = False
    """Make runs bitwise reproducible on the same devices and versions. This costs speed on GPUs: kernels that
    accumulate in no fixed order, such as cudnn, are not used. CPUs and TPUs are always deterministic."""

    layers: Whole = None
    """Number of layers, instead of the preset's."""
    dim: Whole = None
    """Width of the model (hidden size), instead of the preset's."""
    ffn: Whole = None
    """Width of the feed-forward layers, instead of the preset's."""
    heads: Whole = None
    """Number of query heads, instead of the preset's."""
    kv_heads: Whole = None
    """Number of key-value heads, instead of the preset's."""
    vocabulary: Whole = None
    """Vocabulary size. Default: that of the tokenizer, rounded up to a multiple of 128, or else the preset's. Bytes
    need 257."""

    dry_run: bool = False
    """Only print what the run would need: parameters, memory by part, FLOPs, bytes sent."""
    hardware: Text = None
    """With --dry-run: the hardware to plan for, a100, h100, h200, b200, v4, v5e, v5p, v6e (TPUs) or cpu. Default: h100,
    or cpu with --cpu-devices."""
    wandb: Text = None
    """Also log to this Weights & Biases project (needs the extra wandb). --resume continues the same W&B run."""
    profile: Path = None
    """Write a JAX trace of three steps to this folder, for TensorBoard, XProf or Perfetto."""

    cpu_devices: Whole = None
    """Run on this many virtual CPU devices per process."""
    local_processes: Whole = None
    """Start this many processes on this machine, connected like a cluster; each gets its own CPU cores."""
    coordinator: Text = None
    """Address host:port of process 0. This and the next two options are not needed on SLURM, Open MPI, Cloud TPU and,
    with the package kubernetes, Kubernetes."""
    num_processes: Whole = None
    """Total number of processes."""
    process_id: Whole = None
    """Index of this process, from 0."""

    shape: Hidden = None
    own_tokenizer: Hidden = None

    def __post_init__(self) -> None:
        check_shared(self)
        at_least = dict.fromkeys(("sequence_length", "batch", "steps", "checkpoint_every", "keep", "chunk", "tile"), 1)
        at_least |= dict.fromkeys(("accumulate", "validate_every", "validation_sequences", "devices"), 1)
        check_at_least(self, at_least | dict.fromkeys(("learning_rate", "weight_decay"), 0))
        if self.devices is not None and self.mesh is not None:
            raise UsageError(
                f"--devices {self.devices} is short for --mesh sequence={self.devices}: remove one of them."
            )
        assert self.columns  # raises if the columns exclude each other
        if self.warmup is not None and not 0 <= self.warmup < self.steps:
            raise UsageError(f"--warmup must be at least 0 and less than the {self.steps} steps; got {self.warmup}.")
        if not 0 < self.memory <= 1:
            raise UsageError(
                f"--memory must be above 0 and at most 1, a fraction of a device's memory; got {self.memory}."
            )
        if not self.clip > 0:  # NaN is rejected too
            raise UsageError(f"--clip must be above 0; got {self.clip}. To disable clipping, give a large number.")
        for option in ("validate_every", "validation_sequences"):
            if getattr(self, option) is not None and self.validation is None:
                raise UsageError(f"--{option.replace('_', '-')} needs --validation, the held-out data.")
        if self.resume and self.checkpoint_dir is None:
            raise UsageError("--resume needs --checkpoint-dir, the folder of the run to continue.")
        if self.hardware is not None and not self.dry_run:
            raise UsageError("--hardware is for --dry-run; a run uses the devices of this machine. Leave it out.")
        if self.hardware is not None and self.hardware not in HARDWARE:
            raise UsageError(f"--hardware must be one of {', '.join(HARDWARE)}; got {self.hardware}.")
        if self.rope_theta is not None and not 1 < self.rope_theta < math.inf:
            raise UsageError(f"--rope-theta must be a number above 1; got {self.rope_theta}.")
        if self.rope_scaling is not None:
            parse_scaling(self.rope_scaling)
        for name in SHAPE if self.start_from is not None else ():
            if getattr(self, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for models from scratch; with --start-from, the model sets it. "
                    f"Leave out one of the two options."
                )

    @property
    def columns(self) -> Columns:
        """The columns of a record that hold the text, and the parts of it that count in the loss."""
        return Columns(self.text_column, self.loss_column, self.chat_column)

    @property
    def model(self) -> ModelConfig:
        """The preset with the shape options applied; with --start-from, the model found by `start.look`."""
        if self.shape is not None:
            return self.shape
        if self.start_from is not None:
            raise ValueError("The model of --start-from is not known yet: call training.start.look first.")
        same = {field.name for field in dataclasses.fields(ModelConfig)} - {"rope_scaling"}  # here it is text
        names = [name for name in vars(self) if name in same]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        try:
            model = dataclasses.replace(PRESETS[self.preset or "debug"], **given)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return model if self.rope_scaling is None else scaled(model, self.rope_scaling, None)

    def load(self, sources: Named) -> Data:
        """Load the sources of --data or --validation."""
        options = (self.tokenizer_for(sources), self.end_token, self.model.vocabulary, self.columns, self.data_cache)
        return load(sources, *options, self._together)

    def check(self, sources: Named) -> None:
        """Raise if the sources of --data or --validation cannot be loaded, without reading all of them."""
        if sources is None and self.tokenizer is None and self.own_tokenizer is not None:
            return  # the model's own tokenizer and the default data always exist
        tokenizer = self.tokenizer_for(sources)
        if tokenizer is None and not all_raw(sources):
            tokenizer = kept_tokenizer(self.data)
        check(sources, tokenizer, self.end_token, self.model.vocabulary, self.columns, self._together)

    @property
    def documents(self) -> bool:
        """Whether the document boundaries of --data are known. Depends only on the kinds of files."""
        return self.end_token is not None or not all_raw(self.data)

    @property
    def _together(self) -> tuple[Named, ...]:
        """All sources that the data options apply to."""
        return (self.data,) if self.validation is None else (self.data, self.validation)

    def tokenizer_for(self, sources: Named) -> pathlib.Path | None:
        """The tokenizer for data: the given one, or else the model's own if the data is text."""
        return self.tokenizer or (None if all_raw(sources) else self.own_tokenizer)

    @property
    def assumed(self) -> Hardware:
        """The hardware that a dry run assumes: --hardware, or else GPUs, or CPUs with --cpu-devices."""
        if self.hardware is not None:
            return HARDWARE[self.hardware]
        return hardware_of("gpu" if self.cpu_devices is None else "cpu")

    def make_layout(self, devices: int, documents: bool = True, platform: str | None = None, kind: str = "") -> Layout:
        """The layout for this many devices on the sequence axis, with or without packed documents.

        Without a platform, as in a dry run, no device is touched: stripes are chosen for the assumed hardware. `settle`
        must have replaced the layout "auto" before; otherwise it means stripes.
        """
        if self.stripe is not None or not (has_stripes(self.layout) or self.layout == AUTO):
            return named_layout(DEFAULT if self.layout == AUTO else self.layout, self.stripe or 1)
        return choose_stripes(*self._stripes_for(devices, documents, platform, kind))

    def layouts(
        self, devices: int, documents: bool = True, platform: str | None = None, kind: str = ""
    ) -> list[Layout]:
        """The layouts that `settle` compares: several for the layout "auto", or else the requested one."""
        if self.layout == AUTO and self.stripe is None:
            return layouts_for(*self._stripes_for(devices, documents, platform, kind))
        return [self.make_layout(devices, documents, platform, kind)]

    def with_layout(self, layout: Layout) -> "TrainConfig":
        """The same run with this layout."""
        stripe = layout.stripe if has_stripes(layout.name) else None
        return dataclasses.replace(self, layout=cast(LayoutChoice, layout.name), stripe=stripe)

    def _stripes_for(
        self, devices: int, documents: bool, platform: str | None, kind: str
    ) -> tuple[str, Request, int, int]:
        """The arguments of `choose_stripes` and `layouts_for`."""
        here = platform is not None
        request = self.request(BASELINE, devices, documents, *self.platform_and_kind(platform, kind), here=here)
        return self.kernel, request, -(-self.sequence_length // devices), devices // request.devices

    def platform_and_kind(self, platform: str | None, kind: str) -> tuple[str, str]:
        """Return the arguments; without a platform, those of the assumed hardware."""
        return (self.assumed.platform, next(iter(self.assumed.kinds), "")) if platform is None else (platform, kind)

    def make_strategy(self, devices: int) -> Strategy:
        """The strategy for this many devices on the sequence axis; `settle` must have replaced "auto" before."""
        try:
            return resolve(parse_strategy(self.strategy), devices, self.model.heads)
        except ValueError as error:
            raise UsageError(f"--strategy {self.strategy}: {error}") from error

    def known_masks(self) -> list[tuple[Mask, int]]:
        """The masks known at trace time (everything but documents), each with the number of layers that use it."""
        return [(layer.mask, count) for layer, count in self.model.kinds.items()]

    def request(
        self,
        layout: Layout,
        devices: int,
        documents: bool,
        platform: str,
        kind: str = "",
        here: bool = True,
        mask: Mask | None = None,
    ) -> Request:
        """The request to an attention kernel on each of `devices` devices of the sequence axis.

        It is for layers with `mask`, one of `known_masks`; by default the one that sees the most.
        """
        slots = layout.padded_length(self.sequence_length, devices) // devices
        query, key = (
            jax.ShapeDtypeStruct((1, slots, heads, self.model.head_dim), self.dtype)
            for heads in (self.model.heads, self.model.kv_heads)
        )
        mask = self.model.mask if mask is None else mask
        if documents:
            mask = mask & sa.documents(np.zeros((1, self.sequence_length), np.int32))
        plain = make_request(
            query,
            key,
            mask=mask,
            layout=layout,
            devices=devices,
            length=self.sequence_length,
            softcap=self.model.softcap,
            tile=None if self.tile is None else (self.tile, self.tile),
            deterministic=self.deterministic,
            platform=platform,
            device_kind=kind,
            here=here,
        )
        return exchanged(adapted(self.make_strategy(devices), plain), plain)

    def record(self) -> dict[str, Any]:
        """All options as JSON-compatible values. Paths are absolute: a run can be resumed from any folder."""
        options = {name: value for name, value in vars(self).items() if name not in ("shape", "own_tokenizer")}
        for name, value in options.items():
            if isinstance(value, pathlib.Path):
                options[name] = os.path.abspath(value)
            elif name in ("data", "validation") and value is not None:
                options[name] = tuple(map(os.path.abspath, value))  # of PATH=WEIGHT, too
        return options

"""Config: every option of `striped train`, once: its flags, help, defaults and the record kept with a run."""

import dataclasses
import math
import pathlib
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

import striped_attention as sa
from striped_attention.core.layout import BASELINE, DEFAULT, Layout, LayoutName, has_stripes, named_layout
from striped_attention.core.mask import Mask
from striped_attention.data import Columns, Data, Named, all_raw, check, kept_tokenizer, load
from striped_attention.errors import UsageError
from striped_attention.kernels.choice import choose_stripes
from striped_attention.kernels.contract import Request, make_request
from striped_attention.models.llama import PRESETS, ModelConfig
from striped_attention.options import Number, Path, Paths, Sources, Text, Whole, check_at_least, check_shared
from striped_attention.strategies.strategy import AUTO, Strategy, exchanged, parse_strategy, resolve
from striped_attention.strategies.workload import adapted
from striped_attention.training.rope import parse_scaling, scaled

# Options that say the shape of a model from scratch.
SHAPE = ("preset", "layers", "dim", "ffn", "heads", "kv_heads", "vocabulary")
Hidden = Annotated[Any, tyro.conf.Suppress, tyro.conf.Fixed]  # no option: filled in before a run begins


Preset = Annotated[
    Literal["debug", "1b", "3b", "7b", "llama3-8b"] | None,
    tyro.conf.arg(metavar="{debug,1b,3b,7b,llama3-8b}", help_behavior_hint=""),
]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a causal language model on sequences longer than one device can hold.

    Without options a small model learns Python from the standard library's sources, on whatever devices there are. To
    see several devices on one CPU: striped train --cpu-devices 8
    """

    preset: Preset = None
    """Shape of a model from scratch. 1b, 3b and 7b are LLaMA's as in the Striped Attention paper; llama3-8b has grouped
    heads. Default: debug, a small one."""
    start_from: Path = None
    """Folder of a model to start from: a Hugging Face model (Llama, Mistral, Qwen, Gemma 2 and 3, Phi-3 and 4, OLMo 2),
    the output of `striped import`, or a run of `striped train`. Its weights, shape, vocabulary and tokenizer are taken;
    the optimiser is fresh. Default: random weights."""
    rope_theta: Number = None
    """Base of the rotary positions; a larger one suits longer sequences. Of Gemma 3 it is that of the layers without a
    window. Default: the model's own, 10000 for most presets."""
    rope_scaling: Text = None
    """Scale rotary positions for longer sequences than the model learned on: linear:4, yarn:8, llama3:8, or none. It
    replaces any scaling that the model has. The length before scaling is the model's own; yarn:8,original=8192 says
    another, and models from scratch need it. Default: the model's scaling."""
    sequence_length: int = 2048
    """Tokens of one sequence. Any number: what the devices cannot share equally is padded and never seen."""
    batch: int = 1
    """Sequences a step, over all devices."""
    accumulate: int = 1
    """Parts of a batch that are worked on one after the other, for larger batches than fit at once. The update is that
    of the whole batch."""
    mesh: Text = None
    """Devices per axis, like data=2,sequence=4: sequences of a batch over data, tokens of a sequence over sequence.
    Default: every device on sequence."""
    layout: LayoutName = DEFAULT
    """How tokens are dealt to the devices of the sequence axis. contiguous is Ring Attention, striped is balanced."""
    stripe: Whole = None
    """Tokens of a stripe. Default: about a tile, 256 on CPUs, 1024 elsewhere; a smaller power of two where a device has
    few tokens; 1 for the kernel cudnn."""
    strategy: str = AUTO
    """How queries and keys of different devices meet: ring (keys travel), heads (each device takes the whole sequence
    for its share of the heads), gather (each device gathers all keys), or groups of neighbours and a ring of groups,
    like heads=2 or heads=2,gather=4; inner=8 makes a double ring. auto: what is planned to be the fastest of those that
    fit in memory."""
    steps: int = 100
    """Steps of the whole run, those before a resume included."""
    seed: int = 0
    """For the first weights and the order of the data."""

    data: Sources = None
    """Text in UTF-8, JSON lines, Parquet or Arrow (text and JSON lines also as .gz or .zst), a folder of files of one
    of these kinds or of the library datasets, what striped tokenize wrote, or tokens as .npy or .bin (raw uint16, or
    uint32 for a vocabulary beyond 65536). Several sources are mixed: with weights, like a=0.7 b=0.3, or by size.
    Default: the sources of Python's standard library, as bytes."""
    text_column: Text = None
    """The column of JSON lines, Parquet and Arrow that holds the text. Default: text."""
    loss_column: Text = None
    """A column that says which parts of the text count in the loss: [[start, end], …], in characters, end excluded.
    Default: all of it counts."""
    chat_column: Text = None
    """A column of conversations, [{"role": …, "content": …}, …], instead of text. The chat template beside --tokenizer
    makes them text, and what the assistant says counts in the loss."""
    data_cache: Path = None
    """Folder for the tokens of --data, which are made once. Default: striped_attention/tokens in the user's cache
    folder, $XDG_CACHE_HOME or ~/.cache."""
    tokenizer: Path = None
    """A Hugging Face tokenizer.json for text; a copy is kept in --checkpoint-dir. Default: that of --start-from, or
    bytes are tokens."""
    end_token: Whole = None
    """The token that ends a document in .npy and .bin data. Without it all of it counts as one document."""

    validation: Paths = None
    """Held-out data, one or more sources in the forms that --data takes. Its loss, overall and by position, is taken
    before the first step, every --validate-every steps and after the last one. Default: no validation."""
    validate_every: Whole = None
    """Steps between validations. Default: 100."""
    validation_sequences: Whole = None
    """How many sequences of the held-out data are read, spread evenly over it. Default: 32, or all if there are
    fewer."""

    checkpoint_dir: Path = None
    """Folder of the run: checkpoints, its record run.json, metrics.jsonl, TensorBoard's files. Default: none kept."""
    checkpoint_every: int = 100
    """Steps between checkpoints. The last step, SIGTERM and Ctrl-C save too."""
    keep: int = 2
    """How many of the newest checkpoints are kept."""
    resume: bool = False
    """Go on from the newest checkpoint in --checkpoint-dir; another mesh or layout is fine."""

    learning_rate: float = 3e-4
    """Largest learning rate, reached after warm-up."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What follows warm-up: down to a tenth along a cosine by the last step, or nothing."""
    warmup: Whole = None
    """Steps over which the learning rate rises. Default: a tenth of the steps, at most 100."""
    weight_decay: float = 0.1
    """AdamW's, on matrices only."""
    clip: float = 1.0
    """Largest global norm of a step's gradient; a larger one is scaled down to it."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the model computes in. Weights, their gradients' sums and the optimiser's state are float32 always."""
    memory: float = 0.9
    """The part of each device's memory that a run may use. --remat and --chunk follow from it."""
    remat: Literal["auto", "none", "qkv", "attention", "full"] = "auto"
    """What a layer keeps for the backward pass instead of computing it again: none recomputes no matrix product, qkv
    keeps attention's result and inputs, attention its result, full nothing. auto: as much as fits into --memory."""
    chunk: Whole = None
    """Tokens that the feed-forward layers and the loss take at a time, on each device. Default: as many as fit into
    --memory."""
    kernel: str = "auto"
    """Attention kernel: xla runs everywhere, pallas_tpu on TPUs, cudnn on NVIDIA GPUs for text without documents; auto
    takes the fastest that can."""
    tile: Whole = None
    """Side of the kernel's tiles. Default: what suits the kernel."""
    deterministic: bool = False
    """Whether a run repeated on the same devices and versions gives the same bits. On GPUs that costs speed: kernels
    that add up in changing order, cudnn among them, are not used. CPUs and TPUs always do."""

    layers: Whole = None
    """Instead of the preset's."""
    dim: Whole = None
    """Instead of the preset's."""
    ffn: Whole = None
    """Instead of the preset's."""
    heads: Whole = None
    """Instead of the preset's."""
    kv_heads: Whole = None
    """Instead of the preset's."""
    vocabulary: Whole = None
    """Instead of the preset's. Bytes need 257."""

    dry_run: bool = False
    """Only say what the run would need: parameters, memory by part, FLOPs, bytes on the wire."""
    wandb: Text = None
    """Log to this project of Weights & Biases too (extra: wandb). --resume goes on with the same run there."""
    profile: Path = None
    """Write a JAX trace of three steps to this folder, for TensorBoard, XProf or Perfetto."""

    cpu_devices: Whole = None
    """Run on this many virtual CPU devices (of each process)."""
    local_processes: Whole = None
    """Start this many processes on this machine, connected like a cluster; each gets cores of its own."""
    coordinator: Text = None
    """Address host:port of process 0. SLURM, Open MPI, Cloud TPU and (with the package kubernetes) Kubernetes need
    none of these three."""
    num_processes: Whole = None
    """How many processes there are in all."""
    process_id: Whole = None
    """Which of them this one is, from 0."""

    shape: Hidden = None
    own_tokenizer: Hidden = None

    def __post_init__(self) -> None:
        check_shared(self)
        at_least = dict.fromkeys(("sequence_length", "batch", "steps", "checkpoint_every", "keep", "chunk", "tile"), 1)
        at_least |= dict.fromkeys(("accumulate", "validate_every", "validation_sequences"), 1)
        check_at_least(self, at_least | dict.fromkeys(("learning_rate", "weight_decay"), 0))
        assert self.columns  # which raises for columns that do not go together
        if self.warmup is not None and not 0 <= self.warmup < self.steps:
            raise UsageError(f"--warmup must be at least 0 and less than the {self.steps} steps; got {self.warmup}.")
        if not 0 < self.memory <= 1:
            raise UsageError(f"--memory must be above 0 and at most 1, a part of a device's memory; got {self.memory}.")
        if not self.clip > 0:  # NaN is not
            raise UsageError(f"--clip must be above 0; got {self.clip}. For no clipping choose a large number.")
        for option in ("validate_every", "validation_sequences"):
            if getattr(self, option) is not None and self.validation is None:
                raise UsageError(f"--{option.replace('_', '-')} needs --validation, the held-out data.")
        if self.resume and self.checkpoint_dir is None:
            raise UsageError("--resume needs --checkpoint-dir, the folder of the run to go on with.")
        if self.rope_theta is not None and not 1 < self.rope_theta < math.inf:
            raise UsageError(f"--rope-theta must be a number above 1; got {self.rope_theta}.")
        if self.rope_scaling is not None:
            parse_scaling(self.rope_scaling)
        for name in SHAPE if self.start_from is not None else ():
            if getattr(self, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for models from scratch; with --start-from the model has its own. "
                    f"Leave one of them out."
                )

    @property
    def columns(self) -> Columns:
        """What of a record is text, and what of it counts in the loss."""
        return Columns(self.text_column, self.loss_column, self.chat_column)

    @property
    def model(self) -> ModelConfig:
        """The preset with what was given instead of it; with --start-from the model that `start.look` has found."""
        if self.shape is not None:
            return self.shape
        if self.start_from is not None:
            raise ValueError("The folder of --start-from was not looked at yet: training.start.look does that.")
        names = [field.name for field in dataclasses.fields(ModelConfig) if hasattr(self, field.name)]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        try:
            model = dataclasses.replace(PRESETS[self.preset or "debug"], **given)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return model if self.rope_scaling is None else scaled(model, self.rope_scaling, None)

    def load(self, sources: Named) -> Data:
        """What --data or --validation names."""
        options = (self.tokenizer_for(sources), self.end_token, self.model.vocabulary, self.columns, self.data_cache)
        return load(sources, *options, self._together)

    def check(self, sources: Named) -> None:
        """Raise for what --data or --validation names if it cannot be loaded, without reading all of it."""
        if sources is None and self.tokenizer is None and self.own_tokenizer is not None:
            return  # the model's own tokenizer and text that is always there: neither has to be read
        tokenizer = self.tokenizer_for(sources)
        if tokenizer is None and not all_raw(sources):
            tokenizer = kept_tokenizer(self.data)
        check(sources, tokenizer, self.end_token, self.model.vocabulary, self.columns, self._together)

    @property
    def documents(self) -> bool:
        """Whether it is known where the documents of --data begin or end. Looks at the kinds of files alone."""
        return self.end_token is not None or not all_raw(self.data)

    @property
    def _together(self) -> tuple[Named, ...]:
        """All that the options for data are for."""
        return (self.data,) if self.validation is None else (self.data, self.validation)

    def tokenizer_for(self, sources: Named) -> pathlib.Path | None:
        """The tokenizer for data: the one that was given, else the model's own where the data is text."""
        return self.tokenizer or (None if all_raw(sources) else self.own_tokenizer)

    def make_layout(self, devices: int, documents: bool = True, platform: str | None = None) -> Layout:
        """The layout on that many devices of the sequence axis, for text with documents or without.

        Without a platform, as in a dry run, no device is touched: stripes are those of GPUs, with --cpu-devices those
        of CPUs.
        """
        if self.stripe is not None or not has_stripes(self.layout):
            return named_layout(self.layout, self.stripe or 1)
        assumed = "gpu" if self.cpu_devices is None else "cpu"
        request = self.request(BASELINE, devices, documents, platform or assumed, here=platform is not None)
        slots = -(-self.sequence_length // devices)
        return choose_stripes(self.kernel, request, slots, devices // request.devices)

    def make_strategy(self, devices: int) -> Strategy:
        """The strategy on that many devices of the sequence axis; `settle` must have chosen one."""
        try:
            return resolve(parse_strategy(self.strategy), devices, self.model.heads)
        except ValueError as error:
            raise UsageError(f"--strategy {self.strategy}: {error}") from error

    def known_masks(self) -> list[tuple[Mask, int]]:
        """The part of the mask that is known while tracing, all but documents, and how many layers have it."""
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
        """What is asked of an attention kernel, on each of so many devices of the sequence axis.

        It is asked in layers with this one of `known_masks`, by default those that see the most.
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
        """All options as JSON can keep them."""
        options = {name: value for name, value in vars(self).items() if name not in ("shape", "own_tokenizer")}
        return {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in options.items()}

"""Config: every option of `striped train`, once: its flags, help, defaults and the record kept with a run."""

import dataclasses
import math
import pathlib
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

import striped_attention as sa
from striped_attention.attention import KERNELS
from striped_attention.kernel_xla import default_tile
from striped_attention.layout import Layout
from striped_attention.model import PRESETS, ModelConfig
from striped_attention.training.errors import UsageError

# What may be left out; the help says what happens then.
Whole = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
Text = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
Path = Annotated[pathlib.Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a causal language model on sequences longer than one device can hold.

    Without options a small model learns Python from the standard library's sources, on whatever devices there are. To
    see several devices on one CPU: striped train --cpu-devices 8
    """

    preset: Literal["debug", "1b", "3b", "7b", "llama3-8b"] = "debug"
    """Shape of the model. 1b, 3b and 7b are LLaMA's as in the Striped Attention paper; llama3-8b has grouped heads."""
    sequence_length: int = 2048
    """Tokens of one sequence. Any number: what the devices cannot share equally is padded and never seen."""
    batch: int = 1
    """Sequences a step, over all devices."""
    mesh: Text = None
    """Devices per axis, like data=2,sequence=4: sequences of a batch over data, tokens of a sequence over sequence.
    Default: every device on sequence."""
    layout: Literal["striped", "contiguous", "zigzag"] = "striped"
    """How tokens are dealt to the devices of the sequence axis. contiguous is Ring Attention, striped is balanced."""
    stripe: Whole = None
    """Tokens of a stripe. Default: about a tile, 256 on CPUs, 1024 elsewhere; a smaller power of two where a device has
    few tokens; 1 for the kernel cudnn."""
    steps: int = 100
    """Steps of the whole run, those before a resume included."""
    seed: int = 0
    """For the first weights and the order of the data."""

    data: Path = None
    """A text file, a folder of text files, or tokens as .npy or .bin (raw uint16, or uint32 for a vocabulary beyond
    65536). Default: the sources of Python's standard library, as bytes."""
    tokenizer: Path = None
    """A Hugging Face tokenizer.json for text. Default: bytes are tokens."""
    end_token: Whole = None
    """The token that ends a document in .npy and .bin data. Without it all of it counts as one document."""

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
    remat: Literal["attention", "full", "none"] = "attention"
    """What is kept of attention for the backward pass: its result, nothing, or its inputs as well (most memory)."""
    chunk: int = 1024
    """Tokens that the feed-forward layers and the loss take at a time, on each device."""
    kernel: str = "auto"
    """Attention kernel: xla runs everywhere, pallas_tpu on TPUs, cudnn on NVIDIA GPUs for text without documents; auto
    takes the fastest that can."""
    tile: Whole = None
    """Side of the kernel's tiles. Default: what suits the kernel."""

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

    def __post_init__(self) -> None:
        check_shared(self)
        at_least = dict.fromkeys(("sequence_length", "batch", "steps", "checkpoint_every", "keep", "chunk", "tile"), 1)
        check_at_least(self, at_least | dict.fromkeys(("learning_rate", "weight_decay"), 0))
        if self.warmup is not None and not 0 <= self.warmup < self.steps:
            raise UsageError(f"--warmup must be at least 0 and less than the {self.steps} steps; got {self.warmup}.")
        if not self.clip > 0:  # NaN is not
            raise UsageError(f"--clip must be above 0; got {self.clip}. For no clipping choose a large number.")
        if self.resume and self.checkpoint_dir is None:
            raise UsageError("--resume needs --checkpoint-dir, the folder of the run to go on with.")

    @property
    def model(self) -> ModelConfig:
        """The preset with what was given instead of it."""
        names = [field.name for field in dataclasses.fields(ModelConfig) if hasattr(self, field.name)]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        try:
            return dataclasses.replace(PRESETS[self.preset], **given)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def make_layout(self, devices: int, documents: bool = True, platform: str | None = None) -> Layout:
        """The layout on that many devices of the sequence axis, for text with documents or without.

        Without a platform, as in a dry run, no device is touched: stripes are those of accelerators, with --cpu-devices
        those of CPUs.
        """
        if self.layout == "contiguous":
            return sa.contiguous()
        if self.layout == "zigzag":
            return sa.zigzag()
        if self.stripe is None and self.kernel == "cudnn":
            return sa.striped(1)
        if self.stripe is None and not documents and self.kernel == "auto" and platform is not None:
            query, key, what = self.attention(sa.striped(1), devices, documents, platform)
            if KERNELS["cudnn"].unsupported(query, key, **what) is None:
                return sa.striped(1)
        quarter = max(1, -(-self.sequence_length // devices) // 4)
        tile = self.tile or default_tile(platform or ("gpu" if self.cpu_devices is None else "cpu"))[0]
        return sa.striped(self.stripe or min(tile, 2 ** (quarter.bit_length() - 1)))

    def attention(
        self, layout: Layout, devices: int, documents: bool, platform: str
    ) -> tuple[Any, Any, dict[str, Any]]:
        """What a kernel is asked to do: shapes of queries and keys on a device, and the rest."""
        length = layout.padded_length(self.sequence_length, devices)
        query, key = (
            jax.ShapeDtypeStruct((1, length // devices, heads, self.model.head_dim), self.dtype)
            for heads in (self.model.heads, self.model.kv_heads)
        )
        mask = sa.documents(np.zeros((1, self.sequence_length), np.int32)) if documents else sa.causal()
        tile = None if self.tile is None else (self.tile, self.tile)
        what = dict(softcap=None, bias=None, mask=mask, layout=layout, devices=devices, tile=tile)
        return query, key, {**what, "padded": length != self.sequence_length, "platform": platform}

    def record(self) -> dict[str, Any]:
        """All options as JSON can keep them."""
        return {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in dataclasses.asdict(self).items()}


def check_shared(config: Any) -> None:
    """Raise if options that `striped train` and `striped generate` have in common make no sense."""
    counts = ("stripe", "cpu_devices", "local_processes", "num_processes")
    check_at_least(config, {"seed": 0} | dict.fromkeys(counts, 1))
    if config.seed >= 2**32:
        raise UsageError(f"--seed must be less than {2**32}; got {config.seed}.")
    if config.kernel not in ("auto", *KERNELS):
        raise UsageError(f"--kernel must be one of {['auto', *KERNELS]}; got {config.kernel!r}.")
    if config.stripe is not None and config.layout != "striped":
        raise UsageError(f"--stripe is for --layout striped; got --layout {config.layout}. Leave one of them out.")
    cluster = (config.coordinator, config.num_processes, config.process_id)
    if any(x is not None for x in cluster) and None in cluster:
        raise UsageError("--coordinator, --num-processes and --process-id go together: give all three or none.")
    if config.local_processes is not None and config.coordinator is not None:
        raise UsageError("--local-processes starts a cluster of its own: leave out --coordinator and the like.")


def check_at_least(config: Any, least: dict[str, int]) -> None:
    """Raise if one of these options is given and smaller, or no finite number."""
    for name, smallest in least.items():
        value = getattr(config, name)
        if value is not None and not (value >= smallest and math.isfinite(value)):
            raise UsageError(f"--{name.replace('_', '-')} must be at least {smallest}; got {value}.")

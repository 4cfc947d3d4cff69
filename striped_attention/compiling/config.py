"""Config: the command-line options of `striped compile`."""

import dataclasses
from typing import Literal

from striped_attention.core.layout import LayoutChoice
from striped_attention.options import Path, Text, Whole, parse_length
from striped_attention.strategies.strategy import AUTO
from striped_attention.training.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """Compile a training step for a remote TPU pod or GPU machine, and report whether it fits in memory.

    The program is the one that `striped train` would run there. No accelerator is needed, only its compiler: the
    package libtpu for TPUs, or JAX's CUDA plugin for GPUs.

    Example: striped compile --topology v4:2x2x4 --preset 1b --length 786432
    """

    topology: str
    """TPUs: v4, v5e, v5p, v6e or tpu7x and the shape of the pod, like v4:2x2x4. GPUs: h100 or h200 and the numbers of
    slices, machines per slice and GPUs per machine, like h200:1x1x8. cuda:1x1x8 takes the GPU type of this machine; the
    kernel cudnn requires it."""
    length: str = "256k"
    """Sequence length in tokens: a number, or like 256k (× 1024) or 1M (× 1024²)."""
    preset: Literal["debug", "1b", "3b", "7b", "llama3-8b"] = "1b"
    """Model shape, as in `striped train`."""
    text: Literal["documents", "whole"] = "documents"
    """Whether each sequence is packed with several documents, or is one document."""
    longest: bool = False
    """Find the longest sequence that fits, starting at --length; compiles several times."""
    batch: int = 1
    """Global batch size, in sequences per step."""
    mesh: Text = None
    """Devices per mesh axis, like data=2,sequence=8. Default: all devices on sequence."""
    layout: LayoutChoice = "auto"
    """How tokens are distributed over the devices of the sequence axis, as in `striped train`."""
    stripe: Whole = None
    """Tokens per stripe. Default: as in `striped train`."""
    strategy: str = AUTO
    """Strategy of sequence parallelism, as in `striped train`."""
    kernel: str = "auto"
    """Attention kernel, as in `striped train`."""
    tile: Whole = None
    """Side length of the kernel's tiles. Default: the kernel's own."""
    deterministic: bool = False
    """Make results bitwise reproducible, as in `striped train`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of the model's computation."""
    memory: float = 0.9
    """Fraction of each device's memory that a run may use, as in `striped train`."""
    remat: Literal["auto", "unrolled", "none", "qkv", "attention", "full"] = "auto"
    """Rematerialisation: what a layer keeps for the backward pass, as in `striped train`."""
    chunk: Whole = None
    """Tokens that feed-forward layers and the loss process at a time. Default: as in `striped train`."""
    output: Path = None
    """Write all results to this file as JSON. Default: no file."""

    def __post_init__(self) -> None:
        self.training(parse_length(self.length))

    def training(self, length: int) -> TrainConfig:
        """Return the equivalent options of `striped train`."""
        shared = {field.name for field in dataclasses.fields(TrainConfig)} & {f.name for f in dataclasses.fields(self)}
        return TrainConfig(sequence_length=length, **{name: getattr(self, name) for name in shared})

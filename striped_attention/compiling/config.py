"""Config: every option of `striped compile`, once."""

import dataclasses
from typing import Literal

from striped_attention.core.layout import DEFAULT, LayoutName
from striped_attention.options import Path, Text, Whole, parse_length
from striped_attention.strategies.strategy import AUTO
from striped_attention.training.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """Compile a training step for a TPU pod or a machine of GPUs that is not here, and say whether it fits.

    The program is the one that `striped train` would run there. Needs no accelerator: for TPUs, the package libtpu; for
    GPUs, JAX's plugin. For example: striped compile --topology v4:2x2x4 --preset 1b --length 786432
    """

    topology: str
    """TPUs: v4, v5e, v5p, v6e or tpu7x and the shape of the pod, like v4:2x2x4. GPUs: h100 or h200 and slices, machines
    and GPUs of each, like h200:1x1x8; or cuda:1x1x8, like the GPU of this machine, which the kernel cudnn needs."""
    length: str = "256k"
    """Tokens of a sequence: a number, or like 256k (× 1024) or 1M (× 1024²)."""
    preset: Literal["debug", "1b", "3b", "7b", "llama3-8b"] = "1b"
    """Shape of the model, as in `striped train`."""
    text: Literal["documents", "whole"] = "documents"
    """Whether sequences are packed with documents, or each is one text."""
    longest: bool = False
    """Find the longest sequence that fits, from --length on; takes several times as long."""
    batch: int = 1
    """Sequences a step, over all devices."""
    mesh: Text = None
    """Devices per axis, like data=2,sequence=8. Default: every device on sequence."""
    layout: LayoutName = DEFAULT
    """How tokens are dealt to the devices of the sequence axis."""
    stripe: Whole = None
    """Tokens of a stripe. Default: as in `striped train`."""
    strategy: str = AUTO
    """How queries and keys meet, as in `striped train`."""
    kernel: str = "auto"
    """Attention kernel, as in `striped train`."""
    tile: Whole = None
    """Side of the kernel's tiles. Default: what suits the kernel."""
    deterministic: bool = False
    """The same bits in every run, as in `striped train`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the model computes in."""
    memory: float = 0.9
    """The part of each device's memory that a run may use, as in `striped train`."""
    remat: Literal["auto", "none", "qkv", "attention", "full"] = "auto"
    """What a layer keeps for the backward pass, as in `striped train`."""
    chunk: Whole = None
    """Tokens that the feed-forward layers and the loss take at a time. Default: as in `striped train`."""
    output: Path = None
    """Where all of it goes as JSON. Default: nowhere."""

    def __post_init__(self) -> None:
        self.training(parse_length(self.length))

    def training(self, length: int) -> TrainConfig:
        """The same as options of `striped train`."""
        shared = {field.name for field in dataclasses.fields(TrainConfig)} & {f.name for f in dataclasses.fields(self)}
        return TrainConfig(sequence_length=length, **{name: getattr(self, name) for name in shared})

"""Setting: the inputs of a plan, with one layout and one strategy."""

import dataclasses

import jax

from striped_attention.core.layout import BASELINE, Layout
from striped_attention.core.mask import Mask
from striped_attention.kernels.contract import make_request
from striped_attention.models.config import ModelConfig
from striped_attention.planning.budget import AUTO
from striped_attention.runtime.hardware import Hardware
from striped_attention.strategies.strategy import RING, Strategy
from striped_attention.strategies.workload import Workload, adapted


@dataclasses.dataclass(frozen=True)
class Setting:
    """The inputs of a plan, with one layout and one strategy; also the `Job` that `cost.estimate` takes."""

    devices: int
    sequence_length: int
    mask: Mask
    hardware: Hardware
    model: ModelConfig
    batch: int = 1
    kernel: str = "auto"
    layout: Layout = BASELINE
    remat: str = AUTO
    chunk: int | None = None
    memory: float = 0.9  # fraction of a device's memory that a step may use
    strategy: Strategy = RING
    deterministic: bool = False
    precision: str | None = None  # a dtype; None means the platform's default

    @property
    def accumulate(self) -> int:
        """Plans have no gradient accumulation."""
        return 1

    @property
    def budget(self) -> float:
        """Bytes per device that a step may use."""
        return self.memory * self.hardware.memory

    @property
    def dtype(self) -> str:
        return self.precision or ("float32" if self.hardware.platform == "cpu" else "bfloat16")

    def known_masks(self) -> list[tuple[Mask, int]]:
        """Return the static part of the mask, which all layers share."""
        return [(Mask(self.mask.rule), self.model.layers)]

    def make_layout(self, devices: int) -> Layout:
        return self.layout

    def make_strategy(self, devices: int) -> Strategy:
        return self.strategy

    @property
    def workload(self) -> Workload:
        """The attention of one layer."""
        hardware, slots = self.hardware, self.layout.padded_length(self.sequence_length, self.devices) // self.devices
        query, key = (
            jax.ShapeDtypeStruct((self.batch, slots, heads, self.model.head_dim), self.dtype)
            for heads in (self.model.heads, self.model.kv_heads)
        )
        plain = make_request(
            query,
            key,
            mask=self.mask,
            layout=self.layout,
            devices=self.devices,
            length=self.sequence_length,
            softcap=self.model.softcap,
            deterministic=self.deterministic,
            platform=hardware.platform,
            device_kind=next(iter(hardware.kinds), ""),
            here=False,
        )
        strategy = adapted(self.strategy, plain)
        return Workload(plain, self.mask, hardware, strategy, self.kernel, again=self.remat in ("attention", "full"))

"""Settle: resolve `--strategy auto`, `--remat auto` and the default of `--chunk` from the planner's estimates."""

import dataclasses
import logging
from collections.abc import Sequence

from striped_attention.core.mask import causal, packed
from striped_attention.errors import UsageError
from striped_attention.planning import budget
from striped_attention.planning.cost import estimate
from striped_attention.planning.plan import Choice, assess
from striped_attention.planning.setting import Setting
from striped_attention.runtime.hardware import Hardware, hardware_of
from striped_attention.strategies.choice import CLOSE, fastest_that_fits
from striped_attention.strategies.strategy import AUTO, Strategy, candidates
from striped_attention.training.config import TrainConfig


def assumed(config: TrainConfig, platform: str | None = None, kind: str = "") -> Hardware:
    """The hardware to plan for: by default GPUs, or CPUs with --cpu-devices."""
    return hardware_of(platform or ("gpu" if config.cpu_devices is None else "cpu"), kind)


def settle(
    config: TrainConfig,
    sizes: dict[str, int],
    documents: bool,
    platform: str | None = None,
    kind: str = "",
    available: float | None = None,
) -> TrainConfig:
    """Return the run with the fastest strategy, `remat` and `chunk` that are planned to fit in memory.

    Without a platform, as in a dry run, the plan is for GPUs, or for CPUs with --cpu-devices. `available` is the number
    of bytes per device that a step may use; by default the share --memory of such a device. If nothing fits, the choice
    that needs least memory is taken. Packed documents differ from step to step, so their lengths are sampled as in
    `striped plan`. The choice of `--strategy auto` and the planned seconds of all strategies are logged at level INFO.
    """
    return settled(config, sizes, documents, platform, kind, available)[0]


def settled(
    config: TrainConfig,
    sizes: dict[str, int],
    documents: bool,
    platform: str | None = None,
    kind: str = "",
    available: float | None = None,
) -> tuple[TrainConfig, list[str]]:
    """Like `settle`, with lines for the user that explain the choice of `--strategy auto`."""
    hardware = assumed(config, platform, kind)
    available = config.memory * hardware.memory if available is None else available
    if config.strategy != AUTO:
        return budget.within(config, sizes, available), []
    devices, model = sizes["sequence"], config.model
    drawn = packed(config.sequence_length) if documents else causal()
    masks = [(mask & drawn, layers) for mask, layers in config.known_masks()]
    sequences = config.batch // sizes["data"] // config.accumulate
    plain = Setting(
        *(devices, config.sequence_length, masks[0][0], hardware, model, sequences),
        deterministic=config.deterministic,
        precision=config.dtype,
        kernel=config.kernel,
    )

    def tried(strategy: object) -> tuple[TrainConfig, Choice, float]:
        """The run with this strategy, its plan as if all layers had the first mask, and the seconds per step with each
        layer's own mask."""
        run = budget.within(dataclasses.replace(config, strategy=str(strategy)), sizes, available)
        layout = run.make_layout(devices, documents, platform)
        planned = dataclasses.replace(plain, layout=layout, strategy=run.make_strategy(devices))
        planned = dataclasses.replace(planned, remat=run.remat, chunk=run.chunk)
        each = [(assess(dataclasses.replace(planned, mask=mask)), layers) for mask, layers in masks]
        return run, each[0][0], sum(one.step_seconds * layers for one, layers in each) / model.layers

    able, reasons = [], []
    for strategy in candidates(devices, model.heads, hardware.group):
        try:
            able.append(tried(strategy))
        except ValueError as error:  # the requested kernel does not support it
            reasons.append(f"{strategy}: {error}")
    if not able:
        raise UsageError(f"--strategy auto: no strategy is possible. {' '.join(reasons)}")
    memory = lambda one: estimate(one[0], sizes).total_memory  # noqa: E731
    run, best, _ = fastest_that_fits(able, lambda one: one[2], memory, available)
    found = [
        Planned(one[1].strategy, one[2] * config.accumulate, memory(one) <= available)
        for one in sorted(able, key=lambda one: one[2])
    ]
    seconds = ", ".join(f"{one.strategy} {one.spent}" for one in found)
    logging.getLogger("striped_attention").info(
        "strategy='auto' takes %s; planned time per step: %s", best.strategy, seconds
    )
    lines = [why(best.strategy, found, f"{devices} × {hardware.name}")] if devices > 1 else []
    return dataclasses.replace(run, strategy=str(best.strategy)), lines


@dataclasses.dataclass(frozen=True)
class Planned:
    """A strategy, its planned seconds per step, and whether it is planned to fit in memory."""

    strategy: Strategy
    seconds: float
    fits: bool

    @property
    def spent(self) -> str:
        return f"{self.seconds:.3g} s{'' if self.fits else ' (does not fit in memory)'}"


def why(taken: Strategy, found: Sequence[Planned], devices: str) -> str:
    """One line on the chosen strategy and the next best: the fastest other one, those that fit in memory first."""
    first = next(one for one in found if one.strategy == taken)
    others = sorted((one for one in found if one.strategy != taken), key=lambda one: (not one.fits, one.seconds))
    text = f"--strategy auto takes {first.strategy}: {first.spent} per step, planned for {devices}"
    if not others:
        return f"{text}. No other strategy was possible."
    best = others[0]
    text = f"{text}. Next best: {best.strategy} with {best.spent}"
    if first.fits and best.fits and best.seconds < first.seconds:
        text = f"{text}, at most {CLOSE:.0%} faster but less simple"
    return f"{text}."

"""Settle: what `--strategy auto`, `--remat auto` and no `--chunk` stand for, by the planner's estimates."""

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
    """The hardware that is planned for."""
    return hardware_of(platform or ("gpu" if config.cpu_devices is None else "cpu"), kind)


def settle(
    config: TrainConfig,
    sizes: dict[str, int],
    documents: bool,
    platform: str | None = None,
    kind: str = "",
    available: float | None = None,
) -> TrainConfig:
    """The same run with the fastest strategy, and what it keeps for the backward pass, that are planned to fit.

    Without a platform, as in a dry run, it is planned for GPUs, or with --cpu-devices for CPUs. `available` are the
    bytes of a device that a step may use; by default --memory of what such a device has. If nothing fits, it is what
    needs least. Of packed documents, which differ from step to step, lengths as `striped plan` draws them are taken.
    What `--strategy auto` took, and the seconds of all others, is logged at level INFO.
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
    """What `settle` says, and lines for the person who watches: why `--strategy auto` took what it took."""
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
        """A run, what it would be if all layers had the first mask, and the seconds of a step with every layer's."""
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
        except ValueError as error:  # the kernel that was asked for cannot do it
            reasons.append(f"{strategy}: {error}")
    if not able:
        raise UsageError(f"--strategy auto: no strategy can be taken. {' '.join(reasons)}")
    memory = lambda one: estimate(one[0], sizes).total_memory  # noqa: E731
    run, best, _ = fastest_that_fits(able, lambda one: one[2], memory, available)
    found = [
        Planned(one[1].strategy, one[2] * config.accumulate, memory(one) <= available)
        for one in sorted(able, key=lambda one: one[2])
    ]
    seconds = ", ".join(f"{one.strategy} {one.spent}" for one in found)
    logging.getLogger("striped_attention").info(
        "strategy='auto' takes %s: steps are planned to take %s", best.strategy, seconds
    )
    lines = [why(best.strategy, found, f"{devices} × {hardware.name}")] if devices > 1 else []
    return dataclasses.replace(run, strategy=str(best.strategy)), lines


@dataclasses.dataclass(frozen=True)
class Planned:
    """A strategy, the seconds that a step with it is planned to take, and whether it is planned to fit in memory."""

    strategy: Strategy
    seconds: float
    fits: bool

    @property
    def spent(self) -> str:
        return f"{self.seconds:.3g} s{'' if self.fits else ' (does not fit in memory)'}"


def why(taken: Strategy, found: Sequence[Planned], devices: str) -> str:
    """A line on what was taken, and on the fastest of the others: of those that fit in memory, if any do."""
    first = next(one for one in found if one.strategy == taken)
    others = sorted((one for one in found if one.strategy != taken), key=lambda one: (not one.fits, one.seconds))
    text = f"--strategy auto takes {first.strategy}: {first.spent} per step, planned for {devices}"
    if not others:
        return f"{text}. Nothing else was compared."
    best = others[0]
    text = f"{text}. Next is {best.strategy} with {best.spent}"
    if first.fits and best.fits and best.seconds < first.seconds:
        text = f"{text}, at most {CLOSE:.0%} faster and less simple"
    return f"{text}."

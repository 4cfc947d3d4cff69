"""Settle: resolve "auto" for --strategy, --layout and --remat, and the default of --chunk, by the planner's model."""

import dataclasses
import logging
from collections.abc import Sequence

from striped_attention.core.layout import BASELINE, Layout
from striped_attention.core.mask import MEDIAN, causal, packed
from striped_attention.errors import UsageError
from striped_attention.planning import budget
from striped_attention.planning.cost import estimate
from striped_attention.planning.plan import assess
from striped_attention.planning.setting import Setting
from striped_attention.runtime.hardware import hardware_of
from striped_attention.strategies.choice import CLOSE, as_fast, fastest_that_fits
from striped_attention.strategies.strategy import AUTO, Strategy, candidates
from striped_attention.training.config import TrainConfig


def settle(
    config: TrainConfig,
    sizes: dict[str, int],
    documents: bool,
    platform: str | None = None,
    kind: str = "",
    available: float | None = None,
) -> TrainConfig:
    """Return the run with the fastest strategy, layout, `remat` and `chunk` that are planned to fit in memory.

    Without a platform, as in a dry run, the plan is for the assumed hardware. `available` is the number
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
    """Like `settle`, with lines for the user that explain what "auto" stands for."""
    hardware = config.assumed if platform is None else hardware_of(platform, kind)
    available = config.memory * hardware.memory if available is None else available
    devices, model = sizes["sequence"], config.model
    if config.strategy != AUTO and len(layouts := config.layouts(devices, documents, platform, kind)) == 1:
        return budget.within(config.with_layout(*layouts), sizes, available, hardware.platform), []
    drawn = packed(config.sequence_length, MEDIAN) if documents else causal()
    masks = [(mask & drawn, layers) for mask, layers in config.known_masks()]
    sequences = config.batch // sizes["data"] // config.accumulate
    plain = Setting(
        *(devices, config.sequence_length, masks[0][0], hardware, model, sequences),
        deterministic=config.deterministic,
        precision=config.dtype,
        kernel=config.kernel,
    )

    def tried(run: TrainConfig, layout: Layout) -> Planned:
        """The plan of a run with this layout; every layer has its own mask."""
        run = budget.within(run, sizes, available, hardware.platform)
        planned = dataclasses.replace(plain, layout=layout, strategy=run.make_strategy(devices))
        planned = dataclasses.replace(planned, remat=run.remat, chunk=run.chunk)
        each = [(assess(dataclasses.replace(planned, mask=mask)), layers) for mask, layers in masks]
        seconds = sum(one.step_seconds * layers for one, layers in each) / model.layers * config.accumulate
        memory = estimate(run, sizes).total_memory
        return Planned(each[0][0].strategy, seconds, memory <= available, layout, run, memory)

    def by_layout(strategy: object) -> list[Planned]:
        """The plans of a run with this strategy, the preferred layout first."""
        run = dataclasses.replace(config, strategy=str(strategy))
        layouts = run.layouts(devices, documents, platform, kind)
        plans = [tried(run.with_layout(layout), layout) for layout in layouts]
        close = as_fast(plans, lambda plan: plan.seconds)
        return sorted(plans, key=lambda plan: plan not in close)  # stable: in both parts the simpler ones first

    able: list[list[Planned]] = []
    reasons: list[tuple[str, str]] = []
    for strategy in candidates(devices, model.heads, hardware.group) if config.strategy == AUTO else [config.strategy]:
        try:
            able.append(by_layout(strategy))
        except ValueError as error:  # the requested kernel does not support it
            reasons.append((str(strategy), str(error)))
    if not able and config.strategy == AUTO:
        raise UsageError(f"--strategy auto: no strategy is possible. {' '.join(_together(reasons))}")
    if not able:
        return budget.within(config, sizes, available, hardware.platform), []  # `trainer.choose` rejects it
    best = [plans[0] for plans in able]
    taken = fastest_that_fits(best, lambda plan: plan.seconds, lambda plan: plan.memory, available)
    lines = []
    if config.strategy == AUTO:
        best = sorted(best, key=lambda plan: plan.seconds)
        seconds = ", ".join(f"{plan.strategy} {plan.spent}" for plan in best)
        logging.getLogger("striped_attention").info(
            "strategy='auto' takes %s; planned time per step: %s", taken.strategy, seconds
        )
        lines.append(why(taken.strategy, best, _conditions(documents, f"{devices} × {hardware.name}")))
        config = dataclasses.replace(config, strategy=str(taken.strategy))
    plans = next(plans for plans in able if plans[0] is taken)
    if len(plans) > 1:
        seconds = ", ".join(f"{plan.layout!r} {plan.spent}" for plan in plans)
        lines.append(f"--layout auto takes {taken.layout!r}; planned time per step: {seconds}.")
    assert taken.run is not None
    return dataclasses.replace(taken.run, strategy=config.strategy), lines if devices > 1 else []


def _together(reasons: list[tuple[str, str]]) -> list[str]:
    """Join strategies that are refused for the same reason."""
    by_reason: dict[str, list[str]] = {}
    for strategy, reason in reasons:
        by_reason.setdefault(reason, []).append(strategy)
    return [f"{', '.join(strategies)}: {reason}" for reason, strategies in by_reason.items()]


def _conditions(documents: bool, devices: str) -> str:
    """Say what the planned seconds are for."""
    if not documents:
        return f"{devices} and one document per sequence"
    return f"{devices} and documents of {MEDIAN:,} tokens (median)"


@dataclasses.dataclass(frozen=True)
class Planned:
    """A strategy, its planned seconds per step, and whether it is planned to fit in memory; the layout and the run."""

    strategy: Strategy
    seconds: float
    fits: bool
    layout: Layout = BASELINE
    run: TrainConfig | None = None
    memory: int = 0

    @property
    def spent(self) -> str:
        seconds = f"{self.seconds:.3g}" if self.seconds < 1000 else f"{self.seconds:,.0f}"
        return f"{seconds} s{'' if self.fits else ' (does not fit in memory)'}"


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

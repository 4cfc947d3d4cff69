"""Settle: what `--strategy auto`, `--remat auto` and no `--chunk` stand for, by the planner's estimates."""

import dataclasses
import logging

import striped_attention as sa
from striped_attention.core.mask import packed
from striped_attention.errors import UsageError
from striped_attention.planning import budget
from striped_attention.planning.cost import estimate
from striped_attention.planning.plan import Choice, assess
from striped_attention.planning.setting import Setting
from striped_attention.runtime.hardware import Hardware, hardware_of
from striped_attention.strategies.choice import fastest_that_fits
from striped_attention.strategies.strategy import AUTO, candidates
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
    """
    hardware = assumed(config, platform, kind)
    available = config.memory * hardware.memory if available is None else available
    if config.strategy != AUTO:
        return budget.within(config, sizes, available)
    devices, model = sizes["sequence"], config.model
    mask = sa.causal() if model.window is None else sa.sliding_window(model.window)
    if documents:
        mask = mask & packed(config.sequence_length)
    sequences = config.batch // sizes["data"] // config.accumulate
    plain = Setting(
        *(devices, config.sequence_length, mask, hardware, model, sequences),
        deterministic=config.deterministic,
        precision=config.dtype,
        kernel=config.kernel,
    )

    def tried(strategy: object) -> tuple[TrainConfig, Choice]:
        run = budget.within(dataclasses.replace(config, strategy=str(strategy)), sizes, available)
        layout = run.make_layout(devices, documents, platform)
        planned = dataclasses.replace(plain, layout=layout, strategy=run.make_strategy(devices))
        return run, assess(dataclasses.replace(planned, remat=run.remat, chunk=run.chunk))

    able, reasons = [], []
    for strategy in candidates(devices, model.heads, hardware.group):
        try:
            able.append(tried(strategy))
        except ValueError as error:  # the kernel that was asked for cannot do it
            reasons.append(f"{strategy}: {error}")
    if not able:
        raise UsageError(f"--strategy auto: no strategy can be taken. {' '.join(reasons)}")
    memory = lambda one: estimate(one[0], sizes).total_memory  # noqa: E731
    run, best = fastest_that_fits(able, lambda one: one[1].step_seconds, memory, available)
    seconds = ", ".join(
        f"{one[1].strategy} {one[1].step_seconds:.3g} s"
        f"{'' if memory(one) <= available else ' (does not fit in memory)'}"
        for one in able
    )
    logging.getLogger("striped_attention").info(
        "strategy='auto' takes %s: steps are planned to take %s", best.strategy, seconds
    )
    return dataclasses.replace(run, strategy=str(best.strategy))

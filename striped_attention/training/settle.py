"""Settle: what `--strategy auto` stands for, by the planner's estimate for the devices at hand."""

import dataclasses
import logging

import striped_attention as sa
from striped_attention.core.mask import packed
from striped_attention.errors import UsageError
from striped_attention.planning.plan import Choice, assess
from striped_attention.planning.setting import Setting
from striped_attention.runtime.hardware import hardware_of
from striped_attention.strategies.choice import fastest_that_fits
from striped_attention.strategies.strategy import AUTO, candidates
from striped_attention.training.config import TrainConfig


def settle(
    config: TrainConfig, sizes: dict[str, int], documents: bool, platform: str | None = None, kind: str = ""
) -> TrainConfig:
    """The same run with the strategy that is planned to be the fastest of those that fit, or else need least memory.

    Without a platform, as in a dry run, it is planned for GPUs, or with --cpu-devices for CPUs. Of packed documents,
    which differ from step to step, lengths as `striped plan` draws them are taken.
    """
    if config.strategy != AUTO:
        return config
    devices, model = sizes["sequence"], config.model
    hardware = hardware_of(platform or ("gpu" if config.cpu_devices is None else "cpu"), kind)
    mask = sa.causal() if model.window is None else sa.sliding_window(model.window)
    if documents:
        mask = mask & packed(config.sequence_length)
    plain = Setting(
        *(devices, config.sequence_length, mask, hardware, model, config.batch // sizes["data"]),
        deterministic=config.deterministic,
        precision=config.dtype,
    )

    def tried(strategy: object) -> Choice:
        run = dataclasses.replace(config, strategy=str(strategy))
        found = dataclasses.replace(
            plain,
            kernel=config.kernel,
            layout=run.make_layout(devices, documents, platform),
            remat=config.remat,
            chunk=config.chunk,
            strategy=run.make_strategy(devices),
        )
        return assess(found)

    able, reasons = [], []
    for strategy in candidates(devices, model.heads, hardware.group):
        try:
            able.append(tried(strategy))
        except ValueError as error:  # the kernel that was asked for cannot do it
            reasons.append(f"{strategy}: {error}")
    if not able:
        raise UsageError(f"--strategy auto: no strategy can be taken. {' '.join(reasons)}")
    best = fastest_that_fits(able, lambda choice: choice.step_seconds, _memory, hardware.usable)
    seconds = ", ".join(f"{choice.strategy} {choice.step_seconds:.3g} s" for choice in able)
    logging.getLogger("striped_attention").info(
        "strategy='auto' takes %s: steps are planned to take %s", best.strategy, seconds
    )
    return dataclasses.replace(config, strategy=str(best.strategy))


def _memory(choice: Choice) -> int:
    return sum(choice.memory.values())

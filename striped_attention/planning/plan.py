"""Plan: how a long text would run on machines that one does not have yet.

    sa.plan(64, 1_048_576, hardware="h100")

assesses attention as `strategies/choice.py` does, for several layouts and strategies, and adds all else that a training
step does. Nothing is compiled and no device is needed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from striped_attention.core.annotations import checks_itself
from striped_attention.core.layout import BASELINE, Layout, check_whole
from striped_attention.core.layout import candidates as candidate_layouts
from striped_attention.core.mask import Mask, causal
from striped_attention.kernels import choice as kernels
from striped_attention.models.llama import PRESETS, REMAT, ModelConfig
from striped_attention.planning import budget
from striped_attention.planning.cost import (
    attention_flops,
    estimate,
    gigabytes,
    matrix_flops,
    matrix_work,
    visible_pairs,
)
from striped_attention.planning.setting import Setting
from striped_attention.runtime.hardware import HARDWARE, Hardware
from striped_attention.strategies.choice import Assessment, TileCount
from striped_attention.strategies.choice import assess as assess_attention
from striped_attention.strategies.messages import FLOAT32
from striped_attention.strategies.strategy import AUTO, RING, Strategy, candidates, resolve
from striped_attention.strategies.workload import Workload

SAME = 0.02  # a difference that a plan cannot see
MOST_DEVICES = 8192
# Useful FLOPs of everything but attention as a part of the peak, recomputation and all that is not a product taken into
# account; fitted to benchmarks/results/gpu_step_*.json, whose steps keep attention's result (MEASURED_REMAT).
MATRIX_EFFICIENCY = 0.439
MEASURED_REMAT = "attention"


@dataclasses.dataclass(frozen=True, eq=False)
class Choice(Assessment):
    """A layout and a strategy, and what a training step with them would be."""

    setting: Setting
    step_seconds: float
    mfu: float
    memory: dict[str, int]
    attention_bytes: int  # sent by a device for a layer's attention, both passes
    slow_bytes: int  # of them between nodes or pods, at most

    @property
    def fits(self) -> bool:
        """Whether a device's memory suffices."""
        return sum(self.memory.values()) <= self.setting.budget

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.setting.batch * self.setting.sequence_length / self.step_seconds


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What `plan` found: the layouts from the fastest to the slowest, and why the first one is.

    `strategies` has the best choice of each strategy, the fastest first; `choices` are those of a ring. `shortfall` is
    None if some strategy fits into memory, and else says by how much a ring does not and what would.
    """

    setting: Setting
    choices: tuple[Choice, ...]
    strategies: tuple[Choice, ...]
    bound: float
    reason: str
    shortfall: str | None

    @property
    def best(self) -> Choice:
        return self.choices[0]

    @property
    def baseline(self) -> Choice:
        """Ring Attention's layout, which the others are compared with."""
        return next(choice for choice in self.choices if choice.layout == BASELINE)

    @property
    def fastest(self) -> Choice:
        """Of all strategies that fit into memory; a ring's best if none does."""
        return next((choice for choice in self.strategies if self.fits(choice)), self.best)

    def speedup(self, choice: Choice) -> float:
        """Of attention, over the baseline."""
        return self.baseline.attention_seconds / choice.attention_seconds

    def fits(self, choice: Choice) -> bool:
        return choice.fits


@checks_itself
def plan(
    devices: int,
    length: int,
    *,
    mask: Mask | None = None,
    hardware: str | Hardware = "h100",
    devices_per_node: int | None = None,
    model: str | ModelConfig = "llama3-8b",
    layouts: Sequence[Layout] | None = None,
    strategies: Sequence[str | Strategy] | None = None,
    batch: int = 1,
    kernel: str = "auto",
    remat: str = "auto",
    memory: float = 0.9,
) -> Plan:
    """How long a training step takes on `devices`, by layout and by strategy, and which ones to choose.

    Args:
      mask: causal by default; a mask with documents must be made for this length.
      hardware: a name in `striped_attention.runtime.hardware.HARDWARE`, or figures of your own.
      devices_per_node: consecutive devices that share the fast interconnect, of a node or pod. Default: the hardware's
        `group`, 8 GPUs.
      model: a name in `striped_attention.models.llama.PRESETS`, or a shape of your own.
      layouts: what to compare; contiguous always is. Default: stripes of 1, 256 and 1024, and zigzag, where
        the kernel can do them.
      strategies: what to compare a ring with, as `attention` takes it. Default: heads or keys shared among all devices,
        and among those that a fast interconnect joins, or both together. For each the best of the layouts is kept.
      batch: sequences of a step, each of them spread over all devices.
      kernel: `auto` is the fastest that can do what a layout needs.
      remat: what is kept for the backward pass: none (nothing is computed twice), qkv, attention or full (everything
        is). `auto` keeps as much as fits.
      memory: the part of a device's memory that a step may use.
    """
    devices, length, batch = check_whole("devices", devices), check_whole("length", length), check_whole("batch", batch)
    mask = causal() if mask is None else mask
    _check(devices, length, mask, batch, kernel)
    if remat not in (AUTO, *REMAT):
        raise ValueError(f"remat must be one of {', '.join((AUTO, *REMAT))}; got {remat!r}.")
    if not 0 < memory <= 1:
        raise ValueError(f"memory must be above 0 and at most 1, a part of a device's memory; got {memory}.")
    shape, device = _named("model", PRESETS, ModelConfig, model), _named("hardware", HARDWARE, Hardware, hardware)
    if devices_per_node is not None:
        device = dataclasses.replace(device, group=check_whole("devices_per_node", devices_per_node))
    setting = Setting(devices, length, mask, device, shape, batch, kernel, remat=remat, memory=memory)
    layouts = _layouts(setting, layouts)
    pairs, count = _pairs(setting), TileCount(mask, length)
    found = [_choice(dataclasses.replace(setting, layout=layout), pairs, count) for layout in layouts]
    base = found[0]
    least = (
        min(int(choice.tiles.sum(dtype=np.int64)) for choice in found if choice.chosen.tile == base.chosen.tile)
        / devices
    )
    bound = base.critical_path / least if least else 1.0
    choices = tuple(sorted(found, key=lambda choice: choice.step_seconds))
    by_strategy = [choices[0]]
    for strategy in _strategies(setting, strategies):
        tried = [dataclasses.replace(setting, layout=layout, strategy=strategy) for layout in layouts]
        able = [one for one in tried if _refusal(one) is None]
        if strategies is not None and not able:
            raise ValueError(f"With strategy {strategy}: kernel {kernel!r} cannot do this: {_refusal(tried[0])}")
        ready = [_choice(one, pairs, count) for one in able]
        best = sorted(ready, key=lambda choice: choice.step_seconds)[:1]
        by_strategy += [choice for choice in best if all(choice.strategy != other.strategy for other in by_strategy)]
    by_strategy.sort(key=lambda choice: choice.step_seconds)
    shortfall = None if any(choice.fits for choice in by_strategy) else _shortfall(choices[0])
    reason = _reason(choices, base, bound)
    return Plan(setting, choices, tuple(by_strategy), bound, reason, shortfall)


def assess(setting: Setting) -> Choice:
    """What a training step would be with one layout and one strategy."""
    return _choice(setting, _pairs(setting), TileCount(setting.mask, setting.sequence_length))


def _layouts(setting: Setting, asked: Any) -> list[Layout]:
    """What to compare, the baseline first: of the usual ones those that the kernel can do."""
    if asked is None:
        _, *usual = candidate_layouts(setting.sequence_length, setting.devices)
        return [BASELINE, *(one for one in usual if _refusal(dataclasses.replace(setting, layout=one)) is None)]
    if not isinstance(asked, Sequence) or not all(isinstance(layout, Layout) for layout in asked):
        raise ValueError(f"layouts must be a list of layouts, as sa.striped(256) makes them; got {asked!r}.")
    return list(dict.fromkeys([BASELINE, *asked]))


def _strategies(setting: Setting, asked: Any) -> list[Strategy]:
    """What to compare a ring with."""
    devices, heads = setting.devices, setting.model.heads
    if asked is None:
        found = candidates(devices, heads, setting.hardware.group)
    elif isinstance(asked, str) or not isinstance(asked, Sequence):
        raise ValueError(f"strategies must be a list, like ['heads', 'gather']; got {asked!r}.")
    else:
        if AUTO in asked:
            raise ValueError("A plan compares strategies, so 'auto' is none of them: leave it out for the usual ones.")
        found = [resolve(one, devices, heads) for one in asked]
    return [strategy for strategy in dict.fromkeys(found) if strategy != RING]


def _named(what: str, known: dict[str, Any], kind: type, given: Any) -> Any:
    if isinstance(given, kind):
        return given
    if given not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}, or a {kind.__name__}; got {given!r}.")
    return known[given]


def _check(devices: int, length: int, mask: Any, batch: int, kernel: str) -> None:
    if devices > MOST_DEVICES:
        raise ValueError(f"A plan has a table of devices × devices, for at most {MOST_DEVICES}; got {devices} devices.")
    BASELINE.padded_length(length, devices)  # refuses what positions cannot number
    kernels.check_name(kernel)
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a mask, like sa.causal() or sa.documents(segment_ids); got {mask!r}.")
    if mask.placed is not None:
        raise ValueError("A plan permutes the mask for every layout itself. Pass it as it was before mask.permute.")
    mask.check_length(length)
    if mask.rows not in (1, batch):
        raise ValueError(f"A mask has one row of documents, or one for each of the batch of {batch}; got {mask.rows}.")


def _choice(setting: Setting, pairs: int, count: TileCount) -> Choice:
    mesh = {"data": 1, "sequence": setting.devices}
    setting = budget.within(setting, mesh, setting.budget)
    try:
        attention = assess_attention(setting.workload, count)
    except NotImplementedError as error:
        raise ValueError(f"With {setting.layout!r}: {error}") from error
    setting = dataclasses.replace(setting, kernel=attention.kernel, strategy=attention.strategy)
    devices, model = setting.devices, setting.model
    cost = estimate(setting, mesh)
    products = matrix_flops(model, setting.batch * setting.sequence_length)
    weights = sum(size for what, size in cost.wire.items() if what.startswith("weights"))
    workload = attention.workload
    messages, wire = workload.messages, setting.hardware.gather_wire(devices)
    work = matrix_work(model, setting.remat) / matrix_work(model, MEASURED_REMAT)
    outside = max(work * products / devices / (MATRIX_EFFICIENCY * setting.hardware.peak), weights / wire)
    again = attention.forward_seconds if setting.remat == "full" else 0.0
    seconds = model.layers * (attention.attention_seconds + again) + outside
    return Choice(
        **vars(attention),
        setting=setting,
        step_seconds=seconds,
        memory=cost.memory,
        attention_bytes=_both_passes(workload, messages.forward, messages.trade),
        slow_bytes=_both_passes(workload, *messages.slow(setting.hardware.group)),
        mfu=(products + attention_flops(model, pairs)) / devices / seconds / setting.hardware.peak,
    )


def _both_passes(workload: Workload, keys: int, traded: int) -> int:
    """Bytes of both passes from those of the forward pass: gradients of keys are float32, trades are made again."""
    gradients = keys // workload.messages.width * FLOAT32
    return 2 * keys + gradients + (3 if workload.again else 2) * traded


def _refusal(setting: Setting) -> str | None:
    """Why the kernel that was asked for cannot do it; None if it can, or any will do."""
    return None if setting.kernel == "auto" else kernels.refusal(setting.kernel, setting.workload.request)


def _pairs(setting: Setting) -> int:
    """Visible pairs of a query and a key, of all sequences."""
    mask, length = setting.mask, setting.sequence_length
    if mask.length is None:
        return setting.batch * visible_pairs(mask, length)
    total = 0
    for first in range(0, length, 2**16):  # piece by piece, which keeps to a processor's caches
        piece = np.arange(first, min(first + 2**16, length), dtype=np.int32)
        part = jax.tree.map(lambda x, piece=piece: np.asarray(x)[:, piece[0] : piece[-1] + 1], mask)
        lo, hi = part.bounds(piece, length)
        total += int(np.sum(np.maximum(hi - lo, 0), dtype=np.int64))
    return total * (setting.batch // mask.rows)


def _reason(choices: tuple[Choice, ...], base: Choice, bound: float) -> str:
    """Why the best choice is the best, in a sentence or two."""
    best, *others = choices
    close = [other for other in others if other.step_seconds < (1 + SAME) * best.step_seconds]
    as_good = f" As good, within {SAME:.0%}: {', '.join(repr(other.layout) for other in close)}." if close else ""
    if len(choices) == 1:
        return f"{best.layout!r}: nothing else was compared."
    wire = "" if best.hidden else "; some steps wait for the wire: more tokens a device, or fewer devices, hide it"
    if best is base or base in close:
        return f"{best.layout!r}: {base.layout!r} is as fast as any here{wire}.{as_good}"
    more = base.attention_seconds / best.attention_seconds
    return (
        f"{best.layout!r}: its attention is {more:.2f} times as fast as that of {base.layout!r} (at best {bound:.2f}), "
        f"for the busiest device has {best.imbalance - 1:.0%} more to do than the mean, with {base.layout!r} "
        f"{base.imbalance - 1:.0%}{wire}.{as_good}"
    )


def _shortfall(best: Choice) -> str | None:
    """A sentence if the best layout does not fit into memory, with a number of devices on which it would; else None."""
    setting, usable = best.setting, best.setting.budget
    need = sum(best.memory.values())
    if need <= usable:
        return None
    sequences = "a sequence" if setting.batch == 1 else f"{setting.batch} sequences"
    missing = (
        f"A step with {sequences} of {setting.sequence_length:,} tokens on {setting.devices} devices needs "
        f"{gigabytes(need)} each, and of {setting.hardware.name} a step may use {gigabytes(int(usable))}."
    )
    for doublings in range(1, 12):
        enough = setting.devices * 2**doublings
        if estimate(setting, {"data": 1, "sequence": enough}).total_memory <= usable:
            return f"{missing} On {enough} devices it would fit."
    return f"{missing} Take a smaller model or batch."

"""Plan: predict training steps on long sequences for hardware that is not at hand.

    sa.plan(64, 1_048_576, hardware="h100")

estimates attention like `strategies/choice.py`, for several layouts and strategies, and adds the rest of a training
step. Nothing is compiled and no device is needed.
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
from striped_attention.models.config import PRESETS, ModelConfig
from striped_attention.models.llama import REMAT
from striped_attention.planning import budget
from striped_attention.planning.cost import (
    attention_flops,
    estimate,
    gigabytes,
    layer_flops,
    matrix_flops,
    matrix_work,
    visible_pairs,
)
from striped_attention.planning.setting import Setting
from striped_attention.runtime.hardware import HARDWARE, Hardware
from striped_attention.strategies.choice import Assessment, TileCount, as_fast
from striped_attention.strategies.choice import assess as assess_attention
from striped_attention.strategies.messages import FLOAT32
from striped_attention.strategies.strategy import AUTO, RING, Strategy, candidates, resolve
from striped_attention.strategies.workload import Workload

SAME = 0.02  # relative differences below this are within a plan's error
MOST_DEVICES = 8192
# MFU of everything but attention, including the time for recomputation and for all that is not a matrix product; fitted
# to benchmarks/results/gpu_step_*.json, whose steps keep attention's result (MEASURED_REMAT).
MATRIX_EFFICIENCY = 0.439
MEASURED_REMAT = "attention"


@dataclasses.dataclass(frozen=True, eq=False)
class Choice(Assessment):
    """A layout and a strategy, and the estimate of a training step with them."""

    setting: Setting
    step_seconds: float
    work: float  # FLOPs of all computed tiles over those of visible pairs alone
    mfu: float
    memory: dict[str, int]
    attention_bytes: int  # sent by a device for a layer's attention, both passes
    slow_bytes: int  # of these, at most, between nodes or pods

    @property
    def fits(self) -> bool:
        """Whether the step fits into a device's memory."""
        return sum(self.memory.values()) <= self.setting.budget

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices together."""
        return self.setting.batch * self.setting.sequence_length / self.step_seconds


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Result of `plan`.

    `choices` are the layouts with a ring, the fastest first. `strategies` has the best choice of each strategy, the
    fastest first. `bound` is the highest speed-up over the baseline that load balance could bring, and `reason`
    explains the best layout. `shortfall` is None if some strategy fits into memory; otherwise it states how much memory
    a ring needs and how many devices would fit.
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
        """Ring Attention's layout, the baseline of speed-ups."""
        return next(choice for choice in self.choices if choice.layout == BASELINE)

    @property
    def fastest(self) -> Choice:
        """The fastest strategy that fits into memory, or the best layout of a ring if none does."""
        return next((choice for choice in self.strategies if self.fits(choice)), self.best)

    def speedup(self, choice: Choice) -> float:
        """Return the speed-up of attention over the baseline."""
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
    """Estimate a training step on `devices` for several layouts and strategies, and recommend the fastest.

    Args:
      mask: causal by default; a mask with documents must be made for this length.
      hardware: a name in `striped_attention.runtime.hardware.HARDWARE`, or a `Hardware` of your own.
      devices_per_node: number of consecutive devices, in a node or pod, that share the fast interconnect. Default: the
        hardware's `group`, 8 for GPUs.
      model: a name in `striped_attention.models.config.PRESETS`, or a `ModelConfig` of your own.
      layouts: layouts to compare; contiguous is always included. Default: stripes of 1, 256 and 1024 tokens and
        of about the kernel's tile, and zigzag, where the kernel supports them.
      strategies: strategies to compare with a ring, as in `attention`. Default: heads split or keys gathered among all
        devices, among the devices of a node, or a combination. For each, the best layout is kept.
      batch: sequences per step, each sharded over all devices.
      kernel: `auto` takes the fastest kernel that supports the layout.
      remat: what is kept for the backward pass: unrolled or none (nothing is recomputed), qkv, attention or full
        (everything is recomputed). `auto` keeps as much as fits.
      memory: fraction of a device's memory that a step may use.
    """
    devices, length, batch = check_whole("devices", devices), check_whole("length", length), check_whole("batch", batch)
    if length < devices:
        raise ValueError(f"length must be at least the {devices} devices that share the sequence; got {length}.")
    mask = causal() if mask is None else mask
    _check(devices, length, mask, batch, kernel)
    if remat not in (AUTO, *REMAT):
        raise ValueError(f"remat must be one of {', '.join((AUTO, *REMAT))}; got {remat!r}.")
    if not 0 < memory <= 1:
        raise ValueError(f"memory must be above 0 and at most 1, a fraction of a device's memory; got {memory}.")
    shape, device = _named("model", PRESETS, ModelConfig, model), _named("hardware", HARDWARE, Hardware, hardware)
    if devices_per_node is not None:
        device = dataclasses.replace(device, group=check_whole("devices_per_node", devices_per_node))
    setting = Setting(devices, length, mask, device, shape, batch, kernel, remat=remat, memory=memory)
    usual, layouts = layouts is None, _layouts(setting, layouts)
    pairs, count = _pairs(setting), TileCount(mask, length)
    found = [_choice(dataclasses.replace(setting, layout=layout), pairs, count) for layout in layouts]
    base = found[0]
    least = (
        min(int(choice.tiles.sum(dtype=np.int64)) for choice in found if choice.chosen.tile == base.chosen.tile)
        / devices
    )
    bound = base.critical_path / least if least else 1.0
    choices = tuple(sorted(found, key=_seconds))
    by_strategy = [choices[0]]
    for strategy in _strategies(setting, strategies):
        compared = dict.fromkeys([*_suited(setting, strategy), *layouts] if usual else layouts)
        tried = [dataclasses.replace(setting, layout=layout, strategy=strategy) for layout in compared]
        able = [one for one in tried if _refusal(one) is None]
        if strategies is not None and not able:
            raise ValueError(f"With strategy {strategy}: kernel {kernel!r} cannot do this: {_refusal(tried[0])}")
        ready = [_choice(one, pairs, count) for one in able]
        best = as_fast(ready, _seconds)[:1] if usual else sorted(ready, key=_seconds)[:1]
        by_strategy += [choice for choice in best if all(choice.strategy != other.strategy for other in by_strategy)]
    by_strategy.sort(key=_seconds)
    frugal = min(by_strategy, key=lambda choice: sum(choice.memory.values()))
    shortfall = None if any(choice.fits for choice in by_strategy) else _shortfall(frugal)
    reason = _reason(choices, base, bound)
    return Plan(setting, choices, tuple(by_strategy), bound, reason, shortfall)


def assess(setting: Setting) -> Choice:
    """Estimate a training step with one layout and one strategy."""
    return _choice(setting, _pairs(setting), TileCount(setting.mask, setting.sequence_length))


def _seconds(choice: Choice) -> float:
    return choice.step_seconds


def _layouts(setting: Setting, asked: Any) -> list[Layout]:
    """Return the layouts to compare, the baseline first. By default: the usual ones that the kernel supports."""
    if asked is None:
        usual = candidate_layouts(setting.sequence_length, setting.devices)
        able = [one for one in usual if _refusal(dataclasses.replace(setting, layout=one)) is None]
        return list(dict.fromkeys([BASELINE, *able, *_suited(setting, RING)]))
    if not isinstance(asked, Sequence) or not all(isinstance(layout, Layout) for layout in asked):
        raise ValueError(f"layouts must be a list of layouts, like [sa.striped(256)]; got {asked!r}.")
    return list(dict.fromkeys([BASELINE, *asked]))


def _suited(setting: Setting, strategy: Strategy) -> list[Layout]:
    """Return the layouts that `striped train` compares under this strategy, the one to prefer among equals first."""
    request = dataclasses.replace(setting, layout=BASELINE, strategy=strategy).workload.request
    slots = -(-setting.sequence_length // setting.devices)
    return kernels.layouts_for(setting.kernel, request, slots, setting.devices // request.devices)


def _strategies(setting: Setting, asked: Any) -> list[Strategy]:
    """Return the strategies to compare with a ring."""
    devices, heads = setting.devices, setting.model.heads
    if asked is None:
        found = candidates(devices, heads, setting.hardware.group)
    elif isinstance(asked, str) or not isinstance(asked, Sequence):
        raise ValueError(f"strategies must be a list, like ['heads', 'gather']; got {asked!r}.")
    else:
        if AUTO in asked:
            raise ValueError(
                "A plan compares strategies, so 'auto' cannot be one of them. Leave out strategies for the usual ones."
            )
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
        raise ValueError(
            f"A plan counts work for every pair of devices, for at most {MOST_DEVICES}; got {devices} devices."
        )
    BASELINE.padded_length(length, devices)  # raises if positions exceed int32
    kernels.check_name(kernel)
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a mask, like sa.causal() or sa.documents(segment_ids); got {mask!r}.")
    if mask.placed is not None:
        raise ValueError("A plan permutes the mask itself, for every layout. Pass the mask from before mask.permute.")
    mask.check_length(length)
    if mask.rows not in (1, batch):
        raise ValueError(f"A mask has one row of documents, or one for each of the batch of {batch}; got {mask.rows}.")


def _choice(setting: Setting, pairs: int, count: TileCount) -> Choice:
    mesh = {"data": 1, "sequence": setting.devices}
    setting = budget.within(setting, mesh, setting.budget, setting.hardware.platform)
    try:
        attention = assess_attention(setting.workload, count)
    except NotImplementedError as error:
        raise ValueError(f"With {setting.layout!r}: {error}") from error
    setting = dataclasses.replace(setting, kernel=attention.kernel, strategy=attention.strategy)
    devices, model = setting.devices, setting.model
    cost = estimate(setting, mesh)
    products = matrix_flops(model, setting.batch * setting.sequence_length)
    weights = sum(size for what, size in cost.sent.items() if what.startswith("weights"))
    workload = attention.workload
    messages, bandwidth = workload.messages, setting.hardware.gather_bandwidth(devices)
    work = matrix_work(model, setting.remat) / matrix_work(model, MEASURED_REMAT)
    outside = max(work * products / devices / (MATRIX_EFFICIENCY * setting.hardware.peak), weights / bandwidth)
    again = attention.forward_seconds if setting.remat == "full" else 0.0
    seconds = model.layers * (attention.attention_seconds + again) + outside
    return Choice(
        **vars(attention),
        setting=setting,
        step_seconds=seconds,
        work=float(attention.flops.sum()) * attention.strategy.heads * 3 / max(1, layer_flops(model, pairs)),
        memory=cost.memory,
        attention_bytes=_both_passes(workload, messages.forward, messages.all_to_all),
        slow_bytes=_both_passes(workload, *messages.slow(setting.hardware.group)),
        mfu=(products + attention_flops(model, pairs)) / devices / seconds / setting.hardware.peak,
    )


def _both_passes(workload: Workload, keys: int, exchanged: int) -> int:
    """Bytes of both passes from those of the forward pass: key gradients are float32, all-to-alls are repeated."""
    gradients = keys // workload.messages.width * FLOAT32
    return 2 * keys + gradients + (3 if workload.again else 2) * exchanged


def _refusal(setting: Setting) -> str | None:
    """Return why the requested kernel cannot do this; None if it can, or if the kernel is auto."""
    return None if setting.kernel == "auto" else kernels.refusal(setting.kernel, setting.workload.request)


def _pairs(setting: Setting) -> int:
    """Return the number of visible (query, key) pairs of all sequences."""
    mask, length = setting.mask, setting.sequence_length
    if mask.length is None:
        return setting.batch * visible_pairs(mask, length)
    total = 0
    for first in range(0, length, 2**16):  # in chunks that fit into a CPU's caches
        piece = np.arange(first, min(first + 2**16, length), dtype=np.int32)
        part = jax.tree.map(lambda x, piece=piece: np.asarray(x)[:, piece[0] : piece[-1] + 1], mask)
        lo, hi = part.bounds(piece, length)
        total += int(np.sum(np.maximum(hi - lo, 0), dtype=np.int64))
    return total * (setting.batch // mask.rows)


def _reason(choices: tuple[Choice, ...], base: Choice, bound: float) -> str:
    """Explain in a sentence or two why the best choice is the best."""
    best, *others = choices
    close = [other for other in others if other.step_seconds < (1 + SAME) * best.step_seconds]
    as_good = f" As good, within {SAME:.0%}: {', '.join(repr(other.layout) for other in close)}." if close else ""
    if len(choices) == 1:
        return f"{best.layout!r}: nothing else was compared."
    slow = "" if best.hidden else "; some steps wait for the interconnect: fewer devices or more tokens per device help"
    if best is base or base in close:
        return f"{best.layout!r}: {base.layout!r} is as fast as any other{slow}.{as_good}"
    more = base.attention_seconds / best.attention_seconds
    return (
        f"{best.layout!r}: its attention is {more:.2f} times as fast as that of {base.layout!r} (at best {bound:.2f}), "
        f"because the busiest device does {best.imbalance - 1:.0%} more work than the mean, with {base.layout!r} "
        f"{base.imbalance - 1:.0%}{slow}.{as_good}"
    )


def _shortfall(best: Choice) -> str | None:
    """State what memory a choice lacks and how many devices would be enough; None if it fits."""
    setting, usable = best.setting, best.setting.budget
    need = sum(best.memory.values())
    if need <= usable:
        return None
    sequences = "a sequence" if setting.batch == 1 else f"{setting.batch} sequences"
    missing = (
        f"A step with {sequences} of {setting.sequence_length:,} tokens on {setting.devices} devices needs at least "
        f"{gigabytes(need)} per device (strategy {best.strategy}), but may use "
        f"{gigabytes(int(usable))} of each {setting.hardware.name}."
    )
    for doublings in range(1, 12):
        enough = setting.devices * 2**doublings
        if estimate(setting, {"data": 1, "sequence": enough}).total_memory <= usable:
            return f"{missing} On {enough} devices it would fit."
    return f"{missing} Use a smaller model or batch."

"""Plan: how a long text would run on machines that one does not have yet.

    sa.plan(64, 1_048_576, hardware="h100")

counts the tiles of every device and step as the kernels would run them (`work.py`), turns them into seconds with what
is known of kernels and hardware, lets transfers run beside them, and does so for several layouts. Nothing is
compiled and no device is needed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from striped_attention.core.annotations import checks_itself
from striped_attention.core.layout import BASELINE, Layout, check_whole
from striped_attention.core.layout import candidates as candidate_layouts
from striped_attention.core.mask import Mask, causal
from striped_attention.kernels import choice as kernels
from striped_attention.kernels.contract import Request
from striped_attention.models.llama import PRESETS, ModelConfig
from striped_attention.planning.cost import attention_flops, estimate, gigabytes, matrix_flops
from striped_attention.planning.timeline import Setting, Timeline, passes, tile_flops
from striped_attention.planning.work import Counts, count_tile_rows, count_tiles
from striped_attention.runtime.hardware import HARDWARE, Hardware
from striped_attention.strategies.hops import needed_hops
from striped_attention.strategies.strategy import RING, Strategy, candidates, request_for, resolve

SAME = 0.02  # a difference that a plan cannot see
MOST_DEVICES = 8192
# JAX takes this part of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
USABLE = {"gpu": 0.75, "tpu": 1.0, "cpu": 1.0}
# Useful FLOPs of everything but attention as a part of the peak, recomputation and all that is not a product taken into
# account; fitted to benchmarks/results/gpu_step_*.json.
MATRIX_EFFICIENCY = 0.439
AFFORDABLE = 2**25  # devices × tokens that are counted block by block where rows of tiles are not enough


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A layout, and what a training step with it would be.

    `tiles` are of one head, by device and step, and no more than these if not `exact` (gathered ones: about these); the
    ring leaves out the steps that are not `needed`. `waiting` is the part of attention's time in which the mean device
    does not compute; `hidden` says whether no step waits for the wire alone.
    """

    setting: Setting
    chosen: kernels.Choice
    tiles: Counts
    exact: bool
    needed: np.ndarray
    forward_seconds: float
    backward_seconds: float
    waiting: float
    hidden: bool
    step_seconds: float
    mfu: float
    memory: dict[str, int]
    attention_bytes: int  # sent by a device for a layer's attention, both passes

    @property
    def layout(self) -> Layout:
        return self.setting.layout

    @property
    def strategy(self) -> Strategy:
        return self.setting.strategy

    @property
    def kernel(self) -> str:
        return self.setting.kernel

    @property
    def fits(self) -> bool:
        """Whether a device's memory suffices."""
        return sum(self.memory.values()) <= _usable(self.setting.hardware)

    @property
    def attention_seconds(self) -> float:
        """Of one layer, forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.setting.batch * self.setting.sequence_length / self.step_seconds

    @property
    def flops(self) -> np.ndarray:
        """What every device computes at every step, of one layer forward, in whole tiles; backward 2.5 times that."""
        return self.tiles * float(tile_flops(self.setting, self.chosen.tile))

    @property
    def critical_path(self) -> int:
        """Tiles of the busiest device, added up over the steps; per head."""
        return int(self.tiles.max(axis=0).sum(dtype=np.int64))

    @property
    def imbalance(self) -> float:
        """The critical path over the mean device's tiles: 1 if all steps are shared equally."""
        return self.critical_path * len(self.tiles) / max(1, int(self.tiles.sum(dtype=np.int64)))

    def timelines(self) -> tuple[Timeline, Timeline]:
        """The forward and the backward pass, step by step; worked out anew, for they are large."""
        forward, backward = passes(self.setting, self.chosen, self.tiles, self.needed)
        return forward.timeline(), backward.timeline()


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
    model: str | ModelConfig = "llama3-8b",
    layouts: Sequence[Layout] | None = None,
    strategies: Sequence[str | Strategy] | None = None,
    batch: int = 1,
    kernel: str = "auto",
) -> Plan:
    """How long a training step takes on `devices`, by layout and by strategy, and which ones to choose.

    Args:
      mask: causal by default; a mask with documents must be made for this length.
      hardware: a name in `striped_attention.runtime.hardware.HARDWARE`, or figures of your own.
      model: a name in `striped_attention.models.llama.PRESETS`, or a shape of your own.
      layouts: what to compare; contiguous always is. Default: stripes of 1, 256 and 1024, and zigzag.
      strategies: what to compare a ring with, as `attention` takes it. Default: heads or keys shared among all devices,
        and among those that a fast interconnect joins. For each the best of the layouts is kept.
      batch: sequences of a step, each of them spread over all devices.
      kernel: `auto` is the fastest that can do what a layout needs.
    """
    devices, length, batch = check_whole("devices", devices), check_whole("length", length), check_whole("batch", batch)
    mask = causal() if mask is None else mask
    _check(devices, length, mask, batch, kernel)
    shape, device = _named("model", PRESETS, ModelConfig, model), _named("hardware", HARDWARE, Hardware, hardware)
    setting = Setting(devices, length, mask, device, shape, batch, kernel)
    layouts = candidate_layouts(length, devices) if layouts is None else list(dict.fromkeys([BASELINE, *layouts]))
    if not all(isinstance(layout, Layout) for layout in layouts):
        raise ValueError(f"layouts must be a list of layouts, as sa.striped(256) makes them; got {layouts!r}.")
    pairs, count = _pairs(setting), _Count(mask, length)
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
        by_strategy += sorted(ready, key=lambda choice: choice.step_seconds)[:1]
    by_strategy.sort(key=lambda choice: choice.step_seconds)
    shortfall = None if any(choice.fits for choice in by_strategy) else _shortfall(choices[0])
    reason = _reason(choices, base, bound)
    return Plan(setting, choices, tuple(by_strategy), bound, reason, shortfall)


def assess(setting: Setting) -> Choice:
    """What a training step would be with one layout and one strategy."""
    return _choice(setting, _pairs(setting), _Count(setting.mask, setting.sequence_length))


def _strategies(setting: Setting, asked: Sequence[str | Strategy] | None) -> list[Strategy]:
    """What to compare a ring with."""
    devices, heads = setting.devices, setting.model.heads
    if asked is None:
        found = candidates(devices, heads, setting.hardware.group)
    elif isinstance(asked, str):
        raise ValueError(f"strategies must be a list, like ['heads', 'gather']; got {asked!r}.")
    else:
        found = [resolve(one, devices, heads) for one in asked]
    return [strategy for strategy in dict.fromkeys(found) if strategy != RING]


class _Count:
    """Tiles by layout, devices and tile, each counted once, and whether that is exact."""

    def __init__(self, mask: Mask, length: int) -> None:
        self.mask, self.length = mask, length
        self.known: dict[Any, tuple[Counts, bool]] = {}

    def __call__(self, layout: Layout, devices: int, tile: tuple[int, int]) -> tuple[Counts, bool]:
        key = (layout, devices, tile)
        if key not in self.known:
            tiles, exact = count_tile_rows(layout, self.mask, self.length, devices, tile)
            if not exact and devices * self.length <= AFFORDABLE:
                tiles, exact = count_tiles(layout, self.mask, self.length, devices, tile), True
            self.known[key] = tiles, exact
        return self.known[key]


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


def _choice(setting: Setting, pairs: int, count: _Count) -> Choice:
    chosen = _kernel(setting)
    setting = dataclasses.replace(setting, kernel=chosen.name)
    layout, devices, length, model = setting.layout, setting.devices, setting.sequence_length, setting.model
    strategy = setting.strategy
    tiles, exact = count(layout.grouped(strategy.heads), devices // strategy.heads, chosen.tile)
    if strategy.gather > 1:
        tiles, exact = _gathered(tiles, strategy.gather), False
    both = passes(setting, chosen, tiles, needed := _needed(setting))
    forward, backward = (one.seconds() for one in both)
    attention = forward + backward
    mean, most = both[0].tiles.mean(axis=1), both[0].tiles.max(axis=1)
    cost = estimate(setting, {"data": 1, "sequence": devices})
    products = matrix_flops(model, setting.batch * length)
    weights = sum(size for what, size in cost.wire.items() if what.startswith("weights"))
    outside = max(products / devices / (MATRIX_EFFICIENCY * setting.hardware.peak), weights / setting.wire)
    seconds = model.layers * attention + outside
    return Choice(
        setting=setting,
        chosen=chosen,
        tiles=tiles,
        exact=exact,
        needed=needed,
        forward_seconds=forward,
        backward_seconds=backward,
        step_seconds=seconds,
        memory=cost.memory,
        attention_bytes=sum(size for what, size in cost.wire.items() if not what.startswith("weights")) // model.layers,
        waiting=max(0.0, 1 - sum(one.mean_work(mean) for one in both) / attention),
        hidden=all(one.is_hidden(most) for one in both),
        mfu=(products + attention_flops(model, pairs)) / devices / seconds / setting.hardware.peak,
    )


def _needed(setting: Setting) -> np.ndarray:
    """Which steps the ring makes."""
    mask, length, group = setting.mask, setting.sequence_length, setting.strategy.group
    layout, devices = setting.layout.grouped(group), setting.devices // group
    made = np.zeros(devices, bool)
    padded = layout.padded_length(length, devices)
    made[list(needed_hops(layout, mask.window, mask.prefix, length, padded, devices))] = True
    return made


def _gathered(tiles: Counts, gather: int) -> Int[np.ndarray, "devices groups"]:
    """Tiles by group of keys, that many devices in each, from tiles by device of keys: about so many.

    The keys that a row of tiles sees are as many, but lie together: their ends are rounded to tiles once, not on each.
    """
    devices = len(tiles)
    device, step = np.indices(tiles.shape)
    groups = devices // gather
    back = (device // gather - (device - step) % devices // gather) % groups
    found = np.zeros((devices, groups), tiles.dtype)
    np.add.at(found, (device, back), tiles)
    return found


def _refusal(setting: Setting) -> str | None:
    """Why the kernel that was asked for cannot do it; None if it can, or any will do."""
    return None if setting.kernel == "auto" else kernels.refusal(setting.kernel, _request(setting))


def _kernel(setting: Setting) -> kernels.Choice:
    """The kernel for a layout: the one that was asked for, or the fastest that can."""
    try:
        return kernels.choose(setting.kernel, _request(setting))
    except NotImplementedError as error:
        raise ValueError(f"With {setting.layout!r}: {error}") from error


def _request(setting: Setting) -> Request:
    model, hardware = setting.model, setting.hardware
    query, key = (
        jax.ShapeDtypeStruct((setting.batch, setting.slots, heads, model.head_dim), setting.dtype)
        for heads in (model.heads, model.kv_heads)
    )
    return request_for(
        setting.strategy,
        query,
        key,
        mask=setting.mask,
        layout=setting.layout,
        devices=setting.devices,
        length=setting.sequence_length,
        platform=hardware.platform,
        device_kind=next(iter(hardware.kinds), ""),
        here=False,
    )


def _pairs(setting: Setting) -> int:
    """Visible pairs of a query and a key, of all sequences."""
    mask, length = setting.mask, setting.sequence_length
    if mask.length is None:
        hidden = length - min(length, length if mask.window is None else mask.window)
        prefix = length if mask.prefix is None else min(mask.prefix, length)
        triangle = lambda n: n * (n + 1) // 2  # noqa: E731
        return setting.batch * (triangle(length) - triangle(prefix) + prefix**2 - triangle(hidden))
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


def _usable(hardware: Hardware) -> float:
    return hardware.memory * USABLE.get(hardware.platform, min(USABLE.values()))


def _shortfall(best: Choice) -> str | None:
    """A sentence if the best layout does not fit into memory, with a number of devices on which it would; else None."""
    setting, usable = best.setting, _usable(best.setting.hardware)
    need = sum(best.memory.values())
    if need <= usable:
        return None
    sequences = "a sequence" if setting.batch == 1 else f"{setting.batch} sequences"
    missing = (
        f"A step with {sequences} of {setting.sequence_length:,} tokens on {setting.devices} devices needs "
        f"{gigabytes(need)} each, and of {setting.hardware.name} JAX can use {gigabytes(int(usable))}."
    )
    for doublings in range(1, 12):
        enough = setting.devices * 2**doublings
        if estimate(setting, {"data": 1, "sequence": enough}).total_memory <= usable:
            return f"{missing} On {enough} devices it would fit."
    return f"{missing} Take a smaller model or batch."

"""Plan: how a long text would run on machines that one does not have yet.

    sa.plan(64, 1_048_576, hardware="h100")

counts the tiles of every device and step as the kernels would run them (`count.py`), turns them into seconds with what
is known of the hardware (`hardware.py`), lets transfers run beside them, and does so for several layouts. Nothing is
compiled and no device is needed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from striped_attention.attention import KERNELS
from striped_attention.cost import attention_flops, estimate, gigabytes, matrix_flops
from striped_attention.count import Counts, count_tile_rows, count_tiles
from striped_attention.hardware import HARDWARE, MATRIX_EFFICIENCY, RATES, Hardware, Rates
from striped_attention.layout import Layout, check_whole, contiguous, striped, zigzag
from striped_attention.mask import Mask, causal
from striped_attention.model import PRESETS, ModelConfig
from striped_attention.timeline import Setting, Timeline, passes

SAME = 0.02  # a difference that a plan cannot see
AFFORDABLE = 2**25  # devices × tokens that are counted block by block where rows of tiles are not enough


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """A layout, and what a training step with it would be.

    `tiles` are of one head, by device and step, and no more than these if not `exact`. `waiting` is the part of
    attention's time in which the mean device does not compute; `hidden` says whether no step waits for the wire alone.
    """

    setting: Setting
    rates: Rates
    tiles: Counts
    exact: bool
    forward_seconds: float
    backward_seconds: float
    waiting: float
    hidden: bool
    step_seconds: float
    mfu: float
    memory: dict[str, int]

    @property
    def layout(self) -> Layout:
        return self.setting.layout

    @property
    def kernel(self) -> str:
        return self.setting.kernel

    @property
    def attention_seconds(self) -> float:
        """Of one layer, forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together."""
        return self.setting.batch * self.setting.sequence_length / self.step_seconds

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
        forward, backward = passes(self.setting, self.rates, self.tiles)
        return forward.timeline(), backward.timeline()


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What `plan` found: the layouts from the fastest to the slowest, and why the first one is."""

    setting: Setting
    choices: tuple[Choice, ...]
    bound: float
    reason: str

    @property
    def best(self) -> Choice:
        return self.choices[0]

    @property
    def baseline(self) -> Choice:
        """The contiguous layout: Ring Attention."""
        return next(choice for choice in self.choices if choice.layout == contiguous())

    def speedup(self, choice: Choice) -> float:
        """Of attention, over contiguous."""
        return self.baseline.attention_seconds / choice.attention_seconds

    def fits(self, choice: Choice) -> bool:
        return sum(choice.memory.values()) <= self.setting.hardware.memory


def plan(
    devices: int,
    length: int,
    *,
    mask: Mask | None = None,
    hardware: str | Hardware = "h100",
    model: str | ModelConfig = "llama3-8b",
    layouts: Sequence[Layout] | None = None,
    batch: int = 1,
    kernel: str = "auto",
) -> Plan:
    """How long a training step takes on a ring of `devices`, layout by layout, and which one to choose.

    Args:
      mask: causal by default; a mask with documents must be made for this length.
      hardware: a name of `hardware.HARDWARE`, or figures of your own.
      model: a name of `model.PRESETS`, or a shape of your own.
      layouts: what to compare; contiguous always is. Default: stripes of 1, 64 and 256, and zigzag.
      batch: sequences of a step, each of them spread over all devices.
      kernel: `auto` is the first that can do what a layout needs.
    """
    check_whole("devices", devices)
    check_whole("length", length)
    check_whole("batch", batch)
    if kernel not in ("auto", *KERNELS):
        raise ValueError(f"kernel must be one of {['auto', *KERNELS]}; got {kernel!r}.")
    mask = causal() if mask is None else mask
    mask.check_length(length)
    contiguous().padded_length(length, devices)  # refuses what positions cannot number
    shape, device = _named("model", PRESETS, model), _named("hardware", HARDWARE, hardware)
    setting = Setting(devices, length, mask, device, shape, batch, kernel)
    layouts = _layouts(length, devices) if layouts is None else list(dict.fromkeys([contiguous(), *layouts]))
    pairs = _pairs(setting)
    found = [_choice(dataclasses.replace(setting, layout=layout), pairs) for layout in layouts]
    base = found[0]
    least = (
        min(int(choice.tiles.sum(dtype=np.int64)) for choice in found if choice.rates.tile == base.rates.tile) / devices
    )
    bound = base.critical_path / least if least else 1.0
    choices = tuple(sorted(found, key=lambda choice: choice.step_seconds))
    return Plan(setting, choices, bound, _reason(choices, base, bound))


def packed(length: int, median: int = 1800, spread: float = 1.2, seed: int = 0) -> Mask:
    """Documents as they come: lengths from a log-normal distribution, one after another until the text is full."""
    check_whole("length", length)
    check_whole("median", median)
    random = np.random.default_rng(seed)
    lengths: list[np.ndarray] = []
    while sum(int(x.sum()) for x in lengths) < length:
        lengths.append(np.maximum(1, random.lognormal(np.log(median), spread, 1 + length // median)).astype(np.int64))
    ends = np.cumsum(np.concatenate(lengths))
    starts = np.concatenate([[0], ends[ends < length]]).astype(np.int32)
    # What `documents` makes of segment ids, without them: a text may have a hundred million tokens.
    first = np.repeat(starts, np.diff(starts, append=np.int32(length)))
    return Mask(prefix=0, lo=first[None], length=length)


def _named(what: str, known: dict[str, Any], given: Any) -> Any:
    if not isinstance(given, str):
        return given
    if given not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}; got {given!r}.")
    return known[given]


def _layouts(length: int, devices: int) -> list[Layout]:
    stripes = [stripe for stripe in (1, 64, 256) if stripe == 1 or 2 * stripe * devices <= length]
    return [contiguous(), *map(striped, stripes), zigzag()]


def _choice(setting: Setting, pairs: int) -> Choice:
    kernel, rates = _kernel(setting)
    setting = dataclasses.replace(setting, kernel=kernel)
    layout, devices, length, model = setting.layout, setting.devices, setting.sequence_length, setting.model
    tiles, exact = count_tile_rows(layout, setting.mask, length, devices, rates.tile)
    if not exact and devices * length <= AFFORDABLE:
        tiles, exact = count_tiles(layout, setting.mask, length, devices, rates.tile), True
    both = passes(setting, rates, tiles)
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
        rates=rates,
        tiles=tiles,
        exact=exact,
        forward_seconds=forward,
        backward_seconds=backward,
        step_seconds=seconds,
        memory=cost.memory,
        waiting=max(0.0, 1 - sum(one.mean_work(mean) for one in both) / attention),
        hidden=all(one.is_hidden(most) for one in both),
        mfu=(products + attention_flops(model, pairs)) / devices / seconds / setting.hardware.peak,
    )


def _kernel(setting: Setting) -> tuple[str, Rates]:
    """The kernel for a layout: the one that was asked for, or the first that can, and what is known of it."""
    model, platform = setting.model, setting.hardware.platform
    query, key = (
        jax.ShapeDtypeStruct((1, setting.slots, heads, model.head_dim), setting.dtype)
        for heads in (model.heads, model.kv_heads)
    )
    what: dict[str, Any] = dict(softcap=None, bias=None, mask=setting.mask, layout=setting.layout, tile=None)
    what |= dict(devices=setting.devices, platform=None)
    what["padded"] = setting.slots * setting.devices != setting.sequence_length
    refusals = {name: kernel.unsupported(query, key, **what) for name, kernel in KERNELS.items()}
    refusals |= {name: f"Nothing is known of it on a {platform}." for name in KERNELS if (platform, name) not in RATES}
    name = next(n for n, reason in refusals.items() if reason is None) if setting.kernel == "auto" else setting.kernel
    if refusals[name] is not None:
        raise ValueError(f"Kernel {name!r} cannot do {setting.layout!r} here: {refusals[name]}")
    return name, RATES[platform, name]


def _pairs(setting: Setting) -> int:
    """Visible pairs of a query and a key, of all sequences; piece by piece, which keeps to a processor's caches."""
    mask, length, total = setting.mask, setting.sequence_length, 0
    for first in range(0, length, 2**16):
        piece = np.arange(first, min(first + 2**16, length), dtype=np.int32)
        part = jax.tree.map(lambda x, piece=piece: np.asarray(x)[:, piece[0] : piece[-1] + 1], mask)
        lo, hi = part.bounds(piece, length)
        total += int(np.sum(np.maximum(hi - lo, 0), dtype=np.int64)) * (setting.batch if len(lo) == 1 else 1)
    return total


def _reason(choices: tuple[Choice, ...], base: Choice, bound: float) -> str:
    """Why the best choice is the best, in a sentence or two."""
    best, *others = choices
    close = [repr(other.layout) for other in others if other.step_seconds < (1 + SAME) * best.step_seconds]
    as_good = f" As good, within {SAME:.0%}: {', '.join(close)}." if close else ""
    if best is base:
        return f"{best.layout!r}: no other layout is faster here.{as_good}"
    more = base.attention_seconds / best.attention_seconds
    wire = "" if best.hidden else "; some steps wait for the wire: more tokens a device, or fewer devices, hide it"
    return (
        f"{best.layout!r}: its attention is {more:.2f} times as fast as that of contiguous() (at best {bound:.2f}), "
        f"for the busiest device has {best.imbalance - 1:.0%} more to do than the mean, with contiguous() "
        f"{base.imbalance - 1:.0%}{wire}.{as_good}"
    )


def shortfall(found: Plan) -> str | None:
    """A sentence if the best layout does not fit into memory, with a number of devices on which it would; else None."""
    if found.fits(found.best):
        return None
    setting = found.best.setting
    missing = (
        f"A step with {setting.sequence_length:,} tokens on {setting.devices} devices needs "
        f"{gigabytes(sum(found.best.memory.values()))} each, and {setting.hardware.name} has "
        f"{gigabytes(int(setting.hardware.memory))}."
    )
    for doublings in range(1, 12):
        enough = setting.devices * 2**doublings
        cost = estimate(setting, {"data": 1, "sequence": enough})
        if cost.total_memory <= setting.hardware.memory:
            return f"{missing} On {enough} devices it would fit."
    return f"{missing} Take a smaller model."

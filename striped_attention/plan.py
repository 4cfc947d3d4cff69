"""Plan: how a long text would run on machines that one does not have yet.

    sa.plan(64, 1_048_576, hardware="h100")

counts the tiles of every device and step as the kernels would run them (`count.py`), turns them into seconds with what
is known of the hardware (`hardware.py`), lets transfers run beside them, and does so for several layouts. Nothing is
compiled and no device is needed.

A ring's steps in time: a device begins a step when it has ended the one before; then it sends, and computes. It ends
the step when it has computed and when its own transfer is done, which needs both neighbours to have begun theirs:

    end(d, j) = max(begin(d, j) + work(d, j), max over d-1, d, d+1 of begin(·, j) + transfer(j))
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from striped_attention.attention import KERNELS
from striped_attention.cost import FLOAT32, attention_flops, estimate, gigabytes, matrix_flops
from striped_attention.count import Counts, count_tile_rows, count_tiles
from striped_attention.hardware import HARDWARE, MATRIX_EFFICIENCY, RATES, Hardware, Rate, Rates
from striped_attention.layout import Layout, check_whole, contiguous, striped, zigzag
from striped_attention.mask import Mask, causal
from striped_attention.model import PRESETS, ModelConfig

BACKWARD = 2.5  # the FLOPs of attention's backward pass, in forward passes
_CONTIGUOUS = contiguous()
SAME = 0.02  # a difference that a plan cannot see
AFFORDABLE = 2**25  # devices × tokens that are counted block by block where rows of tiles are not enough


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a plan was asked for, and a layout for it. Also all that `cost.estimate` wants to know."""

    devices: int
    sequence_length: int
    mask: Mask
    hardware: Hardware
    model: ModelConfig
    batch: int = 1
    kernel: str = "auto"
    layout: Layout = _CONTIGUOUS
    remat: str = "attention"
    chunk: int = 8192

    @property
    def dtype(self) -> str:
        return "float32" if self.hardware.platform == "cpu" else "bfloat16"

    def make_layout(self, devices: int) -> Layout:
        return self.layout

    @property
    def slots(self) -> int:
        """Tokens of a device, padding included."""
        return self.layout.padded_length(self.sequence_length, self.devices) // self.devices

    @property
    def hop_bytes(self) -> int:
        """What a device sends of keys and values at once."""
        keys = self.batch * self.slots * self.model.kv_heads * self.model.head_dim
        return 2 * keys * jnp.dtype(self.dtype).itemsize

    @property
    def wire(self) -> float:
        """Bytes per second of the slowest hop."""
        return self.hardware.wire if self.devices <= self.hardware.group else self.hardware.far_wire


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """One pass of one layer's attention: seconds by device (row) and step (column).

    `begin` is when a device begins a step, `work` how long it computes; `transfer` (by step) is what the wire takes,
    `sent` the bytes on it. The backward pass has a column more: its first and last are halves of a device's own block.
    """

    begin: np.ndarray
    work: np.ndarray
    transfer: np.ndarray
    sent: np.ndarray
    seconds: float


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
        forward, backward = (_timeline(one) for one in _passes(self.setting, self.rates, self.tiles))
        return forward, backward


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
    passes = _passes(setting, rates, tiles)
    forward, backward = (float(collections.deque(one.begins(), maxlen=1).pop().max()) for one in passes)
    attention = forward + backward
    mean, most = passes[0].tiles.mean(axis=1), passes[0].tiles.max(axis=1)
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
        waiting=max(0.0, 1 - sum(one.mean_work(mean) for one in passes) / attention),
        hidden=all(one.is_hidden(most) for one in passes),
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


@dataclasses.dataclass(frozen=True, eq=False)
class _Pass:
    """A pass over the ring: which blocks (rows of `tiles`, [blocks, devices]) are done step by step, and what is sent.

    A device computes a block for tiles · per_tile + per_step seconds, and `part` of that if only part of it is done.
    """

    tiles: np.ndarray
    block: np.ndarray
    part: np.ndarray
    per_tile: float
    per_step: float
    sent: np.ndarray
    wire: float

    def work(self, tiles: np.ndarray, step: Any) -> np.ndarray:
        return (tiles * self.per_tile + self.per_step) * self.part[step]

    def mean_work(self, mean: np.ndarray) -> float:
        """Seconds that the mean device computes, if it has this many tiles of every block."""
        return float(self.work(mean[self.block], slice(None)).sum())

    def is_hidden(self, most: np.ndarray) -> bool:
        """Whether the wire is never slower than the busiest device, which has this many tiles of every block."""
        return bool((self.sent / self.wire <= self.work(most[self.block], slice(None))).all())

    def begins(self) -> Iterator[np.ndarray]:
        """When the devices begin each step and, last, when they end; see above."""
        now = np.zeros(self.tiles.shape[1])
        for step, (block, sent) in enumerate(zip(self.block, self.sent, strict=True)):
            yield now
            circle = np.concatenate([now[-1:], now, now[:1]])
            together = np.maximum(np.maximum(circle[:-2], circle[2:]), now)
            now = np.maximum(now + self.work(self.tiles[block], step), together + sent / self.wire)
        yield now


def _timeline(one: _Pass) -> Timeline:
    *begins, ends = one.begins()
    work = np.stack([one.work(one.tiles[block], step) for step, block in enumerate(one.block)], axis=1)
    return Timeline(np.stack(begins, axis=1), work, one.sent / one.wire, one.sent, float(ends.max()))


def _passes(setting: Setting, rates: Rates, tiles: Counts) -> tuple[_Pass, _Pass]:
    """The two passes of a layer's attention over the steps that somebody needs."""
    model, batch, slots, hardware = setting.model, setting.batch, setting.slots, setting.hardware
    blocks = np.ascontiguousarray(tiles.T)
    if setting.mask.length is None:  # then it is known to everybody which steps nobody needs
        needed = np.append(True, blocks[1:].any(axis=1))  # the first is everybody's own
        blocks = blocks if needed.all() else blocks[needed]
    area = min(rates.tile[0], slots) * min(rates.tile[1], slots)
    # A mask with documents counts the tiles of all sequences of a batch, others those of one.
    dim = -(-model.head_dim // rates.lanes) * rates.lanes
    flops = 4 * area * model.heads * dim * (batch if setting.mask.length is None else 1)
    elements = batch * slots * model.heads * model.head_dim
    hops = len(blocks) - 1

    def make(rate: Rate, factor: float, order: list[int], part: list[float], sent: list[float]) -> _Pass:
        per_tile = factor * flops / (rate.efficiency * hardware.peak)
        per_step = rate.query_bytes * elements / hardware.bandwidth + rate.seconds
        return _Pass(blocks, np.array(order), np.array(part), per_tile, per_step, np.array(sent), setting.wire)

    kv = float(setting.hop_bytes)
    sums = kv * FLOAT32 / jnp.dtype(setting.dtype).itemsize
    order = list(range(hops + 1))
    forward = make(rates.forward, 1.0, order, [1.0] * len(order), [kv] * hops + [0.0])
    if not hops:
        return forward, make(rates.backward, BACKWARD, order, [1.0], [0.0])
    halves = [0.5, *[1.0] * hops, 0.5]
    sent = [kv * (step < hops) + sums * (step > 1) for step in range(hops + 2)]
    return forward, make(rates.backward, BACKWARD, [*order, 0], halves, sent)


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

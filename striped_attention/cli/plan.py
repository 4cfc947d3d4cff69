"""The command `striped plan`: its options, its terminal output and its JSON."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import rich.box
import rich.console
import rich.table

import striped_attention as sa
from striped_attention.core.layout import Layout
from striped_attention.core.mask import MEDIAN, Mask, packed
from striped_attention.errors import UsageError
from striped_attention.kernels.choice import KERNELS
from striped_attention.kernels.rates import BACKWARD
from striped_attention.models.config import PRESETS
from striped_attention.options import Path, Texts, Whole, parse_layouts, parse_length
from striped_attention.planning.cost import gigabytes
from striped_attention.planning.plan import SAME, Choice, Plan
from striped_attention.runtime.hardware import HARDWARE
from striped_attention.runtime.record import metadata
from striped_attention.strategies.strategy import RING, Strategy, parse_strategy
from striped_attention.strategies.timeline import tile_flops

_SHADES = " ·░▒▓█"
LARGEST_PICTURE = 32  # devices and steps, in characters
WIDTH = 32  # characters of a timeline
MOST_RECORDED = 256  # devices; larger plans leave tiles and timelines out of the JSON


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Estimate training steps on hardware you do not have yet, and choose a layout and a strategy.

    Counts the tiles that every device computes at every step, overlaps them with the transfers, and compares layouts
    and strategies: time, MFU, memory and traffic. Takes seconds on any computer and needs no accelerator. For example:
    striped plan --devices 64 --length 1M
    """

    devices: int
    """Devices that share each sequence."""
    length: str
    """Sequence length in tokens, such as 786432, 256k (× 1024) or 1M (× 1024²)."""
    mask: Literal["causal", "documents", "window", "prefix", "full"] = "causal"
    """Attention mask. documents: sequences packed with documents of random lengths, causal within each."""
    window: Whole = None
    """With --mask window: width of the sliding window in tokens. Default: 4096."""
    prefix: Whole = None
    """With --mask prefix: length of the prefix in tokens. Default: a third of the sequence."""
    document_length: Whole = None
    """With --mask documents: median length in tokens; lengths are log-normal. Default: 1800."""
    hardware: str = "h100"
    """a100, h100, h200, b200, v4, v5e, v5p, v6e (TPUs), or cpu."""
    devices_per_node: Whole = None
    """Consecutive devices that share a fast interconnect. Default: 8 GPUs, or the size of a TPU pod."""
    preset: str = "llama3-8b"
    """Shape of the model: 1b, 3b, 7b, llama3-8b or debug, as in `striped train`."""
    batch: int = 1
    """Sequences per step."""
    layouts: Texts = None
    """Layouts to compare with contiguous, like striped(1) striped(128) zigzag. Default: striped(1) striped(256)
    striped(1024) zigzag and stripes as wide as the kernel's tile, as far as --kernel supports them."""
    strategies: Texts = None
    """Strategies to compare with a ring, like heads, gather, heads=8,gather=2 or inner=8. Default: heads and gather
    over all devices and within nodes or pods, and double rings of nodes."""
    kernel: str = "auto"
    """Attention kernel: xla, cudnn, hopper or pallas_tpu. auto: the fastest that supports the layout and mask."""
    remat: str = "auto"
    """Rematerialisation, as in `striped train`: unrolled, none, qkv, attention or full. auto: recompute as little as
    fits into --memory."""
    memory: float = 0.9
    """Fraction of each device's memory that a step may use."""
    output: Path = None
    """Write the plan as JSON to this file, for `striped report`."""

    def __post_init__(self) -> None:
        for option, mask in (("window", "window"), ("prefix", "prefix"), ("document_length", "documents")):
            if getattr(self, option) is not None and self.mask != mask:
                flag = f"--{option.replace('_', '-')}"
                raise UsageError(f"{flag} requires --mask {mask}; got --mask {self.mask}. Remove one of them.")
        for name, known in (("hardware", HARDWARE), ("preset", PRESETS), ("kernel", ("auto", *KERNELS))):
            if getattr(self, name) not in known:
                raise UsageError(f"--{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}.")

    @property
    def tokens(self) -> int:
        return parse_length(self.length)

    def make_mask(self) -> Mask:
        if self.mask == "documents":
            return packed(self.tokens, self.median)
        if self.mask == "window":
            return sa.sliding_window(4096 if self.window is None else self.window)
        if self.mask == "prefix":
            return sa.prefix(self.tokens // 3 if self.prefix is None else self.prefix)
        return sa.causal() if self.mask == "causal" else sa.full()

    @property
    def median(self) -> int:
        """The median length of documents."""
        return MEDIAN if self.document_length is None else self.document_length

    def make_strategies(self) -> list[str | Strategy] | None:
        return None if self.strategies is None else [parse_strategy(text) for text in self.strategies]

    def make_layouts(self) -> list[Layout] | None:
        return None if self.layouts is None else parse_layouts(self.layouts)


def run(config: PlanConfig) -> None:
    """Plan, print the plan, and write the JSON."""
    try:
        found = sa.plan(
            config.devices,
            config.tokens,
            mask=config.make_mask(),
            hardware=config.hardware,
            devices_per_node=config.devices_per_node,
            model=config.preset,
            layouts=config.make_layouts(),
            strategies=config.make_strategies(),
            batch=config.batch,
            kernel=config.kernel,
            remat=config.remat,
            memory=config.memory,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    if found.shortfall is not None:
        raise UsageError(found.shortfall)
    if config.output is not None:
        write(found, config, config.output)
    width = None if sys.stdout.isatty() else 120
    console = rich.console.Console(highlight=False, width=width)
    for part in show(found, config):
        console.print(part)
    if config.output is not None:
        console.print(str(config.output))


def show(found: Plan, config: PlanConfig) -> list[Any]:
    """The plan as text, tables and drawings."""
    setting, best = found.setting, found.best
    model = setting.model
    most = (
        best.tiles.sum(axis=1, dtype=np.int64).max()
        * tile_flops(best.workload, best.chosen.tile)
        * (1 + BACKWARD)
        / 1e12
    )
    nodes = "" if config.devices_per_node is None else f", {config.devices_per_node} per node"
    documents = f", median {config.median:,} tokens" if config.mask == "documents" else ""
    parts: list[Any] = [
        f"{setting.sequence_length:,} tokens ({config.mask}{documents}) on {setting.devices} × "
        f"{setting.hardware.name}{nodes}, {config.preset} "
        f"({model.parameters / 1e9:.2f}B parameters, {model.heads}:{model.kv_heads} heads)",
        _verdict(found),
        "",
        "Layouts with a ring:",
        _table(found),
        f"With a ring, choose {found.reason}",
        *_by_strategy(found),
        _pictures(found, "work of device ↓ at step →", _heat),
        _pictures(found, "computing █ or idle · over time →, forward", _bars),
        f"With {best.layout!r} the busiest device computes {most:,.2f} TFLOP per layer of attention, forward and "
        f"backward. A hop transfers {gigabytes(best.workload.messages.hop)} of keys and values at "
        f"{best.workload.interconnect / 1e9:g} GB/s.",
        _fit(found.fastest),
        *_assumptions(found),
    ]
    return parts


def _verdict(found: Plan) -> str:
    """The fastest choice of all that fit."""
    best, more = found.fastest, found.best.step_seconds / found.fastest.step_seconds
    faster = f", {more:.2f} × as fast as the best ring" if more >= 1 + SAME else ""
    return (
        f"Best: --strategy {best.strategy} with {best.layout!r}: {seconds(best.step_seconds)} per step, "
        f"{best.tokens_per_second:,.0f} tokens/s, MFU {best.mfu:.1%}, {gigabytes(sum(best.memory.values()))} per "
        f"device (--remat {best.setting.remat}){faster}."
    )


def _fit(best: Choice) -> str:
    """Whether the fastest choice fits into memory, and what takes the memory."""
    setting, needed = best.setting, sum(best.memory.values())
    room = f"{gigabytes(int(setting.budget))} of a device's {gigabytes(int(setting.hardware.memory))}"
    name = f"--strategy {best.strategy} with {best.layout!r}"
    verdict = f"It fits: {name} needs" if best.fits else f"It does not fit: {name} would need"
    parts = ", ".join(f"{what} {gigabytes(size)}" for what, size in best.memory.items())
    return (
        f"{verdict} {gigabytes(needed)} per device, and --memory {setting.memory:g} allows {room} (--remat "
        f"{setting.remat}, --chunk {setting.chunk or 0}). Memory per device: {parts}."
    )


def _assumptions(found: Plan) -> list[str]:
    """Which kernels the plan assumes, and which assumptions are not measured."""
    kernels: dict[str, list[str]] = {}
    for choice in (*found.choices, *(one for one in found.strategies if one.strategy != RING)):
        name = repr(choice.layout) if choice.strategy == RING else str(choice.strategy)
        kernels.setdefault(f"{choice.kernel} ({choice.chosen.rates.known})", []).append(name)
    parts = ["Kernels: " + "; ".join(f"{name}: {', '.join(layouts)}" for name, layouts in kernels.items()) + "."]
    name = found.setting.hardware.name
    scaled = "" if name in ("h200", "cpu") else f"kernel speeds are scaled to {name}, where nothing was measured; "
    parts.append(f"Assumed: {scaled}links run at full bandwidth, and gathers of weights overlap with computation.")
    if not all(choice.exact for choice in found.choices):
        parts.append("≤: an upper bound, counted by rows of tiles; such layouts may be faster.")
    return parts


def _table(found: Plan) -> rich.table.Table:
    shown = rich.table.Table(
        *("layout", "imbalance", "work", "attention", "gain", "step", "tokens/s", "MFU"),
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        caption=(
            "imbalance: load of the busiest device over the mean; work: FLOPs of all tiles over visible pairs' alone; "
            f"attention: one layer, forward and backward; gain: speed-up of attention over {found.baseline.layout!r}, "
            f"at most {found.bound:.2f}"
        ),
        caption_justify="left",
    )
    shown.columns[0].no_wrap = True
    for choice in found.choices:
        tiles = ("" if choice.exact else "≤ ") + f"{choice.imbalance:.2f}"
        shown.add_row(
            *(repr(choice.layout), tiles, f"{choice.work:.2f}", seconds(choice.attention_seconds)),
            f"{found.speedup(choice):.2f}",
            *(seconds(choice.step_seconds), f"{choice.tokens_per_second:,.0f}", f"{choice.mfu:.1%}"),
        )
    return shown


def _by_strategy(found: Plan) -> list[Any]:
    """A table of strategies, each with its best layout."""
    if len(found.strategies) == 1:
        return []
    shown = rich.table.Table(
        *("strategy", "layout", "attention", "step", "sent", "off-node", "memory"),
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
        caption="sent: bytes per device for one layer's attention, both passes; off-node: the part that leaves a node "
        "or pod\n",
        caption_justify="left",
    )
    for column in shown.columns[:-1]:
        column.no_wrap = True
    for choice in found.strategies:
        memory = _short(sum(choice.memory.values())) + ("" if found.fits(choice) else ", does not fit")
        shown.add_row(
            *(str(choice.strategy), repr(choice.layout), seconds(choice.attention_seconds)),
            *(seconds(choice.step_seconds), _short(choice.attention_bytes), _short(choice.slow_bytes), memory),
        )
    return ["", "Strategies, each with its best layout:", shown]


def _short(size: int) -> str:
    """Bytes with three digits, so that the table fits into 80 columns."""
    number, unit = gigabytes(size).split()
    return f"{float(number):.3g} {unit}" if float(number) < 999.5 else f"{float(number):.0f} {unit}"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def _pictures(found: Plan, what: str, draw: Callable[[Choice], list[str]]) -> str:
    """Drawings of the baseline and of the best layout, side by side."""
    shown = [found.baseline] + ([found.best] if found.best is not found.baseline else [])
    drawn = [[f"{choice.layout!r}", *draw(choice)] for choice in shown]
    widths = [max(map(len, lines)) + 4 for lines in drawn]
    rows = [
        "".join(line.ljust(width) for line, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*drawn, strict=True)
    ]
    return "\n".join([what, *rows])


def _heat(choice: Choice) -> list[str]:
    """Work by device and step, darker for more; with many devices a character shows the busiest of several."""
    tiles = choice.tiles
    edges = np.linspace(0, len(tiles), min(len(tiles), LARGEST_PICTURE) + 1).astype(int)[:-1]
    pooled = np.maximum.reduceat(np.maximum.reduceat(tiles, edges, axis=0), edges, axis=1)
    shade = np.ceil(pooled / max(1, tiles.max()) * (len(_SHADES) - 1)).astype(int)
    return ["".join(_SHADES[value] for value in row) for row in shade] + [f"█ is {tiles.max():,} tiles"]


def _bars(choice: Choice) -> list[str]:
    """When devices compute and when they are idle, for up to eight of them."""
    setting = choice.setting
    if setting.devices > MOST_RECORDED:
        return [f"{seconds(choice.forward_seconds)}"]
    forward, _ = choice.timelines()
    lines = []
    for device in np.unique(np.linspace(0, setting.devices - 1, 8).astype(int)):
        moments = (np.arange(WIDTH) + 0.5) / WIDTH * forward.seconds
        step = np.searchsorted(forward.begin[device], moments, side="right") - 1
        busy = moments < forward.begin[device, step] + forward.work[device, step]
        lines.append("".join("█" if now else "·" for now in busy) + f" {device}")
    return [*lines, seconds(forward.seconds)]


def document(found: Plan, config: PlanConfig) -> dict[str, Any]:
    """The plan as a JSON document."""
    setting = found.setting
    options = {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in dataclasses.asdict(config).items()}
    small = setting.devices <= MOST_RECORDED
    return {
        **metadata("plan", {**options, "tokens": setting.sequence_length}),
        "hardware": dataclasses.asdict(setting.hardware),
        "model": dataclasses.asdict(setting.model),
        **{"bound": found.bound, "reason": found.reason},
        "choices": [
            {
                **{"layout": repr(choice.layout), "kernel": choice.kernel, "rates": _rates(choice)},
                **{"exact": choice.exact, "imbalance": choice.imbalance, "critical_path": choice.critical_path},
                **{"forward_seconds": choice.forward_seconds, "backward_seconds": choice.backward_seconds},
                **{"over_contiguous": found.speedup(choice), "waiting": choice.waiting, "hidden": choice.hidden},
                **{"step_seconds": choice.step_seconds, "tokens_per_second": choice.tokens_per_second},
                **{"mfu": choice.mfu, "memory": choice.memory, "work": choice.work},
                "tiles": choice.tiles.tolist() if small else None,
                **{"remat": choice.setting.remat, "chunk": choice.setting.chunk},
                "flops": choice.flops.tolist() if small else None,
                "timelines": [_record(line) for line in choice.timelines()] if small else None,
            }
            for choice in found.choices
        ],
        "strategies": [
            {
                **{"strategy": str(choice.strategy), "layout": repr(choice.layout), "kernel": choice.kernel},
                **{"forward_seconds": choice.forward_seconds, "backward_seconds": choice.backward_seconds},
                **{"step_seconds": choice.step_seconds, "tokens_per_second": choice.tokens_per_second},
                **{"mfu": choice.mfu, "memory": choice.memory, "attention_bytes": choice.attention_bytes},
                **{"remat": choice.setting.remat, "chunk": choice.setting.chunk},
            }
            for choice in found.strategies
        ],
    }


def _rates(choice: Choice) -> dict[str, Any]:
    return {"tile": choice.chosen.tile, **dataclasses.asdict(choice.chosen.rates)}


def _record(line: Any) -> dict[str, Any]:
    return {field.name: np.asarray(getattr(line, field.name)).tolist() for field in dataclasses.fields(line)}


def write(found: Plan, config: PlanConfig, path: pathlib.Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document(found, config), ensure_ascii=False) + "\n")
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}.") from error

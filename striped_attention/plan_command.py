"""The command `striped plan`: its options, and how a plan is shown in a terminal and kept as JSON."""

import dataclasses
import json
import pathlib
import re
import sys
from typing import Any, Literal

import numpy as np
import rich.console
import rich.table

import striped_attention as sa
from striped_attention.attention import KERNELS
from striped_attention.bench.config import Texts, parse_layouts
from striped_attention.bench.record import metadata
from striped_attention.cost import gigabytes
from striped_attention.hardware import HARDWARE
from striped_attention.layout import Layout
from striped_attention.mask import Mask
from striped_attention.model import PRESETS
from striped_attention.plan import Choice, Plan, packed, shortfall
from striped_attention.training.config import Path, Whole
from striped_attention.training.errors import UsageError

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_SHADES = " ·░▒▓█"
LARGEST_PICTURE = 32  # devices and steps, in characters
MOST_RECORDED = 256  # devices whose tiles go into the JSON


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Say how a long text would train on machines you do not have yet, and which layout to choose.

    Counts the work of every device and step as the kernels would do it, lets transfers run beside it, and compares
    layouts. Takes seconds, on any computer. For example: striped plan --devices 64 --length 1M --hardware h100
    """

    devices: int
    """Devices that one sequence is spread over."""
    length: str
    """Tokens of a sequence: a number, or like 256k (× 1024) or 1M (× 1024²)."""
    mask: Literal["causal", "documents", "window", "prefix", "full"] = "causal"
    """Which keys a token sees; documents: packed ones, of random lengths."""
    window: Whole = None
    """For --mask window: keys that a token sees. Default: 4096."""
    prefix: Whole = None
    """For --mask prefix: tokens that all see. Default: a third of the text."""
    document_length: Whole = None
    """For --mask documents: the median, of a log-normal distribution. Default: 1800."""
    hardware: str = "h100"
    """a100, h100, h200, b200, v4, v5e, v5p, v6e (TPUs), or cpu."""
    preset: str = "llama3-8b"
    """Shape of the model: 1b, 3b, 7b, llama3-8b or debug, as in `striped train`."""
    batch: int = 1
    """Sequences a step."""
    layouts: Texts = None
    """What to compare, like striped(1) striped(128) zigzag. Contiguous always is. Default: striped(1) striped(64)
    striped(256) zigzag."""
    kernel: str = "auto"
    """xla, cudnn, or auto: the first that can do what a layout needs."""
    output: Path = None
    """Where all of it goes as JSON, for `striped report`. Default: nowhere."""

    def __post_init__(self) -> None:
        for option, mask in (("window", "window"), ("prefix", "prefix"), ("document_length", "documents")):
            if getattr(self, option) is not None and self.mask != mask:
                flag = f"--{option.replace('_', '-')}"
                raise UsageError(f"{flag} is for --mask {mask}; got --mask {self.mask}. Leave one of them out.")
        for name, known in (("hardware", HARDWARE), ("preset", PRESETS), ("kernel", ("auto", *KERNELS))):
            if getattr(self, name) not in known:
                raise UsageError(f"--{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}.")

    @property
    def tokens(self) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)", self.length.replace("_", "").replace(",", "").lower())
        tokens = float(found[1]) * _UNITS[found[2]] if found else 0.0
        if tokens < 1 or tokens != int(tokens):
            raise UsageError(f"--length must be a number of tokens, like 786432, 256k or 1M; got {self.length!r}.")
        return int(tokens)

    def make_mask(self) -> Mask:
        if self.mask == "documents":
            return packed(self.tokens, self.document_length or 1800)
        if self.mask == "window":
            return sa.sliding_window(4096 if self.window is None else self.window)
        if self.mask == "prefix":
            return sa.prefix(self.tokens // 3 if self.prefix is None else self.prefix)
        return sa.causal() if self.mask == "causal" else sa.full()

    def make_layouts(self) -> list[Layout] | None:
        return None if self.layouts is None else parse_layouts(self.layouts)


def run(config: PlanConfig) -> None:
    """Plan, print, and write the JSON."""
    try:
        found = sa.plan(
            config.devices,
            config.tokens,
            mask=config.make_mask(),
            hardware=config.hardware,
            model=config.preset,
            layouts=config.make_layouts(),
            batch=config.batch,
            kernel=config.kernel,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    if (missing := shortfall(found)) is not None:
        raise UsageError(missing)
    if config.output is not None:
        write(found, config, config.output)
    width = None if sys.stdout.isatty() else 140
    console = rich.console.Console(highlight=False, width=width)
    for part in show(found, config):
        console.print(part)
    if config.output is not None:
        console.print(str(config.output))


def show(found: Plan, config: PlanConfig) -> list[Any]:
    """What a person wants to read of a plan."""
    setting, best = found.setting, found.best
    hardware, model = setting.hardware, setting.model
    parts: list[Any] = [
        f"{setting.sequence_length:,} tokens ({config.mask}) on {setting.devices} × {hardware.name}, {config.preset} "
        f"({model.parameters / 1e9:.2f}B parameters, {model.heads}:{model.kv_heads} heads). "
        f"A hop of keys and values is {gigabytes(best.setting.hop_bytes)}, on a wire of {setting.wire / 1e9:g} GB/s.",
        _table(found),
        f"Choose [bold]{found.reason}[/bold]" if sys.stdout.isatty() else f"Choose {found.reason}",
        _pictures(found),
        f"Memory of a device with {best.layout!r}: "
        + ", ".join(f"{what} {gigabytes(size)}" for what, size in best.memory.items()),
    ]
    assumed = {choice.kernel: choice.rates.known for choice in found.choices}
    parts.append("Speed of the kernels: " + "; ".join(f"{name} {known}" for name, known in assumed.items()) + ".")
    if hardware.name not in ("h200", "cpu") and "cudnn" in assumed:
        parts.append(f"Of {hardware.name} nothing is measured: its peak and memory are scaled from the H200's.")
    if not all(choice.exact for choice in found.choices):
        parts.append("≤: counted row by row of tiles, which may be more than is run; such layouts may be faster.")
    return parts


def _table(found: Plan) -> rich.table.Table:
    shown = rich.table.Table(
        *("layout", "kernel", "busiest / mean", "TFLOP a device", "attention, a layer", "waiting", "× contiguous"),
        *("bound", "step", "tokens/s", "MFU", "memory"),
    )
    shown.columns[0].no_wrap = True
    for choice in found.choices:
        tiles = ("" if choice.exact else "≤ ") + f"{choice.imbalance:.2f}"
        shown.add_row(
            *(repr(choice.layout), choice.kernel, tiles, f"{flops(choice) / 1e12:.2f}"),
            *(seconds(choice.attention_seconds), f"{choice.waiting:.0%}", f"{found.speedup(choice):.2f}"),
            *(f"{found.bound:.2f}", seconds(choice.step_seconds), f"{choice.tokens_per_second:,.0f}"),
            *(f"{choice.mfu:.1%}", gigabytes(sum(choice.memory.values()))),
        )
    return shown


def flops(choice: Choice) -> float:
    """Of the busiest device, a layer's attention forward and backward, hidden pairs within tiles included."""
    tile, model, slots = choice.rates.tile, choice.setting.model, choice.setting.slots
    most = int(choice.tiles.sum(axis=1, dtype=np.int64).max())
    return 3.5 * 4 * most * min(tile[0], slots) * min(tile[1], slots) * model.heads * model.head_dim


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def _pictures(found: Plan) -> str:
    """Device × step, as dark as there is work, for contiguous and the best layout side by side."""
    shown = [found.baseline] + ([found.best] if found.best is not found.baseline else [])
    most = max(int(choice.tiles.max()) for choice in shown)
    drawn = [_heat(choice.tiles, most) for choice in shown]
    names = [f"{choice.layout!r}: work of device ↓ at step →" for choice in shown]
    widths = [max(len(name), *map(len, lines)) + 4 for name, lines in zip(names, drawn, strict=True)]
    rows = [names, *zip(*drawn, strict=True)]
    lines = ["".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _heat(tiles: np.ndarray, most: int) -> list[str]:
    """Lines of shaded characters; with many devices a character is the busiest of several."""
    size = min(len(tiles), LARGEST_PICTURE)
    edges = np.linspace(0, len(tiles), size + 1).astype(int)[:-1]
    pooled = np.maximum.reduceat(np.maximum.reduceat(tiles, edges, axis=0), edges, axis=1)
    shade = np.ceil(pooled / max(1, most) * (len(_SHADES) - 1)).astype(int)
    return ["".join(_SHADES[value] for value in row) for row in shade]


def document(found: Plan, config: PlanConfig) -> dict[str, Any]:
    """A plan as JSON can keep it."""
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
                **{"layout": repr(choice.layout), "kernel": choice.kernel, "rates": dataclasses.asdict(choice.rates)},
                **{"exact": choice.exact, "imbalance": choice.imbalance, "critical_path": choice.critical_path},
                **{"forward_seconds": choice.forward_seconds, "backward_seconds": choice.backward_seconds},
                **{"over_contiguous": found.speedup(choice), "waiting": choice.waiting, "hidden": choice.hidden},
                **{"step_seconds": choice.step_seconds, "tokens_per_second": choice.tokens_per_second},
                **{"mfu": choice.mfu, "memory": choice.memory, "tiles": choice.tiles.tolist() if small else None},
                "timelines": [_record(line) for line in choice.timelines()] if small else None,
            }
            for choice in found.choices
        ],
    }


def _record(line: Any) -> dict[str, Any]:
    return {field.name: np.asarray(getattr(line, field.name)).tolist() for field in dataclasses.fields(line)}


def write(found: Plan, config: PlanConfig, path: pathlib.Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document(found, config), ensure_ascii=False) + "\n")
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}.") from error

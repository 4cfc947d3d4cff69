"""The suite `scale`: model sizes and lengths past the paper's. Measured as far as this machine goes, planned beyond.

Measured rows are one layer's attention on this machine's cores, by the critical path of a ring (`blocks.py`), and
beside them stands what the plan says of the same (hardware `cpu`), so that one sees how far to trust it. Planned rows
are whole training steps from `striped plan`, on machines that are not here; `fits` says whether they have the memory.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import rich.table

from striped_attention.bench import blocks, problem
from striped_attention.bench.config import BenchConfig
from striped_attention.bench.layouts import with_contiguous
from striped_attention.bench.run import document, path, say, write
from striped_attention.bench.workers import Team
from striped_attention.layout import Layout, contiguous
from striped_attention.mask import causal
from striped_attention.model import ModelConfig
from striped_attention.plan import plan

_CPU = problem.CPU
# One layer with the attention that is measured; a plan wants to know the rest too, and it is not looked at.
LAYER = ModelConfig(
    layers=1, dim=_CPU.heads * _CPU.dim, ffn=128, heads=_CPU.heads, kv_heads=_CPU.kv_heads, vocabulary=128
)
NAME = f"attention, {_CPU.heads} heads × {_CPU.dim}"
MEMBERS = 8  # of the measured rings


def run(config: BenchConfig) -> None:
    """Check, measure, plan, print a table and write the JSON, after every ring."""
    options = config.options
    layouts = with_contiguous(config)
    result = document(config, {**options, "measured_members": MEMBERS}) | {"how": blocks.HOW, "checks": [], "rows": []}
    with blocks.core() as team:
        for length in options["measured"]:
            say(f"measured: {MEMBERS} devices, {length:,} tokens")
            result["rows"] += measured(team, layouts, length, options["rounds"], result["checks"])
            write(result, config)
    names = ("hardware", "presets", "members", "lengths")
    for hardware, preset, devices, length in itertools.product(*(options[name] for name in names)):
        say(f"planned: {preset}, {length:,} tokens on {devices} × {hardware}")
        result["rows"] += planned(hardware, preset, devices, length, layouts)
        write(result, config)
    say(table(result["rows"]))
    say(str(path(config)))


def measured(
    team: Team, layouts: list[Layout], length: int, rounds: int, checks: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Rows of one text on this machine, and what the plan says of them."""
    cases = [blocks.Case(layout, causal(), MEMBERS, length) for layout in layouts]
    paths = blocks.measure(team, cases, rounds, checks)
    seconds = {found.case.layout: found.both for found in paths}
    yield from _rows({"preset": NAME, "length": length, "devices": MEMBERS}, seconds, measured=True)
    choices = plan(MEMBERS, length, hardware="cpu", model=LAYER, layouts=layouts).choices
    seconds = {choice.layout: choice.attention_seconds for choice in choices}
    yield from _rows({"preset": NAME, "length": length, "devices": MEMBERS}, seconds, measured=False)


def planned(hardware: str, preset: str, devices: int, length: int, layouts: list[Layout]) -> Iterator[dict[str, Any]]:
    """Rows of one text on a machine that is not here."""
    found = plan(devices, length, hardware=hardware, model=preset, layouts=layouts)
    for choice in found.choices:
        yield {
            **{"preset": preset, "length": length, "devices": devices, "hardware": hardware},
            **{"layout": repr(choice.layout), "tokens_per_second": choice.tokens_per_second},
            **{"over_contiguous": found.baseline.step_seconds / choice.step_seconds, "measured": False},
            **{"fits": found.fits(choice), "mfu": choice.mfu},
        }


def _rows(ring: dict[str, Any], seconds: dict[Layout, float], measured: bool) -> Iterator[dict[str, Any]]:
    for layout, taken in seconds.items():
        yield {
            **{**ring, "hardware": "cpu", "layout": repr(layout), "tokens_per_second": ring["length"] / taken},
            **{"over_contiguous": seconds[contiguous()] / taken, "measured": measured},
        }


def table(rows: list[dict[str, Any]]) -> rich.table.Table:
    shown = rich.table.Table(
        *("", "preset", "hardware", "devices", "tokens", "layout", "tokens/s", "× contiguous", "memory")
    )
    for row in rows:
        fits = {None: "", True: "fits", False: "too small"}[row.get("fits")]
        shown.add_row(
            *("measured" if row["measured"] else "planned", row["preset"], row["hardware"], str(row["devices"])),
            *(f"{row['length']:,}", row["layout"], f"{row['tokens_per_second']:,.0f}"),
            *(f"{row['over_contiguous']:.2f}", fits),
        )
    return shown

"""The suites `layouts`, `tiles`, `masks` and `scale`: rings of many devices by their critical path (`blocks.py`).

layouts   contiguous, striped and zigzag over lengths and devices; for two devices also the wall-clock time of two
          processes
tiles     side length of the kernel's tiles; `tiles` × tile² / `pairs` is the computed work over the necessary work
masks     windows, packed documents, prefixes; `imbalance` is the critical path over the time of the mean device
scale     long sequences and large models: attention measured on CPU cores, with the plan for the same (hardware `cpu`)
          as a check of the planner; whole training steps planned for other hardware
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import striped_attention as sa
from striped_attention.core.layout import Layout
from striped_attention.models.config import PRESETS
from striped_attention.options import parse_layouts, parse_mask
from striped_attention.planning.work import count_tiles
from striped_bench.bench import blocks, problem
from striped_bench.bench.contestants import DEVICES, Ours
from striped_bench.bench.run import Options, Progress, Record, Row, interleaved, keep, paired_ratio, tabulate
from striped_bench.bench.workers import Team, check_pinned, pick_cores

# One layer with the attention that `scale` measures. The other sizes are needed for a plan, but not used.
CPU = problem.CPU
LAYER = dataclasses.replace(PRESETS["debug"], layers=1, dim=CPU.heads * CPU.dim, heads=CPU.heads, kv_heads=CPU.kv_heads)
MEMBERS = 8  # devices of the rings that `scale` measures
WALL = (
    "Wall-clock: two processes, each pinned to a core, connected by jax.distributed; a run lasts until the slower one "
    "is done. Medians of interleaved rounds; over_contiguous is the median of the ratios per round."
)
RING = ("devices", "length", "layout")


def layouts(options: Options, result: Record) -> Progress:
    chosen, rounds = with_contiguous(options), options["rounds"]
    result["configuration"] |= {**CPU.configuration(), "mask": "causal"}
    result |= {"checks": [], "wall": {"devices": DEVICES, "how": WALL, "rows": []}}
    result["critical_path"] = {"how": blocks.HOW, "rows": []}
    clock, path = result["wall"]["rows"], result["critical_path"]["rows"]
    yield from keep(clock, wall(chosen, options["lengths"], rounds, result["checks"]))
    with blocks.core() as team:
        for devices, length in itertools.product(options["members"], options["lengths"]):
            cases = [blocks.Case(layout, sa.causal(), devices, length) for layout in chosen]
            paths = blocks.measure(team, cases, rounds, result["checks"])
            for found in paths:
                gains = {"forward": paths[0].forward / found.forward, "both": paths[0].both / found.both}
                row = {**_row(found), "over_contiguous": gains, "seconds": found.blocks.tolist()}
                yield from keep(path, [row])
    timed = [{"measured_by": "wall clock", "devices": DEVICES, **row} for row in clock]
    timed += [{"measured_by": "critical path", **row} for row in path]
    yield tabulate(timed, "measured_by", *RING, "forward", "both", "over_contiguous", "bound")


class AllLayouts:
    """This library with every layout, in one of the two processes of the wall-clock runs."""

    def __init__(self, layouts: list[Layout], **place: Any) -> None:
        self.layouts = {layout: Ours(layout=layout, **place) for layout in layouts}

    def prepare(self, length: int) -> None:
        check_pinned()
        for layout in self.layouts.values():
            layout.prepare(length)

    def ask(self, layout: Layout, method: str, *arguments: Any) -> Any:
        return getattr(self.layouts[layout], method)(*arguments)


def wall(layouts: list[Layout], lengths: Iterable[int], rounds: int, checks: list[Row]) -> Iterator[Row]:
    """Check and time every length and layout on two processes; yield a row for each."""
    with Team(AllLayouts, [{core} for core in pick_cores(DEVICES)], layouts=layouts) as team:
        for length in lengths:
            team.ask("prepare", length)
            truth = problem.oracle(problem.make_inputs(length))
            for layout in layouts:
                answer = problem.join(team.ask("ask", layout, "check"))
                verdict = problem.check(answer, truth, f"{layout!r} on two processes")
                checks.append({"layout": repr(layout), "devices": DEVICES, "processes": DEVICES, **verdict})
            ways = list(itertools.product(layouts, ["run"], problem.KINDS))
            found = interleaved(ways, rounds, lambda way: max(team.ask("ask", *way)))
            for layout in layouts:
                samples = {kind: found[layout, "run", kind] for kind in problem.KINDS}
                gains = {kind: paired_ratio(found[layouts[0], "run", kind], own) for kind, own in samples.items()}
                row = {"length": length, "layout": repr(layout)}
                row |= {kind: statistics.median(taken) for kind, taken in samples.items()}
                bound = blocks.Case(layout, sa.causal(), DEVICES, length).bound()
                yield {**row, "over_contiguous": gains, "bound": bound, "samples": samples}


def _row(found: blocks.Path) -> Row:
    """Fields that the rows of all suites share."""
    ring = {"devices": found.case.devices, "length": found.case.length, "layout": repr(found.case.layout)}
    return {**ring, "forward": found.forward, "both": found.both, "bound": found.case.bound()}


def tiles(options: Options, result: Record) -> Progress:
    def more(team: Team, index: int, found: blocks.Path) -> Row:
        case, tile = found.case, (found.case.tile or 0,) * 2
        counts = count_tiles(case.layout, case.mask, case.length, case.devices, tile)
        work = {"tiles": int(counts.sum()), "pairs": int(case.pairs().sum())}
        return {"tile": case.tile, **work, "temporary_bytes": team.ask("ask", index, "temporary_bytes")[0]}

    yield from _sweep(options, result, options["tiles"], more)
    names = ("both", "over_contiguous", "temporary_bytes", "tiles", "pairs")
    yield tabulate(result["rows"], "mask", "tile", *RING, *names)


def masks(options: Options, result: Record) -> Progress:
    def more(team: Team, index: int, found: blocks.Path) -> Row:
        return {"imbalance": found.both * found.case.devices / float(found.blocks.sum())}

    yield from _sweep(options, result, [None], more)
    yield tabulate(result["rows"], "mask", *RING, "both", "imbalance", "over_contiguous", "bound")


def _sweep(options: Options, result: Record, tiles: Iterable[int | None], more: Callable[..., Row]) -> Progress:
    """Measure every mask, ring and tile; `more` returns further fields of a row."""
    made = {(m, n): parse_mask(m, n) for m, n in itertools.product(options["masks"], options["lengths"])}
    platform, shape = options["platform"], problem.SHAPES[options["platform"]]
    result["configuration"] |= shape.configuration()
    result |= {"how": blocks.HOW, "checks": [], "rows": []}
    with blocks.core(platform) as team:
        result["hardware"] |= team.ask("gpu")[0]
        rings = itertools.product(options["masks"], options["members"], options["lengths"])
        for (mask, devices, length), tile in itertools.product(rings, tiles):
            case = functools.partial(blocks.Case, mask=made[mask, length], devices=devices, length=length, shape=shape)
            cases = [case(layout, tile=tile) for layout in with_contiguous(options)]
            paths = blocks.measure(team, cases, options["rounds"], result["checks"])
            for index, found in enumerate(paths):
                row = {"platform": platform, "mask": mask, **_row(found), **more(team, index, found)}
                yield from keep(result["rows"], [{**row, "over_contiguous": paths[0].both / found.both}])


def with_contiguous(options: Options) -> list[Layout]:
    """Return the layouts of a suite, starting with contiguous, the baseline."""
    return list(dict.fromkeys([sa.contiguous(), *parse_layouts(options["layouts"])]))


def scale(options: Options, result: Record) -> Progress:
    chosen = with_contiguous(options)
    result["configuration"]["measured_members"] = MEMBERS
    result |= {"how": blocks.HOW, "checks": [], "rows": []}
    with blocks.core() as team:
        for length in options["measured"]:
            cases = [blocks.Case(layout, sa.causal(), MEMBERS, length) for layout in chosen]
            paths = blocks.measure(team, cases, options["rounds"], result["checks"])
            choices = sa.plan(MEMBERS, length, hardware="cpu", model=LAYER, layouts=chosen).choices
            measured = {found.case.layout: found.both for found in paths}
            planned = {choice.layout: choice.attention_seconds for choice in choices}
            yield from keep(result["rows"], _attention(length, measured, measured=True))
            yield from keep(result["rows"], _attention(length, planned, measured=False))
    sizes = itertools.product(options["members"], options["lengths"])
    for hardware, preset, (devices, length) in itertools.product(options["hardware"], options["presets"], sizes):
        yield from keep(result["rows"], _steps(hardware, preset, devices, length, chosen))
    names = ("tokens_per_second", "over_contiguous", "fits")
    yield tabulate(result["rows"], "measured", "preset", "hardware", *RING, *names)


def _attention(length: int, seconds: dict[Layout, float], measured: bool) -> Iterator[Row]:
    """Yield rows for the attention of one layer on CPUs."""
    ring = {"preset": f"attention, {CPU.heads} heads × {CPU.dim}", "length": length}
    for layout, taken in seconds.items():
        row = {**ring, "devices": MEMBERS, "hardware": "cpu", "layout": repr(layout), "measured": measured}
        yield {**row, "tokens_per_second": length / taken, "over_contiguous": seconds[sa.contiguous()] / taken}


def _steps(hardware: str, preset: str, devices: int, length: int, layouts: list[Layout]) -> Iterator[Row]:
    """Yield rows for planned training steps on other hardware."""
    found = sa.plan(devices, length, hardware=hardware, model=preset, layouts=layouts)
    ring = {"preset": preset, "length": length, "devices": devices, "hardware": hardware}
    for choice in found.choices:
        gain = found.baseline.step_seconds / choice.step_seconds
        row = {**ring, "layout": repr(choice.layout), "measured": False, "over_contiguous": gain, "mfu": choice.mfu}
        yield {**row, "tokens_per_second": choice.tokens_per_second, "fits": found.fits(choice)}

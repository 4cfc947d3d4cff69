"""Compiled: training steps that `striped compile` compiled for TPU pods and other machines. None of them was run."""

import itertools
from collections.abc import Sequence

from striped_bench.report.bars import stacks
from striped_bench.report.curves import Point, curves, panels
from striped_bench.report.read import Document, of
from striped_bench.report.section import Finding, Row, Table, some
from striped_bench.report.text import span, tokens, words

HOP = "collective-permute"
KINDS = {HOP: "hops", "all-gather": "all-gathers", "all-to-all": "all-to-alls", "reduce-scatter": "reduce-scatters"}
# Transfers of these kinds that overlap with attention, and all that do not.
COLOURS = {**dict(zip(KINDS.values(), ("blue", "green", "sky", "pink"), strict=True)), "exposed": "orange"}


def _programs(documents: Sequence[Document]) -> list[Row]:
    """Return every program that was compiled, with what it was compiled for; of equal programs the newest counts."""
    found = {}
    for document in of(documents, "compile"):
        content, options = document.content, document.content["configuration"]
        what = {
            **{"pod": options["topology"], "machine": f"{content['devices']} × {content['device']}"},
            **{"preset": options["preset"], "remat": content.get("remat", options["remat"])},
            **{"strategy": content.get("strategy", "ring"), "options": content.get("libtpu_init_args")},
        }
        for program in content["tried"]:
            found[*what.values(), program["length"]] = {**program, **what, "document": document}
    return some(found.values())


def _sources(programs: Sequence[Row]) -> list[Document]:
    return list({str(one["document"].path): one["document"] for one in programs}.values())


def _overlapped(program: Row, kind: str | None = None) -> tuple[int, int]:
    """Count the transfers that overlap with attention, and all transfers, of a kind or of all kinds.

    Results from before `striped compile` knew several strategies hold hops only, without a kind.
    """
    sent = [one for one in program["transfers"] if kind in (None, one.get("kind", HOP))]
    return sum(one["hidden"] for one in sent), len(sent)


def memory(documents: Sequence[Document]) -> Finding:
    """Peak memory per device over sequence length, by model, of steps with the strategy ring."""
    programs = some(one for one in _programs(documents) if one["strategy"] == "ring" and one["memory"] is not None)
    remats = {(one["preset"], one["remat"]) for one in programs}
    several = {preset for preset, _ in remats if len([pair for pair in remats if pair[0] == preset]) > 1}
    name = lambda one: one["preset"] + (f", remat {one['remat']}" if one["preset"] in several else "")  # noqa: E731
    programs.sort(key=lambda one: (one["machine"], name(one), one["length"]))
    points: list[Point] = [(one["machine"], name(one), one["length"], one["memory"] / 1e9) for one in programs]
    limits = {one["machine"]: round(one["available"] / 1e9, 1) for one in programs if one["available"]}
    shown = [panel._replace(bound_name="limit in GB") for panel in panels(points, limits)]
    shown = [panel for panel in shown if sum(map(len, panel.lines.values())) > 1] or shown
    lines = [list(group) for _, group in itertools.groupby(programs, lambda one: (one["machine"], name(one)))]
    table = Table(_MEMORY, tuple(_longest(line, name(line[0])) for line in lines if any(one["fits"] for one in line)))
    finding = _most([one for one in programs if one["machine"] in {panel.title for panel in shown}])
    names = "sequence length (tokens)", "GB per device"
    draw = lambda: curves(shown, *names, x_format=tokens, log_y=True)  # noqa: E731
    return Finding({"finding": finding}, _sources(programs), draw, table)


_MEMORY = ("devices", "model", "longest tried that fits", "peak memory", "all transfers overlap up to")


def _longest(line: Sequence[Row], name: str) -> tuple[str, ...]:
    """Format a row of the table: the longest sequence of a model on a machine."""
    fits = [one for one in line if one["fits"]]
    best = max(fits, key=lambda one: one["length"])
    hidden = [one["length"] for one in fits if len(set(_overlapped(one))) == 1]
    return best["machine"], name, f"{best['length']:,}", _size(best), f"{max(hidden):,}" if hidden else "not known"


def _most(programs: Sequence[Row]) -> str:
    """State the longest sequence that fits on each machine."""
    best: dict[str, Row] = {}
    for one in programs:
        if one["fits"]:
            best[one["machine"]] = max(best.get(one["machine"], one), one, key=lambda one: one["length"])
    if not best:
        return f"{programs[0]['length']:,} tokens of {programs[0]['preset']} do not fit on {programs[0]['machine']}"
    return words([f"{one['length']:,} tokens of {one['preset']} fit on {machine}" for machine, one in best.items()])


def overlap(documents: Sequence[Document]) -> Finding:
    """Share of attention's transfers that overlap with it, by strategy: the model and length with most programs."""
    programs = some(one for one in _programs(documents) if one["fits"] and one["transfers"])
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for one in programs:
        groups.setdefault((one["preset"], one["length"], one["remat"]), []).append(one)
    (preset, length, _), chosen = max(groups.items(), key=lambda group: len(group[1]))
    chosen.sort(key=lambda one: (one["pod"], -_share(one)))
    bars = [(f"{one['pod']}, {_strategy(one)}", _parts(one), f"{_size(one)}, {_of(one)}") for one in chosen]
    kinds = {kind: name for kind, name in KINDS.items() if any(_overlapped(one, kind)[1] for one in chosen)}
    cells = tuple((one["pod"], _strategy(one), _size(one), *(_of(one, kind) for kind in kinds)) for one in chosen)
    table = Table(("pod", "strategy", "peak memory", *kinds.values()), cells)
    numbers = {"finding": _hiding(chosen), "preset": preset, "length": length}
    return Finding(numbers, _sources(chosen), lambda: stacks(bars, COLOURS, "% of attention's transfers"), table)


def _share(program: Row) -> float:
    hidden, sent = _overlapped(program)
    return 100 * hidden / sent


def _of(program: Row, kind: str | None = None) -> str:
    hidden, sent = _overlapped(program, kind)
    return f"{hidden} of {sent}" if sent else "none"


def _strategy(program: Row) -> str:
    return program["strategy"] + (", own options" if program["options"] else "")


def _size(program: Row) -> str:
    return f"{program['memory'] / 1e9:.1f} GB"


def _parts(program: Row) -> dict[str, float]:
    """Return the percentages of transfers that overlap, by kind, and of those that do not."""
    sent = len(program["transfers"])
    parts = {name: 100 * _overlapped(program, kind)[0] / sent for kind, name in KINDS.items()}
    return {**{name: part for name, part in parts.items() if part}, "exposed": 100 - _share(program)}


def _hiding(programs: Sequence[Row]) -> str:
    """State which strategies overlap all of their transfers, and how much the others do."""
    shares: dict[str, list[float]] = {}
    for one in programs:
        shares.setdefault(one["strategy"], []).append(_share(one))
    best = [name for name, found in shares.items() if min(found) == 100]
    others = [share for name, found in shares.items() if name not in best for share in found]
    if not best:
        return f"with {words(list(shares))}, {span(others, '.0f')} % of the transfers overlap with attention"
    rest = f"; with other strategies, {span(others, '.0f')} % do" if others else ""
    return f"with {words(best)}, all transfers overlap with attention{rest}"

"""Limits: what a device must hold, how wrong the answers are, and how long other libraries take."""

import functools
import re
from collections.abc import Iterable, Sequence

from striped_attention.report import figures
from striped_attention.report.figures import Line, Number, Panel
from striped_attention.report.read import Document, of
from striped_attention.report.section import Section, is_striped, newest, plain, span, tokens
from striped_attention.report.speed import STEP

_PRINTED = re.compile(r"(\d+) members, (\S+): error of a ring \(of one GPU\): (.*)")
_ERROR = re.compile(r"\w+ (\S+) \((\S+)\)")
_FAMILIES = {"ours": "striped_attention", "plain-jax": "plain JAX", "torch-sdpa": "torch, one device"}
Row = tuple[str, Number, Number | None]


def memory(documents: Sequence[Document]) -> Section | None:
    """Bytes of a device over the length of the text."""
    found: dict[str, dict[str, Line]] = {}

    def add(panel: str, preset: str, devices: int, length: int, size: int) -> None:
        name = f"{preset} on {devices}"
        found.setdefault(panel, {}).setdefault(name, []).append((length, size / 2**30))

    for document in (compiled := of(documents, "train_memory")):
        options = document.content["configuration"]
        preset = (options.get("model") or options.get("options") or {}).get("preset", "model")
        for row in document.rows("bytes_per_device"):
            add(f"default chunks, {document.hardware}", preset, row["devices"], row["length"], row["together"])
    steps, sources = newest(of(documents, "step"), "summary", STEP)
    for row in steps:
        if row["fits"] and is_striped(row["layout"]):
            add("the measured steps, --chunk 8192", row["preset"], row["members"], row["length"], row["needed_bytes"])
    if not found:
        return None
    return Section(
        name="memory",
        title=next(filter(None, map(_less_memory, compiled)), "What each device must hold, by the length of the text"),
        caption=(
            "What a training step needs on each device, weights, optimizer and activations together, as the compiler "
            "states it. Lines are models (debug is a tiny one) on so many devices. Both axes are logarithmic. The "
            "share of the text that a device holds counts: with twice the devices twice the text fits."
        ),
        sources=(*compiled, *sources),
        draw=functools.partial(
            figures.curves,
            [Panel(name, lines) for name, lines in found.items()],
            "tokens of the text",
            "GiB on each device",
            x_format=tokens,
            log_y=True,
        ),
    )


def _less_memory(document: Document) -> str | None:
    """What more devices save on the longest text, if a document has it on several numbers of them."""
    rows = document.rows("bytes_per_device")
    longest = max((row["length"] for row in rows), default=0)
    same = sorted((row for row in rows if row["length"] == longest), key=lambda row: row["devices"])
    if len({row["devices"] for row in same}) < 2:
        return None
    few, many = same[0], same[-1]
    alone = "one alone" if few["devices"] == 1 else f"each of {few['devices']}"
    part = 100 * many["together"] / few["together"]
    return (
        f"With {longest:,} tokens each of {many['devices']} devices needs {part:.0f} % of the memory that {alone} would"
    )


def accuracy(documents: Sequence[Document]) -> Section | None:
    """The largest errors that the checks of all benchmarks have seen."""
    makers = {
        "train_control": _losses,
        "cpu_balance": _float32,
        "gpu": _bfloat16,
        "tests": _against_one_gpu,
        "positions": _positions,
    }
    rows: dict[str, Row] = {}
    sources = []
    for benchmark, make in makers.items():
        for document in of(documents, benchmark):
            made = list(make(document))
            sources += [document] if made else []
            for row in made:
                rows[row[0]] = max(row, rows.get(row[0], row), key=_badness)
    if not rows:
        return None
    exact = [value for label, value, _ in rows.values() if "attention" in label and "float32" in label]
    title = f"In float32 attention over devices is exact to {max(exact):.1e}, whatever the layout" if exact else ""
    return Section(
        name="accuracy",
        title=title or f"The largest error of any check is {max(value for _, value, _ in rows.values()):.0e}",
        caption=(
            "Attention is spread over devices, not approximated: what is left is rounding. Errors are relative, of "
            "outputs and gradients, against dense attention in float64; of training, how far losses are from those "
            "of one device. bfloat16 has 8 bits of precision, so errors near 0.004 are rounding. A bar marks what "
            "the check allows, where the file says it."
        ),
        sources=tuple(sources),
        draw=functools.partial(figures.dots, list(rows.values()), "relative error (logarithmic)"),
    )


def _badness(row: Row) -> float:
    """How near to its limit, where there is one."""
    return row[1] if row[2] is None else row[1] / row[2]


def _losses(document: Document) -> Iterable[Row]:
    for row in document.rows("runs"):
        yield f"losses of a training run, float32, {plain(row['layout'])}", row["largest_difference"], None


def _float32(document: Document) -> Iterable[Row]:
    """Short texts are checked as a whole, of long ones some rows, and these less strictly."""
    for row in document.rows("checks"):
        if row["errors"]:
            what = "attention" if row.get("check", "whole") == "whole" else "attention on long texts"
            yield f"{what}, float32, {plain(row['layout'])}", max(row["errors"].values()), row["tolerance"]


def _bfloat16(document: Document) -> Iterable[Row]:
    for row in document.rows("checks"):
        yield f"attention, bfloat16 on GPU, {plain(row['layout'])}", row["worst"], None


def _against_one_gpu(document: Document) -> Iterable[Row]:
    """What the tests printed: the errors of a ring and, in brackets, of one GPU, of which a ring may have twice."""
    for test in document.rows("tests"):
        for found in filter(None, map(_PRINTED.match, test["printed"])):
            errors = [(float(ring), float(one)) for ring, one in _ERROR.findall(found[3])]
            ring, one = max(errors, key=lambda pair: pair[0] / pair[1])
            yield f"bfloat16, limit: twice one GPU's, {plain(found[2])}", ring, 2 * one


def _positions(document: Document) -> Iterable[Row]:
    for row in document.rows("rows"):
        yield f"positions: {row['positions']}, float32, {plain(row['layout'])}", row["error"], None


def peers(documents: Sequence[Document]) -> Section | None:
    """Seconds of other libraries on the same task."""
    found = of(documents, "cpu_peers", "peers")[-1:]
    lines: dict[str, dict[float, float]] = {}
    for row in found[0].rows("contestants") if found else []:
        name = _FAMILIES.get(row["family"], row["family"])
        name += "" if row["status"] == "right" else " (wrong)"
        for length, times in row.get("lengths", {}).items():
            if (seconds := times.get("both", {}).get("median_seconds")) is not None:
                best = lines.setdefault(name, {})
                best[int(length)] = min(seconds, best.get(int(length), seconds))
    if not lines:
        return None
    gains = [row["both"]["times_ours"] for row in found[0].content.get("fastest_jax_peer", {}).values()]
    title = "How long other libraries take for the same attention on a CPU"
    if gains:
        title = f"The fastest other JAX library takes {span(gains, '.1f')} times as long on a CPU"
    return Section(
        name="peers",
        title=title,
        caption=(
            "Causal attention forward and backward over two devices (torch: one device, two threads), the best way "
            "to run each library. Wrong: its gradients are, as shipped. Both axes are logarithmic; lower is faster."
        ),
        sources=tuple(found),
        draw=functools.partial(
            figures.curves,
            [Panel("8 heads × 64, float32", {name: list(points.items()) for name, points in lines.items()})],
            "tokens of the text",
            "seconds",
            x_format=tokens,
            log_y=True,
        ),
    )

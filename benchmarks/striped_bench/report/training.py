"""Training: `striped train` compared with a plain PyTorch trainer, from the suite `trainers`."""

from collections.abc import Sequence
from typing import Any

from striped_bench.report.bars import groups
from striped_bench.report.read import Document, of
from striped_bench.report.section import Finding, Row, Table, some
from striped_bench.report.text import span, tokens

TEXTS = {"whole": "whole sequences", "documents": "packed documents"}
COLOURS = {"striped": "blue", "torch": "orange"}
HEAD = (
    *("model", "tokens", "sequences", "trainer", "tokens/s", "of torch's", "MFU", "peak memory", "losses differ by"),
    *("hardware", "versions"),
)


def trainers(documents: Sequence[Document]) -> Finding:
    """Tokens per second of each trainer; of repeated cases the newest counts."""
    own = of(documents, "trainers")
    found: dict[Any, tuple[Row, Document]] = {}
    for document in own:
        for row in document.rows("trainers"):
            case = tuple(row[name] for name in ("preset", "length", "text", "trainer"))
            found[document.hardware, *case] = (row, document)
    rows = sorted(some(found.values()), key=lambda one: _case(*one))
    bars: dict[str, dict[str, float]] = {}
    several = len({document.hardware for _, document in rows}) > 1
    for row, document in rows:
        where = f", {document.hardware}" if several else ""
        group = bars.setdefault(f"{row['preset']}, {tokens(row['length'])}{where} ({TEXTS[row['text']]})", {})
        if row["fits"]:
            group[row["trainer"]] = row["tokens_per_second"]
    some(rate for group in bars.values() for rate in group)
    sources = list({str(document.path): document for _, document in rows}.values())
    draw = lambda: groups(bars, {}, "tokens per second", COLOURS.__getitem__, form=",.0f")  # noqa: E731
    table = Table(HEAD, tuple(_cells(row, document) for row, document in rows))
    return Finding({"finding": _finding([row for row, _ in rows])}, sources, draw, table)


def _case(row: Row, document: Document) -> tuple[Any, ...]:
    """Sort key of rows: whole sequences before documents, striped train before PyTorch."""
    return document.hardware, row["preset"], row["length"], list(TEXTS).index(row["text"]), row["trainer"]


def _finding(rows: Sequence[Row]) -> str:
    """State the speed relative to PyTorch by kind of sequence, or the absolute speed if there is no comparison."""
    ours = [row for row in rows if row["trainer"] == "striped"]
    parts = []
    for text, name in TEXTS.items():
        times = [row["over_torch"] for row in ours if row["text"] == text and row.get("over_torch") is not None]
        if times:
            parts.append(f"{span(times)} times that of plain PyTorch on {name}")
    if parts:
        return f"The speed of striped train with its defaults is {' and '.join(parts)}"
    rates = [row["tokens_per_second"] for row in ours if row["fits"]]
    return f"striped train with its defaults trains on {span(rates, ',.0f')} tokens per second" if rates else "Trainers"


def _cells(row: Row, document: Document) -> tuple[str, ...]:
    """Format a row of the table; values that were not measured stay blank."""
    say = lambda name, form: "" if row.get(name) is None else format(row[name], form)  # noqa: E731
    versions = document.content["versions"]
    package = "torch" if row["trainer"] == "torch" else "jax"
    memory = "" if row.get("memory") is None else f"{row['memory'] / 1e9:.1f} GB"
    return (
        *(row["preset"], f"{row['length']:,}", TEXTS[row["text"]]),
        row["trainer"] + (", recomputing every layer" if row.get("recompute") else ""),
        say("tokens_per_second", ",.0f") if row["fits"] else "does not fit",
        *(say("over_torch", ".2f"), say("mfu", ".1%"), memory, say("loss_difference", ".1e")),
        *(document.hardware, f"{package} {versions.get(package) or 'unknown'}"),
    )

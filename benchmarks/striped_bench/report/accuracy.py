"""Accuracy: the largest errors found by the checks of all benchmarks."""

import re
from collections.abc import Callable, Iterable, Sequence

from striped_bench.report.bars import dots
from striped_bench.report.curves import Number
from striped_bench.report.read import Document, of
from striped_bench.report.section import Finding, some
from striped_bench.report.text import plain

_PRINTED = re.compile(r"(\d+) members, (\S+): error of a ring \(of one GPU\): (.*)")
_ERROR = re.compile(r"\w+ (\S+) \((\S+)\)")
Row = tuple[str, Number, Number | None]  # what was checked, the error, and its limit


def accuracy(documents: Sequence[Document]) -> Finding:
    rows: dict[str, Row] = {}
    sources = []
    for benchmark, make in _MAKERS.items():
        for document in of(documents, benchmark):
            made = list(make(document))
            sources += [document] if made else []
            for row in made:
                rows[row[0]] = max(
                    row, rows.get(row[0], row), key=lambda row: row[1] / (row[2] or 1)
                )  # closest to its limit
    shown = some(rows.values())
    largest, checked = max(value for _, value, _ in shown), "any check"
    finding = f"The largest error of any check is {largest:.0e}"
    if exact := [value for label, value, _ in shown if "attention" in label and "float32" in label]:
        largest, checked = max(exact), "distributed attention in float32, with every layout"
        finding = f"In float32, distributed attention is exact to {largest:.1e} with every layout"
    numbers = {"finding": finding, "largest": largest, "checked": checked}
    return Finding(numbers, sources, lambda: dots(shown, "relative error (logarithmic)"))


def _rows(where: str, what: str, error: str) -> Callable[[Document], Iterable[Row]]:
    """Rows with a layout and one error, without a limit."""
    return lambda found: [(what.format(**row) + plain(row["layout"]), row[error], None) for row in found.rows(where)]


def _float32(document: Document) -> Iterable[Row]:
    """Short sequences are checked in full; of long ones some rows are checked, with a larger tolerance."""
    for row in document.rows("checks"):
        if row["errors"]:
            what = "attention" if row.get("check", "whole") == "whole" else "attention on long sequences"
            yield f"{what}, float32, {plain(row['layout'])}", max(row["errors"].values()), row["tolerance"]


def _against_one_gpu(document: Document) -> Iterable[Row]:
    """Errors printed by the tests: of a ring and, in brackets, of one GPU. The limit for a ring is twice the latter."""
    for test in document.rows("tests"):
        for found in filter(None, map(_PRINTED.match, test["printed"])):
            errors = [(float(ring), float(one)) for ring, one in _ERROR.findall(found[3])]
            ring, one = max(errors, key=lambda pair: pair[0] / pair[1])
            yield f"bfloat16, limit: twice one GPU's, {plain(found[2])}", ring, 2 * one


# Functions that extract the rows from each benchmark's results. The suite `positions` was replaced by
# tests/test_positions.py, but its recorded results are still drawn.
_MAKERS = {
    "train_control": _rows("runs", "losses of a training run, float32, ", "largest_difference"),
    "cpu_balance": _float32,
    "gpu": _rows("checks", "attention, bfloat16 on GPU, ", "worst"),
    "tests": _against_one_gpu,
    "positions": _rows("rows", "positions: {positions}, float32, ", "error"),
}

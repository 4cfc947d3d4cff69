"""Write docs/results.md from the result files: the paper's three open questions, each with a figure and its numbers.

    python benchmarks/results_page.py

`make report` runs it, after `striped report --figures docs/figures` has made the figures. No number on the page is
written by hand; tests/test_report.py checks that the page is up to date.
"""

import pathlib
import textwrap
from typing import Any

from striped_bench.report.contents import Contents, gather
from striped_bench.report.cost import beside, busiest
from striped_bench.report.read import Document, of, read
from striped_bench.report.section import ATTENTION, PAPER, STEP, Section, newest, ratio
from striped_bench.report.speed import planned_scaling
from striped_bench.report.text import words

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"
LAYOUT = "striped(1)"  # the paper's


def page(documents: list[Document]) -> str:
    """The whole page, as Markdown."""
    contents = gather(documents)
    sections = {section.name: section for section in contents.sections}
    shown = ("speedup-gpu", "tiles", "steps", "kernels", "scaling")
    parts = [
        "# Results",
        "Made by `make report` from the files in `benchmarks/results`; change those, not this page. `striped report` "
        "makes one HTML page of the same figures. [Performance](performance.md) has the tables, with remarks.",
        "The Striped Attention paper ([arXiv 2311.09431](https://arxiv.org/abs/2311.09431)) reached "
        + words([f"{times}× on {where} ({length:,} tokens)" for _, length, times, where in PAPER])
        + ", end to end, over Ring Attention. It left three questions open. The GPU numbers below are of one NVIDIA "
        "H200 that does what each member of a ring would do; **transfers between GPUs are not in them**.",
        *_fused(documents, sections["speedup-gpu"]),
        *_finer(documents, sections.get("tiles")),
        *_overheads(documents, sections["steps"], sections["kernels"]),
        *_scale(documents, sections["scaling"]),
        "## The other figures",
        *(part for section in contents.sections if section.name not in shown for part in _figure(section, "### ")),
        *_missing(contents),
    ]
    return "\n\n".join(_wrapped(part) for part in parts) + "\n"


def _wrapped(part: str) -> str:
    if part.startswith(("#", "!", "|")):
        return part
    return textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False)


def _figure(section: Section, heading: str = "") -> list[str]:
    first = [heading + section.title] if heading else []
    drawn = [*first, f"![{section.title}](figures/{section.name}.svg)", section.caption]
    if section.table is not None:
        lines = [section.table.head, ["---"] * len(section.table.head), *section.table.rows]
        drawn.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    return [*drawn, f"*{section.source}*"]


def _attention(documents: list[Document]) -> list[dict[str, Any]]:
    rows, _ = newest(of(documents, "gpu"), "summary", ATTENTION)
    rows = [row for row in rows if row["layout"] == LAYOUT]
    return sorted(rows, key=lambda row: (row["members"], row["heads"], row["length"]))


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| GPUs | heads | tokens | times as fast as contiguous | bound | of the bound | of one GPU's speed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = (
            *(str(row["members"]), row["heads"], f"{row['length']:,}", f"{ratio(row):.2f}×", f"{row['bound']:.5g}×"),
            *(f"{100 * ratio(row) / row['bound']:.0f} %", f"{100 * row['of_ideal']['both']:.0f} %"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _fused(documents: list[Document], section: Section) -> list[str]:
    rows = _attention(documents)
    settings = {(members, length): f"{times}× on {where}" for members, length, times, where in PAPER}
    steps, _ = newest(of(documents, "step"), "summary", STEP)
    steps = [row for row in steps if (row["preset"], row["layout"]) == ("1b", LAYOUT)]
    parts = [
        f"{100 * ratio(row) / row['bound']:.0f} % with {row['length']:,} tokens on {row['members']}"
        for row in rows
        if (row["members"], row["length"]) in settings and row["heads"] == "16:16"
    ]
    whole = [
        f"{ratio(row):.2f}× where the paper had {settings[row['members'], row['length']]}"
        for row in steps
        if (row["members"], row["length"]) in settings
    ]
    worst = min(rows, key=ratio)
    return [
        "## 1. What do fused kernels that skip more finely reach?",
        f"With cuDNN's fused kernel, which skips hidden tiles within a block, attention reaches, of what balance can "
        f"give, {words(parts)} GPUs. Whole steps of a 1b model come to {words(whole)}, with the same numbers of "
        f"tokens and devices but other hardware. Least is gained with few tokens a GPU: {ratio(worst):.2f}× with "
        f"{worst['length']:,} tokens on {worst['members']}.",
        *_figure(section),
        _table(rows),
        "More than 100 % of one GPU's speed means that one GPU with the whole text is itself slower than with a part "
        "of it.",
    ]


def _finer(documents: list[Document], section: Section | None) -> list[str]:
    unknown = (
        "**Unknown:** how much of it is left with a wire between the GPUs; what a fused kernel for packed documents "
        "and wide stripes would reach, for cuDNN's cannot do them and the xla kernel is far from a GPU's speed; and "
        "TPUs."
    )
    if section is None:
        return [unknown]
    rows, _ = newest(of(documents, "tiles"), "rows", ("platform", "mask", "devices", "length", "tile", "layout"))
    rows = [row for row in rows if (row["platform"], row["mask"], row["layout"]) == ("cpu", "causal", LAYOUT)]
    fine, coarse = min(rows, key=lambda row: row["tile"]), max(rows, key=lambda row: row["tile"])

    def work(row: dict[str, Any]) -> str:
        side = min(row["tile"], row["length"] // row["devices"])
        times = row["tiles"] * side**2 / row["pairs"]
        return f"{times:.2f} times the work that the mask needs with tiles of {row['tile']} ({ratio(row):.2f}×)"

    return [
        f"How finely to skip is a matter of the tile. Stripes of one token have the mask's edge in every block, so a "
        f"kernel does {work(coarse)} and {work(fine)}, here the kernel xla with {fine['length']:,} tokens on "
        f"{fine['devices']} devices. But small tiles cost time of their own.",
        *_figure(section),
        unknown,
    ]


def _overheads(documents: list[Document], steps: Section, kernels: Section) -> list[str]:
    rows, _ = newest(of(documents, "step"), "summary", STEP)
    striped = sorted((row for row in rows if row["layout"] == LAYOUT), key=lambda row: row["attention_share"])
    most, least = striped[0], striped[-1]
    rings, _ = busiest(documents, LAYOUT)
    costly, cheap = max(rings, key=beside), min(rings, key=beside)

    def described(row: dict[str, Any]) -> str:
        return (
            f"{100 * (1 - row['attention_share']):.0f} % of a striped step of {row['preset']} with {row['length']:,} "
            f"tokens on {row['members']} GPUs ({row['outside_attention_seconds']:.2f} s of {row['seconds']:.2f} s), "
            f"which bounds the gain to {row['step_bound']:.2f}×; {ratio(row):.2f}× is measured"
        )

    return [
        "## 2. What do the overheads outside attention cost?",
        f"The rest of the model takes {described(most)}. With long texts it vanishes: {described(least)}.",
        *_figure(steps),
        f"Within attention, merging the steps' results, copies and pauses take {100 * beside(costly):.0f} % of the "
        f"time with {costly['length'] // costly['members']:,} tokens a GPU and {100 * beside(cheap):.1f} % with "
        f"{cheap['length'] // cheap['members']:,}.",
        *_figure(kernels),
        f"**Unknown:** what gathering weights and passing keys on costs on a real network. In the measured programs "
        f"{sum(row['hidden'] for row in rows)} of {sum(row['transfers'] for row in rows)} transfers of keys, values "
        f"and their gradients are issued ahead of attention that hides them, but nothing here has waited for a wire.",
    ]


def _scale(documents: list[Document], section: Section) -> list[str]:
    rows = _attention(documents)
    longest = max(rows, key=lambda row: (row["length"], row["members"]))
    shortest = min(rows, key=lambda row: row["length"] / row["members"])
    devices, planned = planned_scaling()[-1]
    return [
        "## 3. Does it scale further?",
        f"The longest text measured has {longest['length']:,} tokens, on a ring of {longest['members']}: "
        f"{ratio(longest):.2f}× of at most {longest['bound']:.5g}× (the paper's longest had "
        f"{max(length for _, length, _, _ in PAPER):,}). With 32,768 tokens on each the planner expects "
        f"{planned:.2f}× on {devices:.0f} GPUs. What limits it is too little text for each: with "
        f"{shortest['length'] // shortest['members']:,} tokens a GPU ({shortest['length']:,} on "
        f"{shortest['members']}) {ratio(shortest):.2f}× is left of at most {shortest['bound']:.5g}×.",
        *_figure(section),
        f"**Unknown:** everything beyond {max(row['members'] for row in rows)} members is planned, not measured, and "
        f"so is every effect of a network between machines: the planner counts bytes and bandwidth, not congestion or "
        f"stragglers.",
    ]


def _missing(contents: Contents) -> list[str]:
    models = ("striped train", "striped evaluate")  # what these make is about a model, not about this library
    rows = [f"| {what} | `{command}` |" for what, command in contents.missing if not command.startswith(models)]
    if not rows:
        return []
    return ["## Not measured yet", "\n".join(["| figure | made by |", "| --- | --- |", *rows])]


if __name__ == "__main__":
    PAGE.write_text(page(read([ROOT / "benchmarks" / "results"])))
    print(PAGE.relative_to(ROOT))

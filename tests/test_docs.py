"""The documentation: examples run and print what the page says, links lead somewhere, and nothing is left out."""

import json
import re
import urllib.parse
from pathlib import Path

import pytest

from tests.test_package import AS_TESTS_COMPILE, PUBLIC, ROOT, run

PAGES = sorted(ROOT.glob("docs/**/*.md"))
HOWTO = [f"docs/howto/{path.name}" for path in sorted(ROOT.glob("docs/howto/*.md"))]
EXAMPLE = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$", re.DOTALL | re.MULTILINE)

SESSION = """
import contextlib, io
names = {{"__name__": "__main__"}}
for number, (block, wanted) in enumerate({examples!r}, 1):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, f"{name}, example {{number}}", "exec"), names)
    if wanted and printed.getvalue() != wanted:
        raise SystemExit(f"{name}, example {{number}} prints\\n{{printed.getvalue()}}instead of\\n{{wanted}}")
"""


@pytest.mark.parametrize("name", ["docs/tutorial.md", "docs/api.md", *HOWTO])
def test_the_examples_of_a_page_run_in_one_session_and_print_what_it_says(name):
    examples = EXAMPLE.findall((ROOT / name).read_text())
    assert examples
    run(SESSION.format(examples=examples, name=name), **AS_TESTS_COMPILE, JAX_PLATFORMS="cpu")


def test_every_public_name_is_in_the_reference_with_an_example():
    text = (ROOT / "docs" / "api.md").read_text()
    described = {line.rpartition(".")[2] for line in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    assert described >= PUBLIC
    examples = "".join(block for block, _ in EXAMPLE.findall(text))
    assert set(re.findall(r"\bsa\.(\w+)", examples)) >= PUBLIC


def anchors(path):
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#{1,6} (.+)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize(
    "path", [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("examples/*.md")], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_lead_to_files_and_headings(path):
    text = re.sub(r"`[^`\n]*`", "", FENCED.sub("", path.read_text()))
    for link in re.findall(r"\]\(([^()\s]+)\)", text):
        target, _, anchor = urllib.parse.unquote(link).partition("#")
        if re.match(r"https?://", target):
            continue
        there = (path.parent / target).resolve() if target else path
        assert there.is_relative_to(ROOT), link
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


def test_the_site_has_every_page():
    nav = set(re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    outside = {"index.md", "contributing.md", "changelog.md", "examples/long_context.md"}  # docs/mkdocs_hooks.py
    assert nav == {str(path.relative_to(ROOT / "docs")) for path in PAGES} | outside


def test_links_are_found_and_missing_headings_are_noticed(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A `b`: c × d\n\n```\n# not a heading\n```\n")
    assert anchors(page) == {"a-b-c--d"}


def rows_of(page, head):
    """Return the cells of the table whose first line is `head`."""
    _, _, rest = (ROOT / page).read_text().partition(head + "\n")
    assert rest, head
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]


def summaries(pattern):
    files = sorted((ROOT / "benchmarks" / "results").glob(pattern))
    return [row for file in files for row in json.loads(file.read_text())["summary"]]


def test_the_table_of_strategies_has_the_recorded_numbers():
    head = "| GPUs | heads | mask | ring | `cudnn` | `hopper` | transfers, planned |"
    measured = [row for row in summaries("gpu_strategies_*.json") if "heads" in row]
    rings = [
        row for row in summaries("gpu_attention_*.json") if row["layout"] == "zigzag()" and row["length"] == 65_536
    ]
    rows = rows_of("docs/performance.md", head)
    assert len(rows) == 5
    for gpus, heads, mask, ring, *shown, transfers in rows:
        median = re.search(r"median ([\d,]+)", mask)
        name = f"documents({median[1].replace(',', '')})" if median else mask
        of = lambda row: (str(row["members"]), row["heads"])  # noqa: E731
        found = {row["kernel"]: row for row in measured if of(row) == (gpus, heads) and row["mask"] == name}
        both = lambda row: f"{row['tflops']['both']:.0f}"  # noqa: E731
        assert shown == [both(found[kernel]) if kernel in found else "–" for kernel in ("cudnn", "hopper")]
        best = min(found.values(), key=lambda row: row["both"])
        assert transfers == f"{1e3 * best['planned_transfer_seconds']['both']:.1f} of {1e3 * best['both']:.1f} ms"
        if not median:
            assert ring in [both(row) for row in rings if of(row) == (gpus, heads)]


def test_the_table_of_steps_by_strategy_has_the_recorded_numbers():
    head = "| GPUs | strategy | step | MFU | outside attention | memory | transfers, planned |"
    measured = {(str(row["members"]), row["strategy"]): row for row in summaries("gpu_strategies_step_*.json")}
    rows = rows_of("docs/performance.md", head)
    assert len(rows) == len(measured)
    for gpus, strategy, *shown, transfers in rows:
        row = measured[gpus, strategy.partition(",")[0]]
        outside, memory = row["outside_attention_seconds"], row["needed_bytes"] / 1e9
        assert shown == [f"{row['seconds']:.2f} s", f"{100 * row['mfu']:.1f} %", f"{outside:.2f} s", f"{memory:.1f} GB"]
        assert transfers.startswith(f"{row['planned_transfer_seconds']:.2f} s")

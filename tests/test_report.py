"""The report: it reads or rejects result files, and draws every figure from small ones."""

import functools
import json
import pathlib
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
from striped_bench.report import style
from striped_bench.report.command import write_figures
from striped_bench.report.contents import gather
from striped_bench.report.curves import Panel, curves
from striped_bench.report.maps import over_ideal
from striped_bench.report.read import Document, read
from striped_bench.report.section import ATTENTION, newest

from striped_attention._version import __version__
from striped_attention.cli import main
from tests.small_results import (
    compiled,
    content,
    evaluated,
    layouts,
    masks,
    overhead,
    positions,
    scale,
    tiles,
    times,
    trainers,
)

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SMALL = {
    "speedup-cpu": (layouts, "balanced layouts are 1.50 times as fast as contiguous"),
    "tiles": (tiles, "striped(1) gains most, 1.50 times, with tiles of 64"),
    "masks": (masks, "CPUs: striped(1) gains most under every mask"),
    "masks_gpu": (functools.partial(masks, "gpu"), "GPUs: striped(1) gains most under every mask"),
    "throughput": (scale, "Planned for 1b, h200: 64k tokens run fastest on 16 devices"),
    "rates": (functools.partial(scale, measured=True), "of 64k tokens is fastest with striped(1): 160,000 tokens per"),
    "compiled-memory": (compiled, "Compiled, not run: 262,144 tokens of 1b fit on 16 × TPU v4"),
    "compiled-overlap": (compiled, "Compiled, not run: with ring, all transfers overlap with attention"),
    "accuracy": (positions, "The largest error of any check is 1e-06"),
    "positions": (evaluated, "long has a loss of 1.00 with contexts of up to 512 tokens"),
    "needles": (evaluated, "Needle in a haystack: long finds 75%"),
    "trainers": (trainers, "0.49 times that of plain PyTorch on whole sequences and 1.23 times"),
    "overhead": (overhead, "With 1,024 tokens, attention takes the largest share of a training step: 50 %"),
}


def sections(*contents, plans=False):
    """The sections of a report on these results, by name."""
    documents = [Document(pathlib.Path("small.json"), one) for one in contents]
    return {section.name: section for section in gather(documents, plans).sections}


def draw(section, width=style.WIDE):
    with style.drawing(width):
        return style.svg(section.draw(), section.name)


@pytest.mark.parametrize("name", SMALL)
def test_a_small_result_makes_a_figure_whose_title_is_the_finding(name):
    make, finding = SMALL[name]
    found = sections(make(), plans=True)
    assert finding in found[name].title
    assert "small.json" in found[name].source
    assert "commit aaaaaaa" in found[name].source
    for width in (style.WIDE, style.NARROW):
        text = draw(found[name], width)
        assert text.startswith("<svg")
        assert "<text" in text, "text must stay searchable"


def test_trainers_are_drawn_and_listed(tmp_path):
    """`striped report` shows both trainers' tokens per second, whole and packed, with hardware and versions."""
    path, output = tmp_path / "trainers.json", tmp_path / "report.html"
    path.write_text(json.dumps(trainers()))
    assert main(["report", str(path), "--output", str(output)]) == 0
    text = output.read_text()
    (rows,) = re.findall(r'<section id="trainers">.*?<tbody>(.*?)</tbody>', text, re.DOTALL)
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in rows.strip().splitlines() if "<td>" in row]
    assert [row[2:6] for row in rows] == [
        ["whole sequences", "striped", "30,123", "0.49"],
        ["whole sequences", "torch, recomputing every layer", "61,234", "1.00"],
        ["packed documents", "striped", "75,432", "1.23"],
        ["packed documents", "torch, recomputing every layer", "61,234", "1.00"],
    ]
    assert rows[0][6:] == ["45.0%", "63.3 GB", "2.0e-03", "NVIDIA H200", "jax 0.10.2"]
    assert rows[1][-1] == "torch 2.9.0"
    bars = text[text.index('<section id="trainers">') :]
    assert [f">{rate}</text>" in bars for rate in ("30,123", "75,432", "61,234")] == [True] * 3


def test_a_trainer_that_does_not_fit_is_listed_without_a_bar():
    """A trainer that does not fit has a row but no bar; of two measurements of a case the later counts."""
    old, new = trainers(), trainers(fits=False)
    old["started"] = "2025-01-01T00:00:00+00:00"
    documents = [Document(pathlib.Path(name), x) for name, x in (("old.json", old), ("new.json", new))]
    (section,) = (section for section in gather(documents).sections if section.name == "trainers")
    assert section.title == "striped train with its defaults trains on 30,123 to 75,432 tokens per second"
    assert [row[4] for row in section.table.rows] == ["30,123", "does not fit", "75,432", "does not fit"]
    assert ">61,234</text>" not in draw(section)
    assert "new.json" in section.source
    assert "old.json" not in section.source


def test_models_are_drawn_side_by_side():
    found = sections(evaluated(), evaluated("short", loss=3.0, found=0))
    assert found["positions"].title.endswith("512 tokens, against 3.00 of short")
    assert "long finds 75% and short finds 0%" in found["needles"].title
    assert ">short</text>" in draw(found["positions"])
    assert draw(found["needles"]).count(">75</text>") == 4


def test_the_validations_of_a_run_are_drawn_from_its_folder(tmp_path):
    """A run's validations are drawn from its folder; of a repeated validation the last counts."""
    folder = tmp_path / "first"
    folder.mkdir()
    run = {"started": "2026-01-01", "options": {}, "versions": {"striped_attention": __version__}, "mesh": {"data": 2}}
    (folder / "run.json").write_text(json.dumps([{**run, "device": "NVIDIA H200"}]))
    lines = [{"step": 1, "loss": 5.0}]
    for step, loss in ((0, 9.0), (0, 3.0), (10, 2.5), (20, 2.0)):
        by_position = [{"from": 0, "to": 255, "tokens": 9, "loss": loss}]
        lines.append({"step": step, "validation": {"loss": loss, "tokens": 9, "by_position": by_position}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (section,) = (section for section in gather(read([folder])).sections if section.name == "validation")
    assert section.title == "first: with contexts of up to 256 tokens the loss went from 3.00 to 2.00"
    assert "first (2 × NVIDIA H200" in section.source
    assert [name in draw(section) for name in ("step 0", "step 10", "step 20")] == [True] * 3


def test_measured_work_comes_before_counted_work():
    name, section = next(iter(sections(layouts(), plans=True).items()))
    text = draw(section)
    assert name == "work"
    assert text.index("measured, causal, 2k") < text.index("counted, causal")


def test_plans_are_drawn_only_on_request(tmp_path, capsys):
    """Own results are drawn without counted work, timelines and planned speeds, unless --plans asks for them."""
    path, output = tmp_path / "layouts.json", tmp_path / "report.html"
    path.write_text(json.dumps(layouts()))
    shown = {}
    for flags in ((), ("--plans",)):
        assert main(["report", str(path), "--output", str(output), *flags]) == 0
        shown[flags] = output.read_text()
    without, everything = shown.values()
    assert re.findall(r'<section id="([^"]+)">', without) == ["work", "speedup-cpu", "missing", "files"]
    assert "measured, causal, 2k" in without
    assert "counted, causal" not in without
    assert "striped report --plans" in without
    assert 'id="timeline"' in everything
    assert "counted, causal" in everything
    path.write_text(json.dumps(scale()))
    assert main(["report", str(path), "--output", str(output)]) == 2
    assert "--plans also draws what is planned" in capsys.readouterr().err
    assert main(["report", str(path), "--output", str(output), "--plans"]) == 0


def test_measurements_are_drawn_without_what_was_planned_beside_them():
    """The figures of the recorded results hold no plan unless asked to, and those that are measured stay."""
    documents = read([RESULTS])
    measured, everything = ({s.name: s for s in gather(documents, plans).sections} for plans in (False, True))
    assert set(everything) - set(measured) == {"timeline", "throughput"}
    for section in measured.values():
        assert not re.search("planned|counted, ", f"{section.title} {section.caption} {draw(section)}"), section.name
    assert ">planned, 32k tokens per device</text>" in draw(everything["scaling"])
    assert "was not measured" in everything["scaling"].caption
    assert everything["timeline"].title.startswith("Planned: ")


def test_compiled_programs_are_drawn_by_strategy():
    """Bars show the transfers that overlap with attention, and the table lists every kind."""
    found = sections(compiled(), compiled("gather", "all-gather", exposed=3))
    overlap, memory = found["compiled-overlap"], found["compiled-memory"]
    assert overlap.title.endswith("with ring, all transfers overlap with attention; with other strategies, 25 % do")
    assert overlap.table.head[3:] == ("hops", "all-gathers")
    assert [row[1:] for row in overlap.table.rows] == [
        ("ring", "20.0 GB", "4 of 4", "none"),
        ("gather", "20.0 GB", "none", "1 of 4"),
    ]
    assert [f">{name}</text>" in draw(overlap) for name in ("hops", "all-gathers", "exposed")] == [True] * 3
    assert memory.table.rows == (("16 × TPU v4", "1b", "262,144", "20.0 GB", "262,144"),)
    assert ">limit in GB: 33</text>" in draw(memory)
    for section in (overlap, memory):
        assert "nothing was run or timed" in section.caption
        assert "compiled for 16 × TPU v4" in section.source


def test_older_results_of_compile_hold_hops_of_a_ring():
    """Before strategies, transfers had no kind and results no strategy."""
    old = compiled()
    del old["strategy"], old["remat"], old["libtpu_init_args"]
    for transfer in old["tried"][0]["transfers"]:
        del transfer["kind"]
    assert sections(old)["compiled-overlap"].table.rows == (("v4:2x2x4", "ring", "20.0 GB", "4 of 4"),)


def entries(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


@pytest.mark.parametrize("width", [style.WIDE, style.NARROW])
def test_legends_of_recorded_results_have_at_most_six_entries(width):
    with style.drawing(width):
        for section in gather(read([RESULTS]), plans=True).sections:
            figure = section.draw()
            assert all(axes.get_legend() is None for axes in figure.axes), "legends belong to the figure"
            assert len(entries(figure)) <= 6, section.name


def test_more_than_six_lines_have_names_instead_of_a_legend():
    names = [f"line {n}" for n in range(7)]
    figure = curves([Panel("", {name: [(1, n), (2, n)] for n, name in enumerate(names)})], "x", "y")
    assert entries(figure) == []
    assert [text.get_text() for text in figure.axes[0].texts] == names


def test_small_components_share_an_entry_and_have_rows():
    """A bar shows the five largest of eight components and the sum of the others; the table lists all eight."""
    section = sections(overhead("hops", "merges", "norms", "permute", "shifts"))["overhead"]
    figure = section.draw()
    assert entries(figure) == ["attention", "feed-forward", "loss", "hops", "merges", "norms, permute and shifts"]
    assert sum(bar.get_width() for bar in figure.axes[0].patches) == pytest.approx(100)
    assert [row[1] for row in section.table.rows][-5:] == ["hops", "merges", "norms", "permute", "shifts"]


def test_numbers_in_figures_keep_their_digits():
    """Coordinates are shortened to two decimals, but not the text of a figure."""
    with style.drawing():
        text = style.svg(curves([Panel("", {"a": [(1, 1), (2, 2)]}, [(0, 1.9375)])], "x", "y"), "small")
    assert ": 1.938</text>" in text
    assert not re.search(r" [MLd]=?\"?\d+\.\d{3}", text)


def test_a_plan_is_drawn_as_it_was_written(tmp_path):
    path = tmp_path / "plan.json"
    options = ["--devices", "4", "--length", "8k", "--mask", "window", "--hardware", "h200", "--preset", "1b"]
    assert main(["plan", *options, "--output", str(path)]) == 0
    sections = {section.name: section for section in gather(read([path])).sections}
    assert "counted, window" in draw(sections["work"])
    assert "8,192 tokens (window) on 4 × h200" in sections["timeline"].caption
    assert "plan.json (counted for 4 × h200" in sections["timeline"].source


def test_the_ideal_is_the_least_work_shared_equally():
    """The ideal is not a layout's own mean: an even layout with twice the work is not ideal."""
    maps = {"uneven": np.array([[2.0, 0.0], [1.0, 1.0]]), "twice": np.full((2, 2), 2.0)}
    assert over_ideal(maps) == {"uneven": 1.5, "twice": 2.0}


def test_of_two_results_the_later_counts():
    old, new = layouts(), layouts()
    old["started"] = "2025-01-01T00:00:00+00:00"
    for row in old["critical_path"]["rows"] + old["wall"]["rows"]:
        row["over_contiguous"] = {"forward": 9.0, "both": 9.0}
    documents = [Document(pathlib.Path("old.json"), old), Document(pathlib.Path("new.json"), new)]
    section = next(s for s in gather(documents).sections if s.name == "speedup-cpu")
    assert "1.50 times" in section.title


def test_figures_are_written_the_same_each_time(tmp_path):
    contents = gather([Document(pathlib.Path("small.json"), tiles())])
    contents = contents._replace(sections=tuple(s for s in contents.sections if s.name == "tiles"))
    for folder in ("first", "second"):
        write_figures(contents, tmp_path / folder)
    first, second = (tmp_path / folder / "tiles.svg" for folder in ("first", "second"))
    assert first.read_text() == second.read_text()
    assert "prefers-color-scheme: dark" in first.read_text()
    assert "The gain depends on the" in first.read_text(), "a standalone figure includes its title"
    assert (tmp_path / "first" / "tiles.png").read_bytes().startswith(b"\x89PNG")


def test_the_results_page_is_up_to_date():
    made = runpy.run_path(str(ROOT / "benchmarks" / "results_page.py"))
    text = made["page"](read([RESULTS]))
    assert made["PAGE"].read_text() == text, "run: make report"
    for figure in re.findall(r"\]\((figures/[\w-]+\.svg)\)", text):
        assert (ROOT / "docs" / figure).exists(), figure


def test_figures_of_layouts_leave_out_other_strategies_masks_and_kernels():
    """Rows of other strategies, masks or kernels are left out; older rows lack these fields and are kept."""
    row = {"members": 8, "length": 64, "heads": "4:4", "layout": "striped(1)", "over_contiguous": times("striped(1)")}
    others = [{"strategy": "heads=8"}, {"mask": "documents(8)"}, {"kernel": "xla"}, {"over_contiguous": None}]
    rows = [row, *({**row, **other} for other in others)]
    documents = [Document(pathlib.Path("gpu.json"), content("gpu", summary=rows))]
    assert newest(documents, "summary", ATTENTION)[0] == [row]


REFUSED = {
    "no such file": (None, "cannot be read"),
    "not JSON": ("striped", "is not JSON"),
    "a list": ("[1, 2]", "is not a result of this package"),
    "of somebody else": ('{"benchmark": "mine"}', "it has no 'started'"),
    "of another version": (
        json.dumps(content("tiles", versions={"striped-attention": "9.8.7"}, rows=[])),
        "was written by striped-attention 9.8.7",
    ),
    "half a result": (json.dumps(content("gpu", summary=[])), "it has no 'members'"),
    "a row with a hole": (json.dumps(content("tiles", rows=[{"tile": 64}])), "a row of 'rows' has no 'platform'"),
    "rows that are none": (json.dumps(content("tiles", rows=[3])), "its 'rows' are not rows"),
    "nothing to draw": (json.dumps(content("a dream")), "There is nothing to draw"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nonsense_is_refused_in_one_line(case, tmp_path, capsys):
    text, message = REFUSED[case]
    path = tmp_path / "result.json"
    if text is not None:
        path.write_text(text)
    assert main(["report", str(path), "--output", str(tmp_path / "x.html")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("striped: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "x.html").exists()


def test_an_empty_folder_and_a_bad_output_are_refused(tmp_path, monkeypatch, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert main(["report", str(RESULTS), "--output", str(tmp_path)]) == 2
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    said = capsys.readouterr().err.splitlines()
    for line, message in zip(said, ("has no .json file", "must be a file", "Name the result files"), strict=True):
        assert message in line


@pytest.mark.parametrize("version", [None, __version__, f"{__version__}.dev1"])
def test_results_of_this_version_and_of_a_source_tree_are_read(version, tmp_path):
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(tiles() | {"versions": {"striped-attention": version}}))
    assert [document.benchmark for document in read([path, path])] == ["tiles"]


@pytest.fixture
def uninstall(monkeypatch):
    """Make a package look uninstalled, and unload it and striped_bench, so that they are imported anew."""

    def hide(package):
        for name in list(sys.modules):
            if name.split(".")[0] in (package, "striped_bench"):
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return hide


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("matplotlib", ["report", str(RESULTS)], "report"),
        ("jinja2", ["report", str(RESULTS)], "report"),
        ("striped_bench", ["report"], "report"),
        ("striped_bench", ["bench", "layouts"], "bench"),
        ("tyro", ["train"], "train"),
        ("tyro", [], "train"),
    ],
)
def test_a_command_without_its_package_says_in_one_line_how_to_install_it(package, command, extra, uninstall, capsys):
    uninstall(package)
    assert main(command) == 2
    said = capsys.readouterr().err
    clone = "-e . -e benchmarks" if extra != "train" else "-e '.[train]'"
    how = f"in a clone pip install {clone}, elsewhere pip install 'striped-attention[{extra}]'"
    assert said == f"striped: this command needs the package {package}: {how}\n"


def test_other_commands_do_without_the_benchmarks(uninstall):
    uninstall("striped_bench")
    assert main(["plan", "--devices", "2", "--length", "4k", "--preset", "1b"]) == 0


def test_help_imports_neither_figures_nor_suites():
    code = "import sys; from striped_attention.cli import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert "striped_bench.bench.command" in loaded
    assert "striped_bench.report.command" in loaded
    heavy = ("matplotlib", "jinja2", "optax", "torch", "striped_bench.bench.run", "striped_bench.report.curves")
    assert [name for name in heavy if name in loaded] == []

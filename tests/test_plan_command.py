"""`striped plan`: what it prints, writes and rejects."""

import io
import json

import numpy as np
import pytest
import rich.console

import striped_attention as sa
from striped_attention import cli
from striped_attention.cli import plan as plan_command
from striped_attention.cli.plan import PlanConfig
from striped_attention.core.mask import packed
from striped_attention.planning.cost import estimate
from striped_attention.strategies import choice as strategy_choice
from striped_attention.training import settle
from striped_attention.training.config import TrainConfig


def run(capsys, *arguments):
    code = cli.main(["plan", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_a_plan_names_the_best_layout_and_draws_the_imbalance(capsys):
    code, text, _ = run(capsys, "--devices", 8, "--length", "256k", "--preset", "1b", "--hardware", "h200")
    assert code == 0
    assert "262,144 tokens (causal) on 8 × h200" in text
    assert "With a ring, choose zigzag(): its attention is 1.8" in text
    assert "As good, within 2%: striped(1)." in text
    for row in ("▒       ", "▒███    ", "▒███████"):  # contiguous: device d has d blocks besides its own
        assert f"\n{row}" in text
    text = " ".join(text.split())
    assert "cudnn (measured on an H200): zigzag(), striped(1), contiguous()" in text
    assert "hopper (measured on an H200 in single steps): striped(256), striped(1024)" in text
    assert "kept for the backward pass" in text
    assert "computes 123.21 TFLOP" in text  # of which 7 × (256 Ki)² / 8 × 16 × 128 × 2 FLOP are useful


def test_nodes_of_other_sizes(capsys):
    """With nodes of 2, a ring of 4 GPUs spans nodes, and double rings and heads use the 2 GPUs of a node."""
    code, text, _ = run(capsys, "--devices", 4, "--length", "64k", "--devices-per-node", 2)
    assert code == 0
    assert "on 4 × h100, 2 per node, llama3-8b" in text
    assert "inner=2" in text
    assert "heads=2" in text
    small, usual = (sa.plan(4, 65_536, devices_per_node=n) for n in (2, None))
    assert small.setting.hardware.group == 2
    assert small.best.slow_bytes > usual.best.slow_bytes == 0
    assert small.best.workload.interconnect == small.setting.hardware.far_interconnect
    large = sa.plan(72, 72 * 8192, hardware="b200", devices_per_node=72)  # an NVLink rack
    assert large.best.workload.interconnect == large.setting.hardware.interconnect
    code, _, error = run(capsys, "--devices", 4, "--length", "64k", "--devices-per-node", 0)
    assert (code, error) == (2, "striped: devices_per_node must be a whole number of at least 1; got 0.\n")


def test_a_narrow_terminal_shows_all_of_the_plan():
    config = PlanConfig(devices=8, length="256k", preset="1b", hardware="h200")
    found = sa.plan(8, 262_144, model="1b", hardware="h200")
    with io.StringIO() as file:
        console = rich.console.Console(width=80, file=file)
        for part in plan_command.show(found, config):
            console.print(part)
        text = file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    base = found.baseline
    (row,) = (line.split() for line in text.splitlines() if line.startswith(" contiguous() "))
    assert row == [
        *("contiguous()", f"{base.imbalance:.2f}", f"{base.work:.2f}", f"{base.attention_seconds * 1e3:.2f}", "ms"),
        "1.00",
        *(f"{base.step_seconds:.2f}", "s", f"{base.tokens_per_second:,.0f}", f"{base.mfu:.1%}"),
    ]


def test_a_timeline_shows_who_waits(capsys):
    _, text, _ = run(capsys, "--devices", 2, "--length", "64k", "--preset", "1b", "--hardware", "h200")
    lines = [line for line in text.splitlines() if line.endswith(" 1") and "█" in line]
    assert lines[0].startswith("█" * 32 + " 1")  # the last device of contiguous never waits
    first = next(line for line in text.splitlines() if line.endswith(" 0") and "█" in line)
    assert 9 <= first[:32].count("█") <= 14


def test_the_json_has_all_of_it(capsys, tmp_path):
    file = tmp_path / "deep" / "plan.json"
    options = ("--devices", 4, "--length", 4096, "--mask", "documents", "--document-length", 300, "--preset", "debug")
    code, text, _ = run(capsys, *options, "--hardware", "v5p", "--layouts", "striped(32)", "--output", file)
    assert code == 0
    assert str(file) in text
    found = json.loads(file.read_text())
    assert found["benchmark"] == "plan"
    assert found["configuration"]["document_length"] == 300
    assert found["configuration"]["tokens"] == 4096
    assert {choice["layout"] for choice in found["choices"]} == {"contiguous()", "striped(32)"}
    for choice in found["choices"]:
        tiles = np.array(choice["tiles"])
        assert tiles.shape == (4, 4)
        assert choice["critical_path"] == tiles.max(axis=0).sum()
        forward, backward = choice["timelines"]
        assert np.array(forward["work"]).shape == (4, 4)
        assert forward["seconds"] == choice["forward_seconds"]
        assert backward["seconds"] == choice["backward_seconds"]


def test_counts_that_may_be_too_many_say_so(capsys, monkeypatch):
    monkeypatch.setattr(strategy_choice, "AFFORDABLE", 0)
    _, text, _ = run(capsys, "--devices", 4, "--length", 8192, "--mask", "window", "--window", 500, "--preset", "debug")
    assert "≤ 1." in text
    assert "≤: an upper bound" in text


@pytest.mark.parametrize(
    ("length", "tokens"),
    [("786432", 786_432), ("256k", 262_144), ("1M", 2**20), ("1.5M", 3 * 2**19), ("1_000", 1000), ("1,048,576", 2**20)],
)
def test_lengths_are_written_as_people_write_them(length, tokens):
    assert PlanConfig(devices=8, length=length).tokens == tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0", "--length", "1M"], "devices must be a whole number of at least 1; got 0"),
        (
            ["--devices", "8", "--length", "some"],
            "--length must be a number of tokens, like 786432, 256k or 1M; got 'so",
        ),
        (["--devices", "8", "--length", "0"], "--length must be a number of tokens"),
        (["--devices", "8", "--length", "2G"], "at most 2147483647"),
        (["--devices", "8", "--length", "64M"], "but may use 72.00 GB of each h100. On 512 devices it would fit."),
        (["--devices", "8", "--length", "3G", "--mask", "documents"], "at most 2147483647"),
        (["--devices", "8", "--length", "9" * 400], "--length must be a number of tokens"),
        (["--devices", "8", "--length", "1,5M"], "--length must be a number of tokens"),
        (["--devices", "8", "--length", "1M", "--mask", "documents", "--document-length", "0"], "median must be"),
        (["--devices", "8", "--length", "1M", "--hardware", "z80"], "--hardware must be one of a100, h100"),
        (["--devices", "8", "--length", "1M", "--preset", "70b"], "--preset must be one of debug, 1b"),
        (["--devices", "8", "--length", "1M", "--kernel", "magic"], "--kernel must be one of auto, cudnn, hopper"),
        (
            ["--devices", "8", "--length", "1M", "--layouts", "spiral"],
            "--layouts: A layout is written like contiguous, zigzag or striped(256); got",
        ),
        (["--devices", "8", "--length", "1M", "--layouts", "striped(0)"], "stripe must be a whole number"),
        (["--devices", "8", "--length", "1M", "--window", "5"], "--window requires --mask window; got --mask causal"),
        (["--devices", "8", "--length", "1M", "--mask", "window", "--window", "0"], "window must be"),
        (["--devices", "8", "--length", "1M", "--batch", "0"], "batch must be"),
    ],
)
def test_nonsense_gets_one_clear_line(capsys, arguments, message):
    code, _, error = run(capsys, *arguments)
    assert code == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_an_output_that_cannot_be_written_is_refused(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    options = ("--devices", 2, "--length", 1024, "--preset", "debug", "--output", tmp_path / "file" / "plan.json")
    code, _, error = run(capsys, *options)
    assert code == 2
    assert "cannot be written" in error


def test_many_devices_are_drawn_as_the_busiest_of_several():
    found = sa.plan(128, 2**20, model="1b")
    *lines, scale = plan_command._heat(found.baseline)
    assert len(lines) == len(lines[0]) == plan_command.LARGEST_PICTURE
    assert [line.count("█") for line in lines] == list(range(1, 33))
    assert scale == f"█ is {found.baseline.tiles.max():,} tiles"


@pytest.mark.parametrize(("preset", "length", "devices"), [("1b", 262_144, 8), ("llama3-8b", 524_288, 64)])
def test_a_dry_run_and_a_plan_give_the_same_figures(preset, length, devices):
    """The time per step, the memory, the strategy and the layout of one run."""
    planned = sa.plan(devices, length, mask=packed(length), model=preset).fastest
    config, sizes = TrainConfig(preset=preset, sequence_length=length), {"data": 1, "sequence": devices}
    settled, lines = settle.settled(config, sizes, documents=True)
    assert lines[0].startswith(f"--strategy auto takes {planned.strategy}: {planned.step_seconds:.3g} s per step")
    assert settled.make_layout(devices) == planned.layout
    assert estimate(settled, sizes).memory == planned.memory

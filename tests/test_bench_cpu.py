"""The suites of `striped bench` that run on CPUs: from the command line to the JSON, with tiny texts."""

import json

import jax
import numpy as np
import pytest

from striped_attention.bench import blocks, masks, positions, problem
from striped_attention.bench.config import BenchConfig
from striped_attention.bench.workers import Team
from striped_attention.cli import main
from striped_attention.layout import contiguous
from striped_attention.mask import causal
from striped_attention.training.errors import UsageError


class Here(Team):
    """A team of one in this process: JAX need not start again, nor compile again what it has compiled."""

    def __init__(self, kind, cores, **options):
        self.subject = kind(rank=0, ranks=1, port=0, **options)

    def ask(self, method, *arguments):
        return [getattr(self.subject, method)(*arguments)]

    def close(self):
        pass


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(blocks, "Team", Here)
    monkeypatch.setattr(blocks, "check_pinned", lambda: [0])


@pytest.fixture(scope="module", autouse=True)
def compiled_in_a_hurry():
    """Here and in the processes of a suite: how fast they are is not looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def bench(tmp_path):
    """Runs a suite and reads its result."""

    def run(command):
        path = tmp_path / "result.json"
        assert main(["bench", *command.split(), "--output", str(path)]) == 0
        result = json.loads(path.read_text())
        assert result["benchmark"] == command.split()[0]
        assert result["hardware"]["cores"] >= 1
        assert {"started", "versions", "git", "configuration"} < set(result)
        return result

    return run


def layouts_of(rows):
    return [row["layout"] for row in rows]


@pytest.mark.usefixtures("here")
def test_layouts_are_timed_by_two_processes_and_by_their_critical_paths(bench, capsys):
    result = bench("layouts --members 2 4 --lengths 128 --layouts striped(16) --rounds 1")
    wall, path = result["wall"], result["critical_path"]
    assert wall["devices"] == 2
    assert "two processes, each pinned to a core" in wall["how"]
    assert layouts_of(wall["rows"]) == ["contiguous()", "striped(16)"]
    for row in wall["rows"]:
        assert row["length"] == 128
        assert row["both"] == row["samples"]["both"][0] > 0
        assert row["over_contiguous"]["both"] == wall["rows"][0]["both"] / row["both"]
    assert wall["rows"][1]["bound"] == pytest.approx(1.5, abs=0.2)
    assert "not wall-clock" in path["how"]
    assert [(row["devices"], row["layout"]) for row in path["rows"]] == [
        *((2, "contiguous()"), (2, "striped(16)"), (4, "contiguous()"), (4, "striped(16)"))
    ]
    for row in path["rows"]:
        seconds = np.array(row["seconds"])
        assert seconds.shape == (row["devices"], row["devices"])
        assert row["both"] == pytest.approx(seconds.max(axis=0).sum())
        assert 0 < row["forward"] < row["both"]
    assert len(result["checks"]) == 2 + 4
    assert max(error for check in result["checks"] for error in check["errors"].values()) < 1e-4
    shown = capsys.readouterr().out
    assert "critical path of 4 devices, 128 tokens" in shown
    assert "two processes, 128 tokens: round 1 of 1" in shown


@pytest.mark.usefixtures("here")
def test_small_tiles_run_fewer_hidden_pairs(bench):
    rows = bench("tiles --tiles 16 64 --members 2 --lengths 128 --layouts striped(1) --rounds 1")["rows"]
    assert [(row["tile"], row["layout"]) for row in rows] == [
        *((16, "contiguous()"), (16, "striped(1)"), (64, "contiguous()"), (64, "striped(1)"))
    ]
    assert {row["pairs"] for row in rows} == {128 * 129 // 2}
    work = [row["tiles"] * row["tile"] ** 2 for row in rows]
    assert work == [36 * 16**2, 40 * 16**2, 3 * 64**2, 4 * 64**2]
    assert all(row["temporary_bytes"] > 0 and row["both"] > 0 for row in rows)
    assert rows[3]["over_contiguous"] == rows[2]["both"] / rows[3]["both"]


@pytest.mark.usefixtures("here")
def test_masks_say_how_busy_the_busiest_device_is(bench):
    asked = ["causal", "window(32)", "prefix(40)", "documents(20)", "documents(32,0)"]
    rows = bench(f"masks --masks {' '.join(asked)} --members 2 --lengths 128 --layouts zigzag --rounds 1")["rows"]
    assert list(dict.fromkeys(row["mask"] for row in rows)) == asked
    assert layouts_of(rows) == ["contiguous()", "zigzag()"] * len(asked)
    assert all(1 <= row["imbalance"] <= 2 for row in rows), "2 if one of two devices does everything"
    assert rows[1]["bound"] == pytest.approx(1.5, abs=0.01)
    assert rows[9]["bound"] == 1, "four documents of 32: both layouts give either device two"


def test_masks_of_documents_are_as_long_as_they_say():
    assert np.unique(masks.parse_mask("documents(32, 0)", 128).lo, return_counts=True)[1].tolist() == [32] * 4
    assert len(np.unique(masks.parse_mask("documents(32)", 4096).lo)) > 32
    for text in ("documents", "window", "window(0)", "causal(3)"):
        with pytest.raises(UsageError, match="--masks") as caught:
            masks.parse_mask(text, 128)
        assert "\n" not in str(caught.value)


@pytest.fixture
def ring_here(monkeypatch):
    monkeypatch.setattr(positions, "Team", Here)
    monkeypatch.setattr(positions, "use_virtual", lambda devices: None)


@pytest.mark.usefixtures("ring_here")
def test_positions_are_exact_in_any_layout(bench):
    rows = bench("positions --members 2 --lengths 64 --layouts striped(4) --positions absolute t5")["rows"]
    assert [row["positions"] for row in rows] == ["absolute", "t5"]
    for row in rows:
        assert (row["length"], row["layout"], row["devices"]) == (64, "striped(4)", 2)
        assert 0 < row["error"] == max(row["output"], row["gradient"]) < 1e-5


@pytest.mark.usefixtures("ring_here")
def test_wrong_positions_end_the_suite(monkeypatch, tmp_path):
    right = positions.rotary
    monkeypatch.setattr(positions, "rotary", lambda at, *options: right(at + at // 32, *options))
    command = "bench positions --members 2 --lengths 64 --layouts striped(4) --positions rotary --output"
    with pytest.raises(RuntimeError, match=r"rotary positions are wrong with striped\(4\) on 2 devices"):
        main([*command.split(), str(tmp_path / "result.json")])


@pytest.mark.usefixtures("here")
def test_a_wrong_answer_ends_a_suite_before_anything_is_timed(monkeypatch):
    case = blocks.Case(contiguous(), causal(), 2, 64)
    with blocks.core() as team:
        (answer,) = team.ask("prepare", "ring", case, 0)
        truth = problem.oracle(problem.make_inputs(64))
        assert problem.check(answer, truth, "a ring")["wrong"] == []
        monkeypatch.setattr(team.subject, "seconds", lambda name: pytest.fail("timed"))
        monkeypatch.setattr(problem, "oracle", lambda inputs, mask: truth._replace(dv=truth.dv * 1.001))
        with pytest.raises(RuntimeError, match=r"contiguous\(\) on 2 devices gives a wrong answer at 64 tokens: dv"):
            blocks.measure(team, [case], 1, [])


@pytest.mark.parametrize(
    ("suite", "options", "message"),
    [
        ("layouts", dict(layouts=("diagonal",)), "--layouts: A layout is written like contiguous, zigzag or striped"),
        ("layouts", dict(layouts=("striped(0)",)), "--layouts: stripe must be a whole number of at least 1; got 0"),
        ("layouts", dict(rounds=0), "--rounds must be at least 1; got 0"),
        ("layouts", dict(members=(3,), lengths=(64,)), "--lengths multiples of twice that"),
        ("layouts", dict(peers=("plain-jax",)), "--peers is an option of peers, not of layouts"),
        ("tiles", dict(tiles=(0,)), "--tiles must be at least 1; got 0"),
        ("masks", dict(tiles=(8,)), "--tiles is an option of tiles, not of masks"),
        ("positions", dict(positions=("sinusoidal",)), "--positions must be some of rotary, absolute, alibi, t5"),
        ("peers", dict(peers=("nobody",)), "--peers must be some of ringattention, plain-jax"),
    ],
)
def test_nonsense_is_refused_in_one_line(suite, options, message):
    with pytest.raises(UsageError) as caught:
        BenchConfig(suite, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_machine_with_too_few_cores_is_told_so(monkeypatch):
    monkeypatch.setattr(blocks.record, "usable_cores", lambda: [3])
    assert blocks.pick_cores(1) == [3]
    with pytest.raises(UsageError, match=r"needs 2 cores on Linux.*may use 1"):
        blocks.pick_cores(2)

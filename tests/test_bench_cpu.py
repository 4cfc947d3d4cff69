"""The suites of `striped bench` that run on CPUs, from the command line to the JSON, with short sequences."""

import importlib.util
import json
import os

import jax
import numpy as np
import pytest
from striped_bench.bench import blocks, decode, overhead, peers, problem, rings, workers
from striped_bench.bench.command import BenchConfig
from striped_bench.bench.run import require
from striped_bench.bench.workers import Team, WorkerError
from striped_bench.report.contents import gather
from striped_bench.report.read import read

import striped_attention as sa
from striped_attention.cli import main
from striped_attention.core.mask import causal
from striped_attention.errors import UsageError
from striped_attention.models.config import PRESETS
from striped_attention.options import parse_mask
from tests.team import Here


@pytest.fixture
def here(monkeypatch):
    """Run all workers in this process, which is not pinned to a core and where JAX already has its devices."""
    for module in (blocks, overhead, peers, rings):
        monkeypatch.setattr(module, "Team", Here)
    for module in (blocks, overhead, rings):
        monkeypatch.setattr(module, "check_pinned", lambda: None)
    monkeypatch.setattr("striped_bench.bench.contestants.use_virtual", lambda devices: None)
    monkeypatch.setattr(decode, "use_virtual", lambda devices: None)


@pytest.fixture(scope="module", autouse=True)
def compiled_in_a_hurry():
    """Disable most optimisations, here and in the processes of a suite: their speed is not tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def bench(tmp_path):
    """Return a function that runs a suite and reads its result."""

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
def test_layouts_are_timed_on_the_clock_and_by_their_critical_paths(bench, capsys):
    result = bench("layouts --devices 2 --lengths 128 --layouts striped(16) --rounds 1")
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
    assert [(row["devices"], row["layout"]) for row in path["rows"]] == [(2, "contiguous()"), (2, "striped(16)")]
    for row in path["rows"]:
        seconds = np.array(row["seconds"])
        assert seconds.shape == (row["devices"], row["devices"])
        assert row["both"] == pytest.approx(seconds.max(axis=0).sum())
        assert 0 < row["forward"] < row["both"]
    assert len(result["checks"]) == 2 + 2
    assert max(error for check in result["checks"] for error in check["errors"].values()) < 1e-4
    shown = capsys.readouterr().out
    assert "round 1 of 1" in shown
    assert "devices 2, length 128, layout striped(16), forward " in shown


def test_two_processes_with_a_core_each_compute_one_attention():
    """Two real processes, connected by jax.distributed, return the right result."""
    checks = []
    (row,) = rings.wall([sa.contiguous()], [32], 1, checks)
    assert row["over_contiguous"] == {"forward": 1, "both": 1}
    assert row["both"] == row["samples"]["both"][0] > 0
    assert [check["processes"] for check in checks] == [2]
    assert max(checks[0]["errors"].values()) < 1e-4


class Subject:
    """An object that a worker holds."""

    def __init__(self, rank, ranks, port, broken=False):
        self.rank = rank
        if broken:
            raise UsageError("Mend it.")

    def cores(self):
        return sorted(os.sched_getaffinity(0))

    def fail(self, rank):
        if rank == self.rank:
            raise ValueError("first line\nsecond line")
        import time

        time.sleep(1000)

    def die(self):
        print("last words", flush=True)
        os.kill(os.getpid(), 9)


def test_ranks_own_their_cores_and_are_ended_together(capfd):
    cores = workers.pick_cores(2)
    with Team(Subject, [{core} for core in cores]) as team:
        assert team.ask("cores") == [[core] for core in cores]
        with pytest.raises(WorkerError, match=r"^ValueError: first line$"):
            team.ask("fail", 1)
        assert not team.alive, "the other rank would sleep forever"
        with pytest.raises(WorkerError, match="already ended"):
            team.ask("cores")
    assert "second line" in capfd.readouterr().err


def test_a_process_alone_survives_an_error_but_not_its_death(capfd):
    cores = set(workers.pick_cores(2))
    with Team(Subject, [cores]) as team:
        with pytest.raises(WorkerError, match=r"^ValueError: first line$"):
            team.ask("fail", 0)
        assert team.ask("cores") == [sorted(cores)]
        with pytest.raises(WorkerError, match=r"process 0 was killed; out of memory\?"):
            team.ask("die")
    assert "last words" in capfd.readouterr().err
    with pytest.raises(UsageError, match=r"^Mend it\.$"):
        Team(Subject, [cores], broken=True)


@pytest.mark.usefixtures("here")
def test_small_tiles_run_fewer_hidden_pairs(bench):
    rows = bench("tiles --tiles 16 64 --devices 2 --lengths 128 --layouts striped(1) --rounds 1")["rows"]
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
    rows = bench(f"masks --masks {' '.join(asked)} --devices 2 --lengths 128 --layouts zigzag --rounds 1")["rows"]
    assert list(dict.fromkeys(row["mask"] for row in rows)) == asked
    assert layouts_of(rows) == ["contiguous()", "zigzag()"] * len(asked)
    assert all(1 <= row["imbalance"] <= 2 for row in rows), "2 if one of two devices does all the work"
    assert rows[1]["bound"] == pytest.approx(1.5, abs=0.01)
    assert rows[9]["bound"] == 1, "four documents of 32 tokens: both layouts assign two to each device"


@pytest.mark.usefixtures("here")
def test_a_gpu_is_given_more_heads_in_bfloat16(bench, monkeypatch):
    monkeypatch.setitem(problem.SHAPES, "gpu", problem.Shape(4, 2, 8, "bfloat16"))
    monkeypatch.setitem(blocks.PLATFORMS, "gpu", "cpu")  # this test has no GPU
    options = "--platform gpu --tiles 16 --devices 2 --lengths 128 --layouts zigzag --rounds 1"
    result = bench(f"tiles {options} --masks documents(20)")
    assert result["configuration"]["dtype"] == "bfloat16"
    assert {(row["platform"], row["mask"]) for row in result["rows"]} == {("gpu", "documents(20)")}
    assert all(max(check["errors"].values()) < 0.006 for check in result["checks"])


@pytest.mark.usefixtures("here")
def test_a_machine_without_a_gpu_is_told_so(capfd, tmp_path, monkeypatch):
    def none():
        raise RuntimeError("Unable to initialize backend 'cuda'\nand more")

    monkeypatch.setattr(jax, "devices", none)
    monkeypatch.setitem(blocks.PLATFORMS, "gpu", "cpu")
    assert main(["bench", "masks", "--platform", "gpu", "--output", str(tmp_path / "x.json")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("striped: --platform gpu needs an NVIDIA GPU and JAX's packages for it; JAX found none.")
    assert line.endswith("'cuda'")


def test_a_gpu_has_defaults_of_its_own():
    assert BenchConfig("masks", platform="gpu").options["lengths"] == (65_536,)
    assert "striped(1024)" in BenchConfig("tiles", platform="gpu").options["layouts"]
    assert BenchConfig("tiles", platform="gpu", lengths=(4096,)).options["lengths"] == (4096,)
    assert BenchConfig("tiles").options["lengths"] == (8192,)


def test_masks_of_documents_are_as_long_as_they_say():
    assert np.unique(parse_mask("documents(32, 0)", 128).lo, return_counts=True)[1].tolist() == [32] * 4
    assert len(np.unique(parse_mask("documents(32)", 4096).lo)) > 32
    for text in ("documents", "window", "window(0)", "causal(3)"):
        with pytest.raises(UsageError, match="--masks") as caught:
            parse_mask(text, 128)
        assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("here")
def test_overhead_times_every_part_of_a_layer(bench, monkeypatch):
    alone = {overhead.Layer: Here, overhead.Wire: Team}  # transfers need a second process
    monkeypatch.setattr(overhead, "Team", lambda kind, cores, **options: alone[kind](kind, cores, **options))
    result = bench("overhead --presets debug --devices 4 --lengths 64 --layouts striped(4) --rounds 2")
    what = ["attention", "merges", "projections", "feed-forward", "loss", "permute", "hops"]
    assert [row["what"] for row in result["rows"]] == what
    assert all(row["seconds"] > 0 and row["length"] == 64 and row["devices"] == 4 for row in result["rows"])
    assert {row["times"] for row in result["rows"] if row["what"] in ("loss", "permute")} == {1}
    (checked,) = result["checks"]
    assert set(checked["errors"]) == {"attention", "projections", "feed-forward", "loss"}
    assert max(checked["errors"].values()) < 1e-5


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_a_wrong_answer_is_not_timed(error):
    assert require("loss", 1e-6, 1e-4) == 1e-6
    with pytest.raises(RuntimeError, match=r"feed-forward is wrong by .*, more than 0\.0001\. It is not timed"):
        require("feed-forward", error, 1e-4)


@pytest.mark.usefixtures("here")
def test_scale_is_measured_here_and_planned_beyond(bench, monkeypatch):
    monkeypatch.setattr(rings, "MEMBERS", 2)
    planned = "--presets 1b --devices 8 --lengths 262144 --hardware h100 v5p"
    rows = bench(f"scale --measured 128 {planned} --layouts zigzag --rounds 1")["rows"]
    assert [(row["measured"], row["hardware"]) for row in rows] == [
        *[(True, "cpu")] * 2,
        *[(False, "cpu")] * 2,
        *[(False, "h100")] * 2,
        *[(False, "v5p")] * 2,
    ]
    found = sa.plan(8, 262_144, hardware="h100", model="1b", layouts=[sa.zigzag()])
    best = rows[4]
    assert best["layout"] == "zigzag()"
    assert best["tokens_per_second"] == pytest.approx(found.best.tokens_per_second)
    assert best["over_contiguous"] == pytest.approx(best["tokens_per_second"] / rows[5]["tokens_per_second"])
    assert best["fits"] is True
    assert rows[1]["over_contiguous"] == pytest.approx(rows[1]["tokens_per_second"] / rows[0]["tokens_per_second"])


def test_peers_that_are_not_installed_are_named_with_the_way_to_get_them(monkeypatch, capsys, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ringattention" else find(name))
    command = ["bench", "peers", "--peers", "plain-jax", "ringattention", "--output", str(tmp_path / "result.json")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("striped: --peers ringattention: not installed. pip install 'striped-attention[peers]'")
    assert said.count("\n") == 1
    assert main([*command, "--lengths", "1000"]) == 2
    assert "--lengths must be multiples of 1024" in capsys.readouterr().err


class Clock:
    """A contestant that takes `seconds` and returns the right answer, with dv multiplied by `off`."""

    def __init__(self, seconds, off=1.0, **_):
        self.seconds, self.off = seconds, off

    def prepare(self, length):
        truth = problem.oracle(problem.make_inputs(length))
        whole = {name: np.zeros_like(truth.dk) for name in ("out", "dq")}
        for name, x in whole.items():
            x[:, truth.positions] = getattr(truth, name)
        self.answer = problem.Answer(np.arange(length), **whole, dk=truth.dk, dv=truth.dv * self.off)

    def check(self):
        return self.answer

    def run(self, kind):
        return self.seconds

    def peak(self):
        return 1

    def idle(self):
        return 0.0


@pytest.mark.usefixtures("here")
def test_peers_are_checked_and_compared_with_ours(bench, monkeypatch):
    timed = [("ours", "ours", 1.0, 1.0), ("a", "plain-jax", 0.5, 1.001), ("b", "plain-jax", 3.0, 1.0)]
    field = lambda: [peers.Entry(name, family, Clock, seconds=s, off=off) for name, family, s, off in timed]  # noqa: E731
    monkeypatch.setattr(peers, "entries", field)
    result = bench("peers --peers plain-jax --lengths 1024 --rounds 2")
    assert [(entry["status"], entry["wrong"]) for entry in result["contestants"]] == [
        *(("right", []), ("wrong", ["dv"]), ("right", []))
    ]
    assert result["contestants"][1]["lengths"]["1024"]["both"]["seconds"] == [0.5, 0.5], "reported as wrong, but timed"
    assert result["fastest_jax_peer"]["1024"]["both"] == {"name": "b", "times_ours": 3.0}
    timed[0] = ("ours", "ours", 1.0, 1.001)
    with pytest.raises(RuntimeError, match="ours gives a wrong answer at 1024 tokens: dv"):
        bench("peers --peers plain-jax --lengths 1024 --rounds 1")


class Broken(Here):
    """A team that must not be asked for times."""

    def ask(self, method, *arguments):
        return pytest.fail("timed") if method == "ask" else super().ask(method, *arguments)


@pytest.mark.usefixtures("here")
def test_a_wrong_answer_ends_a_suite_before_anything_is_timed(monkeypatch):
    monkeypatch.setattr(blocks, "Team", Broken)
    case = blocks.Case(sa.contiguous(), causal(), 2, 128)
    with blocks.core() as team:
        ((answer,),) = team.ask("prepare", [case])
        truth = problem.oracle(problem.make_inputs(128))
        assert problem.check(answer, truth, "a ring")["wrong"] == []
        monkeypatch.setattr(problem, "oracle", lambda inputs, mask: truth._replace(dv=truth.dv * 1.001))
        with pytest.raises(RuntimeError, match=r"contiguous\(\) on 2 devices gives a wrong answer at 128 tokens: dv"):
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
        ("scale", dict(measured=(24,)), "--measured must be multiples of 16; got 24"),
        ("scale", dict(hardware=("abacus",)), "--hardware must be one of a100, h100"),
        ("peers", dict(peers=("nobody",)), "--peers must be one of ringattention, plain-jax"),
    ],
)
def test_nonsense_is_refused_in_one_line(suite, options, message):
    with pytest.raises(UsageError) as caught:
        BenchConfig(suite, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_machine_with_too_few_cores_is_told_so(monkeypatch):
    monkeypatch.setattr(workers, "usable_cores", lambda: [3])
    assert workers.pick_cores(1) == [3]
    with pytest.raises(UsageError, match=r"needs Linux and 2 cores.*may use 1"):
        workers.pick_cores(2)


@pytest.mark.usefixtures("here")
def test_a_decoded_token_sends_partial_results(bench, tmp_path):
    found = bench("decode --quick --lengths 64 --devices 1 4 --rounds 3")
    one, four = found["rows"]
    assert (one["wire_bytes"], one["attention_bytes"]) == (0, 0)
    debug = PRESETS["debug"]
    assert four["attention_bytes"] == debug.layers * debug.heads * (debug.head_dim + 1) * 4 * 3
    assert four["wire_bytes"] > four["attention_bytes"]
    assert all(check["error"] < check["tolerance"] == 1e-4 for check in found["checks"])
    (section,) = (section for section in gather(read([tmp_path / "result.json"])).sections if section.name == "decode")
    assert section.draw().axes[0].get_xlabel() == "devices"


def test_decoding_on_a_gpu_needs_one(capsys, tmp_path):
    command = ["bench", "decode", "--platform", "gpu", "--output", str(tmp_path / "decode.json")]
    assert main(command) == 2
    assert "--platform gpu needs a GPU; JAX sees only cpu." in capsys.readouterr().err

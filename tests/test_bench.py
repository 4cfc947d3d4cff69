"""`striped bench`: rejected options, summaries of timings, and the stand-ins for the collectives of a ring."""

import dataclasses
import functools
import json
import math
import os
import re
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from striped_bench.bench import gpu, mock, profile, step
from striped_bench.bench.command import BenchConfig

import striped_attention as sa
from striped_attention.cli import main
from striped_attention.core.mask import packed
from striped_attention.errors import UsageError
from striped_attention.kernels import cudnn as kernel_cudnn
from striped_attention.kernels import xla as kernel_xla
from striped_attention.kernels.choice import KERNELS
from striped_attention.kernels.cudnn import binding as cudnn
from striped_attention.models import llama
from striped_attention.models.config import PRESETS
from striped_attention.options import parse_mask
from striped_attention.runtime.hardware import hardware_of
from striped_attention.strategies import exchange
from striped_attention.strategies.problem import Problem
from striped_attention.strategies.strategy import AUTO, parse_strategy
from striped_attention.strategies.work import count_pairs
from tests.team import Here


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(heads=("3:2",)), "--heads must be written like 32:8"),
        (dict(heads=("16",)), "--heads must be written like 32:8"),
        (dict(quick=True, heads=("3:2",)), "the first a multiple of the second"),
        (dict(members=(1,)), "--devices must be at least 2"),
        (dict(lengths=(1001,)), "--lengths multiples of twice that"),
        (dict(lengths=()), "--lengths needs at least one value"),
        (dict(strategies=("heads=x",)), "--strategies: A strategy is written like ring, gather, heads, heads=2"),
        (dict(kernels=("pallas_tpu",)), "--kernels must be one of cudnn, hopper, xla; got pallas_tpu"),
        (dict(masks=("documents",)), "--masks are written like causal"),
    ],
)
def test_bad_options_get_one_clear_line(options, message):
    with pytest.raises(UsageError, match=message) as caught:
        BenchConfig("gpu", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("suite", "options", "message"),
    [
        ("step", dict(chunk=0), "--chunk must be at least 1; got 0"),
        ("step", dict(presets=()), "--presets needs at least one value"),
        ("step", dict(lengths=(65_537,)), "--lengths multiples of twice that"),
        ("step", dict(lengths=(0,)), "--lengths multiples of twice that"),
        ("step", dict(heads=("16:16",)), "--heads is an option of gpu, overlap and decode, not of step"),
        (
            "gpu",
            dict(presets=("1b",)),
            "--presets is an option of overhead, scale, step, trainers and decode, not of gpu",
        ),
        ("overlap", dict(chunk=8), "--chunk is an option of step and decode, not of overlap"),
    ],
)
def test_options_that_a_suite_cannot_use_get_one_clear_line(suite, options, message):
    with pytest.raises(UsageError, match=message) as caught:
        BenchConfig(suite, **options)
    assert "\n" not in str(caught.value)


def test_a_suite_measures_what_was_asked_and_else_its_own():
    assert BenchConfig("gpu").options["members"] == (2, 4, 8, 16)
    assert BenchConfig("gpu").options["strategies"] == ("ring",)
    own = dict(chunk="auto", kernels=("cudnn",), strategies=("ring",), layouts=("contiguous", "striped"), text="whole")
    assert BenchConfig("step").options == dict(presets=("1b",), members=(8,), lengths=(65_536, 262_144), **own)
    asked = BenchConfig("step", members=(4, 16), presets=("7b", "llama3-8b"), lengths=(32_768,))
    assert asked.options == dict(presets=("7b", "llama3-8b"), members=(4, 16), lengths=(32_768,), **own)
    assert BenchConfig("step", quick=True).options["presets"] == ("debug",)
    assert BenchConfig("gpu", quick=True, members=(4,)).options["members"] == (4,)


@pytest.fixture
def here(monkeypatch):
    """Run workers in this process; remove the mock GPUs afterwards."""
    monkeypatch.setattr(mock, "Team", Here)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    yield
    jax.config.update("jax_mock_gpu_topology", "")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("suite", ["gpu", "overlap", "step"])
def test_without_a_gpu_the_suites_say_so(suite, capsys, tmp_path):
    assert main(["bench", suite, "--output", str(tmp_path / "result.json")]) == 2
    assert capsys.readouterr().err.startswith("striped: This suite needs cuDNN, at least as the baseline. It needs")
    assert not list(tmp_path.iterdir())


def test_a_summary_takes_the_busiest_member():
    def row(layout, rank, both, **other):
        times = {"forward": both / 4, "both": both, "forward_flops": 1e12, "both_flops": 3.5e12}
        found = {**gpu.Case(4, 1024, "16:16", layout=layout)._asdict(), "rank": rank, **times, **other}
        return {**found, "hop_bytes": 450, "hidden": 3, "transfers": 4, **dict.fromkeys(gpu.PLANNED, 0.5)}

    rows = [row("contiguous()", 3, 0.02), row("striped(1)", 0, 0.0125), row("striped(1)", 3, 0.0120)]
    rows.append(row("striped(1)", 0, 0.01, strategy="heads=4"))
    ring = {"length": 1024, "heads": "16:16", "mask": "causal", "ideal_length": 1024, "forward_rate": 1e15}
    ideal = [{**ring, "members": n, "both_rate": rate} for n, rate in ((2, 9e14), (4, 4e14))]
    contiguous, striped, heads = gpu.summary({"members": rows, "ideal": ideal})
    assert contiguous["over_contiguous"]["both"] == 1
    assert striped["both"] == 0.0125
    assert striped["over_contiguous"]["both"] == pytest.approx(1.6)
    assert striped["tflops"]["both"] == pytest.approx(280)
    assert striped["of_ideal"]["both"] == pytest.approx(0.7), "relative to the single-GPU rate measured with this ring"
    assert striped["bound"] == 1.75
    assert set(striped["hop_seconds"].values()) == {450 / 450e9, 450 / 50e9}
    assert striped["backward_hop_bytes"] == 3 * 450
    assert (heads["strategy"], heads["both"], heads["planned_transfer_seconds"]) == ("heads=4", 0.01, 0.5)
    assert heads["over_contiguous"] is heads["bound"] is None, "no other layout was measured with this strategy"


STRATEGIES = ("ring", "heads=4", "gather=4", "heads=2,gather=2", "heads=2", "gather=2")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(gpu, "DIM", 16)
    monkeypatch.setattr(mock, "gpu", lambda: {"name": "a CPU"})


def cases(*strategies, mask="causal", kernel="xla", layout="striped(1)"):
    return [gpu.Case(4, 512, "4:2", mask, kernel, strategy, layout) for strategy in strategies]


@pytest.mark.usefixtures("small")
def test_a_plan_settles_strategies_and_says_what_cannot_be_measured():
    asked = [*cases("ring", "heads", "gather", "heads=4", "auto", "heads=3"), *cases("ring", kernel="cudnn")]
    rows = list(gpu.plan(asked))
    assert [row["strategy"] for row in rows if "refused" not in row] == ["ring", "heads=4", "gather=4"], "each one once"
    assert ["must divide the 4 devices" in row["refused"] for row in rows if "refused" in row] == [True, False]
    ring, heads, gather = rows[:3]
    assert (ring["ranks"], heads["ranks"]) == ([0, 3], [0]), "if only heads are split, all devices have the same work"
    message = ring["hop_bytes"] / hardware_of("cpu").interconnect + hardware_of("cpu").latency
    assert ring["planned_transfer_seconds"]["forward"] == pytest.approx(3 * message)
    assert gather["planned_exposed_seconds"]["forward"] < gather["planned_transfer_seconds"]["forward"]
    assert heads["planned_exposed_seconds"] == pytest.approx(heads["planned_transfer_seconds"])
    (contiguous,) = gpu.plan(cases("ring", layout="contiguous()"))
    assert contiguous["ranks"] == [3]
    (documents,) = gpu.plan([gpu.Case(4, 8192, "4:2", "documents(1000)", "xla", "ring", "contiguous()")])
    pairs = count_pairs(sa.contiguous(), parse_mask("documents(1000)", 8192), 8192, 4).sum(axis=1)
    assert int(pairs.argmax()) in documents["ranks"]
    assert documents["critical_path"] > 1, "the busiest device differs from step to step"


@pytest.mark.usefixtures("small", "compiled_in_a_hurry")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", ["causal", "documents(100)"])
def test_timed_programs_send_nothing_and_compute_on_their_own(strategy, mask):
    """A device's result is finite, and stays the same if all other devices hold only NaN."""
    (case,) = cases(strategy, mask=mask)
    member = gpu.Member(case, gpu._random(128, 4, 2), rank=3)
    with mock.at_home(member.mask, sums=False):
        run = gpu._compile(member.both, *member.arguments)
    assert not COLLECTIVES.findall(run.as_text())
    here = member.mesh.devices[3]
    assert here == jax.devices()[0]
    poisoned = [only_here(x, here) if isinstance(x, jax.Array) else x for x in member.arguments]
    for x, same in zip(jax.tree.leaves(run(*member.arguments)), jax.tree.leaves(run(*poisoned)), strict=True):
        own, alone = (of_device(y, here) for y in (x, same))
        assert np.isfinite(own).all()
        assert np.abs(own).max() > 0
        np.testing.assert_array_equal(own, alone)
    assert gpu._transfers(gpu._compile(member.both, *member.arguments)), "the real program has transfers"


@pytest.mark.parametrize("groups", [None, [[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_the_stand_in_for_gathered_ranges_is_the_real_thing(groups):
    """The stand-in returns the real ranges, because the amount of work depends on them."""
    mask = parse_mask("documents(10)", 64).permute(sa.striped(), 4)
    mesh, spec = Mesh(np.array(jax.devices()[:4]), ("sequence",)), PartitionSpec(None, "sequence")

    def gather(lo):
        return jax.lax.all_gather(lo, "sequence", axis=1, tiled=True, axis_index_groups=groups)

    def run():
        return jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=spec))(mask.lo)

    wanted = run()
    with mock.at_home(mask):
        found = run()
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.usefixtures("small", "compiled_in_a_hurry")
def test_answers_of_every_strategy_are_checked(monkeypatch):
    """Every strategy is compared with one device, and the timed programs of one kernel with those of another."""
    asked = [*cases(*STRATEGIES, mask="documents(300)"), *cases("heads=2,gather=2", layout="zigzag()")]
    found = list(gpu.check(asked))
    assert [row["strategy"] for row in found] == [*STRATEGIES, "heads=2,gather=2"]
    assert max(row["worst"] for row in found) < 1e-3
    rows = list(gpu.plan(cases("heads=2,gather=2", mask="documents(300)")))
    (row,) = gpu.check_timed(rows)
    assert (row["layout"], row["rank"], row["worst"]) == ("striped(1)", rows[0]["ranks"][-1], 0)

    @functools.wraps(kernel_xla.attend)
    def wrong(q):
        attend = kernel_xla.attend(q)
        return lambda k, v, block: attend(k, v + 1, block)

    module = types.ModuleType("wrong")
    vars(module).update({**vars(kernel_xla), "attend": wrong})
    monkeypatch.setitem(KERNELS, "wrong", module)
    (bad,) = cases("heads=4", kernel="wrong")
    with pytest.raises(RuntimeError, match=r"on 4 devices, heads=4, causal, wrong, against one GPU, is wrong by"):
        next(gpu.check([bad]))
    with pytest.raises(RuntimeError, match=r"on 4 devices, heads=4, causal, wrong, against xla, is wrong by"):
        next(gpu.check_timed([{**bad._asdict(), "ranks": [0]}]))


@pytest.mark.usefixtures("small", "here", "compiled_in_a_hurry")
def test_the_suite_gpu_measures_strategies_and_writes_down_what_is_planned(monkeypatch, tmp_path, capsys):
    """The whole suite runs on virtual devices, with cuDNN emulated."""
    monkeypatch.setattr(cudnn, "unavailable", lambda: None)
    monkeypatch.setattr(gpu, "SECONDS", 0.0)
    monkeypatch.setattr(gpu, "BATCHES", 1)
    monkeypatch.setattr(profile, "where", lambda call: {})
    path = tmp_path / "gpu.json"
    options = ["--devices", "2", "--lengths", "1024", "--heads", "4:2", "--layouts", "striped"]
    more = ["--masks", "documents(300)", "--kernels", "cudnn", "xla", "--strategies", "ring", "heads"]
    with kernel_cudnn.EMULATIONS["in plain JAX"]():
        assert main(["bench", "gpu", *options, *more, "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    assert [(row["kernel"], row["strategy"]) for row in result["refused"]] == [("cudnn", "ring"), ("cudnn", "heads")]
    assert [(row["kernel"], row["strategy"]) for row in result["summary"]] == [("xla", "ring"), ("xla", "heads=2")]
    for row in result["summary"]:
        pairs = count_pairs(sa.striped(), parse_mask("documents(300)", 1024), 1024, 2).sum()
        rate = 4 * pairs * 4 * 16 * 3.5 / 2 / row["both"] / 1e12
        assert row["tflops"]["both"] == pytest.approx(rate), "FLOPs of visible pairs, not of tiles"
        assert row["planned_transfer_seconds"]["both"] > row["planned_transfer_seconds"]["forward"] > 0
        assert row["planned_for"] == "cpu"
    assert "refused Kernel 'cudnn' cannot do this" in capsys.readouterr().out
    assert main(["bench", "gpu", *options, *more[:4], "--output", str(path)]) == 2
    assert "None of these cases can be measured. Kernel 'cudnn' cannot do this" in capsys.readouterr().err


@pytest.mark.parametrize("suite", ["gpu", "overlap", "step"])
def test_a_result_that_cannot_be_written_is_refused_before_anything_is_measured(suite, tmp_path, capsys):
    assert main(["bench", suite, "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"striped: --output {tmp_path} cannot be written: Is a directory.\n"


def test_a_profile_adds_up_kernels_by_kind_and_the_time_between_them():
    names = ["cudnn_sdpa_sm90_flash_fprop_wgmma", "loop_add_fusion", "memcpy128", "wrapped_reverse_1"]
    backward = ["cudnn_sdpa_sm90_flash_bprop_wgmma", "void cudnn::fusion::convert_dq_to_16bits<true>"]
    events = [(name, 1e9 * i, 0.5e9) for i, name in enumerate([*names, *backward])]
    events.append(("another stream, at the same time", 0.1e9, 0.6e9))
    assert profile.by_kind(events) == pytest.approx(
        {
            "attention, forward": 0.5,
            "attention, backward": 1.0,
            "copies in place of hops": 0.5,
            "copies": 0.5,
            "merges, sums and slices": 0.5 + 0.6,
            "nothing": 0.3 + 4 * 0.5,
        }
    )


COLLECTIVES = re.compile(r" = (.*?) (all-\w+|reduce-scatter|collective-\w+)[\w-]*\(")  # shape and operation
CASE = step.Case("debug", 256, 4, 64, "xla", jax.devices()[:4])
ROW = {"preset": "1b", "length": 1024, "members": 4, "kernel": "cudnn", "text": "whole"}
ROW |= {"strategy": "ring", "attention": True, "fits": True}
REAL = {"needed_bytes": 100, "transfers": 9, "hidden": 7}


@pytest.fixture(scope="module")
def compiled_in_a_hurry():
    """Disable most optimisations: tests inspect what a program computes and sends, not its speed."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def only_here(x, here):
    """Return a sharded array with NaN on all devices but `here`; return a replicated array unchanged."""
    if x.sharding.is_fully_replicated:
        return x
    shards = [s.data if s.device == here else s.data * math.nan for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def of_device(x, device):
    return next(np.asarray(s.data, np.float32) for s in x.addressable_shards if s.device == device)


@pytest.mark.usefixtures("compiled_in_a_hurry")
@pytest.mark.parametrize(("strategy", "text"), [("ring", "whole"), ("heads=2,gather=2", "documents")])
def test_with_stand_ins_a_member_computes_from_nothing_but_its_own(strategy, text):
    program = CASE._replace(text=text).program("striped", rank=3, strategy=strategy)
    batch = step._batch(program)
    weights, inputs = program.fresh_state().weights, program.place(batch)
    with mock.at_home(step._mask(program, batch)):
        run = jax.jit(program.loss_and_gradients).lower(weights, inputs).compile()
    text = run.as_text()
    sent = COLLECTIVES.findall(text)
    assert {operation for _, operation in sent} == {"all-reduce"}
    sizes = [math.prod(map(int, dims.split(","))) for shape, _ in sent for dims in re.findall(r"\[([\d,]+)\]", shape)]
    assert max(sizes) == 128, "only vectors and scalars, which only the optimiser uses"
    loss, _, gradients = run(weights, inputs)
    assert loss == pytest.approx(math.log(320), rel=0.1)
    here = program.mesh.devices[0, 3]
    assert here == CASE.devices[0]
    poisoned = jax.tree.map(lambda x: only_here(x, here), weights)
    loss, _, again = run(poisoned, inputs)
    assert math.isnan(loss), "the loss is a sum over devices, and the others hold NaN"
    for (path, g), same in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(again), strict=True):
        if not path[-1].key.endswith("norm"):
            own, alone = (of_device(x, here) for x in (g, same))
            assert np.isfinite(own).all(), path
            assert np.abs(own).max() > 0, path
            np.testing.assert_array_equal(own, alone)


@pytest.mark.usefixtures("compiled_in_a_hurry")
def test_the_step_without_attention_keeps_all_products_of_weights(monkeypatch):
    """All matrix products remain even with one chunk and as many key as query heads, the easiest case to optimise."""
    monkeypatch.setitem(PRESETS, "debug", dataclasses.replace(PRESETS["debug"], kv_heads=4))
    case = CASE._replace(members=2, chunk=128, devices=CASE.devices[:2])
    program = case.program("contiguous", rank=1, attend=step.without_attention)
    weights, inputs = program.fresh_state().weights, program.place(step._batch(program))
    with mock.at_home():
        whole = jax.jit(case.program("contiguous", rank=1).loss_and_gradients).lower(weights, inputs)
        lowered = jax.jit(program.loss_and_gradients).lower(weights, inputs)
    assert lowered.cost_analysis()["flops"] < whole.cost_analysis()["flops"]
    run = lowered.compile()
    text = run.as_text()
    assert "collective-permute" not in text
    layer, loss = 3 * 7, 3  # one forward, two backward; with enough memory nothing is recomputed
    assert text.count(" dot(") >= layer + loss
    _, _, gradients = run(weights, inputs)
    assert all(np.abs(gradients["layers"][name]).max() > 0 for name in ("query", "key", "value", "output"))


def cheap_attention(q, k, v, *, axis_name, layout, length, **_):
    """Only send keys and values around the ring: its real kernels take long to compile."""
    problem = Problem(axis_name, CASE.members, layout, length, length, KERNELS["xla"], 1.0)
    return step.without_attention(q, *exchange.send(problem, (k, v), *problem.rings(sa.causal()), 1), None)


@pytest.mark.usefixtures("compiled_in_a_hurry")
def test_a_row_has_the_times_of_one_program_and_the_memory_and_transfers_of_another(monkeypatch):
    monkeypatch.setattr(llama, "attention_shard", cheap_attention)
    row = next(step.measure_case(CASE._replace(room=1e9)))
    case = {"preset": "debug", "length": 256, "members": 4, "layout": "contiguous()", "rank": 3}
    assert {name: row[name] for name in case} == case
    assert row["fits"]
    assert row["attention"]
    assert len(row["samples"]) == 3
    assert sorted(row["samples"])[1] == row["seconds"] > 0
    assert row["tokens_per_second_per_gpu"] == pytest.approx(64 / row["seconds"])
    assert row["mfu"] is None, "the peak FLOP/s of a CPU is unknown"
    assert row["transfers"] == 4, "k, v and their gradients; nothing is recomputed"
    hop = 2 * 64 * 2 * 32 * 2  # k and v of 64 tokens, 2 heads of 32, in bf16
    assert row["wire_bytes"]["keys and values, forward"] == 2 * 3 * hop, "2 layers, 3 hops"
    state = 3 * 4 * sum(math.prod(shape) for shape in jax.tree.leaves(PRESETS["debug"].shapes, is_leaf=is_shape))
    assert state / 4 < row["needed_bytes"] < 20 * state
    rate = hardware_of("cpu").interconnect
    assert sum(row["wire_bytes"].values()) / rate < row["planned_transfer_seconds"] < 0.1, "plus 20 µs per message"


def is_shape(x):
    return isinstance(x, tuple)


def stub(monkeypatch, timed):
    monkeypatch.setattr(step.memory, "needed", lambda program: REAL["needed_bytes"])
    monkeypatch.setattr(step, "_real", lambda program: REAL)
    monkeypatch.setattr(step, "_fresh", lambda program: lambda: None)
    monkeypatch.setattr(step, "timed", timed)


def test_every_layout_and_the_step_without_attention_are_measured(monkeypatch):
    stub(monkeypatch, lambda program, fresh: {"seconds": 1.0 if program.attend is None else 0.25, "samples": []})
    rows = list(step.measure_case(CASE._replace(room=100.0)))
    measured = [(row["layout"], row["rank"], row["attention"]) for row in rows]
    striped = repr(CASE.program("striped", 0).compute.layout)
    assert set(measured) == {("contiguous()", 3, True), (striped, 3, True), (striped, 0, True), (striped, 3, False)}
    assert len(measured) == 4
    assert [row["seconds"] for row in rows] == [1.0 if row["attention"] else 0.25 for row in rows]
    assert [row.get("needed_bytes") for row in rows] == [100 if row["attention"] else None for row in rows]


def test_layouts_of_a_step_are_those_that_are_asked_for(monkeypatch):
    stub(monkeypatch, lambda program, fresh: {"seconds": 1.0, "samples": []})
    rows = list(step.measure_case(CASE._replace(layouts=("zigzag", "striped(2)"))))
    measured = [(row["layout"], row["rank"], row["attention"]) for row in rows]
    assert measured[:2] == [("zigzag()", 3, True), ("striped(2)", 3, True)]
    assert measured[2:] == [("striped(2)", 3, False), ("zigzag()", 0, True), ("striped(2)", 0, True)]
    assert [line["layout"] for line in step.summary(rows)] == ["zigzag()", "striped(2)"]


@pytest.mark.parametrize(("room", "remat"), [(1e9, "none"), (1e6, "full")])
def test_a_step_takes_the_memory_of_the_gpu_that_is_here(monkeypatch, room, remat):
    stub(monkeypatch, lambda program, fresh: {"seconds": 1.0, "samples": []})
    assert {row["remat"] for row in step.measure_case(CASE._replace(chunk="auto", room=room))} == {remat}


def test_a_step_that_the_compiler_finds_too_large_keeps_less(monkeypatch):
    stub(monkeypatch, lambda program, fresh: {"seconds": 1.0, "samples": []})
    monkeypatch.setattr(step.memory, "needed", lambda program: 10**10 if program.config.remat == "none" else 1)
    rows = list(step.measure_case(CASE._replace(chunk="auto", room=1e9)))
    assert {(row["remat"], row["fits"]) for row in rows} == {("qkv", True)}


def test_steps_are_measured_with_every_strategy_once(monkeypatch):
    stub(monkeypatch, lambda program, fresh: {"seconds": 1.0, "samples": []})
    case = CASE._replace(strategies=("ring", "heads", "auto", "heads=4"), room=100.0)
    rows = list(step.measure_case(case))
    settled = case.program("striped", 3, strategy="auto").config.strategy
    assert parse_strategy(settled) != AUTO, "auto becomes a concrete strategy"
    strategies = {"ring", "heads", "heads=4", settled}
    assert {row["strategy"] for row in rows if row["attention"]} == strategies
    assert sum(not row["attention"] for row in rows) == 1, "a step without attention has no strategy"
    assert len(list(step.summary(rows))) == 2 * len(strategies)


def test_documents_of_a_step_are_those_of_a_plan():
    case = CASE._replace(length=8192, text="documents")
    program = case.program("striped", 3)
    batch, mask = step._batch(program), packed(8192)
    np.testing.assert_array_equal(sa.documents(batch.segments).lo, mask.lo)
    device = types.SimpleNamespace(device_kind="NVIDIA H200")
    whole, parts = (
        c._replace(devices=[device] * 4).rates(1.0, True)["mfu"] for c in (CASE._replace(length=8192), case)
    )
    assert parts < whole, "pairs across documents are not useful work"


def test_a_step_that_does_not_fit_says_so_and_what_it_needs(monkeypatch):
    def full(program, fresh):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes.")

    stub(monkeypatch, full)
    for limit in (99, 100):
        rows = list(step.measure_case(CASE._replace(room=float(limit))))
        assert len(rows) == 4
        assert all(row["fits"] is False and row["needed_bytes"] == 100 for row in rows)
        assert [line["fits"] for line in step.summary(rows)] == [False, False]


def test_any_other_failure_is_one(monkeypatch):
    def broken(program, fresh):
        raise jax.errors.JaxRuntimeError("INTERNAL: cuDNN is not well.")

    stub(monkeypatch, broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="not well"):
        list(step.measure_case(CASE))


@pytest.mark.parametrize(
    ("taken", "seconds", "samples"),
    [([9.0, 1.5, 1.7, 1.6], 1.6, [1.5, 1.7, 1.6]), ([50.0, 40.0], 40.0, [40.0])],
)
def test_long_steps_are_sampled_once_after_one_to_warm_up(taken, seconds, samples):
    clock = iter(taken)
    found = step.sample(lambda: next(clock))
    assert found == {"seconds": seconds, "samples": samples, "warm_up_seconds": taken[0]}
    assert next(clock, None) is None


def test_mfu_counts_the_useful_work_of_one_member():
    device = types.SimpleNamespace(device_kind="NVIDIA H200")
    case = step.Case("1b", 65_536, 8, 8192, "cudnn", [device] * 8)
    layer = 4 * 2048**2 + 3 * 2048 * 5504 + 2 * 2048
    matrices = 6 * (22 * layer + 2048 + 2048 * 32_000) * 65_536
    attention = 12 * 22 * 2048 * 65_536 * 65_537 // 2
    assert case.rates(2.0, attention=False)["mfu"] == pytest.approx(matrices / 8 / 2.0 / 989e12)
    rates = case.rates(2.0, attention=True)
    assert rates["mfu"] == pytest.approx((matrices + attention) / 8 / 2.0 / 989e12)
    assert rates["tokens_per_second_per_gpu"] == 4096


def test_a_summary_of_steps_says_what_attention_takes_and_what_striping_is_worth():
    def row(layout, rank, seconds, **more):
        rates = {"tokens_per_second_per_gpu": 256 / seconds, "mfu": 0.1 / seconds}
        return {**ROW, "layout": layout, "rank": rank, "seconds": seconds, "samples": [seconds], **rates, **more}

    rows = [row("contiguous()", 3, 1.5, **REAL), row("striped(1)", 3, 0.9, **REAL)]
    first = next(step.summary(rows[:1]))
    assert (first["over_contiguous"], first["attention_share"], first["step_bound"]) == (1, None, None)
    rows += [row("striped(1)", 3, 0.5, attention=False), row("striped(1)", 0, 1.0, **REAL)]
    contiguous, striped = step.summary(rows)
    assert contiguous["over_contiguous"] == 1
    assert (striped["rank"], striped["seconds"], striped["tokens_per_second_per_gpu"]) == (0, 1.0, 256)
    assert striped["over_contiguous"] == 1.5
    assert striped["attention_share"] == 0.5
    assert contiguous["attention_share"] == pytest.approx(2 / 3)
    assert striped["outside_attention_seconds"] == 0.5
    assert striped["bound"] == 1.75
    assert striped["step_bound"] == pytest.approx(1.5 / (0.5 + 1 / 1.75))
    assert (striped["transfers"], striped["hidden"], striped["needed_bytes"]) == (9, 7, 100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(loss=5.2), "loss of a step, cudnn against xla, is wrong by 4.0e-02"),
        (dict(gradient_norm=math.nan), "gradient_norm of a step, cudnn against xla, is wrong by nan"),
        (dict(gradients={"query": np.array([3.0, 4.8])}), "query of a step, cudnn against xla, is wrong"),
    ],
)
def test_answers_that_differ_stop_the_suite(change, message):
    truth = {"loss": 5.0, "gradient_norm": 1.0, "gradients": {"query": np.array([3.0, 4.0])}}
    close = {**truth, "loss": 5.05, "gradients": {"query": np.array([3.0, 4.1])}}
    assert step.compare(close, truth, "cudnn")["worst"] == pytest.approx(0.02)
    with pytest.raises(RuntimeError, match=message):
        step.compare({**close, **change}, truth, "cudnn")


@pytest.mark.usefixtures("here")
def test_a_worker_hands_over_results_one_by_one(monkeypatch):
    monkeypatch.setattr(cudnn, "unavailable", lambda: None)
    seen = []

    def count(most):
        for i in range(most):
            seen.append(i)
            yield {"row": i}
        raise RuntimeError("it broke")

    results = mock.results(count, most=2)
    assert next(results) == {"row": 0}
    assert seen == [0], "results are computed on demand"
    assert next(results) == {"row": 1}
    with pytest.raises(RuntimeError, match="it broke"):
        next(results)


def test_the_suite_step_writes_every_row_and_a_summary(capsys, monkeypatch, tmp_path):
    path = tmp_path / "new" / "step.json"
    rates = {"seconds": 1.5, "samples": [1.5], "tokens_per_second_per_gpu": 8192 / 1.5, "mfu": 0.5}
    row = {**ROW, "length": 65_536, "members": 8, "layout": "contiguous()", "rank": 7, **rates, **REAL}

    shared = {"strategies": ("auto",), "layouts": ("contiguous", "zigzag"), "text": "whole"}

    def results(task, mocked=None, **options):
        if task is step.check:
            where = {"presets": ("1b",), "members": (8,), "lengths": (65_536,)}
            assert options == {**where, "kernels": ("cudnn",), **shared}
            yield {"worst": 0.01, "gpu": {"name": "NVIDIA H200"}}
            return
        assert (task, mocked) == (step.measure, 8)
        case = {"preset": "1b", "length": 65_536, "members": 8, "chunk": 4096, "kernel": "cudnn"}
        assert options == {**case, **shared}
        yield row
        assert json.loads(path.read_text())["steps"] == [row], "finished rows are saved before the next one is measured"
        yield {**row, "layout": "striped(1)", "seconds": 1.0}

    monkeypatch.setattr(mock, "results", results)
    options = ["--lengths", "65536", "--chunk", "4096", "--strategies", "auto", "--layouts", "contiguous", "zigzag"]
    assert main(["bench", "step", *options, "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["benchmark"] == "step"
    assert result["gpu"]["name"] == "NVIDIA H200"
    configuration = {"presets": ["1b"], "members": [8], "lengths": [65_536], "chunk": 4096, "batch": 1}
    assert configuration.items() <= result["configuration"].items()
    assert [line["over_contiguous"] for line in result["summary"]] == [1.0, 1.5]
    shown = capsys.readouterr().out
    assert "layout contiguous(), rank 7, seconds 1.5, tokens_per_second_per_gpu 5461, mfu 0.5" in shown
    assert shown.endswith(f"{path}\n")


def test_a_model_that_the_kernel_cannot_do_is_refused_before_anything_is_measured(monkeypatch):
    wide = dataclasses.replace(PRESETS["1b"], heads=8, kv_heads=8)  # head dim 256
    monkeypatch.setitem(PRESETS, "1b", wide)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    message = "--presets 1b --strategies ring: Kernel 'cudnn' cannot do this: It needs a head dim"
    with pytest.raises(UsageError, match=message) as caught:
        next(step.check(["1b"], [8], [65_536], ["cudnn"], ["ring"], ["contiguous", "striped"], "whole"))
    assert "\n" not in str(caught.value)

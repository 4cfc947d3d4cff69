"""Memory budget: a step keeps as much for its backward pass, and uses as large chunks, as fits on a device."""

import dataclasses
import itertools
import os
import types

import jax
import numpy as np
import pytest

import striped_attention as sa
from striped_attention import cli
from striped_attention.models.llama import REMAT
from striped_attention.planning import budget
from striped_attention.planning.cost import estimate, matrix_work
from striped_attention.runtime.hardware import HARDWARE
from striped_attention.training import memory
from striped_attention.training.config import TrainConfig
from striped_attention.training.settle import settle
from striped_attention.training.step import Program

RUN = TrainConfig(preset="1b", sequence_length=262_144, strategy="ring")
MESH = {"data": 1, "sequence": 8}


def test_options_go_from_the_fastest_to_the_most_frugal():
    found = budget.options("auto", None, 32_768, "gpu")
    assert found[:2] == [("unrolled", 32_768), ("none", 32_768)]
    assert found[-1] == ("full", 1024)
    assert sorted(dict(found), key=REMAT.index) == list(dict(found)), "kinds that keep more come first"
    assert ("attention", 1024) in found
    assert ("qkv", 1024) not in found, "small chunks cost more than recomputing the inputs of attention"
    assert budget.options("full", None, 20_000, "gpu") == [("full", size) for size in (8192, 4096, 2048, 1024)]
    assert budget.options("qkv", None, 3000, "gpu") == [("qkv", 3000), ("qkv", 1500)]
    assert budget.options("auto", 512, 20_000, "gpu") == [(kind, 512) for kind in REMAT]
    assert budget.options("attention", 512, 20_000, "gpu") == [("attention", 512)]
    for platform in ("cpu", "tpu"):
        assert budget.options("auto", None, 100, platform) == [(kind, 100) for kind in REMAT if kind != "unrolled"]


def test_what_needs_less_work_needs_more_memory():
    model = RUN.model
    kinds = [dataclasses.replace(RUN, remat=kind, chunk=32_768) for kind in REMAT]
    needs = [estimate(kind, MESH).total_memory for kind in kinds]
    work = [matrix_work(model, kind) for kind in REMAT]
    assert all(a > b for a, b in itertools.pairwise(needs))
    assert work[0] == 1
    assert all(a <= b for a, b in itertools.pairwise(work))


@pytest.mark.parametrize("gigabytes", [1, 12, 20, 40, 60, 200])
def test_the_first_option_that_fits_is_taken(gigabytes):
    found = budget.within(RUN, MESH, gigabytes * 1e9, "gpu")
    pairs = budget.options("auto", None, 32_768, "gpu")
    needs = {
        pair: estimate(dataclasses.replace(RUN, remat=pair[0], chunk=pair[1]), MESH).total_memory for pair in pairs
    }
    fitting = [pair for pair in pairs if needs[pair] <= gigabytes * 1e9]
    assert (found.remat, found.chunk) == (fitting[0] if fitting else pairs[-1])


def test_a_roomy_gpu_keeps_everything_and_a_small_one_is_frugal():
    one = TrainConfig(preset="1b", sequence_length=32_768, strategy="ring")
    on = lambda run, kind, mesh: settle(run, mesh, False, "gpu", kind)  # noqa: E731
    roomy = on(one, "NVIDIA H200", {"data": 1, "sequence": 1})
    assert (roomy.remat, roomy.chunk) == ("unrolled", 32_768)
    long = dataclasses.replace(one, preset="7b", sequence_length=524_288)
    tight = on(long, "NVIDIA H100", MESH)
    assert tight.remat in ("attention", "full")
    assert estimate(tight, MESH).total_memory <= 0.9 * HARDWARE["h100"].memory
    half = settle(dataclasses.replace(one, memory=0.2), {"data": 1, "sequence": 1}, False, "gpu", "NVIDIA H200")
    assert half.remat not in ("unrolled", "none")
    assert settle(roomy, {"data": 1, "sequence": 1}, False, "gpu", "NVIDIA A100") == roomy, "explicit settings are kept"


def test_a_program_that_needs_more_than_estimated_makes_room_for_a_smaller_one():
    options = dict(layers=4, dim=32, ffn=256, heads=4, kv_heads=2, vocabulary=40, dtype="float32", strategy="ring")
    asked = TrainConfig(sequence_length=4096, **options)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "sequence"))
    roomy = Program(asked, mesh)
    assert roomy.config.remat == "none"
    needs, said = float(memory.needed(roomy)), []
    assert memory.fitting(roomy, asked, needs, said.append) is roomy
    assert not said
    smaller = memory.fitting(roomy, asked, 0.7 * needs, said.append)
    assert memory.needed(smaller) <= 0.7 * needs
    assert smaller.config.remat != "none"
    assert "of memory per device: trying --remat" in said[0]
    fixed = dataclasses.replace(asked, remat="none", chunk=2048)
    assert memory.fitting(roomy, fixed, 1.0, said.append) is roomy, "the options are fixed"
    assert "more than the 1 B that --memory allows, and no setting that needs less is left" in said[-1]


@pytest.mark.parametrize(
    ("platform", "stats", "expected"),
    [
        ("gpu", {"bytes_limit": 7_000}, 7_000),
        ("tpu", {"bytes_limit": 7_000}, 3_500),
        ("gpu", None, 0.5 * HARDWARE["h200"].memory),
    ],
)
def test_what_a_run_may_use_of_an_accelerator(platform, stats, expected, monkeypatch):
    """On a GPU, `bytes_limit` already includes the fraction that JAX received at startup."""
    device = types.SimpleNamespace(platform=platform, device_kind="NVIDIA H200", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert memory.available(0.5) == expected


def test_cpu_devices_share_the_memory_of_the_machine(monkeypatch):
    whole = memory.available(1.0) * jax.local_device_count()
    assert whole == pytest.approx(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    monkeypatch.setattr(memory, "_of_everybody", lambda number: np.array([number, number, number + 1]))
    assert memory.available(0.9) == pytest.approx(0.9 * whole / 2 / jax.local_device_count()), "2 of 3 processes here"


def test_jax_may_take_as_much_of_a_gpu_as_a_run_may_use(monkeypatch):
    monkeypatch.delenv(memory.FRACTION, raising=False)
    memory.reserve(0.9)
    assert os.environ[memory.FRACTION] == "0.9"
    memory.reserve(0.5)
    assert os.environ[memory.FRACTION] == "0.9", "the environment takes precedence"


def test_the_dry_run_and_the_plan_say_what_was_chosen(capsys):
    run = "--preset 1b --length 262144 --mesh sequence=8 --dry-run"
    assert cli.main(["train", *run.split()]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "for the backward pass (remat " in said
    assert "tokens at a time" in said
    assert "It fits: " in said
    assert "that --memory 0.9 allows of a device with 80.00 GB (assumed: h100; --hardware sets another one)" in said
    assert cli.main(["train", *run.split(), "--preset", "7b", "--length", "4194304"]) == 0
    assert "It does not fit: " in " ".join(capsys.readouterr().out.split())
    for name, size in (("h200", "141.00"), ("v4", "34.40"), ("cpu", "12.00")):
        assert cli.main(["train", *run.split(), "--hardware", name]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"planned for 8 × {name}" in said
        assert f"allows of a device with {size} GB ({name})" in said
    plan = sa.plan(8, 262_144, hardware="h200", model="1b")
    assert plan.best.setting.remat in REMAT
    assert plan.best.setting.chunk
    frugal = sa.plan(8, 262_144, hardware="h200", model="1b", remat="full")
    assert frugal.best.step_seconds > plan.best.step_seconds
    assert sum(frugal.best.memory.values()) < sum(plan.best.memory.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "0"], "--memory must be above 0 and at most 1, a fraction of a device's memory; got 0.0."),
        (["--memory", "1.5"], "--memory must be above 0 and at most 1"),
        (["--accumulate", "0"], "--accumulate must be at least 1; got 0."),
        (
            ["--accumulate", "2"],
            "--batch must be a multiple of 2, the mesh's data axis (1) times --accumulate (2); got 1.",
        ),
    ],
)
def test_bad_input(options, message, capsys):
    assert cli.main(["train", *options]) == 2
    assert capsys.readouterr().err.startswith(f"striped: {message}")

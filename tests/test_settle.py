"""`--strategy auto`: what it chooses, for the devices of this machine and for others."""

import dataclasses
import re

import numpy as np
import pytest

import striped_attention as sa
from striped_attention import cli
from striped_attention.errors import UsageError
from striped_attention.kernels.cudnn import binding
from striped_attention.models.config import PRESETS
from striped_attention.planning.cost import estimate
from striped_attention.strategies.choice import CLOSE
from striped_attention.strategies.strategy import candidates
from striped_attention.training import settle as settle_module
from striped_attention.training import trainer
from striped_attention.training.config import TrainConfig
from striped_attention.training.settle import settle

RUN = TrainConfig(preset="llama3-8b", sequence_length=65_536, strategy="auto")


def settled(config, devices, documents, kind="NVIDIA H200", platform="gpu"):
    return settle(config, {"data": 1, "sequence": devices}, documents, platform, kind).strategy


@pytest.mark.filterwarnings("ignore::striped_attention.SlowKernelWarning")
def test_what_auto_takes(monkeypatch):
    monkeypatch.setattr(binding, "EMULATED", True)  # as if cuDNN were available
    assert settled(RUN, 8, documents=False) == "heads=8"
    assert settled(RUN, 8, documents=True) == "heads=8"
    assert settled(RUN, 1, documents=True, kind="cpu", platform="cpu") == "ring"
    # Rings of groups would have stripes of several tokens, which cuDNN does not support.
    striped = dataclasses.replace(RUN, layout="striped", kernel="cudnn")
    assert settled(striped, 16, documents=False) in ("ring", "heads=16")
    named = dataclasses.replace(RUN, strategy="gather")
    assert settled(named, 8, documents=False) == "gather"


def test_what_a_kernel_cannot_do_is_not_taken(monkeypatch):
    monkeypatch.setattr(binding, "EMULATED", True)
    assert not settled(dataclasses.replace(RUN, kernel="cudnn"), 8, documents=False).startswith("gather")
    with pytest.raises(UsageError, match=r"--strategy auto: no strategy is possible\. ring, heads=8: With contiguous"):
        settled(dataclasses.replace(RUN, kernel="cudnn"), 8, documents=True)


def test_training_with_auto_says_what_it_took(capsys):
    options = "--cpu-devices 8 --length 256 --steps 1 --layers 1 --dim 32 --ffn 32 --heads 4 --kv-heads 2"
    assert cli.main(["train", *options.split(), "--strategy", "auto"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "strategy heads=4" in text or "strategy ring" in text or "strategy gather=8" in text
    assert cli.main(["train", *options.split(), "--strategy", "auto", "--dry-run"]) == 0


LINE = (
    r"--strategy auto takes [a-z0-9=,]+: [0-9.e-]+ s per step, planned for 8 × (cpu|h100|h200) and "
    r"(documents of 1,800 tokens .median.|one document per sequence)\. "
    r"Next best: [a-z0-9=,]+ with [0-9.e-]+ s(, at most 1% faster but less simple)?\."
)


def test_training_says_why_a_strategy_was_taken_and_what_comes_next(capsys):
    """Runs and dry runs print one such line; none if the strategy was given."""
    options = "--cpu-devices 8 --length 256 --steps 1 --layers 1 --dim 32 --ffn 32 --heads 4 --kv-heads 2"
    for more in ([], ["--dry-run"]):
        assert cli.main(["train", *options.split(), *more]) == 0
        assert len(re.findall(LINE, " ".join(capsys.readouterr().out.split()))) == 1
    assert cli.main(["train", *options.split(), "--dry-run", "--strategy", "ring"]) == 0
    assert "--strategy auto" not in capsys.readouterr().out


def test_the_line_has_the_seconds_of_the_plan():
    run = dataclasses.replace(RUN, dtype="bfloat16")
    found, (line, layouts) = settled_with_reasons(run, 8)
    assert found.strategy == "heads=8"
    assert re.fullmatch(LINE, line)
    assert line.startswith("--strategy auto takes heads=8: ")
    said = [float(seconds) for seconds in re.findall(r"([0-9.]+) s", line)]
    assert said[0] <= (1 + CLOSE) * said[1]
    assert layouts.startswith(
        f"--layout auto takes contiguous(); planned time per step: contiguous() {said[0]:.3g} s, "
    )
    assert {"zigzag()", "striped(16)"} <= set(layouts.split())
    twice, (line, _) = settled_with_reasons(dataclasses.replace(run, batch=2, accumulate=2), 8)
    assert twice.strategy == "heads=8"
    assert float(re.findall(r"([0-9.]+) s", line)[0]) == pytest.approx(2 * said[0], rel=0.01), "both micro-batches"
    assert settled_with_reasons(run, 1)[1] == []


def test_the_layout_follows_the_mask_and_the_strategy(monkeypatch):
    """A ring uses zigzag for a single document and wide stripes for packed ones; a layout that is given stays."""
    monkeypatch.setattr(binding, "EMULATED", True)
    long = dataclasses.replace(RUN, sequence_length=262_144, strategy="ring")
    settle_it = lambda run, documents: settle(run, {"data": 1, "sequence": 8}, documents, "gpu", "NVIDIA H200")  # noqa: E731
    layout = lambda run, documents: settle_it(run, documents).make_layout(8, documents, "gpu")  # noqa: E731
    assert layout(long, False) == sa.zigzag()
    assert layout(long, True) == sa.striped(128)
    assert layout(dataclasses.replace(long, kernel="xla"), True) == sa.striped(1024)
    assert layout(dataclasses.replace(long, strategy="heads"), True) == sa.contiguous()
    assert layout(dataclasses.replace(long, stripe=64), True) == sa.striped(64)
    assert layout(dataclasses.replace(long, layout="contiguous"), True) == sa.contiguous()
    again = settle_it(long, True)
    assert settle_it(again, True) == again, "settling again changes nothing"


def settled_with_reasons(config, devices):
    return settle_module.settled(config, {"data": 1, "sequence": devices}, True, "gpu", "NVIDIA H200")


def test_the_line_names_what_fits_in_memory_before_what_does_not():
    def line(*found):
        return settle_module.why(sa.strategy(heads=2), [settle_module.Planned(*one) for one in found], "2 × h100")

    heads, ring, gather = (sa.strategy(**sizes) for sizes in ({"heads": 2}, {}, {"gather": 2}))
    text = "--strategy auto takes heads=2: 2 s per step, planned for 2 × h100. "
    assert line((gather, 1.0, False), (heads, 2.0, True), (ring, 3.0, True)) == text + "Next best: ring with 3 s."
    assert line((heads, 2.0, True)) == text + "No other strategy was possible."
    close = line((gather, 1.99, True), (heads, 2.0, True))
    assert close == text + "Next best: gather=2 with 1.99 s, at most 1% faster but less simple."
    assert "with 1 s (does not fit in memory)." in line((gather, 1.0, False), (heads, 2.0, True))


@pytest.mark.parametrize(
    ("options", "platform"),
    [
        ("--kernel cudnn --strategy gather", "gpu"),
        ("--kernel cudnn --strategy ring", "gpu"),
        ("--kernel pallas_tpu --strategy ring", "gpu"),
        ("--kernel hopper --strategy ring --cpu-devices 8", "cpu"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(options, platform, capsys, monkeypatch):
    """The message is the same, for the platform that is planned for; --data has documents."""
    monkeypatch.setattr(binding, "EMULATED", True)
    words = f"--heads 8 --kv-heads 8 --mesh sequence=8 {options}".split()
    assert cli.main(["train", *words, "--dry-run"]) == 2
    said = capsys.readouterr().err
    kernel, strategy = words[words.index("--kernel") + 1], words[words.index("--strategy") + 1]
    run = TrainConfig(heads=8, kv_heads=8, kernel=kernel, strategy=strategy)
    with pytest.raises(UsageError) as refused:
        trainer.choose(run, {"data": 1, "sequence": 8}, True, platform)
    assert said == f"striped: {refused.value}\n"


def test_a_dry_run_lets_cudnn_train_on_tokens_without_documents(capsys, tmp_path):
    np.save(tmp_path / "tokens.npy", np.zeros(100_000, np.uint16))
    options = f"--length 8192 --mesh sequence=8 --kernel cudnn --dry-run --data {tmp_path}/tokens.npy"
    assert cli.main(["train", *options.split()]) == 0
    assert cli.main(["train", *options.split(), "--strategy", "ring"]) == 0
    capsys.readouterr()
    assert cli.main(["train", *options.split(), "--strategy", "ring", "--end-token", "0"]) == 2
    assert "not documents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            "rings",
            "--strategy: A strategy is written like ring, gather, heads, heads=2 or heads=2,inner=4; got",
        ),
        (
            "heads=3",
            "--strategy heads=3: heads · gather · inner of a strategy must divide the 8 devices of the",
        ),
        (
            "heads",
            "--strategy heads: A strategy must divide a device's query heads equally: 4 heads cannot be",
        ),
    ],
)
def test_strategies_that_cannot_be(strategy, message, capsys):
    options = ["--cpu-devices", "8", "--heads", "4", "--kv-heads", "2", "--strategy", strategy]
    assert cli.main(["train", *options]) == 2
    assert capsys.readouterr().err.startswith(f"striped: {message}")


def test_dry_runs_count_what_a_strategy_sends(capsys):
    said = {}
    for strategy in ("ring", "heads=8", "gather"):
        options = "--preset llama3-8b --length 65536 --mesh sequence=8 --dry-run"
        assert cli.main(["train", *options.split(), "--strategy", strategy]) == 0
        said[strategy] = capsys.readouterr().out
    assert "sent: heads, all-to-all" in said["heads=8"]
    assert "heads, all-to-all" not in said["ring"] + said["gather"]
    assert sa.plan(8, 65_536, hardware="h200").fastest.strategy == sa.strategy(heads=8)


def test_auto_plans_for_the_dtype_and_the_kernels_of_the_run(monkeypatch, caplog):
    """Only `xla` supports float32, and on an A100 only `xla` is deterministic, so such steps take longer."""
    monkeypatch.setattr(binding, "EMULATED", True)
    seconds, h200 = [], "NVIDIA H200"
    for options, kind in (({}, h200), ({"dtype": "float32"}, h200), ({"deterministic": True}, "NVIDIA A100")):
        caplog.clear()
        with caplog.at_level("INFO", "striped_attention"):
            settled(dataclasses.replace(RUN, **options), 8, documents=False, kind=kind)
        seconds.append(float(caplog.text.split("heads=8 ")[-1].split(" s")[0]))
    assert min(seconds[1:]) > 2 * seconds[0]


def test_the_log_names_strategies_that_do_not_fit(caplog):
    with caplog.at_level("INFO", "striped_attention"):
        settle(RUN, {"data": 1, "sequence": 8}, False, "gpu", "NVIDIA H200", available=1e9)
    assert "ring " in caplog.text
    assert caplog.text.count("(does not fit in memory)") == len(candidates(8, 32, 8))


def test_costs_are_of_what_runs_under_a_window(monkeypatch):
    """Under a short window, gather becomes a hop to the next device."""
    monkeypatch.setitem(PRESETS, RUN.preset, dataclasses.replace(PRESETS[RUN.preset], window=1024))
    run = dataclasses.replace(RUN, layout="contiguous", strategy="gather")
    run = dataclasses.replace(run, remat="attention")
    costs = [estimate(dataclasses.replace(run, strategy=s), {"data": 1, "sequence": 8}) for s in ("gather", "ring")]
    assert costs[0] == costs[1]
    assert costs[0].hops == 1
    assert not run.request(sa.contiguous(), 8, False, "gpu").gathered


def mixed(**changes):
    """RUN with a sliding window in all but every fourth layer."""
    model = dataclasses.replace(PRESETS["llama3-8b"], window=4096, full_every=4)
    return dataclasses.replace(RUN, preset=None, shape=dataclasses.replace(model, **changes))


def test_costs_are_sums_over_the_layers_of_both_kinds():
    mesh = {"data": 1, "sequence": 8}
    runs = [mixed(), mixed(full_every=None), mixed(full_every=None, window=None)]
    both, window, full = (
        estimate(dataclasses.replace(run, strategy="ring", remat="attention", chunk=1024, layout="contiguous"), mesh)
        for run in runs
    )
    for what in ("keys and values, forward", "keys and values, backward", "gradients of keys and values"):
        assert 0 < window.sent[what] < full.sent[what]
        assert 4 * both.sent[what] == 3 * window.sent[what] + full.sent[what]
    assert 4 * both.attention_flops == 3 * window.attention_flops + full.attention_flops
    assert window.attention_flops < full.attention_flops / 6
    assert both.hops == full.hops
    what = "attention and communication"
    assert both.memory[what] == max(window.memory[what], full.memory[what]), "the larger of the two layers"


def test_auto_adds_up_the_layers_of_both_kinds(caplog):
    found = []
    for run in (mixed(), mixed(full_every=None), mixed(full_every=None, window=None)):
        caplog.clear()
        with caplog.at_level("INFO", "striped_attention"):
            run = dataclasses.replace(run, remat="attention", chunk=1024, layout="striped")
            settle(run, {"data": 1, "sequence": 8}, True, "gpu")
        found.append(
            {name: float(seconds) for name, seconds in re.findall(r"([a-z=,0-9]+) ([0-9.e-]+) s", caplog.text)}
        )
    both, window, full = found
    for name in both.keys() & window.keys() & full.keys():
        assert both[name] == pytest.approx((3 * window[name] + full[name]) / 4, rel=0.01), name
    assert full["ring"] > window["ring"]


@pytest.mark.filterwarnings("ignore::striped_attention.SlowKernelWarning")
def test_a_kernel_must_do_every_kind_of_layer(monkeypatch):
    monkeypatch.setattr(binding, "EMULATED", True)
    sizes, options = {"data": 1, "sequence": 1}, dict(strategy="ring", dtype="bfloat16", kernel="cudnn")
    choose = lambda run, **more: trainer.choose(dataclasses.replace(run, **options, **more), sizes, False, "gpu")  # noqa: E731
    assert choose(mixed()) == "cudnn"
    with pytest.raises(UsageError, match="It does not support softcap"):
        choose(mixed(softcap=50.0))

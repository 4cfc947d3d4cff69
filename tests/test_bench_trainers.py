"""`striped bench trainers`: our trainer and a plain PyTorch one start from equal weights and keep equal losses."""

import functools
import json
import types

import numpy as np
import pytest
from striped_bench.bench import trainers
from striped_bench.bench.workers import WorkerError

from striped_attention.cli import main
from striped_attention.core.mask import packed
from striped_attention.models.config import PRESETS, ModelConfig
from striped_attention.runtime.record import version


class Here:
    """A stand-in for `workers.Team` that runs its one rank in this process."""

    def __init__(self, kind, cores, **job):
        self.held = kind(rank=0, ranks=1, port=0, **job)

    def __enter__(self):
        return types.SimpleNamespace(ask=lambda method, *arguments: [getattr(self.held, method)(*arguments)])

    def __exit__(self, *_):
        return None


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(PRESETS, "debug", ModelConfig(layers=2, dim=32, ffn=48, heads=4, kv_heads=2, vocabulary=60))
    monkeypatch.setattr(trainers, "Team", Here)
    monkeypatch.setattr(trainers, "SCHEDULE", dict(learning_rate=1e-2))
    monkeypatch.setattr(trainers, "packed", functools.partial(packed, median=30))


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("text", ["whole", "documents"])
def test_losses_are_those_of_plain_torch(text, capsys):
    ours, theirs = trainers.compare("debug", 128, text, rounds=2)
    assert ours["loss_difference"] < 1e-5
    assert ours["losses"][-1] < ours["losses"][0] - 0.2, "the loss must fall"
    assert (ours["trainer"], theirs["trainer"], theirs["over_torch"]) == ("striped", "torch", 1)
    assert all(row["fits"] and len(row["samples"]) == 2 for row in (ours, theirs))
    assert (ours["remat"], ours["kernel"], ours["device"]) == ("none", "xla", "cpu")
    shown = capsys.readouterr().out
    stages = [shown.index(f"{name}, debug, 128 tokens, {text}: compiling") for name in ("striped", "torch")]
    assert stages[0] < shown.index("20 checked steps") < shown.index("timed steps") < stages[1]


@pytest.mark.usefixtures("tiny")
def test_ours_takes_the_memory_that_there_is_as_striped_train_does(monkeypatch):
    """With almost no memory available, everything is recomputed."""
    monkeypatch.setattr(trainers.memory, "available", lambda share: 1.0)
    monkeypatch.setattr(trainers, "CHECKED", 1)
    assert next(trainers.compare("debug", 128, "whole", rounds=1))["remat"] == "full"


class Told:
    """Trainers with fixed answers; torch runs out of memory unless `fits` is "always" or names an enabled option."""

    losses = [1.0] * 22
    fits = "recompute"

    def __init__(self, kind, cores, **job):
        self.kind, self.job = kind, job

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def ask(self, method, *arguments):
        torch = self.kind is trainers.Torch
        if method == "train" and torch and not (self.fits == "always" or self.job.get(self.fits)):
            raise WorkerError("OutOfMemoryError: CUDA out of memory. Tried to allocate 5 GiB.")
        if method == "train":
            losses = self.losses if torch else [1.0] * 22
            return [(losses[slice(*arguments)], [2.0] * 20)]
        prepared = {"dtype": "bfloat16", "device": "NVIDIA H200", "recompute": self.job.get("recompute", False)}
        return [{"prepare": prepared, "memory": 9}[method]]


def test_trainers_that_disagree_are_not_compared(monkeypatch):
    monkeypatch.setattr(trainers, "Team", Told)
    monkeypatch.setattr(Told, "fits", "always")
    monkeypatch.setattr(Told, "losses", [1.0] * 19 + [1.02] * 3)
    with pytest.raises(RuntimeError, match=r"(?s)The loss of a step .* is wrong by 2.0e-02, more than 0.01"):
        list(trainers.compare("debug", 128, "whole", rounds=2))


@pytest.mark.parametrize(("fits", "over"), [("recompute", 1.0), ("never", None)])
def test_torch_without_enough_memory_recomputes_and_never_loses_our_row(fits, over, monkeypatch, tmp_path):
    monkeypatch.setattr(trainers, "Team", Told)
    monkeypatch.setattr(Told, "fits", fits)
    path = tmp_path / "trainers.json"
    assert main(["bench", "trainers", "--presets", "3b", "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    ours, theirs = result["trainers"]
    assert (ours["fits"], ours["tokens_per_second"], ours.get("over_torch")) == (True, 32768 / 2, over)
    assert (theirs["fits"], theirs["recompute"], theirs.get("over_torch")) == (fits == "recompute", True, over)
    assert result["gpu"]["name"] == "NVIDIA H200"
    assert result["versions"]["torch"] == version("torch")


def test_our_row_is_there_before_torch_starts(monkeypatch):
    monkeypatch.setattr(trainers, "Team", Told)
    rows = trainers.compare("debug", 128, "whole", rounds=2)
    assert next(rows)["trainer"] == "striped"
    monkeypatch.setattr(Told, "ask", None)  # PyTorch, or the benchmark itself, fails here
    with pytest.raises(TypeError):
        next(rows)


@pytest.mark.usefixtures("tiny")
def test_torch_learns_the_same_when_it_recomputes(monkeypatch):
    prepare = trainers.Torch.prepare
    monkeypatch.setattr(trainers.Torch, "prepare", lambda self: self.job.update(recompute=True) or prepare(self))
    *_, theirs = trainers.compare("debug", 128, "whole", rounds=1)
    assert theirs["recompute"]
    assert theirs["loss_difference"] < 1e-5


def test_batches_are_the_same_for_both_and_have_documents():
    one, again = (trainers.batch(60, 4096, "documents", 3) for _ in range(2))
    for a, b in zip(one, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.segments.max() > 0
    ends = np.flatnonzero(np.diff(one.segments[0]))
    assert (one.weights[0, ends] == 0).all()
    assert one.weights.sum() == 4096 - len(ends)
    assert not np.array_equal(one.tokens, trainers.batch(60, 4096, "documents", 4).tokens)

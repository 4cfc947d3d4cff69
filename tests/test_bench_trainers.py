"""`striped bench trainers`: our trainer and a plain PyTorch one start from equal weights and stay equal."""

import functools
import types

import numpy as np
import pytest
from striped_bench.bench import trainers

from striped_attention.core.mask import packed
from striped_attention.models.llama import PRESETS, ModelConfig


class Here:
    """A team in this process, which answers as one in a process of its own."""

    def __init__(self, kind, cores, **job):
        self.held = kind(rank=0, ranks=1, port=0, **job)

    def __enter__(self):
        return types.SimpleNamespace(ask=lambda method: [getattr(self.held, method)()])

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize("text", ["whole", "documents"])
def test_losses_are_those_of_plain_torch(text, monkeypatch):
    tiny = ModelConfig(layers=2, dim=32, ffn=48, heads=4, kv_heads=2, vocabulary=60)
    monkeypatch.setitem(PRESETS, "debug", tiny)
    monkeypatch.setattr(trainers, "Team", Here)
    monkeypatch.setattr(trainers, "LEARNING_RATE", 1e-2)
    monkeypatch.setattr(trainers, "packed", functools.partial(packed, median=30))
    ours, theirs = trainers.compare("debug", 128, text, rounds=2)
    assert ours["loss_difference"] < 1e-5
    assert ours["losses"][-1] < ours["losses"][0] - 0.2, "it learns"
    assert (ours["trainer"], theirs["trainer"], theirs["over_torch"]) == ("striped", "torch", 1)
    assert all(len(row["samples"]) == 2 for row in (ours, theirs))
    assert ours["remat"] == "none"


def test_trainers_that_disagree_are_not_timed(monkeypatch):
    made = {trainers.Ours: [1.0] * 22, trainers.Torch: [1.0] * 19 + [1.02] * 3}
    answer = lambda kind: {"losses": made[kind], "tokens_per_second": 1.0, "dtype": "bfloat16"}  # noqa: E731

    class Told(Here):
        def __init__(self, kind, cores, **job):
            self.held = types.SimpleNamespace(run=lambda: answer(kind))

    monkeypatch.setattr(trainers, "Team", Told)
    with pytest.raises(RuntimeError, match=r"The loss of a step is wrong by 2.0e-02, more than 0.01"):
        list(trainers.compare("debug", 128, "whole", rounds=2))


def test_batches_are_the_same_for_both_and_have_documents():
    one, again = (trainers.batch(60, 4096, "documents", 3) for _ in range(2))
    for a, b in zip(one, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.segments.max() > 0
    ends = np.flatnonzero(np.diff(one.segments[0]))
    assert (one.weights[0, ends] == 0).all()
    assert one.weights.sum() == 4096 - len(ends)
    assert not np.array_equal(one.tokens, trainers.batch(60, 4096, "documents", 4).tokens)

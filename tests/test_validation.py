"""Validation: losses by position equal those of a plain model on any mesh, and training is not affected."""

import jax
import numpy as np
import pytest

import striped_attention as sa
from striped_attention import data
from striped_attention.errors import UsageError
from striped_attention.training import loss_by_position
from striped_attention.training.loss_by_position import range_starts
from striped_attention.training.validation import HeldOut
from tests.test_train_model import CORPUS, plain_run, program


def test_ranges_double_up_to_the_sequence_length():
    assert range_starts(256) == [0]
    assert range_starts(257) == [0, 256]
    assert range_starts(2048) == [0, 256, 512, 1024]


@pytest.fixture
def _short_ranges(monkeypatch):
    """Ranges for documents of about 30 tokens, and a loss weight of 0, 1/2 or 1 for every target."""

    def weighted(corpus, first, count, length):
        batch = read(corpus, first, count, length)
        kinds = (np.arange(first, first + count)[:, None] + np.arange(length)) % 3
        return batch._replace(weights=batch.weights * kinds.astype(np.float32) / 2)

    read = data.rows_in_order
    monkeypatch.setattr(data, "rows_in_order", weighted)
    monkeypatch.setattr(loss_by_position, "FIRST", 8)


def plain_losses(run, weights, sequences):
    """Return, by range, the sums of weighted losses, loss weights and tokens of a plain model with dense attention."""
    length, weights = run.config.sequence_length, jax.device_get(weights)
    starts = np.array(range_starts(length))
    sums = np.zeros((3, len(starts)))
    rows = data.whole_rows(CORPUS, length)
    for number in range(sequences):
        batch = data.rows_in_order(CORPUS, number * rows // sequences, 1, length)
        visible = sa.documents(batch.segments).dense(length)
        context = visible.sum(axis=-1) - 1  # the number of previous tokens that it sees
        for i in range(len(starts)):
            inside = np.searchsorted(starts, context, side="right") - 1 == i
            chosen = batch._replace(weights=np.where(inside, batch.weights, np.float32(0)))
            if weight := chosen.weights.sum():
                loss, _ = plain_run(run.config.model)(weights, chosen, visible)
                sums[:, i] += [weight * loss, weight, np.count_nonzero(chosen.weights)]
    return sums


@pytest.mark.usefixtures("_short_ranges")
@pytest.mark.parametrize(("mesh", "layout"), [((1, 1), "striped"), ((2, 4), "striped"), ((1, 3), "zigzag")])
def test_losses_by_position_are_those_of_a_plain_model(mesh, layout):
    """Five sequences in batches of two, so the last batch is half full."""
    run = program(mesh, layout=layout)
    weights = run.fresh_state().weights
    found = HeldOut(run, CORPUS, 5).losses(weights)
    losses, counts, tokens = plain_losses(run, weights, 5)
    seen = tokens > 0
    assert seen.sum() >= 4
    assert [r.first for r in found.ranges] == np.array(range_starts(90))[seen].tolist()
    assert [r.tokens for r in found.ranges] == tokens[seen].tolist()
    np.testing.assert_allclose([r.loss for r in found.ranges], losses[seen] / counts[seen], rtol=1e-5)
    np.testing.assert_allclose(found.loss, losses.sum() / counts.sum(), rtol=1e-5)
    assert found.tokens == tokens.sum()


def test_sequences_without_a_token_that_counts_are_refused():
    """The first 500 tokens are end tokens, which make empty documents; the rest is one document."""
    tokens = np.full(1000, 256, np.int32)
    tokens[500:] = 1
    run, corpus = program((1, 1)), data.Corpus(tokens, 256, 257, "it")
    HeldOut(run, corpus, 2).check("--data", "--sequences")
    with pytest.raises(UsageError) as caught:
        HeldOut(run, corpus, 1).check("--data", "--sequences")
    assert str(caught.value) == (
        "--data needs tokens that count in the loss, but none does in 1 sequence of it. Give other data, or more of it "
        "with --sequences."
    )

"""Mixtures: every source supplies its exact share of the rows, in an order that depends only on seed and position."""

import collections
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from striped_attention import data
from striped_attention.data.mixture import BLOCK, Mixture
from striped_attention.data.sources import parse
from striped_attention.errors import UsageError


def corpus(first, rows, length=4):
    return data.Corpus(np.arange(first, first + rows * length + 1), None, 10**6, f"from {first}")


def mixture(*weights, rows=7):
    parts = tuple(corpus(1000 * i, rows + i) for i in range(len(weights)))
    return Mixture(parts, tuple(map(Fraction, weights)))


WEIGHT = st.fractions(min_value=Fraction(1, 1000), max_value=1000, max_denominator=1000)


@settings(deadline=None, max_examples=50)
@given(st.lists(WEIGHT, min_size=2, max_size=6), st.integers(0, 2**32 - 1), st.integers(0, 10**9))
def test_shares_are_exact_and_no_row_is_lost_or_twice(weights, seed, block):
    mixed = mixture(*weights)
    total = sum(weights)
    counts = collections.Counter()
    for start, size in ((0, BLOCK), (block * BLOCK, BLOCK)):
        drawn = [mixed.draw(place, seed) for place in range(start, start + size)]
        for i, weight in enumerate(weights):
            numbers = sorted(number for part, number in drawn if part == i)
            exact = weight / total * start
            assert numbers == list(range(min(numbers, default=0), min(numbers, default=0) + len(numbers)))
            assert not numbers or abs(numbers[0] - exact) <= len(weights), "it has supplied its share up to here"
            assert abs(len(numbers) - weight / total * size) <= len(weights)
            counts[i] += len(numbers)
    assert sum(counts.values()) == 2 * BLOCK


def test_every_source_passes_through_its_own_rows():
    mixed = mixture(3, 1)
    places = [data.drawn(mixed, place, 4, seed=5) for place in range(BLOCK)]
    for part in mixed.parts:
        rows = collections.Counter(row for found, row in places if found is part)
        assert len(rows) == data.whole_rows(part, 4)
        assert max(rows.values()) - min(rows.values()) <= 1
    assert data.whole_rows(mixed, 4) == 15


def test_a_batch_of_a_mixture_depends_on_its_place_alone():
    mixed = mixture(1, 2)
    whole = data.read(mixed, 500, range(40), 4, seed=1)
    for first in (0, 17):  # as in another process that has sampled nothing before
        part = data.read(mixture(1, 2), 500 + first, range(3), 4, seed=1)
        np.testing.assert_array_equal(part.tokens, whole.tokens[first : first + 3])
    assert (data.read(mixed, 500, range(40), 4, seed=2).tokens != whole.tokens).any()
    sources = (whole.tokens[:, 0] >= 1000).tolist()
    assert sources != [sources[i % 3] for i in range(40)], "shuffled, not round-robin"


def test_in_order_the_sources_of_a_mixture_follow_each_other():
    batch = data.rows_in_order(mixture(1, 2), 5, 12, 4)
    assert batch.tokens[:, 0].tolist() == [20, 24, *range(1000, 1032, 4), 0, 4]


def test_a_mixture_is_of_these_sources_with_these_weights():
    assert mixture(1, 2).fingerprint == mixture(1, 2).fingerprint
    assert len({mixture(1, 2).fingerprint, mixture(1, 3).fingerprint, mixture(1, 2, rows=8).fingerprint}) == 3


def test_sources_without_weights_are_mixed_by_size(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 99)
    (tmp_path / "b.txt").write_text("x" * 299)
    mixed = data.load((str(tmp_path / "a.txt"), str(tmp_path / "b.txt")), None, None, 300)
    drawn = collections.Counter(mixed.draw(place, 0)[0] for place in range(BLOCK))
    assert drawn == {0: BLOCK // 4, 1: 3 * BLOCK // 4}
    assert mixed.source == f"{tmp_path / 'a.txt'} (0.25), {tmp_path / 'b.txt'} (0.75)"
    assert [note.split(":")[1] for note in mixed.notes(50)] == [
        " 1 document, 100 tokens; 1 document longer than a sequence of 50, split over several rows.",
        " 1 document, 300 tokens; 1 document longer than a sequence of 50, split over several rows.",
    ]


def test_a_path_may_contain_an_equals_sign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("lang=en", "a", "b=2"):
        (tmp_path / name).write_text("text")
    found = [(str(source.path), source.weight) for source in parse(["lang=en=0.25", "a=3", "b=2=1e-3"])]
    assert found == [("lang=en", Fraction(1, 4)), ("a", 3), ("b=2", Fraction(1, 1000))]
    assert [source.weight for source in parse(["lang=en", "b=2"])] == [None, None]
    (tmp_path / "b").write_text("text")
    with pytest.raises(UsageError, match="--data b=2 is ambiguous: it may mean b=2, or b with weight 2, and both"):
        parse(["b=2"])


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["x.txt=0", "x.txt=1"], "must be above 0; got --data x.txt=0"),
        (["x.txt=-1", "x.txt=1"], "must be above 0"),
        (["x.txt=0.5", "y.txt"], "a weight for every source or for none, but y.txt has none"),
        (["x.txt=half", "x.txt=1"], "a weight for every source or for none, but x.txt=half has none"),
        (["x.txt=nan"], "--data x.txt=nan does not exist"),
        (["nothing=1"], "--data nothing does not exist"),
        ([], "--data needs a path"),
        (["x.txt=1", "x.txt=2"], "--data names x.txt twice"),
    ],
)
def test_sources_that_make_no_mixture_get_one_clear_line(tmp_path, monkeypatch, sources, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(UsageError, match=message):
        data.load(sources, None, None, 300)


def test_a_source_without_a_whole_row_is_named():
    with pytest.raises(UsageError, match="from 1000 holds 9 tokens, too few for one sequence of 30"):
        data.whole_rows(Mixture((corpus(0, 99), corpus(1000, 2)), (Fraction(1), Fraction(1))), 30)

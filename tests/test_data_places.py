"""Descriptions of where the rows of a batch come from."""

from fractions import Fraction

import numpy as np

from striped_attention import data


def corpus(name, starts=None):
    return data.Corpus(np.arange(1001) % 7, None, 7, name, starts=None if starts is None else np.array(starts))


def test_rows_are_named_by_source_pass_tokens_and_documents():
    listed = corpus("text.jsonl", [0, 30, 150, 160, 420])
    order = listed.order(10, 3, 0).tolist()
    shown = data.describe_rows(listed, 0, range(order.index(1), order.index(1) + 1), 100, seed=3)
    assert shown == "row 1 of text.jsonl in pass 1: tokens 100 to 199, documents 1 to 3"
    shown = data.describe_rows(listed, order.index(2), range(1), 100, seed=3)
    assert shown == "row 2 of text.jsonl in pass 1: tokens 200 to 299, document 3"
    raw = data.describe_rows(corpus("tokens.npy"), 20, range(1), 100, seed=3)
    assert raw.startswith("row ")
    assert " of tokens.npy in pass 3: tokens " in raw
    assert "document" not in raw


def test_the_rows_that_are_named_are_those_that_are_read():
    mixed = data.Mixture((corpus("a"), corpus("b", [0, 500])), (Fraction(3), Fraction(1)))
    batch = data.read(mixed, 40, range(6), 50, seed=1)
    named = data.describe_rows(mixed, 40, range(6), 50, seed=1).split("; ")
    assert {text.split(" of ")[1][0] for text in named} == {"a", "b"}
    for text, tokens in zip(named, batch.tokens, strict=True):
        first = int(text.split("tokens ")[1].split(" to ")[0])
        assert int(text.split()[1]) * 50 == first
        np.testing.assert_array_equal(tokens, np.arange(first, first + 50) % 7)


def test_of_many_rows_the_first_eight_are_named():
    text = data.describe_rows(corpus("a"), 0, range(64), 10, seed=0)
    assert text.count("row ") == 8
    assert text.endswith("; and 56 more")

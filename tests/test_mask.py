"""Masks show what their names say, and two monotone vectors describe any block of any layout (the key property)."""

import itertools

import jax
import numpy as np
import pytest

import striped_attention as sa
from tests.compare import random_segments

T = 12
QUERY, KEY = np.arange(T)[:, None], np.arange(T)[None, :]
IDS = np.array([[0, 0, 0, 1, 1, 5, 5, 5, 5, 2, 2, 2], [7] * 12])
SAME = IDS[:, :, None] == IDS[:, None, :]


def test_dense_pictures():
    np.testing.assert_array_equal(sa.full().dense(T), np.ones((T, T), bool))
    np.testing.assert_array_equal(sa.causal().dense(T), KEY <= QUERY)
    np.testing.assert_array_equal(sa.sliding_window(3).dense(T), (KEY <= QUERY) & (KEY > QUERY - 3))
    np.testing.assert_array_equal(sa.prefix(5).dense(T), (KEY <= QUERY) | (KEY < 5))
    np.testing.assert_array_equal(sa.documents(IDS).dense(T), SAME & (KEY <= QUERY))
    np.testing.assert_array_equal(sa.documents(IDS, causal=False).dense(T), SAME)


def test_small_pictures_of_the_docstring():
    assert sa.causal().dense(4).astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert sa.sliding_window(2).dense(4).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]


MASKS = {
    "full": sa.full(),
    "causal": sa.causal(),
    "window": sa.sliding_window(4),
    "prefix": sa.prefix(5),
    "documents": sa.documents(IDS),
    "documents, both ways": sa.documents(IDS, causal=False),
}


@pytest.mark.parametrize("pair", list(itertools.combinations_with_replacement(MASKS, 2)), ids=" & ".join)
def test_and_is_intersection(pair):
    a, b = (MASKS[name] for name in pair)
    np.testing.assert_array_equal((a & b).dense(T), a.dense(T) & b.dense(T))
    np.testing.assert_array_equal((b & a).dense(T), a.dense(T) & b.dense(T))


@pytest.mark.parametrize("causal", [True, False])
def test_traced_segment_ids_give_the_same_mask(causal):
    traced = jax.jit(lambda ids: sa.documents(ids, causal=causal))(IDS)
    np.testing.assert_array_equal(traced.dense(T), sa.documents(IDS, causal=causal).dense(T))
    concrete = sa.documents(jax.numpy.asarray(IDS), causal=causal)
    np.testing.assert_array_equal(concrete.dense(T), sa.documents(IDS, causal=causal).dense(T))


def test_masks_are_pytrees():
    mask = sa.documents(IDS) & sa.sliding_window(3)
    copy = jax.tree.map(lambda x: x, mask)
    np.testing.assert_array_equal(copy.dense(T), mask.dense(T))
    assert [leaf.shape for leaf in jax.tree.leaves(mask)] == [(2, T)]
    assert jax.tree.leaves(sa.causal()) == []


@pytest.mark.parametrize("layout", [sa.contiguous(), sa.striped(), sa.striped(3), sa.zigzag()], ids=repr)
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_every_block_is_two_monotone_vectors(layout, devices):
    length = 45
    ids = random_segments(np.random.default_rng(0), 2, length, longest=15)
    masks = [sa.full(), sa.causal(), sa.sliding_window(6), sa.prefix(17), sa.documents(ids), sa.documents(ids, False)]
    padded = layout.padded_length(length, devices)
    slots = padded // devices
    for mask in [*masks, masks[4] & masks[2], masks[5] & masks[3]]:
        picture = np.zeros((2, padded, padded), bool)
        picture[:, :length, :length] = mask.dense(length)
        placed = mask.permute(layout, devices)
        for r, s in itertools.product(range(devices), range(devices)):
            queries, keys = (layout.positions(device, padded, devices) for device in (r, s))
            part = jax.tree.map(lambda x, r=r: x[:, r * slots : (r + 1) * slots], placed)
            start, end = (layout.count_before(s, x, padded, devices) for x in part.bounds(queries, length))
            assert (np.diff(start) >= 0).all()
            assert (np.diff(end) >= 0).all()
            slot = np.arange(slots)
            seen = (start[..., None] <= slot) & (slot < end[..., None])
            np.testing.assert_array_equal(np.broadcast_to(seen, (2, slots, slots)), picture[:, queries][:, :, keys])


def test_a_mask_is_shown_as_it_is_made():
    ids = np.zeros((2, 16), int)
    shown = {
        "causal()": sa.causal(),
        "full()": sa.full(),
        "sliding_window(4)": sa.sliding_window(4) & sa.causal(),
        "prefix(3)": sa.prefix(3),
        "documents([2, 16])": sa.documents(ids),
        "documents([2, 16], causal=False)": sa.documents(ids, causal=False),
        "prefix(5) & documents([2, 16], causal=False)": sa.prefix(5) & sa.documents(ids, causal=False),
        "sliding_window(4) & documents([2, 16])": sa.documents(ids) & sa.sliding_window(4),
        "documents([2, 16]).permute(striped(2), 4)": sa.documents(ids).permute(sa.striped(2), 4),
    }
    for text, mask in shown.items():
        assert repr(mask) == text
    assert repr(jax.tree.map(lambda _: None, sa.documents(ids))).startswith("documents([16]"), "a tree of specs"

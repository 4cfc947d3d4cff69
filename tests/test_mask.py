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
    np.testing.assert_array_equal(sa.window(3, 2).dense(T), (KEY >= QUERY - 3) & (KEY <= QUERY + 2))
    np.testing.assert_array_equal(sa.window(None, 2).dense(T), KEY <= QUERY + 2)
    np.testing.assert_array_equal(sa.window(2, None).dense(T), KEY >= QUERY - 2)
    np.testing.assert_array_equal(sa.window(2**40, 2**40).dense(T), np.ones((T, T), bool))
    np.testing.assert_array_equal(sa.window(2, 0).dense(T), sa.sliding_window(3).dense(T))
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


def test_ranges_of_keys():
    blocks = sa.ranges(0, (np.arange(T) // 4 + 1) * 4)
    np.testing.assert_array_equal(blocks.dense(T)[0], KEY // 4 <= QUERY // 4)
    lengths = np.array([3, 12, 0])
    valid = sa.ranges(0, np.repeat(lengths[:, None], T, axis=1))
    np.testing.assert_array_equal(valid.dense(T), np.broadcast_to(lengths[:, None, None] > KEY, (3, T, T)))
    end = np.array([0, 0, 0, 7, 7, 7, 7, 0, 0, 11, 11, 0])  # images at positions 3 to 6, and 9 and 10
    images = sa.ranges(0, np.maximum(np.arange(T) + 1, end)).dense(T)[0]
    np.testing.assert_array_equal(images, (KEY <= QUERY) | (end[:, None] > KEY))
    reach = sa.ranges(np.arange(T) - 3, np.arange(T) + 3)  # beyond the ends of the sequence
    np.testing.assert_array_equal(reach.dense(T)[0], sa.window(3, 2).dense(T))
    nothing = sa.ranges(np.full(T, 5), 5)
    assert not nothing.dense(T).any()
    traced = jax.jit(lambda hi: sa.ranges(0, hi))(np.repeat(lengths[:, None], T, axis=1))
    np.testing.assert_array_equal(traced.dense(T), valid.dense(T))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_ranges_of_any_integer_dtype(dtype):
    """Lengths and limits that the dtype cannot hold do not wrap, traced or not."""
    length, hi = 300, np.minimum(np.arange(300) // 3 + 1, 100)
    lo = np.zeros(300, dtype)
    if np.iinfo(dtype).max > 2**31:
        hi, lo = hi.astype(dtype), np.where(np.arange(300) < 150, 0, np.iinfo(dtype).max).astype(dtype)
    wanted = (lo[:, None].astype(object) <= np.arange(length)) & (np.arange(length) < hi[:, None])
    for make in (sa.ranges, jax.jit(sa.ranges))[: 1 if "64" in dtype else 2]:  # JAX itself makes 32 of 64 bits
        np.testing.assert_array_equal(make(lo, hi.astype(dtype)).dense(length)[0], wanted.astype(bool))
    ids = np.repeat(np.arange(3), 100)[None].astype("uint8")
    for padding in (-1, 2**31, 0):
        made = jax.jit(lambda ids, padding=padding: sa.documents(ids, padding=padding))(ids)
        np.testing.assert_array_equal(made.dense(length)[0, :100].any(), padding != 0)


def test_the_order_of_an_intersection_makes_no_difference():
    documents, blocks = sa.documents(IDS), sa.ranges(0, np.arange(T) + 1)
    assert jax.tree.structure(documents & blocks) == jax.tree.structure(blocks & documents)


def test_ranges_reach_beyond_the_queries_in_cross_attention():
    mask = sa.ranges(np.arange(T) + 3, np.arange(T) + 9)
    seen = mask.dense(T, keys=20)[0]
    np.testing.assert_array_equal(seen, (np.arange(20) >= QUERY + 3) & (np.arange(20) < QUERY + 9))


@pytest.mark.parametrize(
    ("lo", "hi", "message"),
    [
        (0, [3, 2, 5], "hi must never decrease along the sequence; in row 0 it is 3 at position 0 and 2 at the next"),
        ([[0, 0], [1, 0]], 9, "lo must never decrease along the sequence; in row 1 it is 1 at position 0"),
        (0, 5, "at most one of them may be an integer; got shapes \\(\\) and \\(\\)"),
        ([0, 1], [1, 2, 3], r"must have the shape \[length\] or \[batch, length\].* got shapes \(1, 2\) and \(1, 3\)"),
        ([[0], [0]], [[1], [1], [1]], "must have the shape"),
        (0, np.ones(3), "hi must be whole numbers of shape .* got float64"),
        (0, np.ones((1, 2, 3), int), "hi must be whole numbers of shape"),
        (0, np.ones((0,), int), "must have the shape"),
    ],
)
def test_ranges_that_are_none(lo, hi, message):
    with pytest.raises(ValueError, match=message):
        sa.ranges(lo, hi)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("traced", [True, False])
def test_padding_between_documents_is_never_seen_and_sees_nothing(causal, traced):
    ids = np.array([[0, 0, 4, 4, 4, 0, 0, 2, 2, 9, 0, 0], [0] * 12, [1, 1, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2]])
    make = lambda ids: sa.documents(ids, causal=causal, padding=0)  # noqa: E731
    mask = jax.jit(make)(ids) if traced else make(ids)
    same = (ids[:, :, None] == ids[:, None, :]) & (ids != 0)[:, :, None]
    np.testing.assert_array_equal(mask.dense(T), same & (KEY <= QUERY) if causal else same)
    with pytest.raises(ValueError, match=r"row 0 id 0 appears in 3 .*If it is the id of padding, pass padding=0"):
        sa.documents(ids)
    with pytest.raises(ValueError, match="id 3 appears in 2 separate runs"):
        sa.documents(np.array([[3, 0, 3]]), padding=0)


MASKS = {
    "full": sa.full(),
    "two sides": sa.window(3, 2),
    "ranges": sa.ranges(0, (np.arange(T) // 4 + 1) * 4),
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
    masks += [sa.window(5, 9), sa.ranges(0, (np.arange(length) // 10 + 1) * 10), sa.documents(ids, padding=0)]
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
        "sliding_window(4)": sa.window(3, 0) & sa.window(9, 5) & sa.causal(),
        "prefix(3)": sa.prefix(3),
        "window(4, 2)": sa.window(4, 2),
        "window(None, 2)": sa.window(None, 2),
        "window(3, None)": sa.window(3, None),
        "prefix(3) & window(7, 2)": sa.window(7, 2) & sa.prefix(3),
        "ranges([1, 16])": sa.ranges(0, np.arange(16)),
        "causal() & ranges([1, 16])": sa.ranges(0, np.arange(16)) & sa.causal(),
        "documents([2, 16]) & ranges([2, 16])": sa.documents(ids) & sa.ranges(0, np.arange(16)),
        "(sliding_window(4) & ranges([1, 16])).permute(striped(1), 4)": (
            sa.sliding_window(4) & sa.ranges(0, np.arange(16))
        ).permute(sa.striped(), 4),
        "documents([2, 16])": sa.documents(ids),
        "documents([2, 16], causal=False)": sa.documents(ids, causal=False),
        "prefix(5) & documents([2, 16], causal=False)": sa.prefix(5) & sa.documents(ids, causal=False),
        "sliding_window(4) & documents([2, 16])": sa.documents(ids) & sa.sliding_window(4),
        "documents([2, 16]).permute(striped(2), 4)": sa.documents(ids).permute(sa.striped(2), 4),
    }
    for text, mask in shown.items():
        assert repr(mask) == text
    assert repr(jax.tree.map(lambda _: None, sa.documents(ids))).startswith("documents([16]"), "a tree of specs"

"""Layouts are bijections with sorted slots, and count_before is exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import striped_attention as sa
from striped_attention.core.layout import parse_layout

LAYOUTS = [sa.contiguous(), sa.striped(), sa.striped(3), sa.striped(128), sa.zigzag()]
layouts = st.one_of(st.sampled_from(LAYOUTS), st.integers(1, 50).map(sa.striped))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(layout=layouts, devices=st.integers(1, 9), length=st.integers(1, 200))
def test_every_token_has_one_slot_and_slots_are_sorted(layout, devices, length):
    padded = layout.padded_length(length, devices)
    assert length <= padded < length + 2 * devices
    order = layout.order(padded, devices)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(padded))
    assert (np.diff(order.reshape(devices, -1)) > 0).all()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(layout=layouts, devices=st.integers(1, 9), length=st.integers(1, 200))
def test_count_before_counts(layout, devices, length):
    padded = layout.padded_length(length, devices)
    limits = np.concatenate([np.arange(-3, padded + 4), [-(2**40), 2**40]])  # also limits outside the sequence
    for device in range(devices):
        positions = layout.positions(device, padded, devices)
        expected = (positions[None, :] < limits[:, None]).sum(axis=1)
        np.testing.assert_array_equal(layout.count_before(device, limits, padded, devices), expected)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(layout=layouts, groups=st.integers(1, 5), members=st.integers(1, 5), length=st.integers(1, 200))
def test_layouts_are_closed_under_grouping(layout, groups, members, length):
    """A group's sorted tokens are one device's share of the grouped layout, even with an incomplete last round.

    `join` reorders all groups alike.
    """
    devices = groups * members
    padded = layout.padded_length(length, devices)
    held = layout.order(padded, devices).reshape(groups, -1)
    for group, positions in enumerate(held):
        joined = layout.join(positions[None, :, None], members, padded, devices)[0, :, 0]
        np.testing.assert_array_equal(joined, np.sort(positions))
        np.testing.assert_array_equal(joined, layout.grouped(members).positions(group, padded, groups))
        np.testing.assert_array_equal(layout.split(joined, members, padded, devices, axis=0), positions)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_a_traced_device_gives_the_same_answers(layout):
    length, devices = 48, 4
    limits = np.arange(-3, length + 4)
    positions = jax.jit(lambda device: layout.positions(device, length, devices))
    count = jax.jit(lambda device: layout.count_before(device, limits, length, devices))
    for device in range(devices):
        np.testing.assert_array_equal(positions(device), layout.positions(device, length, devices))
        np.testing.assert_array_equal(count(device), layout.count_before(device, limits, length, devices))


def test_the_pictures_of_the_docstring():
    assert _device_of_position(sa.contiguous(), 8, 2) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert _device_of_position(sa.striped(), 8, 2) == [0, 1, 0, 1, 0, 1, 0, 1]
    assert _device_of_position(sa.zigzag(), 8, 2) == [0, 0, 1, 1, 1, 1, 0, 0]


def _device_of_position(layout, length, devices):
    slot = np.argsort(layout.order(length, devices))
    return (slot // (length // devices)).tolist()


def test_stripes_as_wide_as_a_share_are_contiguous():
    np.testing.assert_array_equal(sa.striped(100).order(64, 4), sa.contiguous().order(64, 4))


def test_what_is_left_of_the_last_round_is_shared_equally():
    assert _device_of_position(sa.striped(4), 12, 2) == [0] * 4 + [1] * 4 + [0] * 2 + [1] * 2


@settings(max_examples=40, deadline=None, derandomize=True)
@given(layout=layouts, devices=st.integers(1, 8), length=st.integers(1, 60), axis=st.integers(-3, 2))
def test_restore_undoes_permute_and_padding(layout, devices, length, axis):
    shape = [2, 3, 4]
    shape[axis] = length
    x = np.arange(np.prod(shape)).reshape(shape)
    permuted = layout.permute(x, devices, axis, pad=-1)
    assert isinstance(permuted, np.ndarray)
    assert permuted.shape[axis] == layout.padded_length(length, devices)
    assert (permuted == -1).sum() == permuted.size - x.size
    np.testing.assert_array_equal(layout.restore(permuted, devices, axis, length=length), x)
    np.testing.assert_array_equal(layout.permute(jnp.asarray(x), devices, axis, pad=-1), permuted)
    np.testing.assert_array_equal(layout.restore(jnp.asarray(permuted), devices, axis, length=length), x)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_arrays_are_permuted_where_they_are(axis_type):
    mesh = jax.make_mesh((8,), ("sequence",), axis_types=(axis_type,))
    x = np.arange(64).reshape(2, 32)
    sharded = jax.device_put(x, NamedSharding(mesh, P(None, "sequence")))
    layout = sa.striped(2)
    permuted = layout.permute(sharded, 8, axis=1)
    if axis_type == AxisType.Explicit:  # otherwise XLA decides
        assert permuted.sharding.spec == sharded.sharding.spec
    np.testing.assert_array_equal(permuted, layout.permute(x, 8, axis=1))
    np.testing.assert_array_equal(layout.restore(permuted, 8, axis=1), x)
    np.testing.assert_array_equal(layout.restore(permuted, 8, axis=1, length=29), x[:, :29])
    np.testing.assert_array_equal(jax.jit(lambda x: layout.restore(x, 8, axis=1))(permuted), x)


def test_permute_has_the_gradient_of_a_permutation():
    x = jnp.arange(10.0)
    weights = jnp.arange(12.0)
    layout = sa.striped()
    grad = jax.grad(lambda x: jnp.vdot(layout.permute(x, 4, axis=0), weights))(x)
    np.testing.assert_array_equal(grad, layout.restore(weights, 4, axis=0, length=10))


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_a_layout_is_read_as_it_is_written(layout):
    assert parse_layout(repr(layout)) == layout
    assert parse_layout("striped") == sa.striped()
    with pytest.raises(ValueError, match=r"A layout is written like .*; got 'stripes\(2\)'"):
        parse_layout("stripes(2)")

"""Mesh: rings go from chip to neighbouring chip, through every chip of a pod."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

import striped_attention as sa
from striped_attention.runtime.mesh import rings


def hops(ring):
    """Return the distances between neighbours in a ring, including from the last to the first."""
    return [sum(abs(a - b) for a, b in zip(x, y, strict=True)) for x, y in zip(ring, [*ring[1:], ring[0]], strict=True)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
def test_a_ring_goes_through_every_cell_of_a_grid_by_single_steps(grid):
    (ring,) = rings(grid, int(np.prod(grid)))
    assert sorted(ring) == sorted(np.ndindex(*grid))
    wide = [side for side in grid if side > 1]
    possible = any(side % 2 == 0 for side in wide) and (len(wide) > 1 or wide == [2])
    assert max(hops(ring)) <= (1 if possible or not wide else 2)


@pytest.mark.parametrize(
    ("grid", "size", "longest"),
    [
        ((1, 2, 2, 4), 8, 1),
        ((1, 4, 4), 4, 1),
        ((1, 4, 4, 4), 16, 1),
        ((1, 3, 4), 6, 1),
        ((1, 4, 4), 2, 1),
        ((1, 9), 3, 2),
    ],
)
def test_several_rings_are_blocks_of_the_grid(grid, size, longest):
    found = rings(grid, size)
    assert sorted(cell for ring in found for cell in ring) == sorted(np.ndindex(*grid))
    assert {len(ring) for ring in found} == {size}
    assert max(hop for ring in found for hop in hops(ring)) == longest


@pytest.mark.parametrize(("slices", "size", "held"), [(2, 16, 1), (2, 8, 1), (4, 16, 1), (4, 32, 2)])
def test_rings_keep_to_a_slice(slices, size, held):
    for ring in rings((slices, 4, 4), size):
        assert len({slice_ for slice_, *_ in ring}) == held


@dataclasses.dataclass(frozen=True)
class Chip:
    """The attributes of a TPU that a mesh depends on."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int = 0
    slice_index: int = 0
    platform: str = "tpu"
    process_index: int = 0
    device_kind: str = "TPU v4"


def pod(*sides, cores=1, slices=1):
    places = [(s, c, xyz) for s in range(slices) for xyz in np.ndindex(*sides) for c in range(cores)]
    return [Chip(i, xyz, core, slice_) for i, (slice_, core, xyz) in enumerate(places)]


@pytest.mark.parametrize("chips", [pod(2, 2, 4), pod(4, 4), pod(2, 2, 2, cores=2), pod(2, 2, 1, slices=2)])
@pytest.mark.parametrize("data", [1, 2])
def test_meshes_of_tpus(chips, data):
    mixed = [chips[i] for i in np.random.default_rng(0).permutation(len(chips))]
    mesh = sa.make_mesh({"data": data, "sequence": len(chips) // data}, mixed)
    assert dict(mesh.shape) == {"data": data, "sequence": len(chips) // data}
    assert sorted(chip.id for chip in mesh.devices.flat) == list(range(len(chips)))
    for row in mesh.devices:
        assert max(hops([(chip.slice_index, *chip.coords, chip.core_on_chip) for chip in row])) == 1


def test_a_mesh_needs_all_devices_and_no_others():
    with pytest.raises(ValueError, match=r"A mesh of {'data': 2, 'sequence': 4} needs 8 devices; got 16\."):
        sa.make_mesh({"data": 2, "sequence": 4}, pod(4, 4))


def test_other_devices_stay_as_jax_orders_them(monkeypatch):
    mesh = sa.make_mesh({"data": 2, "sequence": 4})
    assert mesh.devices.tolist() == jax.make_mesh((2, 4), ("data", "sequence")).devices.tolist()
    assert sa.make_mesh({"sequence": 3}, jax.devices()[:3]).size == 3
    with pytest.raises(ValueError, match=r"A mesh of {'sequence': 2} needs 2 devices; got 8\."):
        sa.make_mesh({"sequence": 2})
    monkeypatch.setattr(jax, "make_mesh", lambda *_, devices, **__: Mesh(np.array(devices), ("sequence",)))
    gpus = [dataclasses.replace(chip, platform="gpu") for chip in pod(8)]  # they have coordinates too
    assert sa.make_mesh({"sequence": 8}, gpus).devices.tolist() == gpus

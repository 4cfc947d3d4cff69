"""Mesh: device order in which neighbours in a ring are neighbours on the interconnect.

The chips of a TPU pod are connected as a grid of two or three dimensions, and a ring must visit all of it. It leaves
along one edge and snakes back through the rest. On a 4 × 4 grid, numbered in ring order:

     0  15  14  13
     1  10  11  12
     2   9   8   7
     3   4   5   6

If one side of the grid is even, every hop is to an adjacent chip, including the hop that closes the ring. Otherwise, or
on a line, the ring visits every second chip on the way out and the others on the way back: no hop is longer than two.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

Cell = tuple[int, ...]


def make_mesh(sizes: dict[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh over all devices, or those given, with axes of these names and sizes; the last axis is a ring.

    On a TPU pod, consecutive devices of a ring are neighbours, and each ring occupies a block of the pod.
    """
    devices = jax.devices() if devices is None else devices
    names, shape = tuple(sizes), tuple(sizes.values())
    types = (AxisType.Auto,) * len(names)
    if math.prod(shape) != len(devices):
        raise ValueError(f"A mesh of {sizes} needs {math.prod(shape)} devices; got {len(devices)}.")
    cells = _cells(devices)
    if cells is None:
        return jax.make_mesh(shape, names, types, devices=devices)
    at = dict(zip(cells, devices, strict=True))
    order = [cell for ring in rings(tuple(max(x) + 1 for x in zip(*cells, strict=True)), shape[-1]) for cell in ring]
    placed = np.empty(len(order), object)
    placed[:] = [at[cell] for cell in order]
    return Mesh(placed.reshape(shape), names, axis_types=types)


def rings(grid: tuple[int, ...], size: int) -> list[list[Cell]]:
    """Partition the cells of a grid into rings of `size` cells, each a block of the grid.

    The first side of the grid counts slices, which are connected by slow links: rings stay within a slice if possible.
    """
    block = list(grid)
    for factor in _factors(math.prod(grid) // size):
        fitting = [i for i, side in enumerate(block) if side % factor == 0]
        cut = max(fitting, key=lambda i: (i == 0, block[i]))
        block[cut] //= factor
    ring = _ring(tuple(block))
    corners = np.ndindex(*(side // part for side, part in zip(grid, block, strict=True)))
    move = lambda corner, cell: tuple(c * b + x for c, b, x in zip(corner, block, cell, strict=True))  # noqa: E731
    return [[move(corner, cell) for cell in ring] for corner in corners]


def _ring(grid: tuple[int, ...]) -> list[Cell]:
    """Return all cells of a grid in ring order: neighbours, the last and first too, are adjacent if possible."""
    even = next((i for i, side in enumerate(grid) if side % 2 == 0), None)
    rest = None if even is None else _snake(grid[:even] + grid[even + 1 :])
    if even is None or rest is None or len(rest) == 1:
        path = _snake(grid)
        return path[::2] + path[1::2][::-1]
    cell = lambda i, other: (*other[:even], i, *other[even:])  # noqa: E731
    out = [cell(i, rest[0]) for i in range(grid[even])]
    back = [cell(i, other) for i in reversed(range(grid[even])) for other in (rest[1:] if i % 2 else rest[:0:-1])]
    return out + back


def _snake(grid: tuple[int, ...]) -> list[Cell]:
    """Return all cells of a grid, each adjacent to the one before it."""
    if not grid:
        return [()]
    inner = _snake(grid[1:])
    return [(i, *cell) for i in range(grid[0]) for cell in (inner[::-1] if i % 2 else inner)]


def _cells(devices: Sequence[Any]) -> list[Cell] | None:
    """Return the position of each device: slice, chip, core. None if they are not TPUs or do not fill a grid."""
    if not all(device.platform == "tpu" for device in devices):
        return None
    place = lambda d: (getattr(d, "slice_index", None) or 0, *d.coords, getattr(d, "core_on_chip", 0))  # noqa: E731
    places = np.array([place(device) for device in devices])
    places -= places.min(axis=0)
    filled = len(np.unique(places, axis=0)) == len(devices) == math.prod(places.max(axis=0) + 1)
    return [tuple(map(int, cell)) for cell in places] if filled else None


def _factors(n: int) -> list[int]:
    """Return the prime factors, largest first."""
    found, p = [], 2
    while n > 1:
        if n % p:
            p += 1
        else:
            found.append(p)
            n //= p
    return found[::-1]

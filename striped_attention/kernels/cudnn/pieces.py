"""Pieces: a block of attention as one of the masks that cuDNN supports.

cuDNN does not accept key ranges. It supports two masks: every row sees every key; or row i sees the keys up to i, or
only the last `window` of them. If a device holds its tokens in one or two runs of evenly spaced positions, every block
of a causal or windowed mask is one of a few such *pieces*.

The mask between two runs is a *band*: with query x at position a + d·x and key y at d·y, where d is the spacing,

    row x sees the keys  x + low ≤ y < x + high,    high = ⌊a / d⌋ + 1,    low = ⌊(a - window) / d⌋ + 1

    high = 1    the diagonal is visible: causal        high = 0    it is hidden: causal, with queries shifted by a slot
    high ≥ n    no upper limit (runs of n slots)       high ≤ 1-n  no key is visible

The band depends on `a`, the distance between the runs, and so on the two devices. They are known only at run time, so
the pieces of a block are branches. All possible distances are known at trace time, and with them the few thresholds at
which one piece replaces another.

If a device holds two runs, a block consists of four bands. Often these form one piece (a rectangle, or one band over
the whole block); otherwise runs are processed pair by pair.
"""

import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from striped_attention.core.layout import Runs
from striped_attention.kernels.contract import Pattern

MOST_RUNS = 2  # per device; more runs would give many small pieces


class Piece(NamedTuple):
    """The work of one cuDNN call: a range of rows, which may extend beyond the block, and a range of keys.

    `backwards` counts rows and keys from the end of the block.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    window: int | None = None
    backwards: bool = False


class Band(NamedTuple):
    """Row x sees the keys [x + low, x + high); None means no limit on that side."""

    low: int | None
    high: int | None

    def within(self, slots: int) -> "Band | None":
        """Return the band between runs of `slots` slots without ineffective limits; None if no key is visible."""
        low = None if self.low is None or self.low <= 1 - slots else self.low
        high = None if self.high is None or self.high >= slots else self.high
        hidden = (high is not None and high <= 1 - slots) or (low is not None and low >= slots)
        hidden = hidden or (low is not None and high is not None and high <= low)
        return None if hidden else Band(low, high)

    def moved(self, keys: int) -> "Band":
        """Return the same band with keys counted from key `keys` on."""
        return Band(*(None if limit is None else limit - keys for limit in self))


class Cases(NamedTuple):
    """The pieces that a block can be (None: no key is visible), and the thresholds at which one replaces another.

    The index of the piece depends on how far the queries are ahead of the keys. It is `first` at the smallest possible
    distance, and every entry (place, change) of `steps` adds `change` once the distance reaches `place`.
    """

    pieces: tuple[Piece | None, ...]
    first: int
    steps: tuple[tuple[int, int], ...]

    def which(self, ahead: Any) -> Any:
        """Return the index of the piece for a block whose first query is `ahead` positions after its first key."""
        changes = (jnp.where(ahead >= place, change, 0) for place, change in self.steps)
        return sum(changes, jnp.int32(self.first))


@functools.lru_cache(maxsize=256)
def cases(pattern: Pattern, slots: int) -> Cases | None:
    """Return the pieces that a block can be, or None if a block may need several: runs are then paired one by one."""
    if not pattern.causal:
        return Cases((Piece((0, slots), (0, slots), causal=False),), 0, ())
    runs = runs_of(pattern)
    found: dict[int, Piece | None] = {}
    for ahead, bands in _meetings(pattern, slots // runs.count):
        piece = None if all(band is None for band in bands.values()) else _as_one(bands, runs.count, slots)
        if piece is None and any(band is not None for band in bands.values()):
            return None
        if found.setdefault(ahead, piece) != piece:
            return None
    return _number(found)


@functools.lru_cache(maxsize=256)
def cases_of_runs(pattern: Pattern, slots: int, query_run: int, key_run: int) -> Cases | None:
    """Return the pieces that the block of a query run and a key run can be; None if they never see each other."""
    width = slots // runs_of(pattern).count
    found: dict[int, Piece | None] = {}
    for ahead in np.unique(_distances(pattern, width)[:, query_run, key_run]).tolist():
        low, high = _limits(pattern, ahead)
        band = Band(low, high).within(width)
        found[ahead] = None if band is None else _piece(band, width)
    return None if set(found.values()) == {None} else _number(found)


def runs_of(pattern: Pattern) -> Runs:
    """Return the runs of a device; `unsupported` has already rejected layouts with too many runs."""
    runs = pattern.layout.runs(pattern.length, pattern.devices)
    assert runs is not None
    assert runs.count <= MOST_RUNS
    return runs


def _distances(pattern: Pattern, width: int) -> np.ndarray:
    """Return how far queries are ahead of keys, [pairs of devices that meet, query runs, key runs]."""
    slot = np.arange(runs_of(pattern).count, dtype=np.int32) * width
    device = np.arange(pattern.devices, dtype=np.int32)[:, None]
    starts = np.asarray(pattern.layout.position(device, slot, pattern.length, pattern.devices), np.int64)
    met = np.eye(pattern.devices, dtype=bool)
    here, there = np.nonzero(met if pattern.own else ~met)
    return starts[here][:, :, None] - starts[there][:, None, :]


def _limits(pattern: Pattern, ahead: Any) -> tuple[Any, Any]:
    """Return `low` and `high` of two runs' band; the first query is `ahead` positions after the first key."""
    spacing = runs_of(pattern).spacing
    low = None if pattern.window is None else (ahead - pattern.window) // spacing + 1
    return low, ahead // spacing + 1


def _meetings(pattern: Pattern, width: int) -> Iterable[tuple[int, dict[tuple[int, int], Band | None]]]:
    """Yield every distinct case for a pair of devices: how far the queries are ahead, and the bands of their runs.

    Limits are clipped where they stop having an effect, so there are few cases for any number of devices.
    """
    runs = range(runs_of(pattern).count)
    places = list(itertools.product(runs, runs))
    ahead = _distances(pattern, width).reshape(-1, len(places))
    limits = [None if x is None else np.clip(x, 1 - width, width) for x in _limits(pattern, ahead)]
    for first, *cut in np.unique(np.hstack([ahead[:, :1], *(x for x in limits if x is not None)]), axis=0).tolist():
        highs, lows = cut[-len(places) :], cut[: -len(places)] or [None] * len(places)
        bands = zip(places, lows, highs, strict=True)
        yield first, {place: Band(low, high).within(width) for place, low, high in bands}


def _as_one(bands: dict[tuple[int, int], Band | None], count: int, slots: int) -> Piece | None:
    """Combine a block's bands to one piece: a band over the whole block or a rectangle of full bands; else None."""
    width = slots // count
    limited = [(place, band) for place, band in bands.items() if band is not None and band != (None, None)]
    if limited:
        (i, j), band = limited[0]
        whole = band.moved((i - j) * width)
        same = all(whole.moved((j - i) * width).within(width) == other for (i, j), other in bands.items())
        return _piece(whole, slots) if same else None
    rows, keys = zip(*(place for place, band in bands.items() if band is not None), strict=True)
    full = len(rows) == (max(rows) - min(rows) + 1) * (max(keys) - min(keys) + 1)
    sides = [(min(x) * width, (max(x) + 1) * width) for x in (rows, keys)]
    return Piece(sides[0], sides[1], causal=False) if full else None


def _piece(band: Band, slots: int) -> Piece:
    """Convert a band over `slots` slots to a piece."""
    everything = (0, slots)
    if band.high is None and band.low is None:
        return Piece(everything, everything, causal=False)
    if band.high is None:
        # Row i sees the keys from i + low on. Counted from the end, row i sees the keys before i + 1 - low.
        assert band.low is not None
        return Piece((band.low, slots), (0, min(slots, slots - band.low)), causal=True, backwards=True)
    first = 1 - band.high  # the row that sees only the first key
    # One extra row costs less than branches whose results differ in shape.
    last = slots + first if first in (0, 1) else slots
    window = None if band.low is None or band.high - band.low >= slots else band.high - band.low
    return Piece((first, last), everything, causal=True, window=window)


def _number(found: dict[int, Piece | None]) -> Cases:
    """Convert a piece per distance to the distinct pieces and the thresholds between them."""
    pieces = tuple(dict.fromkeys(found.values()))
    numbers = [(ahead, pieces.index(found[ahead])) for ahead in sorted(found)]
    steps = [(b[0], b[1] - a[1]) for a, b in itertools.pairwise(numbers) if a[1] != b[1]]
    return Cases(pieces, numbers[0][1], tuple(steps))

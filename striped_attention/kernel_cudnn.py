"""The `cudnn` kernel: blocks on NVIDIA GPUs, by cuDNN's fused attention.

cuDNN takes no ranges of keys, but it can do two shapes: every row sees every key, and row i sees the keys up to i, or
the last `window` of them. Where the layout deals tokens one by one or in whole pieces, every block of a causal, full or
windowed mask is one of a few such *pieces*, and which of them depends on the devices that meet:

    striped(1)      the diagonal visible: causal           hidden: causal, for the queries one slot on
    contiguous()    own keys: causal    earlier: full      later: nothing
    zigzag()        own keys: causal    from a lower device: full, of the front half of the keys
                                        from a higher one:   full, for the back half of the queries

Where a window ends within a block of contiguous pieces, the *end* of a row is free and its start is bound: the piece is
causal when both are read backwards.

The devices are known only at run time, so the pieces of a block are branches, and the device takes one of them. Rows of
a piece that lie outside the block are blank: they see keys, but nobody sees them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from striped_attention import cudnn
from striped_attention.bias import Bias
from striped_attention.kernel import Block, Partial, Pattern, merge
from striped_attention.layout import Layout, contiguous
from striped_attention.mask import Mask

FULL_OUT = False
SUMS_LAST = False
_DTYPES = ("bfloat16", "float16")
_LARGE = 1e30  # log-sum-exp of a blank row: no key has any weight


def unsupported(
    q: Any,
    k: Any,
    *,
    softcap: float | None,
    bias: Bias | None,
    mask: Mask,
    layout: Layout,
    devices: int,
    tile: Any,
    padded: bool,
    platform: str | None,
) -> str | None:
    """What this kernel cannot do of what is asked, in a sentence; None if it can do all of it."""
    dim = q.shape[-1]
    if mask.lo is not None or mask.hi is not None or mask.prefix not in (None, 0):
        return "It knows causal, full and sliding-window masks, not documents or a prefix."
    if devices > 1 and layout.stripe not in (None, 1):
        return f"It knows contiguous(), striped(1) and zigzag(); the layout is {layout!r}."
    if mask.prefix is None and padded:
        return "With a full mask it cannot hide padding."
    if str(q.dtype) not in _DTYPES:
        return f"It computes in {' or '.join(_DTYPES)}; the queries are {q.dtype}."
    if dim > 128:
        return f"It needs a head dimension of at most 128; got {dim}."
    for name, value in (("softcap", softcap), ("bias", bias), ("tile", tile)):
        if value is not None:
            return f"It has no {name}."
    return None if platform is None else cudnn.unavailable(platform)


def attend(q: Float[Array, "batch queries heads dim"]) -> Callable[..., Partial]:
    """Forward pass; see `kernel.py` for the contract."""
    batch, slots, heads, dim = q.shape
    wide = _widen(q)
    queries = _Rows(wide)

    def run(k: Array, v: Array, block: Block) -> Partial:
        if _in_halves(block):
            return _forward_halves(q, k, v, block)

        k, v = _widen(k), _widen(v)

        def run_piece(piece: Piece) -> list[Array]:
            arrays = queries.take(piece), _keys(k, piece), _keys(v, piece)
            return cudnn.forward(*arrays, scale=block.scale, causal=piece.causal, window=piece.window)

        stats = jax.ShapeDtypeStruct((batch, heads, slots), jnp.float32)
        out, lse = _run(run_piece, [_Result(wide, 1, 0.0), _Result(stats, 2, -jnp.inf)], block)
        return Partial(out[..., :dim].astype(jnp.float32), jnp.swapaxes(lse, 1, 2))

    return run


def attend_first(
    q: Float[Array, "batch queries heads dim"],
    k: Float[Array, "batch kv_heads keys dim"],
    v: Float[Array, "batch kv_heads keys dim"],
    counts: Int[Array, " batch"],
    scale: float,
) -> Partial:
    """Attention of all queries of a text to its first `counts` keys, which may be none: for a cache."""
    arrays = (_widen(jnp.swapaxes(q, 1, 2)), _widen(k), _widen(v), jnp.maximum(counts, 1))
    out, lse = cudnn.forward_lengths(*arrays, scale=scale)
    some = (counts > 0)[:, None, None]
    out = jnp.where(some[..., None], jnp.swapaxes(out[..., : q.shape[-1]], 1, 2).astype(jnp.float32), 0)
    return Partial(out, jnp.where(some, jnp.swapaxes(lse, 1, 2), -jnp.inf))


def attend_grad(
    q: Float[Array, "batch queries heads dim"],
    out: Float[Array, "batch queries heads dim"],
    lse: Float[Array, "batch queries heads"],
    dout: Float[Array, "batch queries heads dim"],
) -> Callable[..., tuple[Array, Array, Array, None]]:
    """Backward pass; see `kernel.py` for the contract."""
    dim, wide = q.shape[-1], _widen(q)
    queries, outs, douts = (_Rows(_widen(x.astype(q.dtype))) for x in (q, out, dout))
    stats = _Rows(jnp.swapaxes(jnp.where(jnp.isneginf(lse), _LARGE, lse), 1, 2), axis=2, fill=_LARGE)

    def run(k: Array, v: Array, block: Block) -> tuple[Array, Array, Array, None]:
        if _in_halves(block):
            return _backward_halves(q, k, v, block, out, lse, dout)

        k, v = _widen(k), _widen(v)

        def run_piece(piece: Piece) -> list[Array]:
            arrays = queries.take(piece), _keys(k, piece), _keys(v, piece)
            rows = outs.take(piece), stats.take(piece), douts.take(piece)
            return cudnn.backward(*arrays, *rows, scale=block.scale, causal=piece.causal, window=piece.window)

        results = [_Result(wide, 1, 0.0), _Result(k, 1, 0.0, of_keys=True), _Result(v, 1, 0.0, of_keys=True)]
        dq, dk, dv = (x[..., :dim].astype(jnp.float32) for x in _run(run_piece, results, block))
        return dq, dk, dv, None

    return run


def _widen(x: Array) -> Array:
    """Heads as wide as cuDNN wants them, a multiple of 8: zeros change no score and give a zero."""
    return _pad(x, 0, -x.shape[-1] % 8, x.ndim - 1, 0.0)


class Piece(NamedTuple):
    """What one call of cuDNN works on: a range of rows, which may reach out of the block, and one of keys.

    `backwards` counts rows and keys from the end of the block.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    window: int | None = None
    backwards: bool = False


def pieces(pattern: Pattern, slots: int, ahead: Any) -> tuple[list[Piece | None], Any]:
    """The pieces that a block can be (None: nobody sees anything), and which of them it is.

    `ahead` is how far the first query lies after the first key.
    """
    everything = (0, slots)
    full = Piece(everything, everything, causal=False)
    window = pattern.window
    if not pattern.causal:
        return [full], 0
    if pattern.layout.stripe is not None and pattern.devices > 1:  # tokens are dealt one by one
        hidden = ahead < 0  # the diagonal is
        if window is None:
            cases, which = _striped(slots, slots), jnp.where(hidden, 1, 0)
        else:
            wide, rest = divmod(window - 1, pattern.devices)
            narrow = ahead % pattern.devices > rest
            cases = _striped(wide + 1, slots) + _striped(wide, slots)
            which = jnp.where(narrow, 2, 0) + jnp.where(hidden, 1, 0)
        return (cases[:1], 0) if pattern.own else (cases, which)
    if pattern.own:
        return [Piece(everything, everything, causal=True, window=_limit(window, slots))], 0
    if pattern.layout.rounds == 2:
        half = slots // 2
        cases = [Piece(everything, (0, half), causal=False), Piece((half, slots), everything, causal=False)]
        return cases, jnp.where(ahead > 0, 0, 1)
    if window is None:
        return [full, None], jnp.where(ahead > 0, 0, 1)
    rest = window % slots
    left = window - ahead  # of the window, for the first query, at the first key
    cases = [full, _window_ends(rest, slots), _window_ends(rest - slots, slots), None]
    which = jnp.where(left >= slots, 0, jnp.where(left == rest, 1, jnp.where(left == rest - slots, 2, 3)))
    return cases, jnp.where(ahead > 0, which, 3)


def _striped(width: int, slots: int) -> list[Piece | None]:
    """The diagonal visible, and hidden; a row sees `width` keys."""
    if width == 0:
        return [None, None]
    return [Piece((i, slots + i), (0, slots), causal=True, window=_limit(width, slots)) for i in (0, 1)]


def _limit(window: int | None, slots: int) -> int | None:
    return None if window is None or window >= slots else window


def _window_ends(left: int, slots: int) -> Piece | None:
    """Row i sees the keys from i + 1 - left on: from the end, row i sees the keys before i + left."""
    keys = min(slots, slots - 1 + left)
    return Piece((1 - left, slots), (0, keys), causal=True, backwards=True) if keys > 0 else None


class _Rows:
    """An array of the queries, of which pieces take ranges of rows; common ranges are cut once, for all blocks."""

    def __init__(self, x: Array, axis: int = 1, fill: float = 0.0) -> None:
        self.x, self.axis, self.fill = x, axis, fill
        slots = x.shape[axis]
        ranges = [(0, slots), (1, slots + 1), (slots // 2, slots)]
        self.cut = {rows: self._cut(x, rows) for rows in ranges}

    def take(self, piece: Piece) -> Array:
        if piece.backwards:
            return self._cut(jnp.flip(self.x, self.axis), piece.rows)
        return self.cut[piece.rows] if piece.rows in self.cut else self._cut(self.x, piece.rows)

    def _cut(self, x: Array, rows: tuple[int, int]) -> Array:
        return _pad(x, -rows[0], rows[1] - x.shape[self.axis], self.axis, self.fill)


def _pad(x: Array, before: int, after: int, axis: int, fill: float) -> Array:
    """Add to an axis at both ends, or cut off where the number is negative."""
    if before == after == 0:
        return x
    widths = [(before, after, 0) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    return lax.pad(x, jnp.asarray(fill, x.dtype), widths)


def _keys(x: Array, piece: Piece) -> Array:
    x = jnp.flip(x, 1) if piece.backwards else x
    return x if piece.keys == (0, x.shape[1]) else x[:, piece.keys[0] : piece.keys[1]]


class _Result(NamedTuple):
    """An array that pieces make: like which array of the block, along which axis, and what it is where they are not."""

    like: Any
    axis: int
    fill: float
    of_keys: bool = False

    def place(self, x: Array, piece: Piece) -> Array:
        """What a piece made, where it belongs in the block."""
        first, last = piece.keys if self.of_keys else piece.rows
        x = _pad(x, first, self.like.shape[self.axis] - last, self.axis, self.fill)
        return jnp.flip(x, self.axis) if piece.backwards else x

    def place_one(self, x: Array, cases: list[Any], which: Any) -> Array:
        """What one of several pieces of a size made, where it belongs in the block."""
        firsts = [0 if self.of_keys else piece.rows[0] for piece in cases]
        most = max(firsts)
        if most == min(firsts):
            return self.place(x, cases[0])
        x = _pad(x, most, 0, self.axis, self.fill)
        return lax.dynamic_slice_in_dim(x, most - jnp.array(firsts)[which], self.like.shape[self.axis], self.axis)

    def blank(self, varying: Array) -> Array:
        return jnp.full_like(varying, self.fill, shape=self.like.shape, dtype=self.like.dtype)


def _run(run: Callable[[Any], Any], results: list[_Result], block: Block) -> list[Array]:
    """Run the piece that the block is, and put its results where they belong.

    Results of one shape are placed after the branches, where the compiler can do it while they are read.
    """
    ahead = block.query_positions[0] - block.key_positions[0]
    cases, which = pieces(_pattern(block), block.query_positions.shape[0], ahead)
    place = lambda arrays, piece: [r.place(x, piece) for r, x in zip(results, arrays, strict=True)]  # noqa: E731
    if len(cases) == 1:
        return place(run(cases[0]), cases[0])
    sizes = {case and (case.rows[1] - case.rows[0], case.keys, case.backwards) for case in cases}
    if len(sizes) == 1:
        arrays = lax.switch(which, [functools.partial(run, piece) for piece in cases])
        return [r.place_one(x, cases, which) for r, x in zip(results, arrays, strict=True)]

    def branch(piece: Piece | None) -> Callable[[], list[Array]]:
        if piece is None:
            return lambda: [result.blank(results[0].like) for result in results]
        return lambda: place(run(piece), piece)

    return lax.switch(which, [branch(piece) for piece in cases])


def _pattern(block: Block) -> Pattern:
    if block.pattern is None:
        raise NotImplementedError("The cudnn kernel takes no ranges, only causal, full and window masks.")
    return block.pattern


def _in_halves(block: Block) -> bool:
    """A window over two pieces of text that are far apart: each half of the queries meets each half of the keys."""
    return _pattern(block).layout.rounds == 2 and _pattern(block).window is not None


_MEETINGS = ((0, 0), (1, 0), (1, 1))  # the front half of the queries never sees the back half of the keys


def _half(x: Any, which: int, axis: int = 1) -> Array:
    return jnp.split(x, 2, axis)[which]


def _half_block(block: Block, i: int, j: int) -> Block:
    positions = _half(block.query_positions, i, 0), _half(block.key_positions, j, 0)
    pattern = dataclasses.replace(_pattern(block), layout=contiguous(), own=_pattern(block).own and i == j)
    return dataclasses.replace(block, query_positions=positions[0], key_positions=positions[1], pattern=pattern)


def _forward_halves(q: Array, k: Array, v: Array, block: Block) -> Partial:
    a, b, c = (attend(_half(q, i))(_half(k, j), _half(v, j), _half_block(block, i, j)) for i, j in _MEETINGS)
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), a, merge(b, c))


def _backward_halves(q: Array, k: Array, v: Array, block: Block, *rows: Array) -> tuple[Array, Array, Array, None]:
    a, b, c = (
        attend_grad(_half(q, i), *(_half(x, i) for x in rows))(_half(k, j), _half(v, j), _half_block(block, i, j))[:3]
        for i, j in _MEETINGS
    )
    dq = jnp.concatenate([a[0], b[0] + c[0]], axis=1)
    dk, dv = (jnp.concatenate([a[i] + b[i], c[i]], axis=1) for i in (1, 2))
    return dq, dk, dv, None

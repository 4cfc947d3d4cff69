"""The kernel `cudnn`: attention over blocks on NVIDIA GPUs, by cuDNN's fused attention.

cuDNN does not accept key ranges. `pieces.py` computes which of the masks that cuDNN supports a block can have; here the
device selects one of them at run time. Rows of a piece outside the block are padding: their results are discarded.

cuDNN returns `out`, dq, dk and dv in the dtype of its inputs. They are converted to float32 before they are merged and
summed, but cuDNN's rounding cannot be undone (docs/performance.md reports its cost).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from striped_attention.core.partial import Partial, accumulator, merge
from striped_attention.kernels.contract import Block, Pattern, Request, Same
from striped_attention.kernels.cudnn import binding
from striped_attention.kernels.cudnn.pieces import MOST_RUNS, Cases, Piece, cases, cases_of_runs, runs_of
from striped_attention.kernels.rates import Rate, Rates

AUTOMATIC = True
FULL_OUT = False
SUMS_LAST = False
DIFFERENTIABLE = False
attend_whole = None
DTYPES = ["bfloat16", "float16"]
# Fitted to benchmarks/results/gpu_attention_*.json, by least squares of relative errors; a test repeats the fit.
RATES = {
    "gpu": Rates(
        forward=Rate(efficiency=0.601, query_bytes=16.1, seconds=78.6e-6),
        backward=Rate(efficiency=0.547, query_bytes=71.9, seconds=81.9e-6),
        known="measured on an H200",
        lanes=64,  # observed with head dim 100 of preset 3b: benchmarks/results/gpu_step_3b_64k.json
    )
}
_LARGE = 1e30  # log-sum-exp of a padding row: every probability is 0

Gradients = tuple[Array, Array, Array, None]


def default_tile(request: Request) -> tuple[int, int]:
    """Return the granularity at which cuDNN skips hidden keys; it chooses its tiles itself."""
    return (128, 128)


def unsupported(request: Request) -> str | None:
    """Return why this kernel cannot run the request, as a sentence; None if it can."""
    if request.gathered:
        return "It needs as many keys as queries, in the same layout, not keys gathered from several devices."
    rule = request.rule
    if request.made or rule.prefix not in (None, 0) or rule.ahead is not None:
        return (
            "It supports causal, full or sliding-window masks, not documents, a prefix, a window to both sides, other "
            "ranges or those of a windowed cache."
        )
    if request.causal and (reason := _too_many_runs(request)):
        return reason
    if not request.causal and rule.window is not None:
        return "It supports sliding windows only with a causal mask."
    if not request.causal and request.padded:
        return "It cannot mask padding under a full mask."
    if request.dtype not in DTYPES:
        return f"It computes in {' or '.join(DTYPES)}; the queries are {request.dtype}."
    if request.value_dim != request.dim:
        return f"It needs values as wide as keys; got {request.value_dim} and {request.dim}."
    if request.dim > 128:
        return f"It needs a head dimension of at most 128; got {request.dim}."
    for name, value in (("softcap", request.softcap), ("bias", request.bias), ("tile", request.tile)):
        if value is not None:
            return f"It does not support {name}."
    if request.lse:
        return "It has no gradient of the log-sum-exp, as return_lse=True needs."
    if request.deterministic:
        return "It adds up gradients in an order that changes from run to run, so it is not deterministic."
    return binding.unavailable() if request.here else None


def _too_many_runs(request: Request) -> str | None:
    runs = request.layout.runs(request.padded_length, request.devices)
    if runs is not None and runs.count <= MOST_RUNS:
        return None
    held = "unequal runs" if runs is None else f"{runs.count} runs"
    return (
        f"It needs each device's tokens in at most {MOST_RUNS} runs of evenly spaced positions; with "
        f"{request.layout!r} they are in {held}."
    )


def attend(q: Float[Array, "batch queries heads dim"]) -> Callable[..., Partial]:
    """Forward pass; see `contract.py`."""
    whole = _forward(q)

    def run(k: Array, v: Array, block: Block) -> Partial:
        if isinstance(block.pattern, Same):
            return _attend_first(q, k, v, block)
        possible = cases(_pattern(block), q.shape[1])
        if possible is not None:
            return whole(k, v, possible, block.query_positions[0] - block.key_positions[0], block.scale)
        queries, keys, values = (_runs(x, block) for x in (q, k, v))
        parts: list[Any] = [None] * len(queries)
        for i, j, possible, ahead in _meetings(block):
            part = _forward(queries[i])(keys[j], values[j], possible, ahead, block.scale)
            parts[i] = part if parts[i] is None else merge(parts[i], part)
        parts = [_nothing(x) if part is None else part for x, part in zip(queries, parts, strict=True)]
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)

    return run


def attend_grad(
    q: Float[Array, "batch queries heads dim"],
    out: Float[Array, "batch queries heads dim"],
    lse: Float[Array, "batch queries heads"],
    dout: Float[Array, "batch queries heads dim"],
    dlse: None = None,
) -> Callable[..., Gradients]:
    """Backward pass; see `contract.py`. There is no gradient of lse: `unsupported` rejects requests for it."""
    rows = (q, out, lse, dout)
    whole = _backward(*rows)

    def run(k: Array, v: Array, block: Block) -> Gradients:
        possible = cases(_pattern(block), q.shape[1])
        if possible is not None:
            return whole(k, v, possible, block.query_positions[0] - block.key_positions[0], block.scale)
        queries, keys, values = (_runs(x, block) for x in (rows, k, v))
        zeros = lambda parts: [jnp.zeros(x.shape, accumulator(x.dtype)) for x in parts]  # noqa: E731
        dq, dk, dv = zeros(x[0] for x in queries), zeros(keys), zeros(values)
        for i, j, possible, ahead in _meetings(block):
            a, b, c, _ = _backward(*queries[i])(keys[j], values[j], possible, ahead, block.scale)
            dq[i], dk[j], dv[j] = dq[i] + a, dk[j] + b, dv[j] + c
        return jnp.concatenate(dq, axis=1), jnp.concatenate(dk, axis=1), jnp.concatenate(dv, axis=1), None

    return run


def _pattern(block: Block) -> Pattern:
    if not isinstance(block.pattern, Pattern):
        raise NotImplementedError("The cudnn kernel takes no ranges, only causal, full and window masks.")
    return block.pattern


def _runs(arrays: Any, block: Block) -> list[Any]:
    """Split the arrays of a block into the runs of a device's tokens."""
    count = runs_of(_pattern(block)).count
    leaves, structure = jax.tree.flatten(arrays)
    parts = zip(*(jnp.split(x, count, axis=1) for x in leaves), strict=True)
    return [jax.tree.unflatten(structure, part) for part in parts]


def _meetings(block: Block) -> Iterator[tuple[int, int, Cases, Any]]:
    """Yield query and key runs that may see each other, their possible pieces, and how far the queries are ahead."""
    pattern, slots = _pattern(block), block.query_positions.shape[0]
    count = runs_of(pattern).count
    for i in range(count):
        for j in range(count):
            possible = cases_of_runs(pattern, slots, i, j)
            if possible is not None:
                first = block.query_positions[i * slots // count], block.key_positions[j * slots // count]
                yield i, j, possible, first[0] - first[1]


def _nothing(q: Array) -> Partial:
    dtype = accumulator(q.dtype)
    return Partial(jnp.zeros_like(q, dtype=dtype), jnp.full_like(q, -jnp.inf, shape=q.shape[:3], dtype=dtype))


def _forward(q: Array) -> Callable[..., Partial]:
    """Prepare the queries once; the returned function attends to keys by one of several possible pieces."""
    batch, slots, heads, dim = q.shape
    wide = _widen(q)
    queries = _Rows(wide)

    def run(k: Array, v: Array, possible: Cases, ahead: Any, scale: float) -> Partial:
        k, v = _widen(k), _widen(v)

        def piece(piece: Piece) -> list[Array]:
            arrays = queries.take(piece), _keys(k, piece), _keys(v, piece)
            return binding.forward(*arrays, scale=scale, causal=piece.causal, window=piece.window)

        stats = jax.ShapeDtypeStruct((batch, heads, slots), accumulator(q.dtype))
        results = [_Result(wide, 1, 0.0), _Result(stats, 2, -jnp.inf)]
        out, lse = _take(piece, results, possible, ahead)
        return Partial(out[..., :dim].astype(stats.dtype), jnp.swapaxes(lse, 1, 2))

    return run


def _backward(q: Array, out: Array, lse: Array, dout: Array) -> Callable[..., Gradients]:
    """Like `_forward`, for the gradients."""
    dim, wide, dtype = q.shape[-1], _widen(q), accumulator(q.dtype)
    queries, outs, douts = (_Rows(_widen(x.astype(q.dtype))) for x in (q, out, dout))
    stats = _Rows(jnp.swapaxes(jnp.where(jnp.isneginf(lse), _LARGE, lse), 1, 2), axis=2, fill=_LARGE)

    def run(k: Array, v: Array, possible: Cases, ahead: Any, scale: float) -> Gradients:
        k, v = _widen(k), _widen(v)

        def piece(piece: Piece) -> list[Array]:
            arrays = queries.take(piece), _keys(k, piece), _keys(v, piece)
            rows = outs.take(piece), stats.take(piece), douts.take(piece)
            return binding.backward(*arrays, *rows, scale=scale, causal=piece.causal, window=piece.window)

        results = [_Result(wide, 1, 0.0), _Result(k, 1, 0.0, of_keys=True), _Result(v, 1, 0.0, of_keys=True)]
        dq, dk, dv = (x[..., :dim].astype(dtype) for x in _take(piece, results, possible, ahead))
        return dq, dk, dv, None

    return run


def _attend_first(q: Array, k: Array, v: Array, block: Block) -> Partial:
    """Attend from all queries of a sequence to its first keys, possibly none: for a cache."""
    counts = jnp.broadcast_to(block.end[:, 0], q.shape[:1])
    heads, keys, values = (_widen(jnp.swapaxes(x, 1, 2)) for x in (q, k, v))
    out, lse = binding.forward_lengths(heads, keys, values, jnp.maximum(counts, 1), scale=block.scale)
    some = (counts > 0)[:, None, None]
    out = jnp.where(some[..., None], jnp.swapaxes(out[..., : q.shape[-1]], 1, 2).astype(lse.dtype), 0)
    return Partial(out, jnp.where(some, jnp.swapaxes(lse, 1, 2), -jnp.inf))


def _widen(x: Array) -> Array:
    """Pad the head dimension with zeros to a multiple of 8, as cuDNN requires: scores stay the same."""
    return _pad(x, 0, -x.shape[-1] % 8, x.ndim - 1, 0.0)


class _Rows:
    """An array with a row per query. Pieces take ranges of rows; common ranges are sliced once, for all blocks."""

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
    """Pad an axis at both ends; negative widths crop."""
    if before == after == 0:
        return x
    widths = [(before, after, 0) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    return lax.pad(x, jnp.asarray(fill, x.dtype), widths)


def _keys(x: Array, piece: Piece) -> Array:
    x = jnp.flip(x, 1) if piece.backwards else x
    return x if piece.keys == (0, x.shape[1]) else x[:, piece.keys[0] : piece.keys[1]]


class _Result(NamedTuple):
    """A result of a piece: the array of the block with its shape, the axis of its rows, and the value elsewhere."""

    like: Any
    axis: int
    fill: float
    of_keys: bool = False

    def place(self, x: Array, piece: Piece) -> Array:
        """Place the result of a piece in the block."""
        first, last = piece.keys if self.of_keys else piece.rows
        x = _pad(x, first, self.like.shape[self.axis] - last, self.axis, self.fill)
        return jnp.flip(x, self.axis) if piece.backwards else x

    def place_one(self, x: Array, pieces: list[Any], which: Any) -> Array:
        """Place the result of one of several pieces of equal size in the block."""
        firsts = [0 if self.of_keys else piece.rows[0] for piece in pieces]
        most = max(firsts)
        if most == min(firsts):
            return self.place(x, pieces[0])
        x = _pad(x, most, 0, self.axis, self.fill)
        return lax.dynamic_slice_in_dim(x, most - jnp.array(firsts)[which], self.like.shape[self.axis], self.axis)

    def blank(self, varying: Array) -> Array:
        return jnp.full_like(varying, self.fill, shape=self.like.shape, dtype=self.like.dtype)


def _take(run: Callable[[Any], Any], results: list[_Result], possible: Cases, ahead: Any) -> list[Array]:
    """Run the piece that matches the block and place its results in the block.

    Results of equal shape are placed after the branches, where the compiler can fuse this with their consumers.
    """
    pieces = list(possible.pieces)
    blank = lambda: [result.blank(results[0].like) for result in results]  # noqa: E731
    place = lambda piece: [r.place(x, piece) for r, x in zip(results, run(piece), strict=True)]  # noqa: E731
    branches = [blank if piece is None else functools.partial(place, piece) for piece in pieces]
    if len(pieces) == 1:
        return branches[0]()
    which = possible.which(ahead)
    sizes = {piece and (piece.rows[1] - piece.rows[0], piece.keys, piece.backwards) for piece in pieces}
    if len(sizes) == 1:
        arrays = lax.switch(which, [functools.partial(run, piece) for piece in pieces])
        return [r.place_one(x, pieces, which) for r, x in zip(results, arrays, strict=True)]
    return lax.switch(which, branches)

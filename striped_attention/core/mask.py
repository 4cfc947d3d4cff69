"""Mask: which keys a query may see.

A query at position p sees a half-open range of key positions `[lo(p), hi(p))`, and neither end ever decreases with p.
All masks that language models are trained with have this form, and so do their intersections (`&`):

    full                 [0, T)                       1 1 1 1    causal    1 0 0 0    sliding_window(2)    1 0 0 0
    causal               [0, p + 1)                   1 1 1 1              1 1 0 0                         1 1 0 0
    sliding_window(w)    [p - w + 1, p + 1)           1 1 1 1              1 1 1 0                         0 1 1 0
    prefix(m)            [0, max(p + 1, m))           1 1 1 1              1 1 1 1                         0 0 1 1
    documents(ids)       [start of p's document, p + 1)

1 means "may attend"; rows are queries, columns are keys. So a mask is two integers (window and prefix) and, for packed
documents, one or two integers per position. Only `dense` builds a length × length array, for inspection.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from striped_attention.core.annotations import checks_itself
from striped_attention.core.checks import enabled as checks_enabled
from striped_attention.core.checks import is_traced, log_unless
from striped_attention.core.layout import INT32_MAX, Layout, check_whole, namespace

Bounds = Int[Array | np.ndarray, "rows positions"]


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """The range of keys that each query sees; made by `causal`, `full`, `sliding_window`, `documents`, `prefix`, `&`.

    A pytree: `lo` and `hi` (batch or 1, length) are its arrays, everything else is static. `window=None` means that a
    query sees the whole past, `prefix=None` that it sees the whole future; a causal mask has prefix 0. `length` is set
    in masks that hold arrays; `permute` sets `placed` (a layout and a number of devices).
    """

    window: int | None = None
    prefix: int | None = None
    lo: Any = None
    hi: Any = None
    length: int | None = None
    placed: tuple[Layout, int] | None = None

    def __repr__(self) -> str:
        """Show the functions that make such a mask; of documents only the shape of their ids."""
        parts = [f"sliding_window({self.window})"] if self.window is not None else []
        if self.prefix:
            parts.append(f"prefix({self.prefix})")
        if self.length is not None:
            causal = "" if self.prefix == 0 else ", causal=False"
            shapes = [x.shape for x in (self.lo, self.hi) if len(getattr(x, "shape", ())) == 2]  # of arrays, not specs
            rows = f"{max(shape[0] for shape in shapes)}, " if shapes else ""
            parts.append(f"documents([{rows}{self.length}]{causal})")
        where = "" if self.placed is None else f".permute({self.placed[0]!r}, {self.placed[1]})"
        found = " & ".join(parts) or ("full()" if self.prefix is None else "causal()")
        return f"({found}){where}" if where and len(parts) > 1 else found + where

    @property
    def rows(self) -> int:
        """The number of sequences with documents of their own; 1 if all sequences share the mask."""
        return max((x.shape[0] for x in (self.lo, self.hi) if x is not None), default=1)

    def __and__(self, other: "Mask") -> "Mask":
        """Return the intersection: the keys visible under both masks."""
        if not isinstance(other, Mask):
            return NotImplemented
        if self.length and other.length and (self.length, self.placed) != (other.length, other.placed):
            raise ValueError(
                f"Masks joined by & must have the same length and layout; got lengths {self.length} and "
                f"{other.length}, layouts {self.placed} and {other.placed}. Join them before mask.permute."
            )
        rows = {x.shape[0] for mask in (self, other) for x in (mask.lo, mask.hi) if x is not None} - {1}
        if len(rows) > 1:
            raise ValueError(f"Masks joined by & must have the same batch; got {sorted(rows)} rows of segment ids.")
        return Mask(
            window=_either(min, self.window, other.window),
            prefix=_either(min, self.prefix, other.prefix),
            lo=_either(namespace(self.lo, other.lo).maximum, self.lo, other.lo),
            hi=_either(namespace(self.hi, other.hi).minimum, self.hi, other.hi),
            length=self.length or other.length,
            placed=self.placed or other.placed,
        )

    def bounds(self, positions: Int[Array | np.ndarray, " positions"], length: int) -> tuple[Bounds, Bounds]:
        """Return `lo` and `hi`, [rows, positions], for queries of a sequence of `length` tokens; rows is batch or 1.

        Positions past the end of the sequence (padding) see nothing: their range is `[length, length)`.
        """
        xp = namespace(positions, self.lo, self.hi)
        p = xp.asarray(positions, dtype=np.int32)[None, :]
        lo = xp.zeros_like(p) if self.window is None else xp.maximum(p - (self.window - 1), 0)
        hi = xp.full_like(p, length) if self.prefix is None else xp.minimum(xp.maximum(p + 1, self.prefix), length)
        lo = lo if self.lo is None else xp.maximum(lo, self.lo)
        hi = hi if self.hi is None else xp.minimum(hi, self.hi)
        lo, hi = xp.broadcast_arrays(lo, hi)
        return xp.where(p < length, lo, length), xp.where(p < length, hi, length)

    def permute(self, layout: Layout, devices: int, slots: int | None = None) -> "Mask":
        """Return the mask in layout order, to enter `shard_map` (sharded like [batch, length]). No-op without arrays.

        `slots` is the padded length of query and key, if they were padded further than `permute` pads.
        """
        if self.length is None:
            return self
        if self.placed == (layout, devices):
            width = next(x.shape[1] for x in (self.lo, self.hi) if x is not None)
            if slots is not None and slots != width:
                raise ValueError(
                    f"This mask was permuted for arrays of {width} slots, but these have {slots}. Permute the mask "
                    f"that `documents` returned with mask.permute(layout, devices, slots={slots})."
                )
            return self
        if self.placed is not None:
            raise ValueError(
                f"This mask is already in the order of {self.placed[0]!r} on {self.placed[1]} devices; got "
                f"{layout!r} on {devices}. Permute the mask that `documents` returned instead."
            )
        widths = [(0, 0), (0, (slots or self.length) - self.length)]

        def place(x: Any) -> Any:
            return layout.permute(namespace(x).pad(x, widths, constant_values=self.length), devices, 1, pad=self.length)

        return dataclasses.replace(jax.tree.map(place, self), placed=(layout, devices))

    def dense(self, length: int) -> Bool[np.ndarray, "*rows length length"]:
        """Return the dense mask, True where a query (row) may attend to a key (column): for tests and inspection."""
        if self.placed is not None:
            raise ValueError("dense() needs a mask in sequence order; got a permuted one. Call it before mask.permute.")
        self.check_length(length)
        lo, hi = (np.asarray(x)[..., None] for x in self.bounds(np.arange(length, dtype=np.int32), length))
        key = np.arange(length)
        picture = (lo <= key) & (key < hi)
        return picture[0] if self.length is None else picture

    def check_length(self, length: int) -> None:
        """Raise unless this mask fits a sequence of `length` tokens."""
        if self.length is not None and self.length != length:
            raise ValueError(
                f"The mask was made for a sequence of {self.length} tokens (the width of its segment ids), but this "
                f"one has {length}. Make the mask from segment ids of the same length, or pass length={self.length}."
            )


jax.tree_util.register_dataclass(Mask, data_fields=["lo", "hi"], meta_fields=["window", "prefix", "length", "placed"])


def full() -> Mask:
    """Let every query see every key."""
    return Mask()


def causal() -> Mask:
    """Let a query see its own position and everything before it."""
    return Mask(prefix=0)


@checks_itself
def sliding_window(width: int) -> Mask:
    """Let a query see the last `width` keys up to its own position, its own included."""
    return Mask(window=min(check_whole("The width of a sliding window", width), INT32_MAX), prefix=0)


@checks_itself
def prefix(length: int) -> Mask:
    """Causal, except that the first `length` tokens all see each other (prefix language models)."""
    return Mask(prefix=min(check_whole("The length of a prefix", length, least=0), INT32_MAX))


@checks_itself
def documents(segment_ids: Int[Array | np.ndarray, "batch length"], causal: bool = True) -> Mask:
    """Packed documents: a query sees the keys of its own document, and with `causal` only those up to itself.

    `segment_ids` are in sequence order, not permuted, one row per sequence. Equal ids must be adjacent; documents need
    no alignment. Traced ids cannot be checked: every run of equal ids then counts as a document of its own. With
    SA_CHECK=1, an id that occurs in several runs is logged as an error at run time, and no query of that sequence sees
    any key.
    """
    traced = is_traced(segment_ids)
    if not traced and getattr(segment_ids, "is_fully_addressable", True):
        segment_ids = np.asarray(segment_ids)
    if segment_ids.ndim != 2 or 0 in segment_ids.shape or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids must be whole numbers of shape [batch, length]; got {segment_ids.dtype}{segment_ids.shape}. "
            f"For one sequence use segment_ids[None, :]."
        )
    xp: Any = namespace(segment_ids)
    lo: Any
    if xp is jnp and (sharding := jax.typeof(segment_ids).sharding).spec[1] is not None:  # an explicit mesh axis
        segment_ids = jax.reshard(segment_ids, sharding.update(spec=jax.P(sharding.spec[0], None)))
    length = segment_ids.shape[1]
    position = xp.arange(length, dtype=np.int32)[None, :]
    first = xp.concatenate([xp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    if isinstance(segment_ids, np.ndarray):
        _check_runs(segment_ids, first)
        lo = np.maximum.accumulate(np.where(first, position, 0), axis=1)
    else:
        lo = lax.cummax(jnp.where(first, position, 0), axis=1)
        if checks_enabled():
            ok = _runs_are_documents(segment_ids, first)
            log_unless(ok, _explain_runs, segment_ids, first)
            lo = jnp.where(ok[:, None], lo, length)
    if causal:
        return Mask(prefix=0, lo=lo, length=length)
    hi: Any
    last = xp.concatenate([first[:, 1:], xp.ones_like(first[:, :1])], axis=1)
    end = xp.where(last, position + 1, length)
    if isinstance(end, np.ndarray):
        hi = np.minimum.accumulate(end[:, ::-1], axis=1)[:, ::-1]
    else:
        hi = lax.cummin(end, axis=1, reverse=True)
    return Mask(lo=lo, hi=hi, length=length)


def packed(length: int, median: int = 1800, spread: float = 1.2, seed: int = 0) -> Mask:
    """Return a mask of packed documents with log-normal random lengths, one after another up to `length` tokens."""
    if check_whole("length", length) > INT32_MAX:
        raise ValueError(f"Positions are int32, so a length may be at most {INT32_MAX}; got {length}.")
    check_whole("median", median)
    random = np.random.default_rng(seed)
    lengths: list[np.ndarray] = []
    while sum(int(x.sum()) for x in lengths) < length:
        lengths.append(np.maximum(1, random.lognormal(np.log(median), spread, 1 + length // median)).astype(np.int64))
    ends = np.cumsum(np.concatenate(lengths))
    starts = np.concatenate([[0], ends[ends < length]]).astype(np.int32)
    # The result of `documents`, built without segment ids: a sequence may have a hundred million tokens.
    first = np.repeat(starts, np.diff(starts, append=np.int32(length)))
    return Mask(prefix=0, lo=first[None], length=length)


def _runs_are_documents(segment_ids: Array, first: Array) -> Array:
    """Return, for every row, whether it has as many runs of equal ids as distinct ids."""
    ordered = jnp.sort(segment_ids, axis=1)
    return jnp.sum(first, axis=1) == 1 + jnp.sum(ordered[:, 1:] != ordered[:, :-1], axis=1)


def _explain_runs(segment_ids: np.ndarray, first: np.ndarray) -> str:
    try:
        _check_runs(np.asarray(segment_ids), np.asarray(first))
    except ValueError as error:
        return str(error)
    raise AssertionError("every id lies in one run")


def _check_runs(segment_ids: np.ndarray, first: np.ndarray) -> None:
    for row, (ids, starts) in enumerate(zip(segment_ids, first, strict=True)):
        opened, count = np.unique(ids[starts], return_counts=True)
        if (count > 1).any():
            again, runs = opened[count > 1][0], count[count > 1][0]
            raise ValueError(
                f"Equal segment ids must be adjacent; in row {row} id {again} appears in {runs} separate runs. "
                f"Give every document an id of its own, and pass the ids in sequence order, not permuted."
            )


def _either(join: Any, a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else join(a, b)

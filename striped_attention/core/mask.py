"""Mask: which keys a query may see.

A query at position p sees a half-open range of key positions `[lo(p), hi(p))`, and neither end ever decreases with p.
All masks that language models are trained with have this form, and so do their intersections (`&`):

    full                 [0, T)                       1 1 1 1    causal    1 0 0 0    sliding_window(2)    1 0 0 0
    causal               [0, p + 1)                   1 1 1 1              1 1 0 0                         1 1 0 0
    sliding_window(w)    [p - w + 1, p + 1)           1 1 1 1              1 1 1 0                         0 1 1 0
    window(l, r)         [p - l, p + r + 1)           1 1 1 1              1 1 1 1                         0 0 1 1
    prefix(m)            [0, max(p + 1, m))
    documents(ids)       [start of p's document, p + 1)
    ranges(lo, hi)       [lo[p], hi[p])

1 means "may attend"; rows are queries, columns are keys. So a mask is up to three integers (`Rule`) and, for packed
documents and other ranges, one or two integers per position. Only `dense` builds a length × length array, for
inspection.
"""

import dataclasses
import functools
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

MEDIAN = 1800  # tokens per document, where the lengths are not known

Bounds = Int[Array | np.ndarray, "rows positions"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The part of a mask that is known at trace time. A query at position p sees the keys that satisfy all of these.

    * `window`: the last `window` keys up to p, and later ones; None: the whole past.
    * `prefix`: the keys up to p, or the first `prefix` keys if these are more; None: the whole future.
    * `ahead`: the keys up to p + `ahead`; None: the whole future.

    A causal mask has prefix 0.
    """

    window: int | None = None
    prefix: int | None = None
    ahead: int | None = None

    def __and__(self, other: "Rule") -> "Rule":
        prefix = _either(min, self.prefix, other.prefix)
        ahead = None if prefix == 0 else _either(min, self.ahead, other.ahead)  # a causal mask hides those anyway
        return Rule(_either(min, self.window, other.window), prefix, ahead)

    def __repr__(self) -> str:
        """Show the functions that make such a rule."""
        causal = self.prefix == 0
        parts = [f"prefix({self.prefix})"] if self.prefix else []
        if self.ahead is not None:
            parts.append(f"window({None if self.window is None else self.window - 1}, {self.ahead})")
        elif self.window is not None:
            parts.append(f"sliding_window({self.window})" if causal else f"window({self.window - 1}, None)")
        return " & ".join(parts) or ("causal()" if causal else "full()")


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """The range of keys that each query sees; made by `causal`, `documents` and the other functions here, and by `&`.

    A pytree: `lo` and `hi` (batch or 1, length) are its arrays, everything else is static. `made` names the functions
    that made the arrays, and `length` is set in masks that hold arrays; `permute` sets `placed` (a layout and a number
    of devices).
    """

    rule: Rule = Rule()
    lo: Any = None
    hi: Any = None
    length: int | None = None
    made: tuple[str, ...] = ()
    placed: tuple[Layout, int] | None = None

    def __repr__(self) -> str:
        """Show the functions that make such a mask, and the shape of their arrays."""
        shapes = [x.shape for x in (self.lo, self.hi) if len(getattr(x, "shape", ())) == 2]  # of arrays, not specs
        shape = f"[{f'{max(shape[0] for shape in shapes)}, ' if shapes else ''}{self.length}]"
        causal = "" if self.rule.prefix == 0 else ", causal=False"
        parts = [f"{name}({shape}{causal if name == 'documents' else ''})" for name in self.made]
        rule = repr(self.rule)
        if not (parts and (rule == "full()" or (rule == "causal()" and "documents" in self.made))):
            parts.insert(0, rule)
        where = "" if self.placed is None else f".permute({self.placed[0]!r}, {self.placed[1]})"
        found = " & ".join(parts)
        return f"({found}){where}" if where and "&" in found else found + where

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
            rule=self.rule & other.rule,
            lo=_either(namespace(self.lo, other.lo).maximum, self.lo, other.lo),
            hi=_either(namespace(self.hi, other.hi).minimum, self.hi, other.hi),
            length=self.length or other.length,
            made=tuple(sorted({*self.made, *other.made})),
            placed=self.placed or other.placed,
        )

    def bounds(
        self, positions: Int[Array | np.ndarray, " positions"], length: int, keys: int | None = None, offset: int = 0
    ) -> tuple[Bounds, Bounds]:
        """Return `lo` and `hi`, [rows, positions], for queries of a sequence of `length` tokens; rows is batch or 1.

        Positions past the end of the sequence (padding) see nothing: their range is `[keys, keys)`. `keys` is the
        number of keys, if they are not those of the same sequence; the query at position 0 then takes place `offset`.
        """
        xp, rule, keys = namespace(positions, self.lo, self.hi), self.rule, length if keys is None else keys
        p = xp.asarray(positions, dtype=np.int32)[None, :]
        real, p = p < length, p + np.int32(offset) if offset else p
        lo = xp.zeros_like(p) if rule.window is None else xp.maximum(p - (rule.window - 1), 0)
        hi = xp.full_like(p, keys) if rule.prefix is None else xp.minimum(xp.maximum(p + 1, rule.prefix), keys)
        if rule.ahead is not None:
            ahead = min(rule.ahead, keys - 1)
            hi = xp.minimum(hi, xp.minimum(p, keys - 1 - ahead) + ahead + 1)  # in this order int32 does not overflow
        lo = lo if self.lo is None else xp.maximum(lo, self.lo)
        hi = hi if self.hi is None else xp.minimum(hi, self.hi)
        if offset or not (self.lo is None and self.hi is None):
            lo = xp.minimum(lo, hi)  # empty ranges are [hi, hi), so kernels see start ≤ end
        lo, hi = xp.broadcast_arrays(lo, hi)
        return xp.where(real, lo, keys), xp.where(real, hi, keys)

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

    def dense(
        self, length: int, keys: int | None = None, offset: int = 0
    ) -> Bool[np.ndarray, "*rows length key_length"]:
        """Return the dense mask, True where a query (row) may attend to a key (column): for tests and inspection.

        `keys` and `offset` are those of cross attention, as for `bounds`.
        """
        if self.placed is not None:
            raise ValueError("dense() needs a mask in sequence order; got a permuted one. Call it before mask.permute.")
        self.check_length(length)
        positions = np.arange(length, dtype=np.int32)
        lo, hi = (np.asarray(x)[..., None] for x in self.bounds(positions, length, keys, offset))
        key = np.arange(length if keys is None else keys)
        picture = (lo <= key) & (key < hi)
        return picture[0] if self.length is None else picture

    def check_length(self, length: int) -> None:
        """Raise unless this mask fits a sequence of `length` tokens."""
        if self.length is not None and self.length != length:
            raise ValueError(
                f"The mask was made for a sequence of {self.length} tokens (the width of its segment ids), but this "
                f"one has {length}. Make the mask from segment ids of the same length, or pass length={self.length}."
            )


jax.tree_util.register_dataclass(Mask, data_fields=["lo", "hi"], meta_fields=["rule", "length", "made", "placed"])


def full() -> Mask:
    """Let every query see every key."""
    return Mask()


def causal() -> Mask:
    """Let a query see its own position and everything before it."""
    return Mask(Rule(prefix=0))


@checks_itself
def sliding_window(width: int) -> Mask:
    """Let a query see the last `width` keys up to its own position, its own included."""
    return Mask(Rule(window=min(check_whole("The width of a sliding window", width), INT32_MAX), prefix=0))


@checks_itself
def window(left: int | None, right: int | None) -> Mask:
    """Let a query see its own position, `left` keys before it and `right` keys after it; None means all of them.

    `window(left, 0)` is `sliding_window(left + 1)`.
    """
    before = None if left is None else min(check_whole("The left side of a window", left, least=0) + 1, INT32_MAX)
    after = None if right is None else min(check_whole("The right side of a window", right, least=0), INT32_MAX)
    return Mask(Rule(window=before, prefix=0) if after == 0 else Rule(window=before, ahead=after))


@checks_itself
def prefix(length: int) -> Mask:
    """Causal, except that the first `length` tokens all see each other (prefix language models)."""
    return Mask(Rule(prefix=min(check_whole("The length of a prefix", length, least=0), INT32_MAX)))


@checks_itself
def ranges(
    lo: Int[Array | np.ndarray, "*rows length"] | int, hi: Int[Array | np.ndarray, "*rows length"] | int
) -> Mask:
    """Any ranges of keys: a query at position p sees the keys [lo[p], hi[p]); none if lo[p] ≥ hi[p].

    `lo` and `hi` are [length] or [batch, length], in sequence order; one of them may be an integer. Neither may ever
    decrease along the sequence. Values below 0 mean 0, and values beyond the keys mean their end. Traced values cannot
    be checked; with SA_CHECK=1, ones that decrease are logged as an error at run time, and no query of that sequence
    sees any key. Intersect with `causal()` if no query sees a later key: that is then known at trace time.

        position = np.arange(length)
        sa.ranges(0, (position // 512 + 1) * 512)                    block-causal, with blocks of 512
        sa.ranges(0, np.repeat(lengths[:, None], length, axis=1))    the first lengths[row] keys of every row
        sa.ranges(0, np.maximum(position + 1, image_end))            causal, but images also see their own later tokens
                                                                     (image_end: where p's image ends, or 0 in text)
    """
    ends: dict[str, Any] = {"lo": _whole("lo", lo), "hi": _whole("hi", hi)}
    shapes = {x.shape for x in ends.values() if x.ndim == 2}
    lengths, rows = {shape[1] for shape in shapes}, {shape[0] for shape in shapes} - {1}
    if len(lengths) != 1 or len(rows) > 1 or 0 in next(iter(shapes)):
        raise ValueError(
            f"lo and hi must have the shape [length] or [batch, length], and at most one of them may be an integer; "
            f"got shapes {ends['lo'].shape} and {ends['hi'].shape}."
        )
    (length,) = lengths
    both = []
    for name, x in ends.items():
        xp: Any = namespace(x)
        x = _not_negative(x)
        if isinstance(x, np.ndarray):
            _check_monotone(name, x)
        elif x.ndim == 2 and checks_enabled():
            ok = jnp.all(x[:, 1:] >= x[:, :-1], axis=1)
            log_unless(ok, _explain_monotone, np.array(name == "lo"), x)
            x = jnp.where(ok[:, None], x, INT32_MAX if name == "lo" else 0)
        both.append(x if x.ndim == 2 else xp.full((1, length), x))
    return Mask(lo=both[0], hi=both[1], length=length, made=("ranges",))


def _whole(name: str, x: Any) -> Any:
    """Return an end of ranges as an integer array, [rows, length] or []."""
    if not is_traced(x) and getattr(x, "is_fully_addressable", True):
        x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer) or x.ndim > 2:
        raise ValueError(f"{name} must be whole numbers of shape [length] or [batch, length]; got {x.dtype}{x.shape}.")
    x = x[None] if x.ndim == 1 else x
    return _gathered(x) if x.ndim == 2 else x


def _not_negative(x: Any) -> Any:
    """Return whole numbers of any dtype as int32, clipped to what it can hold, and negative ones as 0."""
    xp, limits = namespace(x), np.iinfo(x.dtype)
    if limits.max > INT32_MAX:
        x = xp.minimum(x, np.array(INT32_MAX, x.dtype))
    if limits.min < -INT32_MAX - 1:
        x = xp.maximum(x, np.array(0, x.dtype))
    return xp.maximum(x.astype(np.int32), np.int32(0))


def _gathered(x: Any) -> Any:
    """Return an array [rows, length] whose rows are whole on every device, also under an explicit mesh axis."""
    if isinstance(x, np.ndarray) or (sharding := jax.typeof(x).sharding).spec[1] is None:
        return x
    return jax.reshard(x, sharding.update(spec=jax.P(sharding.spec[0], None)))


def _check_monotone(name: str, x: np.ndarray) -> None:
    falls = np.argwhere(np.diff(x, axis=1) < 0) if x.ndim == 2 else np.zeros((0, 2))
    if len(falls):
        row, position = falls[0]
        raise ValueError(
            f"{name} must never decrease along the sequence; in row {row} it is {x[row, position]} at position "
            f"{position} and {x[row, position + 1]} at the next one. Masks are one range of keys per query, in "
            f"sequence order."
        )


def _explain_monotone(is_lo: np.ndarray, x: np.ndarray) -> str:
    try:
        _check_monotone("lo" if is_lo else "hi", np.asarray(x))
    except ValueError as error:
        return str(error)
    raise AssertionError("it never decreases")


@checks_itself
def documents(
    segment_ids: Int[Array | np.ndarray, "batch length"], causal: bool = True, padding: int | None = None
) -> Mask:
    """Packed documents: a query sees the keys of its own document, and with `causal` only those up to itself.

    `segment_ids` are in sequence order, not permuted, one row per sequence. Equal ids must be adjacent; documents need
    no alignment. Tokens with the id `padding`, which may occur anywhere, see nothing and are never seen. Traced ids
    cannot be checked: every run of equal ids then counts as a document of its own. With SA_CHECK=1, an id that occurs
    in several runs is logged as an error at run time, and no query of that sequence sees any key.
    """
    if not is_traced(segment_ids) and getattr(segment_ids, "is_fully_addressable", True):
        segment_ids = np.asarray(segment_ids)
    if segment_ids.ndim != 2 or 0 in segment_ids.shape or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids must be whole numbers of shape [batch, length]; got {segment_ids.dtype}{segment_ids.shape}. "
            f"For one sequence use segment_ids[None, :]."
        )
    if padding is not None:
        padding = check_whole("padding, the id of tokens that are never seen,", padding, least=-INT32_MAX - 1)
        limits = np.iinfo(segment_ids.dtype)
        padding = padding if limits.min <= padding <= limits.max else None  # no token can have it
    xp: Any = namespace(segment_ids)
    segment_ids = _gathered(segment_ids)
    length = segment_ids.shape[1]
    position = xp.arange(length, dtype=np.int32)[None, :]
    first = xp.concatenate([xp.ones_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    lo: Any = _running(xp.where(first, position, 0), np.maximum)
    hi: Any = None
    if not causal or padding is not None:
        last = xp.concatenate([first[:, 1:], xp.ones_like(first[:, :1])], axis=1)
        hi = _running(xp.where(last, position + 1, length)[:, ::-1], np.minimum)[:, ::-1]
    if padding is not None:
        lo = xp.where(segment_ids == padding, hi, lo)  # an empty range, at the end of the run
    if isinstance(segment_ids, np.ndarray):
        _check_runs(segment_ids, first, padding)
    elif checks_enabled():
        ok = _runs_are_documents(segment_ids, first, padding)
        log_unless(ok, functools.partial(_explain_runs, padding=padding), segment_ids, first)
        lo = jnp.where(ok[:, None], lo, length)
    rule = Rule(prefix=0) if causal else Rule()
    return Mask(rule, lo, None if causal else hi, length, ("documents",))


def _running(x: Any, join: Any) -> Any:
    """Return the running maximum (`join` is np.maximum) or minimum along the rows."""
    if isinstance(x, np.ndarray):
        return join.accumulate(x, axis=1)
    return (lax.cummax if join is np.maximum else lax.cummin)(x, axis=1)


def packed(length: int, median: int = MEDIAN, spread: float = 1.2, seed: int = 0) -> Mask:
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
    return Mask(Rule(prefix=0), first[None], None, length, ("documents",))


def _runs_are_documents(segment_ids: Array, first: Array, padding: int | None) -> Array:
    """Return, for every row, whether it has as many runs of equal ids as distinct ids, padding aside."""
    ordered = jnp.sort(segment_ids, axis=1)
    distinct = jnp.concatenate([jnp.ones_like(first[:, :1]), ordered[:, 1:] != ordered[:, :-1]], axis=1)
    if padding is not None:
        first, distinct = first & (segment_ids != padding), distinct & (ordered != padding)
    return jnp.sum(first, axis=1) == jnp.sum(distinct, axis=1)


def _explain_runs(segment_ids: np.ndarray, first: np.ndarray, padding: int | None) -> str:
    try:
        _check_runs(np.asarray(segment_ids), np.asarray(first), padding)
    except ValueError as error:
        return str(error)
    raise AssertionError("every id lies in one run")


def _check_runs(segment_ids: np.ndarray, first: np.ndarray, padding: int | None) -> None:
    for row, (ids, starts) in enumerate(zip(segment_ids, first, strict=True)):
        opened, count = np.unique(ids[starts], return_counts=True)
        again = (count > 1) & (True if padding is None else opened != padding)
        if again.any():
            raise ValueError(
                f"Equal segment ids must be adjacent; in row {row} id {opened[again][0]} appears in "
                f"{count[again][0]} separate runs. Give every document an id of its own, and pass the ids in sequence "
                f"order, not permuted. If it is the id of padding, pass padding={opened[again][0]}."
            )


def _either(join: Any, a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else join(a, b)

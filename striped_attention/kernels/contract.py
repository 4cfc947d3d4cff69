"""Contract: the interface that every attention kernel implements.

A kernel works on one *block*: the queries of one device against the keys of one device. The mask of a block is two
integer vectors, `start` and `end`: query row i sees the key slots `[start[i], end[i])`. Both are non-decreasing.

    attend(q)(k, v, block)                      -> Partial(out, lse)
    attend_grad(q, out, lse, dout, dlse)(k, v, block) -> (dq, dk, dv, dbias)

The first call takes the arrays that stay on the device and is made once per ring; the second is made once per block.
Work that is the same for all blocks belongs in the first call.

* q is [batch, queries, heads, dim]; k is [batch, keys, kv_heads, dim] and v [batch, keys, kv_heads, value_dim]. Heads
  are never repeated in memory.
* `out` is normalised over the block's own keys; `lse` is the log-sum-exp of their scores. Both are float32 for any
  input dtype (float64 for float64 inputs); `cudnn` computes `out` in the inputs' dtype and converts it. A row that sees
  no key has out = 0 and lse = -inf.
* `attend_grad` receives the `out` and `lse` of the *whole* row, merged over all blocks, so exp(score - lse) is the
  final probability. It returns float32 gradients, which the caller sums over blocks; a row without keys adds nothing.
  Those of a *whole* block (`Block.whole`) need no sum, so dk and dv may have the dtype of k and v.
  `dlse` is the gradient of the row's lse, None if the caller uses only `out` (`Request.lse` tells in advance).

A kernel also provides the following. A `Request` holds everything known about the work at trace time.

* `attend_whole(q)(k, v, block, keep) -> Whole`: the forward pass of a whole block, with `out` rounded to the dtype of q
  and, if `keep`, its rounding error. It is None where rounding the result of `attend` is as fast.
* `unsupported(request)`: why the kernel cannot run the request, as a sentence, or None. Kernels must reject options
  they do not support.
* `default_tile(request)`: queries × keys of a tile, if the request sets none. The planner uses the same value.
* `RATES`: how fast it is, by platform (`rates.py`). A kernel runs only on platforms that have rates; "any" covers all.
* `AUTOMATIC`: whether `kernel="auto"` may select it; otherwise it must be requested by name.
* `FULL_OUT`: whether `attend_grad` benefits from an `out` with higher precision than q.
* `SUMS_LAST`: whether dk and dv are accumulated only after the next k and v have arrived. Otherwise XLA for TPUs would
  overlap a transfer with that sum alone, and start it after attention instead of before.
* `DIFFERENTIABLE`: whether `attend_grad` is plain JAX, so that it can itself be differentiated.
* `EMULATIONS`: context managers in which the kernel runs on a CPU, by name, for tests.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array

from striped_attention.core.bias import Bias
from striped_attention.core.layout import Layout
from striped_attention.core.mask import Mask, Rule
from striped_attention.core.partial import Partial

CONTEXT = "context"  # in `Request.made`: the keys are not those of the queries' own sequence


@dataclasses.dataclass(frozen=True)
class Request:
    """Everything known at trace time about the work of a kernel. Built by `make_request`.

    `queries` and `keys` are counts per device, padding included; `length` counts the real tokens of the sequence.
    `rule` is the part of the mask that is known at trace time; `made` names what made the rest of it, if anything.
    `lse`: whether the log-sum-exp of every row is a result, with a gradient. `bias` is "slopes" (ALiBi) or "values" (a
    table). `deterministic` requires bitwise reproducible gradients. `gathered` means that the keys are those of several
    devices. `device_kind` is JAX's name of the device; "" if unknown. `here` is False for a plan, which must not query
    this machine's devices or installed libraries.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    dtype: str
    layout: Layout
    devices: int
    length: int
    rule: Rule
    made: tuple[str, ...]
    lse: bool
    bias: str | None
    softcap: float | None
    deterministic: bool
    gathered: bool
    tile: tuple[int, int] | None
    platform: str
    device_kind: str
    here: bool

    @property
    def padded_length(self) -> int:
        return self.queries * self.devices

    @property
    def padded(self) -> bool:
        return self.length != self.padded_length

    @property
    def causal(self) -> bool:
        """Whether the part of the mask that is known at trace time hides all keys after the query's own."""
        return self.rule.prefix == 0


def make_request(
    query: Any,
    key: Any,
    *,
    mask: Mask | None,
    layout: Layout,
    devices: int,
    platform: str,
    length: int | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    deterministic: bool = False,
    lse: bool = False,
    context: bool = False,
    value_dim: int | None = None,
    gathered: bool = False,
    tile: tuple[int, int] | None = None,
    device_kind: str = "",
    here: bool = True,
) -> Request:
    """Build a request for attention of one device's queries to one device's keys; only shapes and dtypes are read.

    A mask of None stands for key ranges that are unknown at trace time.
    """
    batch, queries, heads, dim = query.shape
    arrays = mask is None or mask.lo is not None or mask.hi is not None
    made = () if mask is None else mask.made
    return Request(
        batch=batch,
        queries=queries,
        keys=key.shape[1],
        heads=heads,
        kv_heads=key.shape[2],
        dim=dim,
        value_dim=dim if value_dim is None else value_dim,
        dtype=str(query.dtype),
        layout=layout,
        devices=devices,
        length=queries * devices if length is None else length,
        rule=Rule() if mask is None else mask.rule,
        made=(*(made or ("ranges",) if arrays else ()), *((CONTEXT,) if context else ())),
        lse=lse,
        bias=None if bias is None else "slopes" if bias.values is None else "values",
        softcap=softcap,
        deterministic=deterministic,
        gathered=gathered,
        tile=tile,
        platform="gpu" if platform in ("cuda", "rocm") else platform,
        device_kind=device_kind,
        here=here,
    )


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The rule behind a block's ranges, if the whole mask is known at trace time: for kernels that accept no ranges.

    A query sees every key or, if `causal`, those up to itself, or the last `window` of them. `own` marks a block whose
    queries and keys are on the same device.
    """

    layout: Layout
    devices: int
    length: int  # padded
    causal: bool
    window: int | None
    own: bool


@dataclasses.dataclass(frozen=True)
class Same:
    """Alternative to a pattern: all queries of a sequence see the same keys, the first `end[:, 0]`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """Everything a kernel receives besides q, k and v. `rows` is the batch size, or 1 if all sequences share a mask.

    Positions are used by the bias. `tile` is queries × keys, None for the kernel's default. `pattern`, if set,
    describes the same mask as `start` and `end`. `deterministic` requires bitwise reproducible gradients. A `whole`
    block has all keys of its queries and all queries of its keys.
    """

    start: Any  # int32 [rows, queries]
    end: Any  # int32 [rows, queries]
    query_positions: Any  # int32 [queries]
    key_positions: Any  # int32 [keys]
    bias: Any = None  # Bias | None
    pattern: Pattern | Same | None = dataclasses.field(default=None, metadata={"static": True})
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})
    tile: tuple[int, int] | None = dataclasses.field(default=None, metadata={"static": True})
    deterministic: bool = dataclasses.field(default=False, metadata={"static": True})
    whole: bool = dataclasses.field(default=False, metadata={"static": True})


class Whole(NamedTuple):
    """The result of a whole block: out, its rounding error, and lse as in `Partial`."""

    out: Array  # [batch, queries, heads, value_dim], in the dtype of the queries
    lost: Array | None  # likewise
    lse: Array  # float32 [batch, queries, heads]


@runtime_checkable
class Kernel(Protocol):
    """The attributes of a kernel's module."""

    AUTOMATIC: bool
    FULL_OUT: bool
    SUMS_LAST: bool
    DIFFERENTIABLE: bool
    RATES: dict[str, Any]
    EMULATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]]
    attend: Callable[..., Callable[..., Partial]]
    attend_grad: Callable[..., Callable[..., tuple[Array, Array, Array, Bias | None]]]
    attend_whole: Callable[..., Callable[..., Whole]] | None
    unsupported: Callable[[Request], str | None]
    default_tile: Callable[[Request], tuple[int, int]]

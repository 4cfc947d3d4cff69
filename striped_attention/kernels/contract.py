"""Contract: what every attention kernel keeps to, whatever it is written in.

A kernel works on one *block*: the queries of one device against the keys of one device. The mask of a block is two
integer vectors, `start` and `end`: query row i sees the key slots `[start[i], end[i])`. Both never decrease with i.

    attend(q)(k, v, block)                      -> Partial(out, lse)
    attend_grad(q, out, lse, dout)(k, v, block) -> (dq, dk, dv, dbias)

The first call is made once, with what stays at home, the second once for every block: what a kernel can prepare for all
blocks it prepares in the first.

* q is [batch, queries, heads, dim]; k and v are [batch, keys, kv_heads, dim] and heads are never repeated in memory.
* `out` is normalised over the block's own keys; `lse` is the log of the sum of exponentials of their scores. Both are
  float32 whatever the inputs are (float64 for float64); `cudnn` computes `out` in the inputs' dtype and widens it. A
  row that sees no key gives out = 0 and lse = -inf.
* `attend_grad` is given the `out` and `lse` of the *whole* row, all blocks merged: exp(score - lse) is then the final
  probability. It returns float32 gradients (the caller adds them up over blocks); a row without keys adds nothing.

Before that, a kernel answers questions about a `Request`, all that is known of the work while tracing:

* `unsupported(request)`: what it cannot do, in a sentence, or None. Kernels must reject options they do not support.
* `default_tile(request)`: queries × keys of a tile, if the request names none. The planner counts with it.
* `RATES`: how fast it is, by platform (`rates.py`). A kernel without rates for a platform, or for any, does not run
  there.
* `AUTOMATIC`: whether `kernel="auto"` may take it, or it must be asked for by name.
* `FULL_OUT`: whether `attend_grad` makes use of an `out` with more digits than q has.
* `SUMS_LAST`: whether dk and dv are added up only when the next k and v are there. XLA for TPUs would else take the
  sum for work to hide a transfer behind, and begin it after attention instead of before.
* `DIFFERENTIABLE`: whether `attend_grad` is plain JAX, so that its derivative can be taken.
* `EMULATIONS`: contexts in which the kernel runs on a CPU, by name: for tests.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array

from striped_attention.core.bias import Bias
from striped_attention.core.layout import Layout
from striped_attention.core.mask import Mask
from striped_attention.core.partial import Partial


@dataclasses.dataclass(frozen=True)
class Request:
    """All that is asked of a kernel, as far as it is known while tracing. `make_request` builds it.

    `queries` and `keys` are those of one device, padding included; `length` counts the real tokens of the sequence.
    `documents` says that the mask is more than a window and a prefix. `bias` is "slopes" (ALiBi) or "values" (a table).
    `deterministic` asks for gradients that are the same bits in every run. `gathered` keys are those of several
    devices. `device_kind` is JAX's name of the device; "" if unknown. `here` is False for a plan: then nothing is asked
    of the devices of this machine, nor of the installed libraries.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    dtype: str
    layout: Layout
    devices: int
    length: int
    window: int | None
    prefix: int | None
    documents: bool
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
        """Whether a query sees no key after its own, by the part of the mask that is known while tracing."""
        return self.prefix == 0


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
    gathered: bool = False,
    tile: tuple[int, int] | None = None,
    device_kind: str = "",
    here: bool = True,
) -> Request:
    """A request for attention of one device's queries to one device's keys; only their shapes and dtypes are read.

    A mask of None stands for ranges of keys of which nothing is known while tracing.
    """
    batch, queries, heads, dim = query.shape
    arrays = mask is None or mask.lo is not None or mask.hi is not None
    window, prefix = (None, None) if mask is None else (mask.window, mask.prefix)
    return Request(
        batch=batch,
        queries=queries,
        keys=key.shape[1],
        heads=heads,
        kv_heads=key.shape[2],
        dim=dim,
        dtype=str(query.dtype),
        layout=layout,
        devices=devices,
        length=queries * devices if length is None else length,
        window=window,
        prefix=prefix,
        documents=arrays,
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
    """Where the ranges of a block come from, if all of the mask is known while tracing: for kernels without ranges.

    A query sees every key or, if `causal`, those up to itself, or the last `window` of them. `own` is a block of the
    queries and keys of the same device.
    """

    layout: Layout
    devices: int
    length: int  # padded
    causal: bool
    window: int | None
    own: bool


@dataclasses.dataclass(frozen=True)
class Same:
    """Instead of a pattern: all queries of a sequence see the same keys, the first ones, `end[:, 0]` of them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """All that a kernel is told besides q, k and v. `rows` is the batch, or 1 when all sequences share a mask.

    Positions serve the bias; `tile` is queries × keys, None for the kernel's own choice; `pattern` says the same as
    `start` and `end` where it is there. `deterministic` asks for gradients that are the same bits in every run.
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


@runtime_checkable
class Kernel(Protocol):
    """What the module of a kernel has."""

    AUTOMATIC: bool
    FULL_OUT: bool
    SUMS_LAST: bool
    DIFFERENTIABLE: bool
    RATES: dict[str, Any]
    EMULATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]]
    attend: Callable[..., Callable[..., Partial]]
    attend_grad: Callable[..., Callable[..., tuple[Array, Array, Array, Bias | None]]]
    unsupported: Callable[[Request], str | None]
    default_tile: Callable[[Request], tuple[int, int]]

"""Decode: attention of the few newest queries to all slots of a device's cache.

Decoding is limited by memory bandwidth: every key and value is read once, and there is little to compute.

    plain     plain JAX, on any platform. CPUs process chunks of slots one after another, as far as the sequences reach;
              other platforms process all slots at once, because a chunk would be copied before use
    triton    NVIDIA GPUs: one kernel reads many chunks of slots in parallel, each only as far as it is visible, without
              writing scores to memory; a second kernel merges the chunks

Query heads that share a key head are processed together, so heads are never repeated. Keys and values are
[batch, kv_heads, slots, dim], so that the slots of a head are adjacent in memory.
"""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from striped_attention.core.partial import Partial, accumulator, merge
from striped_attention.errors import SlowKernelWarning

CHUNK = 4096  # slots that a CPU processes at a time
TRITON = (0, 13)  # the first version of JAX assumed to lack Pallas's Triton backend, which is deprecated
BLOCK = 128  # slots that a program processes at a time; half as many for head dim 256, to fit in shared memory
PROGRAMS = 1024  # approximate number of programs: several for each of a GPU's hundred multiprocessors
WIDTH = 32  # elements of a head that a program of the second kernel processes
ROWS = 16  # queries of a program are padded to a multiple of this, as tensor cores require
LOG2_E = 1.4426950408889634


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Few:
    """Everything a kernel receives besides queries, keys and values.

    `ranges` are one or two pairs (start, end) of arrays [batch, queries]: the slots that a query sees. The positions of
    queries [batch, queries] and of slots [batch, slots] are used by the bias.
    """

    ranges: Any
    query_positions: Any
    key_positions: Any
    bias: Any = None
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})

    def span(self, slots: int) -> tuple[Array, Array]:
        """Return the first slot that any query of each sequence sees, and one past the last; [batch] each."""
        some = [start < end for start, end in self.ranges]
        first = [jnp.where(s, start, slots).min(axis=1) for s, (start, _) in zip(some, self.ranges, strict=True)]
        last = [jnp.where(s, end, 0).max(axis=1) for s, (_, end) in zip(some, self.ranges, strict=True)]
        return functools.reduce(jnp.minimum, first), functools.reduce(jnp.maximum, last)


def attend_few(
    query: Float[Array, "batch queries heads dim"],
    key: Float[Array, "batch kv_heads slots dim"],
    value: Float[Array, "batch kv_heads slots dim"],
    few: Few,
) -> Partial:
    """Attend from a few queries of every sequence to a device's slots; returns a partial result as in `contract.py`."""
    on_cpu = functools.partial(plain, width=CHUNK, accelerator=False)
    if not triton_can(query, key, few):
        return lax.platform_dependent(query, key, value, few, cpu=on_cpu, default=plain)
    return lax.platform_dependent(query, key, value, few, cpu=on_cpu, cuda=by_triton, default=plain)


def triton_can(query: Any, key: Any, few: Few) -> bool:
    """Return whether the Triton kernel supports these inputs; `plain` supports everything."""
    rows, (slots, dim) = query.shape[1] * query.shape[2] // key.shape[1], key.shape[2:]
    half = query.dtype == key.dtype and query.dtype in (jnp.bfloat16, jnp.float16)
    able = few.bias is None and half and dim in (16, 32, 64, 128, 256) and slots >= BLOCK and rows <= 64
    if able and not has_triton() and jax.default_backend() == "gpu":
        _warn_without_triton()
    return able and has_triton()


def has_triton() -> bool:
    """Whether this version of JAX lowers Pallas to Triton."""
    return tuple(map(int, jax.__version__.split(".")[:2])) < TRITON


@functools.cache
def _warn_without_triton() -> None:
    warnings.warn(
        SlowKernelWarning(
            f"The Triton kernel for decoding on GPUs requires JAX before {'.'.join(map(str, TRITON))}; this is JAX "
            f"{jax.__version__}. Decoding uses plain JAX instead, which also reads empty slots of the cache."
        ),
        stacklevel=4,
    )


def plain(
    query: Array, key: Array, value: Array, few: Few, width: int | None = None, accelerator: bool = True
) -> Partial:
    """Attend in plain JAX, `width` slots at a time or all at once. Accelerators multiply 16-bit inputs directly."""
    (batch, queries, heads, dim), (kv_heads, slots) = query.shape, key.shape[1:3]
    dtype = accumulator(query.dtype)
    width = min(width or slots, slots)
    operand = query.dtype if accelerator and query.dtype in (jnp.bfloat16, jnp.float16) else dtype
    precision = lax.Precision.HIGHEST if operand == dtype else None
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=dtype)
    grouped = query.astype(operand).reshape(batch, queries, kv_heads, -1, dim)

    def chunk(j: Any, total: Partial) -> Partial:
        first = jnp.minimum(j * width, slots - width)  # the last chunk starts earlier and masks repeated slots
        part = lambda x, axis: lax.dynamic_slice_in_dim(x, first, width, axis)  # noqa: E731
        scores = product("bqkgd,bksd->bqkgs", grouped, part(key, 2).astype(operand)) * few.scale
        scores = scores.reshape(batch, queries, heads, width)
        if few.softcap is not None:
            scores = few.softcap * jnp.tanh(scores / few.softcap)
        if few.bias is not None:
            distance = part(few.key_positions, 1)[:, None] - few.query_positions[..., None]
            scores += jax.vmap(lambda head: head.at(distance), out_axes=2)(few.bias).astype(dtype)
        slot = first + jnp.arange(width, dtype=jnp.int32)
        seen = [(start[..., None] <= slot) & (slot < end[..., None]) for start, end in few.ranges]
        seen = functools.reduce(jnp.logical_or, seen) & (slot >= j * width)
        scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
        top = jnp.max(scores, axis=-1)
        shift = jnp.where(jnp.isneginf(top), 0, top)
        p = jnp.exp(scores - shift[..., None])
        weight = jnp.sum(p, axis=-1)
        p = p.astype(operand).reshape(batch, queries, kv_heads, -1, width)
        out = product("bqkgs,bksd->bqkgd", p, part(value, 2).astype(operand)).reshape(query.shape)
        out = out / jnp.where(weight == 0, 1, weight)[..., None]
        return merge(total, Partial(out, shift + jnp.log(weight)))

    nothing = Partial(jnp.zeros(query.shape, dtype), jnp.full(query.shape[:3], -jnp.inf, dtype))
    if width == slots:
        return chunk(0, nothing)
    first, last = few.span(slots)
    return lax.fori_loop(first.min() // width, -(-last.max() // width), chunk, nothing)


def by_triton(query: Array, key: Array, value: Array, few: Few, interpret: bool = False) -> Partial:
    """Attend with two Triton kernels. The first has one program per sequence, key head and chunk of visible slots."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (batch, queries, heads, dim), (kv_heads, slots) = query.shape, key.shape[1:3]
    group = heads // kv_heads
    rows = pl.cdiv(queries * group, ROWS) * ROWS
    rows = 1 << (rows - 1).bit_length()
    block = BLOCK if dim <= 128 else BLOCK // 2
    pieces = max(1, min(PROGRAMS // (batch * kv_heads), pl.cdiv(slots, block)))
    pieces = 1 << (pieces - 1).bit_length()  # some may be empty
    pad = lambda x, axis: jnp.pad(x, [(0, rows - queries * group if i == axis else 0) for i in range(x.ndim)])  # noqa: E731
    grouped = query.reshape(batch, queries, kv_heads, group, dim).swapaxes(1, 2).reshape(batch, kv_heads, -1, dim)
    ends = [jnp.repeat(end, group, axis=1) for pair in (*few.ranges, *few.ranges)[:2] for end in pair]
    span = jnp.stack(few.span(slots), axis=-1)
    whole = pl.BlockSpec((None, None, slots, dim), lambda i, j: (i // kv_heads, i % kv_heads, 0, 0))
    part = lambda *shape: pl.BlockSpec((None, None, *shape), lambda i, j: (j, i, *[0] * len(shape)))  # noqa: E731
    out, lse = pl.pallas_call(
        functools.partial(_program, few.scale, few.softcap, slots, pieces, block),
        grid=(batch * kv_heads, pieces),
        in_specs=[
            pl.BlockSpec((None, 2), lambda i, j: (i // kv_heads, 0)),
            pl.BlockSpec((None, 4, rows), lambda i, j: (i // kv_heads, 0, 0)),
            pl.BlockSpec((None, None, rows, dim), lambda i, j: (i // kv_heads, i % kv_heads, 0, 0)),
            whole,
            whole,
        ],
        out_specs=[part(rows, dim), part(rows)],
        out_shape=[
            jax.ShapeDtypeStruct((pieces, batch * kv_heads, rows, dim), jnp.float32),
            jax.ShapeDtypeStruct((pieces, batch * kv_heads, rows), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )(span, pad(jnp.stack(ends, axis=1), 2), pad(grouped, 2), key, value)

    real, width = queries * group, min(WIDTH, dim)
    one = pl.BlockSpec((pieces, None, None), lambda i, j, k: (0, i, j))
    out, lse = pl.pallas_call(
        _merge_program,
        grid=(batch * kv_heads, real, dim // width),
        in_specs=[pl.BlockSpec((pieces, None, None, width), lambda i, j, k: (0, i, j, k)), one],
        out_specs=[
            pl.BlockSpec((None, None, width), lambda i, j, k: (i, j, k)),
            pl.BlockSpec((None, None), lambda i, j, k: (i, j)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch * kv_heads, real, dim), jnp.float32),
            jax.ShapeDtypeStruct((batch * kv_heads, real), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4 if pieces <= 256 else 8),
        interpret=interpret,
    )(out, lse)

    def back(x: Array) -> Array:
        x = x.reshape(batch, kv_heads, queries, group, *x.shape[2:])
        return x.swapaxes(1, 2).reshape(batch, queries, heads, *x.shape[4:])

    return Partial(back(out), back(lse))


def _program(scale: float, softcap: float | None, slots: int, pieces: int, block: int, *refs: Any) -> None:
    """Attend to one chunk of the slots of one sequence and key head, with an online softmax."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    span, ends, q, k, v, out, lse = refs
    first, last = span[0], span[1]
    size = pl.cdiv(pl.cdiv(jnp.maximum(last - first, 0), pieces), block) * block
    begin = first + pl.program_id(1) * size
    end = jnp.minimum(begin + size, last)
    query = q[...]
    start_a, end_a, start_b, end_b = (ends[i, :][:, None] for i in range(4))

    def step(i: Any, carry: Any) -> Any:
        top, total, acc = carry
        at = begin + i * block
        here = jnp.minimum(at, slots - block)  # the last block starts earlier and masks repeated slots
        key, value = k[pl.ds(here, block), :], v[pl.ds(here, block), :]
        scores = triton.dot(query, key.T) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        slot = (here + jnp.arange(block, dtype=jnp.int32))[None, :]
        seen = ((start_a <= slot) & (slot < end_a)) | ((start_b <= slot) & (slot < end_b))
        scores = jnp.where(seen & (slot >= at) & (slot < end), scores * LOG2_E, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        p, fade = jnp.exp2(scores - shift[:, None]), jnp.exp2(top - shift)
        acc = acc * fade[:, None] + triton.dot(p.astype(value.dtype), value)
        return new_top, total * fade + jnp.sum(p, axis=1), acc

    rows, dim = query.shape
    nothing = jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros((rows, dim), jnp.float32)
    steps = pl.cdiv(jnp.maximum(end - begin, 0), block)
    top, total, acc = lax.fori_loop(0, steps, step, nothing)
    out[...] = acc / jnp.where(total == 0, 1.0, total)[:, None]
    lse[...] = (top + jnp.log2(total)) / LOG2_E


def _merge_program(parts: Any, sums: Any, out: Any, lse: Any) -> None:
    """Merge all chunks, like `merge_all`, for some elements of one query of one head."""
    each = sums[...]
    top = jnp.max(each, axis=0)
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp(each - shift)
    total = jnp.sum(weight, axis=0)
    out[...] = jnp.sum(parts[...] * weight[:, None], axis=0) / jnp.where(total == 0, 1.0, total)
    lse[...] = shift + jnp.log(total)

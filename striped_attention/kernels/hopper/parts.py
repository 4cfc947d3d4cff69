"""Parts: building blocks shared by the kernels: products, masks and scores of a tile, and copies of tiles."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array

from striped_attention.kernels.hopper import walk
from striped_attention.kernels.hopper.walk import ROWS, Walk

LOG2E = math.log2(math.e)
STAGES = 2  # tiles that a thread block holds or is fetching
GRID_LIMIT = 2**16  # CUDA's limit of all grid dimensions but the fastest
BOTH, ROW, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

emulating = False  # True while kernels are traced for Pallas's interpreter; set by `emulation.py`


@dataclasses.dataclass(frozen=True)
class Scores:
    """The conversion of products of queries and keys to base-2 scores."""

    scale: float
    softcap: float | None

    def raw(self, products: Array, penalty: Array | None) -> tuple[Array, float, Array | None]:
        """Return values and a positive factor whose product is the scores; and the derivative by the scaled products.

        The derivative is None where it is 1. A separate factor lets one instruction multiply and subtract; since it is
        positive, the largest value of a row is at its largest score.
        """
        slope = None
        if self.softcap is not None:
            # tanh x = 1 - 2 / (1 + exp 2x); the hardware's own tanh has 11 bits.
            power = jnp.exp2(products * (2 * LOG2E * self.scale / self.softcap))
            tanh = 1 - 2 / (1 + power)
            products, factor, slope = tanh, self.softcap * LOG2E, 1 - tanh * tanh
        elif self.scale > 0:
            factor = self.scale * LOG2E
        else:
            products, factor = products * self.scale, LOG2E
        if penalty is None:
            return products, factor, slope
        return products * factor - penalty, 1.0, slope

    def of(self, products: Array, penalty: Array | None) -> tuple[Array, Array | None]:
        """Return the scores and the derivative, as `raw` does."""
        raw, factor, slope = self.raw(products, penalty)
        return raw * factor, slope


def run(
    kernel: Any, inputs: Any, results: Any, shared: Any, barriers: Any, heads: int, items: Any, together: bool = False
) -> Any:
    """Launch a kernel: all items of a head before those of the next, or all heads of an item `together`.

    `barriers` are pairs (arrivals, number of barriers).
    """
    grid = {"heads": heads, "items": items.shape[0] // walk.FIELDS}
    if together and grid["items"] < GRID_LIMIT:
        grid = dict(reversed(grid.items()))  # the last dimension changes fastest
    found = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(*result) for result in results],
        scratch_types=[*shared, *(plgpu.Barrier(num_arrivals=n, num_barriers=count) for n, count in barriers)],
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*inputs)
    return [varying_like(inputs[0], x) for x in found]


def varying_like(like: Array, x: Array) -> Array:
    """Mark a kernel's result as varying over the mesh axes of its input, as shard_map's check_vma requires."""
    axes = tuple(sorted(jax.typeof(like).manual_axis_type.varying))
    return lax.pcast(x, axes, to="varying") if axes else x


def can_add() -> bool:
    """Whether several thread blocks can add to the same array: needs mutable arrays as inputs, JAX ≥ 0.11.2."""
    return emulating or jax.__version_info__ >= (0, 11, 2)


def run_adding(kernel: Any, inputs: Any, total: Any, after: Array, results: Any, *more: Any) -> Any:
    """Like `run`, with an extra first result, of the shape and dtype of `total`, that thread blocks `add` to.

    Memory is set aside for it once `after` is known.

    Heads run together, because concurrent thread blocks of one head wait for each other to add to the same queries.
    """
    run_together = functools.partial(run, together=True)
    if emulating:
        return run_together(kernel, inputs, [(total.shape, total.dtype), *results], *more)
    ref = jax.new_ref(_zeros_after.bind(after, shape=total.shape, dtype=total.dtype))
    found = run_together(kernel, (*inputs, ref), results, *more)
    return [varying_like(inputs[0], jax.freeze(ref)), *found]


def _zeros(x: Array, *, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return zeros that XLA can only make once `x` is known.

    Plain zeros are a constant: in a model without loops, XLA would make those of all layers when the program starts.
    """
    bits = lax.bitcast_convert_type(x[(0,) * x.ndim], jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    zero = jnp.minimum(lax.population_count(bits).astype(jnp.int32), 0)  # XLA does not know that it is 0
    return jnp.broadcast_to(zero.astype(dtype), shape)


def _zeros_for_all(arrays: Any, dims: Any, *, shape: tuple[int, ...], dtype: Any) -> tuple[Array, int]:
    (x,), (dim,) = arrays, dims
    return _zeros_after.bind(x, shape=(x.shape[dim], *shape), dtype=dtype), 0


# A primitive, because its result must not vary over mesh axes for shard_map, as `x` does: kernels accept no such refs.
_zeros_after = Primitive("attention_zeros_after")
_zeros_after.def_impl(_zeros)
_zeros_after.def_abstract_eval(lambda _, *, shape, dtype: jax.core.ShapedArray(shape, dtype))
mlir.register_lowering(_zeros_after, mlir.lower_fun(_zeros, multiple_results=False))
batching.primitive_batchers[_zeros_after] = _zeros_for_all


def start_sum(ref: Any, columns: int) -> None:
    """Clear the sum in the interpreter, in its first thread block; each of two warpgroups clears `columns` columns."""
    if not emulating:
        return
    first = (lax.axis_index("heads") == 0) & (lax.axis_index("items") == 0)

    def clear(group: int) -> None:
        ref[:, :, :, pl.ds(group * columns, columns)] = jnp.zeros((*ref.shape[:3], columns), ref.dtype)

    for group in range(2):
        pl.when(first & (lax.axis_index("wg") == group))(functools.partial(clear, group))


def add(x: Array, staged: Any, ref: Any) -> None:
    """Add registers to float32 values in global memory, to which other thread blocks add as well.

    The addition may be in flight until the next `add` or `write` from the same stage.
    """
    if emulating:  # the interpreter has no reduce-add, but runs one thread block at a time
        ref[...] = ref[...] + x
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the stage is free
    staged[...] = x
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged, ref, reduction_op="add")


def visits(item: Walk, times: int, stages: int, step: Callable[..., Any], carry: Any) -> Any:
    """Run all steps of a walk `times` times: first the tiles at edges, then the inner ones.

    `step` receives the step, the carry, the repetition, the slot that holds the tile, and whether it needs a mask.
    """

    def walk_once(turn: Any, carry: Any) -> Any:
        def one(j: Any, carry: Any, masked: bool) -> Any:
            return step(j, carry, turn, slot(turn * item.steps + j, stages), masked=masked)

        carry = lax.fori_loop(0, item.masked, functools.partial(one, masked=True), carry)
        return lax.fori_loop(item.masked, item.steps, functools.partial(one, masked=False), carry)

    return lax.fori_loop(0, times, walk_once, carry)


def fetch(item: Walk, times: int, stages: int, copies: Callable[[Any, Any, Any], list[Any]]) -> None:
    """Fetch the tiles of all `visits`, each as soon as its slot (one of `stages`) is free.

    `copies` maps a tile, a repetition and a slot to entries of: the barrier that signals arrival, the barrier that
    signals a free slot, and pairs of source and target.
    """

    def wait(at: Any, used: Any) -> None:
        plgpu.barrier_wait(used.at[at])

    @pl.loop(0, times)
    def _(turn: Any) -> None:
        @pl.loop(0, item.steps)
        def _(step: Any) -> None:
            count = turn * item.steps + step
            at = slot(count, stages)
            for arrived, used, pairs in copies(item.tile(step), turn, at):
                pl.when(count >= stages)(functools.partial(wait, at, used))
                for source, target in pairs:
                    plgpu.copy_gmem_to_smem(source, target, arrived.at[at])

    for at in range(stages):  # wait for the last arrivals, so that no barrier is left with a pending one
        for _, used, _ in copies(jnp.int32(0), jnp.int32(0), at):
            pl.when(at < times * item.steps)(functools.partial(wait, at, used))


def fetch_keys(item: Walk, kv_head: Any, key: Any, value: Any, places: Any) -> None:
    """Fetch the key tiles of a walk.

    `key` and `value` are tuples: the refs in global and shared memory, and the barriers that signal arrival and a free
    slot. `places` are the refs of the keys' positions, or None.
    """

    stages, tile = key[1].shape[:2]

    def copies(visited: Any, _: Any, at: Any) -> list[Any]:
        keys = pl.ds(visited * tile, tile)
        pairs = [[(ref.at[item.batch, keys, kv_head], smem.at[at])] for ref, smem, _, _ in (key, value)]
        if places is not None:
            pairs[0].append((places[0].at[keys], places[1].at[at]))
        return [(ready, used, own) for (_, _, ready, used), own in zip((key, value), pairs, strict=True)]

    fetch(item, 1, stages, copies)


def write(x: Array, staged: Any, ref: Any) -> None:
    """Write registers to global memory in the dtype of the stage, as many columns at a time as it holds."""
    columns = staged.shape[1]
    for first in range(0, x.shape[1], columns):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the stage is free
        staged[...] = x[:, first : first + columns].astype(staged.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, ref.at[:, pl.ds(first, columns)])
    plgpu.wait_smem_to_gmem(0)


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return shared memory in the layout that wgmma requires."""
    width = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)))


def stage(dim: int, value_dim: int, dtype: Any = jnp.float32) -> Any:
    """Return the staging buffers for `write` in shared memory, one per warpgroup."""
    wide = dtype == jnp.float32 and max(dim, value_dim) > 128
    return tiled((2, ROWS, 32 if wide else 64), dtype)


def slot(step: Any, stages: int = STAGES) -> Any:
    """Return the slot that holds the tile of a step."""
    return lax.rem(step, jnp.int32(stages))


def take_turns(turns: Any) -> None:
    plgpu.barrier_arrive(turns)
    plgpu.barrier_wait(turns)


def cast(x: Array, layout: Any) -> Array:
    return x if emulating else plgpu.layout_cast(x, layout)


def full(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    return cast(jnp.full(shape, value, jnp.float32), layout)


def load(ref: Any, layout: Any) -> Array:
    return cast(ref[...], layout)


def across(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Broadcast a vector along `axis` over the other axis."""
    return lax.broadcast_in_dim(x, shape, [axis])


def visible(bounds: Any, first: Any, shape: tuple[int, ...], axis: int) -> Array:
    """Return which pairs of a tile are visible. `axis` is that of the queries; `first` is the first key."""
    low, high = (across(load(bounds.at[i], ROW if axis == 0 else COLUMN), shape, axis) for i in range(2))
    if emulating:
        key = lax.broadcasted_iota(jnp.int32, shape, 1 - axis)
    else:
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1 - axis, layout=BOTH)
    key = key + first
    return (low <= key) & (key < high)


def distance(rows: Array, columns: Array) -> Array:
    shape = (rows.shape[0], columns.shape[0])
    return jnp.abs(across(rows, shape, 0) - across(columns, shape, 1)).astype(jnp.float32)


def penalty(slope: Any, rows: Array, columns: Array) -> Array:
    """Return the ALiBi penalty in base 2."""
    return distance(rows, columns) * (slope * LOG2E)


def nothing() -> None:
    """Do nothing: the default for `meanwhile`."""


def product_transposed(a: Any, b: Any, meanwhile: Callable[[], None] = nothing) -> Array:
    """Compute a · bᵀ of two arrays in shared memory; `meanwhile` runs while the tensor cores are busy."""
    if emulating:
        found = plain_product(a[...], b[...].T)
        meanwhile()
        return found

    def multiply(acc: Any) -> Array:
        plgpu.wgmma(acc, a, b.transpose((1, 0)))
        meanwhile()
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def add_product(acc: Array, a: Array, b: Any, meanwhile: Callable[[], None] = nothing) -> Array:
    """Compute acc + a · b, with `a` in registers and `b` in shared memory; `meanwhile` as above."""
    if emulating:
        acc = acc + plain_product(a, b[...])
        meanwhile()
        return acc

    def multiply(acc: Any) -> None:
        plgpu.wgmma(acc, a, b)
        meanwhile()

    return pl.run_state(multiply)(plgpu.ACC.init(acc))


class Sum:
    """A sum of products a · b, with `a` in registers or shared memory and `b` in shared memory.

    The tensor cores compute it asynchronously.
    """

    def __init__(self, held: Any) -> None:
        self.held = held

    def add(self, a: Any, b: Any, *, turned: str = "") -> None:
        """Start to add a product, with aᵀ or bᵀ if `turned` is "a" or "b"."""
        if emulating:
            a, b = a[...], b[...]
            self.held = self.held + plain_product(a.T if turned == "a" else a, b.T if turned == "b" else b)
        else:
            a, b = (x.transpose((1, 0)) if turned == name else x for name, x in (("a", a), ("b", b)))
            plgpu.wgmma(self.held, a, b)

    def read(self, running: int = 0) -> Array:
        """Return the sum once all products of all sums are done, except the last `running` ones started."""
        return self.held if emulating else plgpu.wgmma_accumulator_load(self.held, wait_n=running)


def with_sums(shapes: list[tuple[int, int]], body: Callable[..., None]) -> None:
    """Call `body` with sums that start at zero."""
    if emulating:
        body(*(Sum(jnp.zeros(shape, jnp.float32)) for shape in shapes))
    else:
        pl.run_scoped(lambda *held: body(*map(Sum, held)), *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def go_on(sums: tuple[Array, ...], body: Callable[..., None]) -> tuple[Array, ...]:
    """Return the sums after `body` has added to them."""
    if emulating:
        held = [Sum(x) for x in sums]
        body(*held)
        return tuple(x.read() for x in held)
    return tuple(pl.run_state(lambda refs: body(*map(Sum, refs)))(tuple(plgpu.ACC.init(x) for x in sums)))


def plain_product(a: Array, b: Array) -> Array:
    """Multiply matrices in the interpreter, whose wgmma does not accept register operands."""
    return jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")

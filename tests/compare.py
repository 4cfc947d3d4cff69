"""The definition of "exact" in these tests: attention on a mesh and its gradients agree with dense float64 attention.

float32 must agree to 1e-5 of the reference's scale. bfloat16 may have twice the error of plain dense attention in
bfloat16, or the tolerance of float32 where that is larger.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import striped_attention as sa
from striped_attention.core.layout import Layout
from striped_attention.core.mask import Mask
from striped_attention.core.oracle import dense_attention
from striped_attention.strategies.strategy import Strategy

FLOAT32_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape and options: everything that determines the compiled program, besides devices, layout and mask."""

    batch: int = 2
    length: int = 53
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    dtype: str = "float32"
    tile: Any = (8, 4)
    scale: float | None = None
    softcap: float | None = None
    bias: str | None = None
    sinks: bool = False

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Return random inputs, and `dout`, the gradient with respect to the output."""
        rng = np.random.default_rng(seed)
        shapes = {
            "q": (self.batch, self.length, self.heads, self.dim),
            "k": (self.batch, self.length, self.kv_heads, self.dim),
            "v": (self.batch, self.length, self.kv_heads, self.dim),
            "dout": (self.batch, self.length, self.heads, self.dim),
        }
        if self.bias is not None:
            shapes["bias"] = (self.heads,) if self.bias == "alibi" else (8, self.heads)
        if self.sinks:
            shapes["sinks"] = (self.heads,)
        arrays = {name: rng.standard_normal(shape).astype(self.dtype) for name, shape in shapes.items()}
        if self.bias == "alibi":
            arrays["bias"] = np.abs(arrays["bias"])
        return arrays

    def options(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments that `attention` and the oracle share."""
        bias = None
        if self.bias == "alibi":
            bias = sa.alibi(arrays["bias"])
        elif self.bias is not None:
            bias = sa.relative_bias(arrays["bias"], bidirectional=self.bias == "t5-bidirectional", max_distance=16)
        return {"scale": self.scale, "softcap": self.softcap, "bias": bias, "sinks": arrays.get("sinks")}


def mesh_of(devices: int, name: str = "sequence") -> jax.sharding.Mesh:
    return jax.make_mesh((devices,), (name,), devices=jax.devices()[:devices])


@functools.lru_cache(maxsize=32)
def on_mesh(shape: Shape, devices: int, layout: Layout, **options: Any) -> Any:
    """Return a function from arrays and a mask to the output and all gradients, in sequence order; default: a ring."""
    options = {"strategy": "ring", **options}

    def output(arrays: dict[str, Any], mask: Mask) -> Any:
        q, k, v = (layout.permute(arrays[name], devices=devices, axis=1) for name in "qkv")
        out = sa.attention(
            q, k, v, mesh=mesh_of(devices), axis_name="sequence", layout=layout, mask=mask, length=shape.length,
            tile=shape.tile, **shape.options(arrays), **options,
        )  # fmt: skip
        return layout.restore(out, devices=devices, axis=1, length=shape.length)

    return jax.jit(_with_gradients(output))


@functools.lru_cache(maxsize=32)
def dense(shape: Shape) -> Any:
    """Return the same function for the oracle, which takes the mask as a dense boolean array."""
    return jax.jit(
        _with_gradients(
            lambda arrays, visible: dense_attention(*(arrays[n] for n in "qkv"), visible, **shape.options(arrays))
        )
    )


def _with_gradients(output: Any) -> Any:
    def run(arrays: dict[str, Any], mask: Any) -> dict[str, Any]:
        inputs = {name: x for name, x in arrays.items() if name != "dout"}
        out, pull = jax.vjp(lambda inputs: output(inputs, mask), inputs)
        (grads,) = pull(jnp.asarray(arrays["dout"]).astype(out.dtype))
        return {"out": out, **{f"d{name}": grad for name, grad in grads.items()}}

    return run


def expected(shape: Shape, arrays: dict[str, np.ndarray], visible: np.ndarray) -> dict[str, np.ndarray]:
    """Return the results of the oracle in float64."""
    with jax.enable_x64(True):
        result = dense(shape)({name: jnp.asarray(x.astype(np.float64)) for name, x in arrays.items()}, visible)
        return {name: np.asarray(x) for name, x in result.items()}


def errors(actual: dict[str, Any], truth: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the largest error of every result, relative to the scale of the truth."""
    assert actual.keys() == truth.keys()
    found = {}
    for name, x in actual.items():
        difference = np.abs(np.asarray(x).astype(np.float64) - truth[name])
        assert np.isfinite(difference).all(), f"{name} is not finite"
        found[name] = float(difference.max() / max(np.abs(truth[name]).max(), smallest_scale(name, truth)))
    return found


def smallest_scale(name: str, truth: dict[str, np.ndarray]) -> float:
    """Return the scale of the terms that a result sums, for inputs of scale 1.

    Gradients can cancel (a softmax over one key has gradient 0), which leaves the rounding errors of the terms.
    Gradients of a bias and of sinks sum over all rows; for ALiBi's slopes, each term is multiplied by a distance.
    """
    batch, length = truth["out"].shape[:2]
    rows = (batch * length) ** 0.5
    if name == "dbias":
        return 0.1 * rows * length if truth[name].ndim == 1 else rows
    return rows if name == "dsinks" else 1.0


def assert_exact(shape: Shape, devices: int, layout: Layout, mask: Mask, seed: int = 0, **options: Any) -> None:
    """Assert that attention on a mesh equals the oracle: output and all gradients."""
    arrays = shape.arrays(seed)
    visible = mask.dense(shape.length)
    truth = expected(shape, arrays, visible)
    found = errors(on_mesh(shape, devices, layout, **options)(arrays, mask), truth)
    if shape.dtype == "float32":
        allowed = dict.fromkeys(found, FLOAT32_TOLERANCE)
    else:
        plain = errors(dense(shape)({name: jnp.asarray(x) for name, x in arrays.items()}, visible), truth)
        # dbias and dsinks have few elements, which plain attention may get right by chance. They sum the same score
        # gradients as dq and dk, so the error of plain attention in dq and dk is allowed here as well.
        scores = max(plain["dq"], plain["dk"])
        allowed = {
            name: max(2 * (max(error, scores) if name in ("dbias", "dsinks") else error), FLOAT32_TOLERANCE)
            for name, error in plain.items()
        }
    wrong = {name: (error, allowed[name]) for name, error in found.items() if error > allowed[name]}
    assert not wrong, f"error and allowed error of {wrong} with {layout} on {devices}, {mask}, {shape}, {options}"


def factorings(devices: int) -> list[Strategy]:
    """Return every strategy for a number of devices, including double rings."""
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    found = [Strategy(*some) for some in itertools.product(sizes, repeat=3) if devices % math.prod(some) == 0]
    return [one for one in found if one.inner == 1 or one.group * one.inner < devices]


def random_segments(rng: np.random.Generator, batch: int, length: int, longest: int) -> np.ndarray:
    """Return segment ids of documents with random lengths from 1 to `longest`."""
    rows = []
    for _ in range(batch):
        lengths = rng.integers(1, longest + 1, size=length)
        rows.append(np.repeat(np.arange(length), lengths)[:length])
    return np.stack(rows)


def random_mask(rng: np.random.Generator, batch: int, length: int) -> Mask:
    """Return a random mask as arrays: documents, causal, windows, or random monotone bounds with empty rows."""
    position = np.arange(length, dtype=np.int32)
    style = rng.integers(4)
    lo, hi = np.sort(rng.integers(0, length + 1, (2, batch, length)), axis=-1).astype(np.int32)
    if style == 0:
        ids = random_segments(rng, batch, length, longest=int(rng.integers(1, length + 1)))
        lo, hi = sa.documents(ids, causal=bool(rng.integers(2))).bounds(position, length)
    elif style == 1:
        lo[:], hi[:] = 0, position + 1
    elif style == 2:
        lo = np.maximum(0, position - rng.integers(0, length, (batch, 1), dtype=np.int32))
    return Mask(lo=lo, hi=hi, length=length)

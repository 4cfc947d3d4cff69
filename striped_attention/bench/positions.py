"""The suite `positions`: does a permuted model know where its tokens are, and how exactly, the longer the text?

A layer's attention whose queries and keys come from embeddings x by random matrices, with every scheme in use:

    rotary      q and k turned by angles that grow with the position
    absolute    a learned vector for every position, added to x
    alibi       a penalty that grows with the distance, one slope a head
    t5          a learned bias for every bucket of distances

It runs in float32, in layout order, on virtual devices. The answer is that of the model in text order on one device in
float64. `error` is the larger one of `output` (every row on its own scale) and `gradient` (of x and of what is learned,
relative to the largest number). As in `problem.py` the cotangent is zero but at a few rows, so that the oracle can do
any length.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.table

from striped_attention.attention import attention
from striped_attention.bench import problem, record
from striped_attention.bench.config import BenchConfig, parse_layouts
from striped_attention.bench.contestants import use_virtual
from striped_attention.bench.run import document, path, say, write
from striped_attention.bench.workers import Team
from striped_attention.bias import alibi, relative_bias
from striped_attention.layout import Layout
from striped_attention.mask import causal
from striped_attention.oracle import dense_attention
from striped_attention.rotary import rotary

HEADS, DIM, THETA, BUCKETS = 2, 32, 10_000.0, 32
WIDTH = HEADS * DIM
# Rounding makes 1e-6, with rotary positions, whose angles are float32, 2e-5 at 16384 tokens; a wrong position 0.1.
TOLERANCE = 1e-3
Learned = dict[str, Any]


def run(config: BenchConfig) -> None:
    """Compare, print a table and write the JSON, after every row."""
    options = config.options
    result = document(config, {**options, "heads": HEADS, "dim": DIM, "dtype": "float32", "mask": "causal"})
    result["rows"] = []
    layouts = parse_layouts(options["layouts"])
    for devices in options["members"]:
        with Team(Devices, [set(record.usable_cores())], devices=devices) as team:
            for length, scheme, layout in itertools.product(options["lengths"], options["positions"], layouts):
                (errors,) = team.ask("errors", scheme, layout, length)
                row = {"positions": scheme, "length": length, "layout": repr(layout), "devices": devices}
                row |= {"error": max(errors.values()), **errors}
                say(f"{scheme}, {length:,} tokens, {layout!r} on {devices} devices: error {row['error']:.1e}")
                if not row["error"] < TOLERANCE:  # NaN is not
                    raise RuntimeError(f"{scheme} positions are wrong with {layout!r} on {devices} devices: {errors}.")
                result["rows"].append(row)
                write(result, config)
    say(table(result["rows"]))
    say(str(path(config)))


class Devices:
    """What a process holds: a ring of virtual devices, and what a text's model should say."""

    def __init__(self, rank: int, ranks: int, port: int, devices: int) -> None:
        use_virtual(devices)
        kind = (jax.sharding.AxisType.Auto,)
        self.mesh = jax.make_mesh((devices,), ("sequence",), kind, devices=jax.devices()[:devices])
        self._truth: dict[Any, Any] = {}

    def errors(self, scheme: str, layout: Layout, length: int) -> dict[str, float]:
        rows = problem.sample_rows(length)
        learned, dout = make_model(scheme, length)
        if (scheme, length) not in self._truth:
            self._truth = {(scheme, length): plain(scheme, learned, dout, rows)}
        want, want_gradients = self._truth[scheme, length]
        out, gradients = permuted(scheme, learned, dout, rows, layout, self.mesh)
        wrong = np.abs(out - want).max((0, 2, 3)) / np.abs(want).max((0, 2, 3))
        apart = [np.abs(gradients[name] - x).max() / np.abs(x).max() for name, x in want_gradients.items()]
        return {"output": float(wrong.max()), "gradient": float(max(apart))}


def make_model(scheme: str, length: int) -> tuple[Learned, np.ndarray]:
    """Everything that has a gradient, and the cotangent of the output at the sampled rows; float32, in text order."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32)

    learned: Learned = {"x": normal(1, length, WIDTH), "weights": normal(3, WIDTH, WIDTH) / np.float32(WIDTH**0.5)}
    if scheme == "absolute":
        learned["table"] = normal(length, WIDTH)
    if scheme == "alibi":
        learned["slopes"] = np.float32(2.0) ** -np.arange(1, HEADS + 1, dtype=np.float32)
    if scheme == "t5":
        learned["table"] = normal(BUCKETS, HEADS)
    return learned, normal(1, len(problem.sample_rows(length)), HEADS, DIM)


def queries_keys_values(scheme: str, learned: Learned, positions: Any, turns: Any) -> tuple[Any, Any, Any]:
    """From embeddings in any order, whose positions are told; `turns` are the cosine and sine of rotary angles."""
    x = learned["x"]
    if scheme == "absolute":
        x = x + learned["table"][positions]
    q, k, v = (jnp.einsum("bsd,de->bse", x, w).reshape(1, -1, HEADS, DIM) for w in learned["weights"])
    if scheme == "rotary":
        q, k = (_turn(y, *turns) for y in (q, k))
    return q, k, v


def _turn(x: Any, cos: Any, sin: Any) -> Any:
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def make_bias(scheme: str, learned: Learned) -> Any:
    if scheme == "alibi":
        return alibi(learned["slopes"])
    return relative_bias(learned["table"]) if scheme == "t5" else None


def permuted(
    scheme: str, learned: Learned, dout: np.ndarray, rows: np.ndarray, layout: Layout, mesh: Any
) -> tuple[np.ndarray, Learned]:
    """The output at some rows and all gradients, of the ring."""
    devices, length = mesh.size, learned["x"].shape[1]
    order = layout.order(length, devices)
    slots = np.argsort(order)[rows]
    positions = jnp.asarray(order)

    def model(learned: Learned) -> Any:
        q, k, v = queries_keys_values(scheme, learned, positions, rotary(positions[None], DIM, THETA))
        bias = make_bias(scheme, learned)
        out = attention(q, k, v, mesh=mesh, axis_name="sequence", layout=layout, mask=causal(), bias=bias)
        return out[:, slots]

    out, gradients = _pull(model, {**learned, "x": layout.permute(learned["x"], devices, 1)}, dout)
    return out, {**gradients, "x": layout.restore(gradients["x"], devices, 1)}


def plain(scheme: str, learned: Learned, dout: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, Learned]:
    """The same in text order, in float64, by the oracle."""
    length = learned["x"].shape[1]
    positions = np.arange(length)
    angle = positions[None, :, None] * THETA ** -(np.arange(0, DIM, 2) / DIM)
    visible = problem.visible_rows(causal(), rows, length)
    distance = positions[None, :] - rows[:, None]

    def model(learned: Learned) -> Any:
        q, k, v = queries_keys_values(scheme, learned, positions, (np.cos(angle), np.sin(angle)))
        return dense_attention(q[:, rows], k, v, visible, bias=make_bias(scheme, learned), distance=distance)

    with jax.enable_x64(True):
        return _pull(model, jax.tree.map(lambda x: x.astype(np.float64), learned), dout.astype(np.float64))


def _pull(model: Any, learned: Learned, dout: np.ndarray) -> tuple[np.ndarray, Learned]:
    out, pull = jax.vjp(jax.jit(model), learned)
    return jax.tree.map(np.asarray, (out, pull(jnp.asarray(dout))[0]))


def table(rows: list[dict[str, Any]]) -> rich.table.Table:
    shown = rich.table.Table("positions", "tokens", "layout", "devices", "output", "gradient")
    for row in rows:
        shown.add_row(
            *(row["positions"], f"{row['length']:,}", row["layout"], str(row["devices"])),
            *(f"{row[name]:.1e}" for name in ("output", "gradient")),
        )
    return shown

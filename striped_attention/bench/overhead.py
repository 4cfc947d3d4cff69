"""The suite `overhead`: what a training step does besides attention, for one layer of a model and one device's tokens.

    what          seconds of
    attention     all blocks of the last device of the ring, forward and backward
    merges        joining the results of its blocks
    hops          sending keys, values and the sums of their gradients all the way round, between two processes
    projections   q, k and v: norm, products, rotary positions
    feed-forward  the rest of a layer: output product, norm, SwiGLU
    loss          the last norm, the vocabulary's scores and the loss; once a step, not once a layer
    permute       dealing tokens, targets and positions; of the whole text, once a step

Each runs by itself on one core, in float32, forward and backward; in a step hops run beside attention. The stages of
the model are those of `striped train`: they compute a forward pass again for the backward pass.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.table
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from striped_attention import model
from striped_attention.bench import blocks, problem
from striped_attention.bench.config import BenchConfig, parse_layouts
from striped_attention.bench.run import document, path, say, write
from striped_attention.bench.workers import Team
from striped_attention.kernel import Partial, merge
from striped_attention.layout import Layout
from striped_attention.mask import causal
from striped_attention.oracle import dense_attention
from striped_attention.parallel import AXES, stage

CHUNK = 1024  # the default of `striped train`
TOLERANCE = 1e-4
SENDS = 3  # keys and values forward, again backward, and the sums of their gradients: as many bytes each, in float32
ONCE = ("loss", "permute")  # a step; everything else is done in every layer


def run(config: BenchConfig) -> None:
    """Check, measure, print a table and write the JSON, after every text."""
    options = config.options
    result = document(config, {**options, "dtype": "float32", "chunk": CHUNK, "mask": "causal"})
    result |= {"checks": [], "rows": []}
    rings = itertools.product(options["presets"], options["members"], options["lengths"])
    for (preset, devices, length), layout in itertools.product(rings, parse_layouts(options["layouts"])):
        row = {"preset": preset, "devices": devices, "length": length, "layout": repr(layout)}
        say(f"{preset}, {length:,} tokens on {devices} devices, {layout!r}")
        with Team(Member, [set(blocks.pick_cores(1))], preset=preset, layout=layout, devices=devices) as team:
            (errors,) = team.ask("prepare", length)
            result["checks"].append({**row, "errors": check(errors)})
            (seconds,) = team.ask("seconds", options["rounds"])
        with Team(Wire, [{core} for core in blocks.pick_cores(2)]) as team:
            shape = (1, length // devices, model.PRESETS[preset].kv_heads, model.PRESETS[preset].head_dim)
            seconds["hops"] = SENDS * (devices - 1) * max(team.ask("seconds", shape, options["rounds"]))
        layers = model.PRESETS[preset].layers
        for what, value in seconds.items():
            times = 1 if what in ONCE else layers
            result["rows"].append({**row, "what": what, "seconds": value, "times": times})
        write(result, config)
    say(table(result["rows"]))
    say(str(path(config)))


def check(errors: dict[str, float]) -> dict[str, float]:
    for what, error in errors.items():
        if not error < TOLERANCE:  # NaN is not
            raise RuntimeError(f"{what} is wrong by {error:.1e}. Nothing was timed.")
    return errors


class Member:
    """What a process with a core of its own holds: the last device of a ring, and the parts of a layer."""

    def __init__(self, rank: int, ranks: int, port: int, preset: str, layout: Layout, devices: int) -> None:
        jax.config.update("jax_platforms", "cpu")
        self.config, self.layout, self.devices = model.PRESETS[preset], layout, devices
        self.parts: dict[str, Callable[[], Any]] = {}

    def prepare(self, length: int) -> dict[str, float]:
        """Compile and run every part once; errors against float64 (attention) and the same without stages."""
        here = Attention(self.config, self.layout, self.devices, length)
        stages = Stages(self.config, length // self.devices)
        tokens = np.zeros((1, length), np.int32)
        self.parts = {
            "attention": here.run,
            "merges": here.merge,
            **stages.parts,
            "permute": lambda: [self.layout.permute(tokens, self.devices, 1) for _ in range(3)],
        }
        for part in self.parts.values():
            jax.block_until_ready(part())
        return {"attention": here.error(), **stages.errors()}

    def seconds(self, rounds: int) -> dict[str, float]:
        blocks.check_pinned()
        samples: dict[str, list[float]] = {what: [] for what in self.parts}
        for _ in range(rounds):
            for what, part in self.parts.items():
                begun = time.perf_counter()
                jax.block_until_ready(part())
                samples[what].append(time.perf_counter() - begun)
        return {what: statistics.median(found) for what, found in samples.items()}


class Attention:
    """The last device's part of a layer's attention: its queries, everybody's keys and values, its blocks."""

    def __init__(self, config: model.ModelConfig, layout: Layout, devices: int, length: int) -> None:
        shape = problem.Shape(config.heads, config.kv_heads, config.head_dim, problem.CPU.dtype)
        case = blocks.Case(layout, causal(), devices, length, shape=shape)
        self.blocks = jax.tree.map(jnp.asarray, case.blocks()[-1])
        self.positions = layout.positions(devices - 1, length, devices)
        self.order = layout.order(length, devices)
        random, dim, slots = np.random.default_rng(0), config.head_dim, length // devices
        shapes = [(1, n, heads, dim) for n, heads in ((slots, config.heads), *[(length, config.kv_heads)] * 2)]
        self.q, self.k, self.v = (jnp.asarray(random.standard_normal(shape, dtype=np.float32)) for shape in shapes)
        self.keys = [
            (self.k[:, d * slots : (d + 1) * slots], self.v[:, d * slots : (d + 1) * slots]) for d in range(devices)
        ]
        self.merged = jax.jit(lambda partials: functools.reduce(merge, partials))
        self.partials = self.forward()
        self.result = self.merge()

    def forward(self) -> list[Partial]:
        attend = blocks.KERNEL.attend(self.q)
        return [attend(*self.keys[there], block) for there, block in self.blocks]

    def merge(self) -> Partial:
        return self.merged(self.partials)

    def run(self) -> Any:
        """Forward and backward, nothing joined."""
        out, lse = self.result
        gradients = blocks.KERNEL.attend_grad(self.q, out, lse, self.q)
        return self.forward(), [gradients(*self.keys[there], block) for there, block in self.blocks]

    def error(self) -> float:
        """Of the output at some rows."""
        rows = problem.sample_rows(len(self.positions))
        visible = self.order[None, :] <= self.positions[rows, None]
        with jax.enable_x64(True):
            q, k, v = (np.asarray(x, np.float64) for x in (self.q[:, rows], self.k, self.v))
            want = np.asarray(dense_attention(q, k, v, visible))
        got = np.asarray(self.result.out)[:, rows]
        return float(np.abs(got - want).max() / np.abs(want).max())


class Stages:
    """The parts of a layer that see one token at a time, and the loss; see `model.py`."""

    def __init__(self, config: model.ModelConfig, slots: int) -> None:
        self.config = config
        shapes = {**{name: shape[1:] for name, shape in config.shapes["layers"].items()}}
        shapes |= {name: config.shapes[name] for name in ("norm", "unembedding")}
        random = np.random.default_rng(0)
        normal = lambda *shape: jnp.asarray(random.standard_normal(shape, dtype=np.float32))  # noqa: E731
        weights = {name: normal(*shape) * np.float32(0.02) for name, shape in shapes.items()}
        pick = lambda *names: {name: weights[name] for name in names}  # noqa: E731
        x, attended = normal(1, slots, config.dim), normal(1, slots, config.heads, config.head_dim)
        whole = jnp.asarray(random.integers(0, config.vocabulary, (1, slots), np.int32))
        self.inputs: dict[str, Any] = {
            "projections": (model.before, pick("attention_norm", "query", "key", "value"), x, whole),
            "feed-forward": (model.after, pick("output", "ffn_norm", "gate", "up", "down"), (x, attended), ()),
            "loss": (model.losses, pick("norm", "unembedding"), x, whole),
        }
        self.run = {what: self._jitted(function) for what, (function, *_) in self.inputs.items()}

    def _jitted(self, function: Any) -> Any:
        """Forward and backward of a stage on one device, from weights, x and constants."""
        mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES.everything)

        def both(weights: Any, x: Any, constants: Any) -> Any:
            specs = jax.tree.map(lambda _: PartitionSpec(), weights)
            inner = functools.partial(function, self.config)
            staged = lambda *inputs: stage(inner, inputs[0], specs, *inputs[1:], chunk=CHUNK, dtype=jnp.float32)  # noqa: E731
            return _both(staged, weights, x, constants)

        none, split = PartitionSpec(), AXES.tokens
        return jax.jit(jax.shard_map(both, mesh=mesh, in_specs=(none, split, split), out_specs=(split, none, split)))

    @property
    def parts(self) -> dict[str, Callable[[], Any]]:
        return {what: functools.partial(self.run[what], *inputs) for what, (_, *inputs) in self.inputs.items()}

    def errors(self) -> dict[str, float]:
        """Output and gradients, against the same function in one go."""
        found = {}
        for what, (function, *inputs) in self.inputs.items():
            want = jax.jit(functools.partial(_both, functools.partial(function, self.config)))(*inputs)
            pairs = zip(*map(jax.tree.leaves, (self.parts[what](), want)), strict=True)
            found[what] = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
        return found


def _both(function: Any, weights: Any, x: Any, constants: Any) -> Any:
    """The result, and the gradients of weights and x for itself as the cotangent."""
    out, pull = jax.vjp(lambda weights, x: function(weights, x, constants), weights, x)
    return out, *pull(out)


class Wire:
    """One of two processes that send each other keys and values."""

    def __init__(self, rank: int, ranks: int, port: int) -> None:
        jax.config.update("jax_platforms", "cpu")
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=ranks, process_id=rank)
        self.rank, self.mesh = rank, jax.make_mesh((ranks,), ("sequence",), (jax.sharding.AxisType.Auto,))

    def seconds(self, shape: tuple[int, ...], rounds: int) -> float:
        """Of one hop of both, the median; raises unless what arrives is what the other has."""
        sharding = NamedSharding(self.mesh, PartitionSpec(None, "sequence"))
        own = np.full(shape, self.rank, np.float32)
        whole = (shape[0], 2 * shape[1], *shape[2:])
        keys = [jax.make_array_from_process_local_data(sharding, own, whole) for _ in range(2)]
        hop = lambda *xs: [lax.ppermute(x, "sequence", [(0, 1), (1, 0)]) for x in xs]  # noqa: E731
        send = jax.jit(jax.shard_map(hop, mesh=self.mesh, in_specs=sharding.spec, out_specs=sharding.spec))
        for x in jax.block_until_ready(send(*keys)):
            if not (np.asarray(x.addressable_data(0)) == 1 - self.rank).all():
                raise RuntimeError("What arrived is not what was sent.")
        samples = []
        for _ in range(rounds):
            begun = time.perf_counter()
            jax.block_until_ready(send(*keys))
            samples.append(time.perf_counter() - begun)
        return statistics.median(samples)


def table(rows: list[dict[str, Any]]) -> rich.table.Table:
    shown = rich.table.Table("preset", "devices", "tokens", "layout", "what", "seconds", "of attention")
    for row in rows:
        keys = ("preset", "devices", "length", "layout")
        attention = next(r for r in rows if r["what"] == "attention" and all(r[k] == row[k] for k in keys))["seconds"]
        shown.add_row(
            *(row["preset"], str(row["devices"]), f"{row['length']:,}", row["layout"], row["what"]),
            *(f"{row['seconds']:.4f}", f"{row['seconds'] / attention:.1%}"),
        )
    return shown

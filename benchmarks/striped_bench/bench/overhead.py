"""The suite `overhead`: the time of a training step by component, for one layer and the tokens of one device.

    what          seconds of
    attention     all blocks of the last device of the ring, forward and backward
    merges        merging the partial results of its blocks
    hops          sending keys, values and their gradient sums all the way round, between two processes
    projections   q, k and v: norm, matrix products, rotary positions
    feed-forward  the rest of a layer: output projection, norm, SwiGLU
    loss          final norm, logits and loss; once per step, not once per layer
    permute       tokens, targets and positions to layout order; of the whole sequence, once per step

Each component runs on its own on one core, in float32, forward and backward. The stages are those of `striped train`.
"""

import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from striped_attention.core.layout import Layout
from striped_attention.core.mask import causal
from striped_attention.core.partial import merge
from striped_attention.kernels.choice import KERNELS
from striped_attention.models import layers
from striped_attention.models.config import PRESETS, ModelConfig
from striped_attention.models.stages import AXES, stage
from striped_attention.options import parse_layouts
from striped_bench.bench import problem
from striped_bench.bench.blocks import Blocks, Case
from striped_bench.bench.contestants import Ours
from striped_bench.bench.run import Options, Progress, Record, interleaved, keep, require, seconds, tabulate
from striped_bench.bench.workers import Team, check_pinned, pick_cores

CHUNK = 1024  # the default of `striped train`
TOLERANCE = 1e-4
SENDS = 3  # keys and values forward, the same backward, and their gradient sums: equal bytes each, in float32
ONCE = ("loss", "permute")  # once per step; everything else runs once per layer
Parts = dict[str, Callable[[], Any]]


def overhead(options: Options, result: Record) -> Progress:
    result["configuration"] |= {"dtype": "float32", "chunk": CHUNK, "mask": "causal"}
    result |= {"checks": [], "rows": []}
    names = ("presets", "members", "lengths", "layouts")
    for preset, devices, length, layout in itertools.product(*(options[name] for name in names)):
        config, (chosen,) = PRESETS[preset], parse_layouts([layout])
        ring = {"preset": preset, "devices": devices, "length": length, "layout": repr(chosen)}
        case = {"config": config, "layout": chosen, "devices": devices, "length": length}
        with Team(Layer, [set(pick_cores(1))], **case) as team:
            (errors,) = team.ask("errors")
            checked = {what: require(what, error, TOLERANCE) for what, error in errors.items()}
            result["checks"].append({**ring, "errors": checked})
            (found,) = team.ask("seconds", options["rounds"])
        with Team(Wire, [{core} for core in pick_cores(2)]) as team:
            shape = (1, length // devices, config.kv_heads, config.head_dim)
            found["hops"] = SENDS * (devices - 1) * max(team.ask("seconds", shape, options["rounds"]))
        for what, taken in found.items():
            row = {**ring, "what": what, "seconds": taken, "times": 1 if what in ONCE else config.layers}
            yield from keep(result["rows"], [row])
    yield tabulate(result["rows"], "preset", "devices", "length", "layout", "what", "seconds", "times")


class Layer:
    """The object in a process with its own core: the last device of a ring, and the components of a layer."""

    def __init__(self, config: ModelConfig, layout: Layout, devices: int, length: int, **_: Any) -> None:
        jax.config.update("jax_platforms", "cpu")
        shape = problem.Shape(config.heads, config.kv_heads, config.head_dim, "float32")
        self.last, self.case = devices - 1, Case(layout, causal(), devices, length, shape=shape)
        self.ring = Blocks(self.case, [self.last], KERNELS["xla"])
        self.stages, self.truth = make_stages(config, length // devices)
        merged = jax.jit(lambda partials: functools.reduce(merge, partials))
        forward, backward = self.ring.forward(self.last), self.ring.backward(self.last, self.ring.dout)
        partials, tokens = [run() for run in forward], np.zeros((1, length), np.int32)
        self.parts: Parts = {
            "attention": lambda: [run() for run in (*forward, *backward)],
            "merges": lambda: merged(partials),
            **self.stages,
            "permute": lambda: [layout.permute(tokens, devices, 1) for _ in range(3)],
        }

    def errors(self) -> dict[str, float]:
        """Errors of attention at some rows against float64, and of the other components against unstaged versions."""
        positions = self.case.layout.positions(self.last, self.case.length, self.case.devices)
        rows = problem.sample_rows(len(positions))
        truth = problem.oracle(problem.make_inputs(self.case.length, self.case.shape), rows=np.asarray(positions[rows]))
        errors = {"attention": problem.apart(self.ring.results[self.last].out[:, rows], truth.out)}
        for what, part in self.stages.items():
            pairs = zip(*map(jax.tree.leaves, (part(), self.truth[what]())), strict=True)
            errors[what] = max(problem.apart(a, np.asarray(b), by_row=False) for a, b in pairs)
        return errors

    def seconds(self, rounds: int) -> dict[str, float]:
        for part in self.parts.values():
            jax.block_until_ready(part())
        check_pinned()
        found = interleaved(list(self.parts), rounds, lambda what: seconds(self.parts[what]))
        return {what: statistics.median(samples) for what, samples in found.items()}


def make_stages(config: ModelConfig, slots: int) -> tuple[Parts, Parts]:
    """Make the token-wise components of a layer and the loss (`models/layers.py`), staged and unstaged."""
    shapes = {name: shape[1:] for name, shape in config.shapes["layers"].items()}
    shapes |= {name: config.shapes[name] for name in ("norm", "unembedding")}
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape, dtype=np.float32))  # noqa: E731
    weights = {name: normal(*shape) * np.float32(0.02) for name, shape in shapes.items()}
    pick = lambda *names: {name: weights[name] for name in names}  # noqa: E731
    x, attended = normal(1, slots, config.dim), normal(1, slots, config.heads, config.head_dim)
    whole = jnp.asarray(random.integers(0, config.vocabulary, (1, slots), np.int32))
    inputs: dict[str, Any] = {
        "projections": (layers.before, pick("attention_norm", "query", "key", "value"), x, whole),
        "feed-forward": (layers.after, pick("output", "ffn_norm", "gate", "up", "down"), (x, attended), ()),
        "loss": (layers.losses, pick("norm", "unembedding"), x, whole),
    }
    staged: Parts = {}
    plain: Parts = {}
    for what, (function, *arrays) in inputs.items():
        function = functools.partial(function, config)
        staged[what] = functools.partial(_staged(function), *arrays)
        plain[what] = functools.partial(jax.jit(functools.partial(_both, function)), *arrays)
    return staged, plain


def _staged(function: Any) -> Any:
    """Compile forward and backward of a stage on one device, given weights, x and constants."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES.everything)

    def both(weights: Any, x: Any, constants: Any) -> Any:
        specs = jax.tree.map(lambda _: PartitionSpec(), weights)
        staged = lambda w, *inputs: stage(function, w, specs, *inputs, chunk=CHUNK, dtype=jnp.float32)  # noqa: E731
        return _both(staged, weights, x, constants)

    none, split = PartitionSpec(), AXES.tokens
    return jax.jit(jax.shard_map(both, mesh=mesh, in_specs=(none, split, split), out_specs=(split, none, split)))


def _both(function: Any, weights: Any, x: Any, constants: Any) -> Any:
    """Return the result and the gradients of weights and x, with the result as its own cotangent."""
    out, pull = jax.vjp(lambda weights, x: function(weights, x, constants), weights, x)
    return out, *pull(out)


class Wire(Ours):
    """One of two processes that exchange keys and values."""

    def seconds(self, shape: tuple[int, ...], rounds: int) -> float:
        """Median seconds of one hop of keys and values; raise if the data received is not what the peer sent."""
        sharding = NamedSharding(self.mesh, self.spec)
        own = np.full(shape, jax.process_index(), np.float32)
        whole = (shape[0], 2 * shape[1], *shape[2:])
        keys = [jax.make_array_from_process_local_data(sharding, own, whole) for _ in range(2)]
        hop = lambda *xs: [lax.ppermute(x, "sequence", [(0, 1), (1, 0)]) for x in xs]  # noqa: E731
        send = jax.jit(jax.shard_map(hop, mesh=self.mesh, in_specs=sharding.spec, out_specs=sharding.spec))
        for x in jax.block_until_ready(send(*keys)):
            if not (np.asarray(x.addressable_data(0)) == 1 - jax.process_index()).all():
                raise RuntimeError("A hop delivered wrong data.")
        return statistics.median(seconds(send, *keys) for _ in range(rounds))

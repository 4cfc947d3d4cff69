"""The suite `decode`: the cost of prefilling the cache, and of decoding a token with a filled cache.

On CPUs: whole models on virtual devices. These share the cores of one process, so the seconds are the total cost of a
token over all devices. `wire_bytes` are the bytes that a device sends per token, read from the compiled program;
`attention_bytes` are the part of them that carries partial results of attention.

On one GPU, with random keys and values in bfloat16:

    decode     attention of one layer for one new token per sequence. It reads the whole cache once, so the rate is in
               bytes per second, compared with the bandwidth of a copy on the same GPU
    prefill    attention of one layer for a whole prompt, at once and in chunks
    model      a whole model: prefill and decoding
"""

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import striped_attention as sa
from striped_attention.core.layout import Layout
from striped_attention.core.oracle import dense_attention
from striped_attention.errors import UsageError
from striped_attention.generation.engine import Engine
from striped_attention.generation.fused import fuse
from striped_attention.generation.programs import BLOCK, Options
from striped_attention.generation.sample import Sampling
from striped_attention.models.config import PRESETS, ModelConfig
from striped_attention.models.stages import AXES
from striped_attention.options import parse_layouts
from striped_attention.runtime.schedule import traffic
from striped_bench.bench import problem, run
from striped_bench.bench.contestants import use_virtual

DIM = 128
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.006}  # relative to the largest value of the result
MODEL_TOLERANCE = 0.05  # of logits in bfloat16, between prefilling and decoding the last token
Found = tuple[run.Row, run.Row]  # a check and the measurement that follows it


def decode(options: run.Options, result: run.Record) -> run.Progress:
    result |= {"checks": [], "rows": []}
    if options["platform"] == "gpu":
        if jax.default_backend() != "gpu":
            raise UsageError(f"--platform gpu needs a GPU; JAX sees only {jax.default_backend()}.")
        x = jax.random.normal(jax.random.key(0), (2**31,), jnp.bfloat16)
        ways = (functools.partial(jax.jit(way), x) for way in (jnp.copy, jnp.negative))
        copy = max(2 * x.nbytes / _seconds(way, 10) for way in ways)  # bytes read and written per second
        result["gpu"] = {"name": jax.devices()[0].device_kind, "copy_bytes_per_second": copy}
        rounds, (heads, batch, lengths) = options["rounds"], (options[name] for name in ("heads", "batch", "lengths"))
        pieces = [(h, n, chunk) for h, n in itertools.product(heads, lengths) for chunk in (n, options["chunk"])]
        found: Iterator[Found] = itertools.chain(
            (decode_layer(*case, copy, rounds) for case in itertools.product(heads, batch, lengths)),
            (prefill_layer(*case, rounds) for case in pieces),
            (
                whole_model(*case, options["chunk"], rounds, copy)
                for case in itertools.product(options["presets"], batch, lengths)
            ),
        )
    else:
        use_virtual(max(options["members"]))
        found = on_cpu(options)
    for check, row in found:
        result["checks"].append(check)
        yield from run.keep(result["rows"], [row])
    names = ("seconds", "bytes_per_second", "of_copy", "tflops", "wire_bytes", "attention_bytes")
    yield run.tabulate(result["rows"], "what", "preset", "heads", "batch", "cached", "devices", *names)


def on_cpu(options: run.Options) -> Iterator[Found]:
    """Measure whole models on 1, 2, 4, … virtual devices."""
    for preset, length, batch in itertools.product(options["presets"], options["lengths"], options["batch"]):
        config, rounds = PRESETS[preset], options["rounds"]
        truth = _scores(_engine(config, 1, "float32", sa.contiguous(), batch, length, chunk=length), length)
        for layout, devices in itertools.product(parse_layouts(options["layouts"]), options["members"]):
            engine = _engine(config, devices, "float32", layout, batch, length + _room(rounds))
            what = {"what": "model", "preset": preset, "batch": batch, "cached": length, "devices": devices}
            what["layout"] = repr(layout)
            error = problem.apart(_scores(engine, length), truth, by_row=False)
            check = _check(what, error, TOLERANCE["float32"])
            measured = {"seconds": _seconds_per_token(engine, rounds)}
            block = engine.programs.text(("block", Sampling(), (), None))  # the timed one; on CPUs 1 token
            measured["wire_bytes"] = sum(traffic(block, devices).values())
            shape, everywhere = (batch, 1, config.heads, config.head_dim), NamedSharding(engine.mesh, PartitionSpec())
            query = jax.ShapeDtypeStruct(shape, engine.options.dtype, sharding=everywhere)
            layer = str(jax.jit(sa.decode_attention).lower(query, engine.caches[0]).compile().as_text())
            attention = config.layers * sum(traffic(layer, devices).values())
            yield check, {**what, **measured, "attention_bytes": attention}


def decode_layer(heads: str, batch: int, length: int, copy: float, rounds: int) -> Found:
    q_heads, kv_heads = map(int, heads.split(":"))
    cache, filled = _empty(batch, length, kv_heads), jnp.full(batch, length - 7, jnp.int32)
    key, value = (jax.random.normal(jax.random.key(i), cache.key.shape, cache.key.dtype) for i in (1, 2))
    cache = dataclasses.replace(cache, key=key, value=value, lengths=filled)
    query = jax.random.normal(jax.random.key(3), (batch, 1, q_heads, DIM), jnp.bfloat16)
    attend = jax.jit(sa.decode_attention)
    arrays = (x[:1] for x in (query, cache.key.swapaxes(1, 2), cache.value.swapaxes(1, 2)))
    with jax.enable_x64(True):
        visible = (np.arange(length) < length - 7)[None, None]
        truth = np.asarray(dense_attention(*(np.asarray(x, np.float64) for x in arrays), visible))
    what = {"what": "decode", "heads": heads, "batch": batch, "cached": length}
    check = _check(what, problem.apart(attend(query, cache)[:1], truth), TOLERANCE["bfloat16"])
    taken = _seconds(lambda: attend(query, cache), rounds)
    rate = 2 * batch * length * kv_heads * DIM * 2 / taken
    return check, {**what, "seconds": taken, "bytes_per_second": rate, "of_copy": rate / copy}


def prefill_layer(heads: str, length: int, chunk: int, rounds: int) -> Found:
    """Measure attention of one layer for one prompt, prefilled `chunk` tokens at a time."""
    q_heads, kv_heads = map(int, heads.split(":"))
    inputs = problem.make_inputs(length, problem.Shape(q_heads, kv_heads, DIM, "bfloat16"))
    pieces = [tuple(jnp.asarray(x[:, i : i + chunk]) for x in inputs[:3]) for i in range(0, length, chunk)]
    attend = jax.jit(sa.prefill_attention, donate_argnums=3)

    def read() -> tuple[list[Any], float]:
        cache, found = jax.block_until_ready(_empty(1, length, kv_heads)), []
        begun = time.perf_counter()
        for piece in pieces:
            out, cache = attend(*piece, cache)
            found.append(out)
        return jax.block_until_ready(found), time.perf_counter() - begun

    out = np.concatenate([np.asarray(x, np.float64) for x in read()[0]], axis=1)[:, problem.sample_rows(length)]
    what = {"what": "prefill", "heads": heads, "batch": 1, "cached": length, "chunk": chunk}
    check = _check(what, problem.apart(out, problem.oracle(inputs).out), TOLERANCE["bfloat16"])
    taken = statistics.median(read()[1] for _ in range(max(3, rounds)))
    flops = 4 * q_heads * DIM * length * (length + 1) / 2
    return check, {**what, "seconds": taken, "tflops": flops / taken / 1e12}


def whole_model(preset: str, batch: int, length: int, chunk: int, rounds: int, copy: float) -> Found:
    """Measure a whole model. The check computes each sequence's last token in two ways: prefilled and decoded."""
    config = PRESETS[preset]
    engine = _engine(config, 1, "bfloat16", sa.contiguous(), batch, length + _room(rounds), chunk=chunk)
    tokens = _tokens(config, batch, length)
    for _ in range(2):  # the first one compiles
        engine.clear()
        begun = time.perf_counter()
        engine.prefill(tokens[:, :-1])
        jax.block_until_ready(engine.scores)
        prefill = time.perf_counter() - begun
    engine.append(tokens[:, -1])
    found = np.asarray(engine.scores)
    engine.clear()
    what = {"what": "model", "preset": preset, "batch": batch, "cached": length, "devices": 1, "layout": "contiguous"}
    check = _check(what, problem.apart(found, _scores(engine, length), by_row=False), MODEL_TOLERANCE)
    taken = _seconds_per_token(engine, rounds)
    kept = 2 * config.layers * batch * length * config.kv_heads * config.head_dim * 2
    looked_up = 0 if config.tied else config.vocabulary * config.dim
    rates = {"bytes_per_second": (kept + 2 * (config.parameters - looked_up)) / taken}
    rates["of_copy"] = rates["bytes_per_second"] / copy
    rates["prefill_tokens_per_second"] = batch * (length - 1) / prefill
    return check, {**what, "seconds": taken, **rates, "compiling_seconds": engine.compiling, "chunk": chunk}


def _seconds(function: Callable[[], Any], rounds: int) -> float:
    """Median seconds of one call, after a warm-up call."""
    jax.block_until_ready(function())
    return statistics.median(run.seconds(function, times=5) for _ in range(max(3, rounds)))


def _seconds_per_token(engine: Engine, rounds: int) -> float:
    """Median over `rounds` blocks of the seconds per token, after two blocks of warm-up."""
    block, begins = engine.programs.block, []
    for i, _ in enumerate(engine.decode((rounds + 2) * block + 1, Sampling())):
        if i % block == 0:
            begins.append(time.perf_counter())
    return statistics.median(np.diff(begins)[2:]) / block


def _room(rounds: int) -> int:
    """Cache slots for the generated tokens, and for the one token of the check."""
    return (rounds + 2) * BLOCK + 2


def _tokens(config: ModelConfig, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, config.vocabulary, (batch, length)).astype(np.int32)


def _engine(
    config: ModelConfig, devices: int, dtype: str, layout: Layout, batch: int, length: int, **more: Any
) -> Engine:
    """Make an engine with random weights and room for `length` tokens."""
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(1, devices), AXES.everything)
    options = Options(layout, batch, length, dtype=jnp.dtype(dtype), **more)
    return Engine(config, fuse(config, mesh, _random_weights(config, mesh, options.dtype)), mesh, options)


def _random_weights(config: ModelConfig, mesh: Mesh, dtype: Any) -> Any:
    """Make random weights array by array: `init` compiles all at once, which takes minutes for a large model."""
    shapes = {name: shape for name, shape in config.shapes.items() if name != "layers"}
    shapes["layers"] = [{name: shape[1:] for name, shape in config.shapes["layers"].items()}] * config.layers
    keys = iter(jax.random.split(jax.random.key(0), 20 * (config.layers + 1)))

    def one(path: Any, shape: tuple[int, ...], spec: PartitionSpec) -> Any:
        norm = path[-1].key.endswith("norm")
        weight = jnp.ones(shape, dtype) if norm else 0.02 * jax.random.normal(next(keys), shape, dtype)
        return jax.device_put(weight.astype(dtype), NamedSharding(mesh, spec))

    specs = config.layer_specs(mesh.size)
    return jax.tree_util.tree_map_with_path(one, shapes, specs, is_leaf=lambda x: isinstance(x, tuple))


def _scores(engine: Engine, length: int) -> np.ndarray:
    """Logits after random sequences of `length` tokens."""
    engine.prefill(_tokens(engine.config, engine.options.batch, length))
    return np.asarray(engine.scores)


def _empty(batch: int, length: int, kv_heads: int) -> sa.KVCache:
    mesh = Mesh(np.array(jax.devices()[:1]), ("sequence",))
    return sa.KVCache.empty(batch, length, kv_heads, DIM, layout=sa.striped(1), mesh=mesh, axis_name="sequence")


def _check(what: run.Row, error: float, tolerance: float) -> run.Row:
    """Return the check's row for the record; raise if the answer is wrong."""
    return {**what, "error": run.require(str(what), error, tolerance), "tolerance": tolerance}

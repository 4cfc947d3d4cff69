"""The suite `decode`: what a token costs once a text is in the cache, and what it costs to get it there.

On CPUs: whole models on virtual devices of one process. The devices share its cores, so the seconds say what a token
costs in all, not how much faster more devices are. `wire_bytes` is what a device sends for a token, by the compiled
program: `attention_bytes` of them for partial results, the rest for activations, for weights are split too.

On a GPU, one device, random keys and values in bfloat16:

    decode     one layer's attention of a new token of every text; all that is cached is read once, so the rate is in
               bytes a second, and the ceiling is what the card reaches when it copies
    prefill    one layer's attention of a whole prompt, in one go and in pieces
    model      a whole model reading a prompt and writing on
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
import rich.table
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from striped_attention.bench import problem
from striped_attention.bench.config import BenchConfig, parse_layouts
from striped_attention.bench.contestants import use_virtual
from striped_attention.bench.run import document, path, say, write
from striped_attention.cache import KVCache
from striped_attention.cached_attention import decode_attention, prefill_attention
from striped_attention.generation.engine import Engine, Options, layer_specs
from striped_attention.generation.sample import Sampling
from striped_attention.layout import Layout, contiguous, striped
from striped_attention.model import PRESETS, ModelConfig
from striped_attention.oracle import dense_attention
from striped_attention.parallel import AXES
from striped_attention.schedule import traffic
from striped_attention.training.errors import UsageError

DIM = 128
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.006}  # of a result, relative to the largest number
MODEL_TOLERANCE = 0.05  # of scores in bfloat16 between two ways through a whole model


def run(config: BenchConfig) -> None:
    """Check, measure, print a table and write the JSON, after every row."""
    options = config.options
    result = document(config, dict(options))
    result |= {"checks": [], "rows": []}
    if options["platform"] == "gpu":
        if jax.default_backend() != "gpu":
            raise UsageError(f"--platform gpu needs a GPU; JAX sees {jax.default_backend()} here.")
        result["gpu"] = {"name": jax.devices()[0].device_kind, "copy_bytes_per_second": copy_speed()}
        say(f"copies {result['gpu']['copy_bytes_per_second'] / 1e12:.2f} TB/s")
        found = on_gpu(options, result["gpu"]["copy_bytes_per_second"])
    else:
        use_virtual(max(options["members"]))
        found = on_cpu(options)
    for check, row in found:
        result["checks"].append(check)
        result["rows"].append(row)
        write(result, config)
        say(", ".join(f"{name} {_word(value)}" for name, value in row.items() if value is not None))
    say(table(result["rows"]))
    say(str(path(config)))


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


Found = Iterator[tuple[dict[str, Any], dict[str, Any]]]


def on_cpu(options: dict[str, Any]) -> Found:
    """Whole models on 1, 2, 4, … virtual devices."""
    for preset, length, batch in itertools.product(options["presets"], options["lengths"], options["batch"]):
        config = PRESETS[preset]
        truth = _scores(_engine(config, contiguous(), 1, batch, length, "float32", chunk=length), length)
        for layout, devices in itertools.product(parse_layouts(options["layouts"]), options["members"]):
            engine = _engine(config, layout, devices, batch, length, "float32", more=options["rounds"] + 8)
            what = {"what": "model", "preset": preset, "batch": batch, "cached": length, "devices": devices}
            check = _check({**what, "layout": repr(layout)}, _scores(engine, length), truth, TOLERANCE["float32"])
            seconds = _seconds_a_token(engine, options["rounds"])
            sent = sum(traffic(engine.program("token"), devices).values())
            attention = config.layers * sum(traffic(_attention_program(engine), devices).values())
            yield (
                check,
                {
                    **what,
                    "layout": repr(layout),
                    "seconds": seconds,
                    "wire_bytes": sent,
                    "attention_bytes": attention,
                },
            )


def on_gpu(options: dict[str, Any], copy: float) -> Found:
    """Attention alone, then a whole model."""
    for heads, batch, length in itertools.product(options["heads"], options["batch"], options["lengths"]):
        yield decode(heads, batch, length, copy, options["rounds"])
    for heads, length in itertools.product(options["heads"], options["lengths"]):
        for chunk in (length, options["chunk"]):
            yield prefill(heads, length, chunk, options["rounds"])
    for preset, length in itertools.product(options["presets"], options["lengths"]):
        yield whole_model(preset, length, options["chunk"], options["rounds"])


def decode(heads: str, batch: int, length: int, copy: float, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    q_heads, kv_heads = map(int, heads.split(":"))
    cache = _cache(batch, length, kv_heads, length - 7)
    query = jax.random.normal(jax.random.key(3), (batch, 1, q_heads, DIM), jnp.bfloat16)
    attend = jax.jit(decode_attention)
    what = {"what": "decode", "heads": heads, "batch": batch, "cached": length}
    with jax.enable_x64(True):
        visible = (np.arange(length) < length - 7)[None, None]
        arrays = (np.asarray(x[:1], np.float64) for x in (query, cache.key.swapaxes(1, 2), cache.value.swapaxes(1, 2)))
        truth = np.asarray(dense_attention(*arrays, visible))
    check = _check(what, np.asarray(attend(query, cache)[:1], np.float64), truth, TOLERANCE["bfloat16"])
    seconds = _seconds(lambda: attend(query, cache), rounds)
    rate = 2 * batch * length * kv_heads * DIM * 2 / seconds
    return check, {**what, "seconds": seconds, "bytes_per_second": rate, "of_copy": rate / copy}


def prefill(heads: str, length: int, chunk: int, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A prompt of one text, `chunk` tokens at a time."""
    q_heads, kv_heads = map(int, heads.split(":"))
    inputs = problem.make_inputs(length, 0, problem.Shape(q_heads, kv_heads, DIM, "bfloat16"))
    rows = problem.sample_rows(length)
    pieces = [tuple(jnp.asarray(x[:, i : i + chunk]) for x in inputs[:3]) for i in range(0, length, chunk)]
    attend = jax.jit(prefill_attention, donate_argnums=3)

    def read() -> list[Any]:
        cache, found = _empty(1, length, kv_heads), []
        for piece in pieces:
            out, cache = attend(*piece, cache)
            found.append(out)
        return found

    what = {"what": "prefill", "heads": heads, "batch": 1, "cached": length, "chunk": chunk}
    out = np.concatenate([np.asarray(x, np.float64) for x in read()], axis=1)[:, rows]
    with jax.enable_x64(True):
        q, k, v = (np.asarray(x, np.float64) for x in (inputs.q[:, rows], inputs.k, inputs.v))
        truth = np.asarray(dense_attention(q, k, v, (np.arange(length) <= rows[:, None])[None]))
    errors = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(out[0], truth[0], strict=True)]
    check = {**what, "error": max(errors), "tolerance": TOLERANCE["bfloat16"]}
    _refuse(check)
    seconds = _seconds(read, max(2, rounds // 4))
    flops = 4 * q_heads * DIM * length * (length + 1) / 2
    return check, {**what, "seconds": seconds, "tflops": flops / seconds / 1e12}


def whole_model(preset: str, length: int, chunk: int, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """One text; the check reads its last token in two ways, as part of the prompt and as a token that is written."""
    config = PRESETS[preset]
    engine = _engine(config, striped(1), 1, 1, length, "bfloat16", chunk, more=rounds + 8)
    what = {"what": "model", "preset": preset, "batch": 1, "cached": length, "devices": 1, "layout": "striped(1)"}
    tokens = _tokens(config, 1, length)
    begun = time.perf_counter()
    engine.read(tokens[:, :-1])
    jax.block_until_ready(engine.scores)
    read = time.perf_counter() - begun - engine.compiling
    engine.append(tokens[:, -1])
    found = np.asarray(engine.scores)
    engine.clear()
    check = _check(what, found, _scores(engine, length), MODEL_TOLERANCE)
    seconds = _seconds_a_token(engine, rounds)
    kept = 2 * config.layers * length * config.kv_heads * config.head_dim * 2
    looked_up = 0 if config.tied else config.vocabulary * config.dim
    rate = (kept + 2 * (config.parameters - looked_up)) / seconds
    return check, {
        **what,
        "seconds": seconds,
        "bytes_per_second": rate,
        "prefill_tokens_per_second": (length - 1) / read,
        "compiling_seconds": engine.compiling,
        "chunk": chunk,
    }


def copy_speed() -> float:
    """Bytes a second that the card reads and writes when it copies: the best of two ways."""
    x = jax.random.normal(jax.random.key(0), (2**31,), jnp.bfloat16)
    ways: list[Callable[[], Any]] = [lambda: jnp.copy(x), functools.partial(jax.jit(lambda x: -x), x)]
    return max(2 * x.nbytes / _seconds(way, 10) for way in ways)


def _seconds(function: Callable[[], Any], rounds: int) -> float:
    """Of one call, the median; several are queued, so that the host does not count."""
    jax.block_until_ready(function())
    samples = []
    for _ in range(max(3, rounds)):
        begun = time.perf_counter()
        for _ in range(5):
            result = function()
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - begun) / 5)
    return statistics.median(samples)


def _seconds_a_token(engine: Engine, rounds: int) -> float:
    """The median of the time between tokens, after two to warm up."""
    samples, begun = [], time.perf_counter()
    for _ in engine.write(rounds + 2, Sampling()):
        samples.append(time.perf_counter() - begun)
        begun = time.perf_counter()
    return statistics.median(samples[2:])


def _tokens(config: ModelConfig, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, config.vocabulary, (batch, length)).astype(np.int32)


def _engine(
    config: ModelConfig,
    layout: Layout,
    devices: int,
    batch: int,
    length: int,
    dtype: str,
    chunk: int = 8192,
    more: int = 8,
) -> Engine:
    """With random weights, and room for `length` tokens and some more."""
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(1, devices), AXES.everything)
    options = Options(layout, batch, length + more, chunk=chunk, dtype=jnp.dtype(dtype))
    return Engine(config, _random_weights(config, mesh, options.dtype), mesh, options)


def _random_weights(config: ModelConfig, mesh: Mesh, dtype: Any) -> Any:
    """As `init` makes them, but one by one: compiled together, those of a large model take minutes."""

    @functools.cache
    def maker(shape: tuple[int, ...], spec: PartitionSpec) -> Any:
        make = lambda key: (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)  # noqa: E731
        return jax.jit(make, out_shardings=NamedSharding(mesh, spec))

    shapes = {name: shape for name, shape in config.shapes.items() if name != "layers"}
    shapes["layers"] = [{name: shape[1:] for name, shape in config.shapes["layers"].items()}] * config.layers
    keys = iter(jax.random.split(jax.random.key(0), 20 * (config.layers + 1)))

    def one(path: Any, shape: tuple[int, ...], spec: PartitionSpec) -> Any:
        weight = maker(shape, spec)(next(keys))
        return jnp.ones_like(weight) if path[-1].key.endswith("norm") else weight

    specs = layer_specs(config, mesh)
    return jax.tree_util.tree_map_with_path(one, shapes, specs, is_leaf=lambda x: isinstance(x, tuple))


def _scores(engine: Engine, length: int) -> np.ndarray:
    """After random texts of so many tokens."""
    engine.read(_tokens(engine.config, engine.options.batch, length))
    return np.asarray(engine.scores)


def _attention_program(engine: Engine) -> str:
    """The attention of one layer of a token's program, compiled by itself."""
    config, cache = engine.config, engine.caches[0]
    shape = (engine.options.batch, 1, config.heads, config.head_dim)
    query = jax.ShapeDtypeStruct(shape, engine.options.dtype, sharding=NamedSharding(engine.mesh, PartitionSpec()))
    program = jax.jit(decode_attention).lower(query, cache).compile().as_text()
    assert program is not None
    return program


def _empty(batch: int, length: int, kv_heads: int) -> KVCache:
    mesh = Mesh(np.array(jax.devices()[:1]), ("sequence",))
    return KVCache.empty(batch, length, kv_heads, DIM, layout=striped(1), mesh=mesh, axis_name="sequence")


def _cache(batch: int, length: int, kv_heads: int, filled: int) -> KVCache:
    cache = _empty(batch, length, kv_heads)
    normal = jax.jit(lambda key: jax.random.normal(key, cache.key.shape, cache.key.dtype))
    return dataclasses.replace(
        cache,
        key=normal(jax.random.key(1)),
        value=normal(jax.random.key(2)),
        lengths=jnp.full(batch, filled, jnp.int32),
    )


def _check(what: dict[str, Any], found: np.ndarray, truth: np.ndarray, tolerance: float) -> dict[str, Any]:
    """A verdict for the record; raises if the answer is wrong."""
    check = {**what, "error": float(np.abs(found - truth).max() / np.abs(truth).max()), "tolerance": tolerance}
    _refuse(check)
    return check


def _refuse(check: dict[str, Any]) -> None:
    if not check["error"] <= check["tolerance"]:  # NaN is not
        raise RuntimeError(f"The answer is wrong by {check['error']:.1e}, so it is not timed: {check}")


def table(rows: list[dict[str, Any]]) -> rich.table.Table:
    shown = rich.table.Table(
        *("what", "batch", "cached", "devices", "ms", "TB/s", "of copy", "TFLOP/s", "wire bytes", "of attention")
    )
    for row in rows:
        name = row.get("preset") or row.get("heads") or ""
        rate, share, tflops = row.get("bytes_per_second"), row.get("of_copy"), row.get("tflops")
        cells = [f"{row['what']} {name}", str(row["batch"]), f"{row['cached']:,}", str(row.get("devices", 1))]
        cells += [f"{1e3 * row['seconds']:.2f}", "" if rate is None else f"{rate / 1e12:.2f}"]
        cells += ["" if share is None else f"{share:.0%}", "" if tflops is None else f"{tflops:.0f}"]
        cells += [f"{row[key]:,}" if key in row else "" for key in ("wire_bytes", "attention_bytes")]
        shown.add_row(*cells)
    return shown

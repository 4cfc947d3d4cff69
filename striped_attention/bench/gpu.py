"""The suite `gpu`: what every member of a ring of GPUs would take, measured on one.

JAX can pretend that there are N GPUs where there is one (`jax_mock_gpu_topology`): it compiles the real program for N,
and runs the part of one member. Only the wire is missing: a transfer takes no time and brings whatever lay in memory,
mostly zeros and NaN, on which a GPU runs faster than on real numbers. So the program that is timed is another one, in
which members keep their keys and values, with the heads in another order: a copy on the GPU stands for the transfer.

A member takes as long as its arithmetic, and so does a ring if transfers are hidden: `hidden` says how many are, in the
schedule of the real program, and `hop_seconds` what one takes on a real wire.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import rich.console
import rich.table

from striped_attention.bench.config import BenchConfig
from striped_attention.bench.record import metadata
from striped_attention.training.errors import UsageError

DIM = 128
WIRES = {"NVLink 4 (450 GB/s each way)": 450e9, "InfiniBand NDR (50 GB/s a GPU)": 50e9}
BATCHES = 3
SECONDS = 0.3  # of work in a batch, at least


def run(config: BenchConfig) -> None:
    """Check, measure, print a table and write the JSON."""
    config = _smaller(config)
    document = _document(config)
    document["checks"] = worker("check", members=list(config.members))
    _say("answers checked: " + ", ".join(f"{c['members']} members {c['worst']:.1e}" for c in document["checks"]))
    document["gpu"] = document["checks"][0]["gpu"]
    single = [length for length in config.lengths if length <= 262_144] or [min(config.lengths)]
    document["ideal"] = worker("ideal", lengths=single, heads=list(config.heads))
    document["members"] = []
    for members, heads, length in itertools.product(config.members, config.heads, config.lengths):
        for row in worker("ring", members=members, length=length, heads=heads):
            document["members"].append(row)
            who = f"{members} members, {length:,} tokens, {heads}, {row['layout']}, rank {row['rank']}"
            _say(f"{who}: {row['forward'] * 1e3:.2f} ms, {row['both'] * 1e3:.2f} ms")
        document["summary"] = summary(document)
        _write(document, config)
    _say(table(document["summary"]))


def _smaller(config: BenchConfig) -> BenchConfig:
    if not config.quick:
        return config
    return dataclasses.replace(config, members=(8,), lengths=(65_536,), heads=("16:16",))


def _document(config: BenchConfig) -> dict[str, Any]:
    """What a result says before there is one. Also makes sure that it can be written."""
    _path(config).parent.mkdir(parents=True, exist_ok=True)
    options = {"members": config.members, "lengths": config.lengths, "heads": config.heads}
    return metadata(config.suite, {**options, "dim": DIM, "dtype": "bfloat16"})


def _path(config: BenchConfig) -> pathlib.Path:
    return config.output or pathlib.Path(f"{config.suite}.json")


def _write(document: dict[str, Any], config: BenchConfig) -> None:
    _path(config).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    _say(str(_path(config)))


def _say(what: Any) -> None:
    rich.console.Console(highlight=False, soft_wrap=True).print(what)


def overlap(config: BenchConfig) -> None:
    """Say which transfers of the programs for rings of GPUs are hidden behind attention. Runs nothing."""
    config = _smaller(config)
    document = _document(config)
    document["schedules"] = []
    for members, heads, length in itertools.product(config.members, config.heads, config.lengths):
        rows = worker("schedule", members=members, length=length, heads=heads)
        document["schedules"] += [{"members": members, "length": length, "heads": heads, **row} for row in rows]
        for row in rows:
            exposed = [f"{t['dtype']}, {t['bytes'] / 1e6:.0f} MB" for t in row["transfers"] if not t["hidden"]]
            hidden = f"{len(row['transfers']) - len(exposed)} of {len(row['transfers'])} transfers are hidden"
            ring = f"{members} members, {length:,} tokens, {heads}, {row['layout']}"
            _say(f"{ring}: {hidden}" + (f"; not: {'; '.join(exposed)}" if exposed else ""))
    _write(document, config)


def summary(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The busiest member of every ring, against one GPU and against the contiguous layout."""
    rows = []
    rings: dict[Any, dict[str, list[Any]]] = {}
    for row in document["members"]:
        rings.setdefault((row["members"], row["length"], row["heads"]), {}).setdefault(row["layout"], []).append(row)
    for (members, length, heads), layouts in rings.items():
        ideal = _ideal(document["ideal"], length, heads)
        busiest = {name: {k: max(r[k] for r in ranks) for k in ("forward", "both")} for name, ranks in layouts.items()}
        for name, times in busiest.items():
            first = layouts[name][0]
            rates = {k: first[f"{k}_flops"] / seconds for k, seconds in times.items()}
            rows.append(
                {
                    **{"members": members, "length": length, "heads": heads, "layout": name, **times},
                    "tflops": {k: rate / 1e12 for k, rate in rates.items()},
                    "of_ideal": {k: rate / ideal[f"{k}_rate"] for k, rate in rates.items()},
                    "ideal_length": ideal["length"],
                    "over_contiguous": {k: busiest["contiguous()"][k] / s for k, s in times.items()},
                    "bound": 2 - 1 / members,
                    "hop_bytes": first["hop_bytes"],
                    "hop_seconds": {wire: first["hop_bytes"] / speed for wire, speed in WIRES.items()},
                    "hidden": first["hidden"],
                    "transfers": first["transfers"],
                }
            )
    return rows


def _ideal(ideal: list[dict[str, Any]], length: int, heads: str) -> dict[str, Any]:
    """One GPU on the same text, or the longest shorter one that was measured."""
    same = [row for row in ideal if row["heads"] == heads]
    return max((row for row in same if row["length"] <= length), key=lambda row: row["length"], default=same[0])


def table(rows: list[dict[str, Any]]) -> rich.table.Table:
    shown = rich.table.Table(
        *("members", "tokens", "heads", "layout", "forward ms", "both ms", "TFLOP/s", "of one GPU", "× contiguous"),
        *("bound", "hidden"),
    )
    for row in rows:
        shown.add_row(
            *(str(row["members"]), f"{row['length']:,}", row["heads"], row["layout"]),
            *(f"{row['forward'] * 1e3:.2f}", f"{row['both'] * 1e3:.2f}", f"{row['tflops']['both']:.0f}"),
            *(f"{row['of_ideal']['both']:.1%}", f"{row['over_contiguous']['both']:.3f}", f"{row['bound']:.4f}"),
            f"{row['hidden']}/{row['transfers']}",
        )
    return shown


def worker(task: str, **options: Any) -> Any:
    """Run a task in a process of its own: how many GPUs JAX pretends to have is settled when it starts."""
    command = [sys.executable, "-m", "striped_attention.bench.gpu", json.dumps({"task": task, **options})]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 2:
        raise UsageError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(f"The task {task} {options} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _main(options: dict[str, Any]) -> Any:
    task = options.pop("task")
    if task in ("ring", "schedule"):
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_shard_autotuning=false"
        import jax

        jax.config.update("jax_mock_gpu_topology", f"{options['members']}x1x1")
    from striped_attention import cudnn

    if (reason := cudnn.unavailable("gpu")) is not None:
        print(f"This suite measures the cudnn kernel. {reason}", file=sys.stderr)
        raise SystemExit(2)
    tasks: dict[str, Any] = {
        "check": _check,
        "ideal": _measure_ideal,
        "ring": _measure_ring,
        "schedule": _read_schedule,
    }
    return tasks[task](**options)


def _check(members: list[int]) -> list[dict[str, Any]]:
    """Rings of all sizes, replayed, against one GPU; raises if they differ by more than rounding."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import striped_attention as sa
    from striped_attention.attention import KERNELS
    from striped_attention.replay import replay

    results = []
    for count in members:
        q, dout, k, v = _random(512 * count, 4, 2)
        truth = [np.asarray(x.astype(jnp.float32)) for x in jax.jit(_one_gpu)(q, k, v, dout)]
        for layout in (sa.contiguous(), sa.striped(), sa.zigzag()):
            ring = replay(q, k, v, dout, kernel=KERNELS["cudnn"], layout=layout, mask=sa.causal(), members=count)
            pairs = zip((np.asarray(x.astype(jnp.float32)) for x in ring), truth, strict=True)
            worst = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)
            if not worst < 0.01:
                raise RuntimeError(f"{layout!r} on {count} members differs from one GPU by {worst:.1e}.")
            results.append({"members": count, "layout": repr(layout), "worst": worst, "gpu": _gpu()})
    return results


def _measure_ideal(lengths: list[int], heads: list[str]) -> list[dict[str, Any]]:
    """One GPU with the whole text."""
    import jax

    from striped_attention import cudnn

    rows = []
    for pair in heads:
        for length in lengths:
            q, dout, k, v = _random(length, *map(int, pair.split(":")))
            forward = jax.jit(lambda q, k, v: cudnn.forward(q, k, v, scale=DIM**-0.5, causal=True))
            flops = _flops(length, int(pair.split(":")[0]))
            both = jax.jit(_one_gpu), (q, k, v, dout), 3.5 * flops
            times = _times(forward=(forward, (q, k, v), flops), both=both)
            rates = {"forward_rate": flops / times["forward"], "both_rate": 3.5 * flops / times["both"]}
            rows.append({"length": length, "heads": pair, **times, **rates})
    return rows


def _measure_ring(members: int, length: int, heads: str) -> list[dict[str, Any]]:
    """The members that matter of a ring, with every layout: the last one, and where the first differs, the first."""
    import striped_attention as sa
    from striped_attention.schedule import transfers

    q_heads, kv_heads = map(int, heads.split(":"))
    flops = _flops(length, q_heads) / members
    rows = []
    for layout in (sa.contiguous(), sa.striped(), sa.zigzag()):
        for rank in (members - 1,) if layout == sa.contiguous() else (0, members - 1):
            attend, both, (q, dout, k, v) = _program(layout, members, length, heads, rank)
            real = _compile(both, (q, k, v, dout))
            sent = transfers(str(real.as_text()))
            with _keys_at_home():
                timed = _compile(attend, (q, k, v)), _compile(both, (q, k, v, dout))
            rows.append(
                {
                    **{"members": members, "length": length, "heads": heads, "layout": repr(layout), "rank": rank},
                    **_times(forward=(timed[0], (q, k, v), flops), both=(timed[1], (q, k, v, dout), 3.5 * flops)),
                    **{"forward_flops": flops, "both_flops": 3.5 * flops},
                    "temporary_bytes": real.memory_analysis().temp_size_in_bytes,
                    **{"transfers": len(sent), "hidden": sum(t.hidden for t in sent)},
                    "hop_bytes": 2 * length // members * kv_heads * DIM * 2,
                }
            )
    return rows


def _read_schedule(members: int, length: int, heads: str) -> list[dict[str, Any]]:
    """The transfers of the forward and backward pass, compiled for a ring with every layout."""
    import striped_attention as sa
    from striped_attention.schedule import transfers

    rows = []
    for layout in (sa.contiguous(), sa.striped(), sa.zigzag()):
        _, both, (q, dout, k, v) = _program(layout, members, length, heads, rank=0)
        sent = transfers(str(_compile(both, (q, k, v, dout)).as_text()))
        rows.append({"layout": repr(layout), "transfers": [dataclasses.asdict(t) for t in sent]})
    return rows


def _program(layout: Any, members: int, length: int, heads: str, rank: int) -> tuple[Any, Any, list[Any]]:
    """Attention, attention with its gradients, and q, dout, k and v, for the member `rank` of a ring."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import striped_attention as sa

    mesh = Mesh(np.roll(np.array(jax.devices()), rank), ("sequence",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    parts = _random(length // members, *map(int, heads.split(":")))
    arrays = [jax.make_array_from_single_device_arrays((1, length, *x.shape[2:]), sharding, [x]) for x in parts]

    def attend(q: Any, k: Any, v: Any) -> Any:
        options = dict(axis_name="sequence", layout=layout, mask=sa.causal(), mesh=mesh, kernel="cudnn")
        return sa.attention(q, k, v, **options)

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    return attend, both, arrays


def _compile(function: Any, arguments: Any) -> Any:
    import jax

    from striped_attention.schedule import GPU_OPTIONS

    jax.clear_caches()  # what `_keys_at_home` changes is no argument
    return jax.jit(function).lower(*arguments).compile(compiler_options=GPU_OPTIONS)


@contextlib.contextmanager
def _keys_at_home() -> Iterator[None]:
    """Let members keep their keys and values, heads reversed, instead of sending them; sums of dk and dv are sent."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from striped_attention.ring import Ring

    send = Ring.send

    def stay(self: Any, x: Any, places: int) -> Any:
        copy = lambda leaf: send(self, leaf, places) if leaf.dtype == jnp.float32 else lax.rev(leaf, (2,))  # noqa: E731
        return jax.tree.map(copy, x)

    Ring.send = stay  # type: ignore[method-assign]
    try:
        yield
    finally:
        Ring.send = send  # type: ignore[method-assign]


def _one_gpu(q: Any, k: Any, v: Any, dout: Any) -> Any:
    from striped_attention import cudnn

    out, lse = cudnn.forward(q, k, v, scale=DIM**-0.5, causal=True)
    return out, *cudnn.backward(q, k, v, out, lse, dout, scale=DIM**-0.5, causal=True)


def _flops(length: int, heads: int) -> float:
    """Of causal attention, forward; the backward pass takes 2.5 times as many."""
    return 4 * length * length / 2 * heads * DIM


def _random(length: int, heads: int, kv_heads: int) -> list[Any]:
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, length, n, DIM) for n in (heads, heads, kv_heads, kv_heads)]
    device = jax.local_devices()[0]
    with jax.default_device(device):
        return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


def _times(**runs: Any) -> dict[str, Any]:
    """For each run, which is a function, its arguments and its FLOPs, the median of its samples, and the samples."""
    samples = {name: _seconds(*run) for name, run in runs.items()}
    medians = {name: statistics.median(taken) for name, taken in samples.items()}
    return {**medians, "samples": samples}


def _seconds(run: Any, arguments: tuple[Any, ...], flops: float) -> list[float]:
    """Seconds of a run in each of some batches, after one to warm up."""
    import jax

    jax.block_until_ready(run(*arguments))
    repetitions = max(1, int(SECONDS * 5e14 / flops))
    samples = []
    for _ in range(BATCHES):
        begun = time.perf_counter()
        for _ in range(repetitions):
            result = run(*arguments)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - begun) / repetitions)
    return samples


def _gpu() -> dict[str, Any]:
    import jax

    from striped_attention import cudnn

    device = jax.local_devices()[0]
    memory = device.memory_stats()["bytes_limit"]
    return {"name": device.device_kind, "memory_for_jax": memory, "cudnn": cudnn.version()}


if __name__ == "__main__":
    print(json.dumps(_main(json.loads(sys.argv[1]))))

"""The suite `gpu`: what every member of a ring of GPUs would take, measured on one.

JAX can pretend that there are N GPUs where there is one (`jax_mock_gpu_topology`): it compiles the real program for N,
and runs the part of one member. Only the wire is missing: a transfer takes no time, and what it brings is what lay in
memory. So memory is filled with random numbers first, because zeros would make the matrix units faster than real data.
A member takes as long as its arithmetic, and so does a ring if transfers are hidden; `hidden` says how many are, and
`hop_seconds` what one takes on a real wire.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
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
    if config.quick:
        config = dataclasses.replace(config, members=(8,), lengths=(65_536,), heads=("16:16",))
    say = rich.console.Console(highlight=False, soft_wrap=True).print
    document = metadata("gpu", {**dataclasses.asdict(config), "output": None, "dim": DIM, "dtype": "bfloat16"})
    single = [length for length in config.lengths if length <= 262_144] or [min(config.lengths)]
    document["checks"] = _worker("check", members=list(config.members))
    say("answers checked: " + ", ".join(f"{c['members']} members {c['worst']:.1e}" for c in document["checks"]))
    document["gpu"] = document["checks"][0]["gpu"]
    document["ideal"] = _worker("ideal", lengths=single, heads=list(config.heads))
    document["members"] = []
    for members in config.members:
        for heads in config.heads:
            for length in config.lengths:
                rows = _worker("ring", members=members, length=length, heads=heads)
                document["members"] += rows
                for row in rows:
                    say(
                        f"{members} members, {length:,} tokens, {heads}, {row['layout']}, rank {row['rank']}: "
                        f"{row['forward'] * 1e3:.2f} ms, {row['both'] * 1e3:.2f} ms"
                    )
    document["summary"] = summary(document)
    say(table(document["summary"]))
    config.output.parent.mkdir(parents=True, exist_ok=True)
    config.output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    say(str(config.output))


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


def _worker(task: str, **options: Any) -> Any:
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
    if task == "ring":
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_shard_autotuning=false"
        import jax

        jax.config.update("jax_mock_gpu_topology", f"{options['members']}x1x1")
    from striped_attention import cudnn

    if (reason := cudnn.unavailable()) is not None:
        print(f"This suite measures the cudnn kernel. {reason}", file=sys.stderr)
        raise SystemExit(2)
    return {"check": _check, "ideal": _measure_ideal, "ring": _measure_ring}[task](**options)


def _check(members: list[int]) -> list[dict[str, Any]]:
    """Rings of all sizes, replayed, against one GPU; raises if they differ by more than rounding."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import striped_attention as sa
    from striped_attention.attention import KERNELS
    from striped_attention.replay import replay

    q, dout, k, v = _random(4096, 4, 2)
    truth = [np.asarray(x.astype(jnp.float32)) for x in jax.jit(_one_gpu)(q, k, v, dout)]
    results = []
    for count in members:
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
            times = _seconds(forward, (q, k, v), flops), _seconds(jax.jit(_one_gpu), (q, k, v, dout), 3.5 * flops)
            rows.append(
                {
                    **{"length": length, "heads": pair, "forward": times[0], "both": times[1]},
                    **{"forward_rate": flops / times[0], "both_rate": 3.5 * flops / times[1]},
                }
            )
    return rows


def _measure_ring(members: int, length: int, heads: str) -> list[dict[str, Any]]:
    """The members that matter of a ring, with every layout: the last one, and where the first differs, the first."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import striped_attention as sa
    from striped_attention.schedule import GPU_OPTIONS, transfers

    q_heads, kv_heads = map(int, heads.split(":"))
    slots = length // members
    _fill_memory()
    parts = _random(slots, q_heads, kv_heads)
    flops = _flops(length, q_heads) / members
    rows = []
    for layout in (sa.contiguous(), sa.striped(), sa.zigzag()):
        for rank in (members - 1,) if layout == sa.contiguous() else (0, members - 1):
            mesh = Mesh(np.roll(np.array(jax.devices()), rank), ("sequence",))
            sharding = NamedSharding(mesh, PartitionSpec(None, "sequence"))
            q, dout, k, v = (
                jax.make_array_from_single_device_arrays((1, length, *x.shape[2:]), sharding, [x]) for x in parts
            )

            def attend(q: Any, k: Any, v: Any, layout: Any = layout, mesh: Any = mesh) -> Any:
                options = dict(axis_name="sequence", layout=layout, mask=sa.causal(), mesh=mesh, kernel="cudnn")
                return sa.attention(q, k, v, **options)

            def both(q: Any, k: Any, v: Any, dout: Any, attend: Any = attend) -> Any:
                out, pull = jax.vjp(attend, q, k, v)
                return out, pull(dout)

            forward = jax.jit(attend).lower(q, k, v).compile(compiler_options=GPU_OPTIONS)
            whole = jax.jit(both).lower(q, k, v, dout).compile(compiler_options=GPU_OPTIONS)
            sent = transfers(str(whole.as_text()))
            memory: Any = whole.memory_analysis()
            rows.append(
                {
                    **{"members": members, "length": length, "heads": heads, "layout": repr(layout), "rank": rank},
                    "forward": _seconds(forward, (q, k, v), flops),
                    "both": _seconds(whole, (q, k, v, dout), 3.5 * flops),
                    **{"forward_flops": flops, "both_flops": 3.5 * flops},
                    "temporary_bytes": memory.temp_size_in_bytes,
                    **{"transfers": len(sent), "hidden": sum(t.hidden for t in sent)},
                    "hop_bytes": 2 * slots * kv_heads * DIM * 2,
                }
            )
    return rows


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


def _fill_memory() -> None:
    """Leave random numbers in most of the memory that JAX hands out later."""
    import jax

    device = jax.local_devices()[0]
    stats = device.memory_stats()
    piece = _random(65_536, 32, 32)[:1]
    count = int(0.8 * (stats["bytes_limit"] - stats["bytes_in_use"]) // piece[0].nbytes)
    copies = [piece[0] + 0 for _ in range(count)]
    jax.block_until_ready(copies)


def _seconds(run: Any, arguments: tuple[Any, ...], flops: float) -> float:
    """The median over batches of the time of a run, after one to warm up."""
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
    return statistics.median(samples)


def _gpu() -> dict[str, Any]:
    import jax

    from striped_attention import cudnn

    device = jax.local_devices()[0]
    memory = device.memory_stats()["bytes_limit"]
    return {"name": device.device_kind, "memory_for_jax": memory, "cudnn": cudnn.version()}


if __name__ == "__main__":
    print(json.dumps(_main(json.loads(sys.argv[1]))))

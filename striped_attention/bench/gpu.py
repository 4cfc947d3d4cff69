"""The suite `gpu`: what every member of a ring of GPUs would take, measured on one (see `mock.py` how).

A member takes as long as its arithmetic, and so does a ring if transfers are hidden: `hidden` says how many are, in the
schedule of the real program, and `hop_seconds` what one takes on a real wire.
"""

import dataclasses
import itertools
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.table
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import striped_attention as sa
from striped_attention import cudnn
from striped_attention.attention import KERNELS
from striped_attention.bench import mock, profile
from striped_attention.bench.config import BenchConfig
from striped_attention.bench.run import document, main, path, say, stream, write
from striped_attention.replay import replay
from striped_attention.schedule import GPU_OPTIONS, transfers

DIM = 128
WIRES = {"NVLink 4 (450 GB/s each way)": 450e9, "InfiniBand NDR (50 GB/s a GPU)": 50e9}
TOLERANCE = 0.01  # relative, in bfloat16; rounding makes 0.004
LONGEST = 262_144  # tokens that one GPU is given; it does not get faster with more
BATCHES = 3
SECONDS = 0.3  # of work in a batch, at least
LONG = 5.0  # seconds of all batches together, of which one will do
GUESS = 5e14  # FLOP/s, to know beforehand how long something takes


def worker(task: str, **options: Any) -> list[Any]:
    """The results of a task, in a process of its own."""
    return list(stream("striped_attention.bench.gpu", task, **options))


def run(config: BenchConfig) -> None:
    """Check, measure, print a table and write the JSON."""
    rings = config.options
    result = document(config, _configuration(rings))
    result["checks"] = worker("check", members=rings["members"])
    say("answers checked: " + ", ".join(f"{c['members']} members {c['worst']:.1e}" for c in result["checks"]))
    result["gpu"] = result["checks"][0]["gpu"]
    result["timed_checks"] = [row for members in rings["members"] for row in worker("check_timed", members=members)]
    say(f"what will be timed, cudnn against xla: {max(c['worst'] for c in result['timed_checks']):.1e}")
    result["ideal"], result["members"] = [], []
    for members, heads, length in _product(rings):
        ideal, *rows = worker("ring", members=members, length=length, heads=heads)
        result["ideal"].append(ideal)
        result["members"] += rows
        for row in rows:
            who = f"{members} members, {length:,} tokens, {heads}, {row['layout']}, rank {row['rank']}"
            say(f"{who}: {row['forward'] * 1e3:.2f} ms, {row['both'] * 1e3:.2f} ms")
        result["summary"] = summary(result)
        write(result, config)
    say(table(result["summary"]))
    say(str(path(config)))


def _configuration(rings: dict[str, Any]) -> dict[str, Any]:
    return {**rings, "dim": DIM, "dtype": "bfloat16"}


def _product(rings: dict[str, Any]) -> Any:
    return itertools.product(rings["members"], rings["heads"], rings["lengths"])


def overlap(config: BenchConfig) -> None:
    """Say which transfers of the programs for rings of GPUs are hidden behind attention. Runs nothing."""
    result = document(config, _configuration(config.options))
    result["schedules"] = []
    for members, heads, length in _product(config.options):
        rows = worker("schedule", members=members, length=length, heads=heads)
        result["schedules"] += [{"members": members, "length": length, "heads": heads, **row} for row in rows]
        for row in rows:
            exposed = [f"{t['dtype']}, {t['bytes'] / 1e6:.0f} MB" for t in row["transfers"] if not t["hidden"]]
            hidden = f"{len(row['transfers']) - len(exposed)} of {len(row['transfers'])} transfers are hidden"
            ring = f"{members} members, {length:,} tokens, {heads}, {row['layout']}"
            say(f"{ring}: {hidden}" + (f"; not: {'; '.join(exposed)}" if exposed else ""))
        write(result, config)
    say(str(path(config)))


def summary(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The busiest member of every ring, against one GPU and against the contiguous layout."""
    rows = []
    rings: dict[Any, dict[str, list[Any]]] = {}
    for row in result["members"]:
        rings.setdefault((row["members"], row["length"], row["heads"]), {}).setdefault(row["layout"], []).append(row)
    for (members, length, heads), layouts in rings.items():
        ring = {"members": members, "length": length, "heads": heads}
        ideal = next(row for row in result["ideal"] if ring.items() <= row.items())
        busiest = {name: {k: max(r[k] for r in ranks) for k in ("forward", "both")} for name, ranks in layouts.items()}
        for name, times in busiest.items():
            first = layouts[name][0]
            rates = {k: first[f"{k}_flops"] / seconds for k, seconds in times.items()}
            rows.append(
                {
                    **{**ring, "layout": name, **times},
                    "tflops": {k: rate / 1e12 for k, rate in rates.items()},
                    "of_ideal": {k: rate / ideal[f"{k}_rate"] for k, rate in rates.items()},
                    "ideal_length": ideal["ideal_length"],
                    "over_contiguous": {k: busiest["contiguous()"][k] / s for k, s in times.items()},
                    "bound": 2 - 1 / members,
                    **_hops(first["hop_bytes"]),
                    "hidden": first["hidden"],
                    "transfers": first["transfers"],
                }
            )
    return rows


def _hops(size: int) -> dict[str, Any]:
    """What a hop takes on real wires: k and v in bf16 and, backward, with the float32 sums of dk and dv."""
    both = 3 * size
    return {
        **{"hop_bytes": size, "hop_seconds": {wire: size / speed for wire, speed in WIRES.items()}},
        **{"backward_hop_bytes": both, "backward_hop_seconds": {w: both / speed for w, speed in WIRES.items()}},
    }


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


def _check(members: list[int]) -> list[dict[str, Any]]:
    """Rings of all sizes, replayed, against one GPU; raises if they differ by more than rounding."""
    results = []
    for count in members:
        q, dout, k, v = _random(512 * count, 4, 2)
        truth = jax.jit(one_gpu)(q, k, v, dout)
        for layout in (sa.contiguous(), sa.striped(), sa.zigzag()):
            ring = replay(q, k, v, dout, kernel=KERNELS["cudnn"], layout=layout, mask=sa.causal(), members=count)
            worst = max(itertools.starmap(_apart, zip(ring, truth, strict=True)))
            if not worst < TOLERANCE:
                raise RuntimeError(f"{layout!r} on {count} members differs from one GPU by {worst:.1e}.")
            results.append({"members": count, "layout": repr(layout), "worst": worst, "gpu": mock.gpu()})
    return results


def _check_timed(members: int, kernels: tuple[str, str] = ("cudnn", "xla")) -> list[dict[str, Any]]:
    """The programs that will be timed, keys and sums at home, with both kernels; raises if they differ."""
    results = []
    parts = _random(512, 4, 2)
    for layout in (sa.contiguous(), sa.striped(), sa.zigzag()):
        found = []
        for kernel in kernels:
            _, both, (q, dout, k, v) = _program(layout, members, parts, members - 1, kernel)
            with mock.keys_at_home(sums=True):
                found.append(jax.tree.leaves(_compile(both, (q, k, v, dout))(q, k, v, dout)))
        worst = max(_apart(*(x.addressable_data(0) for x in pair)) for pair in zip(*found, strict=True))
        if not worst < TOLERANCE:
            raise RuntimeError(
                f"{layout!r} on {members} members differs between {' and '.join(kernels)} by {worst:.1e}."
            )
        results.append({"members": members, "layout": repr(layout), "rank": members - 1, "worst": worst})
    return results


def _apart(a: Any, b: Any) -> float:
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


class Run(NamedTuple):
    """Something to be timed, and the FLOPs it takes."""

    function: Any
    arguments: tuple[Any, ...]
    flops: float


def _measure_ring(members: int, length: int, heads: str) -> list[dict[str, Any]]:
    """One GPU with the whole text, and the members of a ring that matter with every layout.

    These are the last one and, where the first has other work, the first. All take turns, so that a GPU that grows warm
    and slow is so for everybody.
    """
    q_heads, kv_heads = map(int, heads.split(":"))
    ring = {"members": members, "length": length, "heads": heads}
    single = min(length, LONGEST)
    runs = [_ideal(_random(single, q_heads, kv_heads), _flops(single, q_heads))]
    rows: list[dict[str, Any]] = [{**ring, "ideal_length": single}]
    real: dict[str, Any] = {}
    parts, flops = _random(length // members, q_heads, kv_heads), _flops(length, q_heads) / members
    for layout in (sa.contiguous(), sa.striped(), sa.zigzag()):
        for rank in (members - 1,) if layout == sa.contiguous() else (0, members - 1):
            attend, both, (q, dout, k, v) = _program(layout, members, parts, rank)
            if repr(layout) not in real:  # the same for every member
                real[repr(layout)] = _compile(both, (q, k, v, dout))
            sent = transfers(str(real[repr(layout)].as_text()))
            with mock.keys_at_home():
                timed = _compile(attend, (q, k, v)), _compile(both, (q, k, v, dout))
            runs.append(
                {"forward": Run(timed[0], (q, k, v), flops), "both": Run(timed[1], (q, k, v, dout), 3.5 * flops)}
            )
            rows.append(
                {
                    **{**ring, "layout": repr(layout), "rank": rank},
                    "temporary_bytes": real[repr(layout)].memory_analysis().temp_size_in_bytes,
                    **{"transfers": len(sent), "hidden": sum(t.hidden for t in sent)},
                    "hop_bytes": 2 * length // members * kv_heads * DIM * 2,
                }
            )
    found = _measure(runs)
    for row, run in zip(found, runs, strict=True):
        row["where"] = profile.where(run["both"].function, *run["both"].arguments)
    return [row | more for row, more in zip(rows, found, strict=True)]


def _ideal(arrays: list[Any], flops: float) -> dict[str, Run]:
    """One GPU with a whole text."""
    q, dout, k, v = arrays
    forward = jax.jit(lambda q, k, v: cudnn.forward(q, k, v, scale=DIM**-0.5, causal=True))
    return {"forward": Run(forward, (q, k, v), flops), "both": Run(jax.jit(one_gpu), (q, k, v, dout), 3.5 * flops)}


def _measure(runs: list[dict[str, Run]]) -> list[dict[str, Any]]:
    """Median seconds of every run, its samples, its FLOPs and FLOPs a second; after one turn to warm up."""
    named = [(i, name, run) for i, group in enumerate(runs) for name, run in group.items()]
    for _, _, run in named:
        jax.block_until_ready(run.function(*run.arguments))
    long = sum(run.flops for _, _, run in named) / GUESS > LONG
    found: list[dict[str, Any]] = [{"samples": {name: [] for name in group}} for group in runs]
    for _ in range(1 if long else BATCHES):
        for i, name, run in named:
            found[i]["samples"][name].append(_seconds(run))
    for i, name, run in named:
        seconds = statistics.median(found[i]["samples"][name])
        found[i] |= {name: seconds, f"{name}_flops": run.flops, f"{name}_rate": run.flops / seconds}
    return found


def _seconds(run: Run) -> float:
    repetitions = max(1, int(SECONDS * GUESS / run.flops))
    begun = time.perf_counter()
    for _ in range(repetitions):
        result = run.function(*run.arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - begun) / repetitions


def _read_schedule(members: int, length: int, heads: str) -> list[dict[str, Any]]:
    """The transfers of the forward and backward pass, compiled for a ring with every layout."""
    rows = []
    parts = _random(length // members, *map(int, heads.split(":")))
    for layout in (sa.contiguous(), sa.striped(), sa.zigzag()):
        _, both, (q, dout, k, v) = _program(layout, members, parts, rank=0)
        sent = transfers(str(_compile(both, (q, k, v, dout)).as_text()))
        rows.append({"layout": repr(layout), "transfers": [dataclasses.asdict(t) for t in sent]})
    return rows


def _program(
    layout: Any, members: int, parts: list[Any], rank: int, kernel: str = "cudnn"
) -> tuple[Any, Any, list[Any]]:
    """Attention, attention with its gradients, and the arguments of which a member of a ring has these parts."""
    mesh = Mesh(mock.in_place(jax.devices()[:members], rank), ("sequence",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "sequence"))

    def everywhere(x: Any) -> Any:
        copies = [jax.device_put(x, device) for device in mesh.local_devices]
        return jax.make_array_from_single_device_arrays((1, members * x.shape[1], *x.shape[2:]), sharding, copies)

    def attend(q: Any, k: Any, v: Any) -> Any:
        options = dict(axis_name="sequence", layout=layout, mask=sa.causal(), mesh=mesh, kernel=kernel)
        return sa.attention(q, k, v, **options)

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    return attend, both, [everywhere(x) for x in parts]


def _compile(function: Any, arguments: Any) -> Any:
    return jax.jit(function).lower(*arguments).compile(compiler_options=GPU_OPTIONS)


def one_gpu(q: Any, k: Any, v: Any, dout: Any) -> Any:
    out, lse = cudnn.forward(q, k, v, scale=DIM**-0.5, causal=True)
    return out, *cudnn.backward(q, k, v, out, lse, dout, scale=DIM**-0.5, causal=True)


def _flops(length: int, heads: int) -> float:
    """Of causal attention, forward; the backward pass takes 2.5 times as many."""
    return 4 * length * length / 2 * heads * DIM


def _random(length: int, heads: int, kv_heads: int) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, length, n, DIM) for n in (heads, heads, kv_heads, kv_heads)]
    device = jax.local_devices()[0]
    with jax.default_device(device):
        return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


if __name__ == "__main__":
    main(
        {"check": _check, "check_timed": _check_timed, "ring": _measure_ring, "schedule": _read_schedule},
        mocked=("check_timed", "ring", "schedule"),
    )

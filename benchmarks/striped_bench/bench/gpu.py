"""The suites `gpu` and `overlap`: what every member of a ring of GPUs would take, measured on one (see `mock.py` how).

A member takes as long as its arithmetic, and so does a ring if transfers are hidden: `hidden` says how many are, in the
schedule of the real program, and `hop_seconds` what one takes on a real interconnect. `overlap` says which transfers
are hidden, and runs nothing.
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import striped_attention as sa
from striped_attention.kernels.choice import KERNELS
from striped_attention.kernels.cudnn import binding as cudnn
from striped_attention.runtime.compiler import compiler_options
from striped_attention.runtime.schedule import transfers
from striped_bench.bench import mock, profile
from striped_bench.bench.blocks import replay
from striped_bench.bench.run import Options, Progress, Record, Row, grouped, keep, require, seconds, tabulate

LAYOUTS = (sa.contiguous(), sa.striped(), sa.zigzag())
DIM = 128
WIRES = {"NVLink 4 (450 GB/s each way)": 450e9, "InfiniBand NDR (50 GB/s a GPU)": 50e9}
TOLERANCE = 0.01  # relative, in bfloat16; rounding makes 0.004
LONGEST = 262_144  # tokens that one GPU is given; it does not get faster with more
BATCHES = 3
SECONDS = 0.3  # of work in a batch, at least
LONG = 5.0  # seconds of all batches together, of which one will do
GUESS = 5e14  # FLOP/s, to know beforehand how long something takes
Run = tuple[Row, str, Callable[[], Any], float]  # where its times go, forward or both, what is timed, its FLOPs


def gpu(options: Options, result: Record) -> Progress:
    result["configuration"] |= {"dim": DIM, "dtype": "bfloat16"}
    result["checks"] = list(mock.results(check, members=options["members"]))
    result["gpu"] = result["checks"][0]["gpu"]
    yield "answers checked: " + ", ".join(f"{c['members']} members {c['worst']:.1e}" for c in result["checks"])
    result["timed_checks"] = [row for n in options["members"] for row in mock.results(check_timed, n, members=n)]
    yield f"what will be timed, cudnn against xla: {max(c['worst'] for c in result['timed_checks']):.1e}"
    result["ideal"], result["members"] = [], []
    for members, heads, length in itertools.product(options["members"], options["heads"], options["lengths"]):
        ideal, *rows = mock.results(ring, members, members=members, length=length, heads=heads)
        result["ideal"].append(ideal)
        for row in keep(result["members"], rows):
            result["summary"] = summary(result)
            yield row
    rates = ("tflops", "of_ideal", "over_contiguous", "bound", "hidden", "transfers")
    yield tabulate(result["summary"], "members", "length", "heads", "layout", "forward", "both", *rates)


def overlap(options: Options, result: Record) -> Progress:
    result["configuration"] |= {"dim": DIM, "dtype": "bfloat16"}
    result["schedules"] = []
    for members, heads, length in itertools.product(options["members"], options["heads"], options["lengths"]):
        ring = {"members": members, "length": length, "heads": heads}
        for row in mock.results(schedule, members, **ring):
            result["schedules"].append({**ring, **row})
            sent = row["transfers"]
            exposed = [f"{one['dtype']}, {one['bytes']:,} bytes" for one in sent if not one["hidden"]]
            yield {**ring, "layout": row["layout"], "transfers": len(sent), "not hidden": "; ".join(exposed) or "none"}


def summary(result: Record) -> list[Row]:
    """The busiest member of every ring, against one GPU and against the contiguous layout."""
    rows = []
    for (members, length, heads), ring in grouped(result["members"], "members", "length", "heads").items():
        case = {"members": members, "length": length, "heads": heads}
        ideal = next(row for row in result["ideal"] if case.items() <= row.items())
        layouts = {name: ranks for (name,), ranks in grouped(ring, "layout").items()}
        busiest = {name: {k: max(r[k] for r in ranks) for k in ("forward", "both")} for name, ranks in layouts.items()}
        for name, times in busiest.items():
            first = layouts[name][0]
            rates = {k: first[f"{k}_flops"] / taken for k, taken in times.items()}
            hops = {"hop": first["hop_bytes"], "backward_hop": 3 * first["hop_bytes"]}  # with sums in float32
            rows.append(
                {
                    **{**case, "layout": name, **times, "bound": 2 - 1 / members},
                    "ideal_length": ideal["ideal_length"],
                    "tflops": {k: rate / 1e12 for k, rate in rates.items()},
                    "of_ideal": {k: rate / ideal[f"{k}_rate"] for k, rate in rates.items()},
                    "over_contiguous": {k: busiest["contiguous()"][k] / taken for k, taken in times.items()},
                    **{f"{hop}_bytes": size for hop, size in hops.items()},
                    **{f"{hop}_seconds": {w: size / v for w, v in WIRES.items()} for hop, size in hops.items()},
                    **{"hidden": first["hidden"], "transfers": first["transfers"]},
                }
            )
    return rows


def check(members: list[int]) -> Iterator[Row]:
    """Rings of all sizes, replayed, against one GPU; raises if they differ by more than rounding."""
    for count, layout in itertools.product(members, LAYOUTS):
        q, dout, k, v = _random(512 * count, 4, 2)
        truth = jax.jit(one_gpu)(q, k, v, dout)
        ring = replay(q, k, v, dout, kernel=KERNELS["cudnn"], layout=layout, mask=sa.causal(), members=count)
        worst = max(itertools.starmap(_apart, zip(ring, truth, strict=True)))
        require(f"{layout!r} on {count} members, against one GPU,", worst, TOLERANCE)
        yield {"members": count, "layout": repr(layout), "worst": worst, "gpu": mock.gpu()}


def check_timed(members: int, kernels: tuple[str, str] = ("cudnn", "xla")) -> Iterator[Row]:
    """The programs that will be timed, keys and sums at home, with both kernels; raises if they differ."""
    parts = _random(512, 4, 2)
    for layout in LAYOUTS:
        found = []
        for kernel in kernels:
            _, both, (q, dout, k, v) = _program(layout, members, parts, members - 1, kernel)
            with mock.keys_at_home(sums=True):
                found.append(jax.tree.leaves(_compile(both, q, k, v, dout)(q, k, v, dout)))
        worst = max(_apart(*(x.addressable_data(0) for x in pair)) for pair in zip(*found, strict=True))
        require(f"{layout!r} on {members} members, {kernels[0]} against {kernels[1]},", worst, TOLERANCE)
        yield {"members": members, "layout": repr(layout), "rank": members - 1, "worst": worst}


def _apart(a: Any, b: Any) -> float:
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def ring(members: int, length: int, heads: str) -> list[Row]:
    """One GPU with the whole sequence; then, by layout, a ring's last member, and the first if it has other work."""
    q_heads, kv_heads = map(int, heads.split(":"))
    flops = lambda tokens: 4 * tokens * tokens / 2 * q_heads * DIM  # noqa: E731  forward; backward 2.5 times as many
    case = {"members": members, "length": length, "heads": heads}
    single, slots = min(length, LONGEST), length // members
    q, dout, k, v = _random(single, q_heads, kv_heads)
    alone = jax.jit(functools.partial(cudnn.forward, scale=DIM**-0.5, causal=True))
    rows: list[Row] = [{**case, "ideal_length": single}]
    runs: list[Run] = [(rows[0], "forward", functools.partial(alone, q, k, v), flops(single))]
    runs += [(rows[0], "both", functools.partial(jax.jit(one_gpu), q, k, v, dout), 3.5 * flops(single))]
    parts = _random(slots, q_heads, kv_heads)
    for layout in LAYOUTS:
        real = None
        for rank in (members - 1,) if layout == sa.contiguous() else (0, members - 1):
            attend, both, (q, dout, k, v) = _program(layout, members, parts, rank)
            real = real or _compile(both, q, k, v, dout)  # the same for every member
            sent, memory = transfers(str(real.as_text())), real.memory_analysis().temp_size_in_bytes
            row = {**case, "layout": repr(layout), "rank": rank, "temporary_bytes": memory}
            row |= {"transfers": len(sent), "hidden": sum(t.hidden for t in sent)}
            rows.append({**row, "hop_bytes": 2 * slots * kv_heads * DIM * 2})
            with mock.keys_at_home():
                timed = _compile(attend, q, k, v), _compile(both, q, k, v, dout)
            runs += [(rows[-1], "forward", functools.partial(timed[0], q, k, v), flops(length) / members)]
            runs += [(rows[-1], "both", functools.partial(timed[1], q, k, v, dout), 3.5 * flops(length) / members)]
    _measure(runs)
    return rows


def _measure(runs: list[Run]) -> None:
    """Put times, FLOPs and profiles into rows. Runs take turns: a GPU that grows warm and slow is so for everybody."""
    for _, _, call, _ in runs:
        seconds(call)  # warm up
    long = sum(flops for *_, flops in runs) / GUESS > LONG
    for _ in range(1 if long else BATCHES):
        for row, kind, call, flops in runs:
            taken = seconds(call, times=max(1, int(SECONDS * GUESS / flops)))
            row.setdefault("samples", {}).setdefault(kind, []).append(taken)
    for row, kind, call, flops in runs:
        taken = statistics.median(row["samples"][kind])
        row |= {kind: taken, f"{kind}_flops": flops, f"{kind}_rate": flops / taken}
        if kind == "both":
            row["where"] = profile.where(call)


def schedule(members: int, length: int, heads: str) -> Iterator[Row]:
    """The transfers of the forward and backward pass, compiled for a ring with every layout."""
    parts = _random(length // members, *map(int, heads.split(":")))
    for layout in LAYOUTS:
        _, both, (q, dout, k, v) = _program(layout, members, parts, rank=0)
        sent = transfers(str(_compile(both, q, k, v, dout).as_text()))
        yield {"layout": repr(layout), "transfers": [dataclasses.asdict(t) for t in sent]}


def _program(layout: Any, members: int, parts: list[Any], rank: int, kernel: str = "cudnn") -> Any:
    """Attention, attention with its gradients, and the arguments of which a member of a ring has these parts."""
    devices = np.roll(np.array(jax.devices()[:members]), rank)  # the first, which exists, is the member `rank`
    mesh = Mesh(devices, ("sequence",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "sequence"))

    def everywhere(x: Any) -> Any:
        copies = [jax.device_put(x, device) for device in mesh.local_devices]
        return jax.make_array_from_single_device_arrays((1, members * x.shape[1], *x.shape[2:]), sharding, copies)

    def attend(q: Any, k: Any, v: Any) -> Any:
        where = dict(mesh=mesh, axis_name="sequence", layout=layout, kernel=kernel)
        return sa.attention(q, k, v, mask=sa.causal(), **where)

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    return attend, both, [everywhere(x) for x in parts]


def _compile(function: Any, *arguments: Any) -> Any:
    return jax.jit(function).lower(*arguments).compile(compiler_options=compiler_options())


def one_gpu(q: Any, k: Any, v: Any, dout: Any) -> Any:
    out, lse = cudnn.forward(q, k, v, scale=DIM**-0.5, causal=True)
    return out, *cudnn.backward(q, k, v, out, lse, dout, scale=DIM**-0.5, causal=True)


def _random(length: int, heads: int, kv_heads: int) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, length, n, DIM) for n in (heads, heads, kv_heads, kv_heads)]
    with jax.default_device(jax.local_devices()[0]):
        return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]

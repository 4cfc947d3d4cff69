"""The suites `gpu` and `overlap`: the devices of a ring of GPUs, measured one at a time on one GPU (see `mock.py`).

A case is a ring (devices, tokens, heads), a mask, a kernel, a strategy and a layout. Its time is that of the device
with the most tiles, running a program without transfers. A ring takes as long if all its transfers overlap with
computation. `hidden` counts the transfers that do in the schedule of the real program. `planned_...` are estimates of
the planner's cost model: seconds of transfers on the interconnect, and the seconds that computation does not hide. With
packed documents the busiest device may differ from step to step; `critical_path` is the length of the critical path
relative to the tiles of the overall busiest device. `overlap` only reports which transfers overlap; it runs nothing.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import striped_attention as sa
from striped_attention.core.layout import parse_layout
from striped_attention.errors import UsageError
from striped_attention.kernels.choice import KERNELS
from striped_attention.kernels.contract import make_request
from striped_attention.kernels.cudnn import binding as cudnn
from striped_attention.options import parse_mask
from striped_attention.runtime.compiler import compiler_options
from striped_attention.runtime.hardware import hardware_of
from striped_attention.runtime.schedule import Transfer, transfers
from striped_attention.strategies.choice import Assessment, TileCount, assess, choose_strategy
from striped_attention.strategies.strategy import AUTO, parse_strategy
from striped_attention.strategies.timeline import passes
from striped_attention.strategies.workload import Workload
from striped_bench.bench import mock, profile
from striped_bench.bench.blocks import replay
from striped_bench.bench.problem import visible_pairs
from striped_bench.bench.run import Options, Progress, Record, Row, grouped, require, seconds, tabulate

LAYOUTS = (sa.contiguous(), sa.striped(), sa.zigzag())
DIM = 128
OPTIONS = ("members", "lengths", "heads", "masks", "kernels", "strategies", "layouts")  # in the order of a case
RING = ("members", "length", "heads", "mask")  # cases that share these are timed in interleaved rounds
PLANNED = ("planned_for", "planned_transfer_seconds", "planned_exposed_seconds", "critical_path")
NEARLY = 0.9  # of the most tiles: from this share on, the first and the last device are timed too
WIRES = {"NVLink 4 (450 GB/s each way)": 450e9, "InfiniBand NDR (50 GB/s a GPU)": 50e9}
TOLERANCE = 0.01  # relative, in bfloat16; rounding alone gives 0.004
LONGEST = 262_144  # tokens of the single-GPU reference; more tokens do not make it faster
BATCHES = 3
SECONDS = 0.3  # minimum duration of a batch
LONG = 5.0  # seconds; if all programs together take longer, one batch is enough
Run = tuple[Row, str, Callable[[], Any], float]  # row for the times, "forward" or "both", what is timed, its FLOPs


class Case(NamedTuple):
    """A measured configuration; the fields are those of the result rows."""

    members: int
    length: int
    heads: str
    mask: str = "causal"
    kernel: str = "cudnn"
    strategy: str = "ring"
    layout: str = "striped(1)"

    @property
    def head_counts(self) -> tuple[int, int]:
        heads, kv_heads = map(int, self.heads.split(":"))
        return heads, kv_heads

    def small(self) -> "Case":
        """The same case with few tokens, for the check."""
        return self._replace(length=512 * self.members)

    def workload(self) -> Workload:
        """The planner's workload, on a device like this one."""
        device, mask, layout = jax.local_devices()[0], parse_mask(self.mask, self.length), parse_layout(self.layout)
        query, key = (
            jax.ShapeDtypeStruct((1, self.length // self.members, n, DIM), jnp.bfloat16) for n in self.head_counts
        )
        where = dict(platform=device.platform, device_kind=device.device_kind)
        plain = make_request(query, key, mask=mask, layout=layout, devices=self.members, length=self.length, **where)
        asked = self.strategy if self.strategy == AUTO else parse_strategy(self.strategy)
        strategy = choose_strategy(asked, plain, self.kernel)
        hardware = hardware_of(plain.platform, plain.device_kind)
        return Workload(plain, mask, hardware, strategy, self.kernel, again=False)


def of_row(row: Row) -> Case:
    return Case(*(row[name] for name in Case._fields))


def gpu(options: Options, result: Record) -> Progress:
    result["configuration"] |= {"dim": DIM, "dtype": "bfloat16"}
    asked = [options[name] for name in OPTIONS]
    found = list(mock.results(plan, cases=list(itertools.starmap(Case, itertools.product(*asked)))))
    result["refused"] = [row for row in found if "refused" in row]
    yield from result["refused"]
    rows = [row for row in found if "refused" not in row]
    if not rows:
        raise UsageError(f"None of these cases can be measured. {result['refused'][0]['refused']}")
    result["checks"] = list(mock.side_by_side(check, [of_row(row) for row in rows]))
    result["gpu"] = result["checks"][0]["gpu"]
    yield f"answers checked: {len(result['checks'])} cases, at most {max(c['worst'] for c in result['checks']):.1e}"
    result |= {"timed_checks": [], "ideal": [], "members": []}
    for (n,), same in grouped(rows, "members").items():
        for kind, row in mock.results(check_and_measure, n, rows=same):
            result[kind].append(row)
            if kind == "members":
                result["summary"] = summary(result)
                yield row
    rates = ("tflops", "of_ideal", "over_contiguous", "planned_transfer_seconds", "planned_exposed_seconds")
    yield tabulate(result["summary"], *Case._fields, "forward", "both", *rates, "hidden", "transfers")


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
    """Compare the busiest device of each case with one GPU and with the contiguous layout."""
    busiest: dict[Case, Row] = {}
    for row in result["members"]:
        case = of_row(row)
        times = {kind: max(row[kind], busiest.get(case, row)[kind]) for kind in ("forward", "both")}
        busiest[case] = {**busiest.get(case, row), **times}
    rows = []
    for case, row in busiest.items():
        ideal = next(x for x in result["ideal"] if all(x[name] == row[name] for name in RING))
        times = {kind: row[kind] for kind in ("forward", "both")}
        rates = {kind: row[f"{kind}_flops"] / taken for kind, taken in times.items()}
        hops = {"hop": row["hop_bytes"], "backward_hop": 3 * row["hop_bytes"]}  # including the float32 gradient sums
        base = busiest.get(case._replace(layout="contiguous()"))
        rows.append(
            {
                **{**case._asdict(), **times, "ideal_length": ideal["ideal_length"]},
                "bound": 2 - 1 / case.members if (case.mask, case.strategy) == ("causal", "ring") else None,
                "tflops": {kind: rate / 1e12 for kind, rate in rates.items()},
                "of_ideal": {kind: rate / ideal[f"{kind}_rate"] for kind, rate in rates.items()},
                "over_contiguous": base and {kind: base[kind] / taken for kind, taken in times.items()},
                **{f"{hop}_bytes": size for hop, size in hops.items()},
                **{f"{hop}_seconds": {w: size / v for w, v in WIRES.items()} for hop, size in hops.items()},
                **{name: row[name] for name in ("hidden", "transfers", *PLANNED)},
            }
        )
    return rows


def plan(cases: list[Case]) -> Iterator[Row]:
    """Yield each distinct case once its strategy is chosen: devices to time and planned times, or why it cannot run."""
    counts: dict[Any, TileCount] = {}
    seen: set[Case] = set()
    for case in cases:
        try:
            workload = case.workload()
            count = counts.setdefault((case.mask, case.length), TileCount(workload.mask, case.length))
            found = assess(workload, count)
        except (NotImplementedError, ValueError) as error:
            yield {**case._asdict(), "refused": str(error)}
            continue
        case = case._replace(strategy=str(workload.strategy), layout=repr(workload.plain.layout))
        if case in seen:
            continue
        seen.add(case)
        tiles, messages = found.tiles.sum(axis=1), workload.messages
        some = [group for group in (0, int(tiles.argmax()), len(tiles) - 1) if tiles[group] > NEARLY * tiles.max()]
        forward, backward = passes(workload, found.chosen, found.tiles, found.needed)
        alone = [dataclasses.replace(one, sent=0 * one.sent, exposed=0.0) for one in (forward, backward)]
        transfers = transfer_seconds(found)
        exposed = [one.seconds() - still.seconds() for one, still in zip((forward, backward), alone, strict=True)]
        yield {
            **case._asdict(),
            "ranks": sorted({group * workload.strategy.heads for group in some}),
            "hop_bytes": messages.hop if messages.hops else 0,
            "critical_path": found.critical_path / int(tiles.max()),
            "planned_for": workload.hardware.name,
            "planned_transfer_seconds": {"forward": transfers[0], "both": sum(transfers)},
            "planned_exposed_seconds": {"forward": exposed[0], "both": sum(exposed)},
        }


def transfer_seconds(found: Assessment) -> tuple[float, float]:
    """Planned transfer seconds of a layer's forward and backward pass, whether overlapped or not."""
    both = passes(found.workload, found.chosen, found.tiles, found.needed)
    forward, backward = (float(one.transfer.sum() + one.exposed) for one in both)
    return forward, backward


def check(cases: list[Case]) -> Iterator[Row]:
    """Check small versions of all cases, replayed, against `xla` on one GPU; raise if they differ beyond rounding."""
    truths: dict[Any, Any] = {}
    for case in dict.fromkeys(case.small() for case in cases):
        q, dout, k, v = _random(case.length, *case.head_counts)
        mask, where = parse_mask(case.mask, case.length), (case.members, case.heads, case.mask)
        if where not in truths:
            alone = dict(kernel=KERNELS["xla"], layout=sa.contiguous(), members=1)
            truths[where] = replay(q, k, v, dout, mask=mask, **alone)
        ring: Row = dict(layout=parse_layout(case.layout), members=case.members, strategy=case.workload().strategy)
        found = replay(q, k, v, dout, mask=mask, kernel=KERNELS[case.kernel], **ring)
        worst = max(itertools.starmap(_apart, zip(found, truths[where], strict=True)))
        require(f"{_name(case)}, against one GPU,", worst, TOLERANCE)
        yield {**case._asdict(), "worst": worst, "gpu": mock.gpu()}


def check_and_measure(rows: list[Row]) -> Iterator[tuple[str, Row]]:
    """Check and measure all rings of one size; yield each row with the name of the record's list that it belongs to."""
    for row in check_timed(rows):
        yield "timed_checks", row
    for same in grouped(rows, *RING).values():
        ideal, *timed = measure(same)
        yield "ideal", ideal
        for row in timed:
            yield "members", row


def check_timed(rows: list[Row], reference: str = "xla") -> Iterator[Row]:
    """Check small versions of the timed programs against another kernel; raise if they differ."""
    truths: dict[Case, Any] = {}
    for case, rank in dict.fromkeys((of_row(row).small(), row["ranks"][-1]) for row in rows):
        parts = _random(512, *case.head_counts)

        def answer(case: Case, parts: list[Any] = parts, rank: int = rank) -> list[Any]:
            member = Member(case, parts, rank)
            out = jax.tree.leaves(member.call(_finish(member.lower_timed(member.both)))())
            return [x.addressable_data(0) for x in out]

        other = case._replace(kernel=reference)
        truths[other] = truths.get(other) or answer(other)
        worst = max(itertools.starmap(_apart, zip(answer(case), truths[other], strict=True)))
        require(f"{_name(case)}, against {reference},", worst, TOLERANCE)
        yield {**case._asdict(), "rank": rank, "worst": worst}


def _name(case: Case) -> str:
    return f"{case.layout} on {case.members} devices, {case.strategy}, {case.mask}, {case.kernel}"


def _apart(a: Any, b: Any) -> float:
    a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def measure(rows: list[Row]) -> list[Row]:
    """Measure one GPU on the whole sequence (causal, cuDNN), then the chosen devices of every case of a ring."""
    first = of_row(rows[0])
    heads, kv_heads = first.head_counts
    flops = lambda pairs: 4.0 * pairs * heads * DIM  # noqa: E731  forward; the backward pass has 2.5 times as many
    single = min(first.length, LONGEST)
    q, dout, k, v = _random(single, heads, kv_heads)
    alone = jax.jit(functools.partial(cudnn.forward, scale=DIM**-0.5, causal=True))
    found: list[Row] = [{**{name: rows[0][name] for name in RING}, "ideal_length": single}]
    work = flops(single * single / 2)
    runs: list[Run] = [(found[0], "forward", functools.partial(alone, q, k, v), work)]
    runs += [(found[0], "both", functools.partial(jax.jit(one_gpu), q, k, v, dout), 3.5 * work)]
    parts = _random(first.length // first.members, heads, kv_heads)
    work = flops(visible_pairs(parse_mask(first.mask, first.length), first.length)) / first.members
    programs = []
    for row in rows:
        for rank in row["ranks"]:
            member = Member(of_row(row), parts, rank)
            real = member.lower(member.both) if rank == row["ranks"][0] else None  # the same on every device
            programs.append((row, member, real, member.lower_timed(member.attend), member.lower_timed(member.both)))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        done = [[one and pool.submit(_finish, one) for one in lowered] for _, _, *lowered in programs]
    for (row, member, *_), (whole, attend, both) in zip(programs, done, strict=True):
        if whole is not None:
            compiled = whole.result()
            sent, memory = _transfers(compiled), compiled.memory_analysis().temp_size_in_bytes
        new = {**row, "rank": member.rank, "temporary_bytes": memory}
        found.append(new | {"transfers": len(sent), "hidden": sum(t.hidden for t in sent)})
        runs += [(found[-1], "forward", member.call(attend.result()), work)]
        runs += [(found[-1], "both", member.call(both.result()), 3.5 * work)]
    _measure(runs)
    return found


def _transfers(program: Any) -> list[Transfer]:
    kinds = ("collective-permute", "all-to-all", "all-gather", "reduce-scatter")
    return [transfer for kind in kinds for transfer in transfers(str(program.as_text()), kind)]


def _measure(runs: list[Run]) -> None:
    """Add times, FLOPs and profiles to rows. Runs are interleaved: a GPU that slows down affects all equally."""
    warm = [min(seconds(call) for _ in range(2)) for _, _, call, _ in runs]
    for _ in range(1 if sum(warm) > LONG else BATCHES):
        for (row, kind, call, _), once in zip(runs, warm, strict=True):
            taken = seconds(call, times=max(1, int(SECONDS / once)))
            row.setdefault("samples", {}).setdefault(kind, []).append(taken)
    for row, kind, call, flops in runs:
        taken = statistics.median(row["samples"][kind])
        row |= {kind: taken, f"{kind}_flops": flops, f"{kind}_rate": flops / taken}
        if kind == "both":
            row["where"] = profile.where(call)


def schedule(members: int, length: int, heads: str) -> Iterator[Row]:
    """Compile forward and backward for a ring with each layout, and list the transfers."""
    parts = _random(length // members, *map(int, heads.split(":")))
    for layout in LAYOUTS:
        member = Member(Case(members, length, heads, layout=repr(layout)), parts, rank=0)
        sent = transfers(str(_compile(member.both, *member.arguments).as_text()))
        yield {"layout": repr(layout), "transfers": [dataclasses.asdict(t) for t in sent]}


class Member:
    """One device of a ring: its attention, forward and with gradients, and its shards of the arguments."""

    def __init__(self, case: Case, parts: list[Any], rank: int) -> None:
        self.case, self.rank, self.layout = case, rank, parse_layout(case.layout)
        devices = np.roll(np.array(jax.devices()[: case.members]), rank)  # the first one, the real GPU, becomes `rank`
        self.mesh = Mesh(devices, ("sequence",))
        self.mask = parse_mask(case.mask, case.length).permute(self.layout, case.members)
        mask = jax.tree.map(self._place, self.mask)
        q, dout, k, v = map(self._everywhere, parts)
        self.arguments = (q, k, v, mask, dout)

    def attend(self, q: Any, k: Any, v: Any, mask: Any, *_: Any) -> Any:
        where: Row = dict(mesh=self.mesh, axis_name="sequence", layout=self.layout, kernel=self.case.kernel)
        return sa.attention(q, k, v, mask=mask, strategy=parse_strategy(self.case.strategy), **where)

    def both(self, q: Any, k: Any, v: Any, mask: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: self.attend(q, k, v, mask), q, k, v)
        return out, pull(dout)

    def lower(self, function: Any) -> Any:
        """Lower the real program of `attend` or `both`."""
        return jax.jit(function).lower(*self.arguments)

    def lower_timed(self, function: Any) -> Any:
        """Lower the program with local stand-ins for all collectives."""
        with mock.at_home(self.mask, sums=False):
            return self.lower(function)

    def call(self, program: Any) -> Callable[[], Any]:
        return functools.partial(program, *self.arguments)

    @property
    def _sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(None, "sequence"))

    def _place(self, x: Any) -> Any:
        return jax.make_array_from_callback(x.shape, self._sharding, lambda index: x[index])

    def _everywhere(self, x: Any) -> Any:
        copies = [jax.device_put(x, device) for device in self.mesh.local_devices]
        shape = (1, self.case.members * x.shape[1], *x.shape[2:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, copies)


def _compile(function: Any, *arguments: Any) -> Any:
    return _finish(jax.jit(function).lower(*arguments))


def _finish(lowered: Any) -> Any:
    return lowered.compile(compiler_options=compiler_options())


def one_gpu(q: Any, k: Any, v: Any, dout: Any) -> Any:
    out, lse = cudnn.forward(q, k, v, scale=DIM**-0.5, causal=True)
    return out, *cudnn.backward(q, k, v, out, lse, dout, scale=DIM**-0.5, causal=True)


def _random(length: int, heads: int, kv_heads: int) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, length, n, DIM) for n in (heads, heads, kv_heads, kv_heads)]
    with jax.default_device(jax.local_devices()[0]):
        return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]

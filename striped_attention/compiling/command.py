"""The command `striped compile`: compile a training step for remote machines, and report memory and transfers."""

import collections
import dataclasses
import math
import os
import pathlib
import re
import time
from typing import Any

import jax
import numpy as np
import rich.box
import rich.console
import rich.table

import striped_attention as sa
from striped_attention.compiling.config import CompileConfig
from striped_attention.compiling.topology import describe
from striped_attention.core.layout import BASELINE, Layout
from striped_attention.errors import UsageError
from striped_attention.kernels.choice import Choice, choose
from striped_attention.kernels.tpu.kernel import LANES
from striped_attention.models.stages import AXES, check_devices, parse_mesh
from striped_attention.options import parse_length
from striped_attention.planning.cost import estimate, gigabytes
from striped_attention.planning.work import count_tile_rows
from striped_attention.runtime.mesh import make_mesh
from striped_attention.runtime.record import metadata, write
from striped_attention.runtime.schedule import Transfer, transfers
from striped_attention.strategies.exchange import KEYS
from striped_attention.training.step import Program

# XLA's names of attention's transfers. Those in _SHARED also move weights.
_KINDS = ("collective-permute", "all-gather", "reduce-scatter", "all-to-all")
_SHARED = ("all-gather", "reduce-scatter")
_FINE = 16  # the longest length is found to within 1/16 of the power of two below it


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Result of compiling a training step. If it does not fit, only `memory` and `available` are known."""

    length: int
    kernel: str
    fits: bool
    seconds: float
    memory: int | None  # peak bytes per device; None if it does not fit and the compiler does not report it
    available: int | None = None
    transfers: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [transfer for transfer in self.transfers if transfer["kind"] == kind]


def run(config: CompileConfig) -> None:
    """Compile, print, and write the JSON."""
    console = rich.console.Console(highlight=False)
    if config.output is not None and not config.output.absolute().parent.is_dir():
        raise UsageError(f"--output {config.output} cannot be written: there is no folder {config.output.parent}.")
    devices, length = describe(config.topology), parse_length(config.length)
    if config.longest and devices[0].platform != "tpu":
        raise UsageError("--longest is for TPUs: only their compiler reports what does not fit.")
    mesh = make_mesh(_sizes(config, length, len(devices)), devices)
    options = {name: str(value) if isinstance(value, pathlib.Path) else value for name, value in vars(config).items()}
    record = metadata("compile", options, packages=["libtpu"])
    record |= {"device": devices[0].device_kind, "devices": len(devices), "mesh": dict(mesh.shape)}
    record["libtpu_init_args"] = os.environ.get("LIBTPU_INIT_ARGS")

    def program(length: int) -> Program:
        return Program(config.training(length), mesh, documents=config.text == "documents")

    def attempt(length: int) -> Compiled:
        with console.status(f"Compiling {length:,} tokens for {len(devices)} × {devices[0].device_kind} …"):
            return compile_step(program(length))

    tried = [attempt(length)]
    if config.longest:
        tried = _longest(tried[0], attempt, console)
    best = max((one for one in tried if one.fits), key=lambda one: one.length, default=tried[0])
    record |= _facts(program(best.length), best)
    record |= {"tried": [dataclasses.asdict(one) for one in tried], "result": dataclasses.asdict(best)}
    for line in _show(config, record, best):
        console.print(line)
    if config.output is not None:
        write(record, config.output)
        console.print(str(config.output))


def _sizes(config: CompileConfig, length: int, devices: int) -> dict[str, int]:
    """Return the sizes of the mesh axes."""
    try:
        sizes = parse_mesh(config.mesh or f"{AXES.sequence}={devices}")
        check_devices(sizes, devices)
        BASELINE.padded_length(length, devices)  # raises if positions exceed int32
    except ValueError as error:
        raise UsageError(str(error)) from error
    if length < sizes[AXES.sequence]:
        raise UsageError(f"--length must be at least the {sizes[AXES.sequence]} devices of a ring; got {length}.")
    if config.batch % sizes[AXES.batch]:
        raise UsageError(f"--batch must be a multiple of {AXES.batch}={sizes[AXES.batch]}; got {config.batch}.")
    return sizes


def _facts(program: Program, best: Compiled) -> dict[str, Any]:
    """Return what is known about a step without compiling it."""
    sizes, tpu = dict(program.mesh.shape), program.platform == "tpu"
    rings = [[(*d.coords, d.core_on_chip) for d in row] for row in program.mesh.devices] if tpu else []
    return {
        "layout": repr(program.compute.layout),
        "strategy": program.config.strategy,
        "remat": program.config.remat,
        "chunk": program.config.chunk,
        "kernel": best.kernel,
        "parameters": program.model.parameters,
        "estimated_memory": estimate(program.config, sizes).total_memory,
        "longest_hop": max((_longest_hop(cells) for cells in rings), default=None),
        "work": count_work(program),
    }


def compile_step(program: Program) -> Compiled:
    """Compile a step and read its memory and transfers."""
    kernel = _choice(program).name
    length, begun = program.config.sequence_length, time.perf_counter()
    try:
        compiled = program.compiled
    except jax.errors.JaxRuntimeError as error:
        said = str(error).lower()
        if "resource_exhausted" in said and ("vmem" in said or "smem" in said):
            raise UsageError(f"The tiles do not fit into a chip's vector memory: try --tile {LANES}.") from error
        if "resource_exhausted" not in said or "hbm" not in said:
            raise
        return Compiled(length, kernel, False, time.perf_counter() - begun, *_need(str(error)))
    seconds = time.perf_counter() - begun
    sent = [dataclasses.asdict(transfer) for transfer in _sent(compiled.as_text())]
    return Compiled(length, kernel, True, seconds, compiled.memory_analysis().peak_memory_in_bytes, None, sent)


def _sent(text: str) -> list[Transfer]:
    """Return attention's transfers in a program: gathered and scattered keys count, weights do not."""
    found = [transfer for kind in _KINDS for transfer in transfers(text, kind)]
    return [transfer for transfer in found if transfer.kind not in _SHARED or KEYS in transfer.source.split("/")]


def _choice(program: Program) -> Choice:
    """Return the kernel of a step on the devices it is compiled for."""
    device = program.mesh.devices.flat[0]
    layout, devices = program.compute.layout, program.compute.devices
    request = program.config.request(layout, devices, program.documents, device.platform, device.device_kind)
    try:
        return choose(program.config.kernel, request)
    except NotImplementedError as error:
        raise UsageError(str(error)) from error


def _need(message: str) -> tuple[int | None, int | None]:
    """Parse the needed and the available bytes from the compiler's error message."""
    found = re.search(r"([\d.]+)([KMGT])i?B?\b\D*(?:of|exceeds)\D*([\d.]+)([KMGT])", message)
    if found is None:
        return None, None
    size = {unit: 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)}
    return round(float(found[1]) * size[found[2]]), round(float(found[3]) * size[found[4]])


def _longest(first: Compiled, attempt: Any, console: rich.console.Console) -> list[Compiled]:
    """Double or halve the length until one fits and the next does not, then bisect for the longest that fits."""
    tried = [first]

    def fits(length: int) -> bool:
        tried.append(attempt(length))
        said = "fits" if tried[-1].fits else "does not fit"
        console.print(f"{length:,} tokens: {said}{_of_memory(tried[-1])}")
        return tried[-1].fits

    good, bad = first.length, 2 * first.length
    if first.fits:
        while fits(bad):
            good, bad = bad, 2 * bad
    else:
        good, bad = first.length // 2, first.length
        while not fits(good):
            good, bad = good // 2, good
            if good < 1024:
                raise UsageError(f"Even {bad:,} tokens do not fit: use more devices or a smaller model.")
    step = max(1, 2 ** int(math.log2(good)) // _FINE)
    while bad - good > step:
        middle = good + max(1, (bad - good) // (2 * step)) * step
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return tried


def count_work(program: Program) -> dict[str, Any]:
    """Count tiles on the critical path (the busiest device of every step), causal, and compare with the baseline."""
    compute, config = program.compute, program.config
    tile, heads = _choice(program).tile, config.make_strategy(compute.devices).heads
    devices = compute.devices // heads  # devices of a ring

    def critical(layout: Layout) -> int:
        tiles, _ = count_tile_rows(layout.grouped(heads), sa.causal(), config.sequence_length, devices, tile)
        return int(np.sum(np.max(tiles, axis=0)))

    mine, baseline = critical(compute.layout), critical(BASELINE)
    return {
        "tile": tile,
        "busiest_tiles": mine,
        "busiest_tiles_contiguous": baseline,
        "over_contiguous": baseline / mine,
        "bound": 2 - 1 / devices,
    }


def _show(config: CompileConfig, record: dict[str, Any], best: Compiled) -> list[Any]:
    """Return the report as lines and a table for the console."""
    batch = f"{config.batch} × " if config.batch > 1 else ""
    lines: list[Any] = [
        f"[bold]{config.preset}[/], {record['parameters']:,} parameters, {batch}{best.length:,} tokens on "
        f"{record['devices']} × {record['device']} ({config.topology}), {record['layout']}, "
        f"strategy {record['strategy']}, kernel {record['kernel']}, remat {record['remat']}, chunks of "
        f"{record['chunk']:,} tokens"
    ]
    if not best.fits:
        return [*lines, f"[red]It does not fit{_of_memory(best)}.[/] `--longest` finds what does."]
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False)
    table.add_row("peak memory per device", gigabytes(best.memory or 0))
    table.add_row("  estimated by --dry-run", gigabytes(record["estimated_memory"]))
    for row in _hidden(best):
        table.add_row(*row)
    hops = best.of_kind(_KINDS[0])
    for dtype in sorted({transfer["dtype"] for transfer in hops}):
        size = max(transfer["bytes"] for transfer in hops if transfer["dtype"] == dtype)
        table.add_row(f"bytes per hop, {dtype}", gigabytes(size))
    if record["longest_hop"] is not None:
        table.add_row("longest hop between chips", f"{record['longest_hop']} chip{'s' * (record['longest_hop'] > 1)}")
    work = record["work"]
    tile = " × ".join(map(str, work["tile"]))
    table.add_row(
        f"causal tiles on the critical path: {BASELINE!r} over this", f"{work['over_contiguous']:.2f} ({tile})"
    )
    table.add_row("  at most", f"{work['bound']:.2f}")
    table.add_row("compiled in", f"{best.seconds:.0f} s")
    return [*lines, table]


def _hidden(best: Compiled) -> list[tuple[str, str]]:
    """Return rows on how many transfers of each kind overlap with attention, and which do not."""
    rows = []
    for kind in _KINDS:
        sent = best.of_kind(kind)
        if sent:
            rows.append((f"{kind} overlapped with attention", f"{sum(t['hidden'] for t in sent)} of {len(sent)}"))
        open_ = collections.Counter((t["dtype"], t["bytes"]) for t in sent if not t["hidden"])
        rows += [("  [yellow]exposed", f"{n} × {dtype}, {gigabytes(size)}") for (dtype, size), n in open_.items()]
    return rows or [("transfers of attention", "none")]


def _of_memory(one: Compiled) -> str:
    if one.memory is None:
        return ""
    return f": {gigabytes(one.memory)} per device" + (f" of {gigabytes(one.available)}" if one.available else "")


def _longest_hop(cells: list[tuple[int, ...]]) -> int:
    """Return the longest hop between neighbours of a ring, in chips; the last is next to the first."""
    closed = zip(cells, [*cells[1:], cells[0]], strict=True)
    return max(sum(abs(a - b) for a, b in zip(x, y, strict=True)) for x, y in closed)

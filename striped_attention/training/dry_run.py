"""Dry run: estimate from shapes whether a run fits in memory, without touching a device."""

from collections.abc import Sequence

import rich.console
import rich.table

from striped_attention.planning.cost import Cost, estimate, gigabytes
from striped_attention.training.config import TrainConfig


def show(config: TrainConfig, mesh: dict[str, int], start: Sequence[str] = ()) -> None:
    """Print what a step of this run needs, after the lines of `start`, which describe the model it starts from."""
    cost = estimate(config, mesh)
    console = rich.console.Console(highlight=False)
    for line in start:
        console.print(line, markup=False, soft_wrap=True)
    axes = " × ".join(f"{size} {name}" for name, size in mesh.items())
    console.print(
        f"[bold]{cost.parameters:,} parameters[/], {config.batch} × {config.sequence_length:,} tokens per step on "
        f"{cost.devices} device{'s' * (cost.devices > 1)} ({axes}), {cost.layout}, strategy {config.strategy}, "
        f"{config.dtype}"
    )
    if cost.padded_length != config.sequence_length:
        console.print(f"Padded to {cost.padded_length:,} slots per sequence.")
    everything = "every matrix product"
    what = {
        "unrolled": everything,
        "none": everything,
        "qkv": "attention's output and inputs",
        "attention": "attention's output",
    }
    console.print(
        f"Each layer keeps {what.get(config.remat, 'nothing')} for the backward pass (remat {config.remat}), and its "
        f"stages process {config.chunk:,} tokens at a time."
    )
    console.print(_memory(cost))
    console.print(_fit(config, cost))
    console.print(_work(cost))
    if cost.replicated:
        console.print(
            f"[yellow]No dimension of {', '.join(cost.replicated)} is a multiple of {cost.devices}: every device holds "
            f"a full copy. A number of devices that divides the model's dim avoids this."
        )
    console.print("Estimated from shapes: nothing was compiled or allocated.")


def _fit(config: TrainConfig, cost: Cost) -> str:
    """One sentence on whether the step fits in the memory of the hardware that the dry run assumes."""
    hardware = config.assumed
    room = int(config.memory * hardware.memory)
    whole = gigabytes(int(hardware.memory))
    of = f"the {gigabytes(room)} that --memory {config.memory:g} allows of a device with {whole}"
    name = hardware.name if config.hardware is not None else f"assumed: {hardware.name}; --hardware sets another one"
    if cost.total_memory <= room:
        return f"It fits: {gigabytes(cost.total_memory)} of {of} ({name})."
    less = "" if config.remat == "full" else ", or leave out --remat and --chunk"
    return (
        f"[red]It does not fit:[/] {gigabytes(cost.total_memory)} is more than {of} ({name}). Use more "
        f"devices, a shorter --length or a larger --accumulate{less}."
    )


def _memory(cost: Cost) -> rich.table.Table:
    table = rich.table.Table("memory per device", "bytes", title_justify="left")
    table.columns[1].justify = "right"
    for part, size in cost.memory.items():
        table.add_row(part, gigabytes(size))
    table.add_section()
    table.add_row("[bold]total", f"[bold]{gigabytes(cost.total_memory)}")
    return table


def _work(cost: Cost) -> rich.table.Table:
    table = rich.table.Table("work and traffic per step", "per device")
    table.columns[1].justify = "right"
    flops = cost.matrix_flops + cost.attention_flops
    table.add_row("useful FLOPs, if each sequence is one document", f"{flops:.3g}")
    table.add_row("of which attention", f"{cost.attention_flops:.3g}")
    table.add_row("attention's share of that work, with recomputation", f"{cost.attention_share:.0%}")
    if cost.hops:
        table.add_row("hops of keys and values, per layer and direction", str(cost.hops))
        table.add_row("bytes per hop", gigabytes(cost.hop_bytes))
    for part, size in cost.sent.items():
        if size:
            table.add_row(f"sent: {part}", gigabytes(size))
    return table

"""Memory of a training step per device, from the compiled program, by sequence length and number of devices.

Compiles the step of `striped train` and reads its memory needs; nothing is run. The estimate of the dry run (`striped
train --dry-run`) for the same step is recorded for comparison. By default a small model is compiled for virtual CPU
devices. On a machine with a GPU,

    python benchmarks/train_memory.py --mock-gpus 8 --preset 1b --lengths 65536 262144

compiles for 8 GPUs, of which only one needs to exist. With JAX's GPU plugin, which `make test-gpu-compile` installs
in build/cuda, no GPU is needed:

    PYTHONPATH=build/cuda python benchmarks/train_memory.py --topology h200:1x1x8 --preset 1b --remat none --chunk 8192
"""

import argparse
import os
import pathlib
import sys
from typing import Any

import jax
import numpy as np
import rich.table
from jax.sharding import Mesh
from striped_bench.bench.run import say

from striped_attention.compiling.topology import describe
from striped_attention.planning.cost import estimate
from striped_attention.runtime import record
from striped_attention.training.config import TrainConfig
from striped_attention.training.step import Program

RESULTS = pathlib.Path(__file__).parent / "results"
SMALL = dict(preset="debug", layers=4, dim=256, ffn=768, heads=8, kv_heads=4)


def measure(options: dict[str, Any], length: int, those: list[Any]) -> dict[str, int]:
    """Return bytes per device: arguments (state and batch), temporaries, and the dry run's total."""
    config, devices = TrainConfig(**options, sequence_length=length), len(those)
    mesh = Mesh(np.array(those).reshape(1, devices), ("data", "sequence"))
    program = Program(config, mesh)
    stats = program.compiled.memory_analysis()
    return {
        "state_and_batch": stats.argument_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "together": stats.argument_size_in_bytes + stats.temp_size_in_bytes,
        "dry_run": estimate(program.config, {"data": 1, "sequence": devices}).total_memory,
    }


def prepare(mock_gpus: int | None, devices: list[int]) -> None:
    """Choose the devices to compile for, before JAX starts."""
    if mock_gpus is None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", max(devices))
    else:
        os.environ["XLA_FLAGS"] = "--xla_gpu_shard_autotuning=false"  # it would wait for GPUs that do not exist
        jax.config.update("jax_mock_gpu_topology", f"{mock_gpus}x1x1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = [4096, 8192, 16_384, 32_768, 65_536]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="sequence lengths in tokens")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of virtual CPU devices")
    parser.add_argument("--mock-gpus", type=int, help="compile for this many GPUs instead")
    parser.add_argument("--topology", help="compile for GPUs without having them, as in `striped compile`")
    parser.add_argument("--remat", default="attention", help="what layers keep for backward, as in `striped train`")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens per chunk, as in `striped train`")
    parser.add_argument("--kernel", default="auto", help="attention kernel; without a GPU, hopper")
    parser.add_argument("--preset", help="model preset of `striped train` instead of the small model")
    parser.add_argument("--dtype", default="bfloat16", help="compute dtype of the model")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "train_memory.json")
    arguments = parser.parse_args()
    model: dict[str, Any] = SMALL if arguments.preset is None else dict(preset=arguments.preset)
    options = {**model, **{name: getattr(arguments, name) for name in ("dtype", "remat", "chunk", "kernel")}}
    options["strategy"] = "ring"
    counts = arguments.devices if arguments.mock_gpus is None else [arguments.mock_gpus]
    prepare(arguments.mock_gpus, counts)
    there = jax.devices() if arguments.topology is None else describe(arguments.topology)
    if arguments.topology is not None:
        counts = [len(there)]
    name = "train_memory" if arguments.topology is None else "compiled_memory"
    document = record.metadata(name, {"options": options, "lengths": arguments.lengths, "devices": counts})
    document["device"] = there[0].device_kind
    found = {}
    for length in arguments.lengths:
        for devices in counts:
            say(f"{length:,} tokens, {devices} devices")
            found[length, devices] = measure(options, length, there[:devices])
    shown = rich.table.Table("MB per device (dry run)", *(f"{n} devices" for n in counts))
    for length in arguments.lengths:
        cells = (found[length, n] for n in counts)
        shown.add_row(f"T = {length}", *(f"{c['together'] / 1e6:.0f} ({c['dry_run'] / 1e6:.0f})" for c in cells))
    say(shown)
    results = [{"length": length, "devices": n, **sizes} for (length, n), sizes in found.items()]
    record.write({**document, "bytes_per_device": results}, arguments.output)
    say(str(arguments.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())

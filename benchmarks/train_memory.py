"""Memory of a training step: what one device needs, from the compiled program, over lengths and devices.

The step of `striped train` is compiled for virtual CPU devices and asked for its memory; nothing is run. Beside it
stands what `striped train --dry-run` says of the same step, so that one sees how far to trust it.
"""

import argparse
import pathlib
import sys

import jax
import numpy as np
import record
from jax.sharding import Mesh

from striped_attention.training.config import TrainConfig
from striped_attention.training.cost import estimate
from striped_attention.training.data import Batch
from striped_attention.training.step import Program

MODEL = dict(preset="debug", layers=4, dim=256, ffn=768, heads=8, kv_heads=4, dtype="bfloat16", chunk=1024)


def measure(length: int, devices: int) -> dict[str, int]:
    """Bytes of one device: arguments (state and batch), temporaries, and the dry run's total."""
    config = TrainConfig(**MODEL, sequence_length=length)
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(1, devices), ("data", "sequence"))
    program = Program(config, mesh)
    zeros = np.zeros((1, length), np.int32)
    inputs = program.place(Batch(zeros, zeros, zeros.astype(np.float32), zeros))
    stats = program.step.lower(program.state, inputs).compile().memory_analysis()
    return {
        "state_and_batch": stats.argument_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "together": stats.argument_size_in_bytes + stats.temp_size_in_bytes,
        "dry_run": estimate(config, {"data": 1, "sequence": devices}).total_memory,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = [4096, 8192, 16_384, 32_768, 65_536]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="tokens of a sequence")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8], help="devices of the sequence axis")
    parser.add_argument("--output", type=pathlib.Path, default=record.RESULTS / "train_memory.json")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(arguments.devices))
    configuration = {"model": MODEL, "lengths": arguments.lengths, "devices": arguments.devices}
    document = record.metadata("train_memory", configuration)
    bytes_ = {}
    for length in arguments.lengths:
        for devices in arguments.devices:
            record.progress(f"T = {length}", f"{devices} devices")
            bytes_[length, devices] = measure(length, devices)
    rows = [["MB per device (dry run)", *(f"{n} devices" for n in arguments.devices)]]
    for length in arguments.lengths:
        cells = (bytes_[length, n] for n in arguments.devices)
        rows.append([f"T = {length}", *(f"{c['together'] / 1e6:.0f} ({c['dry_run'] / 1e6:.0f})" for c in cells)])
    print(record.table(rows), end="\n\n")
    results = [{"length": length, "devices": n, **found} for (length, n), found in bytes_.items()]
    record.write({**document, "bytes_per_device": results}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())

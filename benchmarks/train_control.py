"""Control run: does training on many devices follow the same loss curve as on one?

The reference is one device with dense attention. It is compared with 2, 4 and 8 virtual devices and every layout, with
the same initial weights and data: packed documents of Python's standard library, in float32. The result is the largest
relative difference of a loss over all steps. Nothing is timed.
"""

import argparse
import pathlib
import sys

import jax
import numpy as np
import rich.table
from jax.sharding import Mesh
from striped_bench.bench.run import say

from striped_attention import data
from striped_attention.core.oracle import control_attention
from striped_attention.runtime import record
from striped_attention.training.config import TrainConfig
from striped_attention.training.step import Program

RESULTS = pathlib.Path(__file__).parent / "results"
RUN = dict(sequence_length=1000, batch=1, dtype="float32", learning_rate=3e-3, chunk=64)
LAYOUTS = (("contiguous", None), ("striped", 1), ("striped", 16), ("zigzag", None))


def curve(corpus: data.Corpus, steps: int, devices: int, layout: str, stripe: int | None, attend=None) -> np.ndarray:
    """Train, and return the losses of all steps."""
    config = TrainConfig(**RUN, steps=steps, layout=layout, stripe=stripe)
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(1, devices), ("data", "sequence"))
    program = Program(config, mesh, attend)
    state, losses = program.fresh_state(), []
    for step in range(steps):
        batch = data.read(corpus, step, program.rows, config.sequence_length, config.seed)
        state, metrics = program.step(state, program.place(batch))
        losses.append(float(metrics["loss"]))
    return np.array(losses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="steps of every run")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8], help="devices of the sequence axis")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "train_control.json")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(arguments.devices))
    document = record.metadata("train_control", {**RUN, "steps": arguments.steps, "preset": "debug"})
    corpus = data.load(None, None, None, TrainConfig().model.vocabulary)
    say("control: 1 device, dense attention")
    control = curve(corpus, arguments.steps, 1, "contiguous", None, control_attention)
    runs = []
    for layout, stripe in LAYOUTS:
        for devices in arguments.devices:
            losses = curve(corpus, arguments.steps, devices, layout, stripe)
            name = f"{layout}({stripe or ''})"
            difference = float(np.abs(losses / control - 1).max())
            say(f"{name}, {devices} devices: largest relative difference {difference:.1e}")
            runs.append(
                {"layout": name, "devices": devices, "largest_difference": difference, "losses": losses.tolist()}
            )
    shown = rich.table.Table("largest relative difference", *(f"{n} devices" for n in arguments.devices))
    for name in dict.fromkeys(run["layout"] for run in runs):
        shown.add_row(name, *(f"{run['largest_difference']:.1e}" for run in runs if run["layout"] == name))
    say(shown)
    record.write({**document, "control": control.tolist(), "runs": runs}, arguments.output)
    say(str(arguments.output))
    return 0 if max(run["largest_difference"] for run in runs) < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())

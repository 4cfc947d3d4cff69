"""`make demo`: train a small language model with Striped Attention, then compare layouts.

1. Train on 8 virtual CPU devices, on the sources of Python's standard library as packed documents.
2. Time the same training step, striped and contiguous (Ring Attention), on two processes with a core each.
3. Count the attention work of 8 devices, for this sequence and a longer one. (With more devices than cores, wall-clock
   time would only show the total work.)
"""

import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import jax
import numpy as np

import striped_attention as sa
from striped_attention import data
from striped_attention.kernels.xla import CPU_TILE
from striped_attention.planning.work import count_tiles
from striped_attention.runtime.mesh import make_mesh
from striped_attention.training import launch
from striped_attention.training.config import TrainConfig
from striped_attention.training.step import Program
from striped_attention.training.trainer import train

DEVICES = 8
# A ring with stripes, because the demo is about these: so short a sequence would run as fast in other ways.
TRAIN = TrainConfig(
    sequence_length=6144,
    steps=30,
    learning_rate=3e-3,
    warmup=3,
    dtype="float32",
    cpu_devices=DEVICES,
    strategy="ring",
    layout="striped",
)
COMPARE = dataclasses.replace(TRAIN, cpu_devices=1, local_processes=2)
LONGER = 65_536
ROUNDS = 4


def learn() -> None:
    """Part 1."""
    print(f"1. Training on {DEVICES} virtual CPU devices.\n", flush=True)
    launch.connect(TRAIN)
    with tempfile.TemporaryDirectory() as folder:
        run = dataclasses.replace(TRAIN, checkpoint_dir=pathlib.Path(folder) / "run")
        train(run)
        lines = [json.loads(line) for line in (run.checkpoint_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    tenth = max(1, len(losses) // 10)
    first, last = np.mean(losses[:tenth]), np.mean(losses[-tenth:])
    speed = statistics.median(line["tokens_per_second"] for line in lines)
    print(f"\n   loss {first:.2f} → {last:.2f} (mean of the first and last {tenth} steps)   {sketch(losses)}")
    print(f"   {speed:,.0f} tokens/s on {os.cpu_count()} cores\n", flush=True)
    if not last < first - 0.5:
        raise SystemExit("The loss did not fall: please report this.")


def sketch(values: list[float], width: int = 40) -> str:
    """Draw a curve in one line of text."""
    means = np.array([part.mean() for part in np.array_split(np.array(values), min(width, len(values)))])
    heights = (means - means.min()) / (means.max() - means.min()) * 7
    return "".join("▁▂▃▄▅▆▇█"[round(height)] for height in heights)


def compare(config: TrainConfig) -> int:
    """Part 2, run by each of the two processes: time steps of both layouts, interleaved."""
    launch.connect(config)
    corpus = data.load(None, None, None, config.model.vocabulary)
    steps = {}
    for layout in ("contiguous", "striped"):
        program = Program(
            dataclasses.replace(config, layout=layout), make_mesh({"data": 1, "sequence": jax.device_count()})
        )
        inputs = program.place(data.read(corpus, 0, program.rows, config.sequence_length, config.seed))
        state, _ = jax.block_until_ready(program.step(program.fresh_state(), inputs))
        name = {"contiguous": "contiguous() (Ring Attention)"}.get(layout, repr(program.compute.layout))
        steps[name] = [program.step, state, inputs, []]
    for _ in range(ROUNDS):
        for entry in steps.values():
            step, state, inputs, seconds = entry
            begun = time.perf_counter()
            entry[1], _ = jax.block_until_ready(step(state, inputs))
            seconds.append(time.perf_counter() - begun)
    if jax.process_index() == 0:
        medians = {name: statistics.median(entry[3]) for name, entry in steps.items()}
        for name, median in medians.items():
            print(f"   {name:30} {median:6.2f} s per step, {config.sequence_length / median:8,.0f} tokens/s")
        ring, striped = medians.values()
        print(f"   striped is {ring / striped:.2f}× as fast (wall-clock)\n", flush=True)
    return 0


def count() -> None:
    """Part 3."""
    corpus = data.load(None, None, None, 257)
    print(
        f"3. {DEVICES} devices: critical path of attention, the sum over steps of the busiest device's work. Counted in"
    )
    print(f"   tiles of {' × '.join(map(str, CPU_TILE))}, not timed; in brackets the speed-up over contiguous.")
    for length in (TRAIN.sequence_length, LONGER):
        documents = sa.documents(data.read(corpus, 0, range(1), length, 0).segments)
        own = dataclasses.replace(TRAIN, sequence_length=length).make_layout(DEVICES, platform="cpu")
        print(f"\n   {f'{length:,} tokens':30}{'one document':>16}{'packed files':>16}")
        paths = {}
        for layout in dict.fromkeys((sa.contiguous(), sa.striped(), own, sa.zigzag())):
            masks = (sa.causal(), documents)
            paths[layout] = [
                int(count_tiles(layout, mask, length, DEVICES, CPU_TILE).max(axis=0).sum()) for mask in masks
            ]
            ring = paths[sa.contiguous()]
            cells = (f"{n:,} ({base / n:.2f}×)" for n, base in zip(paths[layout], ring, strict=True))
            print(f"   {layout!r:30}" + "".join(f"{cell:>16}" for cell in cells))


def main() -> int:
    learn()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    print(
        f"2. The same step ({COMPARE.sequence_length:,} tokens, packed files) on two processes with a core each.\n",
        flush=True,
    )
    if cores >= 2:
        code = launch.start_local(COMPARE, compare)
        if code:
            return code
    else:
        print("   Skipped: it needs two cores, and there is one. On one core both layouts would take the same time.\n")
    count()
    return 0


if __name__ == "__main__":
    sys.exit(main())

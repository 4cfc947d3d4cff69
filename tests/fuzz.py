"""Compare random attention programs with the float64 reference: `make fuzz CASES=10000`.

A program is what gets compiled: shape, options, dtype, layout, devices, strategy, tile. Compilation takes seconds and a
run takes milliseconds, so each program runs many cases, which differ in data and masks (arbitrary monotone ranges).
A failure prints the two seeds that reproduce it.
"""

import argparse
import sys
import time

import numpy as np

from tests import conftest  # noqa: F401  (before the library: 8 devices, strict dtypes, checked types)

# isort: split
import striped_attention as sa
from striped_attention.core.layout import Layout
from striped_attention.core.mask import Mask
from striped_attention.strategies.strategy import Strategy
from tests.compare import Shape, assert_exact, factorings, random_mask


def random_program(seed: int) -> tuple[Shape, int, Layout, Mask, Strategy]:
    """Return shape with options, devices, layout, the part of the mask that is static under jit, and strategy."""
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.choice([1, 2, 3, 5]))
    shape = Shape(
        batch=int(rng.choice([1, 2, 3])),
        length=int(rng.integers(1, 80)),
        heads=kv_heads * int(rng.choice([1, 2, 4, 6, 8])),
        kv_heads=kv_heads,
        dim=int(rng.choice([4, 8, 16])),
        dtype=str(rng.choice(["float32", "float32", "float32", "bfloat16"])),
        tile=(int(rng.integers(1, 20)), int(rng.integers(1, 20))) if rng.random() < 0.8 else None,
        scale=float(rng.choice([0.1, 0.5, 1.0])) if rng.random() < 0.3 else None,
        softcap=float(rng.choice([1.0, 5.0])) if rng.random() < 0.3 else None,
        bias=str(rng.choice(["alibi", "t5", "t5-bidirectional"])) if rng.random() < 0.4 else None,
        sinks=bool(rng.random() < 0.3),
    )
    layouts = [sa.contiguous(), sa.zigzag(), sa.striped(), sa.striped(int(rng.integers(2, 20)))]
    devices = int(rng.choice([1, 2, 3, 4, 5, 6, 8]))
    masks = [
        sa.full(),
        sa.full(),
        sa.causal(),
        sa.prefix(int(rng.integers(80))),
        sa.sliding_window(int(rng.integers(1, 40))),
        sa.window(int(rng.integers(40)), int(rng.integers(40))),
    ]
    strategies = [strategy for strategy in factorings(devices) if shape.heads % strategy.heads == 0]
    strategy = strategies[rng.integers(len(strategies))]
    return shape, devices, layouts[rng.integers(4)], masks[rng.integers(6)], strategy


def check_case(program_seed: int, case_seed: int) -> None:
    """Check one random program with one random mask and random data."""
    shape, devices, layout, mask, strategy = random_program(program_seed)
    rng = np.random.default_rng([program_seed, case_seed])
    mask = mask & random_mask(rng, shape.batch, shape.length)
    assert_exact(shape, devices, layout, mask, seed=int(rng.integers(2**31)), strategy=strategy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="number of cases to run")
    parser.add_argument("--per-program", type=int, default=50, help="cases that share one compiled program")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program; each program takes the next")
    options = parser.parse_args()
    began, failures, done = time.time(), 0, 0
    while done < options.cases:
        program = options.seed + done // options.per_program
        try:
            check_case(program, done % options.per_program)
        except Exception as failure:
            failures += 1
            print(f"\nFAILED check_case({program}, {done % options.per_program}): {failure!r}", flush=True)
        done += 1
        if sys.stderr.isatty() or done % 500 == 0:
            rate = f"{done} of {options.cases} cases, {failures} failed, {time.time() - began:.0f} s"
            print(f"\r{rate}", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    print(f"\n{done} cases, {failures} failed, seed {options.seed}, {time.time() - began:.0f} s")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()

"""Kill test: a training run that is killed repeatedly must give bit-identical results to an uninterrupted run.

Two processes train a small model for several epochs on a small dataset, with gradient accumulation and a checkpoint
every few steps. SIGKILL ends one of them, their parent, or all three at once, at random moments: during start-up, in
the middle of a step, or while a checkpoint is half written. After each kill the same command continues with --resume.
At the end, all arrays of the last checkpoint (weights and optimiser state) and the losses of all steps must be
bit-identical to those of the uninterrupted run.

    python benchmarks/kill_test.py --kills 10
"""

import argparse
import contextlib
import hashlib
import json
import logging
import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from striped_bench.bench.run import say

from striped_attention.runtime import record

RESULTS = pathlib.Path(__file__).parent / "results"
OPTIONS = """--local-processes 2 --cpu-devices 1 --layers 2 --dim 64 --ffn 128 --heads 4 --kv-heads 2 --dtype float32
             --length 128 --batch 2 --accumulate 2 --checkpoint-every 3 --keep 2"""
VICTIMS = ("process 0", "process 1", "parent", "all")
MOMENTS = ("while saving", "in the middle", "while saving", "while starting")
ROWS = 30  # sequences in the dataset: an epoch takes 15 steps
DEADLINE = 600.0  # seconds to wait for an event before giving up


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="number of kills")
    parser.add_argument("--steps", type=int, default=150, help="steps of the whole run")
    parser.add_argument("--seed", type=int, default=0, help="seed for the moments and the victims")
    parser.add_argument("--options", default="", help="further options of `striped train`, as one string")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "kill_test.json")
    arguments = parser.parse_args()
    options = [*shlex.split(OPTIONS), *shlex.split(arguments.options), "--steps", str(arguments.steps)]
    configuration = {"options": shlex.join(options), "kills": arguments.kills, "seed": arguments.seed}
    document = record.metadata("kill_test", configuration, packages=("orbax-checkpoint",))
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        command = [sys.executable, "-m", "striped_attention.cli", "train", *options, "--data", str(text(folder))]
        alone, killed = Run(command, folder / "alone"), Run(command, folder / "killed")
        say("Uninterrupted run.")
        alone.finish()
        killed.starting = alone.starting
        kills = []
        for kill in plan(arguments.kills, arguments.seed):
            kills.append(killed.kill(*kill, share=1 / (arguments.kills + 1 - len(kills))))
            say(f"Kill {len(kills)}: {kills[-1]}")
        killed.finish()
        same = compare(alone, killed)
    record.write({**document, "kills": kills, **same}, arguments.output)
    say(f"{same}; written to {arguments.output}")
    return 0 if all(same["same"].values()) else 1


def plan(kills: int, seed: int) -> list[tuple[str, str, random.Random]]:
    """Choose moment and victim of every kill: cycle through all kinds, starting with a random one."""
    rng = random.Random(seed)
    moment, victim = rng.randrange(len(MOMENTS)), rng.randrange(len(VICTIMS))
    return [
        (MOMENTS[(moment + i) % len(MOMENTS)], VICTIMS[(victim + i + i // len(VICTIMS)) % len(VICTIMS)], rng)
        for i in range(kills)
    ]


def text(folder: pathlib.Path) -> pathlib.Path:
    """Write a folder of short documents, ROWS sequences of 128 bytes in total."""
    rng, documents = random.Random(0), folder / "text"
    documents.mkdir()
    for i in range(10):
        content = " ".join(rng.choice(("one", "two", "three", "four", "five")) for _ in range(ROWS * 128))
        (documents / f"{i}.txt").write_text(content[: ROWS * 128 // 10])
    return documents


class Run:
    """A training run in a folder; at most one command runs at a time."""

    def __init__(self, command: list[str], folder: pathlib.Path) -> None:
        self.folder, self._command = folder, [*command, "--checkpoint-dir", str(folder)]
        self._steps = int(command[command.index("--steps") + 1])
        self.starting = 0.0  # seconds until the first step is done

    def start(self) -> subprocess.Popen[str]:
        resume = ["--resume"] if self.folder.is_dir() and any(self.folder.iterdir()) else []
        return subprocess.Popen(
            [*self._command, *resume],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> None:
        """Train to the last step."""
        begun, process = time.monotonic(), self.start()
        wait_for(lambda: self.steps_logged() > 0 or process.poll() is not None)
        self.starting = time.monotonic() - begun
        out, _ = process.communicate(timeout=DEADLINE)
        if process.returncode:
            raise RuntimeError(f"The run ended with exit code {process.returncode}:\n{out}")

    def kill(self, moment: str, victim: str, rng: random.Random, share: float) -> dict[str, Any]:
        """Start, kill at a random moment within this share of the remaining steps, and report the state of the run."""
        begun, before = time.monotonic(), self.steps_logged()
        process = self.start()
        wait_for(lambda: len(children(process)) == 2, process)
        if moment == "while starting":
            time.sleep(rng.uniform(0, self.starting))
        else:
            furthest = max(1, int(2 * share * (self._steps - before)) - 1)
            step = min(before + rng.randint(1, furthest), self._steps - 2)
            wait_for(lambda: self.steps_logged() >= step, process)
            time.sleep(rng.uniform(0, 0.05))
        pids = dict(zip(VICTIMS, [*children(process), process.pid], strict=False))
        if moment == "while saving":
            wait_for(lambda: self._stopped_while_saving(pids.values()), process)
        send(signal.SIGKILL, pids.values() if victim == "all" else [pids[victim]])
        send(signal.SIGCONT, pids.values())  # resume stopped processes that were not killed
        process.communicate(timeout=DEADLINE)
        wait_for(lambda: not any(map(alive, pids.values())))
        return {
            "moment": moment,
            "victim": victim,
            "seconds": round(time.monotonic() - begun, 2),
            "last_step": self.steps_logged(),
            "last_checkpoint": max(self.checkpoints(), default=None),
            "half_written": self.half_written(),
        }

    def _stopped_while_saving(self, pids: Iterable[int]) -> bool:
        """Stop the processes if a checkpoint is half written; resume them if it was finished in the meantime."""
        if not self.half_written():
            return False
        send(signal.SIGSTOP, pids)
        if not self.half_written():
            send(signal.SIGCONT, pids)
            return False
        return True

    def lines(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl, without a last line that is half written."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps_logged(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name) for path in self.folder.glob("[0-9]*") if path.name.isdecimal())

    def half_written(self) -> bool:
        return any(self.folder.glob("*.orbax-checkpoint-tmp*"))

    def arrays(self) -> dict[str, np.ndarray]:
        """Read all arrays of the last checkpoint."""
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns about a missing file that it does not need
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        path = self.folder / str(self.checkpoints()[-1]) / "state"
        tree = reader.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        found = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
        return {jax.tree_util.keystr(name): x for name, x in jax.tree_util.tree_leaves_with_path(found)}


def children(process: subprocess.Popen[str]) -> list[int]:
    """Return the training processes that a command has started, process 0 first."""
    try:
        pids = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return [int(pid) for pid in pids if "spawn_main" in pathlib.Path(f"/proc/{pid}/cmdline").read_text()]
    except OSError:  # a process has ended in the meantime
        return []


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has already ended
            os.kill(pid, number)


def alive(pid: int) -> bool:
    """Whether a process is still running; zombies are not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Any, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"The run ended before it was killed:\n{process.communicate()[0]}")
        if time.monotonic() > deadline:
            raise TimeoutError("the awaited event did not happen in time")
        time.sleep(0.002)


def compare(alone: Run, killed: Run) -> dict[str, Any]:
    """Compare the final states and the losses of both runs, bit for bit."""
    mine, theirs = alone.arrays(), killed.arrays()
    digests = [{name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in found.items()} for found in (mine, theirs)]
    curves = [[(line["step"], line["loss"], line["gradient_norm"]) for line in run.lines()] for run in (alone, killed)]
    return {
        "same": {
            "last checkpoint": alone.checkpoints()[-1] == killed.checkpoints()[-1],
            "arrays": digests[0] == digests[1],
            "losses and gradient norms of all steps": curves[0] == curves[1],
        },
        "arrays": len(mine),
        "bytes": sum(x.nbytes for x in mine.values()),
        "steps": len(curves[0]),
        "sha256": hashlib.sha256("".join(digests[0].values()).encode()).hexdigest(),
    }


if __name__ == "__main__":
    sys.exit(main())

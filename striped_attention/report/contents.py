"""Contents: which figures a report has, in which order, and which command would make one that it has no data for."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from striped_attention.report import balance, inference, limits, overhead, speed, sweep
from striped_attention.report.read import Document
from striped_attention.report.section import Section

Maker = Callable[[Sequence[Document]], Section | None]
# What it shows, how it is made, and the command that measures it.
_CONTENTS: tuple[tuple[str, Maker, str], ...] = (
    ("work by device and step", balance.work, "striped plan --devices 8 --length 64k --output plan.json"),
    ("the timeline of a pass", balance.timeline, "striped plan --devices 8 --length 256k --output plan.json"),
    ("speed-up over length on GPUs", speed.gpus, "striped bench gpu"),
    ("speed-up over length on CPUs", speed.cpus, "striped bench layouts"),
    ("where a ring's time goes", overhead.kernels, "striped bench gpu"),
    ("whole training steps", overhead.steps, "striped bench step"),
    ("overheads beside attention", overhead.outside, "striped bench overhead"),
    ("speed-up over devices", sweep.scaling, "striped bench gpu"),
    ("tokens a second over devices", sweep.throughput, "striped bench scale"),
    ("sensitivity to the tile", sweep.tiles, "striped bench tiles"),
    ("speed-up by mask on CPUs", functools.partial(sweep.masks, platform="cpu"), "striped bench masks"),
    (
        "speed-up by mask on GPUs",
        functools.partial(sweep.masks, platform="gpu"),
        "striped bench masks --platform gpu",
    ),
    ("what a token sends", inference.traffic, "striped bench decode"),
    ("memory per device", limits.memory, "python benchmarks/train_memory.py"),
    ("accuracy", limits.accuracy, "striped bench positions"),
    ("other libraries", limits.peers, "striped bench peers"),
)


@dataclasses.dataclass(frozen=True)
class Contents:
    """A report before it is drawn; `missing` has what it does not show, and the command for that."""

    sections: tuple[Section, ...]
    missing: tuple[tuple[str, str], ...]
    documents: tuple[Document, ...]


def gather(documents: Sequence[Document]) -> Contents:
    """Every section that these documents have data for."""
    made = [(what, make(documents), command) for what, make, command in _CONTENTS]
    return Contents(
        sections=tuple(section for _, section, _ in made if section is not None),
        missing=tuple((what, command) for what, section, command in made if section is None),
        documents=tuple(documents),
    )

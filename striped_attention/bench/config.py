"""Config: the options of `striped bench`."""

import dataclasses
import re
from typing import Literal

import tyro

from striped_attention.training.config import Path
from striped_attention.training.errors import UsageError


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """Measure this machine; the result is one JSON document.

    gpu: attention on one NVIDIA GPU as the members of a ring would run it, answers checked first. The program is the
    real one for that many GPUs, only the wire is missing. overlap: which transfers of these programs are hidden behind
    attention; nothing is run.
    """

    suite: tyro.conf.Positional[Literal["gpu", "overlap"]]
    """What to measure."""
    members: tuple[int, ...] = (2, 4, 8, 16)
    """Sizes of the rings."""
    lengths: tuple[int, ...] = (65_536, 262_144, 524_288, 786_432, 1_048_576)
    """Tokens of the whole text."""
    heads: tuple[str, ...] = ("16:16", "32:8")
    """Query heads : key heads, of 128 each."""
    output: Path = None
    """Where the JSON goes. Default: a file named after the suite."""
    quick: bool = False
    """One small ring, in under a minute."""

    def __post_init__(self) -> None:
        for name in ("members", "lengths", "heads"):
            if not getattr(self, name):
                raise UsageError(f"--{name} needs at least one value.")
        for heads in self.heads:
            found = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", heads)
            if found is None or int(found[1]) % int(found[2]):
                raise UsageError(f"--heads must be written like 32:8, query heads : key heads; got {heads!r}.")
        for members in self.members:
            if members < 2 or any(length % (2 * members) for length in self.lengths):
                raise UsageError(
                    f"--members must be at least 2 and --lengths multiples of twice that; got {members} members and "
                    f"lengths {', '.join(map(str, self.lengths))}."
                )

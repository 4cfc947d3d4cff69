"""Config: the options of `striped bench`."""

import dataclasses
import re
from typing import Annotated, Any, Literal

import tyro

from striped_attention.training.config import Path, Whole
from striped_attention.training.errors import UsageError

Preset = Literal["1b", "3b", "7b", "llama3-8b", "debug"]
# What may be left out, as in `training/config.py`: the help says what happens then.
Numbers = Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT ...", help_behavior_hint="")]
Texts = Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="TEXT ...", help_behavior_hint="")]
Presets = Annotated[
    tuple[Preset, ...] | None, tyro.conf.arg(metavar="{1b,3b,7b,llama3-8b,debug} ...", help_behavior_hint="")
]

_RINGS: dict[str, Any] = dict(
    members=(2, 4, 8, 16), lengths=(65_536, 262_144, 524_288, 786_432, 1_048_576), heads=("16:16", "32:8")
)
# What each suite measures where nothing else is asked for, which also says which options it has, and with --quick.
SUITES: dict[str, dict[str, Any]] = {
    "gpu": _RINGS,
    "overlap": _RINGS,
    "step": dict(presets=("1b",), members=(8,), lengths=(65_536, 262_144), chunk=8192),
}
_QUICK_RING: dict[str, Any] = dict(members=(8,), lengths=(65_536,), heads=("16:16",))
QUICK: dict[str, dict[str, Any]] = {
    "gpu": _QUICK_RING,
    "overlap": _QUICK_RING,
    "step": dict(presets=("debug",), members=(8,), lengths=(65_536,), chunk=8192),
}


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """Measure this machine; the result is one JSON document.

    gpu: attention on one NVIDIA GPU as the members of a ring would run it, answers checked first. The program is the
    real one for that many GPUs, only the wire is missing. overlap: which transfers of these programs are hidden behind
    attention; nothing is run. step: whole training steps as the members of a ring would run them, on one NVIDIA GPU.
    """

    suite: tyro.conf.Positional[Literal["gpu", "overlap", "step"]]
    """What to measure."""
    members: Numbers = None
    """Sizes of the rings. Default: 2 4 8 16; for step 8."""
    lengths: Numbers = None
    """Tokens of the whole text. Default: 65536 262144 524288 786432 1048576; for step 65536 262144."""
    heads: Texts = None
    """gpu and overlap: query heads : key heads, of 128 each. Default: 16:16 32:8."""
    presets: Presets = None
    """step: shapes of the model, as in `striped train`. Default: 1b."""
    chunk: Whole = None
    """step: tokens that the feed-forward layers and the loss take at a time. Default: 8192, for GPUs like large
    matrices."""
    output: Path = None
    """Where the JSON goes. Default: a file named after the suite."""
    quick: bool = False
    """Other defaults: one small ring, in a minute or two."""

    @property
    def options(self) -> dict[str, Any]:
        """What to measure, by name: what was given, else the suite's own; with --quick something small of that."""
        own = (QUICK if self.quick else SUITES)[self.suite]
        return {name: default if (given := getattr(self, name)) is None else given for name, default in own.items()}

    def __post_init__(self) -> None:
        for name in ("members", "lengths", "heads", "presets", "chunk"):
            given = getattr(self, name)
            if given is not None and name not in SUITES[self.suite]:
                suites = " and ".join(suite for suite, own in SUITES.items() if name in own)
                raise UsageError(f"--{name} is an option of {suites}, not of {self.suite}. Leave it out.")
            if given == ():
                raise UsageError(f"--{name} needs at least one value.")
        options = self.options
        for heads in options.get("heads", ()):
            found = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", heads)
            if found is None or int(found[1]) % int(found[2]):
                raise UsageError(
                    f"--heads must be written like 32:8, query heads : key heads, the first a multiple of the second; "
                    f"got {heads!r}."
                )
        for members in options["members"]:
            if members < 2 or any(length < 1 or length % (2 * members) for length in options["lengths"]):
                raise UsageError(
                    f"--members must be at least 2 and --lengths multiples of twice that; got {members} members and "
                    f"lengths {', '.join(map(str, options['lengths']))}."
                )
        if options.get("chunk", 1) < 1:
            raise UsageError(f"--chunk must be at least 1; got {options['chunk']}.")

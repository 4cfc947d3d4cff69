"""Config: the options of `striped bench`."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import tyro

from striped_attention.hardware import HARDWARE
from striped_attention.layout import Layout, parse_layout
from striped_attention.training.config import Path, Whole
from striped_attention.training.errors import UsageError

Preset = Literal["1b", "3b", "7b", "llama3-8b", "debug"]
# What may be left out, as in `training/config.py`: the help says what happens then.
Numbers = Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT ...", help_behavior_hint="")]
Texts = Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="TEXT ...", help_behavior_hint="")]
Presets = Annotated[
    tuple[Preset, ...] | None, tyro.conf.arg(metavar="{1b,3b,7b,llama3-8b,debug} ...", help_behavior_hint="")
]

PEERS = ("ringattention", "plain-jax", "ring-attention-pytorch", "torch-sdpa")
_RINGS: dict[str, Any] = dict(
    members=(2, 4, 8, 16), lengths=(65_536, 262_144, 524_288, 786_432, 1_048_576), heads=("16:16", "32:8")
)
POSITIONS = ("rotary", "absolute", "alibi", "t5")
_STRIPES = ("striped(1)", "striped(16)", "striped(64)", "striped(256)", "striped(512)", "zigzag")
_WIDE = ("striped(1)", "striped(256)", "zigzag")
_MASKS = (
    *("causal", "window(2048)", "prefix(4096)"),
    *("documents(256)", "documents(1800)", "documents(4096)", "documents(1024, 0)"),
)
# What each suite measures where nothing else is asked for, which also says which options it has, and with --quick.
SUITES: dict[str, dict[str, Any]] = {
    "layouts": dict(members=(4, 8, 16), lengths=(4096, 8192, 16_384), layouts=_STRIPES, rounds=3),
    "tiles": dict(
        members=(8,),
        lengths=(8192,),
        masks=("causal",),
        tiles=(16, 32, 64, 128, 256, 512, 1024),
        layouts=_WIDE,
        rounds=3,
        platform="cpu",
    ),
    "masks": dict(members=(8,), lengths=(16_384,), masks=_MASKS, layouts=_WIDE, rounds=3, platform="cpu"),
    "positions": dict(
        members=(4,), lengths=(1024, 4096, 16_384, 65_536), positions=POSITIONS, layouts=("contiguous", *_WIDE)
    ),
    "overhead": dict(presets=("1b",), members=(8,), lengths=(8192, 16_384), layouts=("striped(256)",), rounds=3),
    "scale": dict(
        measured=(4096, 8192, 16_384, 32_768),
        presets=("1b", "3b", "7b", "llama3-8b"),
        members=(8, 64, 512, 4096),
        lengths=(262_144, 1_048_576, 4_194_304, 16_777_216),
        hardware=("h100", "v5p"),
        layouts=_WIDE,
        rounds=3,
    ),
    "peers": dict(lengths=(2048, 4096, 8192, 16_384), peers=PEERS, rounds=7),
    "gpu": _RINGS,
    "overlap": _RINGS,
    "step": dict(presets=("1b",), members=(8,), lengths=(65_536, 262_144), chunk=8192),
    "decode": dict(
        presets=("debug",),
        members=(1, 2, 4, 8),
        lengths=(4096, 16_384),
        batch=(1, 4),
        layouts=("striped(1)",),
        rounds=16,
        heads=("32:8",),
        chunk=8192,
        platform="cpu",
    ),
}
# What is other than that on a GPU.
ON_GPU: dict[str, dict[str, Any]] = {
    "tiles": dict(lengths=(65_536,), tiles=(256, 512, 1024, 2048), layouts=("striped(1)", "striped(1024)", "zigzag")),
    "masks": dict(
        lengths=(65_536,),
        masks=("causal", "window(8192)", "documents(1800)", "documents(8192)"),
        layouts=("striped(1)", "striped(1024)", "zigzag"),
    ),
    "decode": dict(presets=("llama3-8b",), members=(1,), lengths=(131_072,), batch=(8, 1), heads=("32:8", "16:16")),
}
_QUICK_RING: dict[str, Any] = dict(members=(8,), lengths=(65_536,), heads=("16:16",))
_FEW = ("striped(1)", "zigzag")
QUICK: dict[str, dict[str, Any]] = {
    "layouts": dict(members=(4,), lengths=(2048,), layouts=_FEW, rounds=3),
    "tiles": dict(
        members=(4,),
        lengths=(2048,),
        masks=("causal",),
        tiles=(32, 256),
        layouts=("striped(1)",),
        rounds=2,
        platform="cpu",
    ),
    "masks": dict(
        members=(4,),
        lengths=(2048,),
        masks=("causal", "window(512)", "documents(256)"),
        layouts=_FEW,
        rounds=2,
        platform="cpu",
    ),
    "positions": dict(members=(4,), lengths=(1024,), positions=POSITIONS, layouts=("striped(1)",)),
    "overhead": dict(presets=("debug",), members=(8,), lengths=(8192,), layouts=("striped(256)",), rounds=3),
    "scale": dict(
        measured=(2048,),
        presets=("1b", "llama3-8b"),
        members=(8, 512),
        lengths=(262_144, 1_048_576),
        hardware=("h100",),
        layouts=_FEW,
        rounds=2,
    ),
    "peers": dict(lengths=(2048,), peers=("plain-jax", "torch-sdpa"), rounds=3),
    "gpu": _QUICK_RING,
    "overlap": _QUICK_RING,
    "step": dict(presets=("debug",), members=(8,), lengths=(65_536,), chunk=8192),
    "decode": dict(
        presets=("debug",),
        members=(1, 2),
        lengths=(1024,),
        batch=(1,),
        layouts=("striped(1)",),
        rounds=8,
        heads=("32:8",),
        chunk=512,
        platform="cpu",
    ),
}
OPTIONS = tuple(dict.fromkeys(name for own in SUITES.values() for name in own))


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """Measure this machine; the result is one JSON document, and answers are checked first.

    On CPUs, two cores at least, and idle ones. layouts: contiguous, striped and zigzag, two real processes on the clock
    and larger rings by their critical path. tiles: sizes of the kernel's tiles. masks: windows, packed documents,
    prefixes. positions: how exact a permuted model is. overhead: what is not attention in a layer. scale: long
    texts and large models, measured as far as the machine goes, planned beyond. decode: a token with a text in the
    cache. peers: other libraries.

    On one NVIDIA GPU. gpu: attention as the members of a ring would run it; the program is the real one for that many
    GPUs, only the wire is missing. overlap: which transfers of these programs are hidden behind attention; nothing is
    run. step: whole training steps as the members of a ring would run them. masks and tiles, with --platform gpu: the
    kernel xla, which does what cudnn cannot. decode, with --platform gpu: reading prompts and writing on.
    """

    suite: tyro.conf.Positional[
        Literal[
            "layouts", "tiles", "masks", "positions", "overhead", "scale", "decode", "peers", "gpu", "overlap", "step"
        ]
    ]
    """What to measure."""
    members: Numbers = None
    """Sizes of the rings. Default: 2 4 8 16; 4 8 16 for layouts (besides the two on the clock), 8 for tiles, masks,
    overhead and step, 4 for positions, 1 2 4 8 for decode, up to 4096 for scale."""
    lengths: Numbers = None
    """Tokens of the whole text. Default: up to 16384 on CPUs, 65536 for positions, 16777216 for scale; on GPUs 65536
    262144 524288 786432 1048576, for step 65536 262144."""
    layouts: Texts = None
    """On CPUs: like striped(1) striped(256) zigzag; contiguous always is timed beside them.
    Default: for layouts stripes of 1 16 64 256 512, and zigzag; fewer for others."""
    tiles: Numbers = None
    """tiles: sides of the kernel's tiles. Default: 16 32 64 128 256 512 1024."""
    masks: Texts = None
    """masks and tiles: like causal, window(1024), prefix(2048), documents(256) with lengths that are log-normal around
    256, or documents(256, 0) all of 256. Default: some of each; for tiles causal."""
    platform: Annotated[Literal["cpu", "gpu"] | None, tyro.conf.arg(help_behavior_hint="")] = None
    """masks and tiles: what runs the kernel xla; decode: what runs the model. A GPU is given more heads, in bfloat16,
    and longer texts. Default: cpu."""
    batch: Numbers = None
    """decode: texts at a time. Default: 1 4; on a GPU 8 1."""
    positions: Texts = None
    """positions: how a model is told them. Default: rotary absolute alibi t5."""
    measured: Numbers = None
    """scale: tokens of the texts that are measured, on rings of 8. Default: 4096 8192 16384 32768."""
    hardware: Texts = None
    """scale: what is planned for, as in `striped plan`. Default: h100 v5p."""
    rounds: Whole = None
    """Runs of everything, of which medians are taken. Default: 3; for peers 7."""
    peers: Texts = None
    """peers: whom to compare with. Default: ringattention plain-jax ring-attention-pytorch torch-sdpa."""
    heads: Texts = None
    """gpu, overlap, decode: query heads : key heads, of 128 each. Default: 16:16 32:8."""
    presets: Presets = None
    """step, overhead, scale and decode: shapes of the model, as in `striped train`. Default: 1b; for scale all but
    debug; for decode debug, on a GPU llama3-8b."""
    chunk: Whole = None
    """step: tokens that the feed-forward layers and the loss take at a time; decode: of a prompt, that are read at a
    time. Default: 8192, for GPUs like large matrices."""
    output: Path = None
    """Where the JSON goes. Default: a file named after the suite."""
    quick: bool = False
    """Other defaults: something small, in about a minute."""

    @property
    def options(self) -> dict[str, Any]:
        """What to measure, by name: what was given, else the suite's own; with --quick something small of that."""
        own = (QUICK if self.quick else SUITES)[self.suite]
        if self.platform == "gpu" and not self.quick:
            own = own | ON_GPU.get(self.suite, {})
        return {name: default if (given := getattr(self, name)) is None else given for name, default in own.items()}

    def __post_init__(self) -> None:
        for name in OPTIONS:
            given = getattr(self, name)
            if given is not None and name not in SUITES[self.suite]:
                *others, last = (suite for suite, own in SUITES.items() if name in own)
                suites = f"{', '.join(others)} and {last}" if others else last
                raise UsageError(f"--{name} is an option of {suites}, not of {self.suite}. Leave it out.")
            if given == ():
                raise UsageError(f"--{name} needs at least one value.")
        _check_sizes(self.options, least=1 if self.suite == "decode" else 2)
        _check_names(self.options)


def _check_sizes(options: dict[str, Any], least: int) -> None:
    for members in options.get("members", ()):
        if members < least or any(length < 1 or length % (2 * members) for length in options["lengths"]):
            raise UsageError(
                f"--members must be at least {least} and --lengths multiples of twice that; got {members} members and "
                f"lengths {', '.join(map(str, options['lengths']))}."
            )
    for name in ("chunk", "rounds", "tiles", "batch"):
        given = options.get(name, ())
        for size in given if isinstance(given, tuple) else (given,):
            if size < 1:
                raise UsageError(f"--{name} must be at least 1; got {size}.")
    for length in options.get("measured", ()):
        if length < 1 or length % 16:
            raise UsageError(f"--measured must be multiples of 16; got {length}.")


def _check_names(options: dict[str, Any]) -> None:
    for heads in options.get("heads", ()):
        found = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", heads)
        if found is None or int(found[1]) % int(found[2]):
            raise UsageError(
                f"--heads must be written like 32:8, query heads : key heads, the first a multiple of the second; "
                f"got {heads!r}."
            )
    for name, known in (("peers", PEERS), ("positions", POSITIONS), ("hardware", tuple(HARDWARE))):
        for given in options.get(name, ()):
            if given not in known:
                raise UsageError(f"--{name} must be some of {', '.join(known)}; got {given!r}.")
    parse_layouts(options.get("layouts", ()))


def parse_layouts(texts: Sequence[str]) -> list[Layout]:
    """The layouts that --layouts names."""
    try:
        return [parse_layout(text) for text in texts]
    except ValueError as error:
        raise UsageError(f"--layouts: {error}") from error

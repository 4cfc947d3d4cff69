"""The command `striped bench`: its options. What each suite measures by default is in suites.toml."""

import dataclasses
import importlib.resources
import re
import tomllib
from collections.abc import Callable
from typing import Annotated, Any, Literal

import tyro

from striped_attention.errors import UsageError
from striped_attention.options import Numbers, Path, Texts, Whole, parse_layouts, parse_mask
from striped_attention.runtime.hardware import HARDWARE
from striped_attention.strategies.strategy import AUTO, parse_strategy

Preset = Literal["1b", "3b", "7b", "llama3-8b", "debug"]
Presets = Annotated[
    tuple[Preset, ...] | None, tyro.conf.arg(metavar="{1b,3b,7b,llama3-8b,debug} ...", help_behavior_hint="")
]
# The module of each suite, and in there a function with the suite's name.
MODULES = dict.fromkeys(("layouts", "tiles", "masks", "scale"), "rings") | {"overlap": "gpu"}
SUITES = tomllib.loads((importlib.resources.files("striped_bench.bench") / "suites.toml").read_text())


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """Measure this machine; the result is one JSON document, and answers are checked first.

    On CPUs, two cores at least, and idle ones. layouts: contiguous, striped and zigzag, two real processes on the clock
    and larger rings by their critical path. tiles: sizes of the kernel's tiles. masks: windows, packed documents,
    prefixes. overhead: what is not attention in a layer. scale: long sequences and large models, measured as far as
    the machine goes, planned beyond. decode: a token with a sequence in the cache. peers: other libraries.

    On one NVIDIA GPU. gpu: attention as the members of a ring would run it, by strategy, mask, kernel and layout; the
    program is the real one for that many GPUs, only the interconnect is missing, and what transfers would take is
    planned beside it. overlap: which transfers of these programs are hidden behind attention; nothing is run. step:
    whole training steps as the members of a ring would run them. masks and tiles, with --platform gpu: the kernel xla,
    which does what cudnn cannot. decode, with --platform gpu: prefill and decoding. trainers: `striped train` against a
    plain PyTorch trainer; needs torch.
    """

    suite: tyro.conf.Positional[
        Literal[
            "layouts", "tiles", "masks", "overhead", "scale", "decode", "peers", "gpu", "overlap", "step", "trainers"
        ]
    ]
    """What to measure."""
    members: Numbers = None
    """Sizes of the rings. Default: 2 4 8 16; 4 8 16 for layouts (besides the two on the clock), 8 for tiles, masks,
    overhead and step, 1 2 4 8 for decode, up to 4096 for scale."""
    lengths: Numbers = None
    """Tokens of the whole sequence. Default: up to 16384 on CPUs, 16777216 for scale; on GPUs 65536 262144 524288
    786432 1048576, for step 65536 262144, for trainers 32768."""
    layouts: Texts = None
    """Like striped(1) striped(256) zigzag; on CPUs contiguous always is timed beside them. Default: for layouts stripes
    of 1 16 64 256 512, and zigzag; fewer for others; for gpu contiguous striped(1) zigzag; for step contiguous striped,
    whose stripes are then as wide as training makes them."""
    tiles: Numbers = None
    """tiles: sides of the kernel's tiles. Default: 16 32 64 128 256 512 1024."""
    masks: Texts = None
    """masks, tiles and gpu: like causal, window(1024), prefix(2048), documents(256) with lengths that are log-normal
    around 256, or documents(256, 0) all of 256. Default: some of each; for tiles and gpu causal."""
    strategies: Texts = None
    """gpu and step: how queries and keys of different GPUs meet, as in `striped train`: ring, heads, gather, sizes of
    groups like heads=2 or heads=2,gather=2, or auto. Default: ring."""
    kernels: Texts = None
    """gpu and step: attention kernels, of cudnn, hopper and xla. What a kernel cannot do is left out of gpu, and says
    why. Default: cudnn."""
    text: Annotated[Literal["documents", "whole"] | None, tyro.conf.arg(help_behavior_hint="")] = None
    """step and trainers: whether sequences are packed with documents, of about 1800 tokens, or each is one text; cudnn
    knows no documents, --kernels hopper does. Default: whole."""
    platform: Annotated[Literal["cpu", "gpu"] | None, tyro.conf.arg(help_behavior_hint="")] = None
    """masks and tiles: what runs the kernel xla; decode: what runs the model. A GPU is given more heads, in bfloat16,
    and longer sequences. Default: cpu."""
    batch: Numbers = None
    """decode: sequences at a time. Default: 1 4; on a GPU 8 1."""
    measured: Numbers = None
    """scale: tokens of the sequences that are measured, on rings of 8. Default: 4096 8192 16384 32768."""
    hardware: Texts = None
    """scale: what is planned for, as in `striped plan`. Default: h100 v5p."""
    rounds: Whole = None
    """Runs of everything, of which medians are taken. Default: 3; for peers 7, for
    trainers 10."""
    peers: Texts = None
    """peers: whom to compare with. Default: ringattention plain-jax ring-attention-pytorch torch-sdpa."""
    heads: Texts = None
    """gpu, overlap, decode: query heads : key heads, of 128 each. Default: 16:16 32:8."""
    presets: Presets = None
    """step, trainers, overhead, scale, decode: shapes of the model, as in `striped train`. Default: 1b; for scale all
    but debug; for decode debug, on a GPU llama3-8b."""
    chunk: Whole = None
    """step: tokens that the feed-forward layers and the loss take at a time; decode: of a prompt, in a prefill step.
    Default: for step as training chooses by the GPU's memory, for decode 8192."""
    output: Path = None
    """Where the JSON goes. Default: a file named after the suite."""
    quick: bool = False
    """Other defaults: something small, in about a minute."""

    @property
    def options(self) -> dict[str, Any]:
        """What to measure, by name: what was given, else the suite's own; with --quick something small of that."""
        suite = SUITES[self.suite]
        others = suite.get("quick" if self.quick else "gpu" if self.platform == "gpu" else "", {})
        defaults = {name: others.get(name, own) for name, own in suite.items() if not isinstance(own, dict)}
        asked = {
            name: default if (given := getattr(self, name)) is None else given for name, default in defaults.items()
        }
        return {name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()}

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, given = field.name, getattr(self, field.name)
            if given == ():
                raise UsageError(f"--{name} needs at least one value.")
            if given is not None and name not in ("suite", "output", "quick", *SUITES[self.suite]):
                *others, last = (suite for suite, own in SUITES.items() if name in own)
                suites = f"{', '.join(others)} and {last}" if others else last
                raise UsageError(f"--{name} is an option of {suites}, not of {self.suite}. Leave it out.")
        _check(self.options, least=1 if self.suite == "decode" else 2)


def _check(options: dict[str, Any], least: int) -> None:
    """Raise if a value breaks its option's rule."""
    some = {"peers": SUITES["peers"]["peers"], "hardware": tuple(HARDWARE), "kernels": ("cudnn", "hopper", "xla")}
    heads = "written like 32:8, query heads : key heads, the first a multiple of the second"
    rules: dict[str, tuple[Callable[[Any], Any], str]] = {
        **dict.fromkeys(("rounds", "tiles", "batch"), (lambda size: size >= 1, "at least 1")),
        "chunk": (lambda size: size == "auto" or size >= 1, "at least 1"),
        "measured": (lambda length: length >= 1 and length % 16 == 0, "multiples of 16"),
        "heads": (
            lambda text: (n := re.fullmatch(r"([1-9]\d*):([1-9]\d*)", text)) and int(n[1]) % int(n[2]) == 0,
            heads,
        ),
        **{name: (known.__contains__, f"some of {', '.join(known)}") for name, known in some.items()},
    }
    for name, (fine, rule) in rules.items():
        given = options.get(name, ())
        for value in given if isinstance(given, tuple) else (given,):
            if not fine(value):
                raise UsageError(f"--{name} must be {rule}; got {value}.")
    for members in options.get("members", ()):
        if members < least or any(length < 1 or length % (2 * members) for length in options["lengths"]):
            rule = f"--members must be at least {least} and --lengths multiples of twice that"
            lengths = ", ".join(map(str, options["lengths"]))
            raise UsageError(f"{rule}; got {members} members and lengths {lengths}.")
    parse_layouts(options.get("layouts", ()))
    for text in options.get("masks", ()):
        parse_mask(text, length=1)
    for text in options.get("strategies", ()):
        try:
            text == AUTO or parse_strategy(text)
        except ValueError as error:
            raise UsageError(f"--strategies: {error}") from error


def run(config: BenchConfig) -> None:
    """Run a suite, and import what it needs only now."""
    from striped_bench.bench.run import run

    run(config)

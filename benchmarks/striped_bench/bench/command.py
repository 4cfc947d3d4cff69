"""Options of `striped bench`. The defaults of each suite are in suites.toml."""

import dataclasses
import importlib.resources
import inspect
import re
import tomllib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import tyro

from striped_attention.cli.help import docstrings
from striped_attention.errors import UsageError
from striped_attention.options import Lengths, Numbers, Path, Texts, Whole, parse_layouts, parse_mask
from striped_attention.runtime.hardware import HARDWARE
from striped_attention.strategies.strategy import AUTO, parse_strategy

Preset = Literal["1b", "3b", "7b", "llama3-8b", "debug"]
Presets = Annotated[
    tuple[Preset, ...] | None, tyro.conf.arg(metavar="{1b,3b,7b,llama3-8b,debug} ...", help_behavior_hint="")
]
# Modules of the suites that do not have one of their own. Each suite is a function with the suite's name.
MODULES = dict.fromkeys(("layouts", "tiles", "masks", "scale"), "rings") | {"overlap": "gpu"}
SUITES = tomllib.loads((importlib.resources.files("striped_bench.bench") / "suites.toml").read_text())


ABOUT = {
    "layouts": "contiguous, striped and zigzag, on CPUs: wall-clock time of two processes, critical paths of more.",
    "tiles": "Tile sizes of the kernel xla, on CPUs or (--platform gpu) on one NVIDIA GPU.",
    "masks": "Windows, packed documents and prefixes, kernel xla, on CPUs or (--platform gpu) on one NVIDIA GPU.",
    "overhead": "The parts of a layer other than attention, on CPUs.",
    "scale": "Long sequences and large models: measured as far as the CPUs go, and planned beyond.",
    "decode": "Time per token with a filled cache, on CPUs or, with prefill, on one NVIDIA GPU (--platform gpu).",
    "peers": "Other libraries, on CPUs.",
    "gpu": "Attention on one NVIDIA GPU, as each device of a ring would run it, by strategy, mask, kernel and layout. "
    "The program is the real one for that many GPUs; only the interconnect is missing, and planned transfer times are "
    "reported with the measurements.",
    "overlap": "Which transfers of these programs overlap with attention. Compiles, and runs nothing.",
    "step": "Whole training steps on one NVIDIA GPU, as the devices of a ring would run them.",
    "trainers": "striped train against a plain PyTorch trainer on one NVIDIA GPU. Needs torch.",
}


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """Benchmark this machine. Results are checked before they are timed, and written to one JSON document.

    striped bench SUITE --help lists the options and defaults of a suite. Suites on CPUs need at least two idle cores.
    """

    suite: tyro.conf.Positional[
        Literal[
            "layouts", "tiles", "masks", "overhead", "scale", "decode", "peers", "gpu", "overlap", "step", "trainers"
        ]
    ]
    """The suite to run."""
    members: Annotated[Numbers, tyro.conf.arg(aliases=("--devices",))] = None
    """Devices that share a sequence."""
    lengths: Lengths = None
    """Sequence lengths in tokens."""
    layouts: Texts = None
    """Layouts, e.g. striped(1) striped(256) zigzag. On CPUs contiguous is always timed as well; step chooses the width
    of stripes that training would."""
    tiles: Numbers = None
    """Side lengths of the kernel's square tiles."""
    masks: Texts = None
    """Masks, e.g. causal, window(1024), prefix(2048), documents(256) (log-normal document lengths with median 256) or
    documents(256, 0) (all documents of 256 tokens)."""
    strategies: Texts = None
    """Strategies, as in `striped train`: ring, heads, gather, group sizes such as heads=2 or heads=2,gather=2, or
    auto."""
    kernels: Texts = None
    """Attention kernels, any of cudnn, hopper and xla. gpu skips what a kernel cannot do and reports why."""
    text: Annotated[
        Literal["documents", "whole"] | None, tyro.conf.arg(metavar="{documents,whole}", help_behavior_hint="")
    ] = None
    """documents: sequences are packed with documents of about 1800 tokens. whole: a sequence is one document. The
    kernel cudnn does not support packed documents; --kernels hopper does."""
    platform: Annotated[Literal["cpu", "gpu"] | None, tyro.conf.arg(metavar="{cpu,gpu}", help_behavior_hint="")] = None
    """Where to run. On a GPU the defaults are more heads, bfloat16 and longer sequences."""
    batch: Numbers = None
    """Batch sizes."""
    measured: Numbers = None
    """Sequence lengths that are measured, on rings of 8 devices; --lengths are planned."""
    hardware: Texts = None
    """Hardware to plan for, as in `striped plan`."""
    rounds: Whole = None
    """How often each measurement is repeated; the median is reported."""
    peers: Texts = None
    """Libraries to compare with."""
    heads: Texts = None
    """Query heads : key heads, with head dimension 128."""
    presets: Presets = None
    """Model presets, as in `striped train`."""
    chunk: Whole = None
    """Tokens per chunk: in step those of the feed-forward layers and the loss, in decode those of a prefill step. auto:
    what training chooses for the GPU's memory."""
    output: Path = None
    """Path of the JSON result. Default: a file named after the suite."""
    quick: bool = False
    """Use small defaults that run in about a minute."""

    @property
    def options(self) -> dict[str, Any]:
        """Options by name: the given value, or else the suite's default, which depends on --quick and --platform."""
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
                flag = "devices" if name == "members" else name
                raise UsageError(f"--{flag} is an option of {suites}, not of {self.suite}. Leave it out.")
        _check(self.options, least=1 if self.suite == "decode" else 2)


_suites = "\n".join(f"- {name}: {text}" for name, text in ABOUT.items())
BenchConfig.__doc__ = f"{inspect.cleandoc(str(BenchConfig.__doc__))}\n\n{_suites}"


def narrowed(arguments: Sequence[str]) -> type[Any] | None:
    """Return the options of one suite, with its defaults, if `arguments` ask for their help."""
    suite = next((argument for argument in arguments if argument in SUITES), None)
    if suite is None or not {"-h", "--help"} & set(arguments):
        return None
    own, found = SUITES[suite], []
    for field in dataclasses.fields(BenchConfig):
        hint, text = BenchConfig.__annotations__[field.name], docstrings(BenchConfig)[field.name]
        default = own.get(field.name, {})
        if not isinstance(default, dict):  # those are the defaults of --quick and of --platform gpu
            words = " ".join(map(str, default)) if isinstance(default, list) else default
            hint = Annotated[hint, tyro.conf.arg(help=f"{text} Default: {words}.")]
        elif field.name not in ("output", "quick"):
            continue
        found.append((field.name, hint, field))
    return dataclasses.make_dataclass(suite, found, namespace={"__doc__": ABOUT[suite]}, frozen=True)


def _check(options: dict[str, Any], least: int) -> None:
    """Raise if an option has an invalid value."""
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
        **{name: (known.__contains__, f"one of {', '.join(known)}") for name, known in some.items()},
    }
    for name, (fine, rule) in rules.items():
        given = options.get(name, ())
        for value in given if isinstance(given, tuple) else (given,):
            if not fine(value):
                raise UsageError(f"--{name} must be {rule}; got {value}.")
    for members in options.get("members", ()):
        if members < least or any(length < 1 or length % (2 * members) for length in options["lengths"]):
            rule = f"--devices must be at least {least} and --lengths multiples of twice that"
            lengths = ", ".join(map(str, options["lengths"]))
            raise UsageError(f"{rule}; got {members} devices and lengths {lengths}.")
    parse_layouts(options.get("layouts", ()))
    for text in options.get("masks", ()):
        parse_mask(text, length=1)
    for text in options.get("strategies", ()):
        try:
            text == AUTO or parse_strategy(text)
        except ValueError as error:
            raise UsageError(f"--strategies: {error}") from error


def run(config: BenchConfig) -> None:
    """Run a suite. Its dependencies are imported only here."""
    from striped_bench.bench.run import run

    run(config)

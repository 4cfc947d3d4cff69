"""Options of `striped bench`. The defaults of each suite are in suites.toml."""

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
# Modules of the suites that do not have one of their own. Each suite is a function with the suite's name.
MODULES = dict.fromkeys(("layouts", "tiles", "masks", "scale"), "rings") | {"overlap": "gpu"}
SUITES = tomllib.loads((importlib.resources.files("striped_bench.bench") / "suites.toml").read_text())


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """Benchmark this machine. Results are checked before they are timed, and written to one JSON document.

    Suites for CPUs (at least two idle cores). layouts: contiguous, striped and zigzag, as wall-clock time of two
    processes and as the critical path of larger rings. tiles: tile sizes of the kernel. masks: windows, packed
    documents, prefixes. overhead: the parts of a layer other than attention. scale: long sequences and large models,
    measured as far as the machine goes and planned beyond. decode: time per token with a filled cache. peers: other
    libraries.

    Suites for one NVIDIA GPU. gpu: attention as the devices of a ring would run it, by strategy, mask, kernel and
    layout; the program is the real one for that many GPUs, only the interconnect is missing, and planned transfer times
    are reported with it. overlap: which transfers of these programs overlap with attention; nothing is run. step: whole
    training steps as the devices of a ring would run them. masks and tiles with --platform gpu: the kernel xla, which
    covers what cudnn cannot do. decode with --platform gpu: prefill and decoding. trainers: `striped train` against a
    plain PyTorch trainer; needs torch.
    """

    suite: tyro.conf.Positional[
        Literal[
            "layouts", "tiles", "masks", "overhead", "scale", "decode", "peers", "gpu", "overlap", "step", "trainers"
        ]
    ]
    """The suite to run."""
    members: Numbers = None
    """Devices per ring. Default: 2 4 8 16; 4 8 16 for layouts (besides the wall-clock runs on 2), 8 for tiles, masks,
    overhead and step, 1 2 4 8 for decode, up to 4096 for scale."""
    lengths: Numbers = None
    """Sequence lengths in tokens. Default: up to 16384 on CPUs, up to 16777216 for scale; on GPUs 65536 262144 524288
    786432 1048576, for step 65536 262144, for trainers 32768."""
    layouts: Texts = None
    """E.g. striped(1) striped(256) zigzag; on CPUs contiguous is always timed as well. Default: for layouts, stripes of
    1 16 64 256 512, and zigzag; fewer for the other suites; for gpu contiguous striped(1) zigzag; for step contiguous
    striped, with the stripe width that training chooses."""
    tiles: Numbers = None
    """tiles: side lengths of the kernel's square tiles. Default: 16 32 64 128 256 512 1024."""
    masks: Texts = None
    """masks, tiles and gpu: e.g. causal, window(1024), prefix(2048), documents(256) (log-normal document lengths with
    median 256) or documents(256, 0) (all documents of 256 tokens). Default: some of each; for tiles and gpu causal."""
    strategies: Texts = None
    """gpu and step: the sequence-parallel strategy, as in `striped train`: ring, heads, gather, group sizes such as
    heads=2 or heads=2,gather=2, or auto. Default: ring."""
    kernels: Texts = None
    """gpu and step: attention kernels, any of cudnn, hopper and xla. gpu skips what a kernel cannot do and reports why.
    Default: cudnn."""
    text: Annotated[Literal["documents", "whole"] | None, tyro.conf.arg(help_behavior_hint="")] = None
    """step and trainers: `documents` packs sequences with documents of about 1800 tokens; with `whole` a sequence is
    one document. The kernel cudnn does not support packed documents; --kernels hopper does. Default: whole."""
    platform: Annotated[Literal["cpu", "gpu"] | None, tyro.conf.arg(help_behavior_hint="")] = None
    """masks and tiles: where the kernel xla runs; decode: where the model runs. On a GPU the defaults are more heads,
    bfloat16 and longer sequences. Default: cpu."""
    batch: Numbers = None
    """decode: batch sizes. Default: 1 4; on a GPU 8 1."""
    measured: Numbers = None
    """scale: sequence lengths that are measured, on rings of 8 devices. Default: 4096 8192 16384 32768."""
    hardware: Texts = None
    """scale: hardware to plan for, as in `striped plan`. Default: h100 v5p."""
    rounds: Whole = None
    """How often each measurement is repeated; the median is reported. Default: 3; for peers 7, for
    trainers 10."""
    peers: Texts = None
    """peers: libraries to compare with. Default: ringattention plain-jax ring-attention-pytorch torch-sdpa."""
    heads: Texts = None
    """gpu, overlap, decode: query heads : key heads, with head dimension 128. Default: 16:16 32:8."""
    presets: Presets = None
    """step, trainers, overhead, scale, decode: model presets, as in `striped train`. Default: 1b; for scale all but
    debug; for decode debug, on a GPU llama3-8b."""
    chunk: Whole = None
    """step: tokens per chunk in the feed-forward layers and the loss; decode: prompt tokens per prefill step.
    Default: for step what training chooses for the GPU's memory, for decode 8192."""
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
                raise UsageError(f"--{name} is an option of {suites}, not of {self.suite}. Leave it out.")
        _check(self.options, least=1 if self.suite == "decode" else 2)


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
    """Run a suite. Its dependencies are imported only here."""
    from striped_bench.bench.run import run

    run(config)

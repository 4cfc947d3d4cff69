"""Options: types and checks that several commands share."""

import math
import pathlib
import re
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from striped_attention.core.layout import DEFAULT, Layout, has_stripes, parse_layout
from striped_attention.core.mask import Mask, causal, full, packed, prefix, sliding_window
from striped_attention.errors import UsageError
from striped_attention.kernels.choice import check_name
from striped_attention.strategies.strategy import AUTO, Strategy, parse_strategy

# Options that may be left out; the help text says what happens then.
Whole = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
Text = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
Path = Annotated[pathlib.Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
Numbers = Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT ...", help_behavior_hint="")]
Texts = Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="TEXT ...", help_behavior_hint="")]
Strings = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
Count = Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="[N]", help_behavior_hint="")]  # --option or --option N


def _length_from_text(kind: type) -> Any:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="TOKENS",
        instance_from_str=lambda texts: parse_length(texts[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


# The option --length of a field `sequence_length`; --sequence-length works as well.
Length = Annotated[int, _length_from_text(int), tyro.conf.arg(aliases=("--length",))]
LengthOrNone = Annotated[
    int | None, _length_from_text(int), tyro.conf.arg(aliases=("--length",), help_behavior_hint="")
]


def _lengths_from_texts(texts: list[str]) -> tuple[int, ...]:
    return tuple(parse_length(text, "--lengths") for text in texts)


Lengths = Annotated[
    tuple[int, ...] | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="TOKENS ...",
        instance_from_str=_lengths_from_texts,
        is_instance=lambda value: value is None or isinstance(value, tuple),
        str_from_instance=lambda value: list(map(str, value or ())),
    ),
    tyro.conf.arg(help_behavior_hint=""),
]

Paths = Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="PATH ...", help_behavior_hint="")]
Sources = Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="PATH[=WEIGHT] ...", help_behavior_hint="")]

# Options of one start of a run, which are not taken from its run.json.
PROCESSES = ("local_processes", "coordinator", "num_processes", "process_id")
OF_A_START = ("checkpoint_dir", "resume", "dry_run", "hardware", "profile", *PROCESSES)

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def parse_length(text: str, flag: str = "--length") -> int:
    """The tokens that --length asks for."""
    plain = re.sub(r"(?<=\d)[_,](?=\d{3}(?!\d))", "", text.lower())
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([kmg]?)", plain)
    tokens = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if tokens < 1 or tokens != int(tokens):
        raise UsageError(f"{flag} must be a number of tokens, like 786432, 256k or 1M; got {text!r}.")
    return int(tokens)


def parse_layouts(texts: Sequence[str]) -> list[Layout]:
    """The layouts that --layouts names."""
    try:
        return [parse_layout(text) for text in texts]
    except ValueError as error:
        raise UsageError(f"--layouts: {error}") from error


def parse_mask(text: str, length: int) -> Mask:
    """A mask for a sequence of so many tokens from its name and numbers, as --masks takes it.

        causal    full    window(1024)    prefix(2048)    documents(256)    documents(256, 0)

    The numbers of documents are the median of their lengths, log-normal, and the spread (1.2 where it is left out):
    with 0 all are equally long.
    """
    form = r"(causal|full)|(window|prefix)\((\d+)\)|documents\((\d+)(?:, ?(\d+(?:\.\d+)?))?\)"
    found = re.fullmatch(form, text.strip())
    if found is None:
        raise UsageError(
            f"--masks are written like causal, window(1024), prefix(2048), documents(256) or documents(256, 0); "
            f"got {text!r}."
        )
    plain, bounded, size, median, spread = found.groups()
    try:
        if plain:
            return causal() if plain == "causal" else full()
        if bounded:
            return (sliding_window if bounded == "window" else prefix)(int(size))
        return packed(length, int(median), 1.2 if spread is None else float(spread))
    except ValueError as error:
        raise UsageError(f"--masks {text}: {error}") from error


def parse_asked(text: str) -> str | Strategy:
    """What --strategy asks for, auto included."""
    try:
        return text if text == AUTO else parse_strategy(text)
    except ValueError as error:
        raise UsageError(f"--strategy: {error}") from error


def check_shared(config: Any) -> None:
    """Raise if options that `striped train` and `striped generate` have in common make no sense."""
    counts = ("stripe", "cpu_devices", "local_processes", "num_processes")
    check_at_least(config, {"seed": 0} | dict.fromkeys(counts, 1))
    if config.seed >= 2**32:
        raise UsageError(f"--seed must be less than {2**32}; got {config.seed}.")
    try:
        check_name(config.kernel)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    parse_asked(config.strategy)
    if config.stripe is not None and not has_stripes(config.layout) and config.layout != AUTO:
        raise UsageError(f"--stripe is for --layout {DEFAULT}; got --layout {config.layout}. Leave one of them out.")
    cluster = (config.coordinator, config.num_processes, config.process_id)
    if any(x is not None for x in cluster) and None in cluster:
        raise UsageError("--coordinator, --num-processes and --process-id go together: give all three or none.")
    if config.local_processes is not None and config.coordinator is not None:
        raise UsageError("--local-processes starts a cluster of its own: leave out --coordinator and the like.")


def check_at_least(config: Any, least: dict[str, int]) -> None:
    """Raise if one of these options is given and smaller, or no finite number."""
    for name, smallest in least.items():
        value = getattr(config, name)
        if value is not None and not (value >= smallest and math.isfinite(value)):
            raise UsageError(f"--{name.replace('_', '-')} must be at least {smallest}; got {value}.")


def check_output(path: pathlib.Path | None) -> None:
    """Raise if --output is given and cannot be a file."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.absolute().parent}.")
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder. Give a file.")

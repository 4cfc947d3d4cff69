"""The suite `masks`: causal, windows, packed documents and prefixes. How well is each balanced, and what does it take?

A mask is written as a name with numbers in brackets:

    causal    window(1024)    prefix(2048)    documents(256)    documents(256, 0)

The numbers of documents are the median of their lengths, log-normal, and the spread (1.2 where it is left out): with 0
all are equally long.
"""

import functools
import itertools
import re
from typing import Any

import rich.table

from striped_attention.bench import blocks, problem
from striped_attention.bench.config import BenchConfig
from striped_attention.bench.layouts import with_contiguous
from striped_attention.bench.run import document, path, say, write
from striped_attention.mask import Mask, causal, full, packed, prefix, sliding_window
from striped_attention.training.errors import UsageError

_FORM = r"(causal|full)|(window|prefix)\((\d+)\)|documents\((\d+)(?:, ?(\d+(?:\.\d+)?))?\)"


def run(config: BenchConfig) -> None:
    """Check, measure, print a table and write the JSON, after every mask."""
    options = config.options
    cases = list(itertools.product(options["masks"], options["members"], options["lengths"]))
    made = parse_masks(config)
    checks: list[dict[str, Any]] = []
    shape = problem.SHAPES[options["platform"]]
    result = document(config, {**options, **shape.configuration()})
    result |= {"how": blocks.HOW, "checks": checks, "rows": []}
    with blocks.core(options["platform"]) as team:
        result["hardware"] |= blocks.hardware(team)
        for text, devices, length in cases:
            say(f"{text}, {devices} devices, {length:,} tokens")
            case = functools.partial(blocks.Case, mask=made[text, length], devices=devices, length=length, shape=shape)
            rings = [case(layout) for layout in with_contiguous(config)]
            paths = blocks.measure(team, rings, options["rounds"], checks)
            result["rows"] += [row(options["platform"], text, found, paths[0]) for found in paths]
            write(result, config)
    say(table(result["rows"]))
    say(str(path(config)))


def parse_masks(config: BenchConfig) -> dict[tuple[str, int], Mask]:
    """The masks that --masks names, for texts of every length."""
    texts, lengths = config.options["masks"], config.options["lengths"]
    return {(text, length): parse_mask(text, length) for text, length in itertools.product(texts, lengths)}


def parse_mask(text: str, length: int) -> Mask:
    """A mask from its name, for a text of so many tokens."""
    found = re.fullmatch(_FORM, text.strip())
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


def row(platform: str, mask: str, found: blocks.Path, base: blocks.Path) -> dict[str, Any]:
    """`imbalance` is the critical path over what the mean device computes: 1 if all steps are shared equally."""
    case = found.case
    return {
        **{"platform": platform, "mask": mask, "layout": repr(case.layout)},
        **{"devices": case.devices, "length": case.length},
        **{"forward": found.forward, "both": found.both},
        "imbalance": found.both * case.devices / float(found.both_blocks.sum()),
        **{"over_contiguous": base.both / found.both, "bound": blocks.bound(case)},
    }


def table(rows: list[dict[str, Any]]) -> rich.table.Table:
    shown = rich.table.Table(
        *("mask", "devices", "tokens", "layout", "critical path s", "busiest / mean", "× contiguous", "bound")
    )
    for row in rows:
        shown.add_row(
            *(row["mask"], str(row["devices"]), f"{row['length']:,}", row["layout"], f"{row['both']:.3f}"),
            *(f"{row['imbalance']:.2f}", f"{row['over_contiguous']:.2f}", f"{row['bound']:.2f}"),
        )
    return shown

"""Rope: parse --rope-scaling, and compute the longest sequence that the rotary positions support.

    linear:4                          divide every frequency by 4
    llama3:8                          Llama 3.1: divide low frequencies by 8, keep high ones, ramp between
    yarn:8                            YaRN: the same with another ramp, and slightly larger attention scores
    yarn:factor=8,original=8192       long form, with the original training length
    none                              no scaling

Further settings: low and high for llama3 (default 1 and 4); beta_slow and beta_fast (1 and 32) and attention_factor for
yarn.
"""

import dataclasses
import math
from typing import Any

from striped_attention.errors import UsageError
from striped_attention.models.config import ModelConfig
from striped_attention.models.rotary import RopeScaling
from striped_attention.options import parse_length

NONE = "none"
# Settings of each kind besides factor and original, and the fields of `RopeScaling` that they set.
NAMES: dict[str, dict[str, str]] = {
    "linear": {},
    "llama3": {"low": "slow", "high": "fast"},
    "yarn": {"beta_slow": "slow", "beta_fast": "fast", "attention_factor": "amplitude"},
}
DEFAULTS: dict[str, dict[str, float]] = {
    "linear": {},
    "llama3": {"slow": 1.0, "fast": 4.0},
    "yarn": {"slow": 1.0, "fast": 32.0},
}
FORM = "--rope-scaling is written like linear:4, yarn:8, llama3:8,original=8192 or none"


def parse_scaling(text: str) -> dict[str, Any] | None:
    """Parse --rope-scaling into the fields of a `RopeScaling`; None removes any scaling."""
    if text == NONE:
        return None
    kind, _, rest = text.partition(":")
    if kind not in NAMES or not rest:
        raise UsageError(f"{FORM}; got {text!r}.")
    said = _named(kind, rest, text)
    if "factor" not in said:
        raise UsageError(f"--rope-scaling {text} must include a factor, like {kind}:4.")
    original = _length(said.pop("original"), text) if "original" in said else None
    numbers = {name: _number(name, value, text) for name, value in said.items()}
    factor = numbers.pop("factor")
    if factor < 1:
        raise UsageError(f"--rope-scaling {text}: the factor must be at least 1; got {factor:g}.")
    fields = DEFAULTS[kind] | {NAMES[kind][name]: value for name, value in numbers.items()}
    if fields and not fields["slow"] < fields["fast"]:
        slow, fast = list(NAMES[kind])[:2]
        raise UsageError(
            f"--rope-scaling {text}: {slow} must be less than {fast}; got {fields['slow']:g} and {fields['fast']:g}."
        )
    return {"kind": kind, "factor": factor, "original_length": original, **fields}


def _named(kind: str, rest: str, text: str) -> dict[str, str]:
    """Parse the settings of a scaling by name; a first value without a name is the factor."""
    said: dict[str, str] = {}
    known = ("factor", "original", *NAMES[kind])
    for i, part in enumerate(rest.split(",")):
        name, equals, value = part.strip().partition("=")
        if not equals and i == 0:
            name, value = "factor", name
        if name not in known or name in said or not value:
            raise UsageError(
                f"--rope-scaling {text}: {kind} takes {', '.join(known)}, each once; got {part.strip()!r}."
            )
        said[name] = value
    return said


def _number(name: str, value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise UsageError(f"--rope-scaling {text}: {name} must be a number above 0; got {value!r}.")
    return number


def _length(value: str, text: str) -> int:
    try:
        return parse_length(value)
    except UsageError as error:
        raise UsageError(f"--rope-scaling {text}: original must be a length like 8192 or 8k; got {value!r}.") from error


def scaled(model: ModelConfig, text: str, original: int | None) -> ModelConfig:
    """Return a model with the scaling given by `text`. `original` is its length before any scaling, if known."""
    asked = parse_scaling(text)
    if asked is None:
        return dataclasses.replace(model, rope_scaling=None)
    if model.fused:
        raise UsageError(
            f"--rope-scaling {text}: Phi model files support only their own scaling (longrope), so the trained model "
            f"could not be exported. Leave it out."
        )
    asked["original_length"] = asked["original_length"] or original
    if asked["original_length"] is None and asked["kind"] != "linear":
        raise UsageError(
            f"--rope-scaling {text} needs the sequence length that the model was trained on before any scaling, which "
            f"is not known here. Add it, like {text},original=8192."
        )
    return dataclasses.replace(model, rope_scaling=RopeScaling(**asked))


def reach(rope_scaling: RopeScaling | None) -> int | None:
    """The longest sequence that a scaling supports; None if unknown."""
    if rope_scaling is None or rope_scaling.original_length is None:
        return None
    return round(rope_scaling.factor * rope_scaling.original_length)


def describe(model: ModelConfig, length: int) -> str:
    """Describe a model's rotary positions, as used for sequences of `length` tokens."""
    text, rope_scaling = f"rope theta {model.rope_theta:,.10g}", model.rope_scaling
    if model.local_theta is not None:
        text += f" ({model.local_theta:,.10g} in layers with a window)"
    if rope_scaling is None:
        return f"{text}, no rope scaling"
    original = "" if rope_scaling.original_length is None else f" of {rope_scaling.original_length:,} positions"
    text = f"{text}, rope scaling {rope_scaling.kind} × {rope_scaling.factor:g}{original}"
    if rope_scaling.kind != "longrope":
        return text
    return f"{text}, {'short' if rope_scaling.at_length(length).short == rope_scaling.short else 'long'} factors"

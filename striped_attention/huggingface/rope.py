"""Rope: convert the rope settings of a config.json, in both formats, to `ModelConfig` fields and back.

transformers 4 has `rope_theta` and `rope_scaling` side by side; transformers 5 has both in `rope_parameters`. Gemma 3
has two such sets, for layers with and without a window. The older format is written, since both versions read it.
"""

import math
from typing import Any

from striped_attention.huggingface.families import FAMILIES
from striped_attention.huggingface.said import Said
from striped_attention.models.config import ModelConfig
from striped_attention.models.rotary import ROPE_SCALINGS, RopeScaling

SLIDING, FULL = "sliding_attention", "full_attention"
ORIGINAL = "original_max_position_embeddings"
_LONGROPE = ("longrope", "su", "yarn")  # all that Phi-3 accepts; the other two are early names of longrope


def read_rope(said: Said, kind: str, head_dim: int) -> dict[str, Any]:
    """Return the `ModelConfig` fields for rotary positions; for Gemma 3 always with a `local_theta`."""
    rope = said.values.get("rope_scaling") or said.values.get("rope_parameters") or {}
    fields: dict[str, Any] = {}
    if kind == "gemma3_text":
        local = rope.get(SLIDING) if isinstance(rope, dict) else None
        fields["local_theta"] = _local_theta(said, local or {})
        if isinstance(rope, dict) and (FULL in rope or SLIDING in rope):
            rope = rope.get(FULL) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        said.refuse(f"must have one set of rope settings for all layers; got {rope}.")
    part = Said(f"{said.where}, in its rope settings,", rope)
    missing = FAMILIES[kind].missing.get("rope_theta", 10_000.0)
    fields["rope_theta"] = part.number("rope_theta", said.number("rope_theta", missing))
    for each in (said, part):
        share = each.number("partial_rotary_factor", 1)
        if share != 1 and kind != "phi3":
            each.refuse(f"has a partial_rotary_factor of {share:g}, which is supported for phi3 alone.")
        if share != 1:
            fields["rotary_width"] = int(head_dim * share)
    return fields | {"rope_scaling": _rope_scaling(said, part, kind, fields.get("rotary_width", head_dim) // 2)}


def _local_theta(said: Said, rope: dict[str, Any]) -> float:
    """Return Gemma 3's theta for layers with a window, whose frequencies are never scaled."""
    part = Said(f"{said.where}, in the rope settings of layers with a window,", rope)
    if rope.get("rope_type", "default") != "default":
        part.refuse(f"must not scale frequencies (rope_type default); got {rope['rope_type']!r}.")
    usual = FAMILIES["gemma3_text"].missing["rope_local_base_freq"]
    return part.number("rope_theta", said.number("rope_local_base_freq", usual))


def _rope_scaling(said: Said, part: Said, kind: str, pairs: int) -> RopeScaling | None:
    """Return the rope scaling of a head with `pairs` frequencies, None if there is none."""
    rope = part.values
    name = rope.get("rope_type", rope.get("type", "default"))
    if name == "default":
        return None
    if kind == "phi3" and name in _LONGROPE:
        return _longrope(said, part, pairs)
    known = ("longrope",) if kind == "phi3" else [each for each in ROPE_SCALINGS if each != "longrope"]
    if name not in known:
        said.refuse(f"has rope scaling of type {name!r}. Supported are default, {', '.join(known)}.")
    factor = part.number("factor")
    if name == "linear":
        return RopeScaling(name, factor)
    length = _original_length(said, part)
    if name == "llama3":
        slow, fast, amplitude = part.number("low_freq_factor"), part.number("high_freq_factor"), None
    else:
        slow, fast, amplitude = part.number("beta_slow", 1), part.number("beta_fast", 32), _amplitude(part, factor)
        if rope.get("truncate", True) is not True:
            part.refuse(f"must round the ends of yarn's ramp (truncate true); got {rope['truncate']!r}.")
    if not slow < fast:
        part.refuse(f"must have the slow end of its ramp below the fast end; got {slow} and {fast}.")
    return RopeScaling(name, factor, length, slow, fast, amplitude)


def _original_length(said: Said, part: Said) -> int:
    source = next((each for each in (said, part) if each.values.get(ORIGINAL) is not None), None)
    return said.whole("max_position_embeddings") if source is None else source.whole(ORIGINAL)


def _longrope(said: Said, part: Said, pairs: int) -> RopeScaling:
    """Return Phi's rope scaling: two lists of factors. The factor defaults to the ratio of the two lengths."""
    length = said.whole(ORIGINAL, 4096 if part.values.get(ORIGINAL) is None else part.whole(ORIGINAL))
    factor = part.number("factor", said.whole("max_position_embeddings") / length)
    lists = []
    for name in ("short_factor", "long_factor"):
        found = part.values.get(name)
        if not isinstance(found, list) or len(found) != pairs:
            size = f"{len(found)} of them" if isinstance(found, list) else repr(found)
            part.refuse(f"must give {pairs} factors as {name}, one per pair; got {size}.")
        lists.append(tuple(Said(part.where, {name: each}).number(name) for each in found))
    amplitude = None if part.values.get("attention_factor") is None else part.number("attention_factor")
    return RopeScaling("longrope", factor, length, amplitude=amplitude, short=lists[0], long=lists[1])


def _amplitude(part: Said, factor: float) -> float | None:
    """Return yarn's factor on cosine and sine; None if it follows from the scaling factor alone, as in the paper."""
    if part.values.get("attention_factor") is not None:
        return part.number("attention_factor")
    if not (part.values.get("mscale") and part.values.get("mscale_all_dim")):
        return None
    above, below = (0.1 * part.number(name) * max(math.log(factor), 0) + 1 for name in ("mscale", "mscale_all_dim"))
    return above / below


def rope_json(config: ModelConfig) -> dict[str, Any]:
    """Return the rope settings for config.json: the inverse of `read_rope`."""
    rope_scaling = config.rope_scaling
    said: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_scaling": _scaling(rope_scaling)}
    if config.local_theta is not None:
        said["rope_local_base_freq"] = config.local_theta
    if config.rotary_width is not None:
        share = config.rotary_width / config.head_dim
        exact = int(config.head_dim * share) == config.rotary_width  # readers truncate, and 26 / 45 · 45 < 26
        said["partial_rotary_factor"] = share if exact else math.nextafter(share, 1)
    if rope_scaling is not None and rope_scaling.kind in ("yarn", "longrope"):
        # transformers 4 uses the ratio of the two lengths as the factor; for longrope all versions do.
        said["max_position_embeddings"] = round(rope_scaling.factor * (rope_scaling.original_length or 0))
    if rope_scaling is not None and rope_scaling.kind == "longrope":
        said[ORIGINAL] = rope_scaling.original_length
    return said


def _scaling(rope_scaling: RopeScaling | None) -> dict[str, Any] | None:
    if rope_scaling is None:
        return None
    if rope_scaling.kind == "longrope":  # transformers 4 accepts exactly three keys here
        said: dict[str, Any] = {
            "type": rope_scaling.kind,
            "short_factor": rope_scaling.short,
            "long_factor": rope_scaling.long,
        }
        return said if rope_scaling.amplitude is None else said | {"attention_factor": rope_scaling.amplitude}
    said = {"rope_type": rope_scaling.kind, "factor": rope_scaling.factor}
    if rope_scaling.kind == "linear":
        return said
    slow, fast = (
        ("low_freq_factor", "high_freq_factor") if rope_scaling.kind == "llama3" else ("beta_slow", "beta_fast")
    )
    said |= {ORIGINAL: rope_scaling.original_length, slow: rope_scaling.slow, fast: rope_scaling.fast}
    if rope_scaling.kind == "yarn" and rope_scaling.amplitude is not None:
        said["attention_factor"] = rope_scaling.amplitude
    return said

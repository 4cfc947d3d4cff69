"""Rope: the rotary positions of a config.json, in both spellings, and back.

transformers 4 has `rope_theta` and `rope_scaling` beside each other, transformers 5 `rope_parameters` with both in it;
Gemma 3 has two such sets, of layers with a window and of layers without. The older spelling is written, for both
versions read it.
"""

import math
from typing import Any

from striped_attention.huggingface.families import FAMILIES
from striped_attention.huggingface.said import Said
from striped_attention.models.llama import ModelConfig
from striped_attention.models.rotary import STRETCHES, Stretch

SLIDING, FULL = "sliding_attention", "full_attention"
ORIGINAL = "original_max_position_embeddings"
_LONGROPE = ("longrope", "su", "yarn")  # all that Phi-3 knows; the other two are what it was called at first


def read_rope(said: Said, kind: str, head_dim: int) -> dict[str, Any]:
    """The fields of a `ModelConfig` that say how positions become angles; `local_theta` of every Gemma 3."""
    rope = said.values.get("rope_scaling") or said.values.get("rope_parameters") or {}
    fields: dict[str, Any] = {}
    if kind == "gemma3_text":
        local = rope.get(SLIDING) if isinstance(rope, dict) else None
        fields["local_theta"] = _local_theta(said, local or {})
        if isinstance(rope, dict) and (FULL in rope or SLIDING in rope):
            rope = rope.get(FULL) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        said.refuse(f"must describe the rotary positions of all layers at once; got {rope}.")
    part = Said(f"{said.where}, in its rotary positions,", rope)
    missing = FAMILIES[kind].missing.get("rope_theta", 10_000.0)
    fields["rope_theta"] = part.number("rope_theta", said.number("rope_theta", missing))
    for each in (said, part):
        share = each.number("partial_rotary_factor", 1)
        if share != 1 and kind != "phi3":
            each.refuse(f"turns a part of a head (partial_rotary_factor {share:g}).")
        if share != 1:
            fields["rotary_width"] = int(head_dim * share)
    return fields | {"stretch": _stretch(said, part, kind, fields.get("rotary_width", head_dim) // 2)}


def _local_theta(said: Said, rope: dict[str, Any]) -> float:
    """Gemma 3's theta in layers with a window, where frequencies are never changed."""
    part = Said(f"{said.where}, in the rotary positions of layers with a window,", rope)
    if rope.get("rope_type", "default") != "default":
        part.refuse(f"must have frequencies as they are (rope_type default); got {rope['rope_type']!r}.")
    usual = FAMILIES["gemma3_text"].missing["rope_local_base_freq"]
    return part.number("rope_theta", said.number("rope_local_base_freq", usual))


def _stretch(said: Said, part: Said, kind: str, pairs: int) -> Stretch | None:
    """What was done to the frequencies of `pairs` pairs."""
    rope = part.values
    name = rope.get("rope_type", rope.get("type", "default"))
    if name == "default":
        return None
    if kind == "phi3" and name in _LONGROPE:
        return _longrope(said, part, pairs)
    known = ("longrope",) if kind == "phi3" else [each for each in STRETCHES if each != "longrope"]
    if name not in known:
        said.refuse(f"has rotary positions of the type {name!r}. Known are default, {', '.join(known)}.")
    factor = part.number("factor")
    if name == "linear":
        return Stretch(name, factor)
    length = _original_length(said, part)
    if name == "llama3":
        slow, fast, amplitude = part.number("low_freq_factor"), part.number("high_freq_factor"), None
    else:
        slow, fast, amplitude = part.number("beta_slow", 1), part.number("beta_fast", 32), _amplitude(part, factor)
        if rope.get("truncate", True) is not True:
            part.refuse(f"must round the ends of yarn's ramp (truncate true); got {rope['truncate']!r}.")
    if not slow < fast:
        part.refuse(f"must have a slow end below the fast end; got {slow} and {fast}.")
    return Stretch(name, factor, length, slow, fast, amplitude)


def _original_length(said: Said, part: Said) -> int:
    source = next((each for each in (said, part) if each.values.get(ORIGINAL) is not None), None)
    return said.whole("max_position_embeddings") if source is None else source.whole(ORIGINAL)


def _longrope(said: Said, part: Said, pairs: int) -> Stretch:
    """Phi's: two lists of factors. Without a factor the ratio of the two lengths says how much larger scores are."""
    length = said.whole(ORIGINAL, 4096 if part.values.get(ORIGINAL) is None else part.whole(ORIGINAL))
    factor = part.number("factor", said.whole("max_position_embeddings") / length)
    lists = []
    for name in ("short_factor", "long_factor"):
        found = part.values.get(name)
        if not isinstance(found, list) or len(found) != pairs:
            size = f"{len(found)} of them" if isinstance(found, list) else repr(found)
            part.refuse(f"must give a factor for each of {pairs} pairs as {name}; got {size}.")
        lists.append(tuple(Said(part.where, {name: each}).number(name) for each in found))
    amplitude = None if part.values.get("attention_factor") is None else part.number("attention_factor")
    return Stretch("longrope", factor, length, amplitude=amplitude, short=lists[0], long=lists[1])


def _amplitude(part: Said, factor: float) -> float | None:
    """What yarn multiplies cosine and sine with; None where the factor alone decides, as in the paper."""
    if part.values.get("attention_factor") is not None:
        return part.number("attention_factor")
    if not (part.values.get("mscale") and part.values.get("mscale_all_dim")):
        return None
    above, below = (0.1 * part.number(name) * max(math.log(factor), 0) + 1 for name in ("mscale", "mscale_all_dim"))
    return above / below


def rope_json(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_rope`."""
    stretch = config.stretch
    said: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_scaling": _scaling(stretch)}
    if config.local_theta is not None:
        said["rope_local_base_freq"] = config.local_theta
    if config.rotary_width is not None:
        share = config.rotary_width / config.head_dim
        exact = int(config.head_dim * share) == config.rotary_width  # so it is read, and 26 / 45 · 45 is below 26
        said["partial_rotary_factor"] = share if exact else math.nextafter(share, 1)
    if stretch is not None and stretch.kind in ("yarn", "longrope"):
        # transformers 4 takes the ratio of the two lengths for the factor, for longrope all versions do.
        said["max_position_embeddings"] = round(stretch.factor * (stretch.original_length or 0))
    if stretch is not None and stretch.kind == "longrope":
        said[ORIGINAL] = stretch.original_length
    return said


def _scaling(stretch: Stretch | None) -> dict[str, Any] | None:
    if stretch is None:
        return None
    if stretch.kind == "longrope":  # transformers 4 wants exactly three names here
        said: dict[str, Any] = {"type": stretch.kind, "short_factor": stretch.short, "long_factor": stretch.long}
        return said if stretch.amplitude is None else said | {"attention_factor": stretch.amplitude}
    said = {"rope_type": stretch.kind, "factor": stretch.factor}
    if stretch.kind == "linear":
        return said
    slow, fast = ("low_freq_factor", "high_freq_factor") if stretch.kind == "llama3" else ("beta_slow", "beta_fast")
    said |= {ORIGINAL: stretch.original_length, slow: stretch.slow, fast: stretch.fast}
    if stretch.kind == "yarn" and stretch.amplitude is not None:
        said["attention_factor"] = stretch.amplitude
    return said

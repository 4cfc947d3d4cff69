"""Settings: sampling parameters and stopping criteria. Options take precedence over generation_config.json.

The file has the same meaning as in transformers: without `"do_sample": true`, the most likely token is taken whatever
the temperature. Only what the file states counts, not the defaults of other libraries (transformers adds a top_k of 50
to files that sample without one). Settings of the file that are not supported here give a warning.
"""

import dataclasses
import json
import math
from typing import Any, NoReturn

from striped_attention.errors import UsageError
from striped_attention.generation.config import GenerateConfig
from striped_attention.generation.sample import Sampling
from striped_attention.huggingface.writing import GENERATION
from striped_attention.training.source import Source

MAX_TOKENS = 256  # to generate, if neither the options nor the file set it

# Unsupported settings, and their values that have no effect (like null). Those in _SAMPLING only matter for sampling.
_SAMPLING = {"typical_p": (1,), "top_h": (), "epsilon_cutoff": (0,), "eta_cutoff": (0,)}
_ALWAYS = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "constraints": ([],),
    "dola_layers": (),
    "token_healing": (False,),
    "watermarking_config": (),
    "max_time": (),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run. `note` lists what was taken from generation_config.json, `warning` what is unsupported."""

    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    note: str
    warning: str


def settle(config: GenerateConfig, source: Source) -> Settings:
    """Return the settings of a run; raise UsageError if they are invalid."""
    file = _File(source)
    sampled = file.flag("do_sample") if config.temperature is None else config.temperature > 0
    filters = {name: getattr(config, name) for name in ("top_k", "top_p", "min_p")}
    if not sampled and any(value is not None for value in filters.values()):
        raise UsageError("--top-k, --top-p and --min-p are for sampling: also give a --temperature above 0, like 1.")
    sampling = Sampling(seed=config.seed)
    if sampled:
        sampling = Sampling(
            temperature=_first(config.temperature, lambda: file.number("temperature", 1.0, above=0.0)),
            top_k=_first(config.top_k, lambda: file.whole("top_k", 0))
            or None,  # 0 means all tokens, as in transformers
            top_p=_first(config.top_p, lambda: file.number("top_p", 1.0, above=0.0, most=1.0)),
            min_p=_first(config.min_p, lambda: file.number("min_p", 0.0, most=1.0)),
            seed=config.seed,
        )
    return Settings(
        sampling,
        _first(config.max_tokens, lambda: file.whole("max_new_tokens", MAX_TOKENS, least=1)),
        config.stop or file.strings("stop_strings"),
        file.note,
        file.warning(sampled),
    )


def _first(given: Any, else_: Any) -> Any:
    return else_() if given is None else given


class _File:
    """generation_config.json, and a record of the values used."""

    def __init__(self, source: Source) -> None:
        self._where, self._said = source.folder / GENERATION, source.generation
        self._used: list[str] = []

    def flag(self, name: str) -> bool:
        value = self._get(name, False)
        if not isinstance(value, bool):
            self._refuse(name, "true or false")
        return value

    def number(self, name: str, default: float, above: float = -math.inf, most: float = math.inf) -> float:
        value = self._get(name, default)
        right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not right or value < 0 or not above < value <= most:
            least = f"above {above:g}" if above >= 0 else "of at least 0"
            self._refuse(name, f"a number {least}" + (f" and at most {most:g}" if most < math.inf else ""))
        return float(value)

    def whole(self, name: str, default: int, least: int = 0) -> int:
        value = self._get(name, default)
        if type(value) is not int or value < least:
            self._refuse(name, f"a whole number of at least {least}")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        value = self._get(name, ())
        value = (value,) if isinstance(value, str) else value
        if not (isinstance(value, list | tuple) and all(isinstance(x, str) and x for x in value)):
            self._refuse(name, "a list of strings that are not empty")
        return tuple(value)

    @property
    def note(self) -> str:
        return f"{', '.join(self._used)} from {GENERATION}" if self._used else ""

    def warning(self, sampled: bool) -> str:
        ignored = _ALWAYS | (_SAMPLING if sampled else {})
        asked = {name: self._said[name] for name in ignored if self._said.get(name) is not None}
        named = [f"{name} {value!r}" for name, value in asked.items() if value not in ignored[name]]
        if not named:
            return ""
        return (
            f"Warning: {self._where} asks for {', '.join(named)}, which striped generate does not support and ignores. "
            f"If you need it, generate with transformers; if not, remove it from the file."
        )

    def _get(self, name: str, default: Any) -> Any:
        value = self._said.get(name)
        if value is None:
            return default
        self._used.append(f"{name} {json.dumps(value, ensure_ascii=False)}")
        return value

    def _refuse(self, name: str, wanted: str) -> NoReturn:
        raise UsageError(
            f"{self._where} must give {wanted} as {name}; got {self._said[name]!r}. Correct the file, or give the "
            f"option on the command line."
        )

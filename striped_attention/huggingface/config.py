"""config.json: the shape of a Hugging Face model as a `ModelConfig`, and back.

Four families are LLaMA with little besides:

    llama      nothing
    mistral    a sliding window in every layer
    qwen2      biases of queries, keys and values
    qwen3      norms of queries and keys

What a file leaves out is what transformers takes then. What this library would compute in another way is refused, never
passed over. Rotary positions are written in the older spelling (`rope_theta`, `rope_scaling`), which transformers 4 and
5 both read; transformers 5 itself writes `rope_parameters`, and that is read as well.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NoReturn

from striped_attention.errors import UsageError
from striped_attention.models.llama import ModelConfig
from striped_attention.models.rotary import STRETCHES, Stretch

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Family:
    """`kv_heads` and `head_width` are transformers' where a file does not say; None means heads, and dim / heads."""

    architecture: str
    kv_heads: int | None = None
    head_width: int | None = None
    biases: bool = False
    head_norms: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", kv_heads=8),
    "qwen2": Family("Qwen2ForCausalLM", kv_heads=32, biases=True),
    "qwen3": Family("Qwen3ForCausalLM", kv_heads=32, head_width=128, head_norms=True),
}


@dataclasses.dataclass(frozen=True)
class _Said:
    """What a config.json says, or a part of it. Every complaint begins with `where`."""

    where: str
    values: dict[str, Any]

    def refuse(self, text: str) -> NoReturn:
        raise UsageError(f"{self.where} {text}")

    def number(self, name: str, default: int | float | None = None) -> float:
        """A number above 0; `default` where there is none or null. Without a default there must be one."""
        value = default if self.values.get(name) is None else self.values[name]
        if value is None:
            self.refuse(f"does not say {name}, without which a model is not known. Take the model's own file.")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**63:
            self.refuse(f"must give a number above 0 as {name}; got {value!r}.")
        return float(value)

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if not value.is_integer():
            self.refuse(f"must give a whole number as {name}; got {value}.")
        return int(value)

    def is_null(self, name: str) -> bool:
        """Said to be nothing, which is not the same as not said."""
        return name in self.values and self.values[name] is None


def read_config(folder: pathlib.Path) -> ModelConfig:
    """The model that the config.json of a folder describes."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder. Give that of a Hugging Face model, with config.json and model.safetensors; "
            f"`hf download NAME --local-dir FOLDER` fetches one."
        )
    path = folder / "config.json"
    said = _Said(str(path), read_json(path))
    kind = _kind(said)
    family = FAMILIES[kind]
    _check_plain(said, family)
    layers, dim, heads = (said.whole(f) for f in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    kv_heads = heads if said.is_null("num_key_value_heads") else family.kv_heads or heads
    width = dim // heads if said.is_null("head_dim") else family.head_width or dim // heads
    width = said.whole("head_dim", width)
    theta, stretch = _rotary(said)
    try:
        return ModelConfig(
            layers=layers,
            dim=dim,
            ffn=said.whole("intermediate_size"),
            heads=heads,
            kv_heads=said.whole("num_key_value_heads", kv_heads),
            vocabulary=said.whole("vocab_size"),
            rope_theta=theta,
            norm_epsilon=said.number("rms_norm_eps", 1e-6),
            head_width=None if width * heads == dim else width,
            window=_window(said, kind, layers),
            biases=family.biases,
            head_norms=family.head_norms,
            tied=said.values.get("tie_word_embeddings") is True,
            stretch=stretch,
        )
    except ValueError as error:
        raise UsageError(f"{path} describes a model that cannot be: {error}") from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. It belongs to every Hugging Face model.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}). Is it cut short? Download the model again.") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} must hold a JSON object; got {type(found).__name__}. Download the model again.")
    return found


def _kind(said: _Said) -> str:
    """The family of a model; both ways to name it must agree."""
    names, model_type = said.values.get("architectures"), said.values.get("model_type")
    for kind, family in FAMILIES.items():
        if names in ([family.architecture], None, []) and model_type == kind:
            return kind
        if names == [family.architecture] and model_type is None:
            return kind
    known = ", ".join(family.architecture for family in FAMILIES.values())
    said.refuse(f"is of the architecture {names or None} and type {model_type!r}. Known are {known}.")


def _check_plain(said: _Said, family: Family) -> None:
    """Raise for what none of our models computes."""
    quantized = said.values.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        said.refuse(f"says that the weights are quantized ({method}). Take the model in bfloat16, float16 or float32.")
    if said.values.get("hidden_act", "silu") != "silu":
        said.refuse(f"must have silu as hidden_act; got {said.values['hidden_act']!r}. Other models are not known.")
    for name in ("mlp_bias",) if family.biases else ("attention_bias", "mlp_bias"):
        if said.values.get(name):
            said.refuse(f"asks for {name}, which no model of this library has. Only Qwen 2's biases are known.")


def _window(said: _Said, kind: str, layers: int) -> int | None:
    """The window of all layers. One that only some of the layers have cannot be said in a `ModelConfig`."""
    qwen = kind.startswith("qwen")
    asked = kind == "mistral" or (qwen and bool(said.values.get("use_sliding_window")))
    window = said.whole("sliding_window", 4096) if asked and not said.is_null("sliding_window") else None
    first = said.values.get("max_window_layers", 28) if qwen else 0
    if not isinstance(first, int):
        said.refuse(f"must give a whole number as max_window_layers; got {first!r}.")
    usual = [SLIDING if window is not None and layer >= first else FULL for layer in range(layers)]
    types = usual if said.values.get("layer_types") is None else said.values["layer_types"]
    if qwen or types == usual:  # the others do not look at layer_types
        if types == [FULL] * layers:
            return None
        if types == [SLIDING] * layers and window is not None:
            return window
    kinds = sorted({str(each) for each in types}) if isinstance(types, list) else types
    said.refuse(f"asks for a window of {window} and layers of {kinds}. Known is one window for all layers, or none.")


def _rotary(said: _Said) -> tuple[float, Stretch | None]:
    """Theta, and what was done to the frequencies."""
    rope = said.values.get("rope_scaling") or said.values.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        said.refuse(f"must describe the rotary positions of all layers at once; got {rope}.")
    part = _Said(f"{said.where}, in its rotary positions,", rope)
    for each in (said, part):
        if each.values.get("partial_rotary_factor") not in (None, 1):
            each.refuse(f"turns a part of a head (partial_rotary_factor {each.values['partial_rotary_factor']}).")
    theta = part.number("rope_theta", said.number("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    known = [name for name in STRETCHES if name != "longrope"]
    if kind not in known:
        said.refuse(f"has rotary positions of the type {kind!r}. Known are default, {', '.join(known)}.")
    factor = part.number("factor")
    if kind == "linear":
        return theta, Stretch(kind, factor)
    original = "original_max_position_embeddings"
    source = next((each for each in (said, part) if each.values.get(original) is not None), None)
    length = said.whole("max_position_embeddings") if source is None else source.whole(original)
    if kind == "llama3":
        slow, fast, amplitude = part.number("low_freq_factor"), part.number("high_freq_factor"), None
    else:
        slow, fast, amplitude = part.number("beta_slow", 1), part.number("beta_fast", 32), _amplitude(part, factor)
        if rope.get("truncate", True) is not True:
            part.refuse(f"must round the ends of yarn's ramp (truncate true); got {rope['truncate']!r}.")
    if not slow < fast:
        part.refuse(f"must have a slow end below the fast end; got {slow} and {fast}.")
    return theta, Stretch(kind, factor, length, slow, fast, amplitude)


def _amplitude(part: _Said, factor: float) -> float | None:
    """What yarn multiplies cosine and sine with; None where the factor alone decides, as in the paper."""
    if part.values.get("attention_factor") is not None:
        return part.number("attention_factor")
    if not (part.values.get("mscale") and part.values.get("mscale_all_dim")):
        return None
    above, below = (0.1 * part.number(name) * max(math.log(factor), 0) + 1 for name in ("mscale", "mscale_all_dim"))
    return above / below


def config_json(config: ModelConfig, dtype: str, length: int, ids: Mapping[str, int | list[int]]) -> dict[str, Any]:
    """The config.json of a model: the inverse of `read_config`. `length` is that of the longest texts it is for."""
    kind = _kind_of(config)
    said: dict[str, Any] = {
        "architectures": [FAMILIES[kind].architecture],
        "model_type": kind,
        "vocab_size": config.vocabulary,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": length,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.stretch is None else _rope_scaling(config.stretch),
        "torch_dtype": dtype,
        # null where nothing is known: left out they would be 1 and 2 for Llama, and texts would end at token 2.
        **{name: ids.get(name) for name in IDS},
    }
    if config.stretch is not None and config.stretch.kind == "yarn":
        # transformers 4 takes the ratio of the two lengths for the factor.
        said["max_position_embeddings"] = round(config.stretch.factor * (config.stretch.original_length or 0))
    if kind == "llama":
        said |= {"attention_bias": False, "mlp_bias": False}
    elif kind == "mistral":
        said |= {"sliding_window": config.window}
    elif config.window is None:
        said |= {"use_sliding_window": False}
    else:
        said |= {"use_sliding_window": True, "sliding_window": config.window, "max_window_layers": 0}
    return said


def _kind_of(config: ModelConfig) -> str:
    """The family that computes what a model computes."""
    if config.biases and config.head_norms:
        raise UsageError(
            "A model with biases and head_norms cannot be written: Qwen 2 has the ones, Qwen 3 the others."
        )
    if config.stretch is not None and config.stretch.kind != "yarn" and config.stretch.amplitude not in (None, 1):
        raise UsageError(
            f"A model whose stretch {config.stretch.kind} has an amplitude ({config.stretch.amplitude}) cannot be "
            f"written: in Hugging Face's families only yarn has one."
        )
    if config.head_norms or config.biases:
        return "qwen3" if config.head_norms else "qwen2"
    # Llama's configuration wants dim to be a multiple of heads, also where the width of a head is another; Mistral's,
    # which without a window is the same model, does not.
    return "llama" if config.window is None and config.dim % config.heads == 0 else "mistral"


def _rope_scaling(stretch: Stretch) -> dict[str, Any]:
    said: dict[str, Any] = {"rope_type": stretch.kind, "factor": stretch.factor}
    if stretch.kind == "linear":
        return said
    slow, fast = ("low_freq_factor", "high_freq_factor") if stretch.kind == "llama3" else ("beta_slow", "beta_fast")
    said |= {"original_max_position_embeddings": stretch.original_length, slow: stretch.slow, fast: stretch.fast}
    if stretch.kind == "yarn" and stretch.amplitude is not None:
        said["attention_factor"] = stretch.amplitude
    return said

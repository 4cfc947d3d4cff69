"""config.json: convert the shape of a Hugging Face model to a `ModelConfig` and back.

Missing values take the defaults of transformers. Settings that this library would compute differently are rejected,
never ignored. Files of transformers 4 and 5 can be read, and both can read what is written.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from striped_attention.errors import UsageError
from striped_attention.huggingface.families import FAMILIES, Family, kind_of
from striped_attention.huggingface.rope import FULL, SLIDING, read_rope, rope_json
from striped_attention.huggingface.said import Said, read_json
from striped_attention.models.config import ModelConfig

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
GEMMA = ("gemma2", "gemma3_text")


def read_config(folder: pathlib.Path) -> ModelConfig:
    """Read the model that the config.json of a folder describes."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder. Give the folder of a Hugging Face model, with config.json and "
            f"model.safetensors; `hf download NAME --local-dir FOLDER` fetches one."
        )
    path = folder / "config.json"
    said = Said(str(path), read_json(path))
    kind = _kind(said)
    family = FAMILIES[kind]
    _check_plain(said, kind)
    layers, dim, heads = (said.whole(f) for f in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    kv_heads = heads if said.is_null("num_key_value_heads") else family.missing.get("num_key_value_heads", heads)
    width = dim // heads if said.is_null("head_dim") else family.missing.get("head_dim", dim // heads)
    width = said.whole("head_dim", width)
    window, full_every = _window(said, kind, layers)
    rope = read_rope(said, kind, width)
    if window is None:
        rope.pop("local_theta", None)  # no layer uses it
    try:
        return ModelConfig(
            layers=layers,
            dim=dim,
            ffn=said.whole("intermediate_size"),
            heads=heads,
            kv_heads=said.whole("num_key_value_heads", kv_heads),
            vocabulary=said.whole("vocab_size"),
            norm_epsilon=said.number("rms_norm_eps", family.missing.get("rms_norm_eps", 1e-6)),
            head_width=None if width * heads == dim else width,
            window=window,
            full_every=full_every,
            tied=said.values.get("tie_word_embeddings", family.missing.get("tie_word_embeddings")) is True,
            **rope,
            **family.always,
            **(_of_gemma(said, family, width) if kind in GEMMA else {}),
        )
    except ValueError as error:
        raise UsageError(f"{path} describes an invalid model: {error}") from error


def _kind(said: Said) -> str:
    """Return the family of a model; `architectures` and `model_type` must agree."""
    names, model_type = said.values.get("architectures"), said.values.get("model_type")
    for kind, family in FAMILIES.items():
        if names in ([family.architecture], None, []) and model_type == kind:
            return kind
        if names == [family.architecture] and model_type is None:
            return kind
    if model_type == "gemma3":
        said.refuse(
            "is that of a Gemma 3 for text and images; only its language model, saved separately (gemma3_text), is "
            "supported. docs/inference.md shows how to save it with transformers."
        )
    known = ", ".join(family.architecture for family in FAMILIES.values())
    said.refuse(f"has the architecture {names or None} and type {model_type!r}. Supported are {known}.")


def _check_plain(said: Said, kind: str) -> None:
    """Raise for settings that this library does not support."""
    quantized, family = said.values.get("quantization_config"), FAMILIES[kind]
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        said.refuse(f"has quantized weights ({method}). Use the model in bfloat16, float16 or float32.")
    name, activation = family.activation
    if said.values.get(name, activation) != activation:
        said.refuse(f"must have {activation} as {name}; got {said.values[name]!r}. No other is supported.")
    for name in ("mlp_bias",) if "biases" in family.always else ("attention_bias", "mlp_bias"):
        if said.values.get(name):
            said.refuse(f"sets {name}, which is not supported. The only biases supported are Qwen 2's.")
    if kind in GEMMA and said.values.get("use_bidirectional_attention"):
        said.refuse("lets tokens attend to later ones (use_bidirectional_attention). Only causal models are supported.")
    if kind == "gemma3_text" and said.values.get("attn_logit_softcapping") is not None:
        said.refuse("sets attn_logit_softcapping, which transformers ignores in Gemma 3. Set it to null.")


def _window(said: Said, kind: str, layers: int) -> tuple[int | None, int | None]:
    """Return the window, and n if every n-th layer has none. A `ModelConfig` cannot express other patterns."""
    qwen = kind.startswith("qwen")
    asked = kind in ("mistral", *GEMMA) or (qwen and bool(said.values.get("use_sliding_window")))
    asked |= kind == "phi3" and "sliding_window" in said.values
    window = said.whole("sliding_window", 4096) if asked and not said.is_null("sliding_window") else None
    usual = [SLIDING if window is not None and sliding else FULL for sliding in _usually_sliding(said, kind, layers)]
    types = usual if said.values.get("layer_types") is None else said.values["layer_types"]
    if types == [FULL] * layers and (types == usual or qwen or kind in GEMMA):
        return None, None
    if window is not None and (types == usual or qwen or kind in GEMMA):  # other families ignore layer_types
        if types == [SLIDING] * layers:
            return window, None
        full_every = types.index(FULL) + 1 if isinstance(types, list) and FULL in types else 1
        if full_every > 1 and types == _alternating(full_every, layers):
            return window, full_every
    kinds = sorted({str(each) for each in types}) if isinstance(types, list) else types
    said.refuse(
        f"has a window of {window} and layers of {kinds}. Supported is one window for all layers, for all but every "
        f"n-th, or for none."
    )


def _usually_sliding(said: Said, kind: str, layers: int) -> list[bool]:
    """Return which layers have the window, if there is one, when `layer_types` is not given."""
    if kind.startswith("qwen"):
        first = said.values.get("max_window_layers", 28)
        if not isinstance(first, int):
            said.refuse(f"must give a whole number as max_window_layers; got {first!r}.")
        return [layer >= first for layer in range(layers)]
    every = {"gemma2": 2, "gemma3_text": said.whole("sliding_window_pattern", 6)}.get(kind)
    return [each == SLIDING for each in _alternating(every or layers + 1, layers)]


def _alternating(full_every: int, layers: int) -> list[str]:
    return [SLIDING if (i + 1) % full_every else FULL for i in range(layers)]


def _of_gemma(said: Said, family: Family, width: int) -> dict[str, Any]:
    """Return the fields that only Gemma's config.json sets."""
    scalar = said.whole("query_pre_attn_scalar", family.missing["query_pre_attn_scalar"])
    cap = said.optional("attn_logit_softcapping", family.missing.get("attn_logit_softcapping"))
    score_cap = said.optional("final_logit_softcapping", family.missing.get("final_logit_softcapping"))
    return {"attention_width": None if scalar == width else scalar, "softcap": cap, "score_softcap": score_cap}


def config_json(config: ModelConfig, dtype: str, length: int, ids: Mapping[str, int | list[int]]) -> dict[str, Any]:
    """Return the config.json of a model: the inverse of `read_config`. `length` is its maximum sequence length."""
    kind = kind_of(config)
    activation, its_name = FAMILIES[kind].activation
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
        activation: its_name,
        "max_position_embeddings": length,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        **rope_json(config),
        "torch_dtype": dtype,
        # Unknown ids are null: if left out, Llama's defaults are 1 and 2, and generation would stop at token 2.
        **{name: ids.get(name) for name in IDS},
    }
    if kind in ("llama", "olmo2"):
        said |= {"attention_bias": False, "mlp_bias": False}
    elif kind in ("mistral", "phi3"):
        said |= {"sliding_window": config.window}
    elif kind in GEMMA:
        said |= _gemma_json(config)
    elif config.window is None:
        said |= {"use_sliding_window": False}
    else:
        said |= {"use_sliding_window": True, "sliding_window": config.window, "max_window_layers": 0}
        said |= {} if config.full_every is None else {"layer_types": _types(config)}
    return said


def _gemma_json(config: ModelConfig) -> dict[str, Any]:
    said = {
        "query_pre_attn_scalar": config.attention_width or config.head_dim,
        "attn_logit_softcapping": config.softcap,
        "final_logit_softcapping": config.score_softcap,
        "sliding_window": config.window or 4096,  # transformers requires one, even if no layer uses it
        "layer_types": _types(config),
    }
    return said | ({} if config.full_every is None else {"sliding_window_pattern": config.full_every})


def _types(config: ModelConfig) -> list[str]:
    return [FULL if config.layer(i).window is None else SLIDING for i in range(config.layers)]

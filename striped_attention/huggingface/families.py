"""Families: the Hugging Face models that a `ModelConfig` can describe, and how each differs from LLaMA.

llama         no differences
mistral       a sliding window in every layer
qwen2         biases for queries, keys and values
qwen3         norms of queries and keys, per head
gemma2        windows in every other layer, norms around each sublayer, softcaps, GELU, a scaled embedding
gemma3_text   like gemma2, but windows in five of six layers, with their own rope theta; query and key norms per head
              instead of attention softcaps
phi3          fused matrices in its files, rotary positions on a part of each head, longrope (Phi-3, 3.5, 4, 4-mini)
olmo2         norms after each sublayer; norms of queries and keys across all heads
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from striped_attention.errors import UsageError
from striped_attention.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models. `always` holds the `ModelConfig` fields that all of them share; `may` names those that
    config.json sets. `missing` holds the defaults of transformers for values that config.json leaves out."""

    architecture: str
    always: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    may: tuple[str, ...] = ()
    missing: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def activation(self) -> tuple[str, str]:
        """The name of the activation in config.json, and its only supported value."""
        gelu = self.always.get("activation") == "gelu_tanh"
        return ("hidden_activation", "gelu_pytorch_tanh") if gelu else ("hidden_act", "silu")


_GEMMA = {"norms": "around", "centered_norms": True, "activation": "gelu_tanh", "scaled_embedding": True}
_GEMMA_MISSING = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", may=("window",), missing={"num_key_value_heads": 8}),
    "qwen2": Family("Qwen2ForCausalLM", {"biases": True}, ("window", "full_every"), {"num_key_value_heads": 32}),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"head_norms": True},
        ("window", "full_every"),
        {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA,
        ("window", "full_every", "softcap", "score_softcap", "attention_width"),
        {**_GEMMA_MISSING, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {**_GEMMA, "head_norms": True},
        ("window", "full_every", "score_softcap", "attention_width", "local_theta"),
        {**_GEMMA_MISSING, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
    ),
    "phi3": Family("Phi3ForCausalLM", {"fused": True}, ("window", "rotary_width"), {"rms_norm_eps": 1e-5}),
    "olmo2": Family("Olmo2ForCausalLM", {"norms": "after", "wide_norms": True}, missing={"rms_norm_eps": 1e-5}),
}

# Fields in which families differ, with their values for LLaMA.
_SPECIAL = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if field.name not in ("rope_theta", "norm_epsilon", "head_width", "tied", "rope_scaling")
    and field.default is not dataclasses.MISSING
}


def kind_of(config: ModelConfig) -> str:
    """Return the first family that can express a model."""
    rope_scaling = config.rope_scaling
    if (
        rope_scaling is not None
        and rope_scaling.kind in ("linear", "llama3")
        and rope_scaling.amplitude not in (None, 1)
    ):
        raise UsageError(
            f"A model with rope scaling {rope_scaling.kind} and an amplitude ({rope_scaling.amplitude}) cannot be "
            f"written: in Hugging Face's families only yarn and longrope have an amplitude."
        )
    for kind, family in FAMILIES.items():
        if _computes(kind, family, config):
            return kind
    special = [name for name, usual in _SPECIAL.items() if getattr(config, name) != usual]
    special += [] if rope_scaling is None else [f"rope scaling {rope_scaling.kind}"]
    raise UsageError(f"A model with {', '.join(special)} cannot be written: no Hugging Face family has all of it.")


def _computes(kind: str, family: Family, config: ModelConfig) -> bool:
    """Whether a family's config.json can express the whole model."""
    same = all(
        name in family.may or getattr(config, name) == family.always.get(name, usual)
        for name, usual in _SPECIAL.items()
    )
    if config.rope_scaling is not None and (config.rope_scaling.kind == "longrope") != (kind == "phi3"):
        return False
    if kind == "gemma3_text" and (config.window is None) != (config.local_theta is None):
        return False
    # Llama's configuration requires dim to be a multiple of heads, even if the head width is given. Mistral's does not,
    # and without a window it is the same model.
    return same and (kind != "llama" or config.dim % config.heads == 0)

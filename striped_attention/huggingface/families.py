"""Families: which models of Hugging Face are a `ModelConfig`, and what each has besides LLaMA.

llama         nothing
mistral       a sliding window in every layer
qwen2         biases of queries, keys and values
qwen3         norms of queries and keys
gemma2        windows in every other layer, norms around each half of a layer, softcaps, GELU, a scaled embedding
gemma3_text   windows in five layers of six, with rotary positions of their own; norms of queries and keys too
phi3          fused matrices in its files, rotary positions of a part of a head, longrope (Phi-3, 3.5, 4, 4-mini)
olmo2         norms behind each half of a layer, and of all queries and all keys at once
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from striped_attention.errors import UsageError
from striped_attention.models.llama import ModelConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """`always` are the fields of every such `ModelConfig`, `may` those that config.json decides. `missing` is what
    transformers takes where a config.json does not say."""

    architecture: str
    always: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    may: tuple[str, ...] = ()
    missing: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def activation(self) -> tuple[str, str]:
        """The name of the activation in config.json, and its only value."""
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

# Fields in which families differ, and what they are for LLaMA.
_SPECIAL = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if field.name not in ("rope_theta", "norm_epsilon", "head_width", "tied", "stretch")
    and field.default is not dataclasses.MISSING
}


def kind_of(config: ModelConfig) -> str:
    """The family that computes what a model computes; the first of several."""
    stretch = config.stretch
    if stretch is not None and stretch.kind in ("linear", "llama3") and stretch.amplitude not in (None, 1):
        raise UsageError(
            f"A model whose stretch {stretch.kind} has an amplitude ({stretch.amplitude}) cannot be written: in "
            f"Hugging Face's families only yarn and longrope have one."
        )
    for kind, family in FAMILIES.items():
        if _computes(kind, family, config):
            return kind
    special = [name for name, usual in _SPECIAL.items() if getattr(config, name) != usual]
    special += [] if stretch is None else [f"rotary positions of the kind {stretch.kind}"]
    raise UsageError(f"A model with {', '.join(special)} cannot be written: no family of Hugging Face has all of that.")


def _computes(kind: str, family: Family, config: ModelConfig) -> bool:
    """Whether a family's config.json can say all that a model is."""
    same = all(
        name in family.may or getattr(config, name) == family.always.get(name, usual)
        for name, usual in _SPECIAL.items()
    )
    if config.stretch is not None and (config.stretch.kind == "longrope") != (kind == "phi3"):
        return False
    if kind == "gemma3_text" and (config.window is None) != (config.local_theta is None):
        return False
    # Llama's configuration wants dim to be a multiple of heads, also where the width of a head is another; Mistral's,
    # which without a window is the same model, does not.
    return same and (kind != "llama" or config.dim % config.heads == 0)

"""Model families: a table of toy transformers models, at least one per family, and helpers that tests use on them.

To add a family, add an entry: `test_families.py` runs every check on every entry.
"""

import functools
import os
import warnings
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from striped_attention import huggingface
from striped_attention.core.oracle import dense_attention
from striped_attention.models.layers import after, before, logits, scale_embedding, split_layer
from striped_attention.models.rotary import RopeScaling

LENGTH, VOCABULARY, END = 48, 61, 7
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH)).astype(np.int32)
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    bos_token_id=5,
    eos_token_id=END,
    pad_token_id=None,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10_000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=256,
)
YARN = dict(rope_type="yarn", rope_theta=10_000.0, factor=4.0, beta_fast=8.0, original_max_position_embeddings=256)


def longrope(original, pairs):
    """Return Phi's rope scaling with different factors for every pair, as a configuration and as parsed from it."""
    short, long = ([first + i / 2 for i in range(pairs)] for first in (1.0, 3.0))
    said = dict(rope_type="longrope", rope_theta=10_000.0, short_factor=short, long_factor=long)
    rope_scaling = RopeScaling("longrope", 1024 / original, original, short=tuple(short), long=tuple(long))
    return dict(rope_parameters=said, original_max_position_embeddings=original), rope_scaling


GEMMA = dict(head_dim=24, query_pre_attn_scalar=16, sliding_window=7)
LOCAL = dict(rope_type="default", rope_theta=200.0)
LINEAR = dict(rope_type="linear", rope_theta=5000.0, factor=2.0)
LONG, LONG_STRETCH = longrope(4, 8)
SHORT, SHORT_STRETCH = longrope(64, 6)


class Model(NamedTuple):
    """A family's name in transformers, options that differ from SHAPE, and the expected fields of `ModelConfig`. Each
    of the fields in `matters` affects the scores."""

    family: str
    options: dict[str, Any]
    fields: dict[str, Any]
    matters: tuple[str, ...] = ()


MODELS = {
    "llama": Model("Llama", dict(rms_norm_eps=1e-3), dict(norm_epsilon=1e-3)),
    "llama, tied, linear": Model(
        "Llama",
        dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=2.0)),
        dict(tied=True, rope_theta=500.0, rope_scaling=RopeScaling("linear", 2.0)),
        ("rope_scaling",),
    ),
    "llama 3": Model(
        "Llama", dict(rope_parameters=LLAMA3), dict(rope_scaling=RopeScaling("llama3", 4.0, 256)), ("rope_scaling",)
    ),
    "mistral": Model("Mistral", dict(sliding_window=7, head_dim=24), dict(window=7, head_width=24), ("window",)),
    "qwen 2, tied": Model("Qwen2", dict(tie_word_embeddings=True), dict(biases=True, tied=True)),
    "qwen 2, yarn": Model(
        "Qwen2",
        dict(rope_parameters=YARN),
        dict(rope_scaling=RopeScaling("yarn", 4.0, 256, 1.0, 8.0)),
        ("rope_scaling",),
    ),
    "qwen 2, window": Model(
        "Qwen2",
        dict(use_sliding_window=True, sliding_window=5, max_window_layers=0, layer_types=["sliding_attention"] * 2),
        dict(biases=True, window=5),
        ("window",),
    ),
    "qwen 3": Model("Qwen3", dict(head_dim=16), dict(head_norms=True, head_width=None)),
    "qwen 3, alternating": Model(
        "Qwen3",
        dict(use_sliding_window=True, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
        dict(head_norms=True, head_width=128, window=5, full_every=2),
        ("window", "full_every"),
    ),
    "gemma 2": Model(
        "Gemma2",
        dict(**GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, num_hidden_layers=3),
        dict(
            **dict(head_width=24, window=7, full_every=2, attention_width=16, softcap=2.0, score_softcap=3.0),
            **dict(norms="around", centered_norms=True, activation="gelu_tanh", scaled_embedding=True, tied=True),
        ),
        (
            *("window", "full_every", "attention_width", "softcap", "score_softcap"),
            *("centered_norms", "activation", "scaled_embedding"),
        ),
    ),
    "gemma 3": Model(
        "Gemma3Text",
        dict(
            **GEMMA,
            num_hidden_layers=4,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(sliding_attention=LOCAL, full_attention=LINEAR),
        ),
        dict(
            **dict(head_width=24, window=7, full_every=3, attention_width=16, softcap=None, score_softcap=None),
            **dict(norms="around", head_norms=True, rope_theta=5000.0, local_theta=200.0, tied=True),
            rope_scaling=RopeScaling("linear", 2.0),
        ),
        ("window", "full_every", "local_theta", "rope_scaling"),
    ),
    "gemma 3, windows alone": Model(  # like the first layers of every Gemma 3
        "Gemma3Text",
        dict(**GEMMA, rope_parameters=dict(sliding_attention=LOCAL, full_attention=LINEAR)),
        dict(window=7, full_every=None, rope_theta=5000.0, local_theta=200.0, rope_scaling=RopeScaling("linear", 2.0)),
        ("window", "local_theta"),
    ),
    "phi 3": Model("Phi3", dict(sliding_window=9, tie_word_embeddings=False), dict(fused=True, window=9), ("window",)),
    "phi 3, long": Model(
        "Phi3", LONG, dict(fused=True, rope_scaling=LONG_STRETCH, rotary_width=None), ("rope_scaling",)
    ),
    "phi 4 mini, short": Model(
        "Phi3",
        dict(**SHORT, partial_rotary_factor=0.75, tie_word_embeddings=True),
        dict(fused=True, tied=True, rope_scaling=SHORT_STRETCH, rotary_width=12),
        ("rope_scaling",),
    ),
    "olmo 2": Model("Olmo2", dict(), dict(norms="after", wide_norms=True, norm_epsilon=1e-5)),
}


@functools.cache
def libraries():
    """Import torch and transformers, which takes seconds, without network access."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return torch, transformers


@functools.cache
def original(name):
    """Return a transformers model whose weights are all random and large enough to matter."""
    _, transformers = libraries()
    family, options, *_ = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **options})
    kind = family.removesuffix("Text")
    return randomised(getattr(transformers, f"{kind}ForCausalLM")(config), 0.25)


def randomised(model, size):
    """Return the model with random weights; those of norms stay near their initial values."""
    torch, _ = libraries()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=random)
            usual = 0.0 if type(model).__name__.startswith("Gemma") else 1.0
            weight.copy_(usual + 0.2 * noise if key.endswith("norm.weight") else size * noise)
    return model.eval()


def their_scores(model, tokens=TOKENS):
    torch, _ = libraries()
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.float().numpy()


def save(name, folder, **options):
    original(name).save_pretrained(folder, **options)
    return folder


def load(folder):
    """Load a folder with transformers, which must know every weight and miss none."""
    _, transformers = libraries()
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    return model.eval()


def stacked(folder):
    """Return the configuration and the weights of a folder in the form that our model takes, in float32."""
    config = huggingface.read_config(folder)
    found = {}
    for name, layer, array in huggingface.tensors(folder, config):
        found.setdefault((name, layer is None), []).append(np.asarray(array, np.float32))
    outside = {name: arrays[0] for (name, alone), arrays in found.items() if alone}
    return config, {**outside, "layers": {name: np.stack(x) for (name, alone), x in found.items() if not alone}}


def our_scores(config, weights, tokens=TOKENS):
    """Return the scores of our model without sharding: whole matrices, dense attention, sequence order."""
    length = tokens.shape[1]
    config = config.at_length(length)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    x = scale_embedding(config, jnp.asarray(weights["embedding"])[tokens])
    for i in range(config.layers):
        first, second = split_layer({name: jnp.asarray(w[i]) for name, w in weights["layers"].items()})
        layer = config.layer(i)
        q, k, v = before(layer, first, x, positions)
        options = dict(scale=layer.attention_scale, softcap=layer.softcap)
        x = after(layer, second, (x, dense_attention(q, k, v, layer.mask.dense(length), **options)), ())
    return np.asarray(logits(config, {name: jnp.asarray(weights[name]) for name in config.last}, x))


def largest_difference(a, b):
    return np.abs(a - b).max()

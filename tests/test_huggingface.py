"""Hugging Face format: logits match transformers in both directions, and a bad model gives a one-line error."""

import contextlib
import dataclasses
import json
import pathlib
import pickle
import re
import resource
import shutil
import struct
import tracemalloc
import types

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from striped_attention import huggingface
from striped_attention.errors import UsageError
from striped_attention.huggingface.config import config_json
from striped_attention.models.config import PRESETS, ModelConfig
from striped_attention.models.rotary import RopeScaling
from tests.families import (
    LLAMA3,
    SHAPE,
    YARN,
    largest_difference,
    libraries,
    load,
    longrope,
    original,
    our_scores,
    save,
    stacked,
    their_scores,
)


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        (dict(), "Llama"),
        (dict(head_width=10, dim=66), "Mistral"),  # Llama's configuration rejects it
        (dict(head_width=10), "Llama"),
        (dict(window=9, tied=True), "Mistral"),
        (dict(biases=True, head_width=24), "Qwen2"),
        (dict(head_norms=True, window=9), "Qwen3"),
        (dict(head_norms=True, window=9, full_every=2, layers=3), "Qwen3"),
        (dict(rope_scaling=RopeScaling("linear", 2.0)), "Llama"),
        (dict(rope_scaling=RopeScaling("yarn", 4.0, 256, 1.0, 8.0, amplitude=1.5), head_norms=True), "Qwen3"),
    ],
)
def test_our_own_models_give_the_same_scores_there(changes, architecture, tmp_path):
    shape = dict(layers=2, dim=64, ffn=48, heads=4, kv_heads=2, vocabulary=61)
    config = ModelConfig(**{**shape, **changes})
    random = np.random.default_rng(2)
    weights = jax.tree.map(
        lambda shape: 0.25 * random.standard_normal(shape, np.float32),
        config.shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    huggingface.write(tmp_path / "model", config, named(weights), "float32", length=1024)
    model = load(tmp_path / "model")
    assert type(model).__name__ == f"{architecture}ForCausalLM"
    assert huggingface.read_config(tmp_path / "model") == config
    truth = their_scores(model)
    assert truth.std() > 0.1
    assert largest_difference(our_scores(config, weights), truth) < 1e-4


def named(weights):
    """Yield the weights of a model in the form that `write` takes."""
    for name, array in weights.items():
        if name != "layers":
            yield name, None, array
    for name, arrays in weights["layers"].items():
        for layer, array in enumerate(arrays):
            yield name, layer, array


def test_many_files_are_one_model(tmp_path):
    whole, parts = (
        save("qwen 2, tied", tmp_path / "whole"),
        save("qwen 2, tied", tmp_path / "parts", max_shard_size="40KB"),
    )
    assert len(list(parts.glob("*.safetensors"))) > 2
    (config, expected), (_, weights) = stacked(whole), stacked(parts)
    jax.tree.map(np.testing.assert_array_equal, weights, expected)
    ours = tmp_path / "ours"
    huggingface.write(ours, config, huggingface.tensors(parts, config), "float32", length=1024, shard_bytes=40_000)
    files = sorted(ours.glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    assert all(sum(x.nbytes for x in load_file(path).values()) <= 40_000 for path in files)
    index = json.loads((ours / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == config.parameters * 4
    assert largest_difference(their_scores(load(ours)), their_scores(original("qwen 2, tied"))) < 1e-6


@pytest.mark.parametrize("name", ["qwen 2, tied", "qwen 3"])
def test_parts_of_weights_are_cut_out_of_the_files(name, tmp_path):
    """Any slice of any weight can be read along any dimension, whether or not it is contiguous in the file."""
    folder = save(name, tmp_path, max_shard_size="40KB")
    config, random = huggingface.read_config(folder), np.random.default_rng(3)
    with huggingface.Files(folder, config) as files:
        for weight, layer, whole in huggingface.tensors(folder, config):
            everything = tuple(slice(None) for _ in whole.shape)
            np.testing.assert_array_equal(files.part(weight, layer, everything), whole)
            for i, size in enumerate(whole.shape):
                start, stop = sorted(random.choice(size + 1, 2, replace=False).tolist())
                index = (*everything[:i], slice(start, stop), *everything[i + 1 :])
                np.testing.assert_array_equal(files.part(weight, layer, index), whole[index], f"{weight} {index}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_read_and_written_as_they_are(dtype, tmp_path):
    torch, transformers = libraries()
    source = save("qwen 3", tmp_path / "float32")
    transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(tmp_path / "theirs")
    config = huggingface.read_config(tmp_path / "theirs")
    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    theirs = [array for _, _, array in huggingface.tensors(tmp_path / "theirs", config)]
    assert {array.dtype for array in theirs} == {np.dtype(kind)}
    # Round float32 to the same dtype here instead of in transformers.
    huggingface.write(tmp_path / "ours", config, huggingface.tensors(source, config), dtype, length=1024)
    for expected, (_, _, ours) in zip(theirs, huggingface.tensors(tmp_path / "ours", config), strict=True):
        np.testing.assert_array_equal(expected, ours)
    model = load(tmp_path / "ours")
    assert model.dtype == getattr(torch, dtype)


def test_files_of_older_versions_are_read(tmp_path):
    """Older files also store values that can be computed, and a tied matrix twice or under its other name."""
    save("qwen 2, tied", tmp_path)
    path, name = tmp_path / "model.safetensors", "model.embed_tokens.weight"
    config, expected = stacked(tmp_path)
    weights = load_file(path)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    weights["lm_head.weight"] = weights[name]
    save_file(weights, path)
    jax.tree.map(np.testing.assert_array_equal, stacked(tmp_path)[1], expected)
    del weights[name]
    save_file(weights, path)
    jax.tree.map(np.testing.assert_array_equal, stacked(tmp_path)[1], expected)
    save_file({**weights, name: -weights["lm_head.weight"]}, path)
    with one_line(r"holds model.embed_tokens.weight and lm_head.weight, which differ.*tie_word_embeddings"):
        huggingface.tensors(tmp_path, config)


def test_one_weight_is_in_memory_at_a_time(tmp_path):
    config = ModelConfig(layers=8, dim=128, ffn=512, heads=4, kv_heads=4, vocabulary=512)
    one = 4 * 128 * 512
    names = huggingface.weight.weights(config)
    arrays = ((w.name, w.layer, np.zeros(w.shape, np.float32)) for w in names)
    tracemalloc.start()
    huggingface.write(tmp_path / "model", config, arrays, "float32", length=1024)
    for _ in huggingface.tensors(tmp_path / "model", config):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert config.parameters * 4 > 30 * one
    assert peak < 4 * one


LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", **SHAPE, rms_norm_eps=1e-5)
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
GEMMA2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
GEMMA3 = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
OLMO2 = {**LLAMA, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
CAPS = dict(attn_logit_softcapping=None, final_logit_softcapping=None)
SIX, SU = dict(num_hidden_layers=7), dict(longrope(64, 8)[0]["rope_parameters"], rope_type="su")
BOTH = dict(sliding_attention=dict(rope_theta=5), full_attention=dict(rope_theta=6, rope_type="linear", factor=2))
MSCALE = dict(mscale=0.7, mscale_all_dim=1.0)
SLIDING = dict(use_sliding_window=True, sliding_window=8)


def yarn(length, amplitude=None):
    return RopeScaling("yarn", 4.0, length, slow=1.0, fast=8.0, amplitude=amplitude)


def alternating(full_every, layers):
    return ["sliding_attention" if (i + 1) % full_every else "full_attention" for i in range(layers)]


def config_of(folder, base, **changes):
    said = {key: value for key, value in {**base, **changes}.items() if value is not ...}  # `...` removes the key
    (folder / "config.json").write_text(json.dumps(said))
    return huggingface.read_config(folder)


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        (LLAMA, dict(), dict(kv_heads=2, head_width=None, rope_theta=10_000.0, norm_epsilon=1e-5, tied=False)),
        (LLAMA, dict(architectures=...), dict(layers=2)),
        (LLAMA, dict(model_type=...), dict(layers=2)),
        (LLAMA, dict(rms_norm_eps=..., num_key_value_heads=...), dict(norm_epsilon=1e-6, kv_heads=4)),
        (LLAMA, dict(num_key_value_heads=None, head_dim=None), dict(kv_heads=4, head_width=None)),
        (LLAMA, dict(head_dim=20, sliding_window=8), dict(head_width=20, window=None)),
        (LLAMA, dict(rope_theta=500_000), dict(rope_theta=500_000.0, rope_scaling=None)),
        (LLAMA, dict(rope_theta=2, rope_parameters=dict(rope_type="default", rope_theta=3)), dict(rope_theta=3.0)),
        (LLAMA, dict(rope_scaling=dict(type="linear", factor=2)), dict(rope_scaling=RopeScaling("linear", 2.0))),
        (LLAMA, dict(rope_scaling=LLAMA3), dict(rope_scaling=RopeScaling("llama3", 4.0, 256, 1.0, 4.0))),
        (
            QWEN2,
            dict(rope_scaling=dict(type="yarn", factor=4)),
            dict(rope_scaling=RopeScaling("yarn", 4.0, 1024, 1.0, 32.0)),
        ),
        (QWEN2, dict(rope_scaling=YARN | dict(attention_factor=1.5)), dict(rope_scaling=yarn(256, 1.5))),
        (QWEN2, dict(rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=1.0)), dict(rope_scaling=yarn(256, 1.0))),
        (QWEN2, dict(rope_scaling=YARN, original_max_position_embeddings=128), dict(rope_scaling=yarn(128))),
        (MISTRAL, dict(), dict(window=4096)),
        (MISTRAL, dict(sliding_window=None), dict(window=None)),
        (MISTRAL, dict(num_key_value_heads=..., num_attention_heads=16), dict(kv_heads=8)),
        (QWEN2, dict(sliding_window=8), dict(biases=True, window=None)),
        (QWEN2, dict(**SLIDING), dict(window=None)),  # the first 28 layers have none
        (QWEN2, dict(**SLIDING, max_window_layers=0), dict(window=8)),
        (QWEN3, dict(**SLIDING, layer_types=["sliding_attention"] * 2), dict(window=8, head_norms=True)),
        (QWEN3, dict(layer_types=["full_attention"] * 2), dict(window=None, head_width=128)),
        (QWEN3, dict(tie_word_embeddings=True, head_dim=16), dict(tied=True, head_width=None)),
        (QWEN3, dict(**SLIDING, **SIX, layer_types=alternating(3, 7)), dict(window=8, full_every=3)),
        (GEMMA2, dict(), dict(window=4096, full_every=2, softcap=50.0, score_softcap=30.0, tied=True, head_width=256)),
        (GEMMA2, dict(**CAPS, tie_word_embeddings=False), dict(softcap=None, score_softcap=None, tied=False)),
        (GEMMA2, dict(head_dim=16, query_pre_attn_scalar=16), dict(head_width=None, attention_width=None)),
        (GEMMA2, dict(query_pre_attn_scalar=144, layer_types=["full_attention"] * 2), dict(
            attention_width=144, window=None)),
        (GEMMA2, dict(layer_types=["sliding_attention"] * 2), dict(window=4096, full_every=None)),
        (GEMMA3, dict(), dict(window=4096, full_every=None, rope_theta=1e6, local_theta=1e4, softcap=None)),
        (GEMMA3, dict(**SIX), dict(full_every=6, kv_heads=2)),
        (GEMMA3, dict(**SIX, sliding_window_pattern=4, rope_local_base_freq=5, rope_theta=6), dict(
            full_every=4, local_theta=5.0, rope_theta=6.0)),
        (GEMMA3, dict(rope_parameters=BOTH), dict(
            local_theta=5.0, rope_theta=6.0, rope_scaling=RopeScaling("linear", 2.0))),
        (GEMMA3, dict(rope_scaling=dict(rope_type="linear", factor=8.0)), dict(
            local_theta=1e4, rope_theta=1e6, rope_scaling=RopeScaling("linear", 8.0))),
        (PHI3, dict(rms_norm_eps=...), dict(fused=True, norm_epsilon=1e-5, window=None, rotary_width=None)),
        (PHI3, dict(sliding_window=2047, partial_rotary_factor=0.75), dict(window=2047, rotary_width=12)),
        (PHI3, dict(rope_scaling=SU, original_max_position_embeddings=64), dict(rope_scaling=longrope(64, 8)[1])),
        (OLMO2, dict(rms_norm_eps=...), dict(norms="after", wide_norms=True, norm_epsilon=1e-5, head_norms=False)),
    ],
)  # fmt: skip
def test_configurations_old_and_new(base, changes, expected, tmp_path):
    config = config_of(tmp_path, base, **changes)
    assert {field: getattr(config, field) for field in expected} == expected


def published(layers, dim, ffn, heads, kv_heads, vocabulary, **more):
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*names, "vocab_size"), (layers, dim, ffn, heads, kv_heads, vocabulary), strict=True), **more)


@pytest.mark.parametrize(
    ("base", "shape", "parameters"),
    [
        (LLAMA, published(32, 4096, 14336, 32, 8, 128256), 8_030_261_248),  # Llama 3.1 8B
        (LLAMA, published(16, 2048, 8192, 32, 8, 128256, head_dim=64, tie_word_embeddings=True), 1_235_814_400),
        (MISTRAL, published(32, 4096, 14336, 32, 8, 32000, sliding_window=4096), 7_241_732_096),  # 7B v0.1
        (MISTRAL, published(40, 5120, 14336, 32, 8, 131072, head_dim=128, sliding_window=None), 12_247_782_400),  # Nemo
        (QWEN2, published(24, 896, 4864, 14, 2, 151936, tie_word_embeddings=True), 494_032_768),  # Qwen 2.5 0.5B
        (QWEN3, published(28, 1024, 3072, 16, 8, 151936, head_dim=128, tie_word_embeddings=True), 596_049_920),
        (GEMMA2, published(26, 2304, 9216, 8, 4, 256000), 2_614_341_888),  # 2B
        (GEMMA3, published(26, 1152, 6912, 4, 1, 262144), 999_885_952),  # 1B
        (PHI3, published(32, 3072, 8192, 32, 32, 32064), 3_821_079_552),  # Phi-3 mini
        (PHI3, published(40, 5120, 17920, 40, 10, 100352), 14_659_507_200),  # Phi-4
        (PHI3, published(32, 3072, 8192, 24, 8, 200064, tie_word_embeddings=True), 3_836_021_760),  # Phi-4-mini
        (OLMO2, published(32, 4096, 11008, 32, 32, 100352), 7_298_617_344),  # 7B
    ],
)
def test_published_models_have_their_sizes(base, shape, parameters, tmp_path):
    assert config_of(tmp_path, base, **shape).parameters == parameters


@pytest.mark.parametrize(
    ("theta", "rope"),
    [
        (10_000.0, dict(rope_type="linear", factor=4.0)),
        (500_000.0, LLAMA3 | dict(factor=8.0, original_max_position_embeddings=8192)),  # Llama 3.1
        (500_000.0, LLAMA3 | dict(factor=32.0, original_max_position_embeddings=8192)),  # Llama 3.2
        (1_000_000.0, dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)),  # Qwen at 128k
        (10_000.0, dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, **MSCALE)),
        (10_000.0, dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=4096, attention_factor=1.1)),
    ],
)  # fmt: skip
def test_scaled_frequencies_are_those_of_transformers(theta, rope, tmp_path):
    _, transformers = libraries()
    said = dict(head_dim=128, rope_scaling=rope | dict(rope_theta=theta))
    rope_scaling = config_of(tmp_path, LLAMA, **said).rope_scaling
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**SHAPE, **said))
    ours = rope_scaling.frequencies(theta ** -(np.arange(0, 128, 2) / 128), theta)
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=1e-5)
    assert rope_scaling.scale == pytest.approx(theirs.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_can_be_written_and_read(preset, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(PRESETS[preset], "bfloat16", 2048, {})))
    assert huggingface.read_config(tmp_path) == PRESETS[preset]


@contextlib.contextmanager
def one_line(message):
    with pytest.raises(UsageError, match=message) as caught:
        yield
    assert "\n" not in str(caught.value)


BAD_CONFIGS = {
    r"has the architecture \['GPT2LMHeadModel'\] and type 'gpt2'. Supported are LlamaForCausalLM, Mistral": (
        LLAMA, dict(architectures=["GPT2LMHeadModel"], model_type="gpt2")),
    r"has the architecture \['LlamaForSequenceClassification'\]": (
        LLAMA, dict(architectures=["LlamaForSequenceClassification"])),
    r"has the architecture None and type None": (LLAMA, dict(architectures=..., model_type=...)),
    r"architecture \['LlamaForCausalLM'\] and type 'mistral'": (LLAMA, dict(model_type="mistral")),
    r"lacks hidden_size": (LLAMA, dict(hidden_size=...)),
    r"lacks num_hidden_layers": (LLAMA, dict(num_hidden_layers=...)),
    r"lacks vocab_size": (LLAMA, dict(vocab_size=None)),
    r"must give a number above 0 as intermediate_size; got '48'": (LLAMA, dict(intermediate_size="48")),
    r"must give a whole number as num_attention_heads; got 4.5": (LLAMA, dict(num_attention_heads=4.5)),
    r"describes an invalid model: A model's heads must be a multiple": (LLAMA, dict(num_key_value_heads=3)),
    r"has quantized weights \(gptq\)": (LLAMA, dict(quantization_config=dict(quant_method="gptq", bits=4))),
    r"must have silu as hidden_act; got 'gelu'": (LLAMA, dict(hidden_act="gelu")),
    r"sets attention_bias": (LLAMA, dict(attention_bias=True)),
    r"sets mlp_bias": (LLAMA, dict(mlp_bias=True)),
    r"sets attention_bias, which is not supported": (QWEN3, dict(attention_bias=True)),
    r"has a window of 8 and layers of \['full_attention', 'sliding_attention'\]. Supported is one": (
        QWEN2, dict(**SLIDING, max_window_layers=1)),
    r"a window of 8 and layers of \['full_attention', 'sliding": (
        QWEN3, dict(**SLIDING, layer_types=["full_attention", "sliding_attention"])),
    r"a window of None and layers of \['sliding_attention'\]": (QWEN3, dict(layer_types=["sliding_attention"] * 2)),
    r"a window of 8 and layers of \['full_attention'\]": (
        MISTRAL, dict(sliding_window=8, layer_types=["full_attention"] * 2)),
    r"layers of \['chunked_attention'\]": (LLAMA, dict(layer_types=["chunked_attention"] * 2)),
    r"must give a whole number as max_window_layers; got None": (QWEN2, dict(max_window_layers=None)),
    r"rope scaling of type 'dynamic'. Supported are default, linear, llama3, yarn": (
        LLAMA, dict(rope_scaling=dict(type="dynamic", factor=2.0))),
    r"rope scaling of type 'longrope'": (LLAMA, dict(rope_parameters=dict(rope_type="longrope"))),
    r"rope scaling of type 'linear'. Supported are default, longrope": (
        PHI3, dict(rope_scaling=dict(type="linear", factor=2.0))),
    r"must give 8 factors as long_factor, one per pair; got 7 of them": (
        PHI3, dict(rope_scaling=SU | dict(long_factor=[1.0] * 7))),
    r"must give 8 factors as short_factor, one per pair; got None": (
        PHI3, dict(rope_scaling=dict(type="longrope"))),
    r"must give a number above 0 as short_factor; got 0": (PHI3, dict(rope_scaling=SU | dict(short_factor=[0] * 8))),
    r"in the rope settings of layers with a window, must not scale frequencies .*got 'linear'": (
        GEMMA3, dict(rope_parameters=dict(sliding_attention=dict(rope_type="linear", factor=2.0)))),
    r"must have gelu_pytorch_tanh as hidden_activation; got 'gelu'": (GEMMA2, dict(hidden_activation="gelu")),
    r"lets tokens attend to later ones \(use_bidirectional_attention\)": (
        GEMMA3, dict(use_bidirectional_attention=True)),
    r"sets attn_logit_softcapping, which transformers ignores in Gemma 3": (
        GEMMA3, dict(attn_logit_softcapping=50.0)),
    r"is that of a Gemma 3 for text and images; only its language model, saved separately": (
        GEMMA3, dict(architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3")),
    r"a window of 4096 and layers of .*. Supported is one window for all layers, for all but every n-th, or for none": (
        GEMMA2, dict(layer_types=["full_attention", "sliding_attention"])),
    r"one set of rope settings for all layers; got": (
        LLAMA, dict(rope_parameters=dict(full_attention=dict(rope_type="default")))),
    r"must round the ends of yarn's ramp \(truncate true\); got False": (
        QWEN2, dict(rope_scaling=YARN | dict(truncate=False))),
    r"has a partial_rotary_factor of 0.5": (LLAMA, dict(partial_rotary_factor=0.5)),
    r"in its rope settings, lacks factor": (LLAMA, dict(rope_scaling=dict(rope_type="linear"))),
    r"lacks high_freq_factor": (LLAMA, dict(rope_scaling=LLAMA3 | dict(high_freq_factor=None))),
    r"must have the slow end of its ramp below the fast end; got 4.0 and 4.0": (
        LLAMA, dict(rope_scaling=LLAMA3 | dict(low_freq_factor=4.0))),
    r"must give a number above 0 as factor; got 0": (LLAMA, dict(rope_scaling=dict(type="linear", factor=0))),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_models_that_are_not_ours_get_one_clear_line(message, tmp_path):
    base, changes = BAD_CONFIGS[message]
    with one_line(re.escape(str(tmp_path / "config.json")) + ".*" + message):
        config_of(tmp_path, base, **changes)


def test_folders_without_a_configuration_get_one_clear_line(tmp_path):
    with one_line("meta-llama/Llama-3.1-8B is not a folder.*hf download"):
        huggingface.read_config(pathlib.Path("meta-llama/Llama-3.1-8B"))
    with one_line("config.json cannot be read: No such file"):
        huggingface.read_config(tmp_path)
    for text, message in (
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must hold a JSON object; got list"),
    ):
        (tmp_path / "config.json").write_text(text)
        with one_line(f"config.json {message}"):
            huggingface.read_config(tmp_path)


TINY = ModelConfig(layers=2, dim=8, ffn=12, heads=2, kv_heads=1, vocabulary=10)


def tiny(config=TINY):
    return ((w.name, w.layer, np.ones(w.shape, np.float32)) for w in huggingface.weight.weights(config))


@pytest.fixture
def folder(tmp_path):
    """A small model in one file."""
    huggingface.write(tmp_path / "model", TINY, tiny(), "float32", length=1024)
    return tmp_path / "model"


@pytest.fixture
def shards(tmp_path):
    """A small model in several files."""
    huggingface.write(tmp_path / "shards", TINY, tiny(), "float32", length=1024, shard_bytes=2000)
    return tmp_path / "shards"


def changed(folder, **changes):
    """Replace weights in a folder; None removes one."""
    path = folder / "model.safetensors"
    weights = {**load_file(path), **{name.replace("__", "."): x for name, x in changes.items()}}
    save_file({name: x for name, x in weights.items() if x is not None}, path)
    return path


BAD_WEIGHTS = {
    r"lacks the weight model.norm.weight of shape \[8\], which the model": dict(model__norm__weight=None),
    r"lacks the weight model.layers.1.self_attn.k_proj.weight of shape \[4, 8\]": dict(
        model__layers__1__self_attn__k_proj__weight=None),
    r"safetensors holds the weight model.norm.weight of shape \[9\], but the model .* needs shape \[8\]": dict(
        model__norm__weight=np.ones(9, np.float32)),
    r"safetensors holds the weight model.norm.weight as I32. Use the model in one of F32, F16, BF16": dict(
        model__norm__weight=np.ones(8, np.int32)),
    r"safetensors holds the weight model.norm.weight as F64": dict(model__norm__weight=np.ones(8)),
    r"safetensors holds the weight model.layers.0.self_attn.q_proj.bias, which the model": dict(
        model__layers__0__self_attn__q_proj__bias=np.ones(8, np.float32)),
    r"holds the weight model.layers.2.a and 1 more": dict(
        model__layers__2__a=np.ones(8, np.float32), model__layers__2__b=np.ones(8, np.float32)),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_WEIGHTS)
def test_weights_of_another_model_get_one_clear_line(message, folder):
    changed(folder, **BAD_WEIGHTS[message])
    with one_line(re.escape(str(folder)) + ".*" + message):
        huggingface.tensors(folder, TINY)


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_files_that_are_cut_short_get_one_clear_line(length, folder, shards):
    for path in (folder / "model.safetensors", sorted(shards.glob("*.safetensors"))[1]):
        path.write_bytes(path.read_bytes()[:length])
        with one_line(f"{re.escape(str(path))} is cut short or damaged.*Download it again"):
            huggingface.tensors(path.parent, TINY)


def test_files_with_another_content_get_one_clear_line(folder):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    path.write_bytes(content[:8] + b"x" * size + content[8 + size :])
    with one_line("is cut short or damaged"):
        huggingface.tensors(folder, TINY)
    path.unlink()
    path.mkdir()
    with one_line("model.safetensors cannot be read"):
        huggingface.tensors(folder, TINY)


def test_missing_files_get_one_clear_line(shards):
    names = [path.name for path in sorted(shards.glob("*.safetensors"))]
    (shards / names[1]).unlink()
    with one_line(f"lacks {names[1]}, which model.safetensors.index.json lists. Download the model again"):
        huggingface.tensors(shards, TINY)
    index = shards / "model.safetensors.index.json"
    for weight_map, message in (({}, "in weight_map"), ({"a": "../a.safetensors"}, "of its own folder; got ../a"), (
        {"a": "pytorch_model.bin"}, "must name .safetensors files")):  # fmt: skip
        index.write_text(json.dumps({"weight_map": weight_map}))
        with one_line(message):
            huggingface.tensors(shards, TINY)
    index.unlink()
    with one_line("holds no weights: neither model.safetensors nor model.safetensors.index.json"):
        huggingface.tensors(shards, TINY)


class Trap:
    def __reduce__(self):
        return exec, ("raise SystemExit('the pickle was opened')",)


def test_pickles_are_never_opened(folder):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    assert len(list(huggingface.tensors(folder, TINY))) == 21, "a pickle beside safetensors is ignored"
    (folder / "model.safetensors").unlink()
    with one_line(r"as a pickle \(pytorch_model.bin\).*never opened.*safe_serialization=True"):
        huggingface.tensors(folder, TINY)


def test_ids_and_the_tokenizer_travel_with_a_model(tmp_path):
    (tmp_path / "my.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"a": 1}')
    ids = dict(bos_token_id=1, eos_token_id=[2, 3])
    huggingface.write(tmp_path / "model", TINY, tiny(), "bfloat16", tmp_path / "my.json", length=77, ids=ids)
    said = json.loads((tmp_path / "model" / "config.json").read_text())
    assert said["eos_token_id"] == [2, 3]
    assert said["pad_token_id"] is None
    assert said["max_position_embeddings"] == 77
    assert said["torch_dtype"] == "bfloat16"
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_an_empty_folder_may_be_written_to_and_no_other(folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for target in (folder, folder / "config.json"):
        with one_line(f"{re.escape(str(target))} exists and is not empty. Choose a folder that is new or empty"):
            huggingface.write(target, TINY, tiny(), "float32", length=1024)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    huggingface.write(tmp_path / "link", TINY, tiny(), "float32", length=1024)
    huggingface.write(tmp_path / "deep" / "down", TINY, tiny(), "float32", length=1024)
    assert huggingface.read_config(tmp_path / "empty") == huggingface.read_config(tmp_path / "deep" / "down") == TINY


@contextlib.contextmanager
def files_of_at_most(size):
    """Limit the size of files, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_model_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def attempt(config=TINY, arrays=None, dtype="float32", folder=tmp_path / "model", **options):
        huggingface.write(folder, config, tiny(config) if arrays is None else arrays, dtype, length=1024, **options)

    with one_line("could not be written to .*model: File too large. Nothing was kept"), files_of_at_most(2500):
        attempt()
    with one_line("Models can be written in float32, float16, bfloat16; got 'float8'"):
        attempt(dtype="float8")
    with one_line("A model with biases, head_norms cannot be written: no Hugging Face family has all of it"):
        attempt(dataclasses.replace(TINY, biases=True, head_norms=True))
    with one_line("A model with rotary_width cannot be written"):
        attempt(dataclasses.replace(TINY, rotary_width=2))
    with one_line(r"with rope scaling linear and an amplitude \(2.0\) cannot be written"):
        attempt(dataclasses.replace(TINY, rope_scaling=RopeScaling("linear", 2.0, amplitude=2.0)))
    with one_line("The tokenizer .*none.json is not a file"):
        attempt(tokenizer=tmp_path / "none.json")
    with one_line("model.norm.weight has values beyond 65504.*Choose bfloat16 or float32"):
        attempt(arrays=[("norm", None, np.full(8, 1e5, np.float32))], dtype="float16")
    with pytest.raises(ValueError, match=r"weights of the model are missing, among them \('attention_norm', 0\)"):
        attempt(arrays=[])
    with pytest.raises(ValueError, match="norm of layer None was given twice"):
        attempt(arrays=[("norm", None, np.ones(8, np.float32))] * 2)
    with pytest.raises(ValueError, match=r"norm must have the shape \(8,\); got \(9,\)"):
        attempt(arrays=[("norm", None, np.ones(9, np.float32))])
    with pytest.raises(KeyboardInterrupt):
        attempt(arrays=interrupted())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10))
    with one_line("could not be written to .*model: it needs 0.0 MB and the disk has 0.0 MB left"):
        attempt()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with one_line("could not be written to .*file/model: (Not a directory|File exists)"):
        attempt(folder=tmp_path / "file" / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def interrupted():
    yield "norm", None, np.ones(8, np.float32)
    raise KeyboardInterrupt

"""Loading for generation: each device's shard of the fused weights, and sizes that follow from device memory."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from striped_attention import huggingface
from striped_attention.generation import room
from striped_attention.generation.fused import fuse
from striped_attention.generation.loading import load
from striped_attention.models.config import PRESETS, ModelConfig
from striped_attention.models.llama import init
from striped_attention.models.stages import AXES
from striped_attention.training.source import find
from tests.chat_model import write_model

SIZES = dict(layers=2, dim=24, ffn=32, vocabulary=40)
MODELS = {
    "grouped": ModelConfig(**SIZES, heads=4, kv_heads=2, head_width=10),  # 80 rows of qkv
    "biases": ModelConfig(**SIZES, heads=3, kv_heads=1, biases=True, tied=True),  # 40 rows: 8 devices split heads
}


def random_weights(config):
    """Return random weights, including norms and biases, which `init` sets to ones and zeros."""
    leaves, structure = jax.tree.flatten(init(config, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return jax.tree.unflatten(structure, [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


def write(folder, config, weights):
    def named():
        for name, x in weights.items():
            if name != "layers":
                yield name, None, np.asarray(x)
        for name, x in weights["layers"].items():
            yield from ((name, i, np.asarray(x[i])) for i in range(config.layers))

    huggingface.write(folder, config, named(), "float32", length=64)


@pytest.mark.parametrize("devices", [1, 3, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_in_parts_is_what_is_fused_from_whole_weights(tmp_path, name, devices):
    config, weights = MODELS[name], random_weights(MODELS[name])
    write(tmp_path / "model", config, weights)
    mesh = jax.make_mesh(
        (1, devices), AXES.everything, (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:devices]
    )
    layers = [{name: x[i] for name, x in weights["layers"].items()} for i in range(config.layers)]
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    placed = jax.tree.map(place, {**weights, "layers": layers}, config.layer_specs(devices))
    wanted, said = fuse(config, mesh, placed), []
    found = load(find(tmp_path / "model"), mesh, jnp.dtype("float32"), lambda done, total: said.append((done, total)))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)
    assert said[-1] == (config.parameters, config.parameters)
    half = load(find(tmp_path / "model"), mesh, jnp.dtype("bfloat16"))
    for a, b in zip(jax.tree.leaves(half), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b.astype(jnp.bfloat16))


def test_sizes_are_few_and_at_most_a_quarter_larger():
    sizes = [room.coarse(n) for n in range(1, 5000)]
    assert all(n <= size <= max(64, 1.25 * n) for n, size in enumerate(sizes, 1))
    assert [room.coarse(size) for size in sizes] == sizes == sorted(sizes)
    assert [size for size in sorted(set(sizes)) if size >= 1024] == [
        *(1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120)
    ]


def test_chunks_are_as_large_as_memory_allows():
    config = PRESETS["llama3-8b"]
    fixed = room.weight_bytes(config, 8, "bfloat16") + room.cache_bytes(config, 8, 1, 2**20, "bfloat16")
    chunks = []
    for budget in (8e9, 20e9, 40e9, 126e9):
        chunk = room.prefill_chunk(config, 8, 1, 2**20, 10**6, "bfloat16", fixed + budget)
        needs = room.prefill_bytes(config, 8, 1, 2**20, chunk, "bfloat16")
        assert needs <= budget
        assert chunk == 8 * room.LARGEST or room.prefill_bytes(config, 8, 1, 2**20, 2 * chunk, "bfloat16") > budget
        chunks.append(chunk)
    assert chunks == sorted(chunks)
    assert chunks[0] < chunks[-1] == 8 * room.LARGEST
    assert room.prefill_chunk(config, 8, 1, 2**20, 5000, "bfloat16", 1e12) == 8192, "no larger than the prompt"
    assert room.prefill_chunk(config, 8, 1, 2**20, 10**6, "bfloat16", 1.0) == room.LEAST


def test_compiled_programs_are_kept_between_runs(tmp_path):
    """With a fresh cache directory, the second start of `striped generate` compiles nothing new."""
    write_model(tmp_path / "model")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # keep all, however fast they compile
    command = [sys.executable, "-m", "striped_attention.cli", "generate", "--model", str(tmp_path / "model")]
    command += ["--prompt", "abc", "--max-tokens", "3", "--dtype", "float32"]
    kept = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "first token after" in done.stderr
        kept.append({path.name for path in (tmp_path / "cache/striped_attention/programs").glob("*-cache")})
    assert kept[0] == kept[1] != set()

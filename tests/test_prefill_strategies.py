"""Prefill is exact with every strategy, and `striped generate` chooses the one that is planned to be fastest."""

import dataclasses
import functools
import logging
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention.core.oracle import dense_attention
from striped_attention.errors import UsageError
from striped_attention.generation.config import GenerateConfig
from striped_attention.kernels import cudnn
from striped_attention.models.config import PRESETS
from tests.compare import factorings
from tests.test_cache import BATCH, LAYOUTS, assert_close, empty, text, truth

# tests/test_cache.py covers the plain ring.
CASES = [(devices, found) for devices in (2, 4, 8) for found in factorings(devices) if found.group in (4, devices)]
CASES += [(4, sa.strategy(heads=2)), (4, sa.strategy(inner=2)), (8, sa.strategy(gather=2, inner=2))]
HEADS = 24
OPTIONS = [
    {},
    {"bias": sa.alibi(np.linspace(0.1, 0.5, HEADS, dtype=np.float32))},
    {"sinks": np.linspace(-1, 1, HEADS, dtype=np.float32), "softcap": 2.0},
]


def prefill_pieces(cache, arrays, pieces, **options):
    """Prefill in chunks whose sizes differ between sequences; return the output, [batch, tokens, heads, dim]."""
    size, have, found = max(map(max, pieces)), np.zeros(BATCH, int), [[] for _ in range(BATCH)]
    run = jax.jit(functools.partial(sa.prefill_attention, **options))
    for counts in pieces:
        parts = [np.stack([np.roll(x[row], -have[row], axis=0)[:size] for row in range(BATCH)]) for x in arrays]
        parts = [cache.layout.permute(x, cache.devices, 1) for x in parts]
        out, cache = run(*parts, cache, counts=jnp.asarray(counts, jnp.int32))
        out = cache.layout.restore(np.asarray(out), cache.devices, 1)
        for row, count in enumerate(counts):
            found[row].append(out[row, :count])
        have += counts
    return np.stack([np.concatenate(parts) for parts in found])


@pytest.mark.parametrize(("devices", "strategy"), CASES, ids=[f"{n} as {s.heads}x{s.gather}" for n, s in CASES])
def test_prefill_is_exact_by_every_strategy(devices, strategy):
    """Prefill in chunks of up to 13 tokens is exact; cases vary layout, window, options and key heads (few divide)."""
    which = CASES.index((devices, strategy))
    kv_heads, window, options = [1, 2, 3, 8, 6][which % 5], [None, 7][which % 2], OPTIONS[which % 3]
    arrays = text(26, HEADS, kv_heads, 4)
    cache = empty(devices, LAYOUTS[which % 4], capacity=26, kv_heads=kv_heads, dim=4, window=window)
    found = prefill_pieces(cache, arrays, [(13, 5), (0, 13), (13, 8)], strategy=strategy, **options)
    assert_close(found, truth(*arrays, window, **options))


@pytest.mark.parametrize("strategy", ["heads", "gather", "auto"])
def test_strategies_by_name_beside_axes_for_batch_and_heads(strategy):
    mesh = jax.make_mesh((2, 2, 2), ("data", "sequence", "model"))
    where = dict(mesh=mesh, axis_name="sequence", spec=jax.P("data", "sequence", "model", None))
    cache = sa.KVCache.empty(BATCH, 16, 2, 8, layout=sa.striped(3), dtype="float32", **where)
    arrays = text(16)
    assert_close(prefill_pieces(cache, arrays, [(11, 7), (5, 9)], strategy=strategy), truth(*arrays))


@pytest.mark.parametrize("strategy", ["ring", sa.strategy(heads=2)], ids=str)
def test_a_cache_over_two_mesh_axes(strategy):
    """Prefill in two chunks and decoding are exact over two mesh axes in another order than the mesh's."""
    where = dict(mesh=jax.make_mesh((2, 2), ("gpu", "node"), devices=jax.devices()[:4]), axis_name=("node", "gpu"))
    cache = sa.KVCache.empty(BATCH, 16, 2, 8, layout=sa.striped(2), dtype="float32", **where)
    assert cache.devices == 4
    q, k, v = text(16)
    wanted = truth(q, k, v)
    assert_close(prefill_pieces(cache, (q, k, v), [(8, 8), (8, 8)], strategy=strategy), wanted)
    last = jax.jit(sa.decode_attention)(q[:, -1:], cache.append(jnp.asarray(k), jnp.asarray(v)))
    assert_close(last, wanted[:, -1:])


def test_bfloat16_by_heads_is_as_good_as_plain_attention_in_bfloat16():
    arrays = text(16, dtype=jnp.bfloat16)
    found = prefill_pieces(empty(4, sa.striped(), dtype="bfloat16"), arrays, [(8, 8), (8, 8)], strategy="heads")
    plain = dense_attention(*map(jnp.asarray, arrays), sa.causal().dense(16))
    error, allowed = (np.abs(np.asarray(x, np.float64) - truth(*arrays)).max() for x in (found, plain))
    assert error <= 2 * allowed


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            "rings",
            "strategy must be one of 'auto', 'ring', 'gather', 'heads', or sa.strategy(heads=…, gather=…, inner=…)",
        ),
        (sa.strategy(heads=3), "heads · gather · inner of a strategy must divide the 8 devices of the sequence axis"),
        ("heads", "4 heads cannot be shared by 8 devices. Use heads=4, and a ring or gather for the rest."),
        ([2], "got [2]."),
    ],
    ids=str,
)
def test_what_cannot_be(asked, message):
    q, k, v = text(8)
    with pytest.raises(ValueError, match=re.escape(message)):
        sa.prefill_attention(q, k, v, empty(8, sa.striped()), strategy=asked)


def test_cudnn_takes_exchanged_heads_but_no_gathered_keys(caplog):
    arrays, cache = text(16), empty(4, sa.striped(), capacity=16)
    with cudnn.emulated(), caplog.at_level(logging.INFO, "striped_attention"):
        for strategy in ("heads", "auto"):
            found = prefill_pieces(cache, arrays, [(8, 8), (8, 8)], strategy=strategy, kernel="cudnn")
            assert_close(found, truth(*arrays))
        assert "gather" not in next(line for line in caplog.messages if line.startswith("strategy='auto' takes"))
        with pytest.raises(NotImplementedError, match="not keys gathered from several devices"):
            prefill_pieces(cache, arrays, [(8, 8)], strategy="gather", kernel="cudnn")


def settle(devices=8, model="llama3-8b", capacity=65_536, platform="gpu", kind="NVIDIA H200", **options):
    config = GenerateConfig(model=pathlib.Path(), chunk=capacity, **options)
    return config.settle(PRESETS[model], devices, 1, capacity, platform, kind)


def test_generate_chooses_layout_and_strategy_together(monkeypatch):
    monkeypatch.setattr(cudnn.binding, "EMULATED", True)  # as if cuDNN were available
    assert settle() == (sa.striped(128), sa.strategy(gather=8))
    assert settle(strategy="heads") == (sa.striped(16), sa.strategy(heads=8))
    assert settle(strategy="ring") == (sa.striped(), sa.strategy())
    assert settle(1)[1] == sa.strategy()
    # Here and above, the stripes of eight devices together are as wide as a tile.
    assert settle(platform="cpu", kind="cpu", strategy="heads") == (sa.striped(32), sa.strategy(heads=8))
    assert settle(platform="cpu", kind="cpu", strategy="ring") == (sa.striped(256), sa.strategy())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(strategy="rings"), "--strategy: A strategy is written like ring, gather, heads, heads=2 or heads=2,inn"),
        (dict(strategy="heads=3"), "--strategy heads=3: heads · gather · inner of a strategy must divide the 8"),
        (dict(strategy="heads", devices=64), "--strategy heads: A strategy must divide a device's query heads equally"),
        (dict(strategy="gather", kernel="cudnn"), "--kernel cudnn cannot do this: "),
    ],
    ids=str,
)
def test_what_generate_cannot_do_is_one_sentence(monkeypatch, options, message):
    monkeypatch.setattr(cudnn.binding, "EMULATED", True)
    with pytest.raises(UsageError, match=re.escape(message)):
        settle(**options)


@pytest.mark.filterwarnings("ignore::striped_attention.SlowKernelWarning")
def test_a_kernel_for_generation_must_do_every_kind_of_layer(monkeypatch):
    monkeypatch.setattr(cudnn.binding, "EMULATED", True)
    plain = PRESETS["llama3-8b"]
    monkeypatch.setitem(PRESETS, "mixed", dataclasses.replace(plain, window=1024, full_every=2))
    monkeypatch.setitem(PRESETS, "capped", dataclasses.replace(plain, softcap=50.0))
    assert settle(1, kernel="cudnn") == settle(1)
    assert settle(8, "mixed")[1] == settle(8)[1], "chosen by the layers that see the most keys"
    with pytest.raises(UsageError, match=r"--kernel cudnn cannot do this: .* or those of a windowed cache"):
        settle(1, "mixed", kernel="cudnn")
    with pytest.raises(UsageError, match="--kernel cudnn cannot do this: It does not support softcap"):
        settle(1, "capped", kernel="cudnn")

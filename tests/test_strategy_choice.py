"""`strategy="auto"` in the library: its choices, its messages, and how masks and meshes affect strategies."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention.core.mask import Rule
from striped_attention.core.oracle import dense_attention
from striped_attention.kernels.contract import make_request
from striped_attention.kernels.cudnn import binding
from striped_attention.runtime.hardware import HARDWARE
from striped_attention.runtime.sharding import fast_neighbours
from striped_attention.strategies.choice import choose_strategy, fastest_that_fits
from striped_attention.strategies.hops import make_rings, needed_hops
from striped_attention.strategies.strategy import RING, candidates
from striped_attention.strategies.timeline import passes
from striped_attention.strategies.workload import adapted, messages_of
from tests.compare import FLOAT32_TOLERANCE, Shape, mesh_of, random_segments
from tests.test_ring import hops


def asked(devices, tokens, *, layout=None, mask=None, heads=(32, 8), kind="NVIDIA H200", platform="gpu"):
    """Make the kernel request of a ring with the shapes of llama3-8b."""
    q, k = (jax.ShapeDtypeStruct((1, tokens, n, 128), jnp.bfloat16) for n in heads)
    mask = sa.causal() if mask is None else mask
    layout = sa.striped() if layout is None else layout
    place = dict(platform=platform, device_kind=kind, here=False)
    return make_request(q, k, mask=mask, layout=layout, devices=devices, length=devices * tokens, **place)


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (asked(1, 65_536), RING),
        (asked(8, 8192), sa.strategy(heads=8)),
        (asked(16, 4096, heads=(16, 16)), sa.strategy(heads=8)),
        (asked(16, 8192, layout=sa.zigzag()), sa.strategy(heads=8)),
        (asked(64, 16_384, layout=sa.contiguous(), mask=sa.sliding_window(4096)), RING),
        (asked(8, 65_536, heads=(1, 1)), RING),
        (asked(16, 49_152, layout=sa.striped(128), platform="tpu", kind="TPU v4"), RING),
    ],
    ids=["one", "8 GPUs", "16 GPUs", "two nodes", "window", "one head", "16 v4"],
)
def test_what_auto_takes(request_, wanted, monkeypatch):
    """With cuDNN and a causal mask, GPUs divide the heads; windows, single heads and TPUs use a ring."""
    monkeypatch.setattr(binding, "EMULATED", True)
    assert choose_strategy("auto", request_) == wanted


def test_a_simpler_strategy_is_taken_where_others_are_hardly_faster():
    seconds, memory = {"ring": 1.009, "heads": 1.0, "gather": 0.98}, {"ring": 2, "heads": 1, "gather": 3}

    def taken(usable):
        return fastest_that_fits(list(seconds), seconds.__getitem__, memory.__getitem__, usable)

    assert [taken(usable) for usable in (3.0, 2.0, 1.0, 0.0)] == ["gather", "ring", "heads", "heads"]


@pytest.mark.parametrize(
    ("devices", "heads", "mixed"),
    [(16, 32, sa.strategy(heads=8, gather=2)), (8, 6, sa.strategy(heads=2, gather=4))],
    ids=str,
)
def test_heads_that_not_all_devices_can_share_go_with_gathered_keys(devices, heads, mixed):
    assert mixed in candidates(devices, heads, 8)
    assert len(candidates(4096, 32, 8)) <= 9


def test_trades_between_nodes_are_slow_for_the_part_that_leaves_them():
    """With 16 devices on two nodes, 8 of the 15 others are far. A pass has two exchanges, each with a latency."""
    (found,) = (one for one in sa.plan(16, 65_536, strategies=["heads"]).strategies if one.strategy.heads == 16)
    sent, hardware = found.workload.messages.all_to_all, HARDWARE["h100"]
    forward, _ = passes(found.workload, found.chosen, found.tiles, found.needed)
    assert forward.exposed == pytest.approx(sent * 8 / 15 / hardware.far_interconnect + 2 * hardware.far_latency)


def test_messages_have_the_latency_of_their_links():
    """Within a node, between nodes, and in a double ring, whose hop between nodes overlaps a whole inner round."""
    h100, v5p = HARDWARE["h100"], HARDWARE["v5p"]
    assert h100.latency < h100.far_latency
    assert v5p.latency < h100.latency, "a hop over ICI needs no kernel launch"
    asked = [sa.strategy(heads=8), sa.strategy(gather=8), sa.strategy(inner=8)]
    found = {str(one.strategy): one for one in sa.plan(16, 65_536, strategies=asked).strategies}
    assert {name: one.workload.latency for name, one in found.items()} == {
        **dict.fromkeys(("ring", "heads=8", "gather=8"), h100.far_latency),
        "inner=8": h100.latency,
    }
    assert sa.plan(8, 65_536, strategies=["ring"]).best.workload.latency == h100.latency
    for name, waits in (("heads=8", 2), ("gather=8", 1)):
        one = found[name]
        slower = dataclasses.replace(one.workload, hardware=dataclasses.replace(h100, latency=h100.latency + 1.0))
        (before, _), (after, _) = (passes(x, one.chosen, one.tiles, one.needed) for x in (one.workload, slower))
        assert after.exposed - before.exposed == pytest.approx(waits), name


def test_gathered_shards_enter_a_node_once_by_all_of_its_interfaces():
    """On two nodes of 8, gather=16 has 8 devices per node that share its interfaces; heads=8,gather=2 has one."""
    hardware = HARDWARE["h100"]
    found = {str(one.strategy): one.workload for one in sa.plan(16, 65_536, model="7b").strategies}
    for name, near in (("gather=16", 8), ("heads=8,gather=2", 1)):
        workload = found[name]
        assert workload.messages.slow(8)[0] == workload.messages.gather // near
        assert workload.gather_bandwidth == hardware.far_interconnect * near
    assert found["gather=8"].gather_bandwidth == hardware.interconnect
    few = dataclasses.replace(hardware, interconnect=1e9)
    assert few.gather_bandwidth(16) == few.interconnect, "limited by the interconnect within a node"


def test_weights_are_gathered_by_all_interfaces_of_a_node():
    """With few tokens on 64 devices, gathering weights dominates a step: bf16 weights and float32 gradients."""
    found = sa.plan(64, 65_536, layouts=[], strategies=["ring"]).best
    weights = 63 / 64 * 6 * found.setting.model.parameters
    layers = found.setting.model.layers * found.attention_seconds
    assert found.step_seconds - layers == pytest.approx(weights / (8 * HARDWARE["h100"].far_interconnect), rel=0.01)


def test_auto_takes_what_fits(monkeypatch, caplog):
    request = asked(16, 8192, layout=sa.striped(128))
    small = dataclasses.replace(HARDWARE["h200"], memory=1e6)
    monkeypatch.setattr("striped_attention.strategies.choice.hardware_of", lambda *_: small)
    with caplog.at_level(logging.WARNING, "striped_attention"):
        found = choose_strategy("auto", request, neighbours=8)
    tried = {adapted(one, request) for one in candidates(16, 32, 8)}
    assert messages_of(request, found).memory == min(messages_of(request, one).memory for one in tried)
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert f"takes {found}: none fits in the 0.00075 GB of a device, and this one needs the least" in caplog.text
    assert "Use more devices or shorter sequences." in caplog.text


def test_attention_by_default_is_exact_and_says_what_it_took(caplog):
    layout, shape = sa.striped(2), Shape(length=45)
    arrays = {name: jnp.asarray(shape.arrays(0)[name]) for name in "qkv"}
    mask = sa.documents(random_segments(np.random.default_rng(0), shape.batch, 45, longest=20))
    q, k, v = (layout.permute(x, devices=4) for x in arrays.values())
    with caplog.at_level(logging.INFO, "striped_attention"):
        out = sa.attention(q, k, v, mesh=mesh_of(4), axis_name="sequence", layout=layout, mask=mask)
    assert "strategy='auto' takes " in caplog.text
    assert "estimated for one layer's attention on 4 × cpu: ring " in caplog.text
    wanted = dense_attention(*arrays.values(), mask.dense(45))
    np.testing.assert_allclose(layout.restore(out, devices=4, length=45), wanted, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize(
    ("sizes", "axis", "neighbours"),
    [
        ({"sequence": 8}, "sequence", 8),
        ({"sequence": 16}, "sequence", 8),
        ({"data": 4, "sequence": 16, "model": 2}, "sequence", 4),
        ({"node": 4, "gpu": 4}, ("node", "gpu"), 4),
        ({"node": 4, "gpu": 16}, ("node", "gpu"), 16),
        ({"data": 2, "sequence": 4}, "sequence", 8),
        ({"sequence": 2, "model": 4}, "sequence", 8),
        ({"node": 2, "gpu": 4}, ("node", "gpu"), 4),
        ({"node": 4, "gpu": 2}, ("node", "gpu"), 2),
    ],
    ids=str,
)
def test_neighbours_with_a_fast_interconnect_come_from_the_mesh(sizes, axis, neighbours):
    """Mesh axes after the sequence's share the 8 GPUs of a node; of several sequence axes, the last one is a node."""
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    with jax.sharding.use_abstract_mesh(mesh):
        assert fast_neighbours(axis, "gpu", "NVIDIA H200") == neighbours
        assert fast_neighbours(axis, "tpu", "TPU v5p") == 8960  # all of them fit into one pod


def test_under_vmap_with_an_axis_name():
    """Devices emulated by `jax.vmap` have no collectives within groups, so "auto" chooses a ring."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 1, 8, 2, 4)).astype("float32"))
    options = dict(axis_name="s", layout=sa.contiguous(), mask=sa.causal())
    out = jax.vmap(lambda x: sa.attention_shard(x, x, x, **options), axis_name="s")(x)
    whole = x.reshape(1, 32, 2, 4)
    wanted = dense_attention(whole, whole, whole, sa.causal().dense(32))
    np.testing.assert_allclose(out.reshape(1, 32, 2, 4), wanted, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("strategy", ["heads", "gather", sa.strategy(heads=2)], ids=str)
def test_groups_under_vmap_with_an_axis_name_are_refused(strategy):
    x = jnp.ones((4, 1, 8, 4, 4))
    attend = functools.partial(sa.attention_shard, axis_name="s", layout=sa.contiguous(), mask=sa.causal())
    with pytest.raises(
        ValueError, match=r"axes of jax\.vmap, attention must use a ring over a single.*Pass strategy='ring'"
    ):
        jax.vmap(lambda x: attend(x, x, x, strategy=strategy), axis_name="s")(x)


def test_double_rings_are_planned_where_a_ring_leaves_its_node():
    assert sa.strategy(inner=8) in candidates(16, 32, 8)
    assert sa.strategy(inner=8) not in candidates(8, 32, 8)
    found = {str(one.strategy): one for one in sa.plan(16, 131_072, hardware="h200").strategies}
    ring, double = found["ring"], found["inner=8"]
    assert ring.attention_bytes == double.attention_bytes == ring.slow_bytes
    assert double.slow_bytes == ring.slow_bytes / 15  # one hop of 15
    assert found["heads=16"].slow_bytes < found["heads=16"].attention_bytes
    assert sa.plan(8, 65_536, hardware="h200").best.slow_bytes == 0
    few = sa.plan(16, 16 * 1024, hardware="h100", layouts=[sa.striped()], strategies=[sa.strategy(inner=8)])
    seconds = {str(one.strategy): one.attention_seconds for one in few.strategies}
    assert seconds["inner=8"] < seconds["ring"]  # a hop between nodes takes longer than the computation of a step


@pytest.mark.parametrize("strategy", ["gather", sa.strategy(gather=4), sa.strategy(gather=2, inner=2)], ids=str)
def test_windows_send_to_the_neighbours_that_need_keys_alone(strategy):
    """With every strategy, a window no longer than the tokens per device needs one hop, to the next device."""
    mesh, slots = mesh_of(8), 8
    x = jnp.ones((1, 8 * slots, 4, 4))
    options = dict(mesh=mesh, axis_name="sequence", layout=sa.contiguous(), mask=sa.sliding_window(slots))
    program = jax.make_jaxpr(functools.partial(sa.attention, strategy=strategy, **options))(x, x, x)
    assert [places for *_, places in hops(program.jaxpr)] == [1, 1]
    assert "all_gather" not in str(program)
    everything = jax.make_jaxpr(functools.partial(sa.attention, **{**options, "mask": sa.causal()}, strategy=strategy))
    assert "all_gather" in str(everything(x, x, x))


def test_a_double_ring_is_one_where_all_keys_are_needed():
    rings = make_rings(4, needed_hops(sa.striped(), Rule(prefix=0), 64, 64, 8), 8)
    assert [(ring.size, ring.stride, len(ring.offsets)) for ring in rings] == [(2, 4, 2), (4, 1, 4)]
    assert [rings[0].shift(group, 1) for group in range(8)] == [4, 5, 6, 7, 0, 1, 2, 3]
    assert [rings[1].shift(group, -1) for group in range(8)] == [3, 0, 1, 2, 7, 4, 5, 6]
    (single,) = make_rings(4, needed_hops(sa.contiguous(), Rule(window=8, prefix=0), 64, 64, 8), 8)
    assert single.offsets == (0, 1)

"""The ring sends no more than it must, before it computes, and its kernel runs exactly the tiles of the plan."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import striped_attention as sa
from striped_attention import kernel_xla
from striped_attention.count import count_pairs, count_tiles
from striped_attention.ring import needed_offsets
from tests.compare import mesh_of, random_segments

HEADS, KV_HEADS, DIM = 4, 2, 8


def program(devices, length, layout, mask, dtype="float32", backward=False, tile=(8, 4), heads=(HEADS, KV_HEADS)):
    """Attention, or its gradients, traced with all inputs already on their devices."""
    mesh = jax.make_mesh((devices,), ("sequence",), (AxisType.Auto,), devices=jax.devices()[:devices])
    sharding = NamedSharding(mesh, P(None, "sequence"))
    q, k = (jax.ShapeDtypeStruct((1, length, h, DIM), dtype, sharding=sharding) for h in heads)
    attend = functools.partial(sa.attention, mesh=mesh, axis_name="sequence", layout=layout, mask=mask, tile=tile)
    run = (lambda q, k, v: jax.vjp(attend, q, k, v)[1](q)) if backward else attend
    return jax.jit(run, out_shardings=sharding).trace(q, k, k)


def hops(jaxpr, times=1):
    """All (shape, dtype, places) that a traced program sends, as often as it sends them."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ppermute":
            ((source, target), *_) = equation.params["perm"]
            found += [(equation.outvars[0].aval.shape, str(equation.outvars[0].aval.dtype), target - source)] * times
        inner_times = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += hops(inner, inner_times)
    return found


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 8])
def test_forward_makes_one_hop_less_than_devices_with_key_heads_in_their_own_dtype(devices):
    sent = hops(program(devices, devices * 8, sa.striped(), sa.causal(), "bfloat16").jaxpr)
    assert sent == [((1, 8, KV_HEADS, DIM), "bfloat16", 1)] * 2 * (devices - 1)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 8])
def test_backward_adds_up_key_gradients_in_float32_with_no_more_hops(devices):
    """But for k and v in a ring of 4: see `sends_backward`."""
    both = hops(program(devices, devices * 8, sa.striped(), sa.causal(), "bfloat16", backward=True).jaxpr)
    shape = (1, 8, KV_HEADS, DIM)
    assert sorted(x[:2] for x in both) == sorted(
        [(shape, "bfloat16")] * (4 * (devices - 1) + 2 * (devices == 4)) + [(shape, "float32")] * 2 * (devices - 1)
    )


def test_hops_that_nobody_needs_are_skipped():
    slots = 8
    window = functools.partial(needed_offsets, window=slots, prefix=0, length=64, padded_length=64, devices=8)
    assert window(sa.contiguous()) == (0, 1)
    assert window(sa.zigzag()) == (0, 1, 2, 6, 7)
    assert window(sa.striped()) == tuple(range(8))
    assert needed_offsets(sa.contiguous(), None, 0, 64, 64, 8) == tuple(range(8))
    assert needed_offsets(sa.contiguous(), 1, 0, 64, 64, 8) == (0,)
    sent = hops(program(8, 64, sa.contiguous(), sa.sliding_window(slots)).jaxpr)
    assert [places for _, _, places in sent] == [1, 1]
    assert hops(program(8, 64, sa.contiguous(), sa.sliding_window(1), backward=True).jaxpr) == []
    far = hops(program(8, 64, sa.zigzag(), sa.sliding_window(slots), backward=True).jaxpr)
    assert {places for _, _, places in far} == {1, 4}


def computations(text):
    """The computations of a compiled program: name -> [(instruction, operation, operands, line)]."""
    found, current = {}, []
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if head:
            current = found.setdefault(head.group(1), [])
        instruction = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:,|$)", line)
        if instruction:
            name, operation, operands = instruction.groups()
            current.append((name, operation, re.findall(r"%([\w.\-]+)", operands), line))
    return found


def computes_attention(instruction, program):
    """Whether an instruction is a product of matrices, or runs something that contains one."""
    _, operation, _, line = instruction
    called = re.findall(r"(?:calls|to_apply|body|condition)=%([\w.\-]+)", line)
    return operation == "dot" or any(computes_attention(i, program) for name in called for i in program[name])


@pytest.mark.parametrize("backward", [False, True])
def test_no_attention_waits_for_a_transfer_that_its_own_step_starts(backward):
    found = computations(program(8, 64, sa.striped(), sa.causal(), backward=backward).lower().compile().as_text())
    loops = {
        re.search(r"body=%([\w.\-]+)", line).group(1) for c in found.values() for _, o, _, line in c if o == "while"
    }
    transfers = 0
    for body in (found[name] for name in loops):
        for start in (i for i in body if i[1].startswith("collective-permute")):
            transfers += 1
            late = {start[0]}
            for instruction in body:
                if late & set(instruction[2]):
                    late.add(instruction[0])
                    assert not computes_attention(instruction, found), f"{instruction[0]} waits for {start[0]}"
        if any(i[1].startswith("collective-permute") for i in body):
            assert any(computes_attention(i, found) for i in body), "a loop that sends must also compute"
    assert transfers >= (6 if backward else 2)


class TileCounter:
    """Counts the tiles that the xla kernel really runs, through a callback in each of them."""

    def __init__(self, monkeypatch):
        self.count = 0
        logits = kernel_xla._logits

        def counting(*args, **kwargs):
            jax.debug.callback(self._add)
            return logits(*args, **kwargs)

        monkeypatch.setattr(kernel_xla, "_logits", counting)
        jax.clear_caches()

    def _add(self):
        self.count += 1

    def of(self, run):
        self.count = 0
        jax.block_until_ready(run())
        jax.effects_barrier()
        return self.count


@pytest.mark.parametrize("layout", [sa.contiguous(), sa.striped(), sa.zigzag()], ids=repr)
def test_executed_tiles_are_the_planned_ones_forward_and_backward(layout, monkeypatch):
    devices, length, tile = 4, 90, (8, 4)
    counter = TileCounter(monkeypatch)
    ids = random_segments(np.random.default_rng(0), 2, length, longest=40)
    x = jnp.ones((2, layout.padded_length(length, devices), 2, 4))
    for mask in [sa.causal(), sa.documents(ids) & sa.sliding_window(30)]:
        attend = functools.partial(
            sa.attention,
            mesh=mesh_of(devices),
            axis_name="sequence",
            layout=layout,
            mask=mask,
            tile=tile,
            length=length,
        )
        rows = 2 if mask.length is None else 1  # a mask without documents serves both sequences
        planned = 2 * rows * count_tiles(layout, mask, length, devices, tile).sum()
        assert counter.of(functools.partial(attend, x, x, x)) == planned
        assert counter.of(functools.partial(gradients, attend, x)) == 2 * planned
    jax.clear_caches()


def gradients(attend, x):
    return jax.vjp(attend, x, x, x)[1](x)


def test_the_plan_shows_what_stripes_are_for():
    """Σ over steps of the busiest device, contiguous ÷ striped: 1.875 for 8 devices, and 1.5 for 2."""
    for devices, bound in [(2, 1.5), (8, 1.875)]:
        contiguous, striped = (
            count_pairs(layout, sa.causal(), 4096, devices).max(axis=0).sum()
            for layout in (sa.contiguous(), sa.striped())
        )
        assert contiguous / striped == pytest.approx(bound, rel=1e-2)
    assert count_pairs(sa.striped(), sa.causal(), 4096, 8).sum() == 4096 * 4097 // 2


@pytest.mark.parametrize("layout", [sa.contiguous(), sa.striped(), sa.striped(4), sa.zigzag()], ids=repr)
@pytest.mark.parametrize("mask", [sa.full(), sa.causal(), sa.sliding_window(9), sa.prefix(11)], ids=repr)
def test_the_plan_runs_no_tile_without_a_visible_pair(layout, mask):
    """Counted tile by tile in the whole picture, whatever `tile_spans` says."""
    length, devices, tile = 60, 4, (5, 3)
    padded = layout.padded_length(length, devices)
    picture = np.zeros((padded, padded), bool)
    picture[:length, :length] = mask.dense(length)
    order = layout.order(padded, devices).reshape(devices, -1)
    counted = np.zeros((devices, devices), int)
    for device in range(devices):
        for step in range(devices):
            block = picture[np.ix_(order[device], order[(device - step) % devices])]
            tiles = [
                block[i : i + tile[0], j : j + tile[1]].any()
                for i in range(0, len(block), tile[0])
                for j in range(0, len(block), tile[1])
            ]
            counted[device, step] = sum(tiles)
    np.testing.assert_array_equal(count_tiles(layout, mask, length, devices, tile), counted)


def test_the_plan_counts_documents_like_their_picture():
    ids = random_segments(np.random.default_rng(0), 2, 50, longest=20)
    mask = sa.documents(ids)
    for layout in (sa.contiguous(), sa.striped(4), sa.zigzag()):
        assert count_pairs(layout, mask, 50, 4).sum() == mask.dense(50).sum()
        assert count_tiles(layout, mask, 50, 4, (1, 1)).sum() >= mask.dense(50).sum()


def peak_bytes(devices, length, backward):
    traced = program(devices, length, sa.striped(), sa.causal(), backward=backward, tile=None, heads=(1, 1))
    memory = traced.lower().compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.argument_size_in_bytes


@pytest.mark.parametrize("backward", [False, True])
def test_memory_of_a_device_grows_with_its_share_of_the_length(backward):
    small, large = (peak_bytes(4, length, backward) for length in (8192, 32768))
    assert large < 4.2 * small
    scores = (32768 // 4) ** 2 * 4
    assert large < scores / 8
    assert peak_bytes(8, 32768, backward) < 0.6 * large

"""The ring sends only what is needed, before it computes, and its kernel runs exactly the planned tiles."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import striped_attention as sa
from striped_attention.core.mask import Mask, Rule
from striped_attention.kernels import xla as kernel_xla
from striped_attention.planning.work import count_pairs, count_tiles
from striped_attention.strategies.hops import needed_hops
from tests.compare import mesh_of, random_segments

HEADS, KV_HEADS, DIM = 4, 2, 8


def program(devices, length, layout, mask, dtype="float32", backward=False, tile=(8, 4), heads=(HEADS, KV_HEADS)):
    """Trace attention, or its gradients, with all inputs already sharded over the devices."""
    mesh = jax.make_mesh((devices,), ("sequence",), (AxisType.Auto,), devices=jax.devices()[:devices])
    sharding = NamedSharding(mesh, P(None, "sequence"))
    q, k = (jax.ShapeDtypeStruct((1, length, h, DIM), dtype, sharding=sharding) for h in heads)
    options = dict(mesh=mesh, axis_name="sequence", layout=layout, mask=mask, tile=tile, strategy="ring")
    attend = functools.partial(sa.attention, **options)
    run = (lambda q, k, v: jax.vjp(attend, q, k, v)[1](q)) if backward else attend
    return jax.jit(run, out_shardings=sharding).trace(q, k, k)


def hops(jaxpr, times=1):
    """Return (shape, dtype, devices moved) of every transfer in a traced program, repeated as often as it runs."""
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
    both = hops(program(devices, devices * 8, sa.striped(), sa.causal(), "bfloat16", backward=True).jaxpr)
    shape = (1, 8, KV_HEADS, DIM)
    assert sorted(x[:2] for x in both) == sorted(
        [(shape, "bfloat16")] * 4 * (devices - 1) + [(shape, "float32")] * 2 * (devices - 1)
    )


def test_needed_hops_are_those_at_which_some_block_is_visible():
    """The closed form equals a check of every block, for any layout, rule, padding and number of devices."""
    rng = np.random.default_rng(0)
    layouts = [sa.contiguous(), sa.zigzag(), *map(sa.striped, (1, 2, 3, 5, 8, 16))]
    for _ in range(800):
        layout, devices, length = (
            layouts[rng.integers(len(layouts))],
            int(rng.integers(1, 10)),
            int(rng.integers(1, 150)),
        )
        padded = layout.padded_length(length, devices) + 2 * devices * int(rng.integers(2))
        window = [None, int(rng.integers(1, 40)), 100][rng.integers(3)]
        prefix = [None, 0, 0, int(rng.integers(1, 40)), 200][rng.integers(5)]
        mask = Mask(Rule(window, prefix, [None, int(rng.integers(40)), 200][rng.integers(3)]))

        def sees(here, there, mask=mask, layout=layout, length=length, padded=padded, devices=devices):
            lo, hi = mask.bounds(layout.positions(here, padded, devices), length)
            return (
                layout.count_before(there, lo, padded, devices) < layout.count_before(there, hi, padded, devices)
            ).any()

        offsets = (o for o in range(1, devices) if any(sees(d, (d - o) % devices) for d in range(devices)))
        assert needed_hops(layout, mask.rule, length, padded, devices) == (0, *offsets), (layout, mask, length)


def test_hops_that_nobody_needs_are_skipped():
    slots = 8
    window = functools.partial(needed_hops, rule=Rule(window=slots, prefix=0), length=64, padded_length=64, devices=8)
    assert window(sa.contiguous()) == (0, 1)
    assert window(sa.zigzag()) == (0, 1, 2, 6, 7)
    assert window(sa.striped()) == tuple(range(8))
    assert needed_hops(sa.contiguous(), Rule(prefix=0), 64, 64, 8) == tuple(range(8))
    assert needed_hops(sa.contiguous(), Rule(window=1, prefix=0), 64, 64, 8) == (0,)
    assert window(sa.contiguous(), rule=Rule(window=slots, ahead=slots - 1)) == (0, 1, 7), "neighbours on both sides"
    sent = hops(program(8, 64, sa.contiguous(), sa.sliding_window(slots)).jaxpr)
    assert [places for _, _, places in sent] == [1, 1]
    assert hops(program(8, 64, sa.contiguous(), sa.sliding_window(1), backward=True).jaxpr) == []
    far = hops(program(8, 64, sa.zigzag(), sa.sliding_window(slots), backward=True).jaxpr)
    assert {places for _, _, places in far} == {1, 4}


def computations(text):
    """Return the computations of a compiled program: name -> [(instruction, operation, operands, line)]."""
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
    """Return whether an instruction is a matrix product or calls a computation that contains one."""
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


TILES = {0: 0, 1: 0}  # tiles run so far, by the axis of their queries: 0 forward, 1 backward


def run_tile(axis):
    TILES[axis] += 1


@pytest.mark.parametrize(
    ("layout", "packed"), [(sa.contiguous(), False), (sa.striped(), True), (sa.zigzag(), False), (sa.zigzag(), True)]
)
def test_executed_tiles_are_the_planned_ones_forward_and_backward(layout, packed, monkeypatch):
    """A callback counts the tiles that the xla kernel runs; a shape unique to this test makes it trace anew."""
    devices, length, tile, heads, dim = 3, 70, (8, 4), 2, 3
    logits = kernel_xla._logits

    def counting(*args, axis):
        jax.debug.callback(functools.partial(run_tile, axis))
        return logits(*args, axis=axis)

    monkeypatch.setattr(kernel_xla, "_logits", counting)
    ids = random_segments(np.random.default_rng(0), 2, length, longest=40)
    x = jnp.ones((2, layout.padded_length(length, devices), heads, dim))
    mask = sa.documents(ids) & sa.sliding_window(30) if packed else sa.causal()
    where = dict(mesh=mesh_of(devices), axis_name="sequence", layout=layout)
    attend = functools.partial(sa.attention, **where, mask=mask, tile=tile, length=length, strategy="ring")
    rows = 2 if mask.length is None else 1  # a mask without documents serves both sequences
    planned = heads * rows * count_tiles(layout, mask, length, devices, tile).sum()
    before = dict(TILES)
    jax.block_until_ready(jax.jit(lambda x: jax.vjp(attend, x, x, x)[1](x))(x))
    jax.effects_barrier()
    assert {axis: TILES[axis] - before[axis] for axis in TILES} == {0: planned, 1: planned}


def test_the_plan_shows_what_stripes_are_for():
    """Work of the busiest device, summed over steps, contiguous ÷ striped: 1.875 on 8 devices, and 1.5 on 2."""
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
    """Planned tiles equal those with a visible pair in the dense mask, counted without `tile_spans`."""
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

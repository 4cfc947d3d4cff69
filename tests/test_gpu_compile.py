"""Tests that need JAX's GPU compiler but no GPU (`make test-gpu-compile`): programs compiled for 1 to 16 H200s."""

import dataclasses
import functools
import importlib.util
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import striped_attention as sa
from striped_attention import cli
from striped_attention.compiling.topology import GPUS, describe
from striped_attention.generation import room
from striped_attention.generation.programs import Newest, Options, Programs
from striped_attention.generation.sample import Sampling
from striped_attention.kernels.contract import Block
from striped_attention.kernels.hopper import kernel, parts
from striped_attention.models.config import PRESETS
from striped_attention.models.stages import AXES
from striped_attention.runtime.compiler import GPU_OPTIONS
from striped_attention.runtime.schedule import traffic, transfers
from striped_attention.strategies.messages import Messages
from striped_attention.strategies.strategy import resolve
from striped_attention.training.config import TrainConfig
from striped_attention.training.step import Program

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs JAX's plugin for GPUs: make test-gpu-compile"
)
machine = functools.cache(describe)


@pytest.mark.parametrize("kind", GPUS)
def test_a_machine_of_eight(kind):
    devices = machine(f"{kind}:1x1x8")
    assert [device.device_kind for device in devices] == [f"NVIDIA {kind.upper()}"] * 8


@pytest.mark.parametrize(
    "options",
    [
        dict(dim=64, dtype="float16"),
        dict(dim=128),
        dict(dim=100, heads=(8, 1), slots=3000),
        dict(dim=192, value_dim=128, heads=(4, 4), batch=2),
        dict(dim=256),
        dict(dim=128, alibi=True, softcap=30.0),
    ],
    ids=str,
)
def test_the_kernel_for_hopper_compiles(options):
    """Both passes compile with NVIDIA's assembler, so shared memory and registers suffice."""
    compile_block(**options)


def compile_block(dim, value_dim=None, heads=(4, 2), slots=1024, batch=1, dtype="bfloat16", alibi=False, softcap=None):
    where = NamedSharding(Mesh(np.array(machine("h200:1x1x8")[:1]), ("one",)), PartitionSpec())
    shape = lambda *sizes, dtype=dtype: jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=where)  # noqa: E731
    rows, keys = (batch, slots, heads[0]), (batch, slots, heads[1])
    value_dim = value_dim or dim
    ranges, positions = shape(batch, slots, dtype="int32"), shape(slots, dtype="int32")

    def both(q, k, v, dout, start, end, positions):
        bias = sa.alibi(jnp.ones(heads[0])) if alibi else None
        block = Block(start, end, positions, positions, bias, scale=0.1, softcap=softcap)
        out, lse = kernel.attend(q)(k, v, block)
        return out, kernel.attend_grad(q, out, lse, dout)(k, v, block)

    arrays = shape(*rows, dim), shape(*keys, dim), shape(*keys, value_dim), shape(*rows, value_dim)
    return jax.jit(both).lower(*arrays, ranges, ranges, positions).compile()


def ring_of_eight(layout, mask, options, **more):
    return ring_of(8, "h200:1x1x8", layout, mask, options, **more)


def ring_of(devices, name, layout, mask, options, strategy="ring"):
    """Compile both passes for `devices` GPUs with 8,192 tokens each; they must need no more memory than planned."""
    mesh, length = sa.make_mesh({"sequence": devices}, machine(name)), 8192 * devices
    where = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    q, k = (jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16, sharding=where) for heads in (32, 8))
    if mask == "documents":  # as `documents(…).permute(layout, devices)` leaves it
        lo = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=where)
        mask = dataclasses.replace(sa.causal(), lo=lo, length=length, placed=(layout, devices))

    def both(q, k, v, dout, mask):
        attend = functools.partial(
            sa.attention,
            **dict(mesh=mesh, axis_name="sequence", layout=layout, mask=mask, kernel="hopper", strategy=strategy),
        )
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    compiled = jax.jit(both, compiler_options=options).lower(q, k, k, q, mask).compile()
    memory = compiled.memory_analysis()
    needed = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert needed <= Messages(32, 8, 128, resolve(strategy, devices), devices, 8192, 2).memory
    return compiled.as_text()


@pytest.mark.parametrize(
    ("layout", "mask"),
    [(sa.striped(128), "documents"), (sa.striped(1), sa.causal()), (sa.zigzag(), sa.sliding_window(20_000))],
    ids=str,
)
def test_every_transfer_of_a_ring_of_eight_is_hidden(layout, mask):
    """All transfers of keys, values and their gradients overlap with attention, forward and backward."""
    sent = transfers(ring_of_eight(layout, mask, GPU_OPTIONS))
    assert {transfer.dtype for transfer in sent} == {"bf16", "f32"}
    assert [transfer for transfer in sent if not transfer.hidden] == []


def test_without_the_options_some_are_not():
    """Without the compiler options some transfers are exposed, so the test above can fail."""
    sent = transfers(ring_of_eight(sa.striped(128), sa.causal(), {}))
    assert any(not transfer.hidden for transfer in sent)


def test_gathered_keys_come_while_others_are_attended_to():
    """The forward pass gathers keys and values in four groups of heads; only those of the first group are exposed."""
    program = ring_of_eight(sa.striped(128), "documents", GPU_OPTIONS, strategy="gather")
    gathered = transfers(program, "all-gather")
    assert 8 < len(gathered) <= 16
    assert [transfer.hidden for transfer in gathered[:8]].count(False) == 2
    assert sum(not transfer.hidden for transfer in gathered) <= 4
    assert transfers(program) == []


def test_a_double_ring_of_two_nodes_overlaps_with_attention():
    """On 16 GPUs with inner rings of 8, only the gradient sums of an inner ring's last round are exposed."""
    program = ring_of(16, "h200:1x2x8", sa.striped(128), sa.causal(), GPU_OPTIONS, strategy=sa.strategy(inner=8))
    sent = transfers(program)
    assert len(sent) > 30
    assert sum(not transfer.hidden for transfer in sent) <= 2
    assert {transfer.dtype for transfer in sent if not transfer.hidden} <= {"f32"}


def test_gathered_keys_and_hops_overlap_with_attention():
    """In a ring of 2 nodes that gather within each 8 GPUs, at most two hops are exposed and most gathers overlap."""
    program = ring_of(16, "h200:1x2x8", sa.striped(128), sa.causal(), GPU_OPTIONS, strategy=sa.strategy(gather=8))
    hops, gathers = transfers(program), transfers(program, "all-gather")
    assert sum(not transfer.hidden for transfer in hops) <= 2
    assert sum(transfer.hidden for transfer in gathers) > len(gathers) / 2


def test_traded_heads_leave_no_other_transfers():
    program = ring_of_eight(sa.striped(128), "documents", GPU_OPTIONS, strategy="heads")
    assert len(transfers(program, "all-to-all")) == 8  # q, k, v and out, and the gradients of each
    assert transfers(program) == transfers(program, "reduce-scatter") == []
    assert {transfer.dtype for transfer in transfers(program, "all-gather")} == {"s32"}  # the mask


def test_a_training_step_on_packed_documents(tmp_path, capsys):
    options = "--topology h200:1x1x8 --preset 1b --length 64k --kernel hopper --strategy ring --remat none"
    assert cli.main(["compile", *options.split(), "--output", f"{tmp_path}/said.json"]) == 0
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["kernel"] == "hopper"
    assert said["layout"] == "striped(128)"
    assert all(transfer["hidden"] for transfer in said["result"]["transfers"])
    assert "30 of 30" in capsys.readouterr().out


@pytest.mark.parametrize("remat", ["unrolled", "none", "attention"])
def test_a_step_runs_attention_once_per_layer(remat):
    """XLA does not run it again to store its results."""
    layers = 3
    config = TrainConfig(
        preset="debug", layers=layers, sequence_length=4096, kernel="hopper", heads=2, kv_heads=2, dim=256
    )
    config = dataclasses.replace(config, remat=remat, chunk=4096, strategy="ring")
    program = Program(config, sa.make_mesh({"data": 1, "sequence": 1}, machine("h200:1x1x8")[:1]))
    lines = [line for line in program.compiled.as_text().splitlines() if re.search(r" custom-call\(.*mosaic_gpu", line)]
    names = [re.search(r"hopper_(\w+?)/", line)[1] for line in lines]
    backward = ["gradients"] if parts.can_add() else ["query_grads", "key_grads"]
    assert sorted(names) == sorted(["forward", *backward] * (layers if remat == "unrolled" else 1))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_step_adds_nothing_up_in_changing_order(deterministic):
    """Deterministic steps scatter embedding gradients to unique indices; by default XLA lets threads race."""
    config = TrainConfig(preset="debug", sequence_length=2048, kernel="hopper", deterministic=deterministic)
    mesh = sa.make_mesh({"data": 1, "sequence": 8}, machine("h200:1x1x8"))
    scattered = re.findall(r" scatter\(.*", Program(config, mesh).compiled.as_text())
    assert scattered
    assert all("unique_indices=true" in line for line in scattered) is deterministic


def block_of_tokens(devices, batch, tmp_path):
    """Return the compiled program that decodes 16 tokens with two layers, its loop body as text, and `Programs`."""
    mesh = sa.make_mesh({AXES.batch: 1, AXES.sequence: devices}, machine("h200:1x1x8")[:devices])
    config = dataclasses.replace(PRESETS["1b"], layers=2)
    programs = Programs(config, mesh, Options(sa.striped(128), batch, 32_768, block=16))
    some = lambda dtype: jax.ShapeDtypeStruct((batch,), dtype, sharding=programs.state.lengths.sharding)  # noqa: E731
    newest = Newest(some(jnp.int32), some(bool), some(jnp.int32))
    arguments = programs.weights, programs.state, newest, some(jnp.int32), some(bool)
    shardings = (jax.tree.map(lambda x: x.sharding, programs.state), None, None)
    block = jax.jit(programs.loop(Sampling(), (2,), None), donate_argnums=1, out_shardings=shardings)
    compiled = block.lower(*arguments).compile(compiler_options={"xla_dump_to": str(tmp_path)})
    (steps,) = tmp_path.glob("*.thunk_sequence_after_thunk_passes.txt")
    return compiled, steps.read_text().split("  body:")[1], programs


@pytest.mark.parametrize("batch", [1, 8])
def test_a_token_is_one_cuda_graph_that_copies_no_cache_and_no_weight(batch, tmp_path):
    """The host launches one CUDA graph per token and does not synchronise between the tokens of a block."""
    compiled, body, programs = block_of_tokens(1, batch, tmp_path)
    assert re.findall(r"^    \d+: (\w+)", body, re.MULTILINE) == ["kCommandBuffer"]
    assert '"known_trip_count":{"n":"16"}' in compiled.as_text()
    kernels = len(re.findall("kCustomKernel|kCopy", body))
    assert kernels <= 2 * 18 + 20  # 18 per layer, and 20 outside of layers
    assert compiled.memory_analysis().temp_size_in_bytes < programs.caches[0].key.size * 2
    # An elementwise product of a weight and a vector would be written to memory before it is summed.
    smallest = 2048 * 2048
    results = " ".join(re.findall(r"= (.*?) fusion\(", compiled.as_text()))
    for shape in re.findall(r"\w+\[([\d,]+)\]", results):
        size = math.prod(map(int, shape.split(",")))
        assert size < smallest or size == programs.caches[0].key.size, shape


def test_decoding_on_eight_gpus_takes_four_messages_a_layer(tmp_path):
    compiled, _, _ = block_of_tokens(8, 8, tmp_path)
    sent = [len(transfers(compiled.as_text(), kind)) for kind in ("all-gather", "all-reduce")]
    assert sent == [2 * 2 + 1, 2 * 2 + 1]
    assert transfers(compiled.as_text()) == transfers(compiled.as_text(), "all-to-all") == []
    assert sum(traffic(compiled.as_text(), 8).values()) < 16 * 2 * 2048 * 2048  # bytes per 16 tokens: no weight is sent


@pytest.mark.parametrize(
    ("preset", "devices", "batch", "capacity", "chunk"),
    [("1b", 1, 1, 65_536, 32_768), ("llama3-8b", 8, 1, 65_536, 32_768), ("llama3-8b", 1, 8, 16_384, 16_384)],
)
def test_prefill_needs_no_more_memory_than_chunks_are_chosen_by(preset, devices, batch, capacity, chunk):
    """Chunk sizes rely on an estimate of 1 to 3 times the memory needed; a larger one would make chunks too small."""
    config = dataclasses.replace(PRESETS[preset], layers=1)
    mesh = sa.make_mesh({AXES.batch: 1, AXES.sequence: devices}, machine("h200:1x1x8")[:devices])
    options = dict(chunk=chunk, strategy="ring", kernel="hopper", stage_chunk=room.stage_chunk(batch))
    programs = Programs(config, mesh, Options(sa.striped(128), batch, capacity, **options))
    tokens = NamedSharding(mesh, AXES.tokens)
    x = jax.ShapeDtypeStruct((batch, chunk, config.dim), jnp.bfloat16, sharding=tokens)
    entry, lengths = programs.state.entries[0], programs.state.lengths
    layer = functools.partial(programs._prefill_layer, programs.layers[0], programs.caches[0])
    placed = (tokens, jax.tree.map(lambda cached: cached.sharding, entry))
    compiled = jax.jit(layer, donate_argnums=(1, 2), out_shardings=placed).lower(
        *(programs.weights["layers"][0], x, entry, lengths, lengths)
    )
    needed = compiled.compile().memory_analysis().temp_size_in_bytes
    assert needed <= room.prefill_bytes(PRESETS[preset], devices, batch, capacity, chunk, jnp.bfloat16) <= 3 * needed

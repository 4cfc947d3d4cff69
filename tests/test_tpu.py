"""Tests that need the TPU compiler (`make test-tpu`): programs are compiled, not only lowered, without a TPU."""

import functools
import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import striped_attention as sa
from striped_attention import cli
from striped_attention.compiling.topology import TPUS, describe
from striped_attention.errors import UsageError
from striped_attention.kernels import choice
from striped_attention.kernels.contract import Block
from striped_attention.kernels.tpu import kernel as kernel_pallas_tpu
from striped_attention.runtime import compiler
from striped_attention.runtime.schedule import transfers
from striped_attention.strategies.messages import Messages
from striped_attention.strategies.strategy import resolve
from tests.test_mesh import hops

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: make test-tpu")
PODS = {"v4": "v4:2x2x4", "v5e": "v5e:4x4", "v5p": "v5p:2x2x4", "v6e": "v6e:4x4", "tpu7x": "tpu7x:2x2x2"}

pod = functools.cache(describe)


def compile_block(devices, dim, dtype="bfloat16", heads=(4, 2), slots=4096, tile=None, alibi=False, softcap=None):
    """Compile both passes of the kernel over one block, for the first device."""
    mesh = Mesh(np.array(devices[:1]), ("one",), axis_types=(AxisType.Auto,))
    shape = lambda *sizes, dtype: jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))  # noqa: E731
    q, k = (shape(1, slots, n, dim, dtype=dtype) for n in heads)
    ranges, positions = shape(1, slots, dtype="int32"), shape(slots, dtype="int32")

    def both(q, k, v, dout, start, end, positions):
        bias = sa.alibi(jnp.ones(heads[0])) if alibi else None
        block = Block(start, end, positions, positions, bias, scale=0.1, softcap=softcap, tile=tile)
        out, lse = kernel_pallas_tpu.attend(q)(k, v, block)
        return out, kernel_pallas_tpu.attend_grad(q, out, lse, dout)(k, v, block)

    with jax.set_mesh(mesh):
        return jax.jit(both).lower(q, k, k, q, ranges, ranges, positions).compile()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kind", TPUS)
def test_the_kernel_compiles_for_every_generation(kind, dim):
    program = compile_block(pod(PODS[kind]), dim).as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == 2
    assert "striped_attention_forward" in program
    assert "striped_attention_backward" in program


@pytest.mark.parametrize(
    "options",
    [
        dict(dim=128, dtype="float32"),
        dict(dim=256, dtype="float32", alibi=True, softcap=3.0),
        dict(dim=128, alibi=True, softcap=3.0),
        dict(dim=100, heads=(8, 1)),
        dict(dim=128, slots=3000),
        dict(dim=128, tile=(256, 512), heads=(4, 4)),
        dict(dim=128, slots=262_144, heads=(1, 1)),
    ],
    ids=str,
)
def test_the_kernel_compiles_with_every_option(options):
    """Compiled for a v4, which has the least memory for tiles."""
    compile_block(pod(PODS["v4"]), **options)


@pytest.mark.parametrize("name", [*PODS.values(), "v4:4x4x4", "v5e:8x16", "v5p:4x4x8"])
def test_rings_follow_the_torus(name):
    chips = pod(name)
    mesh = sa.make_mesh({"data": 1, "sequence": len(chips)}, chips)
    assert max(hops([(*chip.coords, chip.core_on_chip) for chip in mesh.devices.flat])) == 1


def compile_attention(name, strategy, layout, **options):
    """Compile both passes of attention on all devices of a pod: 262,144 tokens, 16 heads of 128."""
    mesh = sa.make_mesh({"sequence": 16}, pod(name))
    spec = PartitionSpec(None, "sequence", None, None)
    x = jax.ShapeDtypeStruct((1, 262_144, 16, 128), jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def both(q, k, v, dout):
        where = dict(mesh=mesh, axis_name="sequence", layout=layout, mask=sa.causal(), strategy=strategy)
        out, pull = jax.vjp(functools.partial(sa.attention, **where), q, k, v)
        return out, pull(dout)

    options = {**sa.compiler_options(device=pod(name)[0]), **options}
    return jax.jit(both).lower(x, x, x, x).compile(compiler_options=options)


@pytest.mark.parametrize("layout", [sa.striped(1), sa.zigzag(), sa.contiguous()], ids=str)
def test_every_transfer_of_a_ring_of_16_is_hidden(layout):
    """Hops of keys, values and their gradients overlap with attention, forward and backward."""
    sent = transfers(compile_attention(PODS["v4"], "ring", layout).as_text())
    assert {transfer.dtype for transfer in sent} == {"bf16", "f32"}
    assert [transfer for transfer in sent if not transfer.hidden] == []


SPARSE_CORE = {  # as in docs/tpu.md
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_use_single_sparse_core_for_all_gather_offload": "true",
    "xla_tpu_enable_concurrent_sparse_core_offloading": "true",
    "xla_tpu_sparse_core_ici_overlap_limit": "2",
}


@pytest.mark.parametrize(
    ("kind", "strategy", "hidden", "options"),
    [  # per kind: the least number of transfers overlapped with attention, and the number of all transfers
        ("v4", "ring", {"collective-permute": (16, 16)}, {}),
        ("v4", "gather", {"all-gather": (8, 12), "all-reduce": (0, 8)}, {}),
        ("v4", "heads", {"all-to-all": (0, 8)}, {}),
        ("v4", sa.strategy(heads=4), {"collective-permute": (14, 16), "all-to-all": (0, 8)}, {}),
        ("v4", sa.strategy(heads=2, gather=2), {"collective-permute": (14, 16), "all-gather": (38, 58)}, {}),
        ("v5p", "ring", {"collective-permute": (16, 16)}, {}),
        ("v5p", "gather", {"all-gather": (8, 12), "all-reduce": (0, 8)}, SPARSE_CORE),
        ("v5p", "heads", {"all-to-all": (0, 8)}, {}),
        ("v5p", sa.strategy(heads=4), {"collective-permute": (16, 16), "all-to-all": (0, 8)}, {}),
        ("v5p", sa.strategy(heads=2, gather=2), {"collective-permute": (6, 16), "all-gather": (0, 58)}, {}),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "",
)
def test_strategies_hide_transfers_and_materialise_no_more_than_they_say(kind, strategy, hidden, options):
    """The first gather and the all-to-all exchanges cannot be overlapped: attention needs their results to start."""
    compiled = compile_attention(PODS[kind], strategy, sa.striped(1024), **options)
    program = compiled.as_text()
    for operation, (least, count) in hidden.items():
        sent = transfers(program, operation)
        assert len(sent) == count
        assert sum(transfer.hidden for transfer in sent) >= least
    # XLA turns reduce-scatters into all-reduces. Those of dk and dv add in float32.
    assert {transfer.dtype for transfer in transfers(program, "all-reduce")} <= {"f32"}
    says = Messages(16, 16, 128, resolve(strategy, 16), 16, 16_384, 2).memory
    found = compiled.memory_analysis()
    assert found.peak_memory_in_bytes < says
    assert found.temp_size_in_bytes < 1.2 * says  # allows for gaps between arrays


def compile_step(capsys, tmp_path, options):
    """Return what `striped compile` prints and writes."""
    assert cli.main(["compile", *options.split(), "--output", f"{tmp_path}/said.json"]) == 0
    return capsys.readouterr().out, json.loads((tmp_path / "said.json").read_text())


def test_the_papers_configuration(tmp_path, capsys):
    """16 v4 chips of 32 GB, 786,432 tokens: compiles, fits and overlaps all transfers; the work matches the bound."""
    out, said = compile_step(capsys, tmp_path, "--topology v4:2x2x4 --preset 1b --length 786432 --text whole")
    assert said["result"]["fits"]
    assert said["result"]["memory"] < 32e9
    assert len(said["result"]["transfers"]) == 18
    assert all(transfer["hidden"] for transfer in said["result"]["transfers"])
    assert "collective-permute overlapped with attention" in out
    assert "18 of 18" in out
    assert said["kernel"] == "pallas_tpu"
    assert said["longest_hop"] == 1
    assert 1.85 < said["work"]["over_contiguous"] <= said["work"]["bound"] == 2 - 1 / 16


def test_the_papers_larger_model(tmp_path, capsys):
    options = "--topology v4:2x2x4 --preset 3b --length 786432 --text whole --remat full"
    _, said = compile_step(capsys, tmp_path, options)
    assert said["result"]["fits"]
    assert said["result"]["memory"] < 32e9
    assert all(transfer["hidden"] for transfer in said["result"]["transfers"])


def test_what_does_not_fit_is_said(tmp_path, capsys, monkeypatch):
    """Also warns that the tokens per device have more tiles than the TPU kernel can list."""
    monkeypatch.setattr(choice, "_warned", set())
    with pytest.warns(sa.SlowKernelWarning, match="It lists at most 250,000 tiles"):
        out, said = compile_step(capsys, tmp_path, "--topology v5e:2x2 --preset 1b --length 4M")
    assert said["kernel"] == "xla"
    assert "It does not fit: " in out
    assert not said["result"]["fits"]
    assert said["result"]["memory"] > said["result"]["available"] > 14e9


def test_a_step_that_gathers_keys(tmp_path, capsys):
    """All-gathers of weights are not counted."""
    options = "--topology v4:2x2x4 --preset debug --length 16384 --text whole --strategy gather"
    out, said = compile_step(capsys, tmp_path, options)
    sent = said["result"]["transfers"]
    assert {transfer["kind"] for transfer in sent} == {"all-gather"}
    assert f"{sum(transfer['hidden'] for transfer in sent)} of {len(sent)}" in out
    assert "all-gather overlapped with attention" in out


def test_options_that_the_compiler_for_tpus_does_not_know(monkeypatch):
    device = pod(PODS["v4"])[0]
    known = sa.compiler_options(device=device)
    assert known == compiler.TPU_OPTIONS == sa.compiler_options("tpu")
    monkeypatch.setattr(compiler, "TPU_OPTIONS", {"xla_no_such_option": "1", **known})
    with pytest.warns(RuntimeWarning, match="does not know the option xla_no_such_option"):
        assert sa.compiler_options(device=device) == known


@pytest.mark.parametrize("name", ["v4:3x5x7", "cuda:1x1x8"])
def test_pods_that_do_not_exist(name):
    with pytest.raises(UsageError, match=f"--topology {name} cannot be compiled for on this machine: "):
        describe(name)


def test_rings_of_interpreted_tpus():
    """`attention` on 4 devices, with masks, layouts, options and odd lengths."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.interpreted_rings"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "no races"

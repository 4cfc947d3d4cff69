"""The cudnn kernel's pieces, checked without a GPU: plain JAX emulates the two masks that cuDNN supports."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from striped_bench.bench import problem
from striped_bench.bench.blocks import replay

import striped_attention as sa
from striped_attention.core.layout import Runs
from striped_attention.core.oracle import dense_partial
from striped_attention.errors import UsageError
from striped_attention.kernels import cudnn, xla
from striped_attention.kernels.choice import choose
from striped_attention.kernels.contract import Pattern, make_request
from striped_attention.kernels.cudnn import binding, kernel, pieces
from striped_attention.strategies.problem import Problem
from striped_attention.strategies.ring import ring_attention
from striped_attention.training import trainer
from striped_attention.training.config import TrainConfig

LAYOUTS = [sa.contiguous(), sa.striped(), sa.zigzag()]


@pytest.fixture
def emulated():
    with cudnn.emulated():
        yield


def covered(piece, slots):
    """Return the visible pairs of a block, [slots, slots], by its piece."""
    seen = np.zeros((slots, slots), bool)
    if piece is None:
        return seen
    (a, b), (c, d) = piece.rows, piece.keys
    i, j = np.arange(b - a)[:, None], np.arange(d - c)[None, :]
    part = (j <= i) if piece.causal else np.ones((b - a, d - c), bool)
    part = part if piece.window is None else part & (j > i - piece.window)
    inside = slice(max(a, 0), min(b, slots))
    seen[inside, c:d] = part[inside.start - a : inside.stop - a]
    return seen[::-1, ::-1] if piece.backwards else seen


def seen_by_pieces(block, slots):
    """Return the visible pairs of a block, [slots, slots], by the pieces that the kernel chooses."""
    at = lambda possible, ahead: possible.pieces[int(possible.which(int(ahead)))]  # noqa: E731
    possible = pieces.cases(block.pattern, slots)
    if possible is not None:
        return covered(at(possible, block.query_positions[0] - block.key_positions[0]), slots)
    width = slots // pieces.runs_of(block.pattern).count
    seen = np.zeros((slots, slots), bool)
    for i, j, possible, ahead in kernel._meetings(block):
        seen[i * width : (i + 1) * width, j * width : (j + 1) * width] = covered(at(possible, ahead), width)
    return seen


@pytest.mark.parametrize("layout", [*LAYOUTS, sa.striped(3)], ids=repr)
@pytest.mark.parametrize("members", [1, 2, 4])
def test_the_pieces_of_every_block_are_its_mask(layout, members):
    tried = 0
    for slots in (1, 2, 5, 6):
        length = slots * members
        if layout.padded_length(length, members) != length:
            continue
        runs = layout.runs(length, members)
        if runs is None or runs.count > pieces.MOST_RUNS:
            continue
        edges = {n + i for n in (2, slots, slots + 3, 2 * slots, length) for i in (-1, 0, 1)}
        for mask in (sa.full(), sa.causal(), *map(sa.sliding_window, sorted(edges - {0}))):
            ring = Problem("s", members, layout, length, length, cudnn, 1.0)
            for here, there in itertools.product(range(members), range(members)):
                block = ring.meetings(mask, None, here)(there, here == there)
                slot = np.arange(slots)
                truth = (block.start[0][:, None] <= slot) & (slot < block.end[0][:, None])
                np.testing.assert_array_equal(seen_by_pieces(block, slots), truth, err_msg=f"{mask} {here} {there}")
                tried += 1
    assert tried >= 5


def test_one_device_holds_one_run_whatever_the_stripe():
    for layout in (*LAYOUTS, sa.striped(3), sa.striped(256)):
        assert layout.runs(1024, 1) == Runs(1, 1)


@pytest.mark.parametrize("layout", [sa.striped(), sa.zigzag()], ids=repr)
def test_pieces_of_many_devices(layout):
    """The pieces are the same for a thousand devices as for eight."""
    few, many = (pieces.cases(Pattern(layout, n, n * 64, causal=True, window=None, own=False), 64) for n in (8, 1000))
    assert few.pieces == many.pieces


def test_a_block_is_one_call_where_it_can_be():
    """Every block is one cuDNN call, except for a window over zigzag's two distant runs, processed pair by pair."""
    for layout, window in itertools.product(LAYOUTS, (None, 100)):
        for own in (True, False):
            found = pieces.cases(Pattern(layout, 8, 8 * 64, causal=True, window=window, own=own), 64)
            assert (found is None) == (layout == sa.zigzag() and window is not None)
            assert found is None or len(found.pieces) <= (1 if own else 2 if window is None else 4)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize(
    ("mask", "members"),
    [(sa.causal(), 3), (sa.causal(), 4), (sa.full(), 2), (sa.sliding_window(5), 4), (sa.sliding_window(21), 6)],
    ids=str,
)
def test_a_ring_of_pieces_is_exact(layout, mask, members):
    length, dim = 48, 6  # not a multiple of 8
    rng = np.random.default_rng(0)
    q, dout = (jnp.asarray(x, jnp.float32) for x in rng.standard_normal((2, 2, length, 4, dim)))
    k, v = (jnp.asarray(x, jnp.float32) for x in rng.standard_normal((2, 2, length, 2, dim)))
    mesh = jax.make_mesh((members,), ("s",), devices=jax.devices()[:members])

    def attend(q, k, v):
        arrays = (layout.permute(x, members, 1) for x in (q, k, v))
        out = sa.attention(*arrays, axis_name="s", layout=layout, mask=mask, mesh=mesh, kernel="cudnn")
        return layout.restore(out, members, 1)

    def dense(q, k, v):
        return dense_partial(q, k, v, np.asarray(mask.dense(length)), scale=dim**-0.5).out

    def both(attend):
        def run(q, k, v, dout):
            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(dout)

        return jax.block_until_ready(jax.jit(run)(q, k, v, dout))

    found = [both(attend)]
    if members == 3:  # as the GPU tests run it
        found.append(replay(q, k, v, dout, kernel=cudnn, layout=layout, mask=mask, members=members))
    for results in found:
        for x, truth in zip(results, both(dense), strict=True):
            np.testing.assert_allclose(x, truth, atol=1e-5)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_padding_is_never_seen(layout):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(x, jnp.float32) for x in rng.standard_normal((3, 1, 30, 2, 8))]
    mesh = jax.make_mesh((4,), ("s",), devices=jax.devices()[:4])

    def ring(*arrays):
        arrays = (layout.permute(x, 4, 1, pad=jnp.nan) for x in arrays)
        options = dict(axis_name="s", layout=layout, mask=sa.causal(), mesh=mesh, kernel="cudnn", length=30)
        return layout.restore(sa.attention(*arrays, **options), 4, 1, length=30)

    def dense(*arrays):
        return dense_partial(*arrays, np.asarray(sa.causal().dense(30)), scale=8**-0.5).out

    def both(attend):
        def run(*arrays):
            out, pull = jax.vjp(attend, *arrays)
            return out, *pull(out)

        return jax.block_until_ready(jax.jit(run)(*arrays))

    for a, b in zip(both(ring), both(dense), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, equal_nan=False)


Q, K = (jax.ShapeDtypeStruct((1, 64, heads, 128), jnp.bfloat16) for heads in (8, 2))
CAN = dict(mask=sa.causal(), layout=sa.striped(), devices=4, platform="gpu", device_kind="NVIDIA A100", here=False)
CANNOT = {
    "not documents": dict(mask=sa.documents(np.zeros((1, 256), np.int32))),
    ", a prefix, a window": dict(mask=sa.prefix(3)),
    "a window to both sides": dict(mask=sa.window(3, 2)),
    "only with a causal mask": dict(mask=sa.window(3, None)),
    "other ranges": dict(mask=sa.ranges(0, np.arange(256))),
    "with striped\\(16\\) they are in 4 runs": dict(layout=sa.striped(16)),
    "not support softcap": dict(softcap=30.0),
    "not support bias": dict(bias=sa.alibi(np.ones(8, np.float32))),
    "not support tile": dict(tile=(128, 128)),
    "cannot mask padding": dict(mask=sa.full(), length=250),
}


@pytest.mark.parametrize("reason", CANNOT)
def test_what_it_cannot_do_names_the_kernel_that_can(reason):
    request = make_request(Q, K, **CAN)
    assert choose("cudnn", request).name == choose("auto", request).name == "cudnn"
    asked = make_request(Q, K, **{**CAN, **CANNOT[reason]})
    with pytest.raises(NotImplementedError, match=f"Kernel 'cudnn' cannot do this: .*{reason}.* Use kernel='xla'"):
        choose("cudnn", asked)
    assert choose("auto", asked).name == "xla"


def test_a_full_mask_needs_no_runs():
    assert choose("cudnn", make_request(Q, K, **{**CAN, "mask": sa.full(), "layout": sa.striped(16)})).name == "cudnn"


def test_dtypes_and_head_dimensions_it_cannot_do():
    for shape, dtype, reason in (((1, 8, 2, 128), jnp.float32, "float32"), ((1, 8, 2, 160), jnp.bfloat16, "got 160")):
        x = jax.ShapeDtypeStruct(shape, dtype)
        with pytest.raises(NotImplementedError, match=reason):
            choose("cudnn", make_request(x, x, **CAN))


def test_another_version_of_jax_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.99.1")
    assert binding.unavailable() == "It supports JAX 0.10 up to, but not including, 0.13; this is JAX 0.99.1."


def test_the_primitives_of_jax_are_there():
    """Abstract evaluation of JAX's primitives needs no GPU, and fails if JAX has changed their parameters."""
    lse = jax.ShapeDtypeStruct((1, 8, 64), jnp.float32)
    options = dict(scale=1.0, causal=True, window=5)
    out = jax.eval_shape(lambda *x: binding.forward(*x, **options), Q, K, K)
    assert [(x.shape, x.dtype) for x in out] == [(Q.shape, Q.dtype), (lse.shape, lse.dtype)]
    grads = jax.eval_shape(lambda *x: binding.backward(*x, **options), Q, K, K, Q, lse, Q)
    assert [x.shape for x in grads] == [Q.shape, K.shape, K.shape]


def test_a_ring_of_it_can_be_lowered_for_gpus():
    """Lowering uses all of JAX's rules for the primitives, including shard_map's types; only compiling needs a GPU."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("s",))

    def run(q, k, v):
        ring = Problem("s", 4, sa.striped(), 256, 256, cudnn, 1.0)
        attend = functools.partial(ring_attention, ring, mask=sa.causal())
        spec = jax.P(None, "s")
        return jax.shard_map(attend, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)(q, k, v)

    def both(q, k, v):
        out, pull = jax.vjp(run, q, k, v)
        return out, *pull(out)

    q, k = (jax.ShapeDtypeStruct((1, 256, heads, 128), jnp.bfloat16) for heads in (8, 2))
    text = jax.jit(both).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in text
    assert text.count("__cudnn$fmhaSoftmax") > text.count("__cudnn$fmhaSoftmaxBackward")


def test_training_deals_single_tokens_to_cudnn(monkeypatch):
    config = TrainConfig(sequence_length=8192, strategy="ring")
    assert config.make_layout(4, documents=False, platform="cpu") == sa.striped(256)
    monkeypatch.setattr(binding, "EMULATED", True)
    assert config.make_layout(4, documents=False, platform="gpu", kind="NVIDIA A100") == sa.striped(1)
    packed = dict(documents=True, platform="gpu")
    assert config.make_layout(4, **packed, kind="NVIDIA A100") == sa.striped(512), "a quarter of a device's tokens"
    assert config.make_layout(4, **packed, kind="NVIDIA H200") == sa.striped(128)
    assert dataclasses.replace(config, kernel="xla").make_layout(2, False, "gpu") == sa.striped(1024)
    assert dataclasses.replace(config, kernel="xla", tile=64).make_layout(4, False, "gpu") == sa.striped(64)
    assert dataclasses.replace(config, kernel="cudnn").make_layout(4, documents=True) == sa.striped(1), "in a dry run"
    sizes = {"data": 1, "sequence": 4}
    assert trainer.choose(config, sizes, False, "gpu", "NVIDIA A100") == "cudnn"
    with pytest.warns(sa.SlowKernelWarning, match="not documents"):
        assert trainer.choose(config, sizes, True, "gpu", "NVIDIA A100") == "xla"
    with pytest.raises(UsageError, match="not documents"):
        trainer.choose(dataclasses.replace(config, kernel="cudnn"), sizes, True, "gpu")


@pytest.mark.parametrize(("layout", "members"), [(sa.contiguous(), 2), (sa.striped(), 2), (sa.striped(), 8)], ids=repr)
def test_what_rounding_partial_results_costs(layout, members):
    """Rounding every block's results, as only cuDNN does, raises errors by less than 60 %. All else here is float32."""
    inputs = problem.make_inputs(1024, problem.Shape(2, 1, 64, "bfloat16"))
    _, *truth = problem.oracle(inputs, rows=np.arange(1024))

    def errors(kernel):
        found = replay(*map(jnp.asarray, inputs), kernel=kernel, layout=layout, mask=sa.causal(), members=members)
        apart = (np.asarray(x, np.float64) - y for x, y in zip(found, truth, strict=True))
        return np.array([np.sqrt(np.mean(x**2) / np.mean(y**2)) for x, y in zip(apart, truth, strict=True)])

    plain = errors(xla)
    assert plain.max() < 0.0017, "the error of the final rounding only"
    with cudnn.emulated():
        ratios = errors(cudnn) / plain
    print(f"{members} devices, {layout}: " + " ".join(f"{ratio:.2f}" for ratio in ratios))
    assert ((ratios > 1) & (ratios < 1.6)).all()

"""The cudnn kernel's pieces, checked without a GPU: cuDNN's two shapes of attention are played by plain JAX."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention import cudnn, kernel_cudnn
from striped_attention.attention import KERNELS, choose_kernel
from striped_attention.kernel import Block
from striped_attention.oracle import dense_partial
from striped_attention.replay import replay
from striped_attention.ring import Ring, ring_attention
from striped_attention.training.config import TrainConfig
from striped_attention.training.errors import UsageError
from striped_attention.training.trainer import choose

LAYOUTS = [sa.contiguous(), sa.striped(), sa.zigzag()]


def visible(queries, keys, causal, window):
    i, j = np.arange(queries)[:, None], np.arange(keys)[None, :]
    seen = (j <= i) if causal else np.ones((queries, keys), bool)
    return seen if window is None else seen & (j > i - window)


def play_forward(q, k, v, *, scale, causal, window=None):
    assert q.shape[-1] % 8 == 0, "cuDNN's rule"
    out, lse = dense_partial(q, k, v, visible(q.shape[1], k.shape[1], causal, window)[None], scale=scale)
    return [out, jnp.swapaxes(lse, 1, 2)]


def play_backward(q, k, v, out, lse, dout, *, scale, causal, window=None):
    group = q.shape[2] // k.shape[2]
    heads = lambda x: jnp.repeat(x, group, axis=2)  # noqa: E731
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, heads(k)) * scale
    p = jnp.where(visible(q.shape[1], k.shape[1], causal, window), jnp.exp(scores - lse[..., None]), 0)
    delta = jnp.swapaxes(jnp.sum(out * dout, axis=-1), 1, 2)
    ds = p * (jnp.einsum("bqhd,bkhd->bhqk", dout, heads(v)) - delta[..., None]) * scale
    fold = lambda x: x.reshape(*x.shape[:2], k.shape[2], group, -1).sum(3)  # noqa: E731
    dq = jnp.einsum("bhqk,bkhd->bqhd", ds, heads(k))
    return [dq, fold(jnp.einsum("bhqk,bqhd->bkhd", ds, q)), fold(jnp.einsum("bhqk,bqhd->bkhd", p, dout))]


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(cudnn, "forward", play_forward)
    monkeypatch.setattr(cudnn, "backward", play_backward)
    monkeypatch.setattr(cudnn, "unavailable", lambda _: None)
    monkeypatch.setattr(kernel_cudnn, "_DTYPES", ("float32",))


def covered(cases, which, slots):
    """What the rows of a block see, by its piece."""
    seen = np.zeros((slots, slots), bool)
    piece = cases[int(which)]
    if piece is None:
        return seen
    (a, b), (c, d) = piece.rows, piece.keys
    part = visible(b - a, d - c, piece.causal, piece.window)
    inside = slice(max(a, 0), min(b, slots))
    seen[inside, c:d] = part[inside.start - a : inside.stop - a]
    return seen[::-1, ::-1] if piece.backwards else seen


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("members", [1, 2, 3, 5])
def test_the_pieces_of_every_block_are_its_mask(layout, members):
    for slots in (2, 6) if layout.rounds == 2 else (1, 2, 5, 6):
        length = slots * members
        edges = {n + i for n in (2, slots, slots + 3, 2 * slots, length) for i in (-1, 0, 1)}
        for mask in (sa.full(), sa.causal(), *map(sa.sliding_window, sorted(edges - {0}))):
            ring = Ring("s", members, layout, length, length, kernel_cudnn, 1.0)
            for here, there in itertools.product(range(members), range(members)):
                block = ring.block(mask, None, here, there, own=here == there)
                slot = np.arange(slots)
                truth = (block.start[0][:, None] <= slot) & (slot < block.end[0][:, None])
                np.testing.assert_array_equal(seen_by_pieces(block, slots), truth, err_msg=f"{mask} {here} {there}")


def seen_by_pieces(block, slots):
    if not kernel_cudnn._in_halves(block):
        ahead = int(block.query_positions[0] - block.key_positions[0])
        cases, which = kernel_cudnn.pieces(block.pattern, slots, ahead)
        return covered(cases, which, slots)
    half = slots // 2
    seen = np.zeros((slots, slots), bool)
    for i, j in kernel_cudnn._MEETINGS:
        part = seen_by_pieces(kernel_cudnn._half_block(block, i, j), half)
        seen[i * half : (i + 1) * half, j * half : (j + 1) * half] = part
    return seen


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize(
    ("mask", "members"),
    [
        *((sa.causal(), members) for members in (2, 3, 4, 6)),
        (sa.full(), 4),
        (sa.sliding_window(5), 4),
        (sa.sliding_window(21), 6),
    ],
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

    again = replay(q, k, v, dout, kernel=kernel_cudnn, layout=layout, mask=mask, members=members)
    for a, b, truth in zip(both(attend), again, both(dense), strict=True):
        np.testing.assert_allclose(a, truth, atol=1e-5)
        np.testing.assert_allclose(b, truth, atol=1e-5)


@pytest.mark.usefixtures("played")
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
CAN = dict(
    softcap=None, bias=None, mask=sa.causal(), layout=sa.striped(), devices=4, tile=None, padded=False, platform="gpu"
)
CANNOT = {
    "not documents": dict(mask=sa.documents(np.zeros((1, 256), np.int32))),
    "or a prefix": dict(mask=sa.prefix(3)),
    "the layout is striped\\(16\\)": dict(layout=sa.striped(16)),
    "no softcap": dict(softcap=30.0),
    "no bias": dict(bias=sa.alibi(np.ones(8, np.float32))),
    "no tile": dict(tile=(128, 128)),
    "cannot hide padding": dict(mask=sa.full(), padded=True),
}


@pytest.mark.parametrize("reason", CANNOT)
def test_what_it_cannot_do_names_the_kernel_that_can(monkeypatch, reason):
    monkeypatch.setattr(cudnn, "unavailable", lambda _: None)
    assert choose_kernel("cudnn", Q, K, **CAN) == choose_kernel("auto", Q, K, **CAN) == "cudnn"
    with pytest.raises(NotImplementedError, match=f"Kernel 'cudnn' cannot do this: .*{reason}.* Use kernel='xla'"):
        choose_kernel("cudnn", Q, K, **{**CAN, **CANNOT[reason]})
    assert choose_kernel("auto", Q, K, **{**CAN, **CANNOT[reason]}) == "xla"


def test_dtypes_and_head_dimensions_it_cannot_do(monkeypatch):
    monkeypatch.setattr(cudnn, "unavailable", lambda _: None)
    for shape, dtype, reason in (((1, 8, 2, 128), jnp.float32, "float32"), ((1, 8, 2, 160), jnp.bfloat16, "got 160")):
        x = jax.ShapeDtypeStruct(shape, dtype)
        with pytest.raises(NotImplementedError, match=reason):
            choose_kernel("cudnn", x, x, **CAN)


def test_auto_says_what_it_takes_and_why(caplog):
    with caplog.at_level("INFO", "striped_attention"):
        assert choose_kernel("auto", Q, K, **CAN) == "xla"
    (said,) = caplog.messages
    assert said.startswith("kernel='auto' takes 'xla'. Not 'cudnn': It needs an NVIDIA GPU")


def test_another_version_of_jax_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.99.1")
    assert cudnn.unavailable("gpu") == "It knows how to call cuDNN through JAX 0.10 to before 0.13; this is JAX 0.99.1."


def test_the_primitives_of_jax_are_there():
    """Abstract evaluation needs no GPU: it fails if JAX has changed what they take."""
    lse = jax.ShapeDtypeStruct((1, 8, 64), jnp.float32)
    options = dict(scale=1.0, causal=True, window=5)
    out = jax.eval_shape(lambda *x: cudnn.forward(*x, **options), Q, K, K)
    assert [(x.shape, x.dtype) for x in out] == [(Q.shape, Q.dtype), (lse.shape, lse.dtype)]
    grads = jax.eval_shape(lambda *x: cudnn.backward(*x, **options), Q, K, K, Q, lse, Q)
    assert [x.shape for x in grads] == [Q.shape, K.shape, K.shape]


def test_a_ring_of_it_can_be_lowered_for_gpus():
    """All of JAX's rules for the primitives, those of shard_map's types among them; only compiling needs a GPU."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("s",))

    def run(q, k, v):
        ring = Ring("s", 4, sa.striped(), 256, 256, kernel_cudnn, 1.0)
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


def test_ranges_are_refused():
    block = Block(*np.zeros((4, 1, 8), np.int32))
    with pytest.raises(NotImplementedError, match="takes no ranges"):
        KERNELS["cudnn"].attend(jnp.zeros((1, 8, 2, 8)))(jnp.zeros((1, 8, 2, 8)), jnp.zeros((1, 8, 2, 8)), block)


def test_training_deals_single_tokens_to_cudnn(monkeypatch):
    config = TrainConfig(sequence_length=8192)
    assert config.make_layout(4, documents=False, platform="cpu") == sa.striped(256)
    monkeypatch.setattr(cudnn, "unavailable", lambda _: None)
    assert config.make_layout(4, documents=False, platform="gpu") == sa.striped(1)
    assert config.make_layout(4, documents=True, platform="gpu") == sa.striped(512), "a quarter of what a device has"
    assert dataclasses.replace(config, kernel="xla").make_layout(2, False, "gpu") == sa.striped(1024)
    assert dataclasses.replace(config, kernel="xla", tile=64).make_layout(4, False, "gpu") == sa.striped(64)
    assert dataclasses.replace(config, kernel="cudnn").make_layout(4, documents=True) == sa.striped(1), "in a dry run"
    sizes = {"data": 1, "sequence": 4}
    assert [choose(config, sizes, documents, jax.default_backend()) for documents in (False, True)] == ["cudnn", "xla"]
    with pytest.raises(UsageError, match="not documents"):
        choose(dataclasses.replace(config, kernel="cudnn"), sizes, True, jax.default_backend())

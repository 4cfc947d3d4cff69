"""Adapters: drop-in functions for Flax and for `jax.nn.dot_product_attention` give the answers of the originals."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import striped_attention as sa
from tests.compare import FLOAT32_TOLERANCE, mesh_of, random_segments

LENGTH, DEVICES = 21, 4
LAYOUTS = [sa.contiguous(), sa.striped(2), sa.zigzag()]


def arrays(heads=4, kv_heads=2, dtype="float32", batch=(2,), keys=LENGTH):
    rng = np.random.default_rng(0)
    shapes = [(*batch, *size, 8) for size in ((LENGTH, heads), (keys, kv_heads), (keys, kv_heads))]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def on_devices(layout, **options):
    return functools.partial(
        sa.dot_product_attention, axis_name="sequence", layout=layout, mesh=mesh_of(DEVICES), **options
    )


OPTIONS = [
    dict(
        zip(
            ("is_causal", "local_window_size", "key_value_seq_lengths", "query_seq_lengths", "scale"),
            values,
            strict=True,
        )
    )
    for values in itertools.product([False, True], [None, 5, (7, 2)], [None, [13, 21]], [None, [21, 4]], [0.2])
]


@pytest.mark.parametrize("keys", [LENGTH, 34], ids=["self", "cross"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_signature_of_jax_nn(options, keys):
    """Outputs and gradients are those of jax.nn.dot_product_attention for every combination of its options."""
    given = {k: np.array(v, np.int32) if isinstance(v, list) else v for k, v in options.items()}
    layout = LAYOUTS[OPTIONS.index(options) % 3]
    inputs = arrays(keys=keys)
    dout = jnp.asarray(np.random.default_rng(1).standard_normal(inputs[0].shape), jnp.float32)
    seen = np.ones((2, LENGTH), bool)
    if options["query_seq_lengths"] is not None:
        seen = np.arange(LENGTH) < given["query_seq_lengths"][:, None]
    if options["key_value_seq_lengths"] is not None and options["local_window_size"] is not None:
        # Queries whose whole window lies beyond the keys see nothing: 0 here, the mean of all values in jax.nn.
        left = options["local_window_size"] if options["local_window_size"] == 5 else 7
        seen &= np.arange(LENGTH) - left < given["key_value_seq_lengths"][:, None]

    def run(attend):
        out, pull = jax.vjp(lambda *x: jnp.where(seen[..., None, None], attend(*x, **given), 0), *inputs)
        return out, *pull(dout)

    found, wanted = (jax.jit(functools.partial(run, f))() for f in (on_devices(layout), jax.nn.dot_product_attention))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=FLOAT32_TOLERANCE)


def test_three_dimensions_residuals_and_implementations():
    q, k, v = (x[0] for x in arrays())
    layout = sa.striped()
    found = on_devices(layout)(q, k, v, is_causal=True, return_residual=True)
    wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, atol=FLOAT32_TOLERANCE)
    np.testing.assert_array_equal(on_devices(layout)(q, k, v, implementation="xla"), on_devices(layout)(q, k, v))
    with pytest.raises(NotImplementedError, match="cudnn"):
        on_devices(layout)(q, k, v, implementation="cudnn")


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_flax_modules(layout, library):
    """Multi-head attention modules of Flax, with packed documents as their mask, give the same losses and gradients."""
    ids = random_segments(np.random.default_rng(3), 2, LENGTH, longest=9)
    documents = sa.documents(ids)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, LENGTH, 16)), jnp.float32)
    attend = sa.attention_fn(axis_name="sequence", layout=layout, mesh=mesh_of(DEVICES))
    dense = documents.dense(LENGTH)[:, None]

    if library == "linen":
        module = nn.MultiHeadDotProductAttention(num_heads=4)
        weights = module.init(jax.random.key(0), x)
        call = lambda fn, weights, mask: module.clone(attention_fn=fn).apply(weights, x, mask=mask)  # noqa: E731
        plain = nn.dot_product_attention
    else:
        build = lambda fn: nnx.MultiHeadAttention(4, 16, attention_fn=fn, decode=False, rngs=nnx.Rngs(0))  # noqa: E731
        _, weights = nnx.split(build(nnx.dot_product_attention))
        call = lambda fn, weights, mask: nnx.merge(nnx.split(build(fn))[0], weights)(x, mask=mask)  # noqa: E731
        plain = nnx.dot_product_attention

    losses = [
        jax.jit(jax.value_and_grad(lambda w, fn=fn, mask=mask: jnp.sum(call(fn, w, mask) ** 2)))(weights)
        for fn, mask in ((attend, documents), (plain, jnp.asarray(dense)))
    ]
    for a, b in zip(*map(jax.tree.leaves, losses), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_models_that_permute_their_tokens_once():
    """With order="layout" nothing is permuted, in global code and inside shard_map."""
    layout, mesh = sa.striped(), mesh_of(DEVICES)
    q, k, v = (layout.permute(x, DEVICES) for x in arrays())
    attend = sa.attention_fn(axis_name="sequence", layout=layout, mask=sa.causal(), order="layout", length=LENGTH)
    with jax.set_mesh(mesh):
        found = jax.jit(attend)(q, k, v)
    wanted = jax.nn.dot_product_attention(*arrays(), is_causal=True)
    np.testing.assert_allclose(layout.restore(found, DEVICES, length=LENGTH), wanted, atol=FLOAT32_TOLERANCE)
    spec = jax.P(None, "sequence")
    q, k, v = (jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in (q, k, v))
    inside = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))
    np.testing.assert_array_equal(inside(q, k, v), found)
    in_sequence = sa.attention_fn(axis_name="sequence", layout=layout)
    with pytest.raises(ValueError, match=r"Permute the tokens before the model and pass order='layout'"):
        jax.shard_map(in_sequence, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(q, k, v)


def test_sequence_lengths_of_arrays_that_are_permuted_and_padded():
    layout, (q, k, v) = sa.striped(), arrays()
    lengths = np.array([5, 21], np.int32)
    attend = on_devices(layout, order="layout", length=LENGTH, key_value_seq_lengths=lengths)
    found = attend(*(layout.permute(x, DEVICES) for x in (q, k, v)))
    wanted = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)
    np.testing.assert_allclose(layout.restore(found, DEVICES, length=LENGTH), wanted, atol=FLOAT32_TOLERANCE)
    inside = functools.partial(
        sa.dot_product_attention, axis_name="sequence", key_value_seq_lengths=lengths, order="layout"
    )
    shards = functools.partial(jax.shard_map, mesh=mesh_of(DEVICES), in_specs=(jax.P(),) * 3, out_specs=jax.P())
    with pytest.raises(ValueError, match="Inside shard_map a mask of sequence lengths must be permuted"):
        shards(inside)(q, k, v)
    with_mesh = sa.attention_fn(axis_name="sequence", layout=layout, order="layout", mesh=mesh_of(DEVICES))
    with pytest.raises(ValueError, match="Leave out mesh and spec"):
        shards(with_mesh)(q, k, v)


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_any_batch_dimensions_and_dtypes(batch):
    q, k, v = arrays(batch=batch)
    attend = sa.attention_fn(axis_name="sequence", layout=sa.striped(), mesh=mesh_of(DEVICES))
    found = attend(q, k.astype("bfloat16"), v, is_causal=True, dtype=jnp.bfloat16)
    assert (found.shape, found.dtype) == (q.shape, jnp.bfloat16)
    np.testing.assert_allclose(
        attend(q, k, v, is_causal=True),
        np.reshape([jax.nn.dot_product_attention(*x, is_causal=True) for x in zip(
            *(x.reshape(-1, *x.shape[-3:]) for x in (q, k, v)), strict=True)], q.shape),
        atol=FLOAT32_TOLERANCE,
    )  # fmt: skip


REFUSED = {
    "A mask array of length² entries .* got shape \\(1, 21, 21\\)": dict(mask=np.ones((1, LENGTH, LENGTH), bool)),
    "A bias array of length² entries .* Pass bias=sa.alibi": dict(bias=np.ones((4, LENGTH, LENGTH))),
    "they cannot be dropped out; got dropout_rate=0.1": dict(dropout_rate=0.1),
    "cannot be sown": dict(module=object()),
    "Leave out the module's einsums": dict(qk_attn_weights_einsum=jnp.einsum),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_honoured_is_refused(message):
    attend = sa.attention_fn(axis_name="sequence", layout=sa.striped(), mesh=mesh_of(DEVICES))
    with pytest.raises(ValueError, match=message):
        attend(*arrays(), **REFUSED[message])
    assert attend(*arrays(), dropout_rate=0.1, deterministic=True).shape == arrays()[0].shape


def test_wrong_arguments_of_adapters():
    with pytest.raises(ValueError, match="order must be 'sequence' or 'layout'"):
        sa.attention_fn(axis_name="sequence", layout=sa.striped(), order="text")
    with pytest.raises(ValueError, match="mask must be a mask of this library"):
        sa.attention_fn(axis_name="sequence", layout=sa.striped(), mask=np.ones((3, 3), bool))
    with pytest.raises(ValueError, match="attention needs a mesh"):
        sa.attention_fn(axis_name="sequence", layout=sa.striped())(*arrays())
    with pytest.raises(ValueError, match="implementation must be None, 'xla' or 'cudnn'; got 'flash'"):
        on_devices(sa.striped())(*arrays(), implementation="flash")
    with pytest.raises(ValueError, match="implementation and kernel name the same thing"):
        on_devices(sa.striped())(*arrays(), implementation="xla", kernel="auto")
    with pytest.raises(ValueError, match=r"one length for each of the 2 sequences; got shape \(1,\)"):
        on_devices(sa.striped())(*arrays(), key_value_seq_lengths=np.array([5], np.int32))
    slopes = sa.alibi(np.ones(4, np.float32))
    with pytest.raises(ValueError, match="Attention has a bias already"):
        sa.attention_fn(axis_name="sequence", layout=sa.striped(), bias=slopes)(*arrays(), bias=slopes)
    with pytest.raises(ValueError, match=r"must be \[batch, length, heads, dim\]"):
        on_devices(sa.striped())(np.ones((3, 4)), np.ones((3, 4)), np.ones((3, 4)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'windw'"):
        sa.attention_fn(axis_name="sequence", layout=sa.striped(), windw=4, mesh=mesh_of(DEVICES))(*arrays())

"""`shard_batch` pads, permutes and shards all arrays of a batch alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention.core.oracle import dense_attention
from tests.compare import FLOAT32_TOLERANCE

LENGTH = 21
LAYOUT = sa.striped(2)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "sequence"))


def batch_of(ids):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, LENGTH, 4, 8), np.float32)
    tokens = rng.integers(1, 9, (2, LENGTH))
    return {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "positions": np.arange(LENGTH), "x": x,
            "mask": sa.documents(ids), "more": [sa.causal(), jnp.asarray(ids)]}  # fmt: skip


def test_everything_is_in_layout_order_on_the_mesh(mesh):
    ids = np.repeat([[1, 2, 3], [4, 5, 6]], 7, axis=1)
    batch = batch_of(ids)
    where = dict(layout=LAYOUT, axis_name="sequence", mesh=mesh)
    found = sa.shard_batch(batch, **where, batch_axis="data", pad={"targets": -1})
    for name in ("tokens", "targets", "positions", "x"):
        axis = 0 if name == "positions" else 1
        expected = LAYOUT.permute(batch[name], 4, axis=axis, pad=-1 if name == "targets" else 0)
        np.testing.assert_array_equal(found[name], expected)
        spec = jax.P("sequence") if name == "positions" else jax.P("data", "sequence")
        assert found[name].sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), found[name].ndim)
    np.testing.assert_array_equal(found["more"][1], LAYOUT.permute(ids, 4))
    options = dict(axis_name="sequence", layout=LAYOUT, length=LENGTH, mesh=mesh)
    options["spec"] = jax.P("data", "sequence", None, None)
    attend = jax.jit(
        lambda b: sa.attention(b["x"], b["x"], b["x"], mask=b["mask"], positions=b["positions"], **options)
    )
    out = LAYOUT.restore(attend(found), 4, length=LENGTH)
    wanted = dense_attention(*[batch["x"]] * 3, batch["mask"].dense(LENGTH))
    np.testing.assert_allclose(out, wanted, atol=FLOAT32_TOLERANCE)


def test_one_mask_for_all_sequences_and_the_mesh_that_is_set(mesh):
    mask = sa.ranges(0, np.arange(1, LENGTH + 1))
    with jax.set_mesh(mesh):
        found = sa.shard_batch(
            (np.ones((4, LENGTH), int), mask), layout=LAYOUT, axis_name="sequence", batch_axis="data"
        )
    assert found[0].shape == (4, 24)
    assert found[1].hi.sharding.spec == jax.P(None, "sequence")
    assert found[1].placed == (LAYOUT, 4)


def test_wrong_batches(mesh):
    where = dict(layout=LAYOUT, axis_name="sequence", mesh=mesh)
    with pytest.raises(ValueError, match=r"must have the same length; got \['a'\] 21, \['b'\] 20"):
        sa.shard_batch({"a": np.ones((2, 21)), "b": np.ones((2, 20))}, **where)
    with pytest.raises(ValueError, match=r"\['step'\] is a scalar"):
        sa.shard_batch({"step": 3}, **where)
    with pytest.raises(ValueError, match=r"pad names \['target'\], but the batch has no such arrays"):
        sa.shard_batch({"targets": np.ones((2, 21))}, **where, pad={"target": -1})
    with pytest.raises(ValueError, match="pad must be a value of dtype uint8; got -100"):
        sa.shard_batch({"a": np.ones((2, 21), np.uint8)}, **where, pad=-100)
    with pytest.raises(ValueError, match="the batch is not a dictionary"):
        sa.shard_batch(np.ones((2, 21)), **where, pad={})
    assert (np.asarray(sa.shard_batch({3: np.ones((2, 21), int)}, **where, pad={3: -1})[3]) == -1).any()
    with pytest.raises(ValueError, match="shard_batch needs a mesh"):
        sa.shard_batch({}, layout=LAYOUT, axis_name="sequence")

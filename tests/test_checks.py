"""Mistakes that would silently give wrong results: they raise, or the result is NaN."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention.core.checks import poison
from striped_attention.core.layout import count_devices
from tests.compare import mesh_of

MESH = mesh_of(4)
WHERE = dict(mesh=MESH, axis_name="sequence")
RNG = np.random.default_rng(0)
X = RNG.standard_normal((1, 30, 2, 8)).astype(np.float32)
POSITION = np.arange(30, dtype=np.int32)
KNOWN = {"xla_gpu_collective_permute_combine_threshold_bytes": "0"}


def attend(x, positions, layout=None, mask=None, **options):
    layout = layout or sa.striped()
    return sa.attention(x, x, x, **WHERE, layout=layout, mask=mask or sa.causal(), positions=positions, **options)


def test_permute_takes_the_number_of_devices_from_the_mesh():
    for layout in (sa.striped(3), sa.zigzag()):
        np.testing.assert_array_equal(layout.permute(X, axis=1, **WHERE), layout.permute(X, devices=4, axis=1))
        back = layout.restore(layout.permute(X, axis=1, **WHERE), axis=1, length=30, **WHERE)
        np.testing.assert_array_equal(back, X)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(), "Pass the number of devices that share the sequence"),
        (dict(devices=4, **WHERE), "Pass the number of devices that share the sequence"),
        (dict(mesh=MESH), "Pass the number of devices that share the sequence"),
        (
            dict(mesh=MESH, axis_name="model"),
            "axis_name must be an axis of the mesh, or a tuple of several; got 'model'",
        ),
    ],
)
def test_permute_needs_one_or_the_other(arguments, message):
    with pytest.raises(ValueError, match=message):
        sa.striped().permute(X, axis=1, **arguments)


def test_positions_that_were_permuted_alike_change_nothing():
    layout = sa.striped()
    x, positions = layout.permute(X, axis=1, **WHERE), layout.permute(POSITION, axis=0, **WHERE)
    expected = attend(x, None, length=30)
    np.testing.assert_array_equal(attend(x, positions, length=30), expected)
    np.testing.assert_array_equal(attend(x, np.stack([positions]), length=30), expected)
    np.testing.assert_allclose(jax.jit(lambda x, p: attend(x, p, length=30))(x, positions), expected, atol=1e-6)


WRONG = {
    "in sequence order: nothing was permuted": lambda layout: np.arange(32, dtype=np.int32),
    "in the order of striped\\(1\\) on 2 devices": lambda layout: sa.striped().order(32, 2),
    "in the order of zigzag\\(\\) on 4 devices": lambda layout: sa.zigzag().order(32, 4),
    "slot 31 holds position 0, but the layout puts 31 there": lambda layout: np.r_[layout.order(32, 4)[:31], 0],
}


@pytest.mark.parametrize("reason", WRONG)
def test_positions_in_another_order_raise(reason):
    positions = WRONG[reason](sa.striped()).astype(np.int32)
    x = jnp.zeros((1, 32, 2, 8))
    with pytest.raises(ValueError, match=f"not in the order of striped\\(1\\) on 4 devices.*{reason}"):
        attend(x, positions)
    assert np.isnan(jax.jit(attend)(x, positions)).all()


def test_gradients_are_nan_too():
    layout = sa.striped()
    x = layout.permute(jnp.ones((1, 32, 2, 8)), axis=1, **WHERE)
    gradient = jax.jit(jax.grad(lambda x, positions: attend(x, positions).sum()))
    assert np.isnan(gradient(x, np.arange(32, dtype=np.int32))).all()
    assert np.isfinite(gradient(x, layout.order(32, 4))).all()


def test_padding_that_counts_as_real_raises():
    """A full mask covers all slots, including padding, unless `length` gives the number of real tokens."""
    layout = sa.striped()
    x, positions = layout.permute(X, axis=1, **WHERE), layout.permute(POSITION, axis=0, **WHERE)
    with pytest.raises(ValueError, match="pass length="):
        attend(x, positions, mask=sa.full())
    assert np.isfinite(attend(x, positions, mask=sa.full(), length=30)).all()


def test_what_positions_must_be():
    with pytest.raises(ValueError, match=r"one for each of the 32 slots.*got float32\(32,\)"):
        attend(jnp.zeros((1, 32, 2, 8)), jnp.zeros(32))
    with pytest.raises(ValueError, match=r"one for each of the 32 slots.*got int32\(30,\)"):
        attend(jnp.zeros((1, 32, 2, 8)), POSITION)
    with pytest.raises(ValueError, match=r"\[32\] or \[1, 32\] for this batch; got int32\(3, 32\)"):
        attend(jnp.zeros((1, 32, 2, 8)), np.zeros((3, 32), np.int32))


def test_a_mesh_that_is_none_is_named():
    with pytest.raises(ValueError, match=r"mesh must be a jax\.sharding\.Mesh; got 'a'"):
        count_devices(None, "a", "sequence")


def test_a_shard_compares_its_own_positions():
    def shard(x, positions):
        where = dict(axis_name="sequence", layout=sa.striped(), mask=sa.causal())
        return sa.attention_shard(x, x, x, positions=positions, **where)

    specs = (jax.P(None, "sequence"), jax.P("sequence"))
    mesh = jax.sharding.Mesh(MESH.devices, MESH.axis_names)
    run = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=specs[0]))
    x, right = jnp.ones((1, 32, 2, 8)), sa.striped().order(32, 4)
    assert np.isfinite(run(x, right)).all()
    found = run(x, np.r_[right[:8], np.arange(8, 32)].astype(np.int32))  # right only on the first device
    assert np.isfinite(found[:, :8]).all()
    assert np.isnan(found[:, 8:]).all()


def said(caplog, function, *arguments):
    """Run a function under jit; return its result and the errors that it logged."""
    caplog.clear()
    found = jax.block_until_ready(jax.jit(function)(*arguments))
    jax.effects_barrier()
    return found, " ".join(record.getMessage() for record in caplog.records if record.levelname == "ERROR")


def test_with_sa_check_a_program_says_what_is_wrong(monkeypatch, caplog):
    monkeypatch.setenv("SA_CHECK", "1")
    x = jnp.zeros((1, 32, 2, 8))
    found, errors = said(caplog, lambda x, p: attend(x, p), x, np.arange(32, dtype=np.int32))
    assert "They are in sequence order: nothing was permuted" in errors
    assert np.isnan(found).all()
    found, errors = said(caplog, lambda x, p: attend(x, p), x, sa.striped().order(32, 4))
    assert errors == ""
    assert np.isfinite(found).all()


def test_with_sa_check_permuted_ids_of_documents_are_noticed(monkeypatch, caplog):
    monkeypatch.setenv("SA_CHECK", "1")
    ids = np.repeat(np.arange(4), 8)[None].astype(np.int32)
    x = jnp.ones((1, 32, 2, 8))
    run = lambda ids: attend(x, None, mask=sa.documents(ids))  # noqa: E731
    found, errors = said(caplog, run, ids)
    assert errors == ""
    np.testing.assert_allclose(found, 1, atol=1e-6)
    found, errors = said(caplog, run, sa.striped().permute(ids, 4, 1))
    assert "Equal segment ids must be adjacent; in row 0 id 0 appears in 4 separate runs" in errors
    assert "in sequence order, not permuted" in errors
    assert (np.asarray(found) == 0).all()


def cache_of(capacity, window=None):
    return sa.KVCache.empty(2, capacity, 1, 8, layout=sa.striped(), window=window, dtype=jnp.float32, **WHERE)


def test_a_cache_that_overflows_under_jit_gives_nan():
    """Only the sequence with too many tokens becomes NaN, from then on; the other one is unaffected."""
    cache = cache_of(8)
    x = jnp.asarray(RNG.standard_normal((2, 4, 1, 8)), jnp.float32)
    append = jax.jit(lambda cache, counts: cache.append(x, x, counts))
    for counts, fine in (
        ([4, 4], [True, True]),
        ([4, 1], [True, True]),
        ([1, 1], [False, True]),
        ([0, 1], [False, True]),
    ):
        cache = append(cache, jnp.array(counts, jnp.int32))
        out = jax.jit(sa.decode_attention)(x[:, :1], cache)
        assert np.isfinite(out).all(axis=(1, 2, 3)).tolist() == fine
        assert np.asarray(cache.fits).tolist() == fine
    with pytest.raises(ValueError, match="room for 8 tokens"):
        cache_of(8).append(jnp.zeros((2, 12, 1, 8)), jnp.zeros((2, 12, 1, 8)))


def test_a_prompt_that_overflows_a_cache_under_jit_gives_nan():
    x = jnp.asarray(RNG.standard_normal((2, 8, 1, 8)), jnp.float32)
    prefill = jax.jit(lambda cache, counts: sa.prefill_attention(x, x, x, cache, counts=counts))
    out, cache = prefill(cache_of(8), jnp.array([8, 3], jnp.int32))
    assert np.isfinite(out).all()
    out, _ = prefill(cache, jnp.array([1, 5], jnp.int32))
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1]).all()


def test_a_window_never_overflows():
    cache, x = cache_of(64, window=4), jnp.ones((2, 4, 1, 8))
    for _ in range(3):
        cache = jax.jit(lambda cache: sa.prefill_attention(x, x, x, cache)[1])(cache)
    assert np.asarray(cache.fits).all()


def test_positions_of_a_prompt_are_checked():
    layout, cache = sa.striped(), cache_of(64)
    x = jnp.asarray(RNG.standard_normal((2, 8, 1, 8)), jnp.float32)
    order = layout.order(8, 4)
    _, cache = sa.prefill_attention(x, x, x, cache, positions=np.stack([order] * 2), counts=jnp.array([8, 5]))
    later = np.asarray(cache.lengths)[:, None] + order
    assert np.isfinite(sa.prefill_attention(x, x, x, cache, positions=later)[0]).all()
    off = "Every position is 8 too small: slot 0 holds position 0, but the layout puts 8 there"
    with pytest.raises(ValueError, match=off):
        sa.prefill_attention(x, x, x, cache, positions=np.stack([order] * 2))  # ignores the tokens in the cache
    unpermuted = "not in the order of striped.* slot 1 holds position 9, but the layout puts 12 there.*nothing was perm"
    with pytest.raises(ValueError, match=unpermuted):
        sa.prefill_attention(x, x, x, cache, positions=np.asarray(cache.lengths)[:, None] + np.arange(8, dtype="int32"))
    with pytest.raises(ValueError, match=r"shape \[8\] or \[2, 8\] for this batch; got int32\(3, 8\)"):
        sa.prefill_attention(x, x, x, cache, positions=np.stack([order] * 3))
    wrong = jnp.asarray(cache.lengths)[:, None] + jnp.arange(8)
    assert np.isnan(jax.jit(lambda p: sa.prefill_attention(x, x, x, cache, positions=p)[0])(wrong)).all()


def test_poison_keeps_what_is_right():
    x = jnp.ones((2, 3))
    assert poison(x, None) is x
    np.testing.assert_array_equal(poison(x, jnp.array([True, False])), [[1, 1, 1], [np.nan] * 3])


def test_compiler_options_leave_out_what_xla_does_not_know(monkeypatch):
    from striped_attention.runtime import compiler

    assert sa.compiler_options() == {}  # this is a CPU
    monkeypatch.setattr(compiler, "GPU_OPTIONS", {"xla_no_such_option": "1", **KNOWN})
    with pytest.warns(RuntimeWarning, match="does not know the option xla_no_such_option"):
        found = sa.compiler_options("gpu")
    assert found == KNOWN
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sa.compiler_options("gpu") == found  # XLA is asked only once
    step = jax.jit(lambda x: x + 1, compiler_options=sa.compiler_options())
    assert step(1) == 2

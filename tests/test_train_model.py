"""Model and training step: same results on every mesh and layout as a plain model on one device, in bounded memory."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import striped_attention as sa
from striped_attention import data
from striped_attention.core.oracle import control_attention
from striped_attention.models.config import PRESETS, ModelConfig
from striped_attention.models.rotary import rotary
from striped_attention.planning.cost import estimate
from striped_attention.training.config import TrainConfig
from striped_attention.training.step import Program

SMALL = dict(layers=2, dim=32, ffn=48, heads=4, kv_heads=2, vocabulary=40, dtype="float32", chunk=16)


def corpus(vocabulary=40, size=20_000, end=0):
    """A corpus that can be learned: every token depends on the previous one. Documents have about 30 tokens."""
    rng = np.random.default_rng(0)
    tokens = np.zeros(size, np.int32)
    for i in range(1, size):
        tokens[i] = end if rng.random() < 1 / 30 else (3 * tokens[i - 1] + rng.integers(1, 4)) % vocabulary
    return data.Corpus(tokens, end, vocabulary, "made up")


CORPUS = corpus()


def program(mesh, attend=None, **options):
    config = TrainConfig(**{**SMALL, "sequence_length": 90, "batch": 2, "steps": 50, **options})
    devices = jax.devices()[: mesh[0] * mesh[1]]
    grid = jax.sharding.Mesh(np.array(devices).reshape(mesh), ("data", "sequence"))
    return Program(config, grid, attend)


def inputs(program, place=0):
    config = program.config
    return program.place(data.read(CORPUS, place, program.rows, config.sequence_length, config.seed))


@functools.cache
def plain_run(model):
    return jax.jit(jax.value_and_grad(functools.partial(plain_loss, model)))


def plain_loss(model, weights, batch, visible):
    """The same model in its simplest form: unsharded matrices, dense attention, original order."""

    def norm(x, weight):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + model.norm_epsilon) * weight

    def rotate(x):
        frequency = model.rope_theta ** -(jnp.arange(0, model.head_dim, 2) / model.head_dim)
        angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = weights["embedding"][batch.tokens]
    for i in range(model.layers):
        layer = jax.tree.map(lambda w, i=i: w[i], weights["layers"])
        y = norm(x, layer["attention_norm"])
        q, k, v = (jnp.einsum("bsd,dhk->bshk", y, layer[name]) for name in ("query", "key", "value"))
        k, v = (jnp.repeat(z, model.heads // model.kv_heads, axis=2) for z in (rotate(k), v))
        scores = jnp.einsum("bqhk,bshk->bhqs", rotate(q), k) * model.head_dim**-0.5
        p = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
        x = x + jnp.einsum("bhqs,bshk,hkd->bqd", p, v, layer["output"])
        y = norm(x, layer["ffn_norm"])
        x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    logs = jax.nn.log_softmax(norm(x, weights["norm"]) @ weights["unembedding"])
    losses = -jnp.take_along_axis(logs, batch.targets[..., None], axis=-1)[..., 0]
    return jnp.sum(losses * batch.weights) / jnp.sum(batch.weights)


@pytest.mark.parametrize(("mesh", "layout"), [((1, 1), "striped"), ((2, 4), "striped"), ((1, 3), "zigzag")])
def test_loss_and_every_gradient_are_those_of_a_plain_model(mesh, layout):
    run = program(mesh, layout=layout)
    weights = run.fresh_state().weights
    loss, _, gradients = jax.jit(run.loss_and_gradients)(weights, inputs(run))
    batch = data.read(CORPUS, 0, range(2), 90, 0)
    weights = jax.device_get(weights)
    visible = sa.documents(batch.segments).dense(run.config.sequence_length)
    expected_loss, expected = plain_run(run.config.model)(weights, batch, visible)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
    for path, g in jax.tree_util.tree_leaves_with_path(jax.device_get(gradients)):
        truth = functools.reduce(lambda tree, key: tree[key.key], path, expected)
        assert np.abs(g - truth).max() < 1e-5 * max(np.abs(truth).max(), 1e-2 * scale), path


def curve(run, steps=30):
    state, losses = run.fresh_state(), []
    for step in range(steps):
        state, metrics = run.step(state, inputs(run, step * run.config.batch))
        losses.append(float(metrics["loss"]))
    return np.array(losses)


@functools.cache
def control():
    """The reference run: one device, dense attention."""
    return curve(program((1, 1), attend=control_attention, learning_rate=3e-3))


@pytest.mark.parametrize(
    ("devices", "layout", "stripe"),
    [(2, "zigzag", None), (4, "contiguous", None), (8, "striped", 1)],
)
def test_control_run_every_layout_and_mesh_has_the_same_loss_curve(devices, layout, stripe):
    """Covers every layout and number of devices once; benchmarks/train_control.py covers all pairs."""
    losses = curve(program((1, devices), layout=layout, stripe=stripe, learning_rate=3e-3))
    np.testing.assert_allclose(losses, control(), rtol=1e-4)
    assert losses[-5:].mean() < losses[:5].mean() - 0.3, "the model learns"


@pytest.mark.parametrize("strategy", ["heads", "gather", "heads=2", "inner=2", "heads=2,gather=2"])
def test_control_run_every_strategy_has_the_same_loss_curve(strategy):
    losses = curve(program((1, 4 if "=" in strategy else 2), strategy=strategy, learning_rate=3e-3))
    np.testing.assert_allclose(losses, control(), rtol=1e-4)


@functools.cache
def losses_of(documents):
    """Return a program on two devices, with or without documents, and its compiled loss and gradients."""
    run = dataclasses.replace(program((1, 2), stripe=1, sequence_length=89), documents=documents)
    return run, jax.jit(run.loss_and_gradients).lower(run.state.weights, run.inputs).compile()


def test_text_without_documents_needs_no_documents_mask():
    """Loss and gradients equal those with one document, also for lengths that the devices do not divide."""
    one = data.Corpus(CORPUS.tokens, None, 40, "one document")
    results = []
    for documents in (True, False):
        run, loss = losses_of(documents)
        batch = run.place(data.read(one, 0, range(2), 89, 0))
        assert (batch.mask.lo is not None) == documents
        assert jax.tree.structure(batch) == jax.tree.structure(run.inputs)
        results.append(loss(run.fresh_state().weights, batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), *results)


def test_packed_documents_do_not_see_each_other():
    """Changing one document leaves the losses of the others in its row unchanged."""
    run, loss = losses_of(True)
    batch = data.read(CORPUS, 0, range(2), 89, 0)
    weights = run.fresh_state().weights
    changed = batch.tokens.copy()
    first = batch.segments == batch.segments[:, :1]
    changed[first] = (changed[first] + 1) % 39 + 1
    counted = batch._replace(weights=batch.weights * ~first)
    assert all(0 < n < 89 for n in first.sum(axis=1))
    before, after = (loss(weights, run.place(b))[0] for b in (counted, counted._replace(tokens=changed)))
    assert float(before) == float(after)
    assert float(before) != float(loss(weights, run.place(batch))[0]), "the first document has a loss"


def test_a_sequence_in_which_nothing_counts_changes_nothing():
    run, loss = losses_of(True)
    batch, weights = data.read(CORPUS, 0, range(2), 89, 0), run.fresh_state().weights
    one = batch._replace(weights=batch.weights * np.array([[0], [1]], np.float32))
    other = one._replace(tokens=np.where([[True], [False]], (one.tokens + 7) % 40, one.tokens))
    jax.tree.map(np.testing.assert_array_equal, *(loss(weights, run.place(b)) for b in (one, other)))
    none, _, gradients = loss(weights, run.place(batch._replace(weights=0 * batch.weights)))
    assert float(none) == 0
    assert all(not np.any(x) for x in jax.tree.leaves(gradients)), "all 0, no NaN"


@functools.cache
def remat(kind):
    """Return a program on two devices with this --remat, and its compiled loss and gradients."""
    run = program((1, 2), remat=kind)
    return run, jax.jit(run.loss_and_gradients).lower(run.state.weights, run.inputs).compile()


def ring_again(text):
    return [line for line in text.splitlines() if "rematted_computation" in line and "jit(_attend)" in line]


def test_the_backward_pass_does_not_run_attention_forward_again():
    assert not ring_again(remat("attention")[1].as_text())
    assert ring_again(remat("full")[1].as_text()), "full rematerialisation does run it again"


@pytest.mark.parametrize("kind", ["full", "qkv", "none", "unrolled"])
def test_remat_changes_no_number(kind):
    run, _ = remat("attention")
    weights = run.fresh_state().weights
    (loss, _, gradients), (expected, _, truth) = (remat(k)[1](weights, inputs(run)) for k in ("attention", kind))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradients, truth)


def products(remat):
    """Count matrix products in the program for loss and gradients, without attention. The layer loop counts once."""

    def count(jaxpr):
        inner = (
            x for eqn in jaxpr.eqns for value in eqn.params.values() for x in jax.tree.leaves(value, is_leaf=is_jaxpr)
        )
        below = sum(count(getattr(x, "jaxpr", x)) for x in inner if is_jaxpr(x))
        return below + sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)

    is_jaxpr = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")  # noqa: E731
    attend = lambda q, k, v, mask: q + jnp.repeat(k + v, 2, axis=2)  # noqa: E731
    run = program((1, 2), attend, remat=remat)
    return count(jax.make_jaxpr(run.loss_and_gradients)(run.state.weights, run.inputs).jaxpr)


def test_remat_none_multiplies_nothing_twice():
    """A layer has 7 matrices and the loss has one, each with 1 product forward and 2 backward."""
    assert products("none") == 3 * (7 + 1)
    assert products("qkv") == 3 * (7 + 1) + 7
    assert products("attention") == 3 * (7 + 1) + 7 + 3


@pytest.mark.parametrize(("parts", "mesh", "options"), [(2, (1, 2), {}), (4, (1, 1), {}), (2, (2, 1), {"stripe": 8})])
def test_an_accumulated_batch_is_one_large_batch(parts, mesh, options):
    """Also where documents give the micro-batches different numbers of targets."""
    whole, split = (program(mesh, batch=4, accumulate=n, **options) for n in (1, parts))
    batch = inputs(whole)
    batch = batch._replace(weights=batch.weights.at[0].set(0.0).at[1, :40].set(0.5))
    weights = whole.fresh_state().weights
    (loss, _, gradients), (expected, _, truth) = (
        jax.jit(run.loss_and_gradients)(weights, batch) for run in (split, whole)
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradients, truth)


def test_a_batch_in_which_nothing_counts_has_no_loss_and_no_gradient():
    run = program((1, 2))
    batch = inputs(run)
    loss, _, gradients = remat("attention")[1](run.fresh_state().weights, batch._replace(weights=0 * batch.weights))
    assert float(loss) == 0
    assert all(not np.any(g) for g in jax.tree.leaves(jax.device_get(gradients)))


@functools.cache
def long(length, devices):
    """Return a training program for one long sequence on a ring, and its compiled step."""
    options = dict(chunk=64, ffn=200, vocabulary=300, strategy="ring", remat="attention")
    run = program((1, devices), sequence_length=length, batch=1, **options)
    return run, run.compiled


def test_nothing_of_size_length_times_ffn_or_vocabulary_exists():
    run, step = long(4096, 2)
    shapes = set(re.findall(r"f32\[([\d,]+)\]", step.as_text()))
    largest = max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)
    slots, model = 2048, run.config.model
    assert slots * model.dim <= largest < slots * model.ffn, "only the ffn's activations are chunked"


def test_peak_memory_grows_with_length_over_devices():
    peak = lambda length, devices: long(length, devices)[1].memory_analysis().temp_size_in_bytes  # noqa: E731
    base = peak(4096, 2)
    assert peak(8192, 4) < 1.2 * base
    assert 1.5 * base < peak(8192, 2) < 2.2 * base


def test_the_dry_runs_memory_is_that_of_the_compiled_step():
    """For models dominated by activations and by weights."""
    wide = program((1, 2), sequence_length=256, batch=1, dim=256, ffn=1024, kv_heads=4, chunk=64)
    tall = program((1, 2), sequence_length=8192, batch=1, ffn=200, vocabulary=300, strategy="ring", remat="none")
    for run, step in (long(8192, 2), (wide, wide.compiled), (tall, tall.compiled)):
        stats = step.memory_analysis()
        compiled = stats.argument_size_in_bytes + stats.temp_size_in_bytes
        said = estimate(run.config, {"data": 1, "sequence": 2}).total_memory
        assert 0.75 < said / compiled < 1.25, (said, compiled)


@pytest.mark.parametrize(("layers", "remat"), [(6, "attention"), (6, "none"), (7, "attention"), (7, "unrolled")])
def test_the_dry_run_knows_what_periods_of_layers_need(layers, remat):
    """Periods of two windowed layers and one full layer; the seventh layer is an incomplete period."""
    model = ModelConfig(
        **dict(layers=layers, dim=256, ffn=1024, heads=4, kv_heads=4, vocabulary=320, window=64, full_every=3)
    )
    run = program((1, 2), sequence_length=512, batch=1, chunk=64, strategy="ring", remat=remat, shape=model)
    stats = run.compiled.memory_analysis()
    compiled = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    said = estimate(run.config, {"data": 1, "sequence": 2}).total_memory
    assert 0.75 < said / compiled < 1.25, (said, compiled)


def test_bf16_follows_float32():
    losses = curve(program((1, 2), learning_rate=3e-3, dtype="bfloat16"))
    np.testing.assert_allclose(losses, control(), rtol=0.02)


def test_gradients_of_frequent_tokens_are_counted_in_float32():
    """In bfloat16 256 + 1 = 256, so a sum over 5000 uses of one token would stop at 256."""
    run = program((1, 1), sequence_length=5000, batch=1, dtype="bfloat16", chunk=500, layers=1)
    constant = data.Corpus(np.full(6000, 7, np.int32), None, 40, "sevens")
    weights = run.fresh_state().weights
    bf16, f32 = (
        jax.jit(r.loss_and_gradients)(weights, r.place(data.read(constant, 0, range(1), 5000, 0)))[2]
        for r in (run, program((1, 1), sequence_length=5000, batch=1, chunk=500, layers=1))
    )
    for name in ("embedding", "unembedding", "norm", "attention_norm", "ffn_norm"):
        a, b = (np.asarray(g[name] if name in g else g["layers"][name]) for g in (bf16, f32))
        assert np.linalg.norm(a - b) < 0.03 * np.linalg.norm(b), name


def test_rotary_angles_stay_right_at_a_million_tokens():
    positions = np.array([[0, 1, 1023, 1024, 257, 65_537, 1_048_575]], np.int32)
    cos, sin = rotary(jnp.asarray(positions), 64, 10_000.0)
    angle = positions[..., None] * 10_000.0 ** -(np.arange(0, 64, 2) / 64)
    assert np.abs(cos - np.cos(angle)).max() < 1e-3
    assert np.abs(sin - np.sin(angle)).max() < 1e-3


@pytest.mark.parametrize(("preset", "billions"), [("1b", 1.2), ("3b", 3.4), ("7b", 6.74), ("llama3-8b", 8.03)])
def test_presets_have_the_sizes_of_their_names(preset, billions):
    assert PRESETS[preset].parameters == pytest.approx(billions * 1e9, rel=0.05)


def test_weights_are_spread_over_every_device():
    specs = PRESETS["7b"].specs(64)
    whole = [path for path, spec in jax.tree_util.tree_leaves_with_path(specs) if not any(spec)]
    assert all(path[-1].key.endswith("norm") for path in whole)


def test_first_weights_are_the_same_on_every_mesh():
    a, b = (jax.device_get(program(mesh).fresh_state().weights) for mesh in ((1, 1), (2, 4)))
    jax.tree.map(np.testing.assert_array_equal, a, b)

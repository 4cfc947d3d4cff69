"""Engine: prefill and decoding match the dense model on the whole sequence, on any number of devices."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import striped_attention as sa
from striped_attention.core.oracle import dense_attention
from striped_attention.generation.engine import Engine
from striped_attention.generation.fused import fuse
from striped_attention.generation.programs import Options
from striped_attention.generation.sample import NO_TOKEN, Sampling, choose, logprobs
from striped_attention.models.config import ModelConfig
from striped_attention.models.layers import after, before, logits, split_layer
from striped_attention.models.llama import init
from striped_attention.models.stages import AXES
from striped_attention.runtime.schedule import traffic

SMALL = ModelConfig(layers=2, dim=32, ffn=48, heads=4, kv_heads=2, vocabulary=64)
WINDOW = ModelConfig(
    layers=2, dim=32, ffn=48, heads=4, kv_heads=2, vocabulary=64, window=5, biases=True, head_norms=True, head_width=16
)
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
COLLECTIVES = re.compile(rf"= \w+\[([\d,]+)\]\S* ({KINDS})(?:-start)?\(")
TEXT = np.random.default_rng(0).integers(0, 64, (3, 40)).astype(np.int32)


@functools.cache
def weights_of(config):
    """Return random weights, large enough to give distinct scores."""
    larger = lambda path, x: x if path[-1].key.endswith("norm") else 5 * x  # noqa: E731
    stacked = jax.tree_util.tree_map_with_path(larger, init(config, jax.random.key(0)))
    layers = [{name: x[i] for name, x in stacked["layers"].items()} for i in range(config.layers)]
    return {**stacked, "layers": layers}


@functools.partial(jax.jit, static_argnums=0)
def dense_scores(config, weights, tokens):
    """Return the scores of the plain model with dense attention, at every position."""
    length = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    i, j = np.mgrid[:length, :length]
    seen = (j <= i) & (i - j < (config.window or length))
    x = weights["embedding"][tokens]
    for layer in weights["layers"]:
        first, second = split_layer(layer)
        q, k, v = before(config, first, x, positions)
        x = after(config, second, (x, dense_attention(q, k, v, seen[None])), ())
    return logits(config, {name: weights[name] for name in config.last}, x)


@functools.cache
def truth(config):
    return np.asarray(dense_scores(config, weights_of(config), jnp.asarray(TEXT)))


def engine_of(config, devices, layout, capacity=48, block=4):
    """Return an empty engine for three sequences. Tests share equal ones: compilation takes most of their time."""
    engine = _engine_of(config, devices, layout, capacity, block)
    engine.clear()
    return engine


@functools.cache
def _engine_of(config, devices, layout, capacity, block):
    mesh = jax.make_mesh(
        (1, devices), AXES.everything, (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:devices]
    )
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    weights = jax.tree.map(place, weights_of(config), config.layer_specs(devices))
    options = Options(layout, 3, capacity, chunk=8, dtype=jnp.dtype("float32"), block=block)
    return Engine(config, fuse(config, mesh, weights), mesh, options)


def assert_scores(engine, config, lengths):
    """Assert that the scores after the last token of every sequence equal those of the dense model."""
    wanted = np.stack([truth(config)[row, length - 1] for row, length in enumerate(lengths)])
    assert np.abs(np.asarray(engine.scores) - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("config", "devices", "layout"),
    [
        *((SMALL, 1, sa.contiguous()), (WINDOW, 2, sa.striped()), (SMALL, 3, sa.striped(2))),
        *((WINDOW, 4, sa.zigzag()), (SMALL, 8, sa.striped(3))),
    ],
    ids=lambda value: str(value) if not isinstance(value, ModelConfig) else "window" if value.window else "full",
)
def test_reading_and_writing_is_the_whole_model(config, devices, layout):
    """Ragged prefill in chunks, decoding with one sequence ending early, and a second prefill match the dense model."""
    engine = engine_of(config, devices, layout)
    lengths = np.array([13, 1, 7])
    engine.prefill([TEXT[row, :n] for row, n in enumerate(lengths)])
    assert_scores(engine, config, lengths)
    for step in range(5):
        active = np.array([True, True, step < 3])
        engine.append([TEXT[row, n] for row, n in enumerate(lengths)], active)
        lengths += active
        assert_scores(engine, config, lengths)
    engine.prefill([TEXT[row, n : n + more] for (row, n), more in zip(enumerate(lengths), (6, 0, 2), strict=True)])
    lengths += [6, 0, 2]
    assert_scores(engine, config, lengths)
    assert engine.lengths.tolist() == lengths.tolist() == engine.caches[0].lengths.tolist()


def greedy(engine, prompts, steps, stop=()):
    engine.prefill(prompts)
    return np.stack([step.tokens for step in engine.decode(steps, Sampling(), stop)], axis=1)


def test_greedy_text_is_the_same_everywhere_and_that_of_the_whole_model():
    prompts = [TEXT[0, :9], TEXT[1, :2], TEXT[2, :5]]
    wanted = []
    for prompt in prompts:
        text = np.zeros((1, 20), np.int32)  # later tokens change nothing
        text[0, : len(prompt)] = prompt
        for at in range(len(prompt), len(prompt) + 10):
            text[0, at] = dense_scores(SMALL, weights_of(SMALL), text)[0, at - 1].argmax()
        wanted.append(text[0, len(prompt) : len(prompt) + 10].tolist())
    for devices, layout in [(1, sa.contiguous()), (2, sa.striped()), (4, sa.striped(2)), (8, sa.striped(3))]:
        assert greedy(engine_of(SMALL, devices, layout), prompts, 10).tolist() == wanted, (devices, layout)


def test_a_text_goes_on_in_turns():
    """Generated tokens stay in the sequence, and a further prompt follows them."""
    engine = engine_of(SMALL, 4, sa.striped(2))
    first = greedy(engine, [TEXT[0, :5], TEXT[1, :3], TEXT[2, :8]], 4)
    assert engine.lengths.tolist() == [9, 7, 12]
    second = greedy(engine, [TEXT[0, 20:26], TEXT[1, 20:21], TEXT[2, 20:22]], 5)
    whole = [[*TEXT[0, :5], *first[0], *TEXT[0, 20:26]], [*TEXT[1, :3], *first[1], TEXT[1, 20]]]
    whole.append([*TEXT[2, :8], *first[2], *TEXT[2, 20:22]])
    engine.clear()
    assert greedy(engine, whole, 5).tolist() == second.tolist()
    engine.clear()
    assert greedy(engine, [TEXT[0, :5], TEXT[1, :3], TEXT[2, :8]], 4).tolist() == first.tolist()
    more = [step.tokens for step in engine.decode(2, Sampling())]  # without a further prompt
    engine.clear()
    assert greedy(engine, [TEXT[0, :5], TEXT[1, :3], TEXT[2, :8]], 6)[:, 4:].tolist() == np.stack(more, 1).tolist()


def test_texts_end_at_a_stop_token_each_by_itself():
    engine = engine_of(SMALL, 2, sa.striped())
    prompts = [TEXT[0, :5], TEXT[1, :3], TEXT[2, :8]]
    free = greedy(engine, prompts, 8)
    stop = int(free[1, 2])
    engine.clear()
    found = greedy(engine, prompts, 8, stop=[stop])
    for row in range(3):
        ends = np.flatnonzero(free[row] == stop)
        length = ends[0] + 1 if len(ends) else found.shape[1]
        assert found[row, :length].tolist() == free[row, :length].tolist()
        assert (found[row, length:] == NO_TOKEN).all()
        assert engine.lengths[row] == len(prompts[row]) + length


def test_log_probabilities_are_those_of_the_whole_model_in_a_batch_and_alone():
    """Log probabilities are those of the dense model, normalised in float64, whatever the sampling options."""
    prompts, batch = [TEXT[0, :9], TEXT[1, :2], TEXT[2, :5]], engine_of(SMALL, 4, sa.striped(2))
    sampling = Sampling(temperature=2.0, top_k=20, top_p=0.9, seed=1)

    def steps(engine, rows, active):
        engine.clear()
        engine.prefill(rows)
        return list(engine.decode(6, sampling, rows=[0, 1, 2], active=active, logprobs=3))

    together = steps(batch, prompts, None)
    for row, prompt in enumerate(prompts):
        text = np.zeros((1, 20), np.int32)
        text[0, : len(prompt) + 6] = [*prompt, *(step.tokens[row] for step in together)]
        scores = np.asarray(dense_scores(SMALL, weights_of(SMALL), text))[0, len(prompt) - 1 :].astype(np.float64)
        wanted = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        alone = steps(batch, [p if i == row else p[:1] for i, p in enumerate(prompts)], np.arange(3) == row)
        for i, step in enumerate(together):
            said, best = step.logprobs, np.argsort(-wanted[i])[:3]
            assert said.ids[row].tolist() == best.tolist()
            assert abs(said.chosen[row] - wanted[i, step.tokens[row]]) < 1e-5 * np.abs(scores).max()
            assert np.abs(said.top[row] - wanted[i, best]).max() < 1e-5 * np.abs(scores).max()
            assert alone[i].tokens[row] == step.tokens[row]
            assert abs(alone[i].logprobs.chosen[row] - said.chosen[row]) < 1e-5


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5, seed=3)], ids=["greedy", "sampled"])
def test_tokens_do_not_depend_on_how_many_a_program_decodes(sampling):
    """Block size changes no token, even if a sequence ends within a block or the last block is only partly needed."""
    prompts, found = [TEXT[0, :5], TEXT[1, :3], TEXT[2, :8]], []
    for block in (1, 4, 16):
        engine = engine_of(SMALL, 4, sa.striped(2), block=block)
        engine.prefill(prompts)
        free = [step.tokens.tolist() for step in engine.decode(11, sampling)]
        engine.clear()
        engine.prefill(prompts)
        stop = [free[2][1], free[6][0]]
        found.append(
            (free, [step.tokens.tolist() for step in engine.decode(11, sampling, stop)], engine.lengths.tolist())
        )
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) == 11
    assert found[0][1][3][1] == NO_TOKEN


@pytest.mark.parametrize("config", [SMALL, WINDOW], ids=["full", "window"])
def test_tokens_that_nobody_wanted_are_taken_back(config):
    """Devices run up to two blocks ahead of the host; unused tokens are removed, also from caches that wrap around."""
    engine = engine_of(config, 4, sa.striped(2))
    prompts = [TEXT[0, :13], TEXT[1, :3], TEXT[2, :8]]
    engine.prefill(prompts)
    new = [next(step).tokens for step in [engine.decode(20, Sampling())] for _ in range(6)]
    new = np.stack(new, axis=1)
    assert engine.lengths.tolist() == [19, 9, 14]
    engine.prefill([TEXT[0, 20:23], [], TEXT[2, 20:21]])
    wanted = np.asarray(engine.scores)
    engine.clear()
    engine.prefill(
        [[*TEXT[0, :13], *new[0], *TEXT[0, 20:23]], [*TEXT[1, :3], *new[1]], [*TEXT[2, :8], *new[2], TEXT[2, 20]]]
    )
    assert np.abs(np.asarray(engine.scores) - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_the_host_may_end_a_sequence():
    engine = engine_of(SMALL, 2, sa.striped())
    prompts = [TEXT[0, :5], TEXT[1, :3], TEXT[2, :8]]
    free = greedy(engine, prompts, 12)
    engine.clear()
    engine.prefill(prompts)
    found = []
    for step in engine.decode(12, Sampling()):
        found.append(step.tokens)
        if len(found) == 3:
            engine.end(1)
    found = np.stack(found, axis=1)
    assert found[[0, 2]].tolist() == free[[0, 2]].tolist()
    assert found[1].tolist() == [*free[1, :3], *[NO_TOKEN] * 9]
    assert engine.lengths.tolist() == [17, 6, 20]
    engine.prefill([[], [], []])  # the newest tokens enter the caches
    assert engine.caches[0].lengths.tolist() == [17, 6, 20]


def test_a_layer_takes_four_messages():
    """A layer gathers q, k and v, exchanges partial results of attention, and sums after each of its halves."""
    # XLA compiles smaller models to other collectives.
    wide = dataclasses.replace(SMALL, dim=256, ffn=512, heads=8, vocabulary=512)
    engine = engine_of(wide, 4, sa.striped(2))
    engine.append([1, 2, 3])
    found = COLLECTIVES.findall(engine.programs.text("token"))
    counts, outside = collections.Counter(kind for _, kind in found), 2  # the embedding's rows and the scores
    assert sum(counts.values()) <= 4 * wide.layers + outside, counts
    assert counts["all-to-all"] == counts["collective-permute"] == 0
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape, _ in found]
    assert max(sizes) == 4 * 3 * 8 * (32 + 1)  # partial results of four devices; weights have at least 65,536 elements


def test_what_does_not_fit_is_refused_before_it_is_read():
    engine = engine_of(SMALL, 2, sa.striped())
    engine.prefill([TEXT[0, :40], TEXT[1, :3], TEXT[2, :3]])
    with pytest.raises(ValueError, match=r"Sequence 0 has 40 tokens; 9 more do not fit in the cache of 48 tokens\."):
        engine.prefill([TEXT[0, :9], [], []])
    with pytest.raises(ValueError, match="Sequence 0 has 40 tokens; 9 more do not fit"):
        next(engine.decode(9, Sampling()))
    assert engine.lengths.tolist() == [40, 3, 3]
    assert len(list(engine.decode(8, Sampling()))) == 8


def test_an_engine_is_not_used_in_two_ways_at_once():
    engine = engine_of(SMALL, 2, sa.striped())
    prompts = [TEXT[0, :5], TEXT[1, :3], TEXT[2, :8]]
    with pytest.raises(ValueError, match="A sequence must have at least one token to decode from; sequence 0 has none"):
        next(engine.decode(1, Sampling()))
    with pytest.raises(ValueError, match="An engine with a batch of 3 must read as many sequences; got 2"):
        engine.prefill(prompts[:2])
    with pytest.raises(ValueError, match="below the vocabulary of 64; sequence 1 has tokens from -5 to 3"):
        engine.prefill([[1], [3, -5], [2]])
    wanted = greedy(engine, prompts, 4)
    engine.clear()
    engine.prefill(prompts)
    writing = engine.decode(4, Sampling())
    assert next(writing).tokens.tolist() == wanted[:, 0].tolist()
    engine.prefill([[], [1], []])
    with pytest.raises(RuntimeError, match="were changed during generation"):
        next(writing)


def test_nothing_of_an_old_text_is_left():
    """Clearing removes even NaN, which a softmax weight of 0 would not hide."""
    engine = engine_of(SMALL, 2, sa.striped())
    prompts = [TEXT[0, :5], TEXT[1, :3], TEXT[2, :8]]
    wanted = greedy(engine, prompts, 4)
    engine._state = jax.tree.map(lambda x: x * float("nan") if x.ndim > 1 else x, engine._state)
    engine.clear()
    assert greedy(engine, prompts, 4).tolist() == wanted.tolist()


def test_a_token_sends_partial_results_and_no_keys():
    """With a cache eight times as large, a program sends exactly as many bytes."""
    sizes = []
    for capacity in (48, 384):
        engine = engine_of(SMALL, 4, sa.striped(2), capacity)
        engine.prefill([TEXT[0, :5], TEXT[1, :3], TEXT[2, :8]])
        engine.append([1, 2, 3])
        sizes.append(sum(traffic(engine.programs.text("token"), 4).values()))
    assert sizes[0] == sizes[1] > 0


SCORES = np.log(np.array([[0.5, 0.2, 0.15, 0.1, 0.05]] * 2000, np.float32))


def drawn(**options):
    """Return the frequency of each token among the samples of 2000 sequences."""
    rows = jnp.arange(2000, dtype=jnp.int32)
    tokens = choose(Sampling(**options), jnp.asarray(SCORES), rows, jnp.full(2000, 7, jnp.int32))
    return np.bincount(tokens, minlength=5) / 2000


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (dict(), [1, 0, 0, 0, 0]),
        (dict(temperature=1.0), [0.5, 0.2, 0.15, 0.1, 0.05]),
        (dict(temperature=0.5), np.array([0.25, 0.04, 0.0225, 0.01, 0.0025]) / 0.325),
        (dict(temperature=1.0, top_k=2), [5 / 7, 2 / 7, 0, 0, 0]),
        (dict(temperature=1.0, top_k=9), [0.5, 0.2, 0.15, 0.1, 0.05]),
        (dict(temperature=1.0, top_p=0.8), [0.5 / 0.85, 0.2 / 0.85, 0.15 / 0.85, 0, 0]),
        (dict(temperature=1.0, top_p=0.1), [1, 0, 0, 0, 0]),
        (dict(temperature=1.0, top_k=3, top_p=0.8), [5 / 7, 2 / 7, 0, 0, 0]),
        (dict(temperature=1.0, min_p=0.25), [0.5 / 0.85, 0.2 / 0.85, 0.15 / 0.85, 0, 0]),
        (dict(temperature=1.0, min_p=1.0), [1, 0, 0, 0, 0]),
        (dict(temperature=1.0, top_k=2, min_p=0.05), [5 / 7, 2 / 7, 0, 0, 0]),
    ],
    ids=str,
)
def test_tokens_are_drawn_by_their_probabilities(options, wanted):
    found = drawn(**options)
    assert np.abs(found - wanted).max() < 0.04  # more than three standard deviations for 2000 samples
    assert (found[np.array(wanted) == 0] == 0).all()


def test_what_is_drawn_depends_on_seed_text_and_position():
    scores, rows = jnp.zeros((4, 1000)), jnp.arange(4, dtype=jnp.int32)
    draw = lambda seed, rows, at: choose(Sampling(1.0, seed=seed), scores, rows, jnp.full(4, at, jnp.int32)).tolist()  # noqa: E731
    base = draw(0, rows, 5)
    assert base == draw(0, rows, 5)
    assert base[::-1] == draw(0, rows[::-1], 5)
    assert base != draw(1, rows, 5)
    assert base != draw(0, rows, 6)
    assert len(set(base)) > 1


def test_log_probabilities_of_any_scores():
    """Log probabilities are right for large scores, and for tokens that are not among the likeliest."""
    scores = np.random.default_rng(0).normal(300, 20, (4, 50)).astype(np.float32)
    tokens = np.array([3, 0, 49, 17], np.int32)
    chosen, top, ids = logprobs(jnp.asarray(scores), jnp.asarray(tokens), 5)
    wanted = scores.astype(np.float64) - np.logaddexp.reduce(scores.astype(np.float64), axis=-1, keepdims=True)
    best = np.argsort(-wanted, axis=-1)[:, :5]
    assert np.asarray(ids).tolist() == best.tolist()
    assert np.allclose(chosen, wanted[np.arange(4), tokens], rtol=1e-6, atol=1e-5)
    assert np.allclose(top, np.take_along_axis(wanted, best, -1), rtol=1e-6, atol=1e-5)
    assert logprobs(jnp.asarray(scores), jnp.asarray(tokens), 0)[1].shape == (4, 0)

"""Problem: the attention that every contestant computes, and how its answer is judged.

Causal self-attention, one sequence of `length` tokens, 8 heads of 64, float32, standard normal inputs; `both` is the
output and, for a given cotangent, the gradients of query, key and value. All arrays are [1, length, 8, 64].

Two checks come before any timing:
  whole   output and all gradients of a short text against the library's dense oracle in float64
  rows    output and query gradient of a few rows at full length against NumPy in float64
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

BATCH, HEADS, DIM = 1, 8, 64
NAMES = ("out", "dq", "dk", "dv")
KINDS = ("forward", "both")
SHAPE = {"batch": BATCH, "heads": HEADS, "dim": DIM, "dtype": "float32", "mask": "causal"}

# Errors are relative to the largest number of the reference. Whole: the tests' own tolerance for float32. Rows: each
# row on its own scale, about 1/√length, so cancellation costs a digit; one key too many would show as 1/√length, 8e-3.
TOLERANCE = {"whole": 1e-5, "rows": 1e-4}


class Inputs(NamedTuple):
    """Query, key, value and the cotangent of the output, in text order."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray


class Answer(NamedTuple):
    """Output and gradients of the tokens at `positions`: what one process holds of the result."""

    positions: np.ndarray
    out: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray

    def at(self, rows: np.ndarray | None) -> "Answer":
        """The part that lies at some positions only."""
        keep = slice(None) if rows is None else np.isin(self.positions, rows)
        return Answer(self.positions[keep], *(x[:, keep] for x in self[1:]))


def make_inputs(length: int, seed: int) -> Inputs:
    random = np.random.default_rng(seed)
    return Inputs(*random.standard_normal((4, BATCH, length, HEADS, DIM), dtype=np.float32))


def sample_rows(length: int, count: int = 8) -> np.ndarray:
    """Positions spread over the text, the last one included, on both sides of stripe and chunk boundaries."""
    return np.unique(np.linspace(length // count - 1, length - 1, count).astype(int) - np.arange(count)[::-1])


def join(answers: Iterable[Answer]) -> Answer:
    """One answer in text order from the parts of several processes."""
    parts = list(answers)
    positions = np.concatenate([part.positions for part in parts])
    order = np.argsort(positions)
    arrays = (np.concatenate([part[i] for part in parts], axis=1)[:, order] for i in range(1, 5))
    return Answer(positions[order], *arrays)


def oracle(inputs: Inputs) -> Answer:
    """Output and gradients in float64, with every score in memory: for short texts."""
    import jax

    from striped_attention import mask
    from striped_attention.oracle import dense_attention

    jax.config.update("jax_enable_x64", True)
    length = inputs.q.shape[1]
    visible = mask.causal().dense(length)
    q, k, v, dout = (x.astype(np.float64) for x in inputs)
    out, pull = jax.vjp(lambda *qkv: dense_attention(*qkv, visible), q, k, v)
    return Answer(np.arange(length), *(np.asarray(x) for x in (out, *pull(dout))))


def oracle_rows(inputs: Inputs, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Output and query gradient of a few rows in float64: each needs only the keys before it, and no other row."""
    out, dq = (np.empty((BATCH, len(rows), HEADS, DIM)) for _ in range(2))
    for i, row in enumerate(rows):
        q, dout = (x[:, row].astype(np.float64) for x in (inputs.q, inputs.dout))
        k, v = (x[:, : row + 1].astype(np.float64) for x in (inputs.k, inputs.v))
        scores = np.einsum("bhd,bkhd->bhk", q, k) * DIM**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        p = weights / weights.sum(-1, keepdims=True)
        out[:, i] = np.einsum("bhk,bkhd->bhd", p, v)
        dp = np.einsum("bhd,bkhd->bhk", dout, v)
        ds = p * (dp - np.sum(p * dp, -1, keepdims=True))
        dq[:, i] = np.einsum("bhk,bkhd->bhd", ds, k) * DIM**-0.5
    return {"out": out, "dq": dq}


def judge_whole(answer: Answer, truth: Answer) -> dict[str, Any]:
    """The errors of output and gradients, and whether they are those of rounding."""
    if not np.array_equal(answer.positions, truth.positions):
        raise ValueError("The parts of an answer must cover every position of the text once.")
    errors = {}
    for name in NAMES:
        got, want = getattr(answer, name), getattr(truth, name)
        errors[name] = float(np.max(np.abs(got - want)) / np.max(np.abs(want)))
    return _verdict("whole", len(truth.positions), errors)


def judge_rows(answer: Answer, truth: dict[str, np.ndarray], length: int) -> dict[str, Any]:
    """The same for sampled rows at full length, every row on its own scale."""
    errors = {}
    for name, want in truth.items():
        axes = (0, 2, 3)
        errors[name] = float(np.max(np.abs(getattr(answer, name) - want).max(axes) / np.abs(want).max(axes)))
    return _verdict("rows", length, errors)


def describe(verdict: dict[str, Any]) -> str:
    """A verdict in words, for the screen."""
    words = f"WRONG: {', '.join(verdict['wrong'])}" if verdict["wrong"] else "right"
    return f"{words}, largest error {max(verdict['errors'].values()):.1e}"


def _verdict(check: str, length: int, errors: dict[str, float]) -> dict[str, Any]:
    wrong = [name for name, error in errors.items() if not error <= TOLERANCE[check]]
    return {"check": check, "length": length, "errors": errors, "tolerance": TOLERANCE[check], "wrong": wrong}

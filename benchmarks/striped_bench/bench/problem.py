"""Problem: the attention problem of the suites, and how answers are checked before they are timed.

Self-attention over one sequence of `length` tokens with standard normal inputs, causal unless a suite says otherwise.
`both` is the output and, for a given cotangent, the gradients of query, key and value. All arrays are
[1, length, heads, dim].

For the check the cotangent is zero except at a few rows (`Inputs.few`). All gradients then come from these rows alone,
so the float64 reference (oracle) is affordable at any length: it needs 8 rows of scores instead of all.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from striped_attention.core.mask import Mask, causal
from striped_attention.core.oracle import dense_attention

KINDS = ("forward", "both")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape and dtype of the inputs for one sequence."""

    heads: int
    kv_heads: int
    dim: int
    dtype: str

    def configuration(self) -> dict[str, Any]:
        return {"batch": 1, **dataclasses.asdict(self)}


SHAPES = {"cpu": Shape(8, 8, 64, "float32"), "gpu": Shape(32, 8, 128, "bfloat16")}
CPU = SHAPES["cpu"]

# Errors of out and dq are relative to the scale of their row, about 1/√length, so cancellation costs a digit; one key
# too many would be an error of 1/√length, 8e-3 at 16384 tokens. Errors of dk and dv are relative to the largest value.
# In bfloat16 rounding alone gives 0.003 on an H200: one key too many is detected at 16384 tokens, not at 65536.
TOLERANCE = {
    "float32": {"out": 1e-4, "dq": 1e-4, "dk": 1e-5, "dv": 1e-5},
    "bfloat16": {"out": 0.006, "dq": 0.006, "dk": 0.006, "dv": 0.006},
}
SMALL = 0.01  # smallest scale of a row, relative to the largest value


class Inputs(NamedTuple):
    """Query, key, value and the cotangent of the output, in sequence order."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray

    @property
    def few(self) -> np.ndarray:
        """Cotangent of the check: `dout` at `sample_rows`, zero elsewhere."""
        kept = np.zeros_like(self.dout)
        rows = sample_rows(self.q.shape[1])
        kept[:, rows] = self.dout[:, rows]
        return kept


class Answer(NamedTuple):
    """Output and gradients of the tokens at `positions`, i.e. the part of the result that one process holds.

    `out` and `dq` may have the rows `sample_rows` only, since no others are checked.
    """

    positions: np.ndarray
    out: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


@functools.lru_cache(maxsize=1)  # rings that are compared use the same inputs in succession
def make_inputs(length: int, shape: Shape = CPU) -> Inputs:
    random = np.random.default_rng(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    arrays = (random.standard_normal((1, length, n, shape.dim), dtype=np.float32) for n in heads)
    return Inputs(*(array.astype(jnp.dtype(shape.dtype)) for array in arrays))


def sample_rows(length: int, count: int = 8) -> np.ndarray:
    """Positions spread over the sequence, including the last one, on both sides of stripe and chunk boundaries."""
    spread = np.linspace(length // count - 1, length - 1, count).astype(int) - np.arange(count)[::-1]
    return np.unique(np.maximum(spread, 0))


def visible_pairs(mask: Mask, length: int) -> int:
    """Count the visible query-key pairs of a mask: the useful work of one head."""
    lo, hi = mask.bounds(np.arange(length, dtype=np.int32), length)
    return int(np.sum(np.maximum(hi - lo, 0), dtype=np.int64))


def join(answers: Iterable[Answer]) -> Answer:
    """Join the answers of several processes into one, in sequence order."""
    parts = list(answers)
    positions = np.concatenate([part.positions for part in parts])
    order = np.argsort(positions)
    arrays = (np.concatenate([part[i] for part in parts], axis=1)[:, order] for i in range(1, 5))
    return Answer(positions[order], *arrays)


def oracle(inputs: Inputs, mask: Mask | None = None, rows: np.ndarray | None = None) -> Answer:
    """float64 reference: out and dq at `rows` (default: the sampled rows), and dk and dv for the cotangent there."""
    length = inputs.q.shape[1]
    rows, key = sample_rows(length) if rows is None else rows, np.arange(length, dtype=np.int32)
    lo, hi = (np.asarray(x)[:, rows, None] for x in (mask or causal()).bounds(key, length))
    attend = functools.partial(dense_attention, visible=(lo <= key) & (key < hi))
    with jax.enable_x64(True):
        q, k, v, dout = (x.astype(np.float64) for x in (inputs.q[:, rows], inputs.k, inputs.v, inputs.dout[:, rows]))
        out, pull = jax.vjp(attend, q, k, v)
        return Answer(rows, *(np.asarray(x) for x in (out, *pull(dout))))


def apart(found: Any, truth: np.ndarray, by_row: bool = True) -> float:
    """Largest error of an array, relative to the scale of each row or to the largest value of the array."""
    axes, found = (0, 2, 3) if by_row else None, np.asarray(found, np.float64)
    scale = np.maximum(np.abs(truth).max(axes), SMALL * np.abs(truth).max())  # dq of a row that sees one key is 0
    return float(np.max(np.abs(found - truth).max(axes) / scale))


def judge(answer: Answer, truth: Answer, dtype: str = CPU.dtype) -> dict[str, Any]:
    """Return the errors of output and gradients of a whole sequence, and which of them exceed the tolerance."""
    length = truth.dk.shape[1]
    if not np.array_equal(answer.positions, np.arange(length)):
        raise ValueError("The parts of an answer must cover every position exactly once.")
    rows = truth.positions if answer.out.shape[1] == length else slice(None)
    errors = {"out": apart(answer.out[:, rows], truth.out), "dq": apart(answer.dq[:, rows], truth.dq)}
    errors |= {"dk": apart(answer.dk, truth.dk, by_row=False), "dv": apart(answer.dv, truth.dv, by_row=False)}
    wrong = [name for name, error in errors.items() if not error <= TOLERANCE[dtype][name]]  # NaN counts as wrong
    return {"length": length, "errors": errors, "wrong": wrong}


def check(answer: Answer, truth: Answer, what: str, dtype: str = CPU.dtype) -> dict[str, Any]:
    """Return the errors for the record; raise if the answer is wrong."""
    verdict = judge(answer, truth, dtype)
    if verdict["wrong"]:
        errors = ", ".join(f"{name} {verdict['errors'][name]:.1e}" for name in verdict["wrong"])
        raise RuntimeError(f"{what} gives a wrong answer at {verdict['length']} tokens: {errors}. It is not timed.")
    return verdict

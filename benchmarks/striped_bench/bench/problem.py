"""Problem: the attention that the suites compute, and how an answer is judged before it is timed.

Self-attention, one sequence of `length` tokens, standard normal inputs, causal unless a suite says otherwise; `both` is
the output and, for a given cotangent, the gradients of query, key and value. All arrays are [1, length, heads, dim].

For the check the cotangent is zero but at a few rows (`Inputs.few`). Then all gradients come from these rows alone, and
the library's oracle can work them out in float64 at any length: 8 rows of scores instead of all.
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
    """Of the inputs of one sequence."""

    heads: int
    kv_heads: int
    dim: int
    dtype: str

    def configuration(self) -> dict[str, Any]:
        return {"batch": 1, **dataclasses.asdict(self)}


SHAPES = {"cpu": Shape(8, 8, 64, "float32"), "gpu": Shape(32, 8, 128, "bfloat16")}
CPU = SHAPES["cpu"]

# Of out and dq each row is judged on its own scale, about 1/√length, so cancellation costs a digit; one key too many
# would show as 1/√length, 8e-3 at 16384. Of dk and dv errors are relative to the largest number. In bfloat16 rounding
# makes 0.003 on an H200; there one key too many is found among 16384, not among 65536.
TOLERANCE = {
    "float32": {"out": 1e-4, "dq": 1e-4, "dk": 1e-5, "dv": 1e-5},
    "bfloat16": {"out": 0.006, "dq": 0.006, "dk": 0.006, "dv": 0.006},
}
SMALL = 0.01  # of the largest number: the least scale of a row


class Inputs(NamedTuple):
    """Query, key, value and the cotangent of the output, in sequence order."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray

    @property
    def few(self) -> np.ndarray:
        """The cotangent at `sample_rows`, and zero elsewhere: that of the check."""
        kept = np.zeros_like(self.dout)
        rows = sample_rows(self.q.shape[1])
        kept[:, rows] = self.dout[:, rows]
        return kept


class Answer(NamedTuple):
    """Output and gradients of the tokens at `positions`: what one process holds of the result.

    `out` and `dq` may be those of `sample_rows` alone, for no others are judged.
    """

    positions: np.ndarray
    out: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


@functools.lru_cache(maxsize=1)  # rings to be compared come one after the other
def make_inputs(length: int, shape: Shape = CPU) -> Inputs:
    random = np.random.default_rng(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    arrays = (random.standard_normal((1, length, n, shape.dim), dtype=np.float32) for n in heads)
    return Inputs(*(array.astype(jnp.dtype(shape.dtype)) for array in arrays))


def sample_rows(length: int, count: int = 8) -> np.ndarray:
    """Positions spread over the sequence, the last one included, on both sides of stripe and chunk boundaries."""
    spread = np.linspace(length // count - 1, length - 1, count).astype(int) - np.arange(count)[::-1]
    return np.unique(np.maximum(spread, 0))


def visible_pairs(mask: Mask, length: int) -> int:
    """Pairs of a query and a key that the mask lets meet: useful work, for one head."""
    lo, hi = mask.bounds(np.arange(length, dtype=np.int32), length)
    return int(np.sum(np.maximum(hi - lo, 0), dtype=np.int64))


def join(answers: Iterable[Answer]) -> Answer:
    """One answer in sequence order from the parts of several processes."""
    parts = list(answers)
    positions = np.concatenate([part.positions for part in parts])
    order = np.argsort(positions)
    arrays = (np.concatenate([part[i] for part in parts], axis=1)[:, order] for i in range(1, 5))
    return Answer(positions[order], *arrays)


def oracle(inputs: Inputs, mask: Mask | None = None, rows: np.ndarray | None = None) -> Answer:
    """In float64: output and dq at `rows`, by default the sampled ones, dk and dv everywhere, for their cotangent."""
    length = inputs.q.shape[1]
    rows, key = sample_rows(length) if rows is None else rows, np.arange(length, dtype=np.int32)
    lo, hi = (np.asarray(x)[:, rows, None] for x in (mask or causal()).bounds(key, length))
    attend = functools.partial(dense_attention, visible=(lo <= key) & (key < hi))
    with jax.enable_x64(True):
        q, k, v, dout = (x.astype(np.float64) for x in (inputs.q[:, rows], inputs.k, inputs.v, inputs.dout[:, rows]))
        out, pull = jax.vjp(attend, q, k, v)
        return Answer(rows, *(np.asarray(x) for x in (out, *pull(dout))))


def apart(found: Any, truth: np.ndarray, by_row: bool = True) -> float:
    """The largest error of an array, of each row on its own scale or relative to the largest number of all."""
    axes, found = (0, 2, 3) if by_row else None, np.asarray(found, np.float64)
    scale = np.maximum(np.abs(truth).max(axes), SMALL * np.abs(truth).max())  # dq of a row with one key is 0
    return float(np.max(np.abs(found - truth).max(axes) / scale))


def judge(answer: Answer, truth: Answer, dtype: str = CPU.dtype) -> dict[str, Any]:
    """The errors of a whole sequence's output and gradients, and what of them is more than rounding."""
    length = truth.dk.shape[1]
    if not np.array_equal(answer.positions, np.arange(length)):
        raise ValueError("The parts of an answer must cover every position once.")
    rows = truth.positions if answer.out.shape[1] == length else slice(None)
    errors = {"out": apart(answer.out[:, rows], truth.out), "dq": apart(answer.dq[:, rows], truth.dq)}
    errors |= {"dk": apart(answer.dk, truth.dk, by_row=False), "dv": apart(answer.dv, truth.dv, by_row=False)}
    wrong = [name for name, error in errors.items() if not error <= TOLERANCE[dtype][name]]  # NaN is not
    return {"length": length, "errors": errors, "wrong": wrong}


def check(answer: Answer, truth: Answer, what: str, dtype: str = CPU.dtype) -> dict[str, Any]:
    """A verdict for the record; raises if the answer is wrong."""
    verdict = judge(answer, truth, dtype)
    if verdict["wrong"]:
        errors = ", ".join(f"{name} {verdict['errors'][name]:.1e}" for name in verdict["wrong"])
        raise RuntimeError(f"{what} gives a wrong answer at {verdict['length']} tokens: {errors}. So it is not timed.")
    return verdict

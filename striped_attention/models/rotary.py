"""Rotary: positions as angles, by which pairs of a head's numbers are turned.

Pair i of a head turns by position · frequency_i, and frequencies fall from 1 to about 1/theta. Models that learned on
short texts reach longer ones with frequencies that were changed afterwards; `Stretch` is how:

    linear    all are divided by `factor`
    llama3    the slow ones are divided, the fast ones are not, with a ramp between them          (Llama 3.1 and later)
    yarn      the same with a ramp of another form, and scores are made a little larger           (Qwen at 128k)
    longrope  each is divided by a factor of its own, of one list for short sequences and of another for long ones, and
              scores are made a little larger                                     (Phi-3 at 128k, Phi-3.5, Phi-4-mini)

Which list of longrope holds is a choice for all tokens that meet: keys that were rotated with one cannot be compared
with queries that were rotated with the other. So it follows from the length that a run is for (`at_length`), once.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

STRETCHES = ("linear", "llama3", "yarn", "longrope")


@dataclasses.dataclass(frozen=True)
class Stretch:
    """How frequencies were changed for longer texts than the `original_length` that a model first learned on.

    `slow` and `fast` are turns over the original length: what turns less often is divided by `factor`, what turns more
    often is left alone. `amplitude` is what cosine and sine are multiplied with; None is what yarn and
    longrope make of the factor. `short` and `long` are longrope's factors, one per pair, for sequences of up to
    `original_length` tokens and for longer ones.
    """

    kind: str
    factor: float
    original_length: int | None = None
    slow: float = 1.0
    fast: float = 4.0
    amplitude: float | None = None
    short: tuple[float, ...] | None = None
    long: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in STRETCHES:
            raise ValueError(f"Rotary positions can be stretched by {', '.join(STRETCHES)}; got {self.kind!r}.")
        if self.kind != "linear" and not self.original_length:
            raise ValueError(f"The stretch {self.kind} needs the original length of a model's texts; got none.")
        if (self.kind == "longrope") != bool(self.short and self.long):
            raise ValueError(f"Factors per pair, short and long ones, are longrope's; got {self.kind}'s: {self}.")

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> "Stretch":
        """The inverse of `dataclasses.asdict`, also where JSON has made lists of tuples."""
        fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in said.items()}
        return cls(**fields)

    def at_length(self, length: int) -> "Stretch":
        """The same for sequences of up to `length` tokens: of longrope's factors those that hold then."""
        if self.kind != "longrope":
            return self
        assert self.original_length is not None
        factors = self.long if length > self.original_length else self.short
        return dataclasses.replace(self, short=factors, long=factors)

    def frequencies(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        if self.kind == "linear":
            return frequency / self.factor
        if self.kind == "longrope":
            assert self.short is not None
            if self.short != self.long:
                raise ValueError("The factors of longrope follow from a length: call at_length before.")
            if len(self.short) != len(frequency):
                raise ValueError(f"longrope has {len(self.short)} factors, but a head has {len(frequency)} pairs.")
            return frequency / np.array(self.short)
        assert self.original_length is not None
        if self.kind == "llama3":
            turns = self.original_length * frequency / (2 * math.pi)
            keep = np.clip((turns - self.slow) / (self.fast - self.slow), 0, 1)
        else:
            pairs = len(frequency)
            place = lambda turns: pairs * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(theta)  # noqa: E731
            first, last = max(math.floor(place(self.fast)), 0), min(math.ceil(place(self.slow)), 2 * pairs - 1)
            keep = 1 - np.clip((np.arange(pairs) - first) / max(last - first, 0.001), 0, 1)
        return frequency * (keep + (1 - keep) / self.factor)

    @property
    def scale(self) -> float:
        """What cosine and sine are multiplied with."""
        if self.amplitude is not None:
            return self.amplitude
        if self.factor <= 1 or self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.kind == "yarn":
            return 0.1 * math.log(self.factor) + 1
        assert self.original_length is not None
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))


def rotary(
    positions: Int[Array, "batch slots"], width: int, theta: float, stretch: Stretch | None = None
) -> tuple[Float[Array, "batch slots half"], Float[Array, "batch slots half"]]:
    """Cosine and sine of the rotary angles of `width` numbers of a head, in float32.

    position · frequency in float32 is off by 0.03 at a million. So the angle is the sum of two: whole thousands, whose
    turn is reduced to less than a circle in float64 beforehand, and the rest.
    """
    frequency = theta ** -(np.arange(0, width, 2) / width)
    if stretch is not None:
        frequency = stretch.frequencies(frequency, theta)
    block = 1024
    turn = np.remainder(block * frequency, 2 * np.pi).astype(np.float32)
    whole, rest = (x[..., None].astype(jnp.float32) for x in (positions // block, positions % block))
    angle = whole * turn + rest * frequency.astype(np.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    scale = 1.0 if stretch is None else stretch.scale
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def rotate(x: Float[Array, "batch slots heads dim"], cos: Array, sin: Array) -> Float[Array, "batch slots heads dim"]:
    """Turn pairs of numbers, of which one lies in the first half of a head and one in the second.

    Where there are fewer angles than pairs, only so many of a head's first numbers are turned.
    """
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], cos, sin), x[..., width:]], axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

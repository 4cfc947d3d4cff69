"""Rotary: positions as angles, by which pairs of a head's numbers are turned.

Pair i of a head turns by position · frequency_i, and frequencies fall from 1 to about 1/theta. Models that learned on
short texts reach longer ones with frequencies that were changed afterwards; `Stretch` is how:

    linear    all are divided by `factor`
    llama3    the slow ones are divided, the fast ones are not, with a ramp between them          (Llama 3.1 and later)
    yarn      the same with a ramp of another form, and scores are made a little larger           (Qwen at 128k)
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

STRETCHES = ("linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class Stretch:
    """How frequencies were changed for longer texts than the `original_length` that a model first learned on.

    `slow` and `fast` are turns over the original length: what turns less often is divided by `factor`, what turns more
    often is left alone. `amplitude` is what cosine and sine are multiplied with; None is yarn's own.
    """

    kind: str
    factor: float
    original_length: int | None = None
    slow: float = 1.0
    fast: float = 4.0
    amplitude: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in STRETCHES:
            raise ValueError(f"Rotary positions can be stretched by {', '.join(STRETCHES)}; got {self.kind!r}.")
        if self.kind != "linear" and not self.original_length:
            raise ValueError(f"The stretch {self.kind} needs the original length of a model's texts; got none.")

    def frequencies(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        if self.kind == "linear":
            return frequency / self.factor
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
        return 0.1 * math.log(self.factor) + 1 if self.kind == "yarn" and self.factor > 1 else 1.0


def rotary(
    positions: Int[Array, "batch slots"], head_dim: int, theta: float, stretch: Stretch | None = None
) -> tuple[Float[Array, "batch slots half"], Float[Array, "batch slots half"]]:
    """Cosine and sine of the rotary angles, in float32.

    position · frequency in float32 is off by 0.03 at a million. So the angle is the sum of two: whole thousands, whose
    turn is reduced to less than a circle in float64 beforehand, and the rest.
    """
    frequency = theta ** -(np.arange(0, head_dim, 2) / head_dim)
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
    """Turn pairs of numbers, of which one lies in the first half of a head and one in the second."""
    cos, sin = cos[:, :, None], sin[:, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

"""Rotary: rotary position embeddings (RoPE) and their scaling to longer sequences.

Pair i of a head's elements is rotated by position · frequency_i; frequencies fall from 1 to about 1/theta. Models
trained on short sequences are extended to longer ones by rope scaling, which changes the frequencies (`RopeScaling`):

    linear    all are divided by `factor`
    llama3    low frequencies are divided, high ones are not, with a ramp in between              (Llama 3.1 and later)
    yarn      the same with a different ramp, and slightly larger attention scores                (Qwen at 128k)
    longrope  each is divided by its own factor, from one list for short sequences and another for long ones, and
              attention scores are slightly larger                                (Phi-3 at 128k, Phi-3.5, Phi-4-mini)

All tokens of a sequence must use the same longrope list: keys rotated with one list do not fit queries rotated with the
other. So the list is chosen once, by the sequence length that a run is for (`at_length`).
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

ROPE_SCALINGS = ("linear", "llama3", "yarn", "longrope")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rope scaling: how frequencies change for sequences longer than the `original_length` of pretraining, in tokens.

    `slow` and `fast` count rotations over the original length: frequencies below `slow` are divided by `factor`, those
    above `fast` are unchanged. `amplitude` is the factor on cosine and sine; with None, yarn and longrope derive it
    from `factor`. `short` and `long` are longrope's factors, one per pair, for sequences of up to `original_length`
    tokens and for longer ones.
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
        if self.kind not in ROPE_SCALINGS:
            raise ValueError(f"Rope scaling must be one of {', '.join(ROPE_SCALINGS)}; got {self.kind!r}.")
        if self.kind != "linear" and not self.original_length:
            raise ValueError(f"Rope scaling {self.kind} needs the model's original sequence length; got none.")
        if (self.kind == "longrope") != bool(self.short and self.long):
            raise ValueError(f"Rope scaling longrope, and no other, needs short and long factors; got {self}.")

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> "RopeScaling":
        """The inverse of `dataclasses.asdict`, even after JSON has turned tuples into lists."""
        fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in said.items()}
        return cls(**fields)

    def at_length(self, length: int) -> "RopeScaling":
        """Return the scaling for sequences of up to `length` tokens: it selects the list of longrope's factors."""
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
                raise ValueError("The factors of longrope depend on the sequence length. Call at_length first.")
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
        """The factor on cosine and sine."""
        if self.amplitude is not None:
            return self.amplitude
        if self.factor <= 1 or self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.kind == "yarn":
            return 0.1 * math.log(self.factor) + 1
        assert self.original_length is not None
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))


def rotary(
    positions: Int[Array, "batch slots"], width: int, theta: float, rope_scaling: RopeScaling | None = None
) -> tuple[Float[Array, "batch slots half"], Float[Array, "batch slots half"]]:
    """Return cosine and sine of the rotary angles of `width` elements of a head, in float32.

    In float32, position · frequency is off by 0.03 at position 1,000,000. So the angle is the sum of two: that of whole
    blocks of 1024 positions, whose rotation is reduced modulo 2π in float64 beforehand, and that of the rest.
    """
    frequency = theta ** -(np.arange(0, width, 2) / width)
    if rope_scaling is not None:
        frequency = rope_scaling.frequencies(frequency, theta)
    block = 1024
    turn = np.remainder(block * frequency, 2 * np.pi).astype(np.float32)
    whole, rest = (x[..., None].astype(jnp.float32) for x in (positions // block, positions % block))
    angle = whole * turn + rest * frequency.astype(np.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    scale = 1.0 if rope_scaling is None else rope_scaling.scale
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


def rotate(x: Float[Array, "batch slots heads dim"], cos: Array, sin: Array) -> Float[Array, "batch slots heads dim"]:
    """Rotate pairs of elements, one from the first half of a head and one from the second.

    With fewer angles than pairs, only the first elements of each head are rotated.
    """
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], cos, sin), x[..., width:]], axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

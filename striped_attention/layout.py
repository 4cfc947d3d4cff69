"""Layout: which device holds which token.

A layout deals a text's tokens to devices the way one deals cards: `stripe` tokens at a time, round after round. Every
layout in use is a case of that one rule:

    contiguous()   one round, a device's whole share at once         (Ring Attention)      0 0 0 0 1 1 1 1
    striped(g)     stripes of g tokens, always in the same direction (Striped Attention)   0 1 0 1 0 1 0 1   (g = 1)
    zigzag()       two rounds, the second one dealt backwards        (Llama 3)             0 0 1 1 1 1 0 0

The picture shows the device of each of 8 positions for 2 devices. The last round shares out what is left in equal,
narrower stripes, so every length that divides by the number of devices (for zigzag: by twice that) is dealt without
padding.

A device keeps its tokens in `slots`, **sorted by position**. That is what makes the rest of the library simple: a range
of positions is a range of slots on every device, and `count_before` finds its ends in closed form.
"""

import dataclasses
import re
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

INT32_MAX = 2**31 - 1


class Stair(NamedTuple):
    """A number for every device: `below` for those before `at`, `here` for that one, `above` for those after it."""

    at: np.ndarray
    below: np.ndarray
    here: np.ndarray
    above: np.ndarray

    def value(self, device: np.ndarray) -> np.ndarray:
        return np.where(device < self.at, self.below, np.where(device == self.at, self.here, self.above))


@dataclasses.dataclass(frozen=True)
class Layout:
    """A rule that deals tokens to devices; made by `contiguous`, `striped` or `zigzag`.

    `stripe` is the width of a stripe; without it a device's share is divided into `rounds` stripes. `backwards` deals
    every second round in the opposite direction.
    """

    name: str
    stripe: int | None = None
    rounds: int = 1
    backwards: bool = False

    def __repr__(self) -> str:
        return f"{self.name}({'' if self.stripe is None else self.stripe})"

    def padded_length(self, length: int, devices: int) -> int:
        """The smallest length ≥ `length` that this layout can share out equally."""
        check_whole("length", length)
        check_whole("devices", devices)
        unit = self.rounds * devices
        padded = -(-length // unit) * unit
        if padded > INT32_MAX:
            raise ValueError(
                f"Positions are int32, so a length may be at most {INT32_MAX} after padding; got length {length} "
                f"(padded: {padded}). Split the text into shorter sequences."
            )
        return padded

    def order(self, length: int, devices: int) -> Int[np.ndarray, " length"]:
        """The position of the token in every slot, device after device: `x[order]` is x in layout order."""
        self._deal(length, devices)
        return np.concatenate([self.positions(device, length, devices) for device in range(devices)])

    def positions(self, device: Any, length: int, devices: int) -> Int[Array | np.ndarray, " slots"]:
        """The positions of a device's tokens, increasing. `device` may be traced, as `lax.axis_index` is."""
        slots, _ = self._deal(length, devices)
        return self.position(device, namespace(device).arange(slots, dtype=np.int32), length, devices)

    def position(self, device: Any, slot: Any, length: int, devices: int) -> Any:
        """The position of the token in a device's slot; also of many."""
        slots, width = self._deal(length, devices)
        xp = namespace(device, slot)
        turn, stripe = self._turn(xp, slot // width, device, devices, slots, width)
        return slot // width * (devices * width) + turn * stripe + slot % width

    def stripe_end(self, slot: Any, length: int, devices: int) -> Any:
        """The slot after the last one of the same stripe, before which positions follow one another."""
        slots, width = self._deal(length, devices)
        begin = slot - slot % width
        return begin + namespace(slot).minimum(slots - begin, width)

    def count_before(
        self, device: Any, position: Int[Array | np.ndarray, "*shape"] | int, length: int, devices: int
    ) -> Int[Array | np.ndarray, "*shape"]:
        """How many of a device's tokens have a smaller position; also the slot where a range of positions starts."""
        slots, width = self._deal(length, devices)
        xp = namespace(device, position)
        position = xp.clip(xp.asarray(position).astype(int), 0, length).astype(np.int32)
        round_ = position // (devices * width)
        turn, stripe = self._turn(xp, round_, device, devices, slots, width)
        in_stripe = position - round_ * (devices * width) - turn * stripe
        return round_ * width + xp.clip(in_stripe, 0, stripe)

    def count_before_all(self, position: np.ndarray, length: int, devices: int) -> "Stair":
        """`count_before` for all devices at once: in a round it is one number, then another, with one between them."""
        slots, width = self._deal(length, devices)
        round_, left = np.divmod(position, np.int32(devices * width))
        stripe = np.where(round_ < slots // width, np.int32(width), np.int32(slots % width))
        turn, part = np.divmod(left, np.maximum(stripe, 1))
        before = round_ * width
        back = (round_ % 2 == 1) if self.backwards else np.zeros_like(round_, bool)
        done, open_ = before + stripe, before
        at = np.where(back, devices - 1 - turn, turn)
        return Stair(at, np.where(back, open_, done), before + part, np.where(back, done, open_))

    def permute(self, x: Any, devices: int, axis: int, pad: Any = 0) -> Any:
        """Put an array from text order into layout order along `axis`, padding it with `pad` where it does not divide.

        NumPy arrays stay NumPy arrays (where data enters), JAX arrays stay JAX arrays.
        """
        axis = _check_axis(x, axis)
        length = x.shape[axis]
        order = self.order(self.padded_length(length, devices), devices)
        if not isinstance(x, np.ndarray):
            return _gather(x, order, axis, fill=pad if len(order) > length else None)
        if len(order) > length:
            widths = [(0, len(order) - length if i == axis else 0) for i in range(x.ndim)]
            x = np.pad(x, widths, constant_values=pad)
        return np.take(x, order, axis)

    @no_type_check  # checks its arguments itself
    def restore(self, x: Any, devices: int, axis: int, length: int | None = None) -> Any:
        """Undo `permute`: back to text order; `length` cuts the padding off."""
        axis = _check_axis(x, axis)
        slot_of = np.argsort(self.order(x.shape[axis], devices)).astype(np.int32)
        if length is not None:
            if check_whole("length", length) > x.shape[axis]:
                raise ValueError(f"length must be between 1 and the array's length {x.shape[axis]}; got {length}.")
            slot_of = slot_of[:length]
        return np.take(x, slot_of, axis) if isinstance(x, np.ndarray) else _gather(x, slot_of, axis)

    def _deal(self, length: int, devices: int) -> tuple[int, int]:
        """Slots per device and the width of a full stripe."""
        padded = self.padded_length(length, devices)
        if padded != length:
            even = "" if self.rounds == 1 else f" in {self.rounds} equal rounds"
            raise ValueError(
                f"{self!r} needs a length that {devices} devices can share equally{even}, a multiple of "
                f"{self.rounds * devices}; got {length}. Pad it to {padded}: layout.permute does that for you."
            )
        slots = length // devices
        return slots, min(self.stripe or slots // self.rounds, slots)

    def _turn(self, xp: Any, round_: Any, device: Any, devices: int, slots: int, width: int) -> tuple[Any, Any]:
        """Whose turn the device is in a round (counted from 0), and how wide that round's stripes are."""
        if not isinstance(device, jax.Array) and not (np.min(device) >= 0 and np.max(device) < devices):
            raise ValueError(f"device must be one of the {devices} devices, counted from 0; got {device}.")
        turn = xp.asarray(device, dtype=np.int32)
        if self.backwards:
            turn = xp.where(round_ % 2 == 1, devices - 1 - turn, turn)
        stripe = xp.where(round_ < slots // width, np.int32(width), np.int32(slots % width))
        return turn, stripe


def contiguous() -> Layout:
    """Every device holds one contiguous piece: Ring Attention's layout."""
    return Layout("contiguous")


@no_type_check  # checks its argument itself
def striped(stripe: int = 1) -> Layout:
    """Stripes of `stripe` tokens dealt round-robin: Striped Attention's layout, as wide as you like.

    As wide as a tile of the kernel (256 on CPUs, 1024 on GPUs) is the best choice for packed documents: neighbours stay
    together, and fewer tiles are touched.
    """
    return Layout("striped", stripe=check_whole("stripe", stripe))


def zigzag() -> Layout:
    """Every device holds one piece from the front and its mirror image from the back, as Llama 3 was trained."""
    return Layout("zigzag", rounds=2, backwards=True)


def parse_layout(text: str) -> Layout:
    """A layout from its name, as `repr` writes it; brackets may be left out, as in zigzag or striped."""
    found = re.fullmatch(r"(contiguous|zigzag)(?:\(\))?|striped(?:\((\d+)\))?", text.strip())
    if found is None:
        raise ValueError(f"A layout is written like contiguous, zigzag or striped(256); got {text!r}.")
    if found[1]:
        return contiguous() if found[1] == "contiguous" else zigzag()
    return striped(int(found[2] or 1))


def namespace(*values: Any) -> Any:
    """jax.numpy if any value is a JAX array, traced or not; else NumPy."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np


def _gather(x: Any, index: np.ndarray, axis: int, fill: Any = None) -> jax.Array:
    """`jnp.take` that also works on arrays whose sharding is part of their type (explicit mesh axes)."""
    x = jnp.asarray(x)
    options: dict[str, Any] = {}
    sharding = jax.typeof(x).sharding
    if any(name is not None for name in sharding.spec):
        shards = x.shape[axis] // sharding.shard_shape(x.shape)[axis]
        spec = list(sharding.spec)
        if len(index) % shards:
            spec[axis] = None
        options["out_sharding"] = sharding.update(spec=jax.P(*spec))
    if fill is None:
        options["mode"] = "promise_in_bounds"
    else:
        options.update(mode="fill", fill_value=fill)
    return x.at[(slice(None),) * axis + (index,)].get(unique_indices=True, **options)


def check_whole(name: str, value: Any, least: int = 1) -> int:
    """The value as an int; raises unless it is a whole number that is large enough."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}.")
    return int(value)


def _check_axis(x: Any, axis: int) -> int:
    if not hasattr(x, "ndim"):
        raise ValueError(f"Only NumPy and JAX arrays can be permuted; got {type(x).__name__}.")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must name one of the array's {x.ndim} dimensions; got axis={axis} for shape {x.shape}.")
    return axis % x.ndim

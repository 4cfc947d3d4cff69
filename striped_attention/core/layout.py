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
import math
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int

from striped_attention.core.annotations import checks_itself

INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Runs:
    """A device's slots as `count` equal runs of positions that are evenly spaced, `spacing` apart."""

    count: int
    spacing: int


class Stripes(NamedTuple):
    """Some stripes of all devices: whose they are, and the first and last position of each."""

    device: np.ndarray
    first: np.ndarray
    last: np.ndarray


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

    def runs(self, length: int, devices: int) -> Runs | None:
        """How regular a device's positions are, for kernels that know a few shapes only; None if runs are unequal.

        In a run positions follow one another, or stripes are a single token and positions are `devices` apart.
        """
        slots, width = self._deal(length, devices)
        if devices == 1 or (width == 1 and not self.backwards):
            return Runs(1, devices)
        return None if slots % width else Runs(slots // width, 1)

    def sample_stripes(self, length: int, devices: int) -> Stripes:
        """Stripes of the first four rounds and of the last two; those of a round lie next to each other.

        Rounds repeat in pairs, and only the last one may be narrower. So whatever two stripes are to each other, one
        round apart or none, is found among these.
        """
        slots, width = self._deal(length, devices)
        rounds = -(-slots // width)
        round_ = np.unique([r for r in (0, 1, 2, 3, rounds - 2, rounds - 1) if 0 <= r < rounds])
        device, round_ = (x.reshape(-1) for x in np.meshgrid(np.arange(devices), round_, indexing="ij"))
        slot = (round_ * width).astype(np.int32)
        first = self.position(device, slot, length, devices)
        return Stripes(device, first, first + self.stripe_end(slot, length, devices) - slot - 1)

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

    def grouped(self, members: int) -> "Layout":
        """The layout of groups of so many neighbouring devices, each taken for one device: again a layout.

        Sort the tokens of a group, and they lie as this layout deals them to as many devices as there are groups.
        """
        return self if self.stripe is None else dataclasses.replace(self, stripe=self.stripe * members)

    def join(self, x: Any, members: int, length: int, devices: int, axis: int = 1) -> Any:
        """Slots of a group of neighbouring devices, one device after the other, as slots of `grouped(members)`.

        `length` and `devices` are those of this layout. All groups are joined alike.
        """
        slots, width = self._deal(length, devices)
        xp, rounds = namespace(x), slots // width
        x = xp.moveaxis(x, axis, 0).reshape(members, slots, *x.shape[:axis], *x.shape[axis + 1 :])
        whole = xp.swapaxes(x[:, : rounds * width].reshape(members, rounds, width, *x.shape[2:]), 0, 1)
        whole, rest = self._turn_back(whole), x[:, rounds * width :]
        found = xp.concatenate([whole.reshape(-1, *x.shape[2:]), rest.reshape(-1, *x.shape[2:])])
        return xp.moveaxis(found, 0, axis)

    def split(self, x: Any, members: int, length: int, devices: int, axis: int = 1) -> Any:
        """Undo `join`."""
        slots, width = self._deal(length, devices)
        xp, rounds = namespace(x), slots // width
        x = xp.moveaxis(x, axis, 0)
        whole = x[: members * rounds * width].reshape(rounds, members, width, *x.shape[1:])
        whole = xp.swapaxes(self._turn_back(whole), 0, 1).reshape(members, rounds * width, *x.shape[1:])
        rest = x[members * rounds * width :].reshape(members, slots - rounds * width, *x.shape[1:])
        return xp.moveaxis(xp.concatenate([whole, rest], axis=1).reshape(-1, *x.shape[1:]), 0, axis)

    def _turn_back(self, x: Any) -> Any:
        """[rounds, members, ...] with the members reversed in rounds that are dealt in the opposite direction."""
        if not self.backwards:
            return x
        xp = namespace(x)
        return xp.stack([xp.flip(part, 0) if i % 2 else part for i, part in enumerate(x)])

    def permute(
        self,
        x: Any,
        devices: int | None = None,
        axis: int = 1,
        pad: Any = 0,
        *,
        mesh: Mesh | AbstractMesh | None = None,
        axis_name: "AxisName | None" = None,
    ) -> Any:
        """Put an array from sequence order into layout order along `axis`, padded with `pad` where it does not divide.

        How many devices share the sequence is said by `devices`, or by the mesh and the axis that attention is given:
        then they cannot differ. NumPy arrays stay NumPy arrays (where data enters), JAX arrays stay JAX arrays.
        """
        devices = count_devices(devices, mesh, axis_name)
        axis = _check_axis(x, axis)
        length = x.shape[axis]
        order = self.order(self.padded_length(length, devices), devices)
        if not isinstance(x, np.ndarray):
            return _gather(x, order, axis, fill=pad if len(order) > length else None)
        if len(order) > length:
            widths = [(0, len(order) - length if i == axis else 0) for i in range(x.ndim)]
            x = np.pad(x, widths, constant_values=pad)
        return np.take(x, order, axis)

    @checks_itself
    def restore(
        self,
        x: Any,
        devices: int | None = None,
        axis: int = 1,
        length: int | None = None,
        *,
        mesh: Mesh | AbstractMesh | None = None,
        axis_name: "AxisName | None" = None,
    ) -> Any:
        """Undo `permute`: back to sequence order; `length` cuts the padding off."""
        devices = count_devices(devices, mesh, axis_name)
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


@checks_itself
def striped(stripe: int = 1) -> Layout:
    """Stripes of `stripe` tokens dealt round-robin: Striped Attention's layout, as wide as you like.

    As wide as a tile of the kernel (256 on CPUs, 1024 on GPUs) is the best choice for packed documents: neighbours stay
    together, and fewer tiles are touched.
    """
    return Layout("striped", stripe=check_whole("stripe", stripe))


def zigzag() -> Layout:
    """Every device holds one piece from the front and its mirror image from the back, as Llama 3 was trained."""
    return Layout("zigzag", rounds=2, backwards=True)


LayoutName = Literal["striped", "contiguous", "zigzag"]  # as commands take them
DEFAULT: LayoutName = "striped"
BASELINE = contiguous()  # Ring Attention: what others are compared with


def named_layout(name: str, stripe: int = 1) -> Layout:
    """A layout by its name; `stripe` is the width of stripes, if it has any."""
    return striped(stripe) if has_stripes(name) else {"contiguous": contiguous, "zigzag": zigzag}[name]()


def has_stripes(name: str) -> bool:
    """Whether a layout of that name has stripes of a chosen width."""
    return name == "striped"


def candidates(length: int, devices: int, tiles: Sequence[int] = (256, 1024)) -> list[Layout]:
    """Layouts worth comparing, the baseline first: stripes of one token and as wide as tiles, where they are narrow."""
    stripes = [1, *(tile for tile in tiles if 2 * tile * devices <= length)]
    return [BASELINE, *map(striped, stripes), zigzag()]


def stripes_of(tile: int, slots: int) -> list[Layout]:
    """Stripes to choose from for devices with so many slots: about as wide as a tile, or a single token.

    Four stripes per device at least keep the devices balanced; a power of two divides most lengths.
    """
    quarter = max(1, slots // 4)
    return [striped(min(tile, 2 ** (quarter.bit_length() - 1))), striped(1)]


def parse_layout(text: str) -> Layout:
    """A layout from its name, as `repr` writes it; brackets may be left out, as in zigzag or striped."""
    found = re.fullmatch(r"(contiguous|zigzag)(?:\(\))?|striped(?:\((\d+)\))?", text.strip())
    if found is None:
        raise ValueError(f"A layout is written like contiguous, zigzag or striped(256); got {text!r}.")
    return named_layout(found[1] or "striped", int(found[2] or 1))


def describe_order(positions: np.ndarray) -> str:
    """What order positions are in, in a sentence, if it is one that is easily taken for another."""
    length = len(positions)
    if (np.diff(positions) == 1).all():
        return "They are in sequence order: nothing was permuted."
    for devices in (n for n in range(2, 1 + min(length, 1024)) if length % n == 0):
        for layout in candidates(length, devices):
            if layout.padded_length(length, devices) == length and (layout.order(length, devices) == positions).all():
                return f"They are in the order of {layout!r} on {devices} devices."
    return ""


def check_layout(layout: Any) -> None:
    """Raise unless it is a layout."""
    if not isinstance(layout, Layout):
        raise ValueError(f"layout must be striped(), contiguous() or zigzag(); got {layout!r}.")


AxisName = str | tuple[str, ...]  # a mesh axis, or several: the last one's devices are next to each other


def count_devices(devices: Any, mesh: Any, axis_name: AxisName | None) -> int:
    """How many devices share a sequence: a number, or the size of a mesh axis, or of several together."""
    if (devices is None) == (mesh is None) or (mesh is None) != (axis_name is None):
        raise ValueError(
            "Say how many devices share the sequence: devices=8, or mesh=… and axis_name=… as for attention; got "
            f"devices={devices!r}, mesh={mesh!r}, axis_name={axis_name!r}."
        )
    if mesh is None:
        return check_whole("devices", devices)
    return math.prod(mesh.shape[name] for name in check_axis(mesh, axis_name))


def check_axis(mesh: Any, axis_name: Any) -> tuple[str, ...]:
    """The names of an axis, or of several; raises unless it is a mesh that has them."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ValueError(f"mesh must be a jax.sharding.Mesh; got {mesh!r}. jax.make_mesh makes one.")
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(name in mesh.axis_names for name in names) or len(set(names)) < len(names):
        raise ValueError(
            f"axis_name must be an axis of the mesh, or a tuple of several; got {axis_name!r}, and the mesh has "
            f"{tuple(mesh.axis_names)}."
        )
    return names


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

"""Layout: which device holds which token.

A layout distributes the tokens of a sequence round-robin over the devices, `stripe` tokens at a time. Every layout is a
case of this one rule:

    contiguous()   one round: a device's whole share at once         (Ring Attention)      0 0 0 0 1 1 1 1
    striped(g)     stripes of g tokens, always in the same direction (Striped Attention)   0 1 0 1 0 1 0 1   (g = 1)
    zigzag()       two rounds, the second in reverse device order    (Llama 3)             0 0 1 1 1 1 0 0

The right column shows which of 2 devices holds each of 8 positions. The last round divides the remaining tokens into
equal, narrower stripes. So a length needs no padding if it is a multiple of the number of devices (for zigzag: of twice
that number).

A device keeps its tokens in `slots`, **sorted by position**. This keeps the rest of the library simple: a range of
positions is a range of slots on every device, and `count_before` computes its ends in closed form.
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
    """A device's positions as `count` runs of equal length; within a run, positions are `spacing` apart."""

    count: int
    spacing: int


class Stripes(NamedTuple):
    """A selection of stripes: the device that holds each one, and its first and last position."""

    device: np.ndarray
    first: np.ndarray
    last: np.ndarray


class Stair(NamedTuple):
    """A step function of the device: `below` for devices before `at`, `here` for device `at`, `above` after it."""

    at: np.ndarray
    below: np.ndarray
    here: np.ndarray
    above: np.ndarray

    def value(self, device: np.ndarray) -> np.ndarray:
        return np.where(device < self.at, self.below, np.where(device == self.at, self.here, self.above))


@dataclasses.dataclass(frozen=True)
class Layout:
    """A rule that assigns tokens to devices; made by `contiguous`, `striped` or `zigzag`.

    `stripe` is the width of a stripe; if it is None, a device's share is divided into `rounds` stripes. With
    `backwards`, every second round goes through the devices in reverse order.
    """

    name: str
    stripe: int | None = None
    rounds: int = 1
    backwards: bool = False

    def __repr__(self) -> str:
        return f"{self.name}({'' if self.stripe is None else self.stripe})"

    def padded_length(self, length: int, devices: int) -> int:
        """Return the smallest length ≥ `length` that this layout can divide equally among the devices."""
        check_whole("length", length)
        check_whole("devices", devices)
        unit = self.rounds * devices
        padded = -(-length // unit) * unit
        if padded > INT32_MAX:
            raise ValueError(
                f"Positions are int32, so a length may be at most {INT32_MAX} after padding; got length {length} "
                f"(padded: {padded}). Split it into shorter sequences."
            )
        return padded

    def order(self, length: int, devices: int) -> Int[np.ndarray, " length"]:
        """Return the position of the token in every slot, device after device: `x[order]` is x in layout order."""
        self._deal(length, devices)
        return np.concatenate([self.positions(device, length, devices) for device in range(devices)])

    def positions(self, device: Any, length: int, devices: int) -> Int[Array | np.ndarray, " slots"]:
        """Return the positions of a device's tokens in increasing order. `device` may be traced (`lax.axis_index`)."""
        slots, _ = self._deal(length, devices)
        return self.position(device, namespace(device).arange(slots, dtype=np.int32), length, devices)

    def position(self, device: Any, slot: Any, length: int, devices: int) -> Any:
        """Return the position of the token in a slot of a device; both may be arrays."""
        slots, width = self._deal(length, devices)
        xp = namespace(device, slot)
        turn, stripe = self._turn(xp, slot // width, device, devices, slots, width)
        return slot // width * (devices * width) + turn * stripe + slot % width

    def stripe_end(self, slot: Any, length: int, devices: int) -> Any:
        """Return the end (exclusive) of the stripe that contains `slot`; positions within a stripe are consecutive."""
        slots, width = self._deal(length, devices)
        begin = slot - slot % width
        return begin + namespace(slot).minimum(slots - begin, width)

    def runs(self, length: int, devices: int) -> Runs | None:
        """Return a device's positions as equal runs, for kernels that support few patterns; None if runs are unequal.

        Positions in a run are consecutive, or `devices` apart if stripes are one token wide.
        """
        slots, width = self._deal(length, devices)
        if devices == 1 or (width == 1 and not self.backwards):
            return Runs(1, devices)
        return None if slots % width else Runs(slots // width, 1)

    def sample_stripes(self, length: int, devices: int) -> Stripes:
        """Return the stripes of the first four and the last two rounds; those of a round are adjacent in the sequence.

        Rounds repeat in pairs, and only the last may be narrower. So these stripes include every relation that two
        stripes of the same round or of adjacent rounds can have.
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
        """Return how many of a device's tokens lie before `position`, i.e. the first slot at or after it."""
        slots, width = self._deal(length, devices)
        xp = namespace(device, position)
        position = xp.clip(xp.asarray(position).astype(int), 0, length).astype(np.int32)
        round_ = position // (devices * width)
        turn, stripe = self._turn(xp, round_, device, devices, slots, width)
        in_stripe = position - round_ * (devices * width) - turn * stripe
        return round_ * width + xp.clip(in_stripe, 0, stripe)

    def count_before_all(self, position: np.ndarray, length: int, devices: int) -> "Stair":
        """Compute `count_before` for all devices at once: one value before some device, one on it, one after it."""
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
        """Return the layout whose devices are groups of `members` neighbouring devices of this one.

        Layouts are closed under grouping: the sorted tokens of a group are what that layout assigns to one device.
        """
        return self if self.stripe is None else dataclasses.replace(self, stripe=self.stripe * members)

    def join(self, x: Any, members: int, length: int, devices: int, axis: int = 1) -> Any:
        """Reorder the concatenated slots of a group of neighbouring devices into slots of `grouped(members)`.

        `length` and `devices` are those of this layout. The reordering is the same for all groups.
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
        """Reverse the members in the rounds of x, [rounds, members, ...], that go through devices in reverse order."""
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
        """Permute an array from sequence order into layout order along `axis`, padding with `pad` where necessary.

        Give the number of devices that share the sequence as `devices`, or as the mesh and axis that attention gets, so
        that the two cannot differ. NumPy arrays stay NumPy arrays (for data loading); JAX arrays stay JAX arrays.
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
        """Undo `permute`: return to sequence order; `length` removes the padding."""
        devices = count_devices(devices, mesh, axis_name)
        axis = _check_axis(x, axis)
        slot_of = np.argsort(self.order(x.shape[axis], devices)).astype(np.int32)
        if length is not None:
            if check_whole("length", length) > x.shape[axis]:
                raise ValueError(f"length must be between 1 and the array's length {x.shape[axis]}; got {length}.")
            slot_of = slot_of[:length]
        return np.take(x, slot_of, axis) if isinstance(x, np.ndarray) else _gather(x, slot_of, axis)

    def _deal(self, length: int, devices: int) -> tuple[int, int]:
        """Return the slots per device and the width of a full stripe; raise unless the length divides equally."""
        padded = self.padded_length(length, devices)
        if padded != length:
            even = "" if self.rounds == 1 else f" in {self.rounds} equal rounds"
            raise ValueError(
                f"{self!r} needs a length that {devices} devices can share equally{even}, a multiple of "
                f"{self.rounds * devices}; got {length}. Pad it to {padded}: layout.permute does that."
            )
        slots = length // devices
        return slots, min(self.stripe or slots // self.rounds, slots)

    def _turn(self, xp: Any, round_: Any, device: Any, devices: int, slots: int, width: int) -> tuple[Any, Any]:
        """Return the device's turn in a round (counted from 0), and the width of that round's stripes."""
        if not isinstance(device, jax.Array) and not (np.min(device) >= 0 and np.max(device) < devices):
            raise ValueError(f"device must be one of the {devices} devices, counted from 0; got {device}.")
        turn = xp.asarray(device, dtype=np.int32)
        if self.backwards:
            turn = xp.where(round_ % 2 == 1, devices - 1 - turn, turn)
        stripe = xp.where(round_ < slots // width, np.int32(width), np.int32(slots % width))
        return turn, stripe


def contiguous() -> Layout:
    """One contiguous chunk per device: Ring Attention's layout."""
    return Layout("contiguous")


@checks_itself
def striped(stripe: int = 1) -> Layout:
    """Stripes of `stripe` tokens distributed round-robin: Striped Attention's layout, with stripes of any width.

    For packed documents, make stripes as wide as a tile of the kernel (256 on CPUs, 128 on Hopper GPUs, 1024 on other
    GPUs and TPUs): neighbouring tokens stay together, and the kernel computes fewer tiles.
    """
    return Layout("striped", stripe=check_whole("stripe", stripe))


def zigzag() -> Layout:
    """One chunk from the front and its mirror image from the back per device, as in the training of Llama 3."""
    return Layout("zigzag", rounds=2, backwards=True)


LayoutName = Literal["striped", "contiguous", "zigzag"]  # for the command line
LayoutChoice = Literal["auto", "striped", "contiguous", "zigzag"]
DEFAULT: LayoutName = "striped"
BASELINE = contiguous()  # Ring Attention's layout, which the others are compared with
UNSTRIPED = (BASELINE, zigzag())


def named_layout(name: str, stripe: int = 1) -> Layout:
    """Return a layout by name; `stripe` is the stripe width for layouts that have one."""
    return striped(stripe) if has_stripes(name) else {"contiguous": contiguous, "zigzag": zigzag}[name]()


def has_stripes(name: str) -> bool:
    """Return whether the layout of that name has an adjustable stripe width."""
    return name == "striped"


def candidates(length: int, devices: int, tiles: Sequence[int] = (256, 1024)) -> list[Layout]:
    """Return layouts worth comparing, the baseline first.

    Stripes are one token wide, or as wide as a tile where that leaves at least two rounds.
    """
    stripes = [1, *(tile for tile in tiles if 2 * tile * devices <= length)]
    return [BASELINE, *map(striped, stripes), zigzag()]


def stripes_of(tile: int, slots: int) -> list[Layout]:
    """Return striped layouts to choose from for devices with `slots` slots: stripes of about a tile, or of one token.

    At least four stripes per device keep the load balanced; a power of two divides most lengths.
    """
    quarter = max(1, slots // 4)
    return [striped(min(tile, 2 ** (quarter.bit_length() - 1))), striped(1)]


def parse_layout(text: str) -> Layout:
    """Parse a layout as written by `repr`; parentheses may be omitted, as in zigzag or striped."""
    found = re.fullmatch(r"(contiguous|zigzag)(?:\(\))?|striped(?:\((\d+)\))?", text.strip())
    if found is None:
        raise ValueError(f"A layout is written like contiguous, zigzag or striped(256); got {text!r}.")
    return named_layout(found[1] or "striped", int(found[2] or 1))


def describe_order(positions: np.ndarray) -> str:
    """Describe the order of positions in a sentence if it is a common mistake; otherwise return an empty string."""
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


AxisName = str | tuple[str, ...]  # a mesh axis, or several; devices along the last one are neighbours


def count_devices(devices: Any, mesh: Any, axis_name: AxisName | None) -> int:
    """Return how many devices share a sequence: `devices`, or the product of the sizes of the mesh axes."""
    if (devices is None) == (mesh is None) or (mesh is None) != (axis_name is None):
        raise ValueError(
            "Pass the number of devices that share the sequence as devices=8, or as mesh=… and axis_name=…; got "
            f"devices={devices!r}, mesh={mesh!r}, axis_name={axis_name!r}."
        )
    if mesh is None:
        return check_whole("devices", devices)
    return math.prod(mesh.shape[name] for name in check_axis(mesh, axis_name))


def check_axis(mesh: Any, axis_name: Any) -> tuple[str, ...]:
    """Return the axis names as a tuple; raise unless `mesh` is a mesh that has them."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise ValueError(f"mesh must be a jax.sharding.Mesh; got {mesh!r}. Create one with jax.make_mesh.")
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(name in mesh.axis_names for name in names) or len(set(names)) < len(names):
        raise ValueError(
            f"axis_name must be an axis of the mesh, or a tuple of several; got {axis_name!r}, and the mesh has "
            f"{tuple(mesh.axis_names)}."
        )
    return names


def namespace(*values: Any) -> Any:
    """Return jax.numpy if any value is a JAX array, traced or not; otherwise NumPy."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np


def _gather(x: Any, index: np.ndarray, axis: int, fill: Any = None) -> jax.Array:
    """Do what `jnp.take` does, also for arrays whose sharding is part of their type (explicit mesh axes)."""
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
    """Return the value as an int; raise unless it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}.")
    return int(value)


def _check_axis(x: Any, axis: int) -> int:
    if not hasattr(x, "ndim"):
        raise ValueError(f"Only NumPy and JAX arrays can be permuted; got {type(x).__name__}.")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must name one of the array's {x.ndim} dimensions; got axis={axis} for shape {x.shape}.")
    return axis % x.ndim

"""Choice: the registry of kernels, and which of them runs.

`choose` selects the fastest kernel that supports a request, by the measured speed of each (`rates.py`).
"""

import dataclasses
import logging
import warnings
from typing import Any

from striped_attention.core.layout import UNSTRIPED, Layout, stripes_of
from striped_attention.core.mask import Rule
from striped_attention.errors import SlowKernelWarning
from striped_attention.kernels import cudnn, hopper, tpu, xla
from striped_attention.kernels.contract import Kernel, Request
from striped_attention.kernels.rates import ANYWHERE, Rates
from striped_attention.runtime.hardware import hardware_of

# Every module implements `Kernel`.
KERNELS: dict[str, Any] = {"cudnn": cudnn, "hopper": hopper, "pallas_tpu": tpu, "xla": xla}
SLOW = 1.5  # a kernel is slow if another would take less than 1 / SLOW of its time
_warned: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Choice:
    """The kernel selected for a request: its name and module, its tile, and its rates on the request's platform."""

    name: str
    kernel: Kernel
    tile: tuple[int, int]
    rates: Rates
    seconds: float  # rough estimate for one block, forward and backward


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is a kernel or "auto"."""
    if name not in ("auto", *KERNELS):
        raise ValueError(f"kernel must be one of {['auto', *KERNELS]}; got {name!r}.")


def choose(name: str, request: Request) -> Choice:
    """Return the kernel to use: for "auto", the fastest that supports the request. Raise if a named kernel does not.

    What "auto" selects, and why, is logged at level INFO. If the device has a much faster kernel that does not support
    this request, a `SlowKernelWarning` is issued, once for each reason.
    """
    found = fastest(name, request)
    if name == "auto":
        refusals = _refusals(name, request)
        others = "".join(f" Not {other!r}: {reason}" for other, reason in refusals.items() if reason is not None)
        logging.getLogger("striped_attention").info("kernel='auto' selects %r.%s", found.name, others)
        _warn_if_slow(found, request, refusals)
    return found


def fastest(name: str, request: Request) -> Choice:
    """Return what `choose` returns, without logging or warnings."""
    check_name(name)
    refusals = _refusals(name, request)
    able = sorted((_choice(other, request) for other in KERNELS if refusals[other] is None), key=lambda c: c.seconds)
    if not able:
        raise NotImplementedError(f"No kernel runs on a {request.platform}. {' '.join(map(str, refusals.values()))}")
    if name == "auto":
        return able[0]
    if refusals[name] is not None:
        raise NotImplementedError(f"Kernel {name!r} cannot do this: {refusals[name]} Use kernel={able[0].name!r}.")
    return _choice(name, request)


def _refusals(name: str, request: Request) -> dict[str, str | None]:
    """Return why each kernel cannot run the request (None if it can), given that `name` was requested."""
    return {other: refusal(other, request, other == name) for other in KERNELS}


def refusal(name: str, request: Request, named: bool = True) -> str | None:
    """Return why a kernel cannot run a request, as a sentence; None if it can. `named`: it was requested by name."""
    kernel = KERNELS[name]
    if _rates(name, request.platform) is None:
        article = "an" if request.platform == "unknown" else "a"
        return f"It runs on {' and '.join(p.upper() for p in kernel.RATES)}s; this is {article} {request.platform}."
    reason: str | None = kernel.unsupported(request)
    if reason is None and not (named or kernel.AUTOMATIC):
        return f"It supports this, but its speed has not been measured. To use it, pass kernel={name!r}."
    return reason


def choose_stripes(name: str, request: Request, slots: int, members: int = 1) -> Layout:
    """Choose a stripe width, about a kernel's tile or a single token: the one that the fastest kernel supports.

    `slots` is the number of tokens per device, which are divided into at least a few stripes. `members` neighbouring
    devices form one device of the request, and a kernel sees their stripes joined. If a named kernel does not support
    the request with any stripes, those for a plain causal mask are returned, and `choose` rejects the request later.
    """
    found: list[tuple[float, Layout]] = []
    for other in KERNELS if name == "auto" else [name]:
        for layout in _stripes(other, request, slots, members):
            asked = dataclasses.replace(request, layout=layout.grouped(members))
            if refusal(other, asked, other == name) is None:
                found.append((_choice(other, asked).seconds, layout))
    if found:
        return min(found, key=lambda one: one[0])[1]
    plain = dataclasses.replace(request, made=(), rule=Rule(prefix=0), here=False)
    if plain == request:
        return _stripes(name, request, slots, members)[0]
    return choose_stripes(name, plain, slots, members)


def layouts_for(name: str, request: Request, slots: int, members: int = 1) -> list[Layout]:
    """Return the layouts to compare for a request, the one to prefer among equals first.

    These are the layouts without stripes, and the stripes of `choose_stripes`, which takes the same arguments. A named
    kernel leaves out those that it does not support. TPUs leave out layouts that reverse the order of tokens: with them
    a step of a 1b model on 16 chips takes 135 s and 11 GB of memory to compile, instead of 27 s and 2.5 GB.
    """
    simple = [layout for layout in UNSTRIPED if not (layout.backwards and request.platform == "tpu")]
    asked = [*simple, choose_stripes(name, request, slots, members)]
    requests = [_with_layout(request, layout, members) for layout in asked]
    able = [one for one, of in zip(asked, requests, strict=True) if name == "auto" or refusal(name, of) is None]
    return able or asked


def _with_layout(request: Request, layout: Layout, members: int) -> Request:
    """Return the request with another layout, which may pad the sequence further."""
    queries = layout.padded_length(request.length, request.devices * members) // request.devices
    keys = request.keys * queries // request.queries
    return dataclasses.replace(request, layout=layout.grouped(members), queries=queries, keys=keys)


def _stripes(name: str, request: Request, slots: int, members: int) -> list[Layout]:
    """Return the candidate stripes for a kernel."""
    tile = max(request.tile or KERNELS[name].default_tile(request))
    return stripes_of(max(1, tile // members), slots)


def _rates(name: str, platform: str) -> Rates | None:
    """Return a kernel's rates on a platform; None if it does not run there."""
    rates: dict[str, Rates] = KERNELS[name].RATES
    return rates.get(platform, rates.get(ANYWHERE))


def _choice(name: str, request: Request) -> Choice:
    kernel, rates = KERNELS[name], _rates(name, request.platform)
    assert rates is not None
    seconds = rates.seconds(request, hardware_of(request.platform, request.device_kind))
    return Choice(name, kernel, request.tile or kernel.default_tile(request), rates, seconds)


def _warn_if_slow(choice: Choice, request: Request, refusals: dict[str, str | None]) -> None:
    """Warn if this platform has a much faster kernel, by its measured rates, that does not support the request."""
    hardware = hardware_of(request.platform, request.device_kind)
    faster = {
        name: reason
        for name, reason in refusals.items()
        if reason is not None
        and (rates := _rates(name, request.platform)) is not None
        and SLOW * rates.seconds(request, hardware) < choice.seconds
    }
    reasons = " ".join(f"{name!r}: {reason}" for name, reason in faster.items())
    message = (
        f"kernel='auto' selects {choice.name!r}, which is slow on a {request.platform.upper()}, because no faster "
        f"kernel supports this request. {reasons} Silence this warning with warnings.filterwarnings('ignore', "
        f"category=striped_attention.SlowKernelWarning)."
    )
    if request.here and any(KERNELS[name].AUTOMATIC for name in faster) and message not in _warned:
        warnings.warn(SlowKernelWarning(message), stacklevel=2)
        _warned.add(message)  # only now: warnings.warn raises if warnings are errors

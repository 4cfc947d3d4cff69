"""Choice: the kernels there are, and which of them runs.

`choose` takes the fastest kernel that can do what a request asks for, by what was measured of each (`rates.py`).
"""

import dataclasses
import logging
import warnings
from typing import Any

from striped_attention.core.layout import Layout, stripes_of
from striped_attention.errors import SlowKernelWarning
from striped_attention.kernels import cudnn, hopper, tpu, xla
from striped_attention.kernels.contract import Kernel, Request
from striped_attention.kernels.rates import ANYWHERE, Rates
from striped_attention.runtime.hardware import hardware_of

# Modules, as `Kernel` describes them.
KERNELS: dict[str, Any] = {"cudnn": cudnn, "hopper": hopper, "pallas_tpu": tpu, "xla": xla}
_warned: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel for a request: its name and module, its tile, and its rates on the request's platform."""

    name: str
    kernel: Kernel
    tile: tuple[int, int]
    rates: Rates
    seconds: float  # roughly, of one block


def check_name(name: str) -> None:
    """Raise unless there is such a kernel."""
    if name not in ("auto", *KERNELS):
        raise ValueError(f"kernel must be one of {['auto', *KERNELS]}; got {name!r}.")


def choose(name: str, request: Request) -> Choice:
    """The kernel to use: for "auto" the fastest that can do what is asked. Raises if a named one cannot.

    What "auto" chose, and why, is logged at level INFO. Where that is a slow one, on a device that has a faster one for
    other requests, it also warns, once for each reason.
    """
    found = fastest(name, request)
    if name == "auto":
        refusals = _refusals(name, request)
        others = "".join(f" Not {other!r}: {reason}" for other, reason in refusals.items() if reason is not None)
        logging.getLogger("striped_attention").info("kernel='auto' takes %r.%s", found.name, others)
        _warn_if_slow(found, request, refusals)
    return found


def fastest(name: str, request: Request) -> Choice:
    """What `choose` takes, without a word about it."""
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
    """Why each kernel cannot do what is asked of the one named; None if it can."""
    return {other: refusal(other, request, other == name) for other in KERNELS}


def refusal(name: str, request: Request, named: bool = True) -> str | None:
    """Why a kernel cannot do what is asked, in a sentence; None if it can. `named` is whether it was asked for."""
    kernel = KERNELS[name]
    if _rates(name, request.platform) is None:
        article = "an" if request.platform == "unknown" else "a"
        return f"It runs on {' and '.join(p.upper() for p in kernel.RATES)}s; this is {article} {request.platform}."
    reason: str | None = kernel.unsupported(request)
    if reason is None and not (named or kernel.AUTOMATIC):
        return f"It could, but its speed has not been measured: try kernel={name!r}."
    return reason


def choose_stripes(name: str, request: Request, slots: int, members: int = 1) -> Layout:
    """Stripes, about as wide as a kernel's tile or a single token, for which there is the fastest kernel.

    `slots` are the tokens of a device that should make a few stripes. So many `members` of neighbouring devices make
    one of the request's: it is their stripes together that a kernel sees. A named kernel that cannot do the request at
    all gets the stripes that it would take for a plain causal mask; `choose` refuses it then.
    """
    found: list[tuple[float, Layout]] = []
    for other in KERNELS if name == "auto" else [name]:
        for layout in _stripes(other, request, slots, members):
            asked = dataclasses.replace(request, layout=layout.grouped(members))
            if refusal(other, asked, other == name) is None:
                found.append((_choice(other, asked).seconds, layout))
    if found:
        return min(found, key=lambda one: one[0])[1]
    plain = dataclasses.replace(request, documents=False, window=None, prefix=0, here=False)
    if plain == request:
        return _stripes(name, request, slots, members)[0]
    return choose_stripes(name, plain, slots, members)


def _stripes(name: str, request: Request, slots: int, members: int) -> list[Layout]:
    """Stripes to choose from for a kernel."""
    tile = max(request.tile or KERNELS[name].default_tile(request))
    return stripes_of(max(1, tile // members), slots)


def _rates(name: str, platform: str) -> Rates | None:
    """How fast a kernel is on a platform; None if it does not run there."""
    rates: dict[str, Rates] = KERNELS[name].RATES
    return rates.get(platform, rates.get(ANYWHERE))


def _choice(name: str, request: Request) -> Choice:
    kernel, rates = KERNELS[name], _rates(name, request.platform)
    assert rates is not None
    seconds = rates.seconds(request, hardware_of(request.platform, request.device_kind))
    return Choice(name, kernel, request.tile or kernel.default_tile(request), rates, seconds)


def _warn_if_slow(choice: Choice, request: Request, refusals: dict[str, str | None]) -> None:
    """Warn if there is a faster kernel for this platform, measured to be so, that cannot do the request."""
    hardware = hardware_of(request.platform, request.device_kind)
    faster = {
        name: reason
        for name, reason in refusals.items()
        if reason is not None
        and (rates := _rates(name, request.platform)) is not None
        and rates.seconds(request, hardware) < choice.seconds
    }
    reasons = " ".join(f"{name!r}: {reason}" for name, reason in faster.items())
    message = (
        f"kernel='auto' takes {choice.name!r}, which is slow on a {request.platform.upper()}, because a faster one "
        f"cannot do this. {reasons} Silence this with warnings.filterwarnings('ignore', "
        f"category=striped_attention.SlowKernelWarning)."
    )
    if request.here and any(KERNELS[name].AUTOMATIC for name in faster) and message not in _warned:
        warnings.warn(SlowKernelWarning(message), stacklevel=2)
        _warned.add(message)  # now, for a warning may be an error

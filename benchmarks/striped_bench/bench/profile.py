"""Profile: break the time of a GPU program down by kind of kernel."""

import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

# A kernel belongs to the first kind whose pattern occurs in its name. `cudnn::fusion`: cuDNN's helper kernels of the
# backward pass, for out · dout before the products, and for rounding dq and summing over grouped query heads after.
KINDS = (
    ("attention, forward", r"sdpa.*fprop|hopper_forward"),
    ("attention, backward", r"sdpa.*bprop|cudnn::fusion|hopper_(query_grads|key_grads|gradients)"),
    ("copies in place of hops", r"reverse"),
    ("copies", r"(?i)memcpy|memset"),
    ("merges, sums and slices", r""),
)
Event = tuple[str, float, float]  # kernel name, start and duration in nanoseconds


def where(function: Callable[[], Any]) -> dict[str, float]:
    """Profile one call: seconds by kind of kernel, and seconds in which none ran. Warm up `function` first."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(function())
        (trace,) = pathlib.Path(folder).rglob("*.xplane.pb")
        return by_kind(_events(trace))


def by_kind(events: Iterable[Event]) -> dict[str, float]:
    """Sum the seconds of each kind; "nothing" is the idle time between the first start and the last end."""
    events = sorted(events, key=lambda event: event[1])
    seconds = dict.fromkeys([*(kind for kind, _ in KINDS), "nothing"], 0.0)
    end = events[0][1] if events else 0.0
    for name, start, duration in events:
        seconds[next(kind for kind, pattern in KINDS if re.search(pattern, name))] += duration * 1e-9
        seconds["nothing"] += max(0.0, start - end) * 1e-9
        end = max(end, start + duration)
    return seconds


def _events(trace: pathlib.Path) -> list[Event]:
    """Read all events on the GPU's streams."""
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
    return [(e.name, e.start_ns, e.duration_ns) for line in lines if "Stream" in line.name for e in line.events]

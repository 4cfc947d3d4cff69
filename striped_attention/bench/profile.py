"""Profile: where the time of a program on a GPU goes, by kind of kernel."""

import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

# The first kind whose pattern a kernel's name contains counts. The second of cuDNN's patterns are its helpers backward:
# out · dout before the products, and rounding dq and adding up the query heads of a key head after them.
KINDS = (
    ("attention, forward", r"sdpa.*fprop"),
    ("attention, backward", r"sdpa.*bprop|cudnn::fusion"),
    ("copies in place of hops", r"reverse"),
    ("copies", r"(?i)memcpy|memset"),
    ("merges, sums and slices", r""),
)


class Event(NamedTuple):
    """A kernel that ran; in nanoseconds."""

    name: str
    start: float
    duration: float


def where(function: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """Seconds of a call by kind of kernel, and those in which none ran. The function should be warm."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(function(*arguments))
        (trace,) = pathlib.Path(folder).rglob("*.xplane.pb")
        return by_kind(_events(trace))


def by_kind(events: Iterable[Event]) -> dict[str, float]:
    """Seconds of each kind, and "nothing": from the first start to the last end, less whatever ran."""
    events = sorted(events, key=lambda event: event.start)
    seconds = dict.fromkeys([*(kind for kind, _ in KINDS), "nothing"], 0.0)
    end = events[0].start if events else 0.0
    for event in events:
        kind = next(kind for kind, pattern in KINDS if re.search(pattern, event.name))
        seconds[kind] += event.duration * 1e-9
        seconds["nothing"] += max(0.0, event.start - end) * 1e-9
        end = max(end, event.start + event.duration)
    return seconds


def _events(trace: pathlib.Path) -> list[Event]:
    """Everything that ran on the GPU's streams."""
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
    return [Event(e.name, e.start_ns, e.duration_ns) for line in lines if "Stream" in line.name for e in line.events]

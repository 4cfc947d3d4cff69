"""Profile: where the time of a program on a GPU goes, by kind of kernel."""

import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

# The first kind whose pattern a kernel's name contains counts. The second of cuDNN's patterns are its helpers backward:
# out · dout before the products, and rounding dq and adding up the query heads of a key head after them.
KINDS = (
    ("attention, forward", r"sdpa.*fprop|hopper_forward"),
    ("attention, backward", r"sdpa.*bprop|cudnn::fusion|hopper_(query_grads|key_grads|gradients)"),
    ("copies in place of hops", r"reverse"),
    ("copies", r"(?i)memcpy|memset"),
    ("merges, sums and slices", r""),
)
Event = tuple[str, float, float]  # the name of a kernel that ran, its start and duration in nanoseconds


def where(function: Callable[[], Any]) -> dict[str, float]:
    """Seconds of a call by kind of kernel, and those in which none ran. The function should be warm."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(function())
        (trace,) = pathlib.Path(folder).rglob("*.xplane.pb")
        return by_kind(_events(trace))


def by_kind(events: Iterable[Event]) -> dict[str, float]:
    """Seconds of each kind, and "nothing": from the first start to the last end, less whatever ran."""
    events = sorted(events, key=lambda event: event[1])
    seconds = dict.fromkeys([*(kind for kind, _ in KINDS), "nothing"], 0.0)
    end = events[0][1] if events else 0.0
    for name, start, duration in events:
        seconds[next(kind for kind, pattern in KINDS if re.search(pattern, name))] += duration * 1e-9
        seconds["nothing"] += max(0.0, start - end) * 1e-9
        end = max(end, start + duration)
    return seconds


def _events(trace: pathlib.Path) -> list[Event]:
    """Everything that ran on the GPU's streams."""
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
    return [(e.name, e.start_ns, e.duration_ns) for line in lines if "Stream" in line.name for e in line.events]

"""Pace: detect slow steps by comparison with recent ones."""

import collections
import statistics
import time
from collections.abc import Callable

WARM_UP = 2  # first steps of this process, ignored: they compile, allocate and fill caches
ENOUGH, RECENT = 10, 50  # the median is taken over the last 50 steps, once there are 10
TIMES, MORE = 3.0, 1.0  # a slow step takes at least 3 times the median and 1 s more than it
EVERY = 60.0  # seconds between reports


class Pace:
    """Watches the time of each step. Reports at most one slow step per minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done = self._silent = 0
        self._recent: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._last: float | None = None

    def remark(self, step: int, seconds: float, waited: float) -> str | None:
        """Return a message if a step of `seconds` was slow, else None. `waited` seconds of it went to its batch."""
        self._done += 1
        if self._done <= WARM_UP:
            return None
        median = statistics.median(self._recent) if len(self._recent) >= ENOUGH else None
        self._recent.append(seconds)
        if median is None or seconds < TIMES * median or seconds < median + MORE:
            return None
        now = self._clock()
        if self._last is not None and now - self._last < EVERY:
            self._silent += 1
            return None
        others, self._silent, self._last = self._silent, 0, now
        text = f"Slow: step {step} took {seconds:.3g} s, {seconds / median:.1f} times the median of {median:.3g} s"
        if waited > 0.1 * seconds:
            text += f", of which it waited {waited:.3g} s for its batch"
        return f"{text} ({others} other slow steps since the last report)" if others else text

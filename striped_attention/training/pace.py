"""Pace: which steps are slow, compared with those before them."""

import collections
import statistics
import time
from collections.abc import Callable

WARM_UP = 2  # steps of this process that count nowhere: they compile, allocate and fill caches
ENOUGH, RECENT = 10, 50  # the median is that of the last 50 steps, once there are 10
TIMES, MORE = 3.0, 1.0  # a slow step takes 3 times the median, and a second more
EVERY = 60.0  # seconds between remarks


class Pace:
    """Steps one after the other. Of many slow ones few are remarked on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done = self._silent = 0
        self._recent: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._last: float | None = None

    def remark(self, step: int, seconds: float, waited: float) -> str | None:
        """What to say of a step that took so many seconds, `waited` of them for its batch; None of most steps."""
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
            text += f", and waited {waited:.3g} s of it for its batch"
        return f"{text} ({others} other slow steps since the last such line)" if others else text

"""The clock of a played trace: it counts engine steps, so that equal traces make equal runs.

A step stands for `step_ms` of the trace's time, independent of its computing time. Arrivals follow from the number of
the step, never from the speed of this machine; a speed only adds waiting, so that the trace's time does not run ahead
of the real one. Without a speed the run does not wait for arrivals, but no step is dated before the arrivals of the
requests that it admits: the wall clock shows the trace's own times, from `START_NS` on if the trace has no date. At an
infinite speed requests arrive at their times in the trace, and no time is spent waiting.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from kvcache.errors import UsageError

START_NS = 1_767_225_600_000_000_000
"""Wall clock of an unpaced run at the beginning of a trace without a date (2026-01-01, UTC)."""
_MS = 1_000_000
_FOREVER_NS = 2**62
"""Time in ns that is never reached: more than a hundred years."""
_LONGEST_WAIT = 3600.0
"""Longest single wait in seconds. Systems limit waits, so a longer one is split."""


def parse_speed(text: str) -> float | None:
    """Read "real" (1), a factor such as "10", or "max" (None: do not wait). Raises UsageError."""
    if text == "max":
        return None
    try:
        speed = 1.0 if text == "real" else float(text)
    except ValueError:
        speed = math.nan
    if not (math.isfinite(speed) and speed > 0):
        raise UsageError(f"speed {text!r} is not real, max, or a number above 0")
    return speed


class StepClock:
    """Time of a run. Pass its `wall_ns` to the manager that the run drives.

    Without a speed, or at an infinite one, it follows the trace's time, so equal runs write equal logs; at any other
    speed it is real.

    Args:
        speed: Speed of the trace's time, as a factor of real time; None: without waiting.
        step_ms: Length of a step in the trace's time.
        start_ns: Wall clock at the trace's beginning, if it follows the trace; ns since 1970.
        real_ns: The real wall clock.
        real_monotonic_ns: The real clock for waiting.
    """

    def __init__(
        self,
        speed: float | None = None,
        step_ms: int = 20,
        *,
        start_ns: int = START_NS,
        real_ns: Callable[[], int] = time.time_ns,
        real_monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if step_ms < 1:
            raise UsageError("a step takes at least 1 ms")
        self.speed = speed
        self.step_ms = step_ms
        self.start_ns = start_ns
        self.now_ms = 0
        """Time of the trace, in ms."""
        self._real_ns = real_ns
        self._real_monotonic_ns = real_monotonic_ns
        self._started_ns: int | None = None

    def wall_ns(self) -> int:
        """Return the wall clock in ns."""
        if self.speed is None or math.isinf(self.speed):
            return self.start_ns + self.trace_ns()
        return self._real_ns()

    def trace_ns(self) -> int:
        """Return the trace's time in ns, by which a `Retention` expires."""
        return min(self.now_ms * _MS, _FOREVER_NS)

    def has_arrived(self, timestamp_ms: int) -> bool:
        """Return True if a request has arrived. Without a speed arrival times only order the requests."""
        return self.speed is None or timestamp_ms <= self.now_ms

    def reach(self, timestamp_ms: int) -> None:
        """Advance to at least the arrival time of a request that is admitted, in ms of the trace."""
        self.now_ms = max(self.now_ms, timestamp_ms)

    def advance(self, stop: threading.Event, until_ms: int = 0) -> None:
        """Advance by one step; with a speed, to `until_ms` if that is later, and wait while ahead of real time.

        Setting `stop` ends the waiting.
        """
        self.now_ms += self.step_ms
        if self.speed is None:
            return
        self.now_ms = max(self.now_ms, until_ms)
        if self._started_ns is None:
            self._started_ns = self._real_monotonic_ns()
        # The first step has passed when it is reported.
        passed_ns = int(min((self.now_ms - self.step_ms) * _MS / self.speed, _FOREVER_NS))
        due_ns = self._started_ns + passed_ns
        while (ahead_ns := due_ns - self._real_monotonic_ns()) > 0:
            if stop.wait(min(ahead_ns / 1e9, _LONGEST_WAIT)):
                break

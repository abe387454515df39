"""Counts of durations in buckets, thousands at a time; written by one thread, read by any."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0, 14400.0)
"""Bounds for ages of blocks and times of copies."""
STEP_SECONDS = (
    0.000_02,
    0.000_05,
    0.000_1,
    0.000_2,
    0.000_5,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    1.0,
)
"""Bounds for the manager's time per engine step."""


class Histogram:
    """Numbers of durations up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._ns = [round(bound * 1e9) for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._sum_ns = 0

    def add(self, duration_ns: int) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._ns, duration_ns)] += 1
        self._sum_ns += duration_ns

    def observe(self, durations_ns: npt.NDArray[np.int64]) -> None:
        """Count many."""
        more = np.bincount(np.searchsorted(self._ns, durations_ns), minlength=len(self._counts)).tolist()
        self._counts = [count + new for count, new in zip(self._counts, more, strict=True)]
        self._sum_ns += int(durations_ns.sum())

    @property
    def count(self) -> int:
        """Number of durations so far."""
        return sum(self._counts)

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Return (bound as text, number of durations up to it), the last one without bound; and the sum in seconds."""
        totals = accumulate(self._counts)
        bounds = [*map(str, self.bounds), "+Inf"]
        return [
            (bound, float(total)) for bound, total in zip(bounds, totals, strict=True)
        ], self._sum_ns / 1e9

"""Histogram of ages between logarithmic edges, a hundred per factor of ten, with the mean in each bin."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_DECADES = 15
_FINE, _COARSE = 100, 10
"""Bins per factor of ten, as counted and as reported."""
_EDGES = np.logspace(3, 3 + _DECADES, _DECADES * _FINE + 1)
"""Edges in ns, from a microsecond to thirty years."""
_MILLISECOND = 3 * _FINE
_SHOWN = np.concatenate([[0], np.arange(_MILLISECOND + 1, len(_EDGES) + 1, _FINE // _COARSE)])
"""Starts of the reported bins; the first edge is a millisecond."""


class Ages:
    """Histogram of durations in ns. It takes 24 KB, independent of their number."""

    __slots__ = ("_sums", "counts")

    def __init__(self) -> None:
        self.counts = np.zeros(len(_EDGES) + 1, np.int64)
        self._sums = np.zeros(len(_EDGES) + 1)

    def add(self, ages: npt.NDArray[np.int64]) -> None:
        """Count durations; negative ones, since wall clocks may go back, count as 0."""
        steps = np.searchsorted(_EDGES, ages, "right")
        np.add.at(self.counts, steps, 1)
        np.add.at(self._sums, steps, np.maximum(ages, 0))

    @property
    def total(self) -> int:
        """Number of durations counted."""
        return int(self.counts.sum())

    def quantile(self, share: float) -> float | None:
        """Return the duration in seconds that this share does not exceed; None if nothing was counted.

        It is the mean of its bin, so at most 2.4 % off, and exact if all in the bin are equal. Below a microsecond
        there is one bin.
        """
        if not self.total:
            return None
        at = int(np.searchsorted(np.cumsum(self.counts), share * self.total))
        return float(self._sums[at] / self.counts[at]) / 1e9 if self.counts[at] else 0.0

    def rows(self) -> Iterator[tuple[float, int]]:
        """Yield (upper edge in seconds, count) of ten bins per factor of ten from a millisecond on, if not empty."""
        counts = np.add.reduceat(self.counts, _SHOWN)
        for at in np.flatnonzero(counts).tolist():
            edge = _EDGES[min(_MILLISECOND + at * _FINE // _COARSE, len(_EDGES) - 1)]
            yield float(edge) / 1e9, int(counts[at])

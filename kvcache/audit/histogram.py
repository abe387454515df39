"""Ages as counts between logarithmic edges: ten per factor of ten, so that a quantile is right to a quarter."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_PER_DECADE = 10
_EDGES = np.logspace(6, 18, 12 * _PER_DECADE + 1)
"""From a millisecond to thirty years, in ns."""


class Ages:
    """A histogram of durations in ns."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = np.zeros(len(_EDGES) + 1, np.int64)

    def add(self, ages: npt.NDArray[np.int64]) -> None:
        """Count durations; wall clocks may go back, so negative ones count as none."""
        self.counts += np.bincount(np.searchsorted(_EDGES, ages, "right"), minlength=len(self.counts))

    @property
    def total(self) -> int:
        """How many were counted."""
        return int(self.counts.sum())

    def quantile(self, share: float) -> float | None:
        """The duration in seconds below which this share lies; None if nothing was counted."""
        if not self.total:
            return None
        at = int(np.searchsorted(np.cumsum(self.counts), share * self.total))
        return 0.0 if at == 0 else float(_EDGES[min(at, len(_EDGES) - 1)]) / 1e9

    def rows(self) -> Iterator[tuple[float, int]]:
        """(upper edge in seconds, count), where there are any."""
        for at in np.flatnonzero(self.counts).tolist():
            yield float(_EDGES[min(at, len(_EDGES) - 1)]) / 1e9, int(self.counts[at])

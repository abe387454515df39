"""Sums over time, in so many equal parts as stay readable, however long the log is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PARTS = 120
"""At most; from then on two become one."""
_FIRST_NS = 1_000_000_000


class Timeline:
    """Rows of sums, each over a part of the time since the first."""

    def __init__(self, columns: int) -> None:
        self.start: int | None = None
        """Wall-clock ns of the first."""
        self.width = _FIRST_NS
        """Of each part, in ns."""
        self.sums = np.zeros((PARTS, columns), np.int64)
        self._used = 0

    def add(self, at: int, numbers: npt.NDArray[np.int64]) -> None:
        """Add to the part of this time; before the first counts as the first."""
        if self.start is None:
            self.start = at
        part = max(0, at - self.start) // self.width
        while part >= PARTS:
            self._join()
            part //= 2
        self.sums[part] += numbers
        self._used = max(self._used, part + 1)

    def _join(self) -> None:
        joined = self.sums[::2] + self.sums[1::2]
        self.sums[:] = 0
        self.sums[: PARTS // 2] = joined
        self.width *= 2
        self._used = -(-self._used // 2)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The parts up to the last that has something."""
        return self.sums[: self._used]

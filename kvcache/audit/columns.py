"""Columns that grow: one row per content, without an object for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.intp]
_FIRST = 1024


class Columns:
    """Named numpy columns of equal length, whose new rows have a default."""

    def __init__(self, **defaults: tuple[type[np.generic], Any]) -> None:
        self._defaults = defaults
        self._of: dict[str, npt.NDArray[Any]] = {
            name: np.full(_FIRST, value, kind) for name, (kind, value) in defaults.items()
        }

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._of[name]

    def reach(self, rows: int) -> None:
        """Have at least so many rows."""
        size = len(next(iter(self._of.values())))
        if rows <= size:
            return
        for name, (kind, value) in self._defaults.items():
            grown = np.full(max(rows, 2 * size), value, kind)
            grown[:size] = self._of[name]
            self._of[name] = grown

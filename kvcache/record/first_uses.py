"""Which primary slots were ever taken: a pool that is larger than what was ever needed shows by those that were not."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

_FEW = 16
"""Up to so many slots a loop is faster than numpy."""


class FirstUses:
    """The slots of each window that nothing has taken so far."""

    __slots__ = ("_fresh", "left")

    def __init__(self, sizes: Iterable[int]) -> None:
        self._fresh = [bytearray(b"\1") * size for size in sizes]
        self.left = [len(fresh) for fresh in self._fresh]
        """How many these are, per window: 0 once all were taken, so that nobody need ask any more."""

    def take(self, group: int, slots: bytes) -> bytes:
        """Note that slots are taken; returns for each of them 1 if it was for the first time, else 0."""
        fresh = self._fresh[group]
        if not self.left[group]:
            return b""
        taken = array("i", slots)
        if len(taken) > _FEW:
            at, view = np.frombuffer(slots, np.int32), np.frombuffer(fresh, np.uint8)
            first = view[at].tobytes()
            view[at] = 0
        else:
            first = bytes(map(fresh.__getitem__, taken))
            for slot in taken:
                fresh[slot] = 0
        self.left[group] -= first.count(1)
        return first

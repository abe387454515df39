"""Which primary slots were ever taken: a pool that is larger than what was ever needed shows by those that were not."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class FirstUses:
    """The slots of each window that nothing has taken so far."""

    __slots__ = ("_fresh", "left")

    def __init__(self, sizes: Iterable[int]) -> None:
        self._fresh = [bytearray(b"\1") * size for size in sizes]
        self.left = [len(fresh) for fresh in self._fresh]
        """How many these are, per window: 0 once all were taken, so that nobody need ask any more."""

    def take(self, group: int, slots: bytes) -> Sequence[int]:
        """Note that slots are taken; returns for each of them 1 if it was for the first time, else 0."""
        if not self.left[group]:
            return ()
        fresh = self._fresh[group]
        taken = array("i", slots)
        first = [fresh[slot] for slot in taken]
        for slot in taken:
            fresh[slot] = 0
        self.left[group] -= sum(first)
        return first

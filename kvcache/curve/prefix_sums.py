"""Numbers that change, and the sums of the first so many of them: a Fenwick tree."""

from __future__ import annotations


class PrefixSums:
    """A row of numbers, all 0 at first. Both operations take O(log n)."""

    def __init__(self, length: int) -> None:
        self._sums = [0] * (length + 1)

    def add(self, place: int, amount: int) -> None:
        """Raise one number; places count from 0."""
        sums, at = self._sums, place + 1
        while at < len(sums):
            sums[at] += amount
            at += at & -at

    def through(self, place: int) -> int:
        """The sum of the numbers up to and including this place."""
        sums, at, total = self._sums, place + 1, 0
        while at:
            total += sums[at]
            at &= at - 1
        return total

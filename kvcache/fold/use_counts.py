"""How often blocks were used, also before they were evicted, and how long a block lives: what `levels` goes by."""

from __future__ import annotations

from array import array
from collections import OrderedDict

from events.packed import NAME_BYTES
from kvcache.errors import invariant

MOST_USES = 4
"""More are not counted."""
REMEMBERED = 5
"""Blocks for each slot of the window whose uses are known: what is cached, and four times as much that was."""
MAX_TURN = 1 << 60
"""No cache has so many releases; what is worked out from fewer has room in an int64."""


class UseCounts:
    """A block is used once when the last sequence that holds it lets go of it. Blocks are known by name."""

    __slots__ = ("_most", "by_name", "last_turn")

    def __init__(self, slots: int) -> None:
        self._most = REMEMBERED * slots
        self.by_name: OrderedDict[bytes, int] = OrderedDict()
        """From 1 to `MOST_USES`; the blocks that were used last are last. A plain dict would step over all that was
        deleted before its first entry.
        """
        self.last_turn = 0
        """The turn of the block that was evicted for good last; 0: none was yet."""

    def life(self, now: int) -> int:
        """How many releases ago those blocks were released that are evicted now."""
        return max(0, now - self.last_turn) if self.last_turn else 0

    def count(self, names: bytes) -> list[int]:
        """Count a use of each of these blocks, the last one first; returns how often they were used, so ordered."""
        by_name, counts = self.by_name, []
        for at in range(len(names) - NAME_BYTES, -1, -NAME_BYTES):
            name = names[at : at + NAME_BYTES]
            uses = by_name.pop(name, 0)
            if uses < MOST_USES:
                uses += 1
            by_name[name] = uses
            counts.append(uses)
        return counts

    def forget(self) -> None:
        """Forget what was used longest ago, as far as more is known than is to be remembered."""
        while len(self.by_name) > self._most:
            self.by_name.popitem(last=False)

    def numbers(self) -> array[int]:
        """All of it, in order: the turn, then name and uses of each block."""
        numbers = array("q", [self.last_turn]) + array("q", bytes(2 * NAME_BYTES * len(self.by_name)))
        numbers[1::2] = array("q", b"".join(self.by_name))
        numbers[2::2] = array("q", self.by_name.values())
        return numbers

    def install(self, numbers: array[int]) -> None:
        """Begin with what `numbers` has given; raises `InvariantViolated` if it cannot have."""
        invariant(len(numbers) % 2 == 1, "use counts are cut short")
        names, self.last_turn = numbers[1::2].tobytes(), numbers[0]
        cut = range(0, len(names), NAME_BYTES)
        self.by_name = OrderedDict(
            zip([names[at : at + NAME_BYTES] for at in cut], numbers[2::2], strict=True)
        )
        invariant(2 * len(self.by_name) + 1 == len(numbers), "the uses of a block are counted twice")
        self.check()

    def check(self) -> None:
        """Raise `InvariantViolated` if these are none that can have been counted."""
        invariant(0 <= self.last_turn <= MAX_TURN, "no block can have been evicted with such a turn")
        invariant(len(self.by_name) <= self._most, "more blocks are remembered than can be")
        uses = self.by_name.values()
        invariant(not uses or 0 < min(uses) <= max(uses) <= MOST_USES, "a block has impossibly many uses")

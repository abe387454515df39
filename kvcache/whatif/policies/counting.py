"""Orders that count how often blocks were used: by the sequence that stored one first, and by each that found it."""

from __future__ import annotations

from array import array
from collections import OrderedDict

from events.packed import NAME_BYTES
from events.types import PRIMARY
from kvcache.fold.group_state import GroupState
from kvcache.fold.prefix_tree import Run
from kvcache.whatif.policies.by_block import ByBlock

_REMEMBERED = 5
"""Capacities of names whose counts are kept: one for what is cached, four for what was."""


class Counting(ByBlock):
    """Knows how often each block was used, also before it was evicted the last time.

    Use by several sequences at a time counts once. A block that is found in secondary is counted when it is released.
    """

    def __init__(self, group: GroupState) -> None:
        self.uses: OrderedDict[bytes, int] = OrderedDict()
        """By name; those that were counted last are last."""
        self._most = _REMEMBERED * sum(level.size for level in group.levels)
        self._known = bytearray(group.levels[PRIMARY].size)
        """Primary slots whose block was counted."""
        super().__init__(group)

    def evictable(self, run: Run) -> None:
        """Count the run's blocks that are new."""
        if run.level == PRIMARY:
            at, known = len(run.slots) - 1, self._known
            while at >= 0 and not known[run.slots[at]]:
                known[run.slots[at]] = 1
                self._count(self.name(run, at), 1)
                at -= 1
        super().evictable(run)

    def held(self, level: int, slots: array[int]) -> None:
        """Count blocks that were found."""
        if level == PRIMARY:
            run = self._group.run_at(level, slots[0])
            names, width = bytes(run.keys), self._key_bytes
            for at, slot in enumerate(slots):
                begin = at * width
                self._count(names[begin : begin + NAME_BYTES], 2 - self._known[slot])
                self._known[slot] = 1
        super().held(level, slots)

    def gone(self, level: int, slots: array[int]) -> None:
        """Whatever lies there next is new."""
        if level == PRIMARY:
            for slot in slots:
                self._known[slot] = 0
        super().gone(level, slots)

    def cleared(self) -> None:
        """Counts outlive the blocks."""
        self._known = bytearray(len(self._known))
        super().cleared()

    def _count(self, name: bytes, more: int) -> None:
        uses = self.uses
        uses[name] = uses.pop(name, 0) + more
        if len(uses) > self._most:
            uses.popitem(last=False)

    def count(self, run: Run, at: int) -> int:
        """How often a block was used, at least once."""
        return self.uses.get(self.name(run, at), 1)


class LeastFrequentlyUsed(Counting):
    """What was used least goes first; use counts from the last victim's count on, so that old fame does not last."""

    def __init__(self, group: GroupState) -> None:
        self._clock = 0
        self._clock_at: dict[int, int] = {}
        """By release, what the clock showed."""
        super().__init__(group)

    def rank(self, run: Run, at: int) -> int:
        """Uses, from what the clock showed at the release on."""
        return self._clock_at.setdefault(run.released_at, self._clock) + self.count(run, at)

    def gone(self, level: int, slots: array[int]) -> None:
        """The clock goes on to the count of what was evicted."""
        rank = self._ranks[level].get(slots[0]) if slots else None
        if rank is not None and level == PRIMARY:
            self._clock = max(self._clock, rank)
        super().gone(level, slots)

"""Orders that tell blocks apart by their content, also those of one run."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from heapq import heappop, heappush
from typing import Any

from events.packed import NAME_BYTES
from kvcache.decide.eviction_order import LeastRecentlyUsed
from kvcache.fold.group_state import GroupState
from kvcache.fold.prefix_tree import Run


class ByBlock(LeastRecentlyUsed):
    """Lower priority first, then by the rank of the block, then as `LeastRecentlyUsed`.

    A block's rank is worked out when its turn may come, and stays until something happens to the block.
    """

    needs_names = True

    def __init__(self, group: GroupState) -> None:
        self._group, self._key_bytes = group, group.tree.key_bytes
        self._ranks: tuple[dict[int, int], ...] = tuple({} for _ in group.levels)
        """By level and slot."""
        super().__init__(group)

    @abstractmethod
    def rank(self, run: Run, at: int) -> int:
        """The rank of a block, by its place in its run, from 0; the lowest goes first."""

    def name(self, run: Run, at: int) -> bytes:
        """The name of a block, by its place in its run."""
        begin = at * self._key_bytes
        return bytes(run.keys[begin : begin + NAME_BYTES])

    def key(self, run: Run) -> Any:
        """By the rank of the last block."""
        slot = run.slots[-1]
        ranks = self._ranks[run.level]
        rank = ranks.get(slot)
        if rank is None:
            rank = ranks[slot] = self.rank(run, len(run.slots) - 1)
        return (run.priority, rank, run.released_at, -run.end)

    def _key_behind(self, run: Run, gone: int) -> Any:
        """The key that a run will have when so many of its blocks are gone."""
        rank = self.rank(run, len(run.slots) - 1 - gone)
        return (run.priority, rank, run.released_at, gone - run.end)

    # -- what happens

    def evictable(self, run: Run) -> None:
        """Make the run a candidate."""
        self._ranks[run.level].pop(run.slots[-1], None)
        super().evictable(run)

    def held(self, level: int, slots: array[int]) -> None:
        """Forget ranks: something happened to these blocks."""
        self._forget(level, slots)

    def gone(self, level: int, slots: array[int]) -> None:
        """Forget ranks."""
        self._forget(level, slots)

    def cleared(self) -> None:
        """Forget everything."""
        super().cleared()
        for ranks in self._ranks:
            ranks.clear()

    def _forget(self, level: int, slots: array[int]) -> None:
        ranks = self._ranks[level]
        for slot in slots:
            ranks.pop(slot, None)

    # -- what goes next

    def alike(self, run: Run, count: int, other: Run | None = None) -> int:
        """How many blocks of the next run go before any other run's, and before `other`."""
        heap = self._heaps[run.level]
        if count == 1 or heap[0][2] != run.id:
            return 1
        entry = heappop(heap)
        limit = self._next_key(run.level)
        heappush(heap, entry)
        return self._before(run, count, self._lower(limit, None if other is None else self.key(other)))

    def lowest(self, level: int, count: int) -> list[tuple[Run, int]]:
        """The runs whose blocks go next, and how many of each: whole ones, but for the last."""
        heap = self._heaps[level]
        found: dict[int, tuple[Run, int]] = {}
        entries = []
        limit: Any = None
        while count and (run := self.next(level)) is not None and (limit is None or heap[0][0] < limit):
            entry = heappop(heap)
            if run.id in found:
                continue  # it was there twice
            entries.append(entry)
            take = self._before(run, min(count, len(run.slots)), self._lower(limit, self._next_key(level)))
            found[run.id] = (run, take)
            count -= take
            if take < len(run.slots):
                break
            parent = run.parent
            if isinstance(parent, Run):
                if len(parent.children) > 1:
                    break  # it may be joined with the other child when this one is gone
                if parent.level == level and not parent.refs:
                    limit = self._lower(limit, self._key_behind(parent, 0))
        for entry in entries:
            heappush(heap, entry)
        return list(found.values())

    def _next_key(self, level: int) -> Any:
        """The key of the next run; None: there is none."""
        return None if self.next(level) is None else self._heaps[level][0][0]

    def _lower(self, one: Any, other: Any) -> Any:
        """The lower one of two keys, of which either may be none."""
        if one is None or other is None:
            return one if other is None else other
        return min(one, other)

    def _before(self, run: Run, most: int, limit: Any) -> int:
        """How many of a run's last blocks go before a key, the last one in any case."""
        take = 1
        while take < most and (limit is None or self._key_behind(run, take) < limit):
            take += 1
        return take

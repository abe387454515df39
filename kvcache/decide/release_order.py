"""Which blocks of a sliding window are evicted next: any that no sequence holds.

Lower priority first, then what was released longest ago, then the shallowest. Blocks that a sequence lets go of
together are one row, so that a release costs one entry of a heap and not one for each block. A row is never changed:
what of it was held again, evicted or moved since is passed over when its turn comes.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np

from events.types import PRIMARY
from kvcache.errors import invariant
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.watcher import Watcher

Key = tuple[int, int, int]
"""Priority, release stamp, depth."""
_Row = tuple[int, int, int, int, "array[int]", "array[int]"]
"""The key of its first block, a number that differs from all others, the places, shallowest first, and their depths.

By its depth a block is told from another one of the same release that has come to the same place since.
"""


class ReleaseOrder(Watcher):
    """A heap of rows per level."""

    def __init__(self, group: SlidingGroup) -> None:
        self._group = group
        self._numbers = count()
        self._heaps: list[list[_Row]] = [[], []]
        self._queued = [0, 0]
        for level in (0, 1):
            self._rebuild(level)

    def key(self, place: int) -> Key:
        """Lower goes first."""
        group = self._group
        return group.priorities[place], group.released_at[place], group.depths[place]

    @property
    def queued(self) -> int:
        """Blocks in all rows, stale ones too."""
        return sum(self._queued)

    # -- what happens

    def released(self, level: int, places: array[int]) -> None:
        """Make these blocks candidates."""
        if len(places) == 1:
            key = self.key(places[0])
            heappush(self._heaps[level], (*key, next(self._numbers), places, array("i", (key[2],))))
            self._queued[level] += 1
        else:
            self._push(level, places)
        if self._queued[level] > 4 * self._group.levels[level].size + 1024:
            self._rebuild(level)

    def cleared(self) -> None:
        """Forget all candidates."""
        self._heaps, self._queued = [[], []], [0, 0]

    def _push(self, level: int, places: array[int]) -> None:
        """Queue blocks in rows of one priority and release, by depth."""
        for row in self._rows(places):
            depths = array("i", self._group.column("depths")[np.frombuffer(row, np.int32)].tobytes())
            heappush(self._heaps[level], (*self.key(row[0]), next(self._numbers), row, depths))
            self._queued[level] += len(row)

    def _rows(self, places: array[int]) -> Iterator[array[int]]:
        """Blocks of one priority and release, by depth, as far as they are in this order."""
        if len(places) < 2:
            yield from [places] * len(places)
            return
        at = np.frombuffer(places, np.int32)
        columns = [self._group.column(name)[at] for name in ("priorities", "released_at")]
        ends = np.diff(self._group.column("depths")[at]) <= 0
        for column in columns:
            ends |= column[1:] != column[:-1]
        begin = 0
        for end in [*(np.flatnonzero(ends) + 1).tolist(), len(places)]:
            yield places[begin:end]
            begin = end

    def _rebuild(self, level: int) -> None:
        """Queue all candidates anew."""
        group = self._group
        primary, size = group.levels[PRIMARY].size, len(group.refs)
        at = np.arange(*((0, primary) if level == PRIMARY else (primary, size)))
        at = at[(group.column("run_ids")[at] >= 0) & (group.column("refs")[at] == 0)]
        columns = [group.column(name)[at] for name in ("depths", "released_at", "priorities")]
        self._heaps[level], self._queued[level] = [], 0
        self._push(level, array("i", at[np.lexsort(columns)].astype(np.int32).tobytes()))
        heapify(self._heaps[level])

    # -- what goes next

    def lowest(self, level: int, spares: Collection[int] = ()) -> Key | None:
        """The key of the block that goes next, but for the places in `spares`."""
        (place,) = self.take(level, 1, spares=spares) or (None,)
        if place is None:
            return None
        self.released(level, array("i", (place,)))
        return self.key(place)

    def take(
        self, level: int, wanted: int, below: Key | None = None, spares: Collection[int] = ()
    ) -> array[int]:
        """The places of the blocks that go next, in their order, for whoever evicts them all.

        At most so many, with keys lower than `below`; places in `spares` are passed over.
        """
        heap, found, spared = self._heaps[level], array("i"), array("i")
        while len(found) < wanted and self._clean(level) and (below is None or heap[0][:3] < below):
            row = heappop(heap)
            places = row[4]
            if spares:
                spared.extend(place for place in places if place in spares)
                places = array("i", [place for place in places if place not in spares])
            part = self._until(heap[0][:3] if heap else None, places[: wanted - len(found)])
            part = self._until(below, part)
            found += part
            self._queue(level, row, places[len(part) :])
        self._push(level, spared)
        return found

    def _until(self, key: Key | None, places: array[int]) -> array[int]:
        """Those of a row that go before a block with this key, which may have been released together with them."""
        if key is None or not places or self.key(places[-1]) < key:
            return places
        return array("i", [place for place in places if self.key(place) < key])

    def _clean(self, level: int) -> bool:
        """Drop what cannot be evicted any more from the lowest rows, until the first block of the lowest one can."""
        heap = self._heaps[level]
        while heap:
            row = heap[0]
            left = self._left(row)
            if len(left) == len(row[4]):
                return True
            self._queue(level, heappop(heap), left)
        return False

    def _queue(self, level: int, row: _Row, left: array[int]) -> None:
        """Queue what is left of a row that was taken out."""
        self._queued[level] -= len(row[4]) - len(left)
        if left:
            depths = array("i", self._group.column("depths")[np.frombuffer(left, np.int32)].tobytes())
            heappush(self._heaps[level], (row[0], row[1], depths[0], next(self._numbers), left, depths))

    def _left(self, row: _Row) -> array[int]:
        """Those blocks of a row that can still be evicted as part of it."""
        priority, stamp, depth, _, places, depths = row
        group = self._group
        if len(places) == 1:
            (place,) = places
            same = self.key(place) == (priority, stamp, depth)
            return places if same and not group.refs[place] and group.run_ids[place] >= 0 else array("i")
        at = np.frombuffer(places, np.int32)
        there = (group.column("released_at")[at] == stamp) & (group.column("priorities")[at] == priority)
        there &= (group.column("refs")[at] == 0) & (group.column("run_ids")[at] >= 0)
        there &= group.column("depths")[at] == np.frombuffer(depths, np.int32)
        return places if there.all() else array("i", at[there].tobytes())

    def check(self) -> None:
        """Compare the rows of each level with all candidates; changes nothing."""
        group = self._group
        for heap, begin, level in zip(
            self._heaps, (0, group.levels[PRIMARY].size), group.levels, strict=True
        ):
            places = range(begin, begin + level.size)
            idle = {place for place in places if group.run_ids[place] >= 0 and not group.refs[place]}
            rows = [(row, self._left(row)) for row in heap]
            queued = {place for _, left in rows for place in left}
            invariant(queued == idle, "a block cannot be evicted: unheard of")
            # A row that stands too low is cleaned when its turn comes; one that stands too high would be late.
            in_time = all(row[:3] <= self.key(left[0]) for row, left in rows if left)
            ordered = all(heap[(at - 1) // 2] < row for at, row in enumerate(heap) if at)
            invariant(in_time and ordered, "another block would be evicted than the lowest in order")

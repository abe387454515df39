"""Which blocks of a sliding window are evicted next: any that no sequence holds.

Lower priority first, then what was released longest ago, then the shallowest. Blocks are released in this order, and go
to secondary in it, so a queue per priority needs no sorting: a release is appended. Entries are never changed: those of
blocks that were held again, evicted or moved since are passed over when their turn comes.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from events.types import PRIMARY
from kvcache.errors import invariant
from kvcache.fold.places import FEW
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.watcher import Watcher

Key = tuple[int, int, int]
"""Priority, release stamp, depth."""
_MUCH = 1024
"""Entries that are not worth an effort."""


class _Queue:
    """Blocks of one priority, as they were released."""

    __slots__ = ("depths", "head", "places", "stamps")

    def __init__(self) -> None:
        self.places, self.stamps, self.depths = array("i"), array("q"), array("i")
        # A place may have had another block of the same release before; its depth tells them apart.
        self.head = 0
        """Entries before it are stale."""

    def pass_over(self, head: int) -> None:
        """Everything before `head` is stale."""
        self.head = head
        if head > _MUCH and 2 * head > len(self.places):
            for column in (self.places, self.stamps, self.depths):
                del column[:head]
            self.head = 0

    def up_to(self, limit: tuple[int, int]) -> int:
        """The first entry that is not before this release stamp and depth."""
        stamp, depth = limit
        begin, end = (int(np.searchsorted(_view(self.stamps), stamp, side)) for side in ("left", "right"))
        return begin + int(np.searchsorted(_view(self.depths)[begin:end], depth))


class ReleaseOrder(Watcher):
    """A queue per level and priority."""

    def __init__(self, group: SlidingGroup) -> None:
        self._group = group
        self._queues: list[dict[int, _Queue]] = [{}, {}]
        self._queued = [0, 0]
        for level in (0, 1):
            self._rebuild(level)

    def key(self, place: int) -> Key:
        """Lower goes first."""
        group = self._group
        return group.priorities[place], group.released_at[place], group.depths[place]

    @property
    def queued(self) -> int:
        """Entries of all queues, stale ones too."""
        return sum(len(queue.places) for queues in self._queues for queue in queues.values())

    # -- what happens

    def released(self, level: int, places: array[int]) -> None:
        """Make these blocks candidates."""
        self._queued[level] += len(places)
        if self._queued[level] > 4 * self._group.levels[level].size + _MUCH or not self._append(level, places):
            self._rebuild(level)

    def cleared(self) -> None:
        """Forget all candidates."""
        self._queues, self._queued = [{}, {}], [0, 0]

    def _append(self, level: int, places: array[int]) -> bool:
        """Queue blocks; False: they should have come earlier."""
        if len(places) > FEW:
            return self._append_many(level, np.frombuffer(places, np.int32))
        group, queues = self._group, self._queues[level]
        for place in places:
            queue = queues.get(group.priorities[place])
            if queue is None:
                queue = queues[group.priorities[place]] = _Queue()
            stamp, depth, stamps = group.released_at[place], group.depths[place], queue.stamps
            if stamps and (stamp < stamps[-1] or (stamp == stamps[-1] and depth < queue.depths[-1])):
                return False
            queue.places.append(place)
            stamps.append(stamp)
            queue.depths.append(depth)
        return True

    def _append_many(self, level: int, at: npt.NDArray[np.int32]) -> bool:
        columns = self._group.views
        priorities = columns["priorities"][at]
        alike = len(at) == 0 or (priorities == priorities[0]).all()
        for priority in priorities[:1].tolist() if alike else np.unique(priorities).tolist():
            queue = self._queues[level].setdefault(priority, _Queue())
            places = at if alike else at[priorities == priority]
            stamps, depths = columns["released_at"][places], columns["depths"][places]
            later = (stamps[1:] > stamps[:-1]) | ((stamps[1:] == stamps[:-1]) & (depths[1:] >= depths[:-1]))
            last = (queue.stamps[-1], queue.depths[-1]) if queue.stamps else (-1, -1)
            if not later.all() or (stamps[0], depths[0]) < last:
                return False
            queue.places.frombytes(places.tobytes())
            queue.stamps.frombytes(stamps.tobytes())
            queue.depths.frombytes(depths.tobytes())
        return True

    def _rebuild(self, level: int) -> None:
        """Queue all candidates anew."""
        columns, primary = self._group.views, self._group.levels[PRIMARY].size
        idle = np.flatnonzero((columns["run_ids"] >= 0) & (columns["refs"] == 0))
        idle = idle[(idle >= primary) == level]
        order = np.lexsort([columns[name][idle] for name in ("depths", "released_at", "priorities")])
        self._queues[level], self._queued[level] = {}, len(idle)
        in_order = self._append_many(level, idle[order].astype(np.int32))
        invariant(in_order, "what was sorted is not in order")

    # -- what goes next

    def lowest(self, level: int, spares: Collection[int] = ()) -> Key | None:
        """The key of the block that goes next, but for the places in `spares`."""
        places = self.first(level, 1, spares=spares)
        return self.key(places[0]) if places else None

    def first(
        self, level: int, wanted: int, below: Key | None = None, spares: Collection[int] = ()
    ) -> array[int]:
        """The places of the blocks that go next, in their order.

        At most so many, with keys lower than `below`; places in `spares` are passed over.
        """
        found, queues = array("i"), self._queues[level]
        for priority in sorted(queues) if len(queues) > 1 else queues:
            if len(found) == wanted or (below is not None and priority > below[0]):
                break
            queue = queues[priority]
            limited = below is not None and priority == below[0]
            stop = queue.up_to(below[1:]) if below is not None and limited else len(queue.places)
            found += self._first(queue, priority, wanted - len(found), stop, spares)
        return found

    def _first(
        self, queue: _Queue, priority: int, wanted: int, stop: int, spares: Collection[int]
    ) -> array[int]:
        """The first blocks of a queue, up to the entry `stop`."""
        found, begin, oldest = array("i"), queue.head, None
        while begin < stop and len(found) < wanted:
            # Some may be stale; the more were, the more are looked at.
            end = min(stop, begin + 2 * (wanted - len(found)) + begin - queue.head)
            at, places = self._still(queue, priority, begin, end)
            if oldest is None and len(at):
                oldest = begin + int(at[0])
            if spares:
                places = array("i", [place for place in places if place not in spares])
            found += places[: wanted - len(found)]
            begin = end
        # Those that were found are stale as soon as they are evicted.
        queue.pass_over(begin if oldest is None else oldest)
        return found

    def _still(
        self, queue: _Queue, priority: int, begin: int, end: int
    ) -> tuple[npt.NDArray[np.intp], array[int]]:
        """Of some entries those that are not stale: their indexes from `begin` on, and their places."""
        columns, places = self._group.views, _view(queue.places[begin:end])
        there = (columns["released_at"][places] == _view(queue.stamps[begin:end])) & (
            columns["depths"][places] == _view(queue.depths[begin:end])
        )
        there &= (columns["refs"][places] == 0) & (columns["run_ids"][places] >= 0)
        there &= columns["priorities"][places] == priority
        return np.flatnonzero(there), array("i", places[there].tobytes())

    def check(self) -> None:
        """Compare the queues of each level with all candidates; changes nothing."""
        group = self._group
        for queues, begin, level in zip(
            self._queues, (0, group.levels[PRIMARY].size), group.levels, strict=True
        ):
            places = range(begin, begin + level.size)
            idle = sorted(place for place in places if group.run_ids[place] >= 0 and not group.refs[place])
            queued = array("i")
            for priority, queue in queues.items():
                entries = list(zip(queue.stamps, queue.depths, strict=True))
                invariant(entries == sorted(entries), "another block would be evicted than the lowest in order")
                early, _ = self._still(queue, priority, 0, queue.head)
                invariant(not len(early), "a block cannot be evicted: passed over")
                queued += self._still(queue, priority, queue.head, len(entries))[1]
            invariant(sorted(queued) == idle, "a block cannot be evicted: unheard of")


def _view(column: array[Any]) -> npt.NDArray[Any]:
    return np.frombuffer(column, np.int64 if column.typecode == "q" else np.int32)

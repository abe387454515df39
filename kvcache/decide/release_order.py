"""Which blocks of a sliding window are evicted next: any that no sequence holds.

Lower priority first, then what was released longest ago, then the shallowest. Blocks are released in this order, and go
to secondary in it, so a queue per priority needs no sorting: a release is appended. Entries are never changed: those of
blocks that were held again, evicted or moved since are passed over when their turn comes.

What is released in primary, a few blocks at nearly every step, is only noted, and queued all together when something is
to be evicted.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from events.types import PRIMARY, SECONDARY
from kvcache.errors import invariant
from kvcache.fold.places import FEW, indexes
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.slots import DEFAULT_PRIORITY
from kvcache.fold.watcher import Watcher

Key = tuple[int, int, int]
"""Priority, release stamp, depth."""
_MUCH = 1024
"""Entries that are not worth an effort."""


class _Queue:
    """Blocks of one priority, as they were released."""

    __slots__ = ("depths", "head", "places", "stamps")

    def __init__(self) -> None:
        self.places, self.stamps, self.depths = array("i"), array("q"), array("q")
        """Depths only of what is in secondary."""
        self.head = 0
        """Entries before it are stale."""

    def pass_over(self, head: int) -> None:
        """Everything before `head` is stale."""
        self.head = head
        if head > _MUCH and 2 * head > len(self.places):
            for column in (self.places, self.stamps, self.depths):
                del column[:head]
            self.head = 0

    def keep(self, there: npt.NDArray[np.bool_]) -> None:
        """Of the entries from `head` on keep those where this is so; all others are stale."""
        self.places = _chosen(self.places[self.head :], there)
        self.stamps = _chosen(self.stamps[self.head :], there)
        if self.depths:
            self.depths = _chosen(self.depths[self.head :], there)
        self.head = 0

    def append(self, places: array[int], stamps: array[int], depths: array[int] | None) -> bool:
        """Append entries; False: they are not in order, or should have come earlier.

        In primary, where blocks come as they are released, only the stamps can be out of order.
        """
        last = self.stamps[-1] if self.stamps else 0
        if stamps[0] < last or (depths is not None and not self._in_order(_view(stamps), _view(depths))):
            return False
        self.places += places
        self.stamps += stamps
        if depths is not None:
            self.depths += depths
        return True

    def _in_order(self, stamps: npt.NDArray[np.int64], depths: npt.NDArray[np.int64]) -> bool:
        if self.stamps and (stamps[0], depths[0]) < (self.stamps[-1], self.depths[-1]):
            return False
        later, deeper = stamps[1:] > stamps[:-1], depths[1:] > depths[:-1]
        return bool((later | ((stamps[1:] == stamps[:-1]) & deeper)).all())

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
        self._noted, self._noted_stamps = array("i"), array("q")
        """Primary blocks that were released and are not queued yet, and when: a place that has another stamp by then
        has been held or given away since."""
        for level in (0, 1):
            self._rebuild(level)

    def key(self, place: int) -> Key:
        """Lower goes first."""
        group = self._group
        return group.priorities[place], group.released_at[place], group.depth(place)

    @property
    def queued(self) -> int:
        """Entries of all queues, stale ones too, and of those that are to be queued."""
        queues = [queue for queues in self._queues for queue in queues.values()]
        return sum(len(queue.places) for queue in queues) + len(self._noted)

    # -- what happens

    def released(self, level: int, places: array[int]) -> None:
        """Make these blocks candidates."""
        if level != PRIMARY:
            self._queue(level, places, _gathered(self._group.views["released_at"], indexes(places)))
            return
        released_at = self._group.released_at
        self._noted += places
        if len(places) <= FEW:
            self._noted_stamps.extend([released_at[place] for place in places])
        else:
            self._noted_stamps.frombytes(self._group.views["released_at"][indexes(places)].tobytes())
        if len(self._noted) > _MUCH:
            self._queue_noted()

    def cleared(self) -> None:
        """Forget all candidates."""
        self._queues, self._queued = [{}, {}], [0, 0]
        self._noted, self._noted_stamps = array("i"), array("q")

    def _queue_noted(self) -> None:
        if self._noted:
            places, stamps = self._noted, self._noted_stamps
            self._noted, self._noted_stamps = array("i"), array("q")
            self._queue(PRIMARY, places, stamps)

    def _queue(self, level: int, places: array[int], stamps: array[int]) -> None:
        if self._queued[level] + len(places) > 4 * self._group.levels[level].size + _MUCH:
            self._forget_stale(level)
        self._queued[level] += len(places)
        if not self._append(level, places, stamps):
            self._rebuild(level)

    def _forget_stale(self, level: int) -> None:
        queues = self._queues[level]
        for queue in queues.values():
            queue.keep(self._still(level, queue, queue.head, len(queue.places)))
        self._queued[level] = sum(len(queue.places) for queue in queues.values())

    def _append(self, level: int, places: array[int], stamps: array[int]) -> bool:
        """Append blocks to their queues; False: one should have come earlier."""
        if not places:
            return True
        depths = None
        if level == SECONDARY:
            depths = array("q", self._group.depths_at(indexes(places)).tobytes())
        if self._group.kept_alike:
            return self._queue_of(level, DEFAULT_PRIORITY).append(places, stamps, depths)
        priorities = self._group.views["priorities"][indexes(places)]
        for priority in np.unique(priorities).tolist():
            part = priorities == priority
            of_part = None if depths is None else _chosen(depths, part)
            queue = self._queue_of(level, priority)
            if not queue.append(_chosen(places, part), _chosen(stamps, part), of_part):
                return False
        return True

    def _queue_of(self, level: int, priority: int) -> _Queue:
        queue = self._queues[level].get(priority)
        if queue is None:
            queue = self._queues[level][priority] = _Queue()
        return queue

    def _rebuild(self, level: int) -> None:
        """Queue all candidates anew."""
        columns, primary = self._group.views, self._group.levels[PRIMARY].size
        idle = np.flatnonzero((columns["positions"] >= 0) & (columns["refs"] == 0))
        idle = idle[(idle >= primary) == level]
        if level == PRIMARY:
            self._noted, self._noted_stamps = array("i"), array("q")
        keys = self._group.depths_at(idle), columns["released_at"][idle], columns["priorities"][idle]
        order = np.lexsort(keys)
        self._queues[level], self._queued[level] = {}, len(idle)
        idle = idle[order]
        places = array("i", idle.astype(np.int32).tobytes())
        in_order = self._append(level, places, _gathered(columns["released_at"], idle))
        invariant(in_order, "what was sorted is not in order")

    # -- what goes next

    def lowest(self, level: int, spares: Collection[int] = ()) -> Key | None:
        """The key of the block that goes next, but for the places in `spares`."""
        if level == PRIMARY:
            self._queue_noted()
        queues = self._queues[level]
        for priority in sorted(queues):
            places, _ = self._first(level, queues[priority], 1, len(queues[priority].places), spares)
            if places:
                return self.key(places[0])
        return None

    def take(
        self, level: int, wanted: int, below: Key | None = None, spares: Collection[int] = ()
    ) -> array[int]:
        """The places of the blocks that go next, in their order, for whoever evicts them all.

        At most so many, with keys lower than `below`; places in `spares` are passed over.
        """
        if level == PRIMARY:
            self._queue_noted()
        found, queues = array("i"), self._queues[level]
        for priority in sorted(queues):
            if len(found) == wanted or (below is not None and priority > below[0]):
                break
            queue = queues[priority]
            limited = below is not None and priority == below[0]
            stop = queue.up_to(below[1:]) if below is not None and limited else len(queue.places)
            places, head = self._first(level, queue, wanted - len(found), stop, spares)
            queue.pass_over(head)
            found += places
        return found

    def _first(
        self, level: int, queue: _Queue, wanted: int, stop: int, spares: Collection[int]
    ) -> tuple[array[int], int]:
        """The first blocks of a queue up to the entry `stop`, and the first entry that is of use without them."""
        found, begin, spared = array("i"), queue.head, None
        while begin < stop and len(found) < wanted:
            missing = wanted - len(found)
            # Some may be stale; the more were, the more are looked at.
            end = min(stop, begin + missing + FEW + begin - queue.head)
            places, there = queue.places[begin:end], self._still(level, queue, begin, end)
            if np.count_nonzero(there) < len(there):
                places = _chosen(places, there)
            if spares:
                free = [place not in spares for place in places]
                if spared is None and not all(free):
                    spared = begin + free.index(False)  # or behind, where stale ones were passed over
                places = array("i", compress(places, free))
            if len(places) > missing:
                end = begin + (missing if len(places) == len(there) else int(there.nonzero()[0][missing]))
            found += places[:missing]
            begin = end
        return found, begin if spared is None else min(begin, spared)

    def _still(self, level: int, queue: _Queue, begin: int, end: int) -> npt.NDArray[np.bool_]:
        """Which of some entries are not stale.

        A release is told by its stamp, which a block has until it is held again or not cached any more.
        """
        at = indexes(queue.places[begin:end])
        there: npt.NDArray[np.bool_] = self._group.views["released_at"][at] == _view(queue.stamps[begin:end])
        if level == SECONDARY:
            # Where a block lay, another one of its release may have been moved to since.
            there &= self._group.depths_at(at) == _view(queue.depths[begin:end])
        return there

    def check(self) -> None:
        """Compare the queues of each level with all candidates; changes nothing."""
        group = self._group
        for queues, begin, level in zip(
            self._queues, (0, group.levels[PRIMARY].size), group.levels, strict=True
        ):
            places = range(begin, begin + level.size)
            idle = sorted(place for place in places if group.positions[place] >= 0 and not group.refs[place])
            queued = array("i")
            for priority, queue in queues.items():
                depths = queue.depths if level.index == SECONDARY else [0] * len(queue.places)
                entries = list(zip(queue.stamps, depths, strict=True))
                missed = self._still(level.index, queue, 0, queue.head)
                invariant(not missed.any(), "a block cannot be evicted: passed over")
                there = self._still(level.index, queue, queue.head, len(entries))
                left = _chosen(queue.places[queue.head :], there)
                keys = [self.key(place) for place in left]
                invariant(
                    entries == sorted(entries) and keys == sorted(keys),
                    "another block would be evicted than the lowest in order",
                )
                alike = all(group.priorities[place] == priority for place in left)
                invariant(alike, "a block is queued with another priority than it has")
                queued += left
            if level.index == PRIMARY:
                noted = zip(self._noted, self._noted_stamps, strict=True)
                queued.extend([place for place, stamp in noted if group.released_at[place] == stamp])
            invariant(sorted(queued) == idle, "a block cannot be evicted: unheard of")


def _gathered(column: npt.NDArray[np.int64], at: npt.NDArray[np.intp]) -> array[int]:
    return array("q", column[at].tobytes())


def _chosen(column: array[int], there: npt.NDArray[np.bool_]) -> array[int]:
    """The entries of a column where this is so."""
    return array(column.typecode, _view(column)[there].tobytes())


def _view(column: array[Any]) -> npt.NDArray[Any]:
    return np.frombuffer(column, np.int64 if column.typecode == "q" else np.int32)

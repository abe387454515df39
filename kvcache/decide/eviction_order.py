"""Eviction orders of one window: `EvictionOrder` with full attention, `ReleaseOrder` in a sliding window.

Both watch the fold for evictable blocks and decide by the state of these alone, so that a manager that continues from
an exported state decides alike. Both have the same queries:

| | with full attention | in a sliding window |
|---|---|---|
| evicts | the last blocks of a *leaf*: an unreferenced run without a child in its level | any unreferenced block |
| `next(level, spares)` | the run that ends with the next victim | the place of the next victim |
| `lowest(level, count)` | the runs that go next, and the number of blocks of each | the places that go next |
| `precedes(one, other)` | True if `one` goes first | True if `one` goes first |
| `check()` | verifies that nothing was missed | verifies that nothing was missed |

In a tree an eviction makes candidates, for the run above becomes a leaf; in a sliding window none changes the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Collection
from heapq import heapify, heappop, heappush, heapreplace
from inspect import isabstract
from typing import Any

import numpy as np
import numpy.typing as npt

from events.types import PRIMARY, SECONDARY
from kvcache.errors import UsageError, invariant
from kvcache.fold.full_group import FullGroup
from kvcache.fold.group import Watcher, indexes
from kvcache.fold.prefix_tree import Run
from kvcache.fold.sequence import DEFAULT_PRIORITY
from kvcache.fold.sliding_group import FEW, SlidingGroup, view_of

_Entry = tuple[Any, int, int]
"""Key of a run, its last slot (which decides between equal keys), its id."""


class EvictionOrder(Watcher, ABC):
    """Order of the next victims; built from the state of one window, and updated with its changes from then on."""

    needs_names = False
    """True if it needs keys of runs, by which it compares contents."""

    @abstractmethod
    def __init__(self, group: FullGroup) -> None: ...

    @abstractmethod
    def next(self, level: int, spares: Collection[int] = ()) -> Run | None:
        """Return the run with the next victim as its last block, except runs that end in a slot of `spares`."""

    def lowest(self, level: int, count: int) -> list[tuple[Run, int]]:
        """Return the runs that go next and the number of blocks of each, deepest first: `count` blocks, or as many as
        precede one with a turn that depends on their eviction. Here the next run alone, as if it decided the order of
        the others.
        """
        run = self.next(level)
        return [] if run is None else [(run, self.num_same_rank(run, min(count, len(run.slots))))]

    def num_same_rank(self, run: Run, count: int, other: Run | None = None) -> int:
        """Count how many of the last `count` blocks of the next run precede any other run's, and those of `other`: all
        of them, unless an order ranks the blocks of a run one by one.
        """
        return count

    @abstractmethod
    def precedes(self, run: Run, other: Run) -> bool:
        """True if a run, perhaps of another level, precedes the other, or neither precedes the other."""

    @abstractmethod
    def check(self) -> None:
        """Raise `InvariantViolated` if a run was missed, or would go out of turn."""


class LeastRecentlyUsed(EvictionOrder):
    """Lower priority first, then what was released longest ago, then the deepest.

    A heap per level. Entries are never updated in place: a changed run gets a new entry, and an entry that no longer
    describes its run is dropped when it comes up.
    """

    def __init__(self, group: FullGroup) -> None:
        self._runs = group.tree.runs
        self._heaps: list[list[_Entry]] = [[] for _ in group.levels]
        for run in self._runs.values():
            if run.is_leaf:
                self.evictable(run)

    def key(self, run: Run) -> Any:
        """Return the sort key of a run; lower goes first. May depend on its level, priority, release and end, and on
        what the order has seen.

        Not on its start: runs are joined and split without notice.
        """
        return (run.priority, run.released_at, -run.end)

    # -- notifications

    def evictable(self, run: Run) -> None:
        """Make the run a candidate."""
        heap = self._heaps[run.level]
        entry = (self.key(run), run.slots[-1], run.id)
        if not heap or heap[0][2] != run.id:
            heappush(heap, entry)
            if len(heap) > 4 * len(self._runs):
                self._compact(run.level)
        elif len(heap) > 2 and entry < heap[1] and entry < heap[2]:
            heap[0] = entry  # the one that is being evicted got shorter, and is still the next
        else:
            heapreplace(heap, entry)

    def cleared(self) -> None:
        """Forget all candidates."""
        for heap in self._heaps:
            heap.clear()

    def _compact(self, level: int) -> None:
        """Drop stale entries."""
        self._heaps[level] = [
            (self.key(run), run.slots[-1], run.id)
            for run in self._runs.values()
            if run.level == level and run.is_leaf
        ]
        heapify(self._heaps[level])

    # -- queries

    def next(self, level: int, spares: Collection[int] = ()) -> Run | None:
        """Return the run with the next victim as its last block."""
        heap, spared = self._heaps[level], []
        found = None
        while heap and found is None:
            run = self._described(heap[0], level)
            if run is None:
                heappop(heap)
            elif spares and run.slots[-1] in spares:
                spared.append(heappop(heap))
            else:
                found = run
        for entry in spared:
            heappush(heap, entry)
        return found

    def _described(self, entry: _Entry, level: int) -> Run | None:
        """Return the run that an entry describes; None if the entry is stale."""
        run = self._runs.get(entry[2])
        if run is None or run.level != level or not run.is_leaf or self.key(run) != entry[0]:
            return None
        return run

    def lowest(self, level: int, count: int) -> list[tuple[Run, int]]:
        """Return the runs that go next, and the number of blocks of each.

        They are as if taken one after the other, though nothing is evicted in between. Two leaves with a parent:

                     ┌ c (key 1)         c goes whole; p has one child left
            p (key 3)┤                   d goes whole; p has none left, so that it will be a leaf: its key 3
                     └ d (key 2)         limits the rest. e goes only after p, so the answer is [c, d].
            e (key 4)

        Invariant: when a leaf is taken whole, a new candidate can appear only in its parent, once all its children in
        this level are among those taken. The parent's key then bounds what may follow, as that run is not in the heap
        yet; every entry below the bound keeps its turn, for no key of another run changes by an eviction. A run stays
        the next one while it gets shorter, for no two leaves have one release stamp (a release is of one path): each is
        taken from once. O(found · log entries); stale entries are dropped on the way.
        """
        heap = self._heaps[level]
        found: dict[int, tuple[Run, int]] = {}
        entries: list[_Entry] = []
        children: dict[int, int] = {}
        limit: Any = None
        while count and (run := self.next(level)) is not None and (limit is None or heap[0][0] < limit):
            entry = heappop(heap)
            if run.id in found:
                continue  # a duplicate entry
            take = min(count, len(run.slots))
            found[run.id] = (run, take)
            entries.append(entry)
            count -= take
            parent = run.parent
            if take == len(run.slots) and isinstance(parent, Run) and parent.level == level:
                children[parent.id] = children.get(parent.id, parent.same_level_children) - 1
                if not children[parent.id] and not parent.refs:
                    turn = self.key(parent)
                    limit = turn if limit is None else min(limit, turn)
        for entry in entries:
            heappush(heap, entry)
        return list(found.values())

    def precedes(self, run: Run, other: Run) -> bool:
        """True if a run precedes the other, or neither precedes the other."""
        return bool(self.key(run) <= self.key(other))

    def check(self) -> None:
        """Compare the next victim of each level with all runs."""
        for level, heap in enumerate(self._heaps):
            leaves = [run for run in self._runs.values() if run.level == level and run.is_leaf]
            known = [run for entry in heap if (run := self._described(entry, level)) is not None]
            invariant(
                {run.id for run in leaves} == {run.id for run in known},
                "an evictable block is missing from the eviction order",
            )
            first = min(heap, default=None, key=lambda entry: (self._described(entry, level) is None, entry))
            lowest = min(map(self.key, leaves), default=None)
            invariant(
                lowest is None or (first is not None and first[0] == lowest),
                "the next block to evict is not the lowest in order",
            )


class ReuseLevels(LeastRecentlyUsed):
    """Lower priority first, then what was released longest ago, credit included, then the deepest.

    Credits are in the state of windows that count uses (`kvcache.fold.full_group`); elsewhere there are none, and
    this is `LeastRecentlyUsed`.
    """

    def key(self, run: Run) -> Any:
        """Sort by turn. Two runs with one turn may come from two releases, which are not to alternate."""
        return (run.priority, run.turn, run.released_at, -run.end)


ORDERS: dict[str, type[EvictionOrder]] = {"lru": LeastRecentlyUsed, "levels": ReuseLevels}
"""Orders by the value of the setting `eviction_policy`."""


def refuse_no_order(order: object) -> None:
    """Raise `UsageError` unless this is a class of orders."""
    if not (isinstance(order, type) and issubclass(order, EvictionOrder)) or isabstract(order):
        raise UsageError("eviction_order must be a subclass of kvcache.decide.eviction_order.EvictionOrder")


Key = tuple[int, int, int]
"""Priority, release stamp, depth."""


class _Queue:
    """Blocks of one priority, in the order of their release."""

    def __init__(self) -> None:
        self.places, self.stamps, self.depths = array("i"), array("q"), array("q")
        """Places, stamps, and in secondary only, depths."""
        self.head = 0
        """Entries before it are stale."""

    def pass_over(self, head: int) -> None:
        """Mark everything before `head` as stale."""
        self.head = head
        if 2 * head > len(self.places):
            for column in (self.places, self.stamps, self.depths):
                del column[:head]
            self.head = 0

    def append(self, places: array[int], stamps: array[int], depths: array[int] | None) -> bool:
        """Append entries; returns False if they are out of order, or should have come earlier.

        In primary, where blocks come as they are released, only the stamps can be out of order.
        """
        last = self.stamps[-1] if self.stamps else 0
        if stamps[0] < last or (depths is not None and not self._in_order(view_of(stamps), view_of(depths))):
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
        """Return the first entry that is not before this release stamp and depth."""
        stamp, depth = limit
        begin, end = (int(np.searchsorted(view_of(self.stamps), stamp, side)) for side in ("left", "right"))
        return begin + int(np.searchsorted(view_of(self.depths)[begin:end], depth))


class ReleaseOrder(Watcher):
    """Lower priority first, then what was released longest ago, then the shallowest.

    Blocks are released in this order, and go to secondary in it, so a queue per level and priority needs no sorting: a
    release is appended. Entries are never changed: those of blocks that were held again, evicted or moved since are
    stale, and passed over when their turn comes. Blocks released in primary, a few at nearly every step, are only
    noted, and queued all together when something is to be evicted.
    """

    def __init__(self, group: SlidingGroup) -> None:
        self._group = group
        self._queues = [defaultdict[int, _Queue](_Queue) for _ in group.levels]
        """Queues by level and priority."""
        self._noted, self._noted_stamps = array("i"), array("q")
        """Primary blocks that were released and are not queued yet, with their stamps: a place with another stamp by
        then has been held or given away since."""
        for level in (0, 1):
            self._rebuild(level)

    def key(self, place: int) -> Key:
        """Sort key of a place; lower goes first."""
        group = self._group
        return group.priorities[place], group.released_at[place], group.depth(place)

    @property
    def queued(self) -> int:
        """Entries of all queues, stale and not yet queued ones included."""
        return sum(map(self._entries, range(len(self._queues)))) + len(self._noted)

    def _entries(self, level: int) -> int:
        return sum([len(queue.places) for queue in self._queues[level].values()])

    # -- notifications

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
        if len(self._noted) > self._group.levels[PRIMARY].size:
            self._queue_noted()

    def cleared(self) -> None:
        """Forget all candidates."""
        for queues in self._queues:
            queues.clear()
        self._noted, self._noted_stamps = array("i"), array("q")

    def _queue_noted(self) -> None:
        if self._noted:
            places, stamps = self._noted, self._noted_stamps
            self._noted, self._noted_stamps = array("i"), array("q")
            self._queue(PRIMARY, places, stamps)

    def _queue(self, level: int, places: array[int], stamps: array[int]) -> None:
        in_order = self._append(level, places, stamps)
        if not in_order or self._entries(level) > 4 * self._group.levels[level].size:
            self._rebuild(level)

    def _append(self, level: int, places: array[int], stamps: array[int]) -> bool:
        """Append blocks to their queues; returns False if one should have come earlier."""
        if not places:
            return True
        depths = None
        if level == SECONDARY:
            depths = array("q", self._group.depths_at(indexes(places)).tobytes())
        if self._group.default_priorities_only:
            return self._queues[level][DEFAULT_PRIORITY].append(places, stamps, depths)
        priorities = self._group.views["priorities"][indexes(places)]
        for priority in np.unique(priorities).tolist():
            part = priorities == priority
            of_part = None if depths is None else _chosen(depths, part)
            queue = self._queues[level][priority]
            if not queue.append(_chosen(places, part), _chosen(stamps, part), of_part):
                return False
        return True

    def _rebuild(self, level: int) -> None:
        """Rebuild the queues from all candidates."""
        columns, primary = self._group.views, self._group.levels[PRIMARY].size
        idle = np.flatnonzero((columns["positions"] >= 0) & (columns["refs"] == 0))
        idle = idle[(idle >= primary) == level]
        if level == PRIMARY:
            self._noted, self._noted_stamps = array("i"), array("q")
        keys = self._group.depths_at(idle), columns["released_at"][idle], columns["priorities"][idle]
        self._queues[level].clear()
        idle = idle[np.lexsort(keys)]
        places = array("i", idle.astype(np.int32).tobytes())
        in_order = self._append(level, places, _gathered(columns["released_at"], idle))
        invariant(in_order, "the sorted entries are not in order")

    # -- queries

    def next(self, level: int, spares: Collection[int] = ()) -> int | None:
        """Return the place of the next victim, except those in `spares`."""
        if level == PRIMARY:
            self._queue_noted()
        queues = self._queues[level]
        for priority in sorted(queues):
            places, _ = self._first(level, queues[priority], 1, len(queues[priority].places), spares)
            if places:
                return places[0]
        return None

    def lowest(
        self, level: int, count: int, before: int | None = None, spares: Collection[int] = ()
    ) -> array[int]:
        """Return the places of the next victims in their order, for a caller that evicts them all.

        At most `count`, which precede the block at the place `before`; places in `spares` are passed over.
        """
        if level == PRIMARY:
            self._queue_noted()
        found, queues = array("i"), self._queues[level]
        below = None if before is None else self.key(before)
        for priority in sorted(queues):
            if len(found) == count or (below is not None and priority > below[0]):
                break
            queue = queues[priority]
            limited = below is not None and priority == below[0]
            stop = queue.up_to(below[1:]) if below is not None and limited else len(queue.places)
            places, head = self._first(level, queue, count - len(found), stop, spares)
            queue.pass_over(head)
            found += places
        return found

    def precedes(self, place: int, other: int) -> bool:
        """True if a block, perhaps of another level, precedes the other, or neither precedes the other."""
        return self.key(place) <= self.key(other)

    def _first(
        self, level: int, queue: _Queue, wanted: int, stop: int, spares: Collection[int]
    ) -> tuple[array[int], int]:
        """Find the first `wanted` blocks of a queue up to the entry `stop`, and the first entry that is still of use
        without them.

            queue   s s s A s S B C D ...    s: stale; S: in `spares`; wanted: 2
                    ^head                    found: A, B
                                  ^ of use from C on; with spares, which go next when they are spared no more, from
                                    `head` on

        Entries are looked at in slices, each as long as what is missing, a margin, and all that was looked at before:
        so a slice at least doubles what has been seen. Invariant: `found` are the first blocks of ``queue[head:begin]``
        that are neither stale nor spared, and all entries before the one returned are stale as soon as those are
        evicted. O(entries up to there), each of which is passed over once by all calls without spares together.
        """
        found, begin = array("i"), queue.head
        while begin < stop and len(found) < wanted:
            missing = wanted - len(found)
            end = min(stop, begin + missing + FEW + begin - queue.head)
            places, there = queue.places[begin:end], self._still(level, queue, begin, end)
            if np.count_nonzero(there) < len(there):
                places = _chosen(places, there)
            if spares:
                places = array("i", [place for place in places if place not in spares])
            if len(places) > missing:
                end = begin + (missing if len(places) == len(there) else int(there.nonzero()[0][missing]))
            found += places[:missing]
            begin = end
        return found, queue.head if spares else begin

    def _still(self, level: int, queue: _Queue, begin: int, end: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the entries that are not stale: their place has the stamp with which they were queued.

            entry (place 7, stamp 40)   place 7 has stamp 40   still there
                                        place 7 has stamp 0    held again, or not cached
                                        place 7 has stamp 55   held and released since, or given away: a later entry

        Stamps are never used twice, so one alone identifies a release. In secondary it does not identify the block:
        what a release has left at one place may have moved off, and another block of the *same* release may have come.
        Blocks of one release differ in depth, so that is compared, too. O(entries), without a loop.
        """
        at = indexes(queue.places[begin:end])
        there: npt.NDArray[np.bool_] = self._group.views["released_at"][at] == view_of(
            queue.stamps[begin:end]
        )
        if level == SECONDARY:
            there &= self._group.depths_at(at) == view_of(queue.depths[begin:end])
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
                invariant(not missed.any(), "an evictable block was passed over")
                there = self._still(level.index, queue, queue.head, len(entries))
                left = _chosen(queue.places[queue.head :], there)
                keys = [self.key(place) for place in left]
                invariant(
                    entries == sorted(entries) and keys == sorted(keys),
                    "the next block to evict is not the lowest in order",
                )
                alike = all(group.priorities[place] == priority for place in left)
                invariant(alike, "a block is queued with a priority other than its own")
                queued += left
            if level.index == PRIMARY:
                noted = zip(self._noted, self._noted_stamps, strict=True)
                queued.extend([place for place, stamp in noted if group.released_at[place] == stamp])
            invariant(sorted(queued) == idle, "an evictable block is missing from the eviction order")


def _gathered(column: npt.NDArray[np.int64], at: npt.NDArray[np.intp]) -> array[int]:
    return array("q", column[at].tobytes())


def _chosen(column: array[int], there: npt.NDArray[np.bool_]) -> array[int]:
    """Return the entries of a column where the mask is True."""
    return array(column.typecode, view_of(column)[there].tobytes())

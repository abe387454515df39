"""The slots of one level: which are blank, which run owns which, and what may be evicted next.

Victims are chosen among *leaves*: unreferenced runs without a child in their level. The order is own
priority, then release stamp, then deepest. Entries of the heap are never updated in place: a changed run gets a
new entry, and an entry that no longer describes its run is dropped when it comes up.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from kvcache.errors import InvariantViolated, invariant
from kvcache.fold.prefix_tree import Run

_FEW = 16
"""Up to so many slots a loop is faster than numpy."""
PRIORITY_MAX = 100
"""Priorities go from 0, evicted first, to this."""
Entry = tuple[int, int, int, int, int]


def last_reversed(slots: array[int], count: int) -> array[int]:
    """The last `count` slots, last first."""
    if count > _FEW:
        return array("i", np.frombuffer(slots, np.int32)[: -count - 1 : -1].tobytes())
    return slots[: -count - 1 : -1]


class Level:
    """Slots of one window at one level."""

    __slots__ = ("free", "index", "leaves", "owner", "owners", "size", "unreferenced")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self.free = array("i")
        self.free.frombytes(np.arange(size - 1, -1, -1, dtype=np.int32).tobytes())
        """Blank slots; the last is taken first, so that a new cache hands out 0, 1, 2, ..."""
        self.owner = array("q", [-1]) * size
        """Id of the run that holds the slot, or was the last to do so: whoever asks compares the run's slots."""
        self.owners = np.frombuffer(self.owner, np.int64) if size else np.empty(0, np.int64)
        """The same memory, for many slots at a time."""
        self.unreferenced = 0
        """Cached blocks that no sequence holds: all can be evicted, leaf by leaf."""
        self.leaves: list[Entry] = []

    @property
    def available(self) -> int:
        """Slots that can be had: blank, or cached and unreferenced."""
        return len(self.free) + self.unreferenced

    def peek(self, count: int) -> array[int]:
        """The next `count` blank slots, in the order in which they would be taken."""
        if count > len(self.free):
            raise InvariantViolated("not enough blank slots")
        return last_reversed(self.free, count)

    def take(self, slots: array[int]) -> None:
        """Take slots off the free list: the next ones or, rarely, chosen ones."""
        count, free = len(slots), self.free
        if last_reversed(free, count) == slots:
            del free[len(free) - count :]
            return
        for slot in slots:
            invariant(slot in self.free, "a slot that is not blank cannot be taken")
            self.free.remove(slot)

    def give_back(self, slots: array[int]) -> None:
        """Add slots to the free list; the last one will be taken first."""
        self.free.extend(slots)

    def own(self, slots: array[int], run_id: int) -> None:
        """Note which run holds the slots."""
        if len(slots) > _FEW:
            self.owners[np.frombuffer(slots, np.int32)] = run_id
            return
        owner = self.owner
        for slot in slots:
            owner[slot] = run_id

    def add_leaf(self, run: Run) -> None:
        """Make a run a candidate if it is one."""
        if run.refs == 0 and run.kin == 0 and run.level == self.index:
            leaves, entry = self.leaves, _entry(run)
            if not leaves or leaves[0][4] != run.id:
                heappush(leaves, entry)
            elif len(leaves) > 2 and entry < leaves[1] and entry < leaves[2]:
                leaves[0] = entry  # the one that is being evicted got shorter, and is still the next
            else:
                heapreplace(leaves, entry)

    def victim(self, runs: dict[int, Run], spares: Collection[int] = ()) -> Run | None:
        """The run whose last block goes next; the slots in `spares` are passed over."""
        leaves = self.leaves
        spared = []
        found = None
        while leaves:
            priority, stamp, depth, _, run_id = leaves[0]
            run = runs.get(run_id)
            if (
                run is None
                or run.stamp != stamp
                or run.end != -depth
                or run.priority != priority
                or run.refs
                or run.kin
                or run.level != self.index
            ):
                heappop(leaves)
            elif spares and run.slots[-1] in spares:
                spared.append(heappop(leaves))
            else:
                found = run
                break
        for entry in spared:
            heappush(leaves, entry)
        return found

    def lowest(self, runs: dict[int, Run], count: int) -> list[tuple[Run, int]]:
        """The runs that go next and how many blocks of each, deepest first: `count` blocks, or as many as go before
        one whose turn comes only when these are gone.
        """
        found: dict[int, tuple[Run, int]] = {}
        entries: list[Entry] = []
        children: dict[int, int] = {}
        limit: Entry | None = None
        while count and (run := self.victim(runs)) is not None and (limit is None or self.leaves[0] < limit):
            entry = heappop(self.leaves)
            if run.id in found:
                continue  # it was there twice
            take = min(count, len(run.slots))
            found[run.id] = (run, take)
            entries.append(entry)
            count -= take
            parent = run.parent
            if take == len(run.slots) and isinstance(parent, Run) and parent.level == self.index:
                children[parent.id] = children.get(parent.id, parent.kin) - 1
                if not children[parent.id] and not parent.refs:
                    limit = min(limit or _entry(parent), _entry(parent))
        for entry in entries:
            heappush(self.leaves, entry)
        return list(found.values())

    def compact(self, runs: dict[int, Run]) -> None:
        """Drop entries that describe nothing, once they outnumber the runs."""
        if len(self.leaves) > 4 * len(runs) + 64:
            self.leaves = [
                _entry(run) for run in runs.values() if run.level == self.index and not run.refs | run.kin
            ]
            heapify(self.leaves)


def eviction_order(run: Run) -> tuple[int, int, int]:
    """Lower goes first: own priority, release stamp, deepest."""
    return (run.priority, run.stamp, -run.end)


def _entry(run: Run) -> Entry:
    return (run.priority, run.stamp, -run.end, run.slots[-1], run.id)

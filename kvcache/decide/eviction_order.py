"""Which blocks of one window are evicted next.

Only the last block of a *leaf* can go: a run that no sequence holds and that has no child in its level. An order hears
from the fold which runs those are, and decides between them by what the state says of them, so that a manager that goes
on from an exported state decides alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from heapq import heapify, heappop, heappush, heapreplace
from inspect import isabstract
from typing import Any

from kvcache.errors import UsageError, invariant
from kvcache.fold.group_state import GroupState
from kvcache.fold.prefix_tree import Run
from kvcache.fold.watcher import Watcher

_Entry = tuple[Any, int, int]
"""A run's key, its last slot (which decides between equal keys), its id."""


class EvictionOrder(Watcher, ABC):
    """Names the next victims; made for the state of one window, and told from then on what changes in it."""

    ahead = 64
    """Blank slots that decoding makes when it has to evict: each of the next steps then finds one, instead of evicting
    one or two of its own."""

    @abstractmethod
    def __init__(self, group: GroupState) -> None: ...

    @abstractmethod
    def next(self, level: int, spares: Collection[int] = ()) -> Run | None:
        """The run whose last block goes next; runs that end in one of the slots in `spares` are passed over."""

    @abstractmethod
    def lowest(self, level: int, count: int) -> list[tuple[Run, int]]:
        """The runs that go next and how many blocks of each, deepest first: `count` blocks, or as many as go before
        one whose turn comes only when these are gone.
        """

    def alike(self, run: Run, count: int, other: Run | None = None) -> int:
        """How many of the last `count` blocks of the next run go before any other run's, and before `other`: all of
        them, unless an order tells the blocks of a run apart.
        """
        return count

    @abstractmethod
    def precedes(self, run: Run, other: Run) -> bool:
        """Whether a run, perhaps of another level, goes before the other, or neither before the other."""

    @abstractmethod
    def check(self) -> None:
        """Raise `InvariantViolated` if a run was not heard of, or would go out of turn."""


class LeastRecentlyUsed(EvictionOrder):
    """Lower priority first, then what was released longest ago, then the deepest.

    A heap per level. Entries are never updated in place: a changed run gets a new entry, and an entry that no longer
    describes its run is dropped when it comes up.
    """

    def __init__(self, group: GroupState) -> None:
        self._runs = group.tree.runs
        self._heaps: list[list[_Entry]] = [[] for _ in group.levels]
        for run in self._runs.values():
            if run.is_leaf:
                self.evictable(run)

    def key(self, run: Run) -> Any:
        """Lower goes first. May depend on the run's level, priority, release and end, and on what the order has heard.

        Not on where it begins: runs are joined and split without a word.
        """
        return (run.priority, run.released_at, -run.end)

    # -- what happens

    def evictable(self, run: Run) -> None:
        """Make the run a candidate."""
        heap = self._heaps[run.level]
        entry = (self.key(run), run.slots[-1], run.id)
        if not heap or heap[0][2] != run.id:
            heappush(heap, entry)
            if len(heap) > 4 * len(self._runs) + 64:
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
        """Drop entries that describe nothing."""
        self._heaps[level] = [
            (self.key(run), run.slots[-1], run.id)
            for run in self._runs.values()
            if run.level == level and run.is_leaf
        ]
        heapify(self._heaps[level])

    # -- what goes next

    def next(self, level: int, spares: Collection[int] = ()) -> Run | None:
        """The run whose last block goes next."""
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
        """The run that an entry describes; None if it has changed since."""
        run = self._runs.get(entry[2])
        if run is None or run.level != level or not run.is_leaf or self.key(run) != entry[0]:
            return None
        return run

    def lowest(self, level: int, count: int) -> list[tuple[Run, int]]:
        """The runs that go next, and how many blocks of each."""
        heap = self._heaps[level]
        found: dict[int, tuple[Run, int]] = {}
        entries: list[_Entry] = []
        children: dict[int, int] = {}
        limit: Any = None
        while count and (run := self.next(level)) is not None and (limit is None or heap[0][0] < limit):
            entry = heappop(heap)
            if run.id in found:
                continue  # it was there twice
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
        """Whether a run goes before the other, or neither before the other."""
        return bool(self.key(run) <= self.key(other))

    def check(self) -> None:
        """Compare the next of each level with all runs."""
        for level, heap in enumerate(self._heaps):
            leaves = [run for run in self._runs.values() if run.level == level and run.is_leaf]
            known = [run for entry in heap if (run := self._described(entry, level)) is not None]
            invariant(
                {run.id for run in leaves} == {run.id for run in known},
                "a block cannot be evicted: unheard of",
            )
            first = min(heap, default=None, key=lambda entry: (self._described(entry, level) is None, entry))
            lowest = min(map(self.key, leaves), default=None)
            invariant(
                lowest is None or (first is not None and first[0] == lowest),
                "another block would be evicted than the lowest in order",
            )


class ReuseLevels(LeastRecentlyUsed):
    """Lower priority first, then what was released longest ago, credit included, then the deepest.

    Credits are in the state of windows that count uses (`kvcache.fold.counting_group`); elsewhere there are none, and
    this is `LeastRecentlyUsed`.
    """

    def key(self, run: Run) -> Any:
        """By turn. Two runs with one turn may be those of two releases, which are not to go in turns."""
        return (run.priority, run.turn, run.released_at, -run.end)


ORDERS: dict[str, type[EvictionOrder]] = {"lru": LeastRecentlyUsed, "levels": ReuseLevels}
"""By the setting `eviction_policy`."""


def refuse_no_order(order: object) -> None:
    """Raise `UsageError` for what is no class of orders."""
    if not (isinstance(order, type) and issubclass(order, EvictionOrder)) or isabstract(order):
        raise UsageError(
            "eviction_order must be a class derived from kvcache.decide.eviction_order.EvictionOrder"
        )

"""Adaptive replacement (ARC) on leaves: what was used once and what was used again share the cache as ghosts teach."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from itertools import takewhile

from events.packed import NAME_BYTES
from kvcache.decide.eviction_order import EvictionOrder, LeastRecentlyUsed
from kvcache.errors import invariant
from kvcache.fold.group_state import GroupState
from kvcache.fold.prefix_tree import Run
from kvcache.whatif.policies.arc_lists import ArcLists


class AdaptiveReplacement(EvictionOrder):
    """Lower priority first, then what was used once if that exceeds its target, else what was used again; then as
    `LeastRecentlyUsed`.

    Both levels are one cache: moving a block between them changes no list. Ghosts are met when the block that came
    back is released for the first time. Use by several sequences at a time counts once.
    """

    needs_names = True

    def __init__(self, group: GroupState) -> None:
        self._group, self._runs, self._key_bytes = group, group.tree.runs, group.tree.key_bytes
        self._lists = ArcLists(sum(level.size for level in group.levels))
        self._once, self._again = _Leaves(group, self, False), _Leaves(group, self, True)
        for run in self._runs.values():
            if run.is_leaf:
                self.evictable(run)

    def used_again(self, run: Run) -> bool:
        """Whether the last block of a run was used again."""
        return self._lists.used_again(self._name(run, len(run.slots) - 1))

    def _name(self, run: Run, at: int) -> bytes:
        begin = at * self._key_bytes
        return bytes(run.keys[begin : begin + NAME_BYTES])

    # -- what happens

    def evictable(self, run: Run) -> None:
        """Enter the blocks of the prefix that are new, and make the run a candidate."""
        self._enter(run)
        (self._again if self.used_again(run) else self._once).evictable(run)

    def _enter(self, run: Run) -> None:
        new = list(takewhile(lambda name: name not in self._lists, self._names_up(run)))
        for name in new:
            self._lists.store(name)
        if new:
            self._lists.forget_ghosts()

    def _names_up(self, run: Run) -> Iterator[bytes]:
        """The blocks of the prefix that ends with a run, the deepest first: where one is entered, all before it are."""
        for above in self._group.path(run):
            for at in reversed(range(len(above.slots))):
                yield self._name(above, at)

    def held(self, level: int, slots: array[int]) -> None:
        """Blocks were found."""
        run = self._group.run_at(level, slots[0])
        self._enter(run)
        for at in range(len(slots)):
            self._lists.find(self._name(run, at))

    def gone(self, level: int, slots: array[int]) -> None:
        """What has not only moved to the other level becomes a ghost."""
        run = self._runs.get(self._group.levels[level].run_ids[slots[0]])
        if run is not None and run.level == level:
            last = len(run.slots) - 1
            for at in range(last, last - len(slots), -1):
                self._lists.evict(self._name(run, at))

    def cleared(self) -> None:
        """Forget all candidates."""
        self._lists.clear()
        self._once.cleared()
        self._again.cleared()

    # -- what goes next

    def _turn(self, run: Run) -> tuple[int, bool, int, int]:
        """Lower goes first, until a list gets longer or shorter."""
        return (run.priority, self.used_again(run) == (self._lists.excess > 0), run.released_at, -run.end)

    def next(self, level: int, spares: Collection[int] = ()) -> Run | None:
        """The run whose last block goes next."""
        found = (leaves.next(level, spares) for leaves in (self._once, self._again))
        return min((run for run in found if run is not None), default=None, key=self._turn)

    def lowest(self, level: int, count: int) -> list[tuple[Run, int]]:
        """The run that goes next: which one follows depends on what is left when it is gone."""
        run = self.next(level)
        return [] if run is None else [(run, self.alike(run, min(count, len(run.slots))))]

    def alike(self, run: Run, count: int, other: Run | None = None) -> int:
        """How many of the last blocks of the next run go before any other: those in its list, while that is so long."""
        last, again, excess = len(run.slots) - 1, self.used_again(run), self._lists.excess
        most = min(count, excess) if excess > 0 and not again else count
        tail = (self._name(run, at) for at in range(last, last - most, -1))
        return sum(1 for _ in takewhile(lambda name: self._lists.used_again(name) == again, tail))

    def precedes(self, run: Run, other: Run) -> bool:
        """Whether a run goes before the other, or neither before the other."""
        return self._turn(run) <= self._turn(other)

    def check(self) -> None:
        """Compare the next of each level with all runs, and the lists with what is cached."""
        runs = self._runs.values()
        self._lists.check({self._name(run, at) for run in runs for at in range(len(run.slots))})
        for level in range(len(self._group.levels)):
            leaves = [run for run in runs if run.level == level and run.is_leaf]
            heard = self._once.heard_of(level) | self._again.heard_of(level)
            invariant({run.id for run in leaves} == heard, "a block cannot be evicted: unheard of")
            invariant(
                self.next(level) is min(leaves, default=None, key=self._turn),
                "another block would be evicted than the lowest in order",
            )


class _Leaves(LeastRecentlyUsed):
    """Of the leaves those whose last block is in one of the lists."""

    def __init__(self, group: GroupState, order: AdaptiveReplacement, again: bool) -> None:
        self._order, self._used_again = order, again
        super().__init__(group)

    def _described(self, entry: tuple[object, int, int], level: int) -> Run | None:
        run = super()._described(entry, level)
        return run if run is not None and self._order.used_again(run) == self._used_again else None

    def heard_of(self, level: int) -> set[int]:
        """The ids of its runs."""
        found = (self._described(entry, level) for entry in self._heaps[level])
        return {run.id for run in found if run is not None}

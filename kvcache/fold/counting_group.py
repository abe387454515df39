"""The state of a window with full attention in which blocks that were used again are evicted later.

A block that is released gets a *credit*: by how many releases its turn is put off. It follows from the uses counted so
far and from how long blocks live just then, and stays until the block is held again. So the order among blocks changes
only when something happens to one of them, and all that it depends on is in the state.
"""

from __future__ import annotations

from array import array
from itertools import groupby

from events.packed import names_of_keys
from events.types import PRIMARY, SECONDARY, GroupCreated, RemoveReason
from kvcache.fold.group_state import GroupState
from kvcache.fold.prefix_tree import Node, Run
from kvcache.fold.use_counts import UseCounts


class CountingGroup(GroupState):
    """Counts uses."""

    __slots__ = ("_last", "uses")

    def __init__(
        self,
        index: int,
        created: GroupCreated,
        tokens_per_block: int,
        block_bytes: int,
        key_bytes: int,
        *,
        tokens_recorded: bool,
    ) -> None:
        super().__init__(
            index, created, tokens_per_block, block_bytes, key_bytes, tokens_recorded=tokens_recorded
        )
        self.uses = UseCounts(sum(level.size for level in self.levels))
        self._last = SECONDARY if self.levels[SECONDARY].size else PRIMARY
        """The level from which blocks are evicted for good."""

    def reference(self, run: Run) -> None:
        """One more sequence holds the run."""
        run.credit = 0
        super().reference(run)

    def releasing(self, above: Node | None, node: Node, stamp: int) -> None:
        """Count the uses of what nobody will hold any more."""
        life = self.uses.life(stamp)
        for run in list(self.path(node)):
            if run is above:
                break
            if run.refs == 1:
                self._credit(run, life)
        self.uses.forget()

    def _credit(self, run: Run, life: int) -> None:
        """Half a life for each use but the first; where that differs, the run is cut."""
        counts = self.uses.count(names_of_keys(bytes(run.keys), self.tree.key_bytes))
        left = len(counts)
        for uses, alike in groupby(counts):
            left -= sum(1 for _ in alike)
            above = self.split(run, left) if left else run
            run.credit = (uses - 1) * life // 2
            run = above

    def remove(self, level: int, slots: array[int], why: RemoveReason) -> None:
        """Forget cached blocks that no sequence holds, deepest first."""
        if level == self._last and why == RemoveReason.CAPACITY:
            self.uses.last_turn = self.run_at(level, slots[-1]).turn
        super().remove(level, slots, why)

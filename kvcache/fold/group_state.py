"""The state of one attention window: its prefix tree and its slots per level, and how events change them.

Only `kvcache.fold.state` calls the methods that change something, and only while it applies an event.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from events.ids import LevelIndex
from events.types import PRIMARY, SECONDARY, Namespace
from kvcache.errors import InvariantViolated, invariant
from kvcache.fold.prefix_tree import Node, PrefixTree, Root, Run
from kvcache.fold.slots import Level, last_reversed
from kvcache.fold.watcher import Watcher


class GroupState:
    """Blocks of one window: cached ones in the tree, the others blank or held by one sequence."""

    __slots__ = ("levels", "shared", "tokens_per_block", "tree", "watcher")

    def __init__(
        self, num_blocks: tuple[int, int], tokens_per_block: int, block_bytes: int, key_bytes: int
    ) -> None:
        self.tree = PrefixTree(block_bytes, key_bytes)
        self.levels = (Level(PRIMARY, num_blocks[0]), Level(SECONDARY, num_blocks[1]))
        self.tokens_per_block = tokens_per_block
        self.shared: dict[int, int] = {}
        """Primary slots without a name that several sequences hold (their blocks were cached once), and how many."""
        self.watcher = Watcher()

    def root(self, namespace: Namespace, key: bytes) -> Root:
        """The root of a namespace, made on first use."""
        root = self.tree.roots.get(namespace)
        if root is None:
            root = self.tree.roots[namespace] = Root(namespace, key)
        return root

    def run_at(self, level: int, slot: int) -> Run:
        """The run that holds a cached slot."""
        run = self.tree.runs.get(self.levels[level].run_ids[slot])
        if run is None or run.level != level:
            raise InvariantViolated("a slot that an event names is not cached")
        return run

    def is_cached(self, level: int, slot: int) -> bool:
        """Whether a run holds the slot."""
        run = self.tree.runs.get(self.levels[level].run_ids[slot])
        return run is not None and run.level == level and slot in run.slots

    def path(self, node: Node) -> Iterator[Run]:
        """The runs from a node up to its root."""
        while isinstance(node, Run):
            yield node
            node = node.parent

    def claim(self, node: Node, level: int, slots: array[int]) -> Run:
        """Take a reference on the blocks in `slots`, which continue `node`; returns the last run."""
        done = 0
        while done < len(slots):
            run = self.run_at(level, slots[done])
            invariant(run.parent is node, "reused blocks do not continue the sequence's prefix")
            take = min(len(run.slots), len(slots) - done)
            invariant(run.slots[:take] == slots[done : done + take], "reused blocks are not consecutive")
            if take < len(run.slots):
                # What lies behind is not claimed, so from here on its references differ.
                run = self.split(run, take)
            self.reference(run)
            done += take
            node = run
        assert isinstance(node, Run)
        return node

    def reference(self, run: Run) -> None:
        """One more sequence holds the run."""
        if run.refs == 0:
            self.levels[run.level].unreferenced -= len(run.slots)
            run.released_at = 0
            self.watcher.held(run.level, run.slots)
        run.refs += 1

    def release(self, node: Node, stamp: int) -> None:
        """One sequence fewer holds the path that ends at `node`."""
        for run in self.path(node):
            run.refs -= 1
            if run.refs == 0:
                run.released_at = stamp
                self.levels[run.level].unreferenced += len(run.slots)
        if isinstance(node, Run):
            # Only now: while the path was walked, its runs differed in what was released already.
            self._settle_around(node)
            self._offer(node)

    def _offer(self, run: Run) -> None:
        if run.is_leaf:
            self.watcher.evictable(run)

    def settle(self, run: Run) -> None:
        """Join whatever has become equal on the path that ends at `run`."""
        node: Node = run
        while isinstance(node, Run):
            while self.tree.may_join(node):
                gone = self.tree.join(node)
                self.levels[node.level].own(gone.slots, node.id)
            node = node.parent

    def split(self, run: Run, at: int) -> Run:
        """Cut a run in two; returns the upper part."""
        upper = self.tree.split(run, at)
        self.levels[run.level].own(upper.slots, upper.id)
        return upper

    def store(
        self, node: Node, symbols: bytes, slots: array[int], keys: bytes, priority: int, partial: int
    ) -> Run:
        """Cache a sequence's own blocks behind `node`, the end of the path that it holds."""
        # The usual case: one sequence stores on, and its run gets longer. Else a new run hangs behind what it holds.
        if isinstance(node, Run) and node.grows(priority):
            run = node
            run.symbols += symbols
            run.slots.extend(slots)
            run.keys += keys
            run.end += len(slots)
        else:
            run = self.tree.new_run(node, bytearray(symbols), slots, bytearray(keys))
            run.refs, run.priority = 1, priority
            self.tree.link(run)
        run.partial = partial
        self.levels[PRIMARY].own(slots, run.id)
        return run

    def update(self, level: int, slots: array[int], old_priority: int, priority: int) -> None:
        """Change the priority of consecutive cached blocks, shallowest first."""
        above: Run | None = None
        done = 0
        while done < len(slots):
            run = self._cut_to(level, slots, done, above)
            invariant(run.priority == old_priority, "an updated block had another priority")
            run.priority = priority
            done += len(run.slots)
            above = run
        if above is not None:
            self._settle_around(above)
            if above.id in self.tree.runs:
                self._offer(above)

    def _cut_to(self, level: int, slots: array[int], done: int, above: Run | None) -> Run:
        """Make the cached blocks from ``slots[done]`` on, as far as one run holds them, a run of their own."""
        run = self.run_at(level, slots[done])
        at = run.slots.index(slots[done])
        take = min(len(run.slots) - at, len(slots) - done)
        consecutive = above is None or (run.parent is above and not at)
        invariant(
            consecutive and run.slots[at : at + take] == slots[done : done + take],
            "updated blocks are not consecutive",
        )
        if at:
            self.split(run, at)
        return self.split(run, take) if take < len(run.slots) else run

    def remove(self, level: int, slots: array[int]) -> None:
        """Forget cached blocks that no sequence holds, deepest first."""
        done, count = 0, len(slots)
        if count and self._shorten(level, slots, count):
            return
        while done < count:
            run = self.run_at(level, slots[done])
            take = min(len(run.slots), count - done)
            gone = slots if take == count else slots[done : done + take]
            if run.refs or run.children:
                raise InvariantViolated("a block that is held or has cached descendants cannot be removed")
            if last_reversed(run.slots, take) != gone:
                raise InvariantViolated("removed blocks are not the end of a run")
            self._drop(run, take, gone)
            done += take

    def _shorten(self, level: int, slots: array[int], count: int) -> bool:
        """The usual case of `remove`, in one go: the end of one unreferenced leaf. False if it is not that."""
        at = self.levels[level]
        run = self.tree.runs.get(at.run_ids[slots[0]])
        if (
            run is None
            or run.level != level
            or run.refs
            or run.children
            or count >= len(run.slots)
            or last_reversed(run.slots, count) != slots
        ):
            return False
        self._drop(run, count, slots)
        return True

    def _drop(self, run: Run, take: int, gone: array[int]) -> None:
        """Make the last `take` blocks of an unreferenced leaf blank."""
        level = self.levels[run.level]
        level.unreferenced -= take
        level.blank += gone
        self.watcher.gone(run.level, gone)
        keep = len(run.slots) - take
        if not keep:
            self._cut_off(run)
            return
        tree = self.tree
        del run.symbols[keep * tree.block_bytes :]
        del run.slots[keep:]
        if tree.key_bytes:
            del run.keys[keep * tree.key_bytes :]
        run.end -= take
        run.partial = 0
        self._offer(run)

    def _cut_off(self, run: Run) -> None:
        parent = run.parent
        self.tree.unlink(run)
        if isinstance(parent, Run):
            self._offer(parent)
            self._settle_children(parent)

    def _share(self, holders: int, slots: array[int]) -> None:
        if holders > 1:
            for slot in slots:
                self.shared[slot] = holders

    def _settle_children(self, parent: Run) -> None:
        """A run that lost a child may have become equal to its only other one."""
        if len(parent.children) == 1:
            (child,) = parent.children.values()
            self.settle(child)

    def offload(self, slots: array[int], to_slots: array[int], transfer: int) -> None:
        """Move the ends of unreferenced primary leaves to secondary; of each the deepest block first."""
        done = 0
        while done < len(slots):
            run = self.run_at(PRIMARY, slots[done])
            take = min(len(run.slots), len(slots) - done)
            gone, to = slots[done : done + take], to_slots[done : done + take]
            invariant(last_reversed(run.slots, take) == gone, "offloaded blocks are not the end of a run")
            invariant(not run.refs and not run.same_level_children, "an offloaded block is in use")
            if take < len(run.slots):
                self.split(run, len(run.slots) - take)  # `run` is the lower part, the one that moves
            self.relocate(run, SECONDARY, last_reversed(to, take), transfer)
            self.levels[PRIMARY].return_slots(gone)
            self.watcher.gone(PRIMARY, gone)
            if isinstance(run.parent, Run) and run.parent.level == PRIMARY:
                self._offer(run.parent)
            self._offer(run)
            self._settle_children(run)
            done += take

    def relocate(self, run: Run, level: LevelIndex, slots: array[int], transfer: int) -> None:
        """Give a whole run a new place; its old slots belong to nobody until they are given back."""
        old = self.levels[run.level]
        if not run.refs:
            old.unreferenced -= len(run.slots)
            self.levels[level].unreferenced += len(run.slots)
        parent = run.parent
        if isinstance(parent, Run):
            # One more if it comes into the parent's level, one fewer if it leaves it.
            parent.same_level_children += (parent.level == level) - (parent.level == run.level)
        run.level, run.slots, run.transfer = level, slots, transfer
        run.same_level_children = sum(child.level == level for child in run.children.values())
        self.levels[level].own(slots, run.id)

    def onboard(self, slots: array[int], to_slots: array[int], transfer: int) -> None:
        """Move whole runs that a sequence holds to primary; shallowest block first."""
        done = 0
        while done < len(slots):
            run = self.run_at(SECONDARY, slots[done])
            size = len(run.slots)
            invariant(run.slots == slots[done : done + size], "onboarded blocks are not whole runs")
            parent = run.parent
            self.relocate(run, PRIMARY, to_slots[done : done + size], transfer)
            if isinstance(parent, Run) and parent.level == SECONDARY:
                self._offer(parent)
            done += size
        self.levels[SECONDARY].return_slots(slots)
        self.watcher.gone(SECONDARY, slots)

    def land(self, level: int, slots: array[int], transfer: int) -> None:
        """The copy of these blocks is complete, as far as they are still there."""
        # The slots may have other owners by now: a run counts only if it still waits for this very copy.
        owners = np.unique(self.levels[level].run_id_array[np.frombuffer(slots, np.int32)])
        for run_id in owners.tolist():
            run = self.tree.runs.get(run_id)
            if run is not None and run.transfer == transfer:
                run.transfer = 0
                self._settle_around(run)

    def _settle_around(self, run: Run) -> None:
        if len(run.children) == 1:
            (child,) = run.children.values()
            if self.tree.may_join(child):
                self.settle(child)
                return
        self.settle(run)

    def return_uncached(self, slots: array[int]) -> array[int]:
        """A sequence lets go of uncached slots; returns those that nobody else holds, which are blank now."""
        if self.shared:
            slots = array("i", [slot for slot in slots if not self._still_held(slot)])
        self.levels[PRIMARY].return_slots(slots)
        return slots

    def _still_held(self, slot: int) -> bool:
        holders = self.shared.get(slot, 1) - 1
        if holders > 1:
            self.shared[slot] = holders
        elif holders == 1:
            del self.shared[slot]
        return holders > 0

    def clear(self) -> tuple[tuple[int, int], int]:
        """Drop every cached block and name; returns (dropped per level, blocks that sequences keep)."""
        counts = (self.levels[PRIMARY].unreferenced, self.levels[SECONDARY].unreferenced)
        unnamed = 0
        for run in self.tree.runs.values():
            if run.refs:
                unnamed += len(run.slots)
                self._share(run.refs, run.slots)
            else:
                self.levels[run.level].return_slots(run.slots)
        for level in self.levels:
            # A fixed order: that of the runs differs between a live state and one that was exported.
            level.blank = array("i", sorted(level.blank, reverse=True))
            level.run_id_array.fill(-1)
            level.unreferenced = 0
        self.tree.runs.clear()
        for root in list(self.tree.roots.values()):
            root.children.clear()
            root.order.clear()
            self.tree.drop_unused(root)
        self.watcher.cleared()
        return counts, unnamed

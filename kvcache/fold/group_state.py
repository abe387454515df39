"""The state of a window with full attention: its prefix tree and its slots per level, and how events change them.

Only `kvcache.fold.state` calls the methods that change something, and only while it applies an event.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from events.ids import LevelIndex
from events.types import PRIMARY, SECONDARY, Namespace, RemoveReason
from kvcache.errors import InvariantViolated, invariant
from kvcache.fold.group import CachedPart, Group
from kvcache.fold.prefix_tree import Node, Run
from kvcache.fold.sequence import Sequence
from kvcache.fold.slots import last_reversed


class GroupState(Group):
    """A window in which a sequence holds all its blocks: the tree is closed under prefixes."""

    __slots__ = ()

    def start(self, namespace: Namespace, key: bytes) -> Node:
        """Where the path of a new sequence begins."""
        return self.tree.roots.get(namespace) or self.root(namespace, key)

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

    def begin(self, sequence: Sequence, reused: int) -> None:
        """An admitted sequence takes all that it reuses by events of its own."""

    def detach(
        self, sequences: list[Sequence], counts: array[int] | None, stamp: int
    ) -> tuple[array[int], array[int]]:
        """No sequence lets go of blocks that it still sees."""
        raise InvariantViolated("full attention leaves no block behind")

    def hold(self, sequence: Sequence, level: int, first: int, slots: array[int]) -> None:
        """A sequence takes a reference on cached blocks that continue its path."""
        tail = self.claim(sequence.path_ends[self.index], level, slots)
        invariant(first + len(slots) == tail.end, "reused blocks leave a hole in the table")
        sequence.path_ends[self.index] = tail
        self.learn_keys(sequence, tail, tail.end)
        self.settle(tail)

    def cached(self) -> Iterator[tuple[int, array[int], bool, bool]]:
        """Cached blocks in pieces: level, slots, whether sequences hold them, whether their copy has not landed."""
        for run in self.tree.runs.values():
            yield run.level, run.slots, run.refs > 0, run.transfer > 0

    def parts(self, run: Run) -> Iterator[CachedPart]:
        """What of a run is cached: all of it."""
        yield CachedPart(0, len(run.slots), run.level, run.priority)

    def resident_keys(self, level: int) -> Iterator[bytes]:
        """The keys of full blocks whose bytes are in this level."""
        for run in self.tree.runs.values():
            if run.level == level and not run.transfer:
                full = len(run.slots) - bool(run.partial)
                yield bytes(run.keys[: full * self.tree.key_bytes])

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

    def end(self, sequence: Sequence, stamp: int) -> array[int]:
        """A sequence lets go of everything; returns the slots that become blank, deepest first."""
        tail = sequence.path_ends[self.index]
        own = sequence.tables[self.index][tail.end :]
        own.reverse()
        freed = self.return_uncached(own)
        self.release(tail, stamp)
        return freed

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

    def settle(self, node: Node) -> None:
        """Join whatever has become equal on the path that ends at `node`."""
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
        self, sequence: Sequence, first: int, slots: array[int], priority: int, last_tokens: int
    ) -> None:
        """Cache a sequence's own blocks behind the path that it holds."""
        node, last, key_bytes = sequence.path_ends[self.index], first + len(slots), self.tree.key_bytes
        invariant(node.end == first, "stored blocks do not continue the sequence's cached prefix")
        symbols = self.content(sequence, first, last, last_tokens)
        keys = sequence.keys[first * key_bytes : last * key_bytes]
        # The usual case: one sequence stores on, and its run gets longer. Else a new run hangs behind what it holds.
        if isinstance(node, Run) and node.grows(priority):
            run = node
            run.symbols += symbols
            run.slots.extend(slots)
            run.keys += keys
            run.end += len(slots)
        else:
            run = self.tree.new_run(node, bytearray(symbols), slots, keys)
            run.refs, run.priority = 1, priority
            self.tree.link(run)
        run.partial = last_tokens % self.tokens_per_block
        self.levels[PRIMARY].own(slots, run.id)
        sequence.path_ends[self.index] = run

    def fill(
        self, sequence: Sequence, block: int, slot: int, symbols: bytes, key: bytes, priority: int
    ) -> None:
        """Cache the next block of a sequence, behind what it alone has cached."""
        run = sequence.path_ends[self.index]
        if not isinstance(run, Run) or run.end != block or not run.grows(priority):
            raise InvariantViolated("a filled block does not continue what its sequence alone has cached")
        run.symbols += symbols
        run.slots.append(slot)
        run.keys += key
        run.end = block + 1
        self.levels[PRIMARY].run_ids[slot] = run.id

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

    def remove(self, level: int, slots: array[int], why: RemoveReason) -> None:
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

    def onboard(self, sequence: Sequence, slots: array[int], to_slots: array[int], transfer: int) -> None:
        """Move whole runs that a sequence holds to primary; shallowest block first."""
        self._bring(slots, to_slots, transfer)
        self.settle(sequence.path_ends[self.index])

    def take_over(self, sequence: Sequence, first: int, slots: array[int], own: array[int]) -> None:
        """A sequence computed what lay in secondary: its own slots hold the blocks from now on."""
        tail = self.claim(sequence.path_ends[self.index], SECONDARY, slots)
        invariant(first + len(slots) == tail.end, "recomputed blocks leave a hole in the table")
        self._bring(slots, own, 0)
        sequence.path_ends[self.index] = tail
        self.learn_keys(sequence, tail, tail.end)
        self.settle(tail)

    def _bring(self, slots: array[int], to_slots: array[int], transfer: int) -> None:
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

    def _share(self, holders: int, slots: array[int]) -> None:
        if holders > 1:
            for slot in slots:
                self.shared[slot] = holders

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
            level.run_id_array.fill(-1)
        self.forget_all()
        return counts, unnamed

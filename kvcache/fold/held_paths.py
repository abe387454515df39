"""In a window with full attention: the paths of cached runs that sequences hold.

Only `kvcache.fold.state` calls the methods that change something, and only while it applies an event.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from events.types import Namespace
from kvcache.errors import InvariantViolated, invariant
from kvcache.fold.group import CachedPart, Group
from kvcache.fold.prefix_tree import Node, Run
from kvcache.fold.retention import Kept
from kvcache.fold.sequence import Sequence


class HeldPaths(Group):
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

    def kept_in(self, level: int, slot: int) -> Kept:
        """How a cached block is kept."""
        run = self.run_at(level, slot)
        return Kept(run.priority, run.duration)

    def path(self, node: Node) -> Iterator[Run]:
        """The runs from a node up to its root."""
        while isinstance(node, Run):
            yield node
            node = node.parent

    def begin(self, sequence: Sequence, reused: int) -> None:
        """An admitted sequence takes all that it reuses by events of its own."""

    def detach(
        self, sequences: list[Sequence], counts: array[int] | None, stamp: int, now: int
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
            run.released_at = run.expiry = 0
            self.watcher.held(run.level, run.slots)
        run.refs += 1

    def share(self, parent: Sequence, child: Sequence, blocks: int) -> None:
        """A branch of a sequence holds its first `blocks` blocks, too."""
        end = parent.path_ends[self.index]
        invariant(end.end <= blocks, "a cached block is not computed")
        for run in self.path(end):
            self.reference(run)
        self.share_uncached(child.tables[self.index][end.end :])

    def rewind(self, sequence: Sequence, blocks: int, needed: int, stamp: int, now: int) -> array[int]:
        """Let go of a sequence's cached blocks from `blocks` on, of its own from `needed` on; returns blank slots."""
        table, tail = sequence.tables[self.index], sequence.path_ends[self.index]
        first = self.first_to_leave(sequence, blocks, needed)
        own = table[max(first, tail.end) :]
        own.reverse()
        del table[first:]
        freed = self.return_uncached(own)
        if blocks < tail.end:
            self._let_go(sequence, tail, blocks, stamp, now)
        return freed

    def _let_go(self, sequence: Sequence, tail: Node, blocks: int, stamp: int, now: int) -> None:
        """Hold the path only up to its first `blocks` blocks."""
        node = tail
        while isinstance(node, Run) and node.start >= blocks:
            node = node.parent
        if isinstance(node, Run) and node.end > blocks:
            node = self.split(node, blocks - node.start)
        sequence.path_ends[self.index] = node
        self.release(tail, stamp, now, node)

    def pin(self, sequence: Sequence, slots: array[int]) -> Run | None:
        """One more reference on the first cached blocks of a sequence; returns the run with which they end."""
        if not slots:
            return None
        node = sequence.path_ends[self.index]
        invariant(node.end >= len(slots), "a pinned block is not cached")
        while isinstance(node, Run) and node.start >= len(slots):
            node = node.parent
        assert isinstance(node, Run)
        if len(slots) < node.end:
            node = self.split(node, len(slots) - node.start)
        path = list(self.path(node))
        held = array("i", [slot for run in reversed(path) for slot in run.slots])
        invariant(held == slots, "other blocks were pinned than the sequence has cached")
        for run in path:
            self.reference(run)
        return node

    def unpin(self, slots: array[int], end: Run | None, stamp: int, now: int) -> None:
        """A pin lets go of cached blocks."""
        if end is not None:
            self.release(end, stamp, now)

    def end(self, sequence: Sequence, stamp: int, now: int) -> array[int]:
        """A sequence lets go of everything; returns the slots that become blank, deepest first."""
        tail = sequence.path_ends[self.index]
        own = sequence.tables[self.index][tail.end :]
        own.reverse()
        freed = self.return_uncached(own)
        self.release(tail, stamp, now)
        return freed

    def release(self, node: Node, stamp: int, now: int, above: Node | None = None) -> None:
        """One sequence fewer holds the path that ends at `node`, but for `above` and what is before."""
        self.releasing(above, node, stamp)
        run = node
        while isinstance(run, Run) and run is not above:
            run.refs -= 1
            if run.refs == 0:
                run.released_at = stamp
                if run.duration:
                    run.expiry = now + run.duration
                    self.timed(run.expiry, run.id)
                self.levels[run.level].unreferenced += len(run.slots)
            run = run.parent
        if isinstance(node, Run):
            # Only now: while the path was walked, its runs differed in what was released already.
            self._settle_around(node)
            self._offer(node)

    def releasing(self, above: Node | None, node: Node, stamp: int) -> None:
        """One sequence fewer is about to hold this part of a path."""

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

    def _settle_around(self, run: Run) -> None:
        if len(run.children) == 1:
            (child,) = run.children.values()
            if self.tree.may_join(child):
                self.settle(child)
                return
        self.settle(run)

    def split(self, run: Run, at: int) -> Run:
        """Cut a run in two; returns the upper part."""
        upper = self.tree.split(run, at)
        self.levels[run.level].own(upper.slots, upper.id)
        if upper.expiry:
            self.timed(upper.expiry, upper.id)
        return upper

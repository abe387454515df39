"""The group of full attention: its prefix tree and its slots per level, and how events change them.

Only `kvcache.fold.state` calls the methods that change something, and only while it applies an event.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from events import types as ev
from events.ids import LevelIndex
from events.packed import names_of_keys
from events.types import PRIMARY, SECONDARY, Namespace, RemoveReason
from kvcache.errors import InvariantViolated, invariant
from kvcache.fold.group import Group, UseCounts, last_reversed
from kvcache.fold.prefix_tree import Node, PathMatch, Run, match
from kvcache.fold.sequence import BlockRetention, Pin, Sequence


class FullGroup(Group):
    """A group with full attention: a sequence holds all its blocks, so the tree is closed under prefixes.

    Where uses are counted, blocks that were used again are evicted later: a released block gets a *credit*, the number
    of releases by which its turn is deferred. It follows from the uses counted so far and from the current lifetime of
    blocks, and stays until the block is held again. So the order among blocks changes only when something happens to
    one of them, and all that it depends on is in the state.
    """

    def start(self, namespace: Namespace, key: bytes) -> Node:
        """Return the node at which the path of a sequence begins (`SequenceAdded`, `EncoderAdded`, `CacheCleared`)."""
        return self.tree.roots.get(namespace) or self.root(namespace, key)

    def run_at(self, level: int, slot: int) -> Run:
        """Return the run that holds a cached slot."""
        run = self.tree.runs.get(self.levels[level].run_ids[slot])
        if run is None or run.level != level:
            raise InvariantViolated("an event refers to a slot that is not cached")
        return run

    def is_cached(self, level: int, slot: int) -> bool:
        """True if a block is cached in the slot; for pins, updates and audits."""
        run = self.tree.runs.get(self.levels[level].run_ids[slot])
        return run is not None and run.level == level and slot in run.slots

    def retention_in(self, level: int, slot: int) -> BlockRetention:
        """Return the retention of a cached block; for copies and audits."""
        run = self.run_at(level, slot)
        return BlockRetention(run.priority, run.duration)

    def path(self, node: Node | None) -> Iterator[Run]:
        """Yield the runs from a node up to its root; None: there are none."""
        while isinstance(node, Run):
            yield node
            node = node.parent

    def slots_to(self, node: Node | None) -> array[int]:
        """Return the slots of the path that ends at a node."""
        return array("i", b"".join([run.slots for run in reversed(list(self.path(node)))]))

    def hold(self, sequence: Sequence, level: int, first: int, slots: array[int]) -> None:
        """`BlocksReused`: take a reference on cached blocks of a sequence's prompt, from its block `first` on."""
        tail = self.claim(sequence.path_ends[self.index], level, slots)
        if first + len(slots) != tail.end:
            raise InvariantViolated("reused blocks leave a gap in the block table")
        sequence.path_ends[self.index] = tail
        self.copy_keys(sequence, tail, tail.end)
        self.coalesce(tail)

    def cached(self) -> Iterator[tuple[int, array[int], bool, bool]]:
        """Yield cached blocks in pieces: level, slots, True if held by sequences, True if their copy has not landed."""
        for run in self.tree.runs.values():
            yield run.level, run.slots, run.refs > 0, run.transfer > 0

    def resident_keys(self, level: int) -> Iterator[bytes]:
        """Yield the keys of full blocks resident in a level; for routers."""
        for run in self.tree.runs.values():
            if run.level == level and not run.transfer:
                full = len(run.slots) - bool(run.partial)
                yield bytes(run.keys[: full * self.tree.key_bytes])

    def claim(self, node: Node, level: int, slots: array[int]) -> Run:
        """Take a reference on the blocks in `slots`, which continue `node`; returns the last run."""
        done = 0
        while done < len(slots):
            run = self.run_at(level, slots[done])
            take = min(len(run.slots), len(slots) - done)
            if run.parent is not node or run.slots[:take] != slots[done : done + take]:
                raise InvariantViolated("reused blocks do not continue the sequence's prefix")
            if take < len(run.slots):
                # The blocks after it are not claimed, so from here on its references differ.
                run = self.split(run, take)
            self.reference(run)
            done += take
            node = run
        assert isinstance(node, Run)
        return node

    def reference(self, run: Run) -> None:
        """Add one reference to the run."""
        if run.refs == 0:
            self.levels[run.level].unreferenced -= len(run.slots)
            run.released_at = run.expiry = run.credit = 0
            self.watcher.held(run.level, run.slots)
        run.refs += 1

    def share(self, parent: Sequence, child: Sequence, blocks: int) -> None:
        """`SequenceForked`: let a branch of a sequence also hold its first `blocks` blocks."""
        end = parent.path_ends[self.index]
        invariant(end.end <= blocks, "a cached block is not computed")
        for run in self.path(end):
            self.reference(run)
        self.share_uncached(child.tables[self.index][end.end :])

    def rewind(self, sequence: Sequence, blocks: int, needed: int, stamp: int, now: int) -> array[int]:
        """`SequenceRewound`: release a sequence's cached blocks from `blocks` on, and its own from `needed` on.

        Returns the slots that become blank.
        """
        table, tail = sequence.tables[self.index], sequence.path_ends[self.index]
        first = self.first_to_leave(sequence, blocks, needed)
        freed = self.return_uncached(self.own_slots(sequence, first))
        del table[first:]
        if blocks < tail.end:
            sequence.path_ends[self.index] = node = self._end_at(tail, blocks)
            self.release(tail, stamp, now, node)
        return freed

    def _end_at(self, node: Node, blocks: int) -> Node:
        """Return the node in which the first `blocks` blocks of a path end, after cutting a run there if necessary."""
        while isinstance(node, Run) and node.start >= blocks:
            node = node.parent
        return self.split(node, blocks - node.start) if isinstance(node, Run) and node.end > blocks else node

    def pin(self, sequence: Sequence, slots: array[int]) -> Run | None:
        """`BlocksPinned`: add a reference to cached blocks; with full attention returns the run at their end."""
        if not slots:
            return None
        tail = sequence.path_ends[self.index]
        invariant(tail.end >= len(slots), "a pinned block is not cached")
        node = self._end_at(tail, len(slots))
        assert isinstance(node, Run)
        invariant(
            self.slots_to(node) == slots,
            "the number of pinned blocks differs from those that the sequence has cached",
        )
        for run in self.path(node):
            self.reference(run)
        return node

    def unpin(self, slots: array[int], end: Run | None, stamp: int, now: int) -> None:
        """`BlocksUnpinned`: release the blocks that `pin` referenced, if still cached."""
        if end is not None:
            self.release(end, stamp, now)

    def end(self, sequence: Sequence, stamp: int, now: int) -> array[int]:
        """`SequenceRemoved`, `EncoderRemoved`: release everything; returns the slots that become blank."""
        freed = self.return_uncached(self.own_slots(sequence))
        self.release(sequence.path_ends[self.index], stamp, now)
        return freed

    def release(self, node: Node, stamp: int, now: int, above: Node | None = None) -> None:
        """Drop one reference to the path that ends at `node`, except `above` and the part before it.

        Two sequences share [a b], one of them continues with [c] and ends with stamp 9::

            [a b] refs 2    =>    [a b] refs 1
               |                     |
            [c]   refs 1          [c]   refs 0, released at 9: its last block may be evicted

        Invariant: references do not increase from a run to its children, so what becomes unreferenced is the lower end
        of the path. Runs get equal only in the order of the walk, so they are joined after it; all blocks released
        by one call have one stamp, and of these the deepest is evicted first. Complexity: O(runs of the path), plus the
        blocks of the runs that are joined.
        """
        if self.uses is not None:
            self._count_uses(self.uses, above, node, stamp)
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
            # Only now: during the walk the runs of the path differed in what was already released.
            self._settle_around(node)
            self._offer(node)

    def _count_uses(self, uses: UseCounts, above: Node | None, node: Node, stamp: int) -> None:
        """Count the uses of the blocks between `above` and `node` that become unreferenced when one sequence releases
        them.
        """
        life = uses.life(stamp)
        for run in list(self.path(node)):
            if run is above:
                break
            if run.refs == 1:
                counts = uses.count(names_of_keys(bytes(run.keys), self.tree.key_bytes))
                left = len(counts)
                # Half a lifetime for each use but the first; where that differs, the run is cut.
                lower = run
                for times, alike in groupby(counts):
                    left -= sum(1 for _ in alike)
                    upper = self.split(lower, left) if left else lower
                    lower.credit, lower = (times - 1) * life // 2, upper
        uses.forget()

    def _offer(self, run: Run) -> None:
        if run.is_leaf:
            self.watcher.evictable(run)

    def coalesce(self, node: Node) -> None:
        """Join runs that have become equal on the path that ends at `node`."""
        while isinstance(node, Run):
            while self.tree.may_join(node):
                gone = self.tree.join(node)
                self.levels[node.level].own(gone.slots, node.id)
            node = node.parent

    def _settle_around(self, run: Run) -> None:
        if len(run.children) == 1:
            (run,) = run.children.values()
        self.coalesce(run)

    def split(self, run: Run, at: int) -> Run:
        """Cut a run in two; returns the upper part."""
        upper = self.tree.split(run, at)
        self.levels[run.level].own(upper.slots, upper.id)
        if upper.expiry:
            self.timed(upper.expiry, upper.id)
        return upper

    def store(self, event: ev.BlocksStored, sequence: Sequence, slots: array[int]) -> None:
        """`BlocksStored`: cache a sequence's own blocks in these slots."""
        first, priority, duration = event.first_block, event.priority, event.duration
        node, last, key_bytes = sequence.path_ends[self.index], first + len(slots), self.tree.key_bytes
        invariant(node.end == first, "stored blocks do not continue the sequence's cached prefix")
        symbols = self.new_content(sequence, first, last, event.last_tokens)
        keys = sequence.keys[first * key_bytes : last * key_bytes]
        # The usual case: one sequence stores on, and its run gets longer. Otherwise a new run becomes a child of its
        # path.
        if isinstance(node, Run) and node.grows(priority, duration):
            run = node
            run.symbols += symbols
            run.slots.extend(slots)
            run.keys += keys
            run.end += len(slots)
        else:
            run = self.tree.new_run(node, symbols, slots, keys)
            run.refs, run.priority, run.duration = 1, priority, duration
            self.tree.link(run)
        run.partial = event.last_tokens % self.tokens_per_block
        self.levels[PRIMARY].own(slots, run.id)
        sequence.path_ends[self.index] = run

    def fill(
        self,
        event: ev.BlocksFilled,
        filling: list[Sequence],
        blocks: array[int],
        keys: list[bytes | bytearray],
    ) -> None:
        """`BlocksFilled`: cache the next block of each of these sequences, after its own cached path."""
        index, size, tree, recorded = self.index, self.tokens_per_block, self.tree, self.tokens_recorded
        block_bytes, owner = tree.block_bytes, self.levels[PRIMARY].run_ids
        slots, priority, duration = array("i", event.slots), event.priority, event.duration
        for sequence, block, slot, key in zip(filling, blocks, slots, keys, strict=True):
            # A path that ends after a block ends in a run: a root ends before the first block.
            run: Run = sequence.path_ends[index]  # type: ignore[assignment]
            if not block or run.end != block or sequence.tables[index][block] != slot:
                raise InvariantViolated("a filled block does not belong to the sequence")
            if not run.grows(priority, duration):
                raise InvariantViolated(
                    "a filled block does not follow blocks that only its sequence has cached"
                )
            run.keys += key
            symbols = sequence.packed(block * size, block * size + size) if recorded else key
            if len(symbols) != block_bytes:
                raise InvariantViolated("a filled block is not full")
            run.symbols += symbols
            run.slots.append(slot)
            run.end = block + 1
            owner[slot] = run.id

    def update(self, event: ev.BlocksUpdated, slots: array[int]) -> None:
        """`BlocksUpdated` (requested): change the retention of consecutive cached blocks, shallowest first."""
        above: Run | None = None
        done = 0
        while done < len(slots):
            run = self._cut_to(event.level, slots, done, above)
            invariant(run.priority == event.old_priority, "the old priority of an updated block is wrong")
            run.priority = event.priority
            if event.duration is not None:
                invariant(run.refs > 0, "a duration changes on a block that no sequence holds")
                run.duration = event.duration
            done += len(run.slots)
            above = run
        if above is not None:
            self._settle_around(above)
            if above.id in self.tree.runs:
                self._offer(above)

    def expire(self, event: ev.BlocksUpdated, slots: array[int], stamp: int) -> int:
        """`BlocksUpdated` (expired): reset blocks with an expired priority; returns the last stamp used.

        Blocks that continue each other get one stamp, so that no two leaves have the same.
        """
        done, runs = 0, list[Run]()
        while done < len(slots):
            run = self._cut_to(event.level, slots, done, None)
            timed = run.expiry > 0 and not run.refs and run.priority == event.old_priority
            invariant(timed, "a retention expires that the block does not have, or at another priority")
            stamp += not runs or run.parent is not runs[-1]
            run.priority, run.duration, run.expiry, run.released_at = event.priority, 0, 0, stamp
            done += len(run.slots)
            runs.append(run)
        for run in runs:
            if run.id in self.tree.runs:
                self._settle_around(run)
        for run in runs:
            if run.id in self.tree.runs:
                self._offer(run)
        return stamp

    def _cut_to(self, level: int, slots: array[int], done: int, above: Run | None) -> Run:
        """Cut the tree so that the cached blocks from ``slots[done]`` on that one run holds are a run of their own."""
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
        """`BlocksRemoved`: evict cached blocks that no sequence holds, deepest first."""
        done, count = 0, len(slots)
        if self.uses is not None and why == RemoveReason.CAPACITY:
            last = SECONDARY if self.levels[SECONDARY].size else PRIMARY
            if level == last:  # from which blocks are evicted for good
                self.uses.last_turn = self.run_at(level, slots[-1]).turn
        while done < count:
            run = self.run_at(level, slots[done])
            take = min(len(run.slots), count - done)
            gone = slots if take == count else slots[done : done + take]
            if run.refs or run.children:
                raise InvariantViolated("a block that is held or has cached descendants cannot be removed")
            if last_reversed(run.slots, take) != gone:
                raise InvariantViolated("removed blocks are not at the end of a run")
            self._drop(run, take, gone)
            done += take

    def _drop(self, run: Run, take: int, gone: array[int]) -> None:
        """Make the last `take` blocks of an unreferenced leaf blank."""
        level = self.levels[run.level]
        level.unreferenced -= take
        level.blank += gone
        self.watcher.gone(run.level, gone)
        if take == len(run.slots):
            self._cut_off(run)
            return
        self.tree.cut(run, take)
        self._offer(run)

    def _cut_off(self, run: Run) -> None:
        parent = run.parent
        self.tree.unlink(run)
        if isinstance(parent, Run):
            self._offer(parent)
            self._settle_children(parent)

    def invalidate(self, slots: array[int], sequences: Iterable[Sequence]) -> None:
        """Forget cached blocks of primary, deepest first; blocks held by some of `sequences` stay theirs."""
        ends: dict[int, list[Sequence]] = {}
        for sequence in sequences:
            end = sequence.path_ends[self.index]
            if isinstance(end, Run):
                ends.setdefault(end.id, []).append(sequence)
        done = 0
        while done < len(slots):
            run = self.run_at(PRIMARY, slots[done])
            most, take = min(len(run.slots), len(slots) - done), 0
            # A fork may have become one run when one branch was gone.
            while take < most and run.slots[-1 - take] == slots[done + take]:
                take += 1
            gone, done = slots[done : done + take], done + take
            invariant(take > 0 and not run.children, "invalidated blocks are not at the end of a path")
            invariant(len(ends.get(run.id, ())) == run.refs, "an invalidated block is pinned")
            if not run.refs:
                self._drop(run, take, gone)
                continue
            self._share(run.refs, gone)
            self.watcher.gone(PRIMARY, gone)
            if take < len(run.slots):
                self.tree.cut(run, take)
                continue
            parent = run.parent
            for sequence in ends.pop(run.id):
                sequence.path_ends[self.index] = parent
                if isinstance(parent, Run):
                    ends.setdefault(parent.id, []).append(sequence)
            self._cut_off(run)

    def _settle_children(self, parent: Run) -> None:
        """Join a run that lost a child with its only other child, if they have become equal."""
        if len(parent.children) == 1:
            (child,) = parent.children.values()
            self.coalesce(child)

    def offload(self, slots: array[int], to_slots: array[int], transfer: int) -> None:
        """`BlocksMoved` (offload): move ends of unreferenced leaves to secondary, the deepest block of each first."""
        done = 0
        while done < len(slots):
            run = self.run_at(PRIMARY, slots[done])
            take = min(len(run.slots), len(slots) - done)
            gone, to = slots[done : done + take], to_slots[done : done + take]
            invariant(last_reversed(run.slots, take) == gone, "offloaded blocks are not at the end of a run")
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
        """Move a whole run to new slots; its old slots have no owner until they are returned."""
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
        """`BlocksMoved` (onboard): move whole runs held by a sequence to primary, shallowest block first."""
        self._bring(slots, to_slots, transfer)
        self.coalesce(sequence.path_ends[self.index])

    def take_over(self, sequence: Sequence, first: int, slots: array[int], own: array[int]) -> None:
        """`BlocksMoved` (recomputed): replace secondary blocks by a sequence's own primary slots."""
        tail = self.claim(sequence.path_ends[self.index], SECONDARY, slots)
        invariant(first + len(slots) == tail.end, "recomputed blocks leave a gap in the block table")
        self._bring(slots, own, 0)
        sequence.path_ends[self.index] = tail
        self.copy_keys(sequence, tail, tail.end)
        self.coalesce(tail)

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
        """`TransferLanded`: complete the copy of those blocks that still wait for it."""
        # The slots may have other owners by now: a run counts only if it still waits for this very copy.
        owners = np.unique(self.levels[level].run_id_array[np.frombuffer(slots, np.int32)])
        for run_id in owners.tolist():
            run = self.tree.runs.get(run_id)
            if run is not None and run.transfer == transfer:
                run.transfer = 0
                self._settle_around(run)

    def _share(self, holders: int, slots: array[int]) -> None:
        if holders > 1:
            for slot in slots:
                self.shared[slot] = holders

    def clear(self) -> None:
        """`CacheCleared`: drop every cached block."""
        for run in self.tree.runs.values():
            if run.refs:
                self._share(run.refs, run.slots)
            else:
                self.levels[run.level].return_slots(run.slots)
        for level in self.levels:
            level.run_id_array.fill(-1)
        self.clear_cached()

    def match(self, namespace: Namespace, symbols: bytes, stop: int, *, partial: bool) -> PathMatch:
        """Match ``symbols[:stop]`` (bytes) for admissions and lookups; with `partial`, also part of the next block."""
        return match(self.tree, self.tree.roots.get(namespace), symbols, stop, partial=partial)

    def place(self, run: Run, numbers: Iterable[array[int]]) -> None:
        """`StateExported`: register a run that is already in the tree; `numbers` are those of its blocks, if any."""
        level = self.levels[run.level]
        level.own(run.slots, run.id)
        if not run.refs:
            level.unreferenced += len(run.slots)

    # -- invariants

    def check_run(self, run: Run) -> None:
        """`CacheState.check`: verify the state of a run against its neighbours'."""
        children, parent = run.children.values(), run.parent
        same_level = sum(child.level == run.level for child in children)
        invariant(run.same_level_children == same_level, "children are counted wrongly")
        invariant((run.refs == 0) or (run.turn == 0), "a held block has a release stamp")
        timed = run.expiry == 0 if run.refs or not run.duration else run.expiry > 0
        invariant(timed and run.duration >= 0, "a block expires although it is held, or retained for good")
        invariant(
            run.credit >= 0 and (not run.credit or self.uses is not None),
            "a run has a credit although credits are not counted",
        )
        if isinstance(parent, Run):
            invariant(parent.level <= run.level, "a primary block follows a secondary one")
            invariant(parent.refs >= run.refs, "a block is held but its parent is not")

    def check_references(self, sequences: Iterable[Sequence], pins: Iterable[Pin]) -> None:
        """`CacheState.check`: verify that references equal the holders, and that each holds the blocks of one path."""
        references: Counter[int] = Counter()
        for pin in pins:
            end = pin.ends[self.index]
            agree = self.slots_to(end) == pin.slots[self.index] or not pin.named
            invariant(agree, "a pin disagrees with the path that it holds")
            references.update(run.id for run in self.path(end))
        for sequence in sequences:
            table, tail = sequence.tables[self.index], sequence.path_ends[self.index]
            invariant(table[: tail.end] == self.slots_to(tail), "a block table and the cached path disagree")
            invariant(not sequence.detached[self.index], "full attention does not release blocks")
            path = list(self.path(tail))
            invariant(all(run.level == PRIMARY for run in path), "a sequence holds a secondary block")
            references.update(run.id for run in path)
        for run in self.tree.runs.values():
            invariant(
                run.refs == references[run.id], "reference counts differ from the sequences that hold a block"
            )

    def check_owners(self) -> None:
        """`CacheState.check`: verify that each run owns its slots."""
        for run in self.tree.runs.values():
            owner = self.levels[run.level].run_ids
            invariant(
                all(owner[slot] == run.id for slot in run.slots), "the owner of a slot is recorded wrongly"
            )

    def arriving(self) -> Iterator[tuple[int, int, Iterable[int]]]:
        """`CacheState.check`: yield the blocks in flight, each as copy, level and slots."""
        return ((run.transfer, run.level, run.slots) for run in self.tree.runs.values() if run.transfer)

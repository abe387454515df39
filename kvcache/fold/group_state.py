"""The state of a window with full attention: its prefix tree and its slots per level, and how events change them.

Only `kvcache.fold.state` calls the methods that change something, and only while it applies an event.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from events.ids import LevelIndex
from events.types import PRIMARY, SECONDARY, RemoveReason
from kvcache.errors import InvariantViolated, invariant
from kvcache.fold.held_paths import HeldPaths
from kvcache.fold.prefix_tree import Run
from kvcache.fold.sequence import Sequence
from kvcache.fold.slots import last_reversed


class GroupState(HeldPaths):
    """What is stored, moved, removed and kept otherwise."""

    __slots__ = ()

    def store(
        self,
        sequence: Sequence,
        first: int,
        slots: array[int],
        priority: int,
        duration: int,
        last_tokens: int,
    ) -> None:
        """Cache a sequence's own blocks behind the path that it holds."""
        node, last, key_bytes = sequence.path_ends[self.index], first + len(slots), self.tree.key_bytes
        invariant(node.end == first, "stored blocks do not continue the sequence's cached prefix")
        symbols = self.new_content(sequence, first, last, last_tokens)
        keys = sequence.keys[first * key_bytes : last * key_bytes]
        # The usual case: one sequence stores on, and its run gets longer. Else a new run hangs behind what it holds.
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
        run.partial = last_tokens % self.tokens_per_block
        self.levels[PRIMARY].own(slots, run.id)
        sequence.path_ends[self.index] = run

    def fill(
        self,
        filling: list[Sequence],
        blocks: array[int],
        slots: array[int],
        keys: list[bytes | bytearray],
        priority: int,
        duration: int,
    ) -> None:
        """Cache the next block of each of these sequences, behind what it alone has cached."""
        index, size, tree, recorded = self.index, self.tokens_per_block, self.tree, self.tokens_recorded
        block_bytes, owner = tree.block_bytes, self.levels[PRIMARY].run_ids
        for sequence, block, slot, key in zip(filling, blocks, slots, keys, strict=True):
            # What ends behind a block is a run: that of a root ends before the first one.
            run: Run = sequence.path_ends[index]  # type: ignore[assignment]
            if not block or run.end != block or sequence.tables[index][block] != slot:
                raise InvariantViolated("a filled block is not the sequence's")
            if run.refs != 1 or run.priority != priority or run.duration != duration:
                raise InvariantViolated("a filled block does not continue what its sequence alone has cached")
            if run.children or run.transfer or run.partial:
                raise InvariantViolated("a filled block does not continue what its sequence alone has cached")
            run.keys += key
            symbols = sequence.packed(block * size, block * size + size) if recorded else key
            if len(symbols) != block_bytes:
                raise InvariantViolated("a filled block is not full")
            run.symbols += symbols
            run.slots.append(slot)
            run.end = block + 1
            owner[slot] = run.id

    def update(
        self, level: int, slots: array[int], old_priority: int, priority: int, duration: int | None
    ) -> None:
        """Change how consecutive cached blocks are kept, shallowest first."""
        above: Run | None = None
        done = 0
        while done < len(slots):
            run = self._cut_to(level, slots, done, above)
            invariant(run.priority == old_priority, "an updated block had another priority")
            run.priority = priority
            if duration is not None:
                invariant(run.refs > 0, "a block is kept for another time that nobody holds")
                run.duration = duration
            done += len(run.slots)
            above = run
        if above is not None:
            self._settle_around(above)
            if above.id in self.tree.runs:
                self._offer(above)

    def expire(self, level: int, slots: array[int], old_priority: int, priority: int, stamp: int) -> int:
        """The time is over for which these blocks had a priority; returns the last stamp used.

        Blocks that continue each other get one stamp, so that no two leaves have the same.
        """
        done, runs = 0, list[Run]()
        while done < len(slots):
            run = self._cut_to(level, slots, done, None)
            timed = run.expiry > 0 and not run.refs and run.priority == old_priority
            invariant(timed, "the time of a block is over that had none, or has another priority")
            stamp += not runs or run.parent is not runs[-1]
            run.priority, run.duration, run.expiry, run.released_at = priority, 0, 0, stamp
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
        if take == len(run.slots):
            self._cut_off(run)
            return
        self._cut(run, take)
        self._offer(run)

    def _cut(self, run: Run, take: int) -> None:
        """Make a run shorter by its last `take` blocks."""
        tree, keep = self.tree, len(run.slots) - take
        del run.symbols[keep * tree.block_bytes :]
        del run.slots[keep:]
        if tree.key_bytes:
            del run.keys[keep * tree.key_bytes :]
        run.end -= take
        run.partial = 0

    def _cut_off(self, run: Run) -> None:
        parent = run.parent
        self.tree.unlink(run)
        if isinstance(parent, Run):
            self._offer(parent)
            self._settle_children(parent)

    def invalidate(self, slots: array[int], sequences: Iterable[Sequence]) -> None:
        """Forget cached blocks of primary, deepest first; what some of `sequences` hold stays theirs."""
        ends: dict[int, list[Sequence]] = {}
        for sequence in sequences:
            end = sequence.path_ends[self.index]
            if isinstance(end, Run):
                ends.setdefault(end.id, []).append(sequence)
        done = 0
        while done < len(slots):
            run = self.run_at(PRIMARY, slots[done])
            most, take = min(len(run.slots), len(slots) - done), 0
            # What was a branching has become one run, perhaps, when one branch was gone.
            while take < most and run.slots[-1 - take] == slots[done + take]:
                take += 1
            gone, done = slots[done : done + take], done + take
            invariant(take > 0 and not run.children, "invalidated blocks are not the end of a path")
            invariant(len(ends.get(run.id, ())) == run.refs, "an invalidated block is pinned")
            if not run.refs:
                self._drop(run, take, gone)
                continue
            self._share(run.refs, gone)
            self.watcher.gone(PRIMARY, gone)
            if take < len(run.slots):
                self._cut(run, take)
                continue
            parent = run.parent
            for sequence in ends.pop(run.id):
                sequence.path_ends[self.index] = parent
                if isinstance(parent, Run):
                    ends.setdefault(parent.id, []).append(sequence)
            self._cut_off(run)

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

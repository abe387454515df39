"""The state of a sliding window, which lets go of blocks one by one, and reuses them across holes.

Sequences hold what their window sees. So the blocks of one prefix differ in references, priority and release, and any
unreferenced one may be evicted: runs keep only contents and places (`kvcache.fold.sliding_tree`), all else is in
columns by place (`kvcache.fold.places`).

Only `kvcache.fold.state` calls the methods that change something, and only while it applies an event.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from events.types import PRIMARY, SECONDARY, Namespace, RemoveReason
from kvcache.errors import InvariantViolated, invariant
from kvcache.fold.group_state import GroupState
from kvcache.fold.places import DEPTH_BITS, FEW, HOLE, NOBODY, indexes
from kvcache.fold.prefix_tree import Node, PathEnd, Run
from kvcache.fold.sequence import DETACHED, Sequence
from kvcache.fold.sliding_tree import SlidingTree
from kvcache.fold.slots import DEFAULT_PRIORITY


class SlidingGroup(SlidingTree):
    """A window in which a sequence holds the blocks that its next token sees."""

    __slots__ = ()

    def start(self, namespace: Namespace, key: bytes) -> Node:
        """Where the path of a new sequence begins: only the count of its blocks is kept, not a place in the tree."""
        self.root(namespace, key)
        return PathEnd(0)

    def first_seen(self, num_tokens: int) -> int:
        """The first block that is needed to compute what follows so many tokens."""
        return max(0, num_tokens - self.window + 1) // self.tokens_per_block

    # -- sequences come, go on and go

    def begin(self, sequence: Sequence, reused: int) -> None:
        """An admitted sequence needs nothing of what its window has left behind, and has the rest of what it reuses."""
        full = reused // self.tokens_per_block
        first = min(self.first_seen(reused), full)
        sequence.tables[self.index].extend(array("i", [DETACHED]) * first)
        sequence.detached[self.index] = first
        sequence.path_ends[self.index].end = full

    def hold(self, sequence: Sequence, level: int, first: int, slots: array[int]) -> None:
        """A sequence takes a reference on cached blocks of its prompt."""
        run = self._hold(sequence, level, first, slots)
        self.learn_keys(sequence, run, first + len(slots))

    def _hold(self, sequence: Sequence, level: int, first: int, slots: array[int]) -> Run:
        places = self.places(level, slots)
        end, last = sequence.path_ends[self.index], first + len(slots)
        run = self._check_row(places, first)
        root: Node = run
        while isinstance(root, Run):
            root = root.parent
        invariant(root is self.tree.roots[sequence.namespace], "reused blocks are of another namespace")
        self._reference(places)
        end.end = max(end.end, last)
        return run

    def _check_row(self, places: array[int], first: int) -> Run:
        """The run of the last of these consecutive blocks."""
        done, above = 0, None
        while done < len(places):
            run, at = self.find(places[done])
            take = min(len(run.slots) - at, len(places) - done)
            row = run.slots[at : at + take] == places[done : done + take]
            follows = run.start + at == first + done and (above is None or (run.parent is above and not at))
            invariant(row and follows, "reused blocks do not continue each other")
            done, above = done + take, run
        assert above is not None
        return above

    def _reference(self, places: array[int]) -> None:
        if len(places) > FEW:
            at, counts = indexes(places), self.views["refs"]
            idle = at[counts[at] == 0]
            self.views["released_at"][idle] = 0
            if self.keeps_time:
                self.views["expiries"][idle] = 0
            primary, secondary = self.levels
            below = int(np.count_nonzero(idle >= primary.size)) if secondary.size else 0
            primary.unreferenced -= len(idle) - below
            secondary.unreferenced -= below
            counts[at] += 1
            return
        refs, released_at = self.refs, self.released_at
        for place in places:
            if not refs[place]:
                released_at[place] = self.expiries[place] = 0
                self.levels[self.slot_of(place)[0]].unreferenced -= 1
            refs[place] += 1

    def detach(
        self, sequences: list[Sequence], counts: array[int] | None, stamp: int, now: int
    ) -> tuple[array[int], array[int]]:
        """Sequences let go of blocks that the window has left behind: so many each, or one each.

        Each lets go at its own time, the first one after `stamp`. Returns the slots, and those that become blank.
        """
        if counts is None:
            return self._detach_one_each(sequences, stamp, now)
        index, slots, freed = self.index, array("i"), array("i")
        for sequence, count in zip(sequences, counts, strict=True):
            table, first = sequence.tables[index], sequence.detached[index]
            invariant(0 < count <= len(table) - first, "a sequence lets go of blocks that it has not got")
            own = table[first : first + count]
            end: PathEnd = sequence.path_ends[index]  # type: ignore[assignment]
            cached = min(max(end.end - first, 0), count)
            stamp += 1
            slots += own
            if cached and first + cached == end.end:
                end.left = end.end, own[cached - 1], stamp
            self._release(own[:cached], stamp, now)
            freed += self.return_uncached(own[cached:])
            table[first : first + count] = array("i", [DETACHED]) * count
            sequence.detached[index] = first + count
        return slots, freed

    def _detach_one_each(
        self, sequences: list[Sequence], stamp: int, now: int
    ) -> tuple[array[int], array[int]]:
        """The usual case, decoding."""
        index, refs, released_at = self.index, self.refs, self.released_at
        slots, freed, idle = array("i"), array("i"), array("i")
        for released, sequence in enumerate(sequences, stamp + 1):
            table, first = sequence.tables[index], sequence.detached[index]
            if first >= len(table):
                raise InvariantViolated("a sequence lets go of blocks that it has not got")
            slot = table[first]
            end: PathEnd = sequence.path_ends[index]  # type: ignore[assignment]
            slots.append(slot)
            table[first] = DETACHED
            sequence.detached[index] = first + 1
            if first + 1 == end.end:
                end.left = end.end, slot, released
            if first >= end.end:
                freed += self.return_uncached(array("i", (slot,)))
            elif refs[slot] > 1:
                refs[slot] -= 1
            else:
                refs[slot], released_at[slot] = 0, released
                idle.append(slot)
        if idle:
            self._free(idle, now)
        return slots, freed

    def end(self, sequence: Sequence, stamp: int, now: int) -> array[int]:
        """A sequence lets go of everything; returns the slots that become blank, deepest first."""
        table, first = sequence.tables[self.index], sequence.detached[self.index]
        cached = max(sequence.path_ends[self.index].end, first)
        own = table[cached:]
        own.reverse()
        freed = self.return_uncached(own)
        self._release(table[first:cached], stamp, now)
        return freed

    def share(self, parent: Sequence, child: Sequence, blocks: int) -> None:
        """A branch of a sequence holds its first `blocks` blocks, too, as far as the window has not left them."""
        end, first = parent.path_ends[self.index].end, parent.detached[self.index]
        invariant(end <= blocks, "a cached block is not computed")
        child.path_ends[self.index] = PathEnd(end)
        table = child.tables[self.index]
        self._reference(table[first:end])
        self.share_uncached(table[max(first, end) :])

    def rewind(self, sequence: Sequence, blocks: int, needed: int, stamp: int, now: int) -> array[int]:
        """Let go of a sequence's cached blocks from `blocks` on, of its own from `needed` on; returns blank slots."""
        table, end, first = (
            sequence.tables[self.index],
            sequence.path_ends[self.index],
            sequence.detached[self.index],
        )
        invariant(first <= blocks, "a window has left behind what a rewind needs")
        cached, leaves = end.end, self.first_to_leave(sequence, blocks, needed)
        own = table[max(leaves, cached) :]
        own.reverse()
        freed = self.return_uncached(own)
        if blocks < cached:
            self._release(table[blocks:cached], stamp, now)
            end.end = blocks
        del table[leaves:]
        return freed

    def pin(self, sequence: Sequence, slots: array[int]) -> None:
        """One more reference on cached blocks that a sequence holds."""
        own = set(sequence.tables[self.index][: sequence.path_ends[self.index].end])
        invariant(own.issuperset(slots), "a pinned block is not cached, or not the sequence's")
        self._reference(slots)

    def unpin(self, slots: array[int], end: Run | None, stamp: int, now: int) -> None:
        """A pin lets go of cached blocks."""
        self._release(slots, stamp, now)

    def _release(self, slots: array[int], stamp: int, now: int) -> None:
        """One sequence fewer holds these primary blocks, shallowest first."""
        if len(slots) <= FEW:
            refs, released_at, free = self.refs, self.released_at, array("i")
            for slot in slots:
                refs[slot] -= 1
                if not refs[slot]:
                    released_at[slot] = stamp
                    free.append(slot)
        else:
            at, counts, free = indexes(slots), self.views["refs"], slots
            left = counts[at] - 1
            counts[at] = left
            if np.count_nonzero(left):
                at = at[left == 0]
                free = array("i", at.astype(np.int32).tobytes())
            self.views["released_at"][at] = stamp
        if free:
            self._free(free, now)

    def _free(self, slots: array[int], now: int) -> None:
        """Nobody holds these cached primary blocks any more, shallowest first."""
        self.levels[PRIMARY].unreferenced += len(slots)
        if self.keeps_time:
            for slot in slots:
                if self.durations[slot]:
                    self.expiries[slot] = now + self.durations[slot]
                    self.timed(self.expiries[slot], slot)
        self.watcher.released(PRIMARY, slots)

    # -- storing

    def store(
        self,
        sequence: Sequence,
        first: int,
        slots: array[int],
        priority: int,
        duration: int,
        last_tokens: int,
    ) -> None:
        """Cache a sequence's own blocks: new ones, or such as are missing so far."""
        last, key_bytes = first + len(slots), self.tree.key_bytes
        node, at, depth = self.position(sequence, first)
        # What the window has left behind and nobody has cached since is noted as content only.
        places = array("i", [HOLE]) * (first - depth) + slots
        content = self.new_content(sequence, depth, last, last_tokens)
        keys = sequence.keys[depth * key_bytes : last * key_bytes]
        self.lay(node, at, content, places, keys, last_tokens % self.tokens_per_block)
        at_slots = indexes(slots)
        self.views["refs"][at_slots] = 1
        self.kept_alike = self.kept_alike and priority == DEFAULT_PRIORITY
        if not self.kept_alike:
            self.views["priorities"][at_slots] = priority
        if duration:
            self.keeps_time = True
            self.views["durations"][at_slots] = duration
        sequence.path_ends[self.index].end = last

    def fill(
        self,
        filling: list[Sequence],
        blocks: array[int],
        slots: array[int],
        keys: list[bytes | bytearray],
        priority: int,
        duration: int,
    ) -> None:
        """Cache the next block of each of these sequences, behind the last block of a leaf."""
        index, tree, size, recorded = self.index, self.tree, self.tokens_per_block, self.tokens_recorded
        positions, refs, priorities, runs = self.positions, self.refs, self.priorities, tree.runs
        block_bytes = tree.block_bytes
        alike = self.kept_alike = self.kept_alike and priority == DEFAULT_PRIORITY
        for sequence, block, slot, key in zip(filling, blocks, slots, keys, strict=True):
            end, table = sequence.path_ends[index], sequence.tables[index]
            if not block or end.end != block or table[block] != slot or table[block - 1] < 0:
                raise InvariantViolated("a filled block is not the sequence's")
            position = positions[table[block - 1]]
            run = runs.get(position >> DEPTH_BITS)
            if run is None or run.end != block or run.children or run.partial:
                raise InvariantViolated("a filled block does not continue what its sequence has cached")
            run.keys += key
            symbols = sequence.packed(block * size, block * size + size) if recorded else key
            if len(symbols) != block_bytes:
                raise InvariantViolated("a filled block is not full")
            run.symbols += symbols
            run.slots.append(slot)
            run.end = end.end = block + 1
            positions[slot] = position + 1
            refs[slot] = 1
            if not alike:
                priorities[slot] = priority
            if duration:
                self.keeps_time, self.durations[slot] = True, duration

    # -- moving and removing

    def update(
        self, level: int, slots: array[int], old_priority: int, priority: int, duration: int | None
    ) -> None:
        """Change how cached blocks are kept that sequences hold."""
        self.kept_alike = self.kept_alike and priority == DEFAULT_PRIORITY
        for place in self.places(level, slots):
            held = self.positions[place] != NOBODY and self.refs[place] > 0
            invariant(
                held and self.priorities[place] == old_priority, "an updated block had another priority"
            )
            self.priorities[place] = priority
            if duration is not None:
                self.durations[place] = duration
                self.keeps_time = self.keeps_time or duration > 0

    def expire(self, level: int, slots: array[int], old_priority: int, priority: int, stamp: int) -> int:
        """The time is over for which these blocks had a priority; returns the last stamp: each has its own."""
        self.kept_alike = self.kept_alike and priority == DEFAULT_PRIORITY
        places = self.places(level, slots)
        for released, place in enumerate(places, stamp + 1):
            timed = self.expiries[place] > 0 and not self.refs[place]
            invariant(
                timed and self.priorities[place] == old_priority,
                "the time of a block is over that had none, or has another priority",
            )
            self.priorities[place], self.released_at[place] = priority, released
            self.durations[place] = self.expiries[place] = 0
        self.watcher.released(level, places)
        return stamp + len(places)

    def remove(self, level: int, slots: array[int], why: RemoveReason) -> None:
        """Forget cached blocks that no sequence holds."""
        places = self.places(level, slots)
        self._check_unreferenced(places)
        self.take_out(places)
        self.levels[level].blank += slots
        self.levels[level].unreferenced -= len(slots)

    def invalidate(self, slots: array[int], sequences: Iterable[Sequence]) -> None:
        """Blocks of a sliding window are not invalidated."""
        raise InvariantViolated("blocks of a sliding window are invalidated")

    def _check_unreferenced(self, places: array[int]) -> None:
        released = self.released_at
        idle = (
            all(released[place] for place in places)
            if len(places) <= FEW
            else np.count_nonzero(self.views["released_at"][indexes(places)]) == len(places)
        )
        invariant(idle, "a block is held, or not cached")

    def offload(self, slots: array[int], to_slots: array[int], transfer: int) -> None:
        """Move unreferenced primary blocks to secondary."""
        self._check_unreferenced(self.places(PRIMARY, slots))
        to = self.places(SECONDARY, to_slots)
        self._relocate(slots, to, transfer)
        primary, secondary = self.levels
        primary.return_slots(slots)
        primary.unreferenced -= len(slots)
        secondary.unreferenced += len(slots)
        self.watcher.released(SECONDARY, to)

    def onboard(self, sequence: Sequence, slots: array[int], to_slots: array[int], transfer: int) -> None:
        """Move secondary blocks that a sequence holds to primary."""
        places = self.places(SECONDARY, slots)
        invariant(all(self.refs[place] for place in places), "an onboarded block is not held")
        self._relocate(places, to_slots, transfer)
        self.levels[SECONDARY].return_slots(slots)

    def take_over(self, sequence: Sequence, first: int, slots: array[int], own: array[int]) -> None:
        """A sequence computed what lay in secondary: its own slots hold the blocks from now on."""
        run = self._hold(sequence, SECONDARY, first, slots)
        # The event has the names of these blocks. If those of blocks before are missing, the next stored block has all.
        if len(sequence.keys) >= first * self.tree.key_bytes:
            self.learn_keys(sequence, run, first + len(slots))
        self._relocate(self.places(SECONDARY, slots), own, 0)
        self.levels[SECONDARY].return_slots(slots)

    def _relocate(self, places: array[int], to: array[int], transfer: int) -> None:
        """Give cached blocks new places; the old ones belong to nobody until they are given back."""
        self.replace(places, to)
        at, target = indexes(places), indexes(to)
        for view in self.views.values():
            view[target] = view[at]
        self.views["transfers"][target] = transfer
        self.views["refs"][at] = 0
        self.clear_places(places)
        if self.keeps_time:
            for place in to:
                if self.expiries[place]:
                    self.timed(self.expiries[place], place)

    def land(self, level: int, slots: array[int], transfer: int) -> None:
        """The copy of these blocks is complete, as far as they are still there."""
        for place in self.places(level, slots):
            if self.transfers[place] == transfer:
                self.transfers[place] = 0

    def clear(self) -> tuple[tuple[int, int], int]:
        """Drop every cached block and name; returns (dropped per level, blocks that sequences keep)."""
        counts = (self.levels[PRIMARY].unreferenced, self.levels[SECONDARY].unreferenced)
        unnamed = 0
        for place in np.flatnonzero(self.views["positions"] != NOBODY).tolist():
            refs, (level, slot) = self.refs[place], self.slot_of(place)
            if not refs:
                self.levels[level].blank.append(slot)
                continue
            unnamed += 1
            if refs > 1:
                self.shared[slot] = refs
        self.clear_columns()
        self.forget_all()
        return counts, unnamed


AnyGroup = GroupState | SlidingGroup

"""The group of a sliding window, which releases blocks one by one, and reuses them across holes.

Sequences hold the blocks inside their window. So the blocks of one prefix differ in references, priority and release,
and any unreferenced one may be evicted: runs keep only contents and places, all else is in columns by place. A *place*
is a primary slot or, beyond all of these, a secondary one. A block that is not cached while something after it is
leaves a `HOLE` in its run: its content identifies the blocks below.

Only `kvcache.fold.state` calls the methods that change something, and only while it applies an event.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.ids import LevelIndex
from events.packed import TOKEN_BYTES, names_of_keys
from events.types import PRIMARY, SECONDARY, Namespace, RemoveReason
from kvcache.errors import InvariantViolated, invariant
from kvcache.fold.full_group import FullGroup
from kvcache.fold.group import Group, common_slots, indexes
from kvcache.fold.prefix_tree import (
    Node,
    PartialMatch,
    PathEnd,
    PathMatch,
    Piece,
    Run,
    closest_child,
    common_bytes,
    common_prefix,
    delist_child,
    list_child,
    match,
    root_of,
)
from kvcache.fold.sequence import DEFAULT_PRIORITY, DETACHED, BlockRetention, Pin, Sequence

HOLE = -1
"""Marks a block of a run that is not cached."""
NO_RUN = -1
"""Entry of `positions` without a block."""
DEPTH_BITS = 28
"""Low bits of a position; the others are the run's id. No prompt has that many blocks."""
_DEPTH = (1 << DEPTH_BITS) - 1
FEW = 8
"""Up to this number of blocks a loop is faster than numpy: it looks at 8 in 0.5 µs, numpy in 2.4; at 24 in 5 µs and in
2.9."""
Segment = tuple[Run, int, int]
"""Consecutive blocks of a run: run, first block, end block."""
_COLUMNS = ("positions", "refs", "priorities", "durations", "expiries", "released_at", "transfers")
_EXPORTED = ("priorities", "durations", "expiries", "released_at", "refs", "transfers")
_TRACES = ("refs", "released_at", "transfers", "durations", "expiries")
"""Columns that are 0 where nothing is cached."""


class SlidingGroup(Group):
    """Group in which a sequence holds the blocks that its next token sees; a step touches few of many places."""

    def __init__(self, *created: Any, tokens_recorded: bool) -> None:
        super().__init__(*created, tokens_recorded=tokens_recorded)
        size = sum(level.size for level in self.levels)
        self.positions = array("q", [NO_RUN]) * size
        """Run of the block at each place, and its depth: the number of blocks before it in its prompt. Both are in one
        number, so that consecutive blocks of a run differ by 1. -1 where no block is cached; the other columns are then
        undefined."""
        self.refs = array("i", [0]) * size
        self.priorities = array("i", [DEFAULT_PRIORITY]) * size
        """Priority of the block at each place, as in a `Run`. Not written while `default_priorities_only`."""
        self.durations = array("q", [0]) * size
        self.expiries = array("q", [0]) * size
        """Expiry of the block at each place, as in a `Run`. Priority and expiry are 0 where no block is cached."""
        self.released_at = array("q", [0]) * size
        """Stamp of the release of the block at each place by its last sequence, a counter; 0 while held, or where
        nothing is cached."""
        self.transfers = array("q", [0]) * size
        """Id of the copy that brings the block to each place; 0 once it has landed."""
        self.keeps_time = False
        """True if any block has ever had a duration."""
        self.default_priorities_only = True
        """True while all blocks ever cached have had the default priority."""
        # The same memory, for many places at a time.
        self.views = {name: view_of(getattr(self, name)) for name in _COLUMNS}

    def places(self, level: int, slots: array[int]) -> array[int]:
        """Convert slots of a level to places. Raises `InvariantViolated` if the level has no such slots."""
        size = self.levels[level].size
        if len(slots) <= FEW:
            there = all(0 <= slot < size for slot in slots)
        else:
            # Negative ones are beyond all others.
            there = not np.count_nonzero(np.frombuffer(slots, np.uint32) >= size)
        invariant(there, "an event refers to a slot that is out of range")
        return array("i", [slot + self.levels[PRIMARY].size for slot in slots]) if level else slots

    def slot_of(self, place: int) -> tuple[int, int]:
        """Return the level and the slot of a place."""
        primary = self.levels[PRIMARY].size
        return (PRIMARY, place) if place < primary else (SECONDARY, place - primary)

    def is_cached(self, level: int, slot: int) -> bool:
        """True if a block is cached in the slot."""
        return self.positions[slot + level * self.levels[PRIMARY].size] != NO_RUN

    def retention_at(self, place: int) -> BlockRetention:
        """Return the retention of the block at a place."""
        return BlockRetention(self.priorities[place], self.durations[place])

    def retention_in(self, level: int, slot: int) -> BlockRetention:
        """Return the retention of a cached block."""
        return self.retention_at(slot + level * self.levels[PRIMARY].size)

    def find(self, place: int) -> tuple[Run, int]:
        """Return the run of a cached block, and its index in it."""
        position = self.positions[place]
        run = self.tree.runs.get(position >> DEPTH_BITS)
        if run is None:
            raise InvariantViolated("an event refers to a slot that is not cached")
        return run, (position & _DEPTH) - run.start

    def depth(self, place: int) -> int:
        """Number of blocks before a cached one in its prompt."""
        return self.positions[place] & _DEPTH

    def depths_at(self, at: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Vectorised `depth`."""
        depths: npt.NDArray[np.int64] = self.views["positions"][at] & _DEPTH
        return depths

    def segments(self, places: array[int]) -> list[Segment]:
        """Group cached blocks into segments of consecutive blocks of runs."""
        segments: list[Segment] = []
        done, runs, positions = 0, self.tree.runs, self.positions
        while done < len(places):
            # Inlined `find`, which takes twice as long.
            position = positions[places[done]]
            owner = runs.get(position >> DEPTH_BITS)
            if owner is None:
                raise InvariantViolated("an event refers to a slot that is not cached")
            slots = owner.slots
            begin = (position & _DEPTH) - owner.end + len(slots)
            # The next blocks of the run are compared, which is faster than looking up each block's position.
            end = begin + common_slots(slots, begin, places, done)
            segments.append((owner, begin, end))
            done += end - begin
        return segments

    def replace(self, places: array[int], to: array[int]) -> list[Segment]:
        """Move cached blocks to other places in their runs, or remove them; returns the segments."""
        segments, done = self.segments(places), 0
        for run, begin, end in segments:
            if end == begin + 1:  # mostly blocks that decoding leaves
                if run.slots[begin] != places[done]:
                    raise InvariantViolated("duplicate block in an event")
                run.slots[begin] = to[done]
                done += 1
                continue
            count = end - begin
            if run.slots[begin:end] != places[done : done + count]:
                raise InvariantViolated("duplicate block in an event")
            run.slots[begin:end] = to[done : done + count]
            done += count
        return segments

    def keys_of(self, places: array[int]) -> bytes:
        """Return the keys of cached blocks."""
        size = self.tree.key_bytes
        rows = self.segments(places) if size else ()
        return b"".join([run.keys[begin * size : end * size] for run, begin, end in rows])

    def names_of(self, places: array[int]) -> bytes:
        """Return the names of cached blocks."""
        keys = self.keys_of(places)
        return names_of_keys(keys, self.tree.key_bytes) if keys else b""

    def cached(self) -> Iterator[tuple[int, array[int], bool, bool]]:
        """Yield cached blocks in pieces: level, slots, True if held by sequences, True if their copy has not landed."""
        places = np.flatnonzero(self.views["positions"] != NO_RUN)
        held, in_flight = self.views["refs"][places] > 0, self.views["transfers"][places] > 0
        primary = self.levels[PRIMARY].size
        for kind in range(8):
            level, is_held, flies = kind & 1, bool(kind & 2), bool(kind & 4)
            chosen = ((places >= primary) == level) & (held == is_held) & (in_flight == flies)
            slots = places[chosen] - level * primary
            yield level, array("i", slots.astype(np.int32).tobytes()), is_held, flies

    def resident_keys(self, level: int) -> Iterator[bytes]:
        """Yield the keys of full blocks resident in this level."""
        size, key_bytes = self.levels[PRIMARY].size, self.tree.key_bytes
        for run in self.tree.runs.values():
            full = len(run.slots) - bool(run.partial)
            for index, place in enumerate(run.slots[:full]):
                if place != HOLE and (place >= size) == level and not self.transfers[place]:
                    yield bytes(run.keys[index * key_bytes : (index + 1) * key_bytes])

    def clear_places(self, places: array[int]) -> None:
        """Mark places as empty: only the columns that show it are written, the others are undefined then."""
        at = indexes(places)
        self.views["positions"][at], self.views["released_at"][at] = NO_RUN, 0
        if self.levels[SECONDARY].size:
            # Without offload nothing is ever in flight.
            self.views["transfers"][at] = 0
        if self.keeps_time:
            self.views["durations"][at], self.views["expiries"][at] = 0, 0

    def exported(self, places: array[int]) -> tuple[array[int], bytes]:
        """Export blocks: slots instead of places, and seven numbers per block: level, priority, duration, expiry,
        stamp, references, copy.
        """
        at = np.frombuffer(places, np.int32)
        primary = self.levels[PRIMARY].size
        slots = np.where(at >= primary, at - primary, at).astype(np.int32)
        rows = np.zeros((len(at), 7), np.int64)
        rows[:, 0] = at >= primary
        there = at != HOLE
        for column, name in enumerate(_EXPORTED, 1):
            rows[there, column] = self.views[name][at[there]]
        return array("i", slots.tobytes()), rows.tobytes()

    def place(self, run: Run, numbers: Iterable[array[int]]) -> None:
        """Register the blocks of a run from an exported state, as `exported` returns them."""
        for index, (level, *columns) in enumerate(numbers):
            if run.slots[index] == HOLE:
                continue
            invariant(level in (PRIMARY, SECONDARY), "unknown level")
            run.slots[index] += level * self.levels[PRIMARY].size
            place = run.slots[index]
            invariant(0 <= place < len(self.refs), "an exported block is in no slot")
            self.positions[place] = position_of(run) + run.start + index
            for name, number in zip(_EXPORTED, columns, strict=True):
                getattr(self, name)[place] = number
            self.keeps_time = self.keeps_time or self.durations[place] > 0
            self.default_priorities_only &= self.priorities[place] == DEFAULT_PRIORITY
            self.levels[level].unreferenced += not self.refs[place]

    def start(self, namespace: Namespace, key: bytes) -> Node:
        """Return the start of a new sequence's path: only its number of blocks is kept, not a place in the tree."""
        self.root(namespace, key)
        return PathEnd(0)

    def first_seen(self, num_tokens: int) -> int:
        """First block needed to compute what follows this number of tokens."""
        return max(0, num_tokens - self.window + 1) // self.tokens_per_block

    # -- life of a sequence

    def begin(self, sequence: Sequence, reused: int) -> None:
        """Begin an admitted sequence, which needs no blocks that its window has left, and holds the rest of its reused
        ones.
        """
        full = reused // self.tokens_per_block
        first = min(self.first_seen(reused), full)
        super().begin(sequence, reused)
        sequence.tables[self.index].extend(array("i", [DETACHED]) * first)
        sequence.detached[self.index] = first
        sequence.path_ends[self.index].end = full

    def hold(self, sequence: Sequence, level: int, first: int, slots: array[int]) -> None:
        """Take a reference on cached blocks of a sequence's prompt."""
        run = self._hold(sequence, level, first, slots)
        self.copy_keys(sequence, run, first + len(slots))

    def _hold(self, sequence: Sequence, level: int, first: int, slots: array[int]) -> Run:
        places = self.places(level, slots)
        end, last = sequence.path_ends[self.index], first + len(slots)
        run = self._check_row(places, first)
        here = root_of(run) is self.tree.roots[sequence.namespace]
        invariant(here, "reused blocks are of another namespace")
        self._reference(places)
        end.end = max(end.end, last)
        return run

    def _check_row(self, places: array[int], first: int) -> Run:
        """Return the run of the last of these consecutive blocks, after checking that they are consecutive."""
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
        """Release blocks that the windows of sequences have left: `counts` blocks of each, or one each.

        Each release has its own stamp, the first one after `stamp`. Returns the slots, and those that become blank.
        """
        if counts is None:
            return self._detach_one_each(sequences, stamp, now)
        index, slots, freed = self.index, array("i"), array("i")
        for sequence, count in zip(sequences, counts, strict=True):
            table, first = sequence.tables[index], sequence.detached[index]
            invariant(0 < count <= len(table) - first, "a sequence releases blocks that it does not have")
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
        """`detach` for decoding, the usual case."""
        index, refs, released_at = self.index, self.refs, self.released_at
        slots, freed, idle = array("i"), array("i"), array("i")
        for released, sequence in enumerate(sequences, stamp + 1):
            table, first = sequence.tables[index], sequence.detached[index]
            if first >= len(table):
                raise InvariantViolated("a sequence releases blocks that it does not have")
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
        """Release all blocks of a sequence; returns the slots that become blank, deepest first."""
        freed = self.return_uncached(self.own_slots(sequence))
        first, end = sequence.detached[self.index], sequence.path_ends[self.index].end
        self._release(sequence.tables[self.index][first:end], stamp, now)
        return freed

    def share(self, parent: Sequence, child: Sequence, blocks: int) -> None:
        """Let a branch of a sequence also hold those of its first `blocks` blocks that the window has not left."""
        end, first = parent.path_ends[self.index].end, parent.detached[self.index]
        invariant(end <= blocks, "a cached block is not computed")
        child.path_ends[self.index] = PathEnd(end)
        table = child.tables[self.index]
        self._reference(table[first:end])
        self.share_uncached(table[max(first, end) :])

    def rewind(self, sequence: Sequence, blocks: int, needed: int, stamp: int, now: int) -> array[int]:
        """Release a sequence's cached blocks from `blocks` on, and its own from `needed` on; returns blank slots."""
        table, end, first = (
            sequence.tables[self.index],
            sequence.path_ends[self.index],
            sequence.detached[self.index],
        )
        invariant(first <= blocks, "the window has released blocks that a rewind needs")
        cached, leaves = end.end, self.first_to_leave(sequence, blocks, needed)
        freed = self.return_uncached(self.own_slots(sequence, leaves))
        if blocks < cached:
            self._release(table[blocks:cached], stamp, now)
            end.end = blocks
        del table[leaves:]
        return freed

    def pin(self, sequence: Sequence, slots: array[int]) -> None:
        """Add a reference to cached blocks that a sequence holds."""
        own = set(sequence.tables[self.index][: sequence.path_ends[self.index].end])
        invariant(own.issuperset(slots), "a pinned block is not cached, or not the sequence's")
        self._reference(slots)

    def unpin(self, slots: array[int], end: Run | None, stamp: int, now: int) -> None:
        """Release the cached blocks of a pin."""
        self._release(slots, stamp, now)

    def _release(self, slots: array[int], stamp: int, now: int) -> None:
        """Drop one reference to these primary blocks, shallowest first."""
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
        """Make these cached primary blocks evictable, shallowest first: they have lost their last holder."""
        self.levels[PRIMARY].unreferenced += len(slots)
        if self.keeps_time:
            for slot in slots:
                if self.durations[slot]:
                    self.expiries[slot] = now + self.durations[slot]
                    self.timed(self.expiries[slot], slot)
        self.watcher.released(PRIMARY, slots)

    # -- storing

    def store(self, event: ev.BlocksStored, sequence: Sequence, slots: array[int]) -> None:
        """Cache a sequence's own blocks: new ones, or ones that were missing so far."""
        first, last_tokens, priority = event.first_block, event.last_tokens, event.priority
        last, key_bytes = first + len(slots), self.tree.key_bytes
        node, at, depth = self.position(sequence, first)
        # Blocks that the window has left and that are not cached since are noted as content only.
        places = array("i", [HOLE]) * (first - depth) + slots
        content = self.new_content(sequence, depth, last, last_tokens)
        keys = sequence.keys[depth * key_bytes : last * key_bytes]
        self.insert(node, at, content, places, keys, last_tokens % self.tokens_per_block)
        at_slots = indexes(slots)
        self.views["refs"][at_slots] = 1
        self.default_priorities_only &= priority == DEFAULT_PRIORITY
        if not self.default_priorities_only:
            self.views["priorities"][at_slots] = priority
        if event.duration:
            self.keeps_time = True
            self.views["durations"][at_slots] = event.duration
        sequence.path_ends[self.index].end = last

    def fill(
        self,
        event: ev.BlocksFilled,
        filling: list[Sequence],
        blocks: array[int],
        keys: list[bytes | bytearray],
    ) -> None:
        """Cache the next block of each of these sequences, after the last block of a leaf."""
        index, tree, size, recorded = self.index, self.tree, self.tokens_per_block, self.tokens_recorded
        positions, refs, priorities, runs = self.positions, self.refs, self.priorities, tree.runs
        block_bytes, slots = tree.block_bytes, array("i", event.slots)
        priority, duration = event.priority, event.duration
        self.default_priorities_only &= priority == DEFAULT_PRIORITY
        alike = self.default_priorities_only
        for sequence, block, slot, key in zip(filling, blocks, slots, keys, strict=True):
            end, table = sequence.path_ends[index], sequence.tables[index]
            if not block or end.end != block or table[block] != slot or table[block - 1] < 0:
                raise InvariantViolated("a filled block does not belong to the sequence")
            position = positions[table[block - 1]]
            run = runs.get(position >> DEPTH_BITS)
            if run is None or run.end != block or run.children or run.partial:
                raise InvariantViolated("a filled block does not follow cached blocks of its sequence")
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

    def update(self, event: ev.BlocksUpdated, slots: array[int]) -> None:
        """Change the retention of cached blocks that sequences hold."""
        self.default_priorities_only &= event.priority == DEFAULT_PRIORITY
        for place in self.places(event.level, slots):
            held = self.positions[place] != NO_RUN and self.refs[place] > 0
            agrees = held and self.priorities[place] == event.old_priority
            invariant(agrees, "the old priority of an updated block is wrong")
            self.priorities[place] = event.priority
            if event.duration is not None:
                self.durations[place] = event.duration
                self.keeps_time = self.keeps_time or event.duration > 0

    def expire(self, event: ev.BlocksUpdated, slots: array[int], stamp: int) -> int:
        """Reset blocks with an expired priority; returns the last stamp: each has its own."""
        self.default_priorities_only &= event.priority == DEFAULT_PRIORITY
        places = self.places(event.level, slots)
        for released, place in enumerate(places, stamp + 1):
            timed = self.expiries[place] > 0 and not self.refs[place]
            invariant(
                timed and self.priorities[place] == event.old_priority,
                "a retention expires that the block does not have, or at another priority",
            )
            self.priorities[place], self.released_at[place] = event.priority, released
            self.durations[place] = self.expiries[place] = 0
        self.watcher.released(event.level, places)
        return stamp + len(places)

    def remove(self, level: int, slots: array[int], why: RemoveReason) -> None:
        """Forget unreferenced cached blocks."""
        places = self.places(level, slots)
        self._check_unreferenced(places)
        self.take_out(places)
        self.levels[level].blank += slots
        self.levels[level].unreferenced -= len(slots)

    def _check_unreferenced(self, places: array[int]) -> None:
        idle = np.count_nonzero(self.views["released_at"][indexes(places)])
        invariant(idle == len(places), "a block is held, or not cached")

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
        """Move secondary blocks held by a sequence to primary."""
        places = self.places(SECONDARY, slots)
        invariant(all(self.refs[place] for place in places), "an onboarded block is not held")
        self._relocate(places, to_slots, transfer)
        self.levels[SECONDARY].return_slots(slots)

    def take_over(self, sequence: Sequence, first: int, slots: array[int], own: array[int]) -> None:
        """Replace secondary blocks that a sequence has recomputed by its own slots."""
        run = self._hold(sequence, SECONDARY, first, slots)
        # The event has the names of these blocks. If names of earlier blocks are missing, the next stored block has
        # all.
        if len(sequence.keys) >= first * self.tree.key_bytes:
            self.copy_keys(sequence, run, first + len(slots))
        self._relocate(self.places(SECONDARY, slots), own, 0)
        self.levels[SECONDARY].return_slots(slots)

    def _relocate(self, places: array[int], to: array[int], transfer: int) -> None:
        """Move cached blocks to new places; the old ones have no owner until they are returned."""
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
        """Complete the copy of those blocks that are still there."""
        for place in self.places(level, slots):
            if self.transfers[place] == transfer:
                self.transfers[place] = 0

    def clear(self) -> None:
        """Drop every cached block and name."""
        for place in np.flatnonzero(self.views["positions"] != NO_RUN).tolist():
            refs, (level, slot) = self.refs[place], self.slot_of(place)
            if not refs:
                self.levels[level].blank.append(slot)
            elif refs > 1:
                self.shared[slot] = refs
        for name, view in self.views.items():
            view.fill({"positions": NO_RUN, "priorities": DEFAULT_PRIORITY}.get(name, 0))
        self.clear_cached()

    # -- the tree: contents and places

    def position(self, sequence: Sequence, block: int) -> tuple[Node, int, int]:
        """Locate a block of a sequence: a node, the number of its blocks before it, and the depth there.

        The depth is less than `block` if the content before it is not all known.
        """
        end: PathEnd = sequence.path_ends[self.index]  # type: ignore[assignment]
        left, place, stamp = end.left
        if sequence.detached[self.index] < block <= end.end:
            place = sequence.tables[self.index][block - 1]
        elif left != block or self.released_at[place] != stamp:
            place = HOLE  # otherwise it is the last one that the window has left, and is still there
        if place != HOLE:
            run, at = self.find(place)
            return run, at + 1, block
        root: Node = self.tree.roots[sequence.namespace]
        if not block:
            return root, 0, 0
        return self.walk(root, self.content(sequence, 0, block, self.tokens_per_block))

    def walk(self, node: Node, content: bytes) -> tuple[Node, int, int]:
        """Follow the content of full blocks below a node to the end of what is known."""
        size, at, position = self.tree.block_bytes, 0, 0
        while position < len(content):
            child = node.children.get(content[position : position + size])
            if child is None:
                break
            node, at = child, common_bytes(child.symbols, content, position, len(content)) // size
            position += at * size
            if at < len(child.slots):
                break
        return node, at, position // size

    def insert(
        self, node: Node, at: int, content: bytearray, places: array[int], keys: bytearray, partial: int
    ) -> None:
        """Insert blocks at a position: into holes while their content is known, the rest as new ones.

        `.` is a hole; blocks b c x are laid from the first hole on, in places 4 5 6::

            [a b c d]                [a b c]   places 1 4 5      c was filled, then the contents differ
             1 . . 3        =>         |   \
                                     [d] 3  [x] 6

        The tree takes ownership of content, places and keys. Holes come first among the places. Invariant: each content
        is in the tree once, runs branch only where contents differ, and no run ends with a hole unless it has children.
        Complexity: O(blocks laid), plus one copy of each run that is split.
        """
        size, key_bytes, done = self.tree.block_bytes, self.tree.key_bytes, 0
        while done < len(places):
            if isinstance(node, Run) and at < len(node.slots):
                same = common_bytes(node.symbols, content, done * size, len(content), at * size) // size
                if not same:
                    upper = self.tree.split(node, at)
                    self._note(upper, 0, upper.slots)
                    node = upper
                else:
                    self._fill_holes(node, at, places[done : done + same])
                    at, done = at + same, done + same
                continue
            child = node.children.get(bytes(content[done * size : (done + 1) * size]))
            if child is None:
                if done:
                    content, places = content[done * size :], places[done:]
                    keys = keys[done * key_bytes :]
                self._append(node, content, places, keys, partial)
                return
            node, at = child, 0

    def _fill_holes(self, run: Run, at: int, places: array[int]) -> None:
        for index, place in enumerate(places, at):
            if place != HOLE:
                invariant(run.slots[index] == HOLE, "a stored block is already cached")
                run.slots[index] = place
                if not index:
                    list_child(run)
        if places:
            self._note(run, at, places)

    def _append(
        self, node: Node, content: bytearray, places: array[int], keys: bytearray, partial: int
    ) -> None:
        """Append blocks after a node's last one: extend a leaf, or link a new run below it."""
        if isinstance(node, Run) and not node.children and not node.partial:
            run, at = node, len(node.slots)
            run.symbols += content
            run.slots += places
            run.keys += keys
            run.end += len(places)
        else:
            run, at = self.tree.new_run(node, content, places, keys), 0
            self.tree.link(run)
        run.partial = partial
        self._note(run, at, places)

    def _note(self, run: Run, at: int, places: array[int]) -> None:
        """Note the positions of these blocks of a run from its block `at` on, which may be holes."""
        cached = indexes(places)
        first = position_of(run) + run.start + at
        positions = np.arange(first, first + len(cached))
        if cached.min() == HOLE:
            there = cached != HOLE
            cached, positions = cached[there], positions[there]
        self.views["positions"][cached] = positions

    def take_out(self, places: array[int]) -> None:
        """Remove these blocks from the tree, with all content that no cached block follows."""
        segments = self.replace(places, array("i", [HOLE]) * len(places))
        self.clear_places(places)
        for run, begin, _ in segments:
            if not begin:
                delist_child(run)
        # Content that no cached block follows is forgotten at once, so a run is cut off only where it lost its last.
        for run in [run for run, _, end in segments if end == len(run.slots)]:
            if not run.children and run.id in self.tree.runs:
                self._trim(run)

    def _trim(self, run: Run) -> None:
        """Forget the content of trailing blocks that no cached block follows."""
        node: Node = run
        while isinstance(node, Run) and not node.children:
            if node.slots[-1] != HOLE:
                return
            cached = np.flatnonzero(np.frombuffer(node.slots, np.int32) != HOLE)
            if len(cached):
                self.tree.cut(node, len(node.slots) - 1 - int(cached[-1]))
                return
            parent = node.parent
            self.tree.unlink(node)
            node = parent
        if isinstance(node, Run) and len(node.children) == 1:
            (child,) = node.children.values()
            self._note(child, 0, self.tree.join(child).slots)

    def match(self, namespace: Namespace, symbols: bytes, stop: int, *, partial: bool) -> SlidingMatch:
        """Match a prompt."""
        return SlidingMatch(self, namespace, symbols, stop, partial=partial)

    # -- invariants

    def check_run(self, run: Run) -> None:
        """Verify that a run and the columns agree about its blocks."""
        invariant(
            bool(run.children) or run.slots[-1] != HOLE, "content is kept although nothing after it is cached"
        )
        for depth, place in enumerate(run.slots, run.start):
            if place == HOLE:
                continue
            owned = self.positions[place] == position_of(run) + depth
            invariant(owned, "the owner of a slot is recorded wrongly")
            released = self.released_at[place] > 0
            invariant(released != (self.refs[place] > 0), "a block is held and released, or neither")
            expires = self.expiries[place] > 0
            timed = expires == (released and self.durations[place] > 0)
            alike = not self.default_priorities_only or self.priorities[place] == DEFAULT_PRIORITY
            invariant(alike, "a block's priority differs from the uniform one")
            invariant(timed, "a block expires although it is held, or retained for good")

    def check_references(self, sequences: Iterable[Sequence], pins: Iterable[Pin]) -> None:
        """Verify that references equal the holders, and that each holds blocks of its own content."""
        references = Counter(slot for pin in pins if pin.named for slot in pin.slots[self.index])
        for sequence in sequences:
            first, end = sequence.detached[self.index], sequence.path_ends[self.index].end
            table = sequence.tables[self.index]
            references.update(table[first:end])
            self._check_content(sequence, first, end)
        cached = np.flatnonzero(self.views["positions"] >= 0).tolist()
        invariant(references.keys() <= set(cached), "a sequence holds a block that is not cached")
        for place in cached:
            held = references[place] if place < self.levels[PRIMARY].size else 0
            invariant(
                self.refs[place] == held, "reference counts differ from the sequences that hold a block"
            )

    def check_owners(self) -> None:
        """Verify that each cached block is in one place of one run, and that no traces of others remain."""
        empty = self.views["positions"] < 0
        traces = [self.views[name][empty].any() for name in _TRACES]
        invariant(not any(traces), "an uncached block still has cache data")
        named = sum(place != HOLE for run in self.tree.runs.values() for place in run.slots)
        invariant(np.count_nonzero(~empty) == named, "a block is in two places or in none")

    def _check_content(self, sequence: Sequence, first: int, end: int) -> None:
        """Verify that the tree has the sequence's content up to the blocks that it holds, and these blocks after it."""
        nameless = not self.tokens_recorded and len(sequence.keys) < end * self.tree.key_bytes
        if first >= end or nameless:
            return
        found = match(
            self.tree,
            self.tree.roots[sequence.namespace],
            content := self.content(sequence, 0, end, self.tokens_per_block),
            len(content),
            partial=False,
        )
        row = [place for run, take in found.runs for place in run.slots[:take]]
        held = sequence.tables[self.index][first:end].tolist()
        invariant(row[first:end] == held, "a block table disagrees with the tree")

    def arriving(self) -> Iterator[tuple[int, int, Iterable[int]]]:
        """Yield the blocks in flight: copy, level and slots."""
        for place in np.flatnonzero(self.views["transfers"]).tolist():
            level, slot = self.slot_of(place)
            yield self.transfers[place], level, (slot,)


class SlidingMatch:
    """Known path of a prompt in a sliding window: contents, of which some blocks are not cached."""

    def __init__(
        self, group: SlidingGroup, namespace: Namespace, symbols: bytes, stop: int, *, partial: bool
    ) -> None:
        self._group = group
        self._root = group.tree.roots.get(namespace)
        self._symbols, self._stop, self._with_partial = symbols, stop, partial
        found = match(group.tree, self._root, symbols, stop, partial=False)
        self.runs = found.runs
        """(run, number of its blocks that match)."""
        # A window of one token sees no earlier tokens, so none of their content need be known.
        self.blocks = found.blocks if group.window > 1 else stop // group.tree.block_bytes
        """Full blocks of the path, or its limit."""
        self.partial: PartialMatch | None = None

    def servable(self, blocks: int) -> int:
        """Largest number of blocks, at most `blocks`, that can be reused: everything inside the window there is cached.

        `n` blocks can be reused if there is no hole from block f(n) up to block n, where f(n) = max(0, n * size -
        window + 1) // size is the first block that the token after them sees; and n = 0 always can. So the answer is
        the largest n whose last hole before n, h(n), lies before f(n). With 4 tokens per block, a window of 9 and a
        hole in block 2 (`.`)::

            block      0  1  .  3  4  5
            n       0  1  2  3  4  5  6
            f(n)    0  0  0  1  2  3  4
            h(n)   -1 -1 -1  2  2  2  2
            ok      y  y  y  n  n  y  y

        Six blocks can be reused, of which blocks 4 and 5 are held; with at most four, two. Mostly there is no hole in
        the last window, which one look at that row shows. Complexity: O(blocks), in numpy.
        """
        blocks = min(blocks, self.blocks)
        if self._group.window == 1 or HOLE not in self._row(
            self._group.first_seen(blocks * self._group.tokens_per_block), blocks
        ):
            return blocks
        cached = np.frombuffer(self._row(0, blocks), np.int32) != HOLE
        counts = np.arange(blocks + 1)
        # The last hole before each number of blocks.
        holes = np.concatenate([[-1], np.where(cached, -1, counts[:-1])])
        last_hole = np.maximum.accumulate(holes)
        size, window = self._group.tokens_per_block, self._group.window
        first_seen = np.maximum(counts * size - window + 1, 0) // size
        return int(np.flatnonzero(last_hole < np.maximum(first_seen, counts == 0))[-1])

    def _row(self, first: int, last: int) -> array[int]:
        """Return the places of the path's blocks from `first` up to `last`."""
        row = array("i")
        for run, _ in self.runs:
            if run.end > first and run.start < last:
                row += run.slots[max(first - run.start, 0) : last - run.start]
        return row

    def limited(self, blocks: int, tokens_per_block: int, key_bytes: int) -> SlidingMatch:
        """Restrict to the first `blocks` blocks, and the copyable part of the next one."""
        self.blocks = blocks
        self.partial = self._copyable(key_bytes) if self._with_partial else None
        return self

    def _copyable(self, key_bytes: int) -> PartialMatch | None:
        """Find the cached block after the path with the longest prefix in common with the rest of the prompt."""
        size = self._group.tree.block_bytes
        wanted = self._symbols[self.blocks * size : min((self.blocks + 1) * size, self._stop)]
        run, at, tokens = self._closest(wanted)
        if run is None or not tokens:
            return None
        keys = bytes(run.keys[at * key_bytes : (at + 1) * key_bytes])
        (piece,) = self._cut(run.start + at, run.slots[at : at + 1], keys)
        return PartialMatch(piece, tokens)

    def _closest(self, wanted: bytes) -> tuple[Run | None, int, int]:
        """Find the cached block after the path with the most leading tokens in common with `wanted`: its run, its index
        in that, and the number of tokens.
        """
        node: Node | None = self._root
        for run, take in self.runs:
            if run.start < self.blocks:
                node = run if run.start + take >= self.blocks or take == len(run.slots) else None
        if node is None or node.end < self.blocks:
            return None, 0, 0  # the content before a window of one token may be unknown
        if not isinstance(node, Run) or node.end == self.blocks:
            child, tokens = closest_child(node, wanted)
            return child, 0, tokens
        at, size = self.blocks - node.start, self._group.tree.block_bytes
        if node.slots[at] == HOLE:
            return None, 0, 0
        content = bytes(node.symbols[at * size : (at + 1) * size])
        return node, at, common_prefix(content, wanted) // TOKEN_BYTES

    def pieces(self, num_tokens: int, key_bytes: int) -> list[Piece]:
        """Return the blocks to hold in order to reuse this number of tokens: those inside the window there."""
        first = self._group.first_seen(num_tokens)
        keys = b"".join(
            bytes(run.keys[max(first - run.start, 0) * key_bytes : (self.blocks - run.start) * key_bytes])
            for run, _ in self.runs
            if run.end > first and run.start < self.blocks
        )
        return self._cut(first, self._row(first, self.blocks), keys)

    def _cut(self, first: int, row: array[int], keys: bytes) -> list[Piece]:
        """Cut consecutive cached blocks into pieces on one level that have all landed or not."""
        if not row:
            return []
        if not self._group.levels[SECONDARY].size:
            return [Piece(PRIMARY, first, row, keys)]
        places = indexes(row)
        primary, size = self._group.levels[PRIMARY].size, len(keys) // len(row)
        levels = places >= primary
        landed = self._group.views["transfers"][places] == 0
        changes = (levels[1:] != levels[:-1]) | (landed[1:] != landed[:-1])
        ends = [0, *(np.flatnonzero(changes) + 1).tolist(), len(row)]
        pieces = []
        for begin, end in pairwise(ends):
            level = LevelIndex(int(levels[begin]))
            slots = array("i", (places[begin:end] - level * primary).astype(np.int32).tobytes())
            own = keys[begin * size : end * size]
            pieces.append(Piece(level, first + begin, slots, own, bool(landed[begin])))
        return pieces


AnyGroup = FullGroup | SlidingGroup
"""State of a group of one kind or the other."""
AnyMatch = PathMatch | SlidingMatch
"""Match of a prompt in a group."""


def position_of(run: Run) -> int:
    """Position of a block of depth 0 in a run; add the depth of any other block."""
    return run.id << DEPTH_BITS


def view_of(column: array[Any]) -> npt.NDArray[Any]:
    """View a column as a numpy array."""
    kind = np.int64 if column.typecode == "q" else np.int32
    return np.frombuffer(column, kind) if len(column) else np.empty(0, kind)

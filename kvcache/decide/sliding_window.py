"""Decisions for a sliding window: matching across holes, filling, holding, release and eviction.

Any unreferenced block can be evicted alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Items
from itertools import groupby

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.ids import Handle, LevelIndex
from events.types import PRIMARY, SECONDARY, Event, RemoveReason
from kvcache.config import KVCacheConfig
from kvcache.decide.eviction_order import ReleaseOrder
from kvcache.decide.window_manager import Claims, Plan, RetentionRow, WindowManager
from kvcache.fold.group import indexes
from kvcache.fold.prefix_tree import Node, Piece, Run, common_bytes, covered, covered_child
from kvcache.fold.sequence import DETACHED, Sequence, packed_handles
from kvcache.fold.sliding_group import DEPTH_BITS, HOLE, AnyMatch, SlidingGroup
from kvcache.fold.state import CacheState
from kvcache.results import Replacement


class PlaceClaims(Claims):
    """Claims counted by block: requests of a batch may claim different parts of one prefix."""

    def __init__(self, group: SlidingGroup) -> None:
        super().__init__(group.levels[PRIMARY].available)
        self._group = group
        self._before: list[npt.NDArray[np.intp]] = []
        """Places that the first request claims."""
        self._is_claimed: npt.NDArray[np.bool_] | None = None
        """Claimed places, as a mask; a batch of one request, the usual one, needs none."""

    def add(self, found: AnyMatch, claimed: Items[Piece]) -> None:
        """Count the cached blocks of one more request."""
        if self._before and self._is_claimed is None:
            self._is_claimed = np.zeros(len(self._group.refs), np.bool_)
            self._is_claimed[np.concatenate(self._before)] = True
        for blocks in claimed:
            at = indexes(blocks.slots)
            if blocks.level == SECONDARY:
                at += self._group.levels[PRIMARY].size
            if self._is_claimed is None:
                self._before.append(at)
            else:
                at = at[~self._is_claimed[at]]
                self._is_claimed[at] = True
            if blocks.level == SECONDARY:
                self.needed += len(at)
            else:
                self.available -= len(at) - int(np.count_nonzero(self._group.views["refs"][at]))


class SlidingWindowManager(WindowManager):
    """Decisions for a window in which a sequence holds the blocks that its next token sees."""

    group: SlidingGroup
    order: ReleaseOrder

    def __init__(
        self, state: CacheState, group: SlidingGroup, emit: Callable[[Event], None], config: KVCacheConfig
    ) -> None:
        super().__init__(state, group, emit, config)
        self.order = group.watcher = ReleaseOrder(group)

    # -- queries

    def claims(self) -> Claims:
        """Empty claims of a batch."""
        return PlaceClaims(self.group)

    def with_names_before(self, sequence: Sequence, blocks: Piece) -> Piece:
        """Add names of the sequence's earlier blocks that no event has given to these blocks, which are to be held."""
        known = len(sequence.keys) // self.key_bytes if self.key_bytes else blocks.first
        if known >= blocks.first:
            return blocks
        run, _ = self.group.find(self.group.places(blocks.level, blocks.slots[:1])[0])
        return blocks._replace(keys=self.group.keys_between(run, known, blocks.first) + blocks.keys)

    def released_by(self, sequence: Sequence, first: int) -> int:
        """Cached blocks from the block `first` on that become available when the sequence releases them."""
        first, end = self.first_pinned(sequence, first), sequence.path_ends[self.index].end
        return sum(self.group.refs[slot] == 1 for slot in sequence.tables[self.index][first:end])

    def first_pinned(self, sequence: Sequence, first: int) -> int:
        """First block to pin so that those from `first` on can be found: the first that the window has not left."""
        return max(first, sequence.detached[self.index])

    # -- growth bounds

    def blocks_to_grow(self, sequence: Sequence, num_tokens: int, chunk: int | None = None) -> int:
        """Upper bound of blocks that a sequence needs, in addition to its own, to grow by this number of tokens, one by
        one.

        A prompt with slots for a part of its tokens gets the others in chunks of at most `chunk` tokens (None: at
        once).
        """
        length, left = len(sequence.tables[self.index]), sequence.detached[self.index]
        total = sequence.num_tokens + num_tokens
        cached = max(sequence.path_ends[self.index].end, left)
        last, refs, table = self.group.first_seen(total - 1), self.group.refs, sequence.tables[self.index]
        # Blocks that the window leaves meanwhile, and that do not come free.
        kept = sum(refs[slot] > 1 for slot in table[left : min(cached, last)])
        kept += sum(slot in self.group.shared for slot in table[cached:last])
        return self._blocks_to_come(sequence.num_tokens, sequence.computed, total, length, left, kept, chunk)

    def blocks_to_complete(self, plan: Plan, total: int) -> int:
        """Upper bound of blocks that a prompt needs from its admission on, until it has `total` tokens."""
        reused, own = plan.reused_tokens, plan.windows[self.index]
        full = (reused - plan.reused_partial) // self.tokens_per_block
        left, last = min(self.group.first_seen(reused), full), self.group.first_seen(total - 1)
        rows = [each.slots[: max(0, last - each.first)] for each in own.claimed if each.level == PRIMARY]
        kept = sum(self.group.refs[slot] > 0 for row in rows for slot in row)
        now, chunk = plan.request.num_tokens, plan.request.reserve_tokens
        return self._blocks_to_come(now, reused, total, full + own.new_blocks, left, kept, chunk)

    def _blocks_to_come(
        self, now: int, computed: int, total: int, length: int, left: int, kept: int, chunk: int | None
    ) -> int:
        """Upper bound of blocks that a sequence of `now` tokens takes, one after the other, until it has `total`.

        It has `length` blocks, of which the window has left the first `left`; `kept` others have another holder when
        the window leaves them. Where it has slots for a part of its prompt only, it gets the others for chunks of at
        most `chunk` tokens (None: all at once).
        """
        size, window = self.tokens_per_block, self.window
        # A new block is taken before the one that the window has left is released.
        most, stored = self.blocks_for(window) + 1, left
        if length * size < now:
            ahead = min(now - computed, now if chunk is None else chunk)
            # A chunk and what its first token sees begin and end inside of blocks.
            most = max(most, self.blocks_for(window + ahead - 2) + 1)
            # The last chunk, which need not be stored before the next token, begins here at the earliest.
            last = max(computed, (self.blocks_for(now) - 1) * size + 1 - ahead)
            stored = max(left, (last + 1 - window) // size)
        most = max(most, self.blocks_for(min(now + 1, total)) - stored)
        return max(0, min(self.blocks_for(total) - length, most + kept - (length - left)))

    # -- release

    def detach(self, sequences: Items[Sequence], ends: Items[int], time: int) -> None:
        """Release the blocks that the windows of these sequences have left, at a time.

        `ends` is the number of tokens up to the next one to be computed, for each sequence (`Sequence.num_next`).
        """
        index, size, window = self.index, self.tokens_per_block, self.window
        sliding_out, counts, slots = [], array("I"), array("i")
        uncached: list[array[int]] = []
        for sequence, num_next in zip(sequences, ends, strict=True):
            first = sequence.detached[index]
            # The next token to be computed sees the tokens of the window before it.
            last = (num_next - window) // size
            if last <= first:
                continue
            sliding_out.append(sequence)
            counts.append(last - first)
            table, end = sequence.tables[index], sequence.path_ends[index].end
            if last == first + 1:
                slots.append(table[first])
            else:
                slots += table[first:last]
            if end < last:
                uncached.append(table[max(end, first) : last])
        if sliding_out:
            self._emit(
                ev.BlocksDetached(
                    handles=packed_handles(sliding_out),
                    # None: one each, as decoding nearly always does.
                    counts=counts.tobytes() if len(slots) > len(sliding_out) else b"",
                    group=index,
                    slots=slots.tobytes(),
                    freed=self._unshared(uncached).tobytes() if uncached else b"",
                    clock=time,
                )
            )

    def _unshared(self, rows: list[array[int]]) -> array[int]:
        """Select the uncached slots that lose their last holder when sequences release them, one after the other."""
        holders, freed = self.group.shared.copy(), array("i")
        for row in rows:
            for slot in row:
                if holders.get(slot, 1) == 1:
                    freed.append(slot)
                else:
                    holders[slot] -= 1
        return freed

    # -- storing

    def _growing(self) -> Callable[[array[int], int], bool]:
        runs, positions = self.group.tree.runs, self.group.positions
        longer: set[int] = set()

        def grows(table: array[int], block: int) -> bool:
            """Return True if a block extends a leaf that no other sequence extends."""
            before = table[block - 1] if block else DETACHED
            run = runs.get(positions[before] >> DEPTH_BITS) if before >= 0 else None
            if run is None or run.end != block or run.children or run.partial or run.id in longer:
                return False
            longer.add(run.id)
            return True

        return grows

    def _store_path(
        self, sequence: Sequence, first: int, full: int, stop: int, replaced: list[Replacement]
    ) -> None:
        if first < full:
            self._store_full(sequence, first, full, replaced)
        if full * self.tokens_per_block < stop:
            self._store_partial(sequence, full, stop)

    def _store_full(self, sequence: Sequence, first: int, full: int, replaced: list[Replacement]) -> None:
        """Store full blocks; hold the existing one where an equal one is cached."""
        known, at, slot_of = self._known(sequence, first, full), first, self.group.slot_of
        while known and known[-1] == HOLE:
            known.pop()
        for level, part in groupby(known, lambda place: HOLE if place == HOLE else slot_of(place)[0]):
            places = array("i", part)
            if level == HOLE:
                self._store_new(sequence, at, (at + len(places)) * self.tokens_per_block)
            else:
                slots = array("i", [slot_of(place)[1] for place in places])
                blocks = Piece(LevelIndex(level), at, slots, self.group.keys_of(places))
                self._take_stored(sequence, blocks, replaced)
            at += len(places)
        if at < full:
            self._store_new(sequence, at, full * self.tokens_per_block)

    def _known(self, sequence: Sequence, first: int, full: int) -> array[int]:
        """Return the places of the sequence's blocks from `first` on, while their content is known.

        Removes shorter blocks that these supersede.
        """
        size, block_bytes = self.tokens_per_block, self.group.tree.block_bytes
        node, at, depth = self.group.position(sequence, first)
        known, useless = array("i"), array("i")
        if depth < first:
            return known  # the content before it is unknown
        if not (isinstance(node, Run) and at < len(node.slots)):
            if not node.children:
                return known  # nothing follows, as after most prompts
            if self.group.content(sequence, first, first + 1, size) not in node.children:
                full = first + 1  # a prompt that begins otherwise, and is too long to be copied for nothing
        content = self.group.content(sequence, first, full, size)
        while len(known) < full - first:
            done = len(known) * block_bytes
            length = len(node.slots) if isinstance(node, Run) else 0
            if at == length:
                useless.extend(self._covered_by(node, at, content[done : done + block_bytes]))
                child = node.children.get(content[done : done + block_bytes])
                if child is None:
                    break
                node, at = child, 0
            assert isinstance(node, Run)
            same = common_bytes(node.symbols, content, done, len(content), at * block_bytes) // block_bytes
            known += node.slots[at : at + same]
            at += same
            if at < len(node.slots) and len(known) < full - first:
                useless.extend(self._covered_by(node, at, content[len(known) * block_bytes :][:block_bytes]))
                break
        self._supersede(useless, sequence.handle)
        return known

    def _store_partial(self, sequence: Sequence, full: int, stop: int) -> None:
        """Store the block after the full ones, unless a cached one that begins with its tokens serves as well."""
        if max(sequence.path_ends[self.index].end, sequence.detached[self.index]) != full:
            return
        head = sequence.packed(full * self.tokens_per_block, stop)
        node, at, depth = self.group.position(sequence, full)
        if depth == full:
            if self._begins(node, at, head):
                return
            self._supersede(self._covered_by(node, at, head), sequence.handle)
        self._store_new(sequence, full, stop)

    def _begins(self, node: Node, at: int, head: bytes) -> bool:
        """True if a cached block at this position begins with these tokens."""
        if not (isinstance(node, Run) and at < len(node.slots)):
            return covered(node, head)
        begin = at * self.group.tree.block_bytes
        return node.slots[at] != HOLE and node.symbols[begin : begin + len(head)] == head

    def _covered_by(self, node: Node, at: int, head: bytes) -> array[int]:
        """Return the place of the shorter block at this position that a block with this content supersedes."""
        if not (isinstance(node, Run) and at < len(node.slots)):
            shorter = covered_child(node, head)
            return array("i") if shorter is None else shorter.slots[:]
        if not node.partial or at < len(node.slots) - 1:
            return array("i")
        content = node.symbols[at * self.group.tree.block_bytes :]
        return node.slots[at:] if len(content) < len(head) and head.startswith(content) else array("i")

    def _supersede(self, places: array[int], handle: Handle | None) -> None:
        """Drop shorter blocks, on whatever level, that a stored one supersedes."""
        for level in (PRIMARY, SECONDARY) if places else ():
            part = array("i", [place for place in places if self.group.slot_of(place)[0] == level])
            if part:
                self.remove(part, RemoveReason.SUPERSEDED, handle)

    # -- retention

    def _held_rows(self, sequence: Sequence, first: int, last: int, *, alone: bool) -> Iterator[RetentionRow]:
        """Yield the blocks that the sequence holds inside its window, each with its own retention."""
        begin, end = self.first_pinned(sequence, first), min(last, sequence.path_ends[self.index].end)
        held = sequence.tables[self.index][begin:end]
        if alone:
            held = array("i", [slot for slot in held if self.group.refs[slot] == 1])
        for old, alike in groupby(held, self.group.retention_at):
            slots = array("i", alike)
            yield RetentionRow(PRIMARY, old, slots, self.group.names_of(slots))

    # -- eviction

    def free_up(self, needed: int, handle: Handle | None, spares: Collection[int] = ()) -> None:
        """Evict until `needed` primary slots are blank; the secondary slots in `spares` keep their blocks."""
        short = needed - len(self.primary.blank)
        if short <= 0:
            return
        victims, priorities = self.order.lowest(PRIMARY, short), self.group.priorities
        kept = len(victims)
        if self._offloads:
            lowest = self._offload_min_priority
            kept = next((n for n, place in enumerate(victims) if priorities[place] >= lowest), kept)
        if kept:
            self.remove(victims[:kept], RemoveReason.CAPACITY, handle)
        if kept < len(victims):
            spared = self.group.places(SECONDARY, array("i", spares)) if spares else ()
            self._offload_or_drop(victims[kept:], handle, spared)

    def _offload_or_drop(self, victims: array[int], handle: Handle | None, spares: Collection[int]) -> None:
        """Move blocks to secondary while it has free slots or something lower in the same order; drop the others."""
        secondary, order = self.group.levels[SECONDARY], self.order
        while victims:
            room = len(secondary.blank)
            if not room:
                going = order.lowest(SECONDARY, len(victims), victims[0], spares)
                room = len(going)
                if going:
                    self.remove(going, RemoveReason.CAPACITY, handle)
            if room:
                going = victims[:room]
                self.events.offload(going, self.group.names_of(going), secondary.peek(len(going)), handle)
            else:
                lower = order.next(SECONDARY, spares)
                higher = (
                    n
                    for n, place in enumerate(victims)
                    if lower is not None and not order.precedes(place, lower)
                )
                room = next(higher, len(victims))
                self.remove(victims[:room], RemoveReason.CAPACITY, handle)
            victims = victims[room:]

    def remove(self, places: array[int], why: RemoveReason, handle: Handle | None) -> None:
        """Drop blocks of one level."""
        level = self.group.slot_of(places[0])[0]
        begin = self.primary.size if level else 0
        slots = array("i", [place - begin for place in places]) if begin else places
        self.events.remove(level, slots, self.group.names_of(places), why, handle)

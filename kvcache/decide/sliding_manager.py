"""Decisions for a sliding window: what to match across holes, fill, hold and let go of."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items

from events import types as ev
from events.ids import LevelIndex
from events.types import PRIMARY, Namespace
from kvcache.decide.claims import BlockNames, Claims, SlidingClaims
from kvcache.decide.decoding import packed_handles
from kvcache.decide.eviction_order import EvictionOrder
from kvcache.decide.sliding_eviction import SlidingEvictor
from kvcache.decide.window_manager import WindowBlockManager
from kvcache.fold.matching import covered, covered_child
from kvcache.fold.places import DEPTH_BITS, HOLE
from kvcache.fold.prefix_tree import Node, Run, common_bytes
from kvcache.fold.sequence import DETACHED, Sequence
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.sliding_matching import SlidingMatch
from kvcache.results import Replacement


class SlidingWindowManager(WindowBlockManager):
    """Decides for the blocks of one sliding window."""

    def _follow(self, offload_min_priority: int, order: type[EvictionOrder]) -> None:
        group = self._state.groups[self.index]
        assert isinstance(group, SlidingGroup)
        self.sliding = group
        """The state decided about."""
        self.sliding_evictor = SlidingEvictor(self._state, group, self._emit, offload_min_priority)
        self.order = self.sliding_order = self.sliding_evictor.order
        self.free_up = self.sliding_evictor.free_up

    # -- reading and admission

    def match(self, namespace: Namespace, symbols: bytes, stop: int) -> SlidingMatch:
        """The known prefix of ``symbols[:stop]`` (bytes), of which the window may have parts only."""
        stop = stop if self._reuse else 0
        return SlidingMatch(self.sliding, namespace, symbols, stop, partial=self._partial_reuse)

    def claims(self) -> Claims:
        """Of a batch of which nothing is counted yet."""
        return SlidingClaims(self.sliding)

    def _names_before(self, sequence: Sequence, blocks: BlockNames) -> bytes:
        known = len(sequence.keys) // self.key_bytes if self.key_bytes else blocks.first
        if known >= blocks.first:
            return b""
        run, _ = self.sliding.find(self.sliding.places(blocks.level, blocks.slots[:1])[0])
        return self._names(self.sliding.keys_between(run, known, blocks.first))

    def blocks_to_grow(self, sequence: Sequence, num_tokens: int, chunk: int | None = None) -> int:
        """Blocks that a sequence needs at most, beside those that it has, to grow by so many tokens, one by one."""
        length, left = len(sequence.tables[self.index]), sequence.detached[self.index]
        kept, now = self._kept_by_others(sequence, num_tokens), sequence.num_tokens
        return self.blocks_to_come(now, sequence.computed, now + num_tokens, length, left, kept, chunk)

    def blocks_to_come(
        self, now: int, computed: int, total: int, length: int, left: int, kept: int, chunk: int | None
    ) -> int:
        """Blocks that a sequence of `now` tokens takes at most, one after the other, until it has `total`.

        It has `length` blocks, of which the window has left the first `left`; `kept` others stay with somebody else
        when the window leaves them. Where it has slots for a part of its prompt only, it gets the others for chunks of
        at most `chunk` tokens (None: all at once).
        """
        size, window = self.tokens_per_block, self.window
        # A new block is taken before that is released which the window has left.
        most, stored = self.blocks_for(window) + 1, left
        if length * size < now:
            ahead = min(now - computed, now if chunk is None else chunk)
            # A chunk and what its first token sees begin and end inside of blocks.
            most = max(most, self.blocks_for(window + ahead - 2) + 1)
            # The last chunk, which need not be stored before the next token comes, begins here at the earliest.
            last = max(computed, (self.blocks_for(now) - 1) * size + 1 - ahead)
            stored = max(left, (last + 1 - window) // size)
        most = max(most, self.blocks_for(min(now + 1, total)) - stored)
        return max(0, min(self.blocks_for(total) - length, most + kept - (length - left)))

    def _kept_by_others(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that its window leaves behind while a sequence grows by so many tokens, and that do not come free."""
        first, table = sequence.detached[self.index], sequence.tables[self.index]
        cached = max(sequence.path_ends[self.index].end, first)
        last, refs = self.sliding.first_seen(sequence.num_tokens + num_tokens - 1), self.sliding.refs
        kept = sum(refs[slot] > 1 for slot in table[first : min(cached, last)])
        return kept + sum(slot in self.sliding.shared for slot in table[cached:last])

    def released_by(self, sequence: Sequence, first: int) -> int:
        """Cached blocks from the block `first` on that can be had when the sequence releases them."""
        first, end = max(first, sequence.detached[self.index]), sequence.path_ends[self.index].end
        return sum(self.sliding.refs[slot] == 1 for slot in sequence.tables[self.index][first:end])

    def kept_of(self, claimed: Items[BlockNames], num_tokens: int) -> int:
        """The same of a prompt that holds these blocks and grows to so many tokens."""
        last, refs = self.sliding.first_seen(num_tokens - 1), self.sliding.refs
        rows = [each.slots[: max(0, last - each.first)] for each in claimed if each.level == PRIMARY]
        return sum(refs[slot] > 0 for row in rows for slot in row)

    # -- letting go

    def detach(self, sequences: Items[Sequence], ends: Items[int], time: int) -> None:
        """Let go of what the window of these sequences has left behind, at a time.

        `ends` says of each how many tokens there are up to the next one that is computed (`Sequence.num_next`).
        """
        index, size, window = self.index, self.tokens_per_block, self.window
        leaving, counts, slots = [], array("I"), array("i")
        uncached: list[array[int]] = []
        for sequence, num_next in zip(sequences, ends, strict=True):
            first = sequence.detached[index]
            # The next token to be computed sees what lies in the window before it.
            last = (num_next - window) // size
            if last <= first:
                continue
            leaving.append(sequence)
            counts.append(last - first)
            table, end = sequence.tables[index], sequence.path_ends[index].end
            if last == first + 1:
                slots.append(table[first])
            else:
                slots += table[first:last]
            if end < last:
                uncached.append(table[max(end, first) : last])
        if leaving:
            self._emit(
                ev.BlocksDetached(
                    handles=packed_handles(leaving),
                    # One each is left out: decoding, nearly always.
                    counts=counts.tobytes() if len(slots) > len(leaving) else b"",
                    group=index,
                    slots=slots.tobytes(),
                    freed=self._unshared(uncached).tobytes() if uncached else b"",
                    clock=time,
                )
            )

    def _unshared(self, rows: list[array[int]]) -> array[int]:
        """Of the uncached slots that sequences let go of, one after the other, those that nobody else holds then."""
        holders, freed = self.sliding.shared.copy(), array("i")
        for row in rows:
            for slot in row:
                if holders.get(slot, 1) == 1:
                    freed.append(slot)
                else:
                    holders[slot] -= 1
        return freed

    # -- storing

    def store(self, sequence: Sequence, *, partial: bool = False) -> list[Replacement]:
        """Make the sequence's computed full blocks reusable (and, at its end, the partial one behind them)."""
        replaced: list[Replacement] = []
        if not self._reuse:
            return replaced
        size, computed, end = self.tokens_per_block, sequence.computed, sequence.path_ends[self.index]
        full = computed // size
        stop = computed if partial and self._partial_reuse else full * size
        first = max(end.end, sequence.detached[self.index])
        if self.sliding.shared:
            own = self._own_blocks(sequence.tables[self.index], first)
            full, stop = min(full, own), min(stop, own * size)
        if first < full:
            self._store_full(sequence, first, full, replaced)
        if full * size < stop:
            self._store_partial(sequence, full, stop)
        return replaced

    def _growing(self) -> Callable[[array[int], int], bool]:
        runs, positions = self.sliding.tree.runs, self.sliding.positions
        longer: set[int] = set()

        def grows(table: array[int], block: int) -> bool:
            """Whether a block makes a run longer behind which nothing hangs, and that no other one makes longer."""
            before = table[block - 1] if block else DETACHED
            run = runs.get(positions[before] >> DEPTH_BITS) if before >= 0 else None
            if run is None or run.end != block or run.children or run.partial or run.id in longer:
                return False
            longer.add(run.id)
            return True

        return grows

    def _store_full(self, sequence: Sequence, first: int, full: int, replaced: list[Replacement]) -> None:
        """Store full blocks; where one is cached already, hold that one."""
        known = self._known(sequence, first, full)
        row, at = array("i"), first
        while at < full:
            row = known[at - first :]
            place = row[0] if row else HOLE
            if place == HOLE:
                missing = next((n for n, other in enumerate(row) if other != HOLE), full - at)
                self._emit_stored(sequence, at, (at + missing) * self.tokens_per_block)
                at += missing
                continue
            level = self.sliding.slot_of(place)[0]
            alike = 0
            while alike < len(row) and row[alike] != HOLE and self.sliding.slot_of(row[alike])[0] == level:
                alike += 1
            slots = array("i", [self.sliding.slot_of(other)[1] for other in row[:alike]])
            names = self.names_at(row[:alike])
            self._take_stored(sequence, BlockNames(LevelIndex(level), at, slots, names), replaced)
            at += alike

    def _known(self, sequence: Sequence, first: int, full: int) -> array[int]:
        """The places of the sequence's blocks from `first` on, as far as their content is known.

        Shorter blocks that these make useless are removed.
        """
        size, block_bytes = self.tokens_per_block, self.sliding.tree.block_bytes
        node, at, depth = self.sliding.position(sequence, first)
        known, useless = array("i"), array("i")
        if depth < first:
            return known  # nobody knows what is before it
        if not (isinstance(node, Run) and at < len(node.slots)):
            if not node.children:
                return known  # nothing follows, as behind most prompts
            if self.sliding.content(sequence, first, first + 1, size) not in node.children:
                full = first + 1  # a prompt that begins otherwise, and is too long to be copied for nothing
        content = self.sliding.content(sequence, first, full, size)
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
            same = common_bytes(node, content, done, len(content), at * block_bytes) // block_bytes
            known += node.slots[at : at + same]
            at += same
            if at < len(node.slots) and len(known) < full - first:
                useless.extend(self._covered_by(node, at, content[len(known) * block_bytes :][:block_bytes]))
                break
        if useless:
            self.sliding_evictor.supersede(useless, sequence.handle)
        return known

    def _store_partial(self, sequence: Sequence, full: int, stop: int) -> None:
        """Store the block behind the full ones, unless a cached one that begins with its tokens serves as well."""
        if max(sequence.path_ends[self.index].end, sequence.detached[self.index]) != full:
            return
        head = sequence.packed(full * self.tokens_per_block, stop)
        node, at, depth = self.sliding.position(sequence, full)
        if depth == full:
            if self._begins(node, at, head):
                return
            useless = self._covered_by(node, at, head)
            if useless:
                self.sliding_evictor.supersede(useless, sequence.handle)
        self._emit_stored(sequence, full, stop)

    def _begins(self, node: Node, at: int, head: bytes) -> bool:
        """Whether a cached block at this position begins with these tokens."""
        if not (isinstance(node, Run) and at < len(node.slots)):
            return covered(node, head)
        begin = at * self.sliding.tree.block_bytes
        return node.slots[at] != HOLE and node.symbols[begin : begin + len(head)] == head

    def _covered_by(self, node: Node, at: int, head: bytes) -> array[int]:
        """The place of the shorter block at this position that a block of this content makes useless."""
        if not (isinstance(node, Run) and at < len(node.slots)):
            shorter = covered_child(node, head)
            return array("i") if shorter is None else shorter.slots[:]
        if not node.partial or at < len(node.slots) - 1:
            return array("i")
        content = node.symbols[at * self.sliding.tree.block_bytes :]
        return node.slots[at:] if len(content) < len(head) and head.startswith(content) else array("i")

    def names_at(self, places: array[int]) -> bytes:
        """The names of cached blocks."""
        return self.sliding.names_of(places)

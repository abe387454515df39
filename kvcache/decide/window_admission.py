"""Decisions for one attention window: what to match, copy and onboard. Reads state, emits events.

`emit` applies an event at once, so each decision sees the effect of the one before. Whether everything will fit
is counted before the first event of a call; after that no step can fail.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from itertools import groupby

from events import types as ev
from events.ids import BlockIndex, GroupIndex, Slot
from events.packed import names_of_keys
from events.tokens.names import chain_symbols
from events.types import PRIMARY, SECONDARY, SLIDING, Event, Namespace
from kvcache.decide.claims import BlockNames, Claims, CopySource
from kvcache.decide.decoding import packed_handles
from kvcache.decide.eviction import Evictor
from kvcache.decide.eviction_order import EvictionOrder
from kvcache.decide.release_order import ReleaseOrder
from kvcache.fold.contents import AnyGroup
from kvcache.fold.group_state import GroupState
from kvcache.fold.matching import GroupMatch, PartialMatch, PathMatch, Piece, match
from kvcache.fold.retention import kept
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState


class WindowAdmission:
    """What one window does for an admission; `WindowBlockManager` does the rest."""

    def __init__(
        self,
        state: CacheState,
        index: GroupIndex,
        emit: Callable[[Event], None],
        *,
        reuse: bool,
        partial_reuse: bool,
        offload_min_priority: int,
        order: type[EvictionOrder],
    ) -> None:
        self._state = state
        self.index = index
        assert state.created is not None
        self.window = state.created.groups[index].window
        """In tokens."""
        self._group: AnyGroup = state.groups[index]
        self.primary = self._group.levels[PRIMARY]
        self._emit = emit
        self._reuse = reuse
        self._partial_reuse = partial_reuse and state.tokens_recorded
        self.key_bytes = state.hashing.key_bytes
        self._chain, self._rich = state.hashing.chain, state.rich
        self._chain_rich = partial(chain_symbols, state.hashing, state.symbols)
        self.tokens_per_block = state.tokens_per_block
        self._known_keys = self.key_bytes if index else 0
        """Within `store_filled`: key bytes of the filled block that are known, since the first window has made them."""
        self._key_before = slice(-self._known_keys - self.key_bytes, -self._known_keys or None)
        """And where the key of the block before is, among the sequence's."""
        self._slides = state.created.groups[index].kind == SLIDING
        self.adopted = False
        """Whether the last `store` has come to hold blocks that another sequence had stored."""
        self._follow(offload_min_priority, order)

    def _follow(self, offload_min_priority: int, order: type[EvictionOrder]) -> None:
        """Know what can be evicted, from now on."""
        group = self._state.groups[self.index]
        assert isinstance(group, GroupState)
        self.group = group
        """The state decided about."""
        self.evictor = Evictor(self._state, group, self._emit, offload_min_priority, order)
        self.order: EvictionOrder | ReleaseOrder = self.evictor.order
        self.free_up = self.evictor.free_up

    # -- reading

    def match(self, namespace: Namespace, symbols: bytes, stop: int) -> GroupMatch:
        """The longest cached prefix of ``symbols[:stop]`` (bytes)."""
        if not self._reuse:
            return PathMatch()
        tree = self.group.tree
        return match(tree, tree.roots.get(namespace), symbols, stop, partial=self._partial_reuse)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.tokens_per_block)

    def blocks_to_grow(self, sequence: Sequence, num_tokens: int, chunk: int | None = None) -> int:
        """Blocks that a sequence needs at most, beside those that it has, to grow by so many tokens.

        A prompt that has slots for a part of its tokens gets the others by chunks of at most `chunk` tokens (None: at
        once).
        """
        return max(0, self.blocks_for(sequence.num_tokens + num_tokens) - len(sequence.tables[self.index]))

    def _names(self, keys: bytes) -> bytes:
        return names_of_keys(keys, self.key_bytes)

    # -- admission

    def claims(self) -> Claims:
        """Of a batch of which nothing is counted yet."""
        return Claims(self.primary.available)

    def claimed(self, found: GroupMatch, num_tokens: int) -> list[BlockNames]:
        """The blocks to hold in order to reuse so many tokens of a match.

        Noted by their slots at once: claiming one request's blocks splits runs that another one's match may name.
        """
        claimed: list[BlockNames] = []
        if not found.runs:
            return claimed
        rows: list[list[Piece]] = []
        for piece in found.pieces(num_tokens, self.key_bytes):
            if rows and rows[-1][0].level == piece.level:
                rows[-1].append(piece)
            else:
                rows.append([piece])
        for row in rows:
            level, first, slots, keys, _ = row[0]
            if len(row) > 1:
                slots = array("i", b"".join([piece.slots for piece in row]))
                keys = b"".join([piece.keys for piece in row])
            claimed.append(BlockNames(level, first, slots, names_of_keys(keys, self.key_bytes)))
        return claimed

    def claim(self, sequence: Sequence, claimed: Items[BlockNames]) -> None:
        """Take the matching blocks before anything is evicted."""
        for blocks in claimed:
            self._emit(
                ev.BlocksReused(
                    handle=sequence.handle,
                    group=self.index,
                    level=blocks.level,
                    first_block=BlockIndex(blocks.first),
                    slots=blocks.slots.tobytes(),
                    names=self._names_before(sequence, blocks) + blocks.names,
                )
            )

    def _names_before(self, sequence: Sequence, blocks: BlockNames) -> bytes:
        """Names of the sequence's blocks before these that no event has given: with full attention there are none."""
        return b""

    def source(self, found: PartialMatch) -> CopySource:
        """Where a partial match lies now."""
        level, slot = found.block.level, Slot(found.block.slots[0])
        return CopySource(level, slot, found.num_tokens, self._group.kept_in(level, slot))

    def source_of_own(self, sequence: Sequence, block: int, num_tokens: int) -> CopySource:
        """The beginning of a block in a sequence's table."""
        slot = Slot(sequence.tables[self.index][block])
        if self._group.is_cached(PRIMARY, slot):
            return CopySource(PRIMARY, slot, num_tokens, self._group.kept_in(PRIMARY, slot))
        how = kept(sequence, self.index, block, self.tokens_per_block)
        return CopySource(PRIMARY, slot, num_tokens, how, cached=False)

    def first_to_leave(self, sequence: Sequence, num_tokens: int) -> int:
        """The first block that a sequence lets go of when all but so many tokens are taken back."""
        blocks = min(sequence.computed, num_tokens - 1) // self.tokens_per_block
        needed = min(self.blocks_for(num_tokens), len(sequence.tables[self.index]))
        return self._group.first_to_leave(sequence, blocks, needed)

    def copy_partial(self, sequence: Sequence, source: CopySource, unread: set[Slot]) -> None:
        """Copy the start of a block into a new one of the sequence.

        A source that has just been evicted becomes the target itself. `unread` are the primary sources of the batch:
        nothing may overwrite one before it was read.
        """
        slot: int = source.slot
        if (
            source.level == PRIMARY
            and slot in unread
            and not self._state.groups[self.index].is_cached(PRIMARY, slot)
        ):
            unread.discard(slot)
            target = slot
        else:
            target = next(free for free in reversed(self.primary.blank) if free not in unread)
        block = len(sequence.tables[self.index])
        handles, slots = array("q", [sequence.handle]).tobytes(), array("i", [target]).tobytes()
        self._emit(
            ev.BlocksAllocated(
                handles=handles, counts=b"", group=self.index, slots=slots, why=ev.AllocateReason.COPY
            )
        )
        self._copy(sequence, source, target, block)

    def copy_blocks(self, sequence: Sequence, sources: Items[CopySource], why: ev.AllocateReason) -> None:
        """Give a sequence copies of its own, behind the blocks that it has, of blocks that others may read."""
        if len(sources) == 1:
            self.copy_partial(sequence, sources[0], {each.slot for each in sources if each.cached})
        elif sources:
            first, count = len(sequence.tables[self.index]), len(sources)
            self.allocate(packed_handles([sequence]), count, [count], why)
            targets = sequence.tables[self.index][first:]
            # Of what the copies inherit the last one's is kept: that of the block that is stored next.
            for block in reversed(range(count)):
                self._copy(sequence, sources[block], targets[block], first + block)

    def _copy(self, sequence: Sequence, source: CopySource, target: int, block: int) -> None:
        transfer = self._state.next_transfer
        self._emit(
            ev.BlocksCopied(
                handle=sequence.handle,
                group=self.index,
                source_level=source.level,
                source=source.slot,
                target=Slot(target),
                num_tokens=source.num_tokens,
                block=BlockIndex(block),
                transfer=transfer,
                priority=source.kept.priority,
                duration=source.kept.duration,
            )
        )

    def allocate(
        self, handles: bytes, needed: int, counts: Items[int] | None, why: ev.AllocateReason
    ) -> None:
        """Append `needed` blank slots to the tables of these sequences: so many each, or one each."""
        slots = self.primary.peek(needed).tobytes()
        packed = b"" if counts is None else array("I", counts).tobytes()
        self._emit(ev.BlocksAllocated(handles=handles, counts=packed, group=self.index, slots=slots, why=why))

    def onboard(self, sequence: Sequence) -> None:
        """Bring the secondary blocks that the sequence claimed to primary, if no other one of its batch has."""
        waiting = self._state.awaiting_onboard.get(self.index, ())
        rows = [list(places.items()) for each, places in waiting if each is sequence]
        for row in rows:
            # What is left of a row may have gaps, where another sequence has brought some of its blocks.
            for _, part in groupby(enumerate(row), lambda item: item[0] - item[1][1]):
                blocks = [place for _, place in part]
                first, slots = blocks[0][1], array("i", [slot for slot, _ in blocks])
                size = self.key_bytes
                names = self._names(bytes(sequence.keys[first * size : (first + len(slots)) * size]))
                to_slots = self.primary.peek(len(slots)).tobytes()
                found = BlockNames(SECONDARY, first, slots, names)
                self._move_up(sequence, found, to_slots, ev.MoveReason.ONBOARD)

    def _move_up(self, sequence: Sequence, blocks: BlockNames, to_slots: bytes, why: ev.MoveReason) -> None:
        """Move secondary blocks of a sequence's prompt to primary; what was computed again needs no copy."""
        self._emit(
            ev.BlocksMoved(
                group=self.index,
                names=blocks.names,
                from_level=SECONDARY,
                from_slots=blocks.slots.tobytes(),
                to_level=PRIMARY,
                to_slots=to_slots,
                why=why,
                transfer=self._state.next_transfer if why == ev.MoveReason.ONBOARD else 0,
                handle=sequence.handle,
                first_block=BlockIndex(blocks.first),
            )
        )

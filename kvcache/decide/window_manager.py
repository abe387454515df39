"""Decisions for one attention window: what to match, copy, onboard, store. Reads state, emits events.

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
from events.packed import NAME_BYTES, TOKEN_BYTES, names_of_keys
from events.tokens.names import chain_symbols
from events.types import PRIMARY, SECONDARY, Event, Namespace
from kvcache.decide.claims import BlockNames, Claims, CopySource
from kvcache.decide.eviction import Evictor
from kvcache.decide.eviction_order import EvictionOrder
from kvcache.decide.release_order import ReleaseOrder
from kvcache.fold.group import Group
from kvcache.fold.group_state import GroupState
from kvcache.fold.matching import GroupMatch, PathMatch, Piece, covered, covered_child, match
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState
from kvcache.results import Replacement

DEFAULT_PRIORITY = 35


class WindowBlockManager:
    """Decides for the blocks of one window."""

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
        self._group: Group = state.groups[index]
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
        self._follow(offload_min_priority, order)

    def _follow(self, offload_min_priority: int, order: type[EvictionOrder]) -> None:
        """Know what can be evicted, from now on."""
        group = self._state.groups[self.index]
        assert isinstance(group, GroupState)
        self.group = group
        """The state decided about."""
        self._evictor = Evictor(self._state, group, self._emit, offload_min_priority, order)
        self.order: EvictionOrder | ReleaseOrder = self._evictor.order
        self.free_up = self._evictor.free_up

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

    def blocks_to_grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a sequence needs at most, beside those that it has, to grow by so many tokens."""
        return self.blocks_for(sequence.num_tokens + num_tokens) - self.blocks_for(sequence.num_tokens)

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
        transfer, tokens = self._state.next_transfer, source.num_tokens
        self._emit(
            ev.BlocksCopied(
                handle=sequence.handle,
                group=self.index,
                source_level=source.level,
                source=Slot(slot),
                target=Slot(target),
                num_tokens=tokens,
                block=BlockIndex(block),
                transfer=transfer,
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

    # -- storing

    def store(self, sequence: Sequence, *, partial: bool = False) -> list[Replacement]:
        """Make the sequence's computed full blocks reusable (and, at its end, the partial one behind them)."""
        swaps: list[Replacement] = []
        if not self._reuse:
            return swaps
        size, computed = self.tokens_per_block, sequence.computed
        full = computed // size
        stop = computed if partial and self._partial_reuse else full * size
        tail = sequence.path_ends[self.index]
        first = tail.end
        if self.group.shared:
            own = self._own_blocks(sequence.tables[self.index], first)
            full, stop = min(full, own), min(stop, own * size)
        if first < full and tail.children:
            first += self._adopt(sequence, first, full, swaps)
        if first * size < stop:
            self._store_new(sequence, first, stop)
        return swaps

    def store_filled(self, sequences: Items[Sequence]) -> list[Sequence]:
        """The usual case of `store`, many at a time: decoding has filled one block behind what a sequence had cached.

        Returns those for which this is not the case; nothing was done for them.
        """
        if not self._reuse or self._group.shared:
            return list(sequences)
        index, key_bytes, rich = self.index, self.key_bytes, self._rich
        size, chain, known = self.tokens_per_block, self._chain, self._known_keys
        handles, blocks = [], []
        slots: list[int] = []
        parents, keys, others = [], [], []
        for sequence in sequences:
            tail, table, named = sequence.path_ends[index], sequence.tables[index], sequence.keys
            block = tail.end
            if (
                block != len(table) - 2
                or len(named) != block * key_bytes + known
                or sequence.handle in rich
                or not tail.grows(DEFAULT_PRIORITY)
            ):
                others.append(sequence)
                continue
            handles.append(sequence.handle)
            blocks.append(block)
            slots.append(table[block])
            if key_bytes:
                parent = bytes(named[(block - 1) * key_bytes : block * key_bytes])
                parents.append(parent[:NAME_BYTES])
                if not known:
                    symbols = sequence.packed(block * size, (block + 1) * size)
                    keys.append(chain(sequence.namespace, parent, symbols, len(symbols)))
        if slots:
            self._emit(
                ev.BlocksFilled(
                    handles=array("q", handles).tobytes(),
                    group=index,
                    blocks=array("I", blocks).tobytes(),
                    parents=b"".join(parents),
                    keys=b"".join(keys),
                    slots=array("i", slots).tobytes(),
                    priority=DEFAULT_PRIORITY,
                )
            )
        return others

    def _own_blocks(self, table: array[int], first: int) -> int:
        """Blocks before the first one that another sequence holds without a name: it must stay without."""
        shared = self._group.shared
        for index in range(first, len(table)):
            if table[index] in shared:
                return index
        return len(table)

    def _adopt(self, sequence: Sequence, first: int, full: int, swaps: list[Replacement]) -> int:
        """Where another sequence has stored the next blocks meanwhile, hold its copies instead; returns how many."""
        size, tail = self.tokens_per_block, sequence.path_ends[self.index]
        if sequence.packed(first * size, (first + 1) * size) not in tail.children:
            return 0
        symbols = sequence.packed(first * size, full * size)
        found = match(self.group.tree, tail, symbols, len(symbols), partial=False)
        for blocks in self.claimed(found, 0):
            self._take_stored(sequence, blocks, swaps)
        return found.blocks

    def _take_stored(self, sequence: Sequence, blocks: BlockNames, swaps: list[Replacement]) -> None:
        """Hold another sequence's blocks instead of own ones; what lies in secondary moves to these."""
        first, last = blocks.first, blocks.first + len(blocks.slots)
        own = sequence.tables[self.index][first:last]
        if blocks.level == SECONDARY:
            self._move_up(sequence, blocks, own.tobytes(), ev.MoveReason.RECOMPUTED)
            return
        places = zip(range(first, last), own, blocks.slots, strict=True)
        swaps += [Replacement(*place, self.window) for place in places]
        self._emit(
            ev.BlocksReused(
                handle=sequence.handle,
                group=self.index,
                level=PRIMARY,
                first_block=BlockIndex(first),
                slots=blocks.slots.tobytes(),
                names=self._names_before(sequence, blocks) + blocks.names,
                replaced=own[::-1].tobytes(),
            )
        )

    def _store_new(self, sequence: Sequence, first: int, stop: int) -> None:
        """Store the blocks from `first` up to the token `stop`, behind the path that the sequence holds."""
        size = self.tokens_per_block
        if sequence.path_ends[self.index].children:
            head = sequence.packed(first * size, min(stop, (first + 1) * size))
            if not self._make_way(sequence, head):
                return
        self._emit_stored(sequence, first, stop)

    def _emit_stored(self, sequence: Sequence, first: int, stop: int) -> None:
        """Store the blocks from `first` up to the token `stop`; names are made that no other window has needed yet."""
        size, key_bytes = self.tokens_per_block, self.key_bytes
        last, known = -(-stop // size), sequence.keys
        named = len(known) // key_bytes if key_bytes else last
        keys = b""
        if named < last:
            symbols = sequence.packed(named * size, stop)
            parent = bytes(known[-key_bytes:]) if named else self._state.root_key(sequence.namespace)
            chain = self._chain_rich if sequence.handle in self._rich else self._chain
            keys = chain(sequence.namespace, parent, symbols, size * TOKEN_BYTES)
        above = bytes(known[(first - 1) * key_bytes :][:NAME_BYTES]) if first and key_bytes else b""
        if first > named:  # the name of the block before is among those that were just made
            above = keys[(first - 1 - named) * key_bytes :][:NAME_BYTES]
        self._emit(
            ev.BlocksStored(
                handle=sequence.handle,
                group=self.index,
                first_block=BlockIndex(first),
                parent=above,
                keys=keys,
                slots=sequence.tables[self.index][first:last].tobytes(),
                level=PRIMARY,
                priority=DEFAULT_PRIORITY,
                last_tokens=stop - (last - 1) * size,
            )
        )

    def _make_way(self, sequence: Sequence, head: bytes) -> bool:
        """Whether a new block is to be stored beside its siblings; a shorter one that it covers is removed."""
        tail = sequence.path_ends[self.index]
        if covered(tail, head):
            return False  # a block that begins with these tokens serves as well
        shorter = covered_child(tail, head)
        if shorter is not None:
            self._evictor.remove_tail(shorter, 1, ev.RemoveReason.SUPERSEDED, sequence.handle)
        return True

    def freed_by(self, sequence: Sequence) -> bytes:
        """The slots that become blank when the sequence goes, deepest first."""
        cached = max(sequence.path_ends[self.index].end, sequence.detached[self.index])
        own = sequence.tables[self.index][cached:]
        own.reverse()
        shared = self._group.shared
        if shared:
            own = array("i", [slot for slot in own if slot not in shared])
        return own.tobytes()

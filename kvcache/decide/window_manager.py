"""Decisions for one attention window: what to match, copy, onboard, store. Reads state, emits events.

`emit` applies an event at once, so each decision sees the effect of the one before. Whether everything will fit
is counted before the first event of a call; after that no step can fail.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

from events import types as ev
from events.ids import BlockIndex, GroupIndex, LevelIndex, Slot
from events.packed import NAME_BYTES, TOKEN_BYTES, names_of_keys
from events.tokens.names import chain_symbols
from events.types import PRIMARY, SECONDARY, Event, Namespace
from kvcache.decide.eviction import Evictor
from kvcache.decide.eviction_order import EvictionOrder
from kvcache.fold.group_state import GroupState
from kvcache.fold.matching import PartialMatch, PathMatch, covered, covered_child, match
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState
from kvcache.results import Replacement

DEFAULT_PRIORITY = 35


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Cached blocks at one level, shallowest first."""

    slots: array[int]
    names: bytes


@dataclass(frozen=True, slots=True)
class CopySource:
    """A block whose first `num_tokens` tokens are to be copied."""

    level: LevelIndex
    slot: Slot
    num_tokens: int

    @classmethod
    def of(cls, found: PartialMatch) -> CopySource:
        """Where the partial match lies now."""
        return cls(found.run.level, Slot(found.slot), found.num_tokens)


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
        self.group: GroupState = state.groups[index]
        """The state decided about."""
        self.primary = self.group.levels[PRIMARY]
        self._emit = emit
        self._reuse = reuse
        self._partial_reuse = partial_reuse and state.tokens_recorded
        self._evictor = Evictor(state, index, emit, offload_min_priority, order)
        self.order = self._evictor.order
        self.free_up = self._evictor.free_up
        self._key_bytes = state.hashing.key_bytes
        self._chain, self._rich = state.hashing.chain, state.rich
        self._chain_rich = partial(chain_symbols, state.hashing, state.symbols)
        self.tokens_per_block = state.tokens_per_block

    # -- reading

    def match(self, namespace: Namespace, symbols: bytes, stop: int) -> PathMatch:
        """The longest cached prefix of ``symbols[:stop]`` (bytes)."""
        if not self._reuse:
            return PathMatch()
        tree = self.group.tree
        return match(tree, tree.roots.get(namespace), symbols, stop, partial=self._partial_reuse)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.tokens_per_block)

    def _names(self, keys: bytes) -> bytes:
        return names_of_keys(keys, self._key_bytes)

    # -- admission

    def blocks_of(self, found: PathMatch, level: int) -> BlockNames:
        """The full blocks of a match that lie in this level."""
        return BlockNames(found.slots(level), self._names(found.keys(level, self._key_bytes)))

    def claim(self, sequence: Sequence, claimed: tuple[BlockNames, BlockNames]) -> None:
        """Take the matching blocks before anything is evicted."""
        first = 0
        for level, blocks in enumerate(claimed):
            slots = blocks.slots
            if slots:
                self._emit(
                    ev.BlocksReused(
                        handle=sequence.handle,
                        group=self.index,
                        level=LevelIndex(level),
                        first_block=BlockIndex(first),
                        slots=slots.tobytes(),
                        names=blocks.names,
                    )
                )
            first += len(slots)

    def copy_partial(self, sequence: Sequence, source: CopySource, unread: set[Slot]) -> None:
        """Copy the start of a block into a new one of the sequence.

        A source that has just been evicted becomes the target itself. `unread` are the primary sources of the batch:
        nothing may overwrite one before it was read.
        """
        slot: int = source.slot
        if source.level == PRIMARY and slot in unread and not self.group.is_cached(PRIMARY, slot):
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
        """Bring the secondary blocks that the sequence claimed to primary."""
        runs = [run for run in self.group.path(sequence.path_ends[self.index]) if run.level == SECONDARY]
        if not runs:
            return
        runs.reverse()
        slots = array("i", [slot for run in runs for slot in run.slots])
        names = self._names(b"".join(bytes(run.keys) for run in runs))
        to_slots = self.primary.peek(len(slots)).tobytes()
        self._move_up(sequence, BlockNames(slots, names), to_slots, runs[0].start, ev.MoveReason.ONBOARD)

    def _move_up(
        self, sequence: Sequence, blocks: BlockNames, to_slots: bytes, first: int, why: ev.MoveReason
    ) -> None:
        """Move secondary blocks of a sequence's prefix to primary; what was computed again needs no copy."""
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
                first_block=BlockIndex(first),
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
        if not self._reuse or self.group.shared:
            return list(sequences)
        index, size, key_bytes = self.index, self.tokens_per_block, self._key_bytes
        handles, blocks, slots = array("q"), array("I"), array("i")
        parents, keys, others = [], [], []
        for sequence in sequences:
            tail, table = sequence.path_ends[index], sequence.tables[index]
            block = tail.end
            if block != len(table) - 2 or not tail.grows(DEFAULT_PRIORITY) or sequence.handle in self._rich:
                others.append(sequence)
                continue
            handles.append(sequence.handle)
            blocks.append(block)
            slots.append(table[block])
            if key_bytes:
                symbols = sequence.packed(block * size, (block + 1) * size)
                parent = tail.key_of_last(key_bytes)
                parents.append(parent[:NAME_BYTES])
                keys.append(self._chain(sequence.namespace, parent, symbols, len(symbols)))
        if slots:
            self._emit(
                ev.BlocksFilled(
                    handles=handles.tobytes(),
                    group=index,
                    blocks=blocks.tobytes(),
                    parents=b"".join(parents),
                    keys=b"".join(keys),
                    slots=slots.tobytes(),
                    priority=DEFAULT_PRIORITY,
                )
            )
        return others

    def _own_blocks(self, table: array[int], first: int) -> int:
        """Blocks before the first one that another sequence holds without a name: it must stay without."""
        for index in range(first, len(table)):
            if table[index] in self.group.shared:
                return index
        return len(table)

    def _adopt(self, sequence: Sequence, first: int, full: int, swaps: list[Replacement]) -> int:
        """Where another sequence has stored the next blocks meanwhile, hold its copies instead; returns how many."""
        index, size = self.index, self.tokens_per_block
        tail, table = sequence.path_ends[index], sequence.tables[index]
        if sequence.packed(first * size, (first + 1) * size) not in tail.children:
            return 0
        symbols = sequence.packed(first * size, full * size)
        found = match(self.group.tree, tail, symbols, len(symbols), partial=False)
        primary, secondary = self.blocks_of(found, PRIMARY), self.blocks_of(found, SECONDARY)
        middle, last = first + len(primary.slots), first + found.blocks
        own, recomputed = table[first:middle], table[middle:last]
        if own:
            places = zip(range(first, middle), own, primary.slots, strict=True)
            swaps += [Replacement(*place, self.window) for place in places]
            slots, replaced = primary.slots.tobytes(), own[::-1].tobytes()
            self._emit(
                ev.BlocksReused(
                    handle=sequence.handle,
                    group=index,
                    level=PRIMARY,
                    first_block=BlockIndex(first),
                    slots=slots,
                    names=primary.names,
                    replaced=replaced,
                )
            )
        if recomputed:
            self._move_up(sequence, secondary, recomputed.tobytes(), middle, ev.MoveReason.RECOMPUTED)
        return found.blocks

    def _store_new(self, sequence: Sequence, first: int, stop: int) -> None:
        """Store the blocks from `first` up to the token `stop`."""
        index, size = self.index, self.tokens_per_block
        if sequence.path_ends[index].children:
            head = sequence.packed(first * size, min(stop, (first + 1) * size))
            if not self._make_way(sequence, head):
                return
        tail = sequence.path_ends[index]
        last = -(-stop // size)
        parent = tail.key_of_last(self._key_bytes)
        keys = b""
        if self._key_bytes:
            symbols = sequence.packed(first * size, stop)
            chain = self._chain_rich if sequence.handle in self._rich else self._chain
            keys = chain(sequence.namespace, parent, symbols, size * TOKEN_BYTES)
        self._emit(
            ev.BlocksStored(
                handle=sequence.handle,
                group=index,
                first_block=BlockIndex(first),
                parent=parent[:NAME_BYTES] if first else b"",
                keys=keys,
                slots=sequence.tables[index][first:last].tobytes(),
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
        own = sequence.tables[self.index][sequence.path_ends[self.index].end :]
        own.reverse()
        shared = self.group.shared
        if shared:
            own = array("i", [slot for slot in own if slot not in shared])
        return own.tobytes()

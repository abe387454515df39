"""Decisions for one attention window, common to full attention and sliding windows.

`emit` applies an event at once, so each decision sees the effect of the one before. The needs of a call are counted
before its first event; after that no step can fail.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from events import types as ev
from events.ids import BlockIndex, Handle, LevelIndex, Slot
from events.packed import NAME_BYTES, TOKEN_BYTES, names_of_keys
from events.tokens.names import chain_symbols
from events.types import CROSS, PRIMARY, SECONDARY, AllocateReason, Event, Namespace
from kvcache.config import KVCacheConfig
from kvcache.fold.prefix_tree import PathMatch, Piece
from kvcache.fold.sequence import DEFAULT, BlockRetention, Sequence, packed_handles, retention_of, rows
from kvcache.fold.sliding_group import AnyGroup, AnyMatch
from kvcache.fold.state import CacheState
from kvcache.inputs import CheckedRequest
from kvcache.results import Replacement


class CopySource(NamedTuple):
    """Block with its first `num_tokens` tokens to be copied."""

    level: LevelIndex
    slot: Slot
    num_tokens: int
    kept: BlockRetention
    """Retention of the source."""
    cached: bool = True


class WindowPlan(NamedTuple):
    """Needs of one request in one window: values, which stay as they are while events are applied."""

    claimed: list[Piece]
    """Cached blocks to hold."""
    new_blocks: int
    """Number of uncached blocks."""
    source: CopySource | None
    """Block with a start to be copied."""
    primary: int
    """Tokens in full blocks that the sequence takes from primary."""
    secondary: int
    """Tokens in full blocks that it takes from secondary."""


class Plan(NamedTuple):
    """Needs of one request: values only."""

    request: CheckedRequest
    windows: tuple[WindowPlan, ...]
    cross: tuple[WindowPlan, ...]
    """Plan for cross attention; empty if the model has no encoder."""
    reused_tokens: int
    """Leading tokens found in all windows, those of a copied block included."""
    reused_partial: int
    """Tokens reused from the start of a copied block."""

    @property
    def reused(self) -> tuple[int, int, int]:
        """Tokens reused from primary in all windows, from secondary in some, and from the start of a copied block."""
        tokens, partial = self.reused_tokens, self.reused_partial
        secondary = max([each.secondary for each in self.windows]) if tokens else 0
        return tokens - partial - secondary, secondary, partial

    @property
    def reused_input(self) -> tuple[int, int]:
        """Number of tokens of the encoder's input, and of its reused leading ones."""
        if self.request.encoder is None:
            return 0, 0
        num_tokens = self.request.encoder.num_tokens
        return num_tokens, min(num_tokens, self.cross[0].primary + self.cross[0].secondary)


class RetentionRow(NamedTuple):
    """Consecutive cached blocks of a sequence with the same retention."""

    level: LevelIndex
    kept: BlockRetention
    slots: array[int]
    names: bytes


class Claims(ABC):
    """Joint claims of the requests of a batch on one window: a cached block with several claims counts once."""

    def __init__(self, available: int) -> None:
        self.needed = 0
        """Primary slots needed: for new blocks, and for secondary ones to be onboarded."""
        self.available = available
        """Primary slots available, less those of claimed blocks."""

    @abstractmethod
    def add(self, found: AnyMatch, claimed: Items[Piece]) -> None:
        """Count the cached blocks of one more request."""


class BlockEvents:
    """Emits the events of the blocks of one group."""

    def __init__(self, state: CacheState, group: AnyGroup, emit: Callable[[Event], None]) -> None:
        self._state, self._group, self._emit = state, group, emit
        self._size, self.key_bytes = state.tokens_per_block, state.hashing.key_bytes

    def allocate(
        self, handles: bytes, slots: array[int], counts: Items[int] | None, why: AllocateReason
    ) -> None:
        """Append blank slots to the tables of these sequences, `counts` each, or one each."""
        packed = b"" if counts is None else array("I", counts).tobytes()
        self._emit(
            ev.BlocksAllocated(
                handles=handles, counts=packed, group=self._group.index, slots=slots.tobytes(), why=why
            )
        )

    def reuse(self, sequence: Sequence, blocks: Piece, replaced: bytes = b"") -> None:
        """Let a sequence hold cached blocks of its prompt, instead of own ones that are `replaced` (deepest first)."""
        self._emit(
            ev.BlocksReused(
                handle=sequence.handle,
                group=self._group.index,
                level=blocks.level,
                first_block=BlockIndex(blocks.first),
                slots=blocks.slots.tobytes(),
                names=names_of_keys(blocks.keys, self.key_bytes),
                replaced=replaced,
            )
        )

    def offload(self, slots: array[int], names: bytes, to_slots: array[int], handle: Handle | None) -> None:
        """Move primary blocks to secondary."""
        self._move(Piece(PRIMARY, 0, slots, b""), names, to_slots, ev.MoveReason.OFFLOAD, handle)

    def move_up(self, sequence: Sequence, blocks: Piece, to_slots: array[int], why: ev.MoveReason) -> None:
        """Move secondary blocks of a sequence's prompt to primary; recomputed ones need no copy."""
        names = names_of_keys(blocks.keys, self.key_bytes)
        self._move(blocks, names, to_slots, why, sequence.handle)

    def _move(
        self, blocks: Piece, names: bytes, to_slots: array[int], why: ev.MoveReason, handle: Handle | None
    ) -> None:
        self._emit(
            ev.BlocksMoved(
                group=self._group.index,
                names=names,
                from_level=blocks.level,
                from_slots=blocks.slots.tobytes(),
                to_level=PRIMARY if blocks.level == SECONDARY else SECONDARY,
                to_slots=to_slots.tobytes(),
                why=why,
                transfer=0 if why == ev.MoveReason.RECOMPUTED else self._state.next_transfer,
                handle=handle,
                first_block=BlockIndex(blocks.first),
            )
        )

    def store(
        self, sequence: Sequence, first: int, stop: int, how: BlockRetention, keys: bytes = b""
    ) -> None:
        """Store a sequence's blocks from `first` up to the token `stop`.

        `keys` are those of the blocks without one; empty: they are made here, if blocks have names.
        """
        size, key_bytes = self._size, self.key_bytes
        last, known = -(-stop // size), sequence.keys
        named = len(known) // key_bytes if key_bytes else last
        if named < last and not keys:
            keys = self.made(sequence, named, stop)
        above = bytes(known[(first - 1) * key_bytes :][:NAME_BYTES]) if first and key_bytes else b""
        if first > named:  # the name of the block before is among those that were just made
            above = keys[(first - 1 - named) * key_bytes :][:NAME_BYTES]
        self._emit(
            ev.BlocksStored(
                handle=sequence.handle,
                group=self._group.index,
                first_block=BlockIndex(first),
                parent=above,
                keys=keys,
                slots=sequence.tables[self._group.index][first:last].tobytes(),
                level=PRIMARY,
                priority=how.priority,
                last_tokens=stop - (last - 1) * size,
                duration=how.duration,
            )
        )

    def made(self, sequence: Sequence, named: int, stop: int) -> bytes:
        """Make the keys of a sequence's blocks after the first `named` ones, up to the token `stop`."""
        state, size = self._state, self._size
        symbols = sequence.packed(named * size, stop)
        parent = bytes(sequence.keys[-self.key_bytes :]) if named else state.root_key(sequence.namespace)
        if sequence.handle not in state.rich:
            return state.hashing.chain(sequence.namespace, parent, symbols, size * TOKEN_BYTES)
        return chain_symbols(
            state.hashing, state.symbols, sequence.namespace, parent, symbols, size * TOKEN_BYTES
        )

    def fill(
        self,
        handles: bytes,
        blocks: array[int],
        slots: array[int],
        parents: bytes,
        keys: bytes,
        how: BlockRetention,
    ) -> None:
        """Store one block of each of these sequences, extending a run that the sequence alone holds to its end."""
        self._emit(
            ev.BlocksFilled(
                handles=handles,
                group=self._group.index,
                blocks=blocks.tobytes(),
                parents=parents,
                keys=keys,
                slots=slots.tobytes(),
                priority=how.priority,
                duration=how.duration,
            )
        )

    def remove(
        self, level: int, slots: array[int], names: bytes, why: ev.RemoveReason, handle: Handle | None = None
    ) -> None:
        """Forget cached blocks."""
        self._emit(
            ev.BlocksRemoved(
                group=self._group.index,
                level=LevelIndex(level),
                slots=slots.tobytes(),
                names=names,
                why=why,
                handle=handle,
            )
        )


class WindowManager(ABC):
    """Decisions for the blocks of one window: what both kinds (`AnyWindow`) have in common. Reads state, emits events.

    | called for | methods |
    |---|---|
    | an admission: read | `match`, `plan` |
    | an admission: emit | `with_names_before`, `free_up`, `copy_partial`, `allocate`, `onboard`, `restate` |
    | new tokens | `free_up`, `allocate`, `store_filled`, `store` |
    | forks and rewinds | `first_to_leave`, `source_of_own`, `copy_blocks`, `released_by` |
    | queries of schedulers | `blocks_to_grow`, `blocks_to_complete` |
    """

    def __init__(
        self, state: CacheState, group: AnyGroup, emit: Callable[[Event], None], config: KVCacheConfig
    ) -> None:
        self._state, self.group, self._emit = state, group, emit
        self.events = BlockEvents(state, group, emit)
        self.index, self.window = group.index, group.window
        self.primary, self.tokens_per_block = group.levels[PRIMARY], state.tokens_per_block
        self._reuse = config.enable_block_reuse
        self._partial_reuse = config.enable_partial_reuse and group.kind != CROSS and state.tokens_recorded
        self._offload_min_priority = config.secondary_offload_min_priority
        self._offloads = group.levels[SECONDARY].size > 0
        self.key_bytes = state.hashing.key_bytes
        self._chain, self._rich = state.hashing.chain, state.rich
        self._known_keys = self.key_bytes if self.index else 0
        """Bytes of keys already known for a block filled by decoding, because the first window has made it."""
        self._key_before = slice(-self._known_keys - self.key_bytes, -self._known_keys or None)
        """Position of the previous block's key among the sequence's keys."""

    @abstractmethod
    def _store_path(
        self, sequence: Sequence, first: int, full: int, stop: int, replaced: list[Replacement]
    ) -> None:
        """Make the blocks from `first` up to `full` reusable, and the part after them up to the token `stop`."""

    @abstractmethod
    def _held_rows(self, sequence: Sequence, first: int, last: int, *, alone: bool) -> Iterator[RetentionRow]:
        """Yield the cached blocks from `first` up to `last` that the sequence holds (`alone`: as the only holder)."""

    # -- queries

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for this number of tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def match(self, namespace: Namespace, symbols: bytes, stop: int) -> AnyMatch:
        """Match ``symbols[:stop]`` (bytes)."""
        stop = stop if self._reuse else 0
        return self.group.match(namespace, symbols, stop, partial=self._partial_reuse)

    def plan(self, found: AnyMatch, num_tokens: int, new_blocks: int, claims: Claims) -> WindowPlan:
        """Plan the reuse of `num_tokens` tokens of a match, and add its needs to `claims`."""
        claimed, blocks = self._claimed(found, num_tokens), [0, 0]
        claims.needed += new_blocks
        claims.add(found, claimed)
        for each in claimed:
            blocks[each.level] += len(each.slots) * self.tokens_per_block
        source = None
        if found.partial is not None:
            level, slot = found.partial.block.level, Slot(found.partial.block.slots[0])
            source = CopySource(level, slot, found.partial.num_tokens, self.group.retention_in(level, slot))
        return WindowPlan(claimed, new_blocks, source, *blocks)

    def _claimed(self, found: AnyMatch, num_tokens: int) -> list[Piece]:
        """Return the blocks to hold in order to reuse this number of tokens of a match: a row for each change of level.

        Converted to slots at once: claiming one request's blocks splits runs that another one's match may name.
        """
        rows: list[list[Piece]] = []
        for piece in found.pieces(num_tokens, self.key_bytes) if found.runs else ():
            if rows and rows[-1][0].level == piece.level:
                rows[-1].append(piece)
            else:
                rows.append([piece])
        return [_joined(row) for row in rows]

    def source_of_own(self, sequence: Sequence, block: int, num_tokens: int) -> CopySource:
        """Return the beginning of a block in a sequence's table as a copy source."""
        slot = Slot(sequence.tables[self.index][block])
        if self.group.is_cached(PRIMARY, slot):
            return CopySource(PRIMARY, slot, num_tokens, self.group.retention_in(PRIMARY, slot))
        how = retention_of(sequence, self.index, block, self.tokens_per_block)
        return CopySource(PRIMARY, slot, num_tokens, how, cached=False)

    def first_to_leave(self, sequence: Sequence, num_tokens: int) -> int:
        """First block that a sequence releases when all but `num_tokens` tokens are taken back."""
        blocks = min(sequence.computed, num_tokens - 1) // self.tokens_per_block
        needed = min(self.blocks_for(num_tokens), len(sequence.tables[self.index]))
        return self.group.first_to_leave(sequence, blocks, needed)

    # -- blocks for a sequence

    def with_names_before(self, sequence: Sequence, blocks: Piece) -> Piece:
        """Add names of the sequence's earlier blocks that no event has given to these blocks, which are to be held.

        With full attention there are none.
        """
        return blocks

    def copy_partial(self, sequence: Sequence, source: CopySource, unread: set[Slot]) -> None:
        """Copy the start of a block into a new one of the sequence.

        A source that has just been evicted becomes the target itself. `unread` are the primary sources of the batch,
        which must not be overwritten before they are read.
        """
        slot: int = source.slot
        if source.level == PRIMARY and slot in unread and not self.group.is_cached(PRIMARY, slot):
            unread.discard(slot)
            target = slot
        else:
            target = next(free for free in reversed(self.primary.blank) if free not in unread)
        block = len(sequence.tables[self.index])
        self.events.allocate(packed_handles([sequence]), array("i", [target]), None, AllocateReason.COPY)
        self._copy(sequence, source, target, block)

    def copy_blocks(self, sequence: Sequence, sources: Items[CopySource], why: AllocateReason) -> None:
        """Append copies of blocks that others may read to a sequence's own blocks."""
        if len(sources) == 1:
            self.copy_partial(sequence, sources[0], {each.slot for each in sources if each.cached})
        elif sources:
            first, count = len(sequence.tables[self.index]), len(sources)
            targets = self.primary.peek(count)
            self.events.allocate(packed_handles([sequence]), targets, [count], why)
            # Of the copies' retentions the last one's is inherited: that of the block that is stored next.
            for block in reversed(range(count)):
                self._copy(sequence, sources[block], targets[block], first + block)

    def _copy(self, sequence: Sequence, source: CopySource, target: int, block: int) -> None:
        self._emit(
            ev.BlocksCopied(
                handle=sequence.handle,
                group=self.index,
                source_level=source.level,
                source=source.slot,
                target=Slot(target),
                num_tokens=source.num_tokens,
                block=BlockIndex(block),
                transfer=self._state.next_transfer,
                priority=source.kept.priority,
                duration=source.kept.duration,
            )
        )

    def onboard(self, sequence: Sequence) -> None:
        """Onboard the secondary blocks that the sequence claimed, unless another sequence of its batch has."""
        waiting = self._state.awaiting_onboard.get(self.index, ())
        for row in [list(places.items()) for each, places in waiting if each is sequence]:
            # The rest of a row may have gaps, where another sequence has onboarded some of its blocks.
            for _, part in groupby(enumerate(row), lambda item: item[0] - item[1][1]):
                blocks = [place for _, place in part]
                first, slots = blocks[0][1], array("i", [slot for slot, _ in blocks])
                size, targets = self.key_bytes, self.primary.peek(len(slots))
                keys = bytes(sequence.keys[first * size : (first + len(slots)) * size])
                found = Piece(SECONDARY, first, slots, keys)
                self.events.move_up(sequence, found, targets, ev.MoveReason.ONBOARD)

    # -- storing

    def store(self, sequence: Sequence, *, partial: bool = False) -> list[Replacement]:
        """Make the sequence's computed full blocks reusable (and, at its end, the partial one after them).

        Where another sequence has stored them first, hold its blocks instead, with the retention that this one states;
        returns these replacements.
        """
        replaced: list[Replacement] = []
        if not self._reuse:
            return replaced
        size, computed, end = self.tokens_per_block, sequence.computed, sequence.path_ends[self.index].end
        full, first = computed // size, max(end, sequence.detached[self.index])
        stop = computed if partial and self._partial_reuse else full * size
        if self.group.shared:
            # Up to the first one that another sequence holds without a name: it must stay without.
            table, shared = sequence.tables[self.index], self.group.shared
            own = next((block for block in range(first, len(table)) if table[block] in shared), len(table))
            full, stop = min(full, own), min(stop, own * size)
        self._store_path(sequence, first, full, stop, replaced)
        if sequence.retention is not None:
            self.report_retention(sequence, end, sequence.path_ends[self.index].end)
        return replaced

    def store_filled(
        self, sequences: list[Sequence], handles: bytes
    ) -> list[tuple[Sequence, list[Replacement]]]:
        """Store the block that decoding has filled in each of these sequences; `handles` are theirs.

        Returns what `store` does, of those for which it was called. In a step of decoding many sequences fill a block,
        nearly always a new one. One `BlocksFilled` stores all with the same retention, if all of this holds; any other
        sequence is stored by `store`, in the order of the call.

        | of the window or the sequence | because `BlocksFilled` |
        |---|---|
        | blocks are reused, and none is shared without a name | looks at no table for a block that must not be named |
        | it has one block that is computed and not stored, the last but one | stores one block |
        | its path ends in a run that it alone makes longer (`_growing`) | makes that run longer and none new |
        | none of its tokens stands for an item or has an extra id | has names of plain tokens |
        | its names end with the block before, or this one if the first window has made it | has no other names |
        """
        if not self._reuse or self.group.shared:
            return [(sequence, self.store(sequence)) for sequence in sequences]
        alike: dict[BlockRetention, list[Sequence]] = {DEFAULT: sequences}
        if not self._state.default_retention_only:
            alike = {}
            for sequence in sequences:
                block = sequence.path_ends[self.index].end
                how = retention_of(sequence, self.index, block, self.tokens_per_block)
                alike.setdefault(how, []).append(sequence)
        left: set[Sequence] = set()
        for how, several in alike.items():
            left |= self._fill(several, handles if several is sequences else packed_handles(several), how)
        return (
            [(sequence, self.store(sequence)) for sequence in sequences if sequence in left] if left else []
        )

    def _fill(self, sequences: list[Sequence], handles: bytes, how: BlockRetention) -> set[Sequence]:
        """Store blocks with the same retention by one event, as in `store_filled`; returns the sequences left."""
        index, key_bytes, rich = self.index, self.key_bytes, self._rich
        size, chain, known, before = self.tokens_per_block, self._chain, self._known_keys, self._key_before
        grows, (priority, duration) = self._growing(), how
        blocks, slots = array("I"), array("i")
        parents, keys, left = [], [], set[Sequence]()
        for sequence in sequences:
            tail, table = sequence.path_ends[index], sequence.tables[index]
            block = tail.end
            if (
                block != len(table) - 2
                or not (tail.grows(priority, duration) if grows is None else grows(table, block))
                or (rich and sequence.handle in rich)
                or (key_bytes and len(sequence.keys) != block * key_bytes + known)
            ):
                left.add(sequence)
                continue
            blocks.append(block)
            slots.append(table[block])
            if key_bytes:
                parent = bytes(sequence.keys[before])
                parents.append(parent[:NAME_BYTES])
                if not known:
                    symbols = sequence.packed(block * size, block * size + size)
                    keys.append(chain(sequence.namespace, parent, symbols, len(symbols)))
        if left:
            handles = packed_handles([each for each in sequences if each not in left])
        if slots:
            self.events.fill(handles, blocks, slots, b"".join(parents), b"".join(keys), how)
        return left

    def _growing(self) -> Callable[[array[int], int], bool] | None:
        """Return a predicate: True if a sequence with this table may extend the cached path by this block; called once
        for each sequence that fills one. None: the end of its path decides.
        """
        return None

    def _take_stored(self, sequence: Sequence, blocks: Piece, replaced: list[Replacement]) -> None:
        """Hold another sequence's blocks instead of own ones; blocks in secondary move to these."""
        first, last = blocks.first, blocks.first + len(blocks.slots)
        own = sequence.tables[self.index][first:last]
        if blocks.level == SECONDARY:
            self.events.move_up(sequence, blocks, own, ev.MoveReason.RECOMPUTED)
            return
        places = zip(range(first, last), own, blocks.slots, strict=True)
        replaced += [Replacement(*place, self.window) for place in places]
        self.events.reuse(sequence, self.with_names_before(sequence, blocks), own[::-1].tobytes())

    def _store_new(self, sequence: Sequence, first: int, stop: int) -> None:
        """Store the blocks from `first` up to the token `stop`: by an event for each row with the same retention."""
        if sequence.retention is None and not sequence.inherited:
            self.events.store(sequence, first, stop, DEFAULT)  # nearly always
            return
        size = self.tokens_per_block
        for begin, end, how in rows(sequence, self.index, first, -(-stop // size), size):
            self.events.store(sequence, begin, min(end * size, stop), how)

    # -- retention

    def report_retention(self, sequence: Sequence, first: int, last: int) -> None:
        """Apply the stated retention, if any, to the cached blocks of its prompt from `first` up to `last`."""
        retention, size = sequence.retention, self.tokens_per_block
        last = min(last, self.blocks_for(sequence.num_prompt_tokens))
        for stated in () if retention is None else retention.ranges:
            begin = max(-(-stated.start // size), first)
            end = last if stated.stop is None else min(-(-stated.stop // size), last)
            how = stated.priority, stated.duration, ev.UpdateReason.RETENTION
            self.change_priority(sequence, begin, end, *how)

    def change_priority(
        self,
        sequence: Sequence,
        first: int,
        last: int,
        priority: int,
        duration: int | None,
        why: ev.UpdateReason,
        *,
        alone: bool = False,
    ) -> int:
        """Change the priority and duration (None: unchanged) of a sequence's cached blocks from `first` up to `last`,
        with `alone` only those without another holder; returns the number changed.

        One event for each row with the same retention. All rows are collected first: applying one splits and joins
        runs.
        """
        found = [
            row
            for row in (self._held_rows(sequence, first, last, alone=alone) if first < last else ())
            if row.kept.priority != priority or duration not in (None, row.kept.duration)
        ]
        for level, old, slots, names in found:
            self._emit(
                ev.BlocksUpdated(
                    group=self.index,
                    level=level,
                    slots=slots.tobytes(),
                    names=names,
                    old_priority=old.priority,
                    priority=priority,
                    handle=sequence.handle,
                    why=why,
                    duration=duration,
                )
            )
        return sum(len(row.slots) for row in found)


def _joined(row: list[Piece]) -> Piece:
    """Join pieces that continue each other at one level."""
    if len(row) == 1:
        return row[0]
    slots = array("i", b"".join([piece.slots for piece in row]))
    return row[0]._replace(slots=slots, keys=b"".join([piece.keys for piece in row]))


def in_all(matches: Items[AnyMatch], tokens_per_block: int, key_bytes: int) -> tuple[list[AnyMatch], int]:
    """Restrict the matches of all groups to what they have in common; returns them and their number of tokens.

    That is the largest number of full blocks that each can serve, and the fewest tokens that any has of one more.
    """
    if len(matches) == 1 and isinstance(matches[0], PathMatch):
        partial = matches[0].partial
        reused = 0 if partial is None else partial.num_tokens
        return list(matches), matches[0].blocks * tokens_per_block + reused
    blocks = again = min(found.blocks for found in matches)
    while (again := min(found.servable(blocks) for found in matches)) < blocks:
        blocks = again
    common = [found.limited(blocks, tokens_per_block, key_bytes) for found in matches]
    tokens = min(0 if found.partial is None else found.partial.num_tokens for found in common)
    for found in common:
        if found.partial is not None:
            found.partial = replace(found.partial, num_tokens=tokens) if tokens else None
    return common, blocks * tokens_per_block + tokens

"""The blocks visible to routers: a fold of events into stores and removals.

A router receives full blocks only, a block only when its bytes are in that place, a parent before its children,
removals from the leaves up, and no block twice while it is resident in a level. Offload and onboard appear as a removal
from one level at once and, when the copy has landed, a store in the other.

The fold keeps for each slot the fields of its block for routers, so that the whole visible state can be published again
at any time (`Feed.snapshot`). It runs once, before any queue that may lose something: a fold that missed a batch can
never be right again until it meets a `StateExported`.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Iterator

from events import types as ev
from events.feed.cache_fold import ExportedRun, SequenceFold, exported_runs
from events.feed.changes import Change, Cleared, Removed, Stored, expand_symbols
from events.feed.slots import ANNOUNCED, IN_FLIGHT, WAITING, FrozenBlocks, SlotColumns, visible_blocks
from events.packed import NAME_BYTES, TOKEN_BYTES, names_of_keys, split_names
from events.tokens.symbols import SymbolTable
from events.types import PRIMARY, SECONDARY, SLIDING, MoveReason

_unpack_handles = struct.Struct("<q").iter_unpack
_unpack_numbers = struct.Struct("<I").iter_unpack


class Feed(SequenceFold[Change]):
    """Folds batches into the changes visible to routers. Needs a stream that holds token ids."""

    _changes: list[Change]

    def __init__(self) -> None:
        super().__init__()
        self._both: list[SlotColumns] = []
        """Columns per group, of primary and secondary together."""
        self._columns: list[tuple[SlotColumns, SlotColumns]] = []
        self._transfers: dict[int, tuple[int, int, array[int]]] = {}
        """Copy to (group, level, slots from the shallowest block on)."""
        self._waiting: list[dict[bytes, list[tuple[int, array[int], bytes]]]] = []
        """Per group, by the parent that is not visible yet: consecutive blocks, as (level, slots, names)."""
        self._slides: list[bool] = []
        """Per group: True if its window leaves blocks, so that a block may be there without its parent."""
        self._hidden: list[set[bytes]] = []
        """Per group: cached full blocks that routers do not know yet, in flight or waiting for their parent; none if
        the window slides, since no block waits then."""
        self._handlers |= {
            ev.BlocksStored: self._store,
            ev.BlocksFilled: self._fill,
            ev.BlocksMoved: self._move,
            ev.BlocksRemoved: self._remove,
            ev.TransferLanded: self._land,
            ev.TransferFailed: self._fail,
            ev.CacheCleared: self._clear,
        }

    def snapshot(self) -> Iterator[Change]:
        """Yield all blocks visible at the time of this call, as stores, parents first; later folds do not affect it.

        A store has all blocks of one prefix up to where it branches. A block in flight to another level that has
        visible descendants is stored, and removed again at the end.
        """
        groups = zip(self.groups, self._both, self._slides, strict=True)
        frozen = [both.freeze(group.num_blocks[PRIMARY], slides) for group, both, slides in groups]
        return _expanded_changes(frozen, self._symbols.copy())

    # -- the cache

    def _forget(self) -> None:
        super()._forget()
        columns = [SlotColumns.of_levels(*group.num_blocks, self.tokens_per_block) for group in self.groups]
        self._both, self._columns = [both for both, _ in columns], [levels for _, levels in columns]
        self._hidden = [set() for _ in self.groups]
        self._slides = [group.kind == SLIDING for group in self.groups]
        self._transfers.clear()
        self._waiting = [{} for _ in self.groups]

    def _clear(self, event: ev.CacheCleared) -> None:
        for columns in self._both:
            columns.clear()
        for hidden in self._hidden:
            hidden.clear()
        for waiting in self._waiting:
            waiting.clear()
        self._changes.append(Cleared())

    def _install_blocks(self, event: ev.StateExported) -> None:
        for group, exported in enumerate(event.groups):
            for run in exported_runs(exported, self.tokens_per_block, self._key_bytes):
                self._install_run(group, run)
        for item in event.transfers:
            slots = array("i", item.slots)
            if item.level == SECONDARY and not self._slides[item.group]:
                slots.reverse()  # offloads name the deepest block first
            self._transfers[item.transfer] = (item.group, item.level, slots)

    def _install_run(self, group: int, run: ExportedRun) -> None:
        """Write the full blocks of an exported run."""
        size = self.tokens_per_block
        for (level, _, transfer), begin, end in run.pieces():
            names = run.names[begin * NAME_BYTES : end * NAME_BYTES]
            parent = run.name_before(begin)
            tokens = run.symbols[begin * size * TOKEN_BYTES : end * size * TOKEN_BYTES]
            stored = Stored(group, level, names, parent, tokens, size, run.namespace)
            state = IN_FLIGHT if transfer else ANNOUNCED if self._is_visible(group, parent) else WAITING
            self._columns[group][level].write(run.slots[begin:end], stored, state, transfer)
            if state != ANNOUNCED and not self._slides[group]:
                self._hidden[group].update(split_names(names))
            if state == WAITING:
                self._wait(stored, run.slots[begin:end])

    # -- blocks

    def _store(self, event: ev.BlocksStored) -> None:
        size, first_block = self.tokens_per_block, event.first_block
        sequence, slots = self._sequences[event.handle], array("i", event.slots)
        sequence.name_up_to(first_block + len(slots), names_of_keys(event.keys, self._key_bytes))
        if event.last_tokens < size:
            slots.pop()  # routers see full blocks only
        count = len(slots)
        if not count:
            return
        names = bytes(sequence.names[first_block * NAME_BYTES : (first_block + count) * NAME_BYTES])
        first = first_block * size
        tokens = sequence.packed(first, first + count * size)
        self._place(
            slots, Stored(event.group, event.level, names, event.parent, tokens, size, sequence.namespace)
        )

    def _fill(self, event: ev.BlocksFilled) -> None:
        group, size, keys, parents = event.group, self.tokens_per_block, event.keys, event.parents
        columns, key_bytes = self._columns[group][PRIMARY], self._key_bytes
        # Then all parents are visible and all symbols are tokens, as nearly always.
        usual = not (self._hidden[group] or self._symbols.pages)
        key_at = parent_at = 0
        blocks, slots = _unpack_numbers(event.blocks), _unpack_numbers(event.slots)
        for (handle,), (block,), (slot,) in zip(_unpack_handles(event.handles), blocks, slots, strict=True):
            sequence = self._sequences[handle]
            names, name_at, namespace = sequence.names, block * NAME_BYTES, sequence.namespace
            if not keys:
                name = bytes(names[name_at : name_at + NAME_BYTES])
            else:
                name = keys[key_at : key_at + NAME_BYTES]
                key_at += key_bytes
                if len(names) == name_at:
                    names += name
                else:
                    sequence.name(block, name)
            parent = parents[parent_at : parent_at + NAME_BYTES]
            parent_at += NAME_BYTES
            tokens = sequence.packed(block * size, block * size + size)
            stored = Stored(group, PRIMARY, name, parent, tokens, size, namespace)
            if usual and not namespace.uses_extra_ids:
                columns.write_one(slot, stored, ANNOUNCED)
                self._changes.append(stored)
            else:
                self._place(array("i", (slot,)), stored)

    def _place(self, slots: array[int], stored: Stored) -> None:
        """Write computed blocks, and announce them if their parent is there."""
        group, level, names = stored.group, stored.level, stored.names
        columns = self._columns[group][level]
        if self._is_visible(group, stored.parent):
            columns.write(slots, stored, ANNOUNCED)
            self._announce(stored)
        else:
            columns.write(slots, stored, WAITING)
            self._hidden[group].update(split_names(names))
            self._wait(stored, slots)

    def _is_visible(self, group: int, parent: bytes) -> bool:
        # A cached block's parent is cached, so routers know it unless it is among those that they do not know yet. In a
        # sliding window it need not be, no block is hidden, and routers receive a block as soon as it is there.
        return parent not in self._hidden[group]

    def _wait(self, stored: Stored, slots: array[int]) -> None:
        self._waiting[stored.group].setdefault(stored.parent, []).append((stored.level, slots, stored.names))

    def _announce(self, stored: Stored) -> None:
        """Announce newly visible blocks, and all that have waited for them."""
        visible = deque([stored])
        while visible:
            stored = visible.popleft()
            self._changes.append(expand_symbols(stored, self._symbols))
            hidden, waiting = self._hidden[stored.group], self._waiting[stored.group]
            if not hidden:
                continue
            names = split_names(stored.names)
            hidden.difference_update(names)
            for name in names if waiting else ():
                for level, slots, kept in waiting.pop(name, ()):
                    # Some may have been moved or removed meanwhile; their children wait for other parents.
                    for piece in self._columns[stored.group][level].pieces(slots, kept, WAITING):
                        visible.extend(self._show(stored.group, level, piece))

    def _show(self, group: int, level: int, slots: array[int]) -> Iterator[Stored]:
        """Mark consecutive blocks as visible and yield them, or let them wait for their parent."""
        columns = self._columns[group][level]
        stored = columns.read(slots, group, level)
        if self._is_visible(group, stored.parent):
            columns.set_state(slots, ANNOUNCED)
            yield stored
        else:
            columns.set_state(slots, WAITING)
            self._wait(stored, slots)

    def _withdraw(self, group: int, level: int, slots: bytes, names: bytes) -> None:
        """Remove the blocks of these names from these slots, shallowest last."""
        columns, hidden = self._columns[group][level], self._hidden[group]
        if hidden:
            hidden.difference_update(split_names(columns.names_in(slots)))
        gone = columns.take_out(slots, names)
        if gone:
            self._changes.append(Removed(group, level, gone))

    def _remove(self, event: ev.BlocksRemoved) -> None:
        waiting = self._waiting[event.group]
        for name in split_names(event.names) if waiting else ():
            waiting.pop(name, None)  # its descendants were removed before
        self._withdraw(event.group, event.level, event.slots, event.names)

    def _move(self, event: ev.BlocksMoved) -> None:
        columns = self._columns[event.group]
        source, target = columns[event.from_level], columns[event.to_level]
        from_slots, to_slots = array("i", event.from_slots), array("i", event.to_slots)
        slides = self._slides[event.group]
        leaves_first = event.why == MoveReason.OFFLOAD and not slides
        if leaves_first:
            from_slots.reverse()
            to_slots.reverse()
        target.copy_from(source, from_slots, to_slots, event.transfer)
        full = split_names(source.names_in(event.from_slots))
        from_slots.reverse()
        names = event.names if leaves_first else b"".join(split_names(event.names)[::-1])
        self._withdraw(event.group, event.from_level, from_slots.tobytes(), names)
        if not slides:
            self._hidden[event.group].update(full)
        if event.handle is not None and event.why != MoveReason.OFFLOAD:
            self._sequences[event.handle].name(event.first_block, event.names)
        if event.transfer:
            self._transfers[event.transfer] = (event.group, event.to_level, to_slots)
        else:
            self._arrive(event.group, event.to_level, to_slots, 0)

    def _land(self, event: ev.TransferLanded) -> None:
        for transfer in array("q", event.transfers):
            moved = self._transfers.pop(transfer, None)
            # Else it was a copy of the beginning of a block, which is stored when the rest is computed.
            if moved is not None:
                self._arrive(*moved, transfer)

    def _arrive(self, group: int, level: int, slots: array[int], transfer: int) -> None:
        for chain in self._columns[group][level].chains(slots, transfer):
            for stored in self._show(group, level, chain):
                self._announce(stored)

    def _fail(self, event: ev.TransferFailed) -> None:
        """Handle a failed copy: cached blocks go with the `CacheCleared` that follows."""
        for transfer in array("q", event.transfers):
            self._transfers.pop(transfer, None)


def _expanded_changes(groups: list[FrozenBlocks], symbols: SymbolTable) -> Iterator[Change]:
    for group, blocks in enumerate(groups):
        for change in visible_blocks(group, blocks):
            yield expand_symbols(change, symbols) if isinstance(change, Stored) else change

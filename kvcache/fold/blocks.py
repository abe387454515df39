"""How events about blocks change the state: the half of `CacheState` that knows slots, runs and copies.

Only `CacheState.apply` calls what is here.
"""

from __future__ import annotations

from array import array

from events import types as ev
from events.ids import MAX_NUMBER
from events.packed import NAME_BYTES
from events.types import PRIMARY, SECONDARY, MoveReason
from kvcache.errors import InvariantViolated, invariant
from kvcache.fold.contents import Contents, Transfer
from kvcache.fold.group_state import GroupState
from kvcache.fold.slots import PRIORITY_MAX


class BlockFold(Contents):
    """Folds the events that are about blocks and copies."""

    def _allocate(self, event: ev.BlocksAllocated) -> None:
        index, sequences = event.group, self.sequences
        slots = array("i", event.slots)
        self.groups[index].levels[PRIMARY].take_slots(slots)
        handles = array("q", event.handles)
        if not event.counts:
            for handle, slot in zip(handles, slots, strict=True):
                sequences[handle].tables[index].append(slot)
            return
        start = 0
        for handle, count in zip(handles, array("I", event.counts), strict=True):
            sequences[handle].tables[index].extend(slots[start : start + count])
            start += count
        invariant(start == len(slots), "slots were allocated for no sequence")

    def _reuse(self, event: ev.BlocksReused) -> None:
        group, sequence = self.groups[event.group], self.sequences[event.handle]
        _check_level(event.level)
        slots = array("i", event.slots)
        invariant(len(slots) > 0, "no block was reused")
        tail = group.claim(sequence.path_ends[event.group], event.level, slots)
        sequence.path_ends[event.group] = tail
        if event.level == SECONDARY:
            slots = array("i", [-1]) * len(slots)  # until `BlocksMoved` brings them
            self.awaiting_onboard.setdefault(event.group, []).append(sequence)
        table = sequence.tables[event.group]
        first = event.first_block
        invariant(0 <= first <= len(table), "reused blocks leave a hole in the table")
        if event.replaced:
            own = table[first : first + len(slots)]
            own.reverse()
            invariant(own.tobytes() == event.replaced, "the slots that a sequence gives back are not its own")
        table[first : first + len(slots)] = slots
        if event.replaced:
            group.return_uncached(array("i", event.replaced))
        else:
            self.set_computed(sequence, max(sequence.computed, tail.end * self.tokens_per_block))
        group.settle(tail)

    def _copy(self, event: ev.BlocksCopied) -> None:
        sequence = self.sequences[event.handle]
        reached = event.block * self.tokens_per_block + event.num_tokens
        self.set_computed(sequence, max(sequence.computed, reached))
        target = array("i", [event.target])
        self._track(event.transfer, Transfer(event.group, PRIMARY, target, event.handle))

    def _store(self, event: ev.BlocksStored) -> None:
        index, first = event.group, event.first_block
        invariant(event.level == PRIMARY, "blocks are stored in primary")
        group, sequence = self.groups[index], self.sequences[event.handle]
        tail = sequence.path_ends[index]
        slots = array("i", event.slots)
        last = first + len(slots)
        if not slots or tail.end != first or sequence.tables[index][first:last] != slots:
            raise InvariantViolated("stored blocks do not continue the sequence's cached prefix")
        key_bytes = group.tree.key_bytes
        if event.parent != (tail.key_of_last(key_bytes)[:NAME_BYTES] if first else b""):
            raise InvariantViolated("stored blocks continue a block of another name")
        if len(event.keys) != len(slots) * key_bytes:
            raise InvariantViolated("stored blocks have other names than there are blocks")
        size = self.tokens_per_block
        partial = event.last_tokens % size
        if self.tokens_recorded:
            stop = last * size - (size - partial if partial else 0)
            symbols = sequence.packed(first * size, stop)
        else:
            symbols = event.keys
        sequence.path_ends[index] = group.store(tail, symbols, slots, event.keys, event.priority, partial)
        self.changed_blocks += len(slots)

    def _fill(self, event: ev.BlocksFilled) -> None:
        index, size = event.group, self.tokens_per_block
        group = self.groups[index]
        blocks, slots = array("I", event.blocks), array("i", event.slots)
        key_bytes, key, at = group.tree.key_bytes, b"", 0
        named = len(slots) * NAME_BYTES if key_bytes else 0
        if len(event.keys) != len(slots) * key_bytes or len(event.parents) != named:
            raise InvariantViolated("filled blocks have other names than there are blocks")
        owner, block_bytes, parents = group.levels[PRIMARY].run_ids, group.tree.block_bytes, b""
        # Of the parent's key, what is its name; counted from the end, where its run ends.
        name = slice(-key_bytes, NAME_BYTES - key_bytes or None)
        filling = map(self.sequences.__getitem__, array("q", event.handles))
        for sequence, block, slot in zip(filling, blocks, slots, strict=True):
            run = sequence.path_ends[index]
            if run.end != block or sequence.tables[index][block] != slot or not run.grows(event.priority):
                raise InvariantViolated("a filled block does not continue what its sequence alone has cached")
            if key_bytes:
                parents += run.keys[name]  # type: ignore[attr-defined]  # what grows is a run
                key = event.keys[at : at + key_bytes]
                at += key_bytes
            symbols = sequence.packed(block * size, (block + 1) * size) if self.tokens_recorded else key
            if len(symbols) != block_bytes:
                raise InvariantViolated("a filled block is not full")
            owner[slot] = run.extend(symbols, slot, key)
        if parents != event.parents:
            raise InvariantViolated("filled blocks continue blocks of other names")
        self.changed_blocks += len(slots)

    def _update(self, event: ev.BlocksUpdated) -> None:
        _check_level(event.level)
        invariant(0 <= event.priority <= PRIORITY_MAX, "there is no such priority")
        slots = array("i", event.slots)
        self.groups[event.group].update(event.level, slots, event.old_priority, event.priority)
        self.changed_blocks += len(slots)

    def _move(self, event: ev.BlocksMoved) -> None:
        group = self.groups[event.group]
        _check_level(event.to_level)
        from_slots, to_slots = array("i", event.from_slots), array("i", event.to_slots)
        self.changed_blocks += len(from_slots)
        if event.why == MoveReason.RECOMPUTED:
            self._take_over(group, event, from_slots, to_slots)
            return
        if event.why == MoveReason.OFFLOAD:
            group.levels[SECONDARY].take_slots(to_slots)
            group.offload(from_slots, to_slots, event.transfer)
        else:
            assert event.handle is not None
            group.levels[PRIMARY].take_slots(to_slots)
            group.onboard(from_slots, to_slots, event.transfer)
            group.settle(self.sequences[event.handle].path_ends[event.group])  # type: ignore[arg-type]
            self._fill_tables(event.group)
        onboarded = event.handle if event.why == MoveReason.ONBOARD else None
        self._track(event.transfer, Transfer(event.group, event.to_level, to_slots, onboarded))

    def _fill_tables(self, index: int) -> None:
        """Enter onboarded blocks into the tables of all that claimed them: several requests of one batch may have.

        Each gets what lies on its own path: a request may share only the start of what another one has onboarded.
        """
        group, waiting = self.groups[index], []
        for sequence in self.awaiting_onboard.pop(index, ()):
            table = sequence.tables[index]
            for run in group.path(sequence.path_ends[index]):
                if run.level == PRIMARY:
                    table[run.start : run.end] = run.slots
            if -1 in table:
                waiting.append(sequence)
        if waiting:
            self.awaiting_onboard[index] = waiting

    def _take_over(self, group: GroupState, event: ev.BlocksMoved, old: array[int], new: array[int]) -> None:
        """A sequence computed what lay in secondary: its own slots hold the blocks from now on."""
        assert event.handle is not None
        sequence = self.sequences[event.handle]
        table = sequence.tables[event.group]
        first = event.first_block
        invariant(table[first : first + len(new)] == new, "the slots are not the sequence's")
        tail = group.claim(sequence.path_ends[event.group], SECONDARY, old)
        group.onboard(old, new, 0)
        sequence.path_ends[event.group] = tail
        group.settle(tail)

    def _remove(self, event: ev.BlocksRemoved) -> None:
        _check_level(event.level)
        slots = array("i", event.slots)
        self.changed_blocks += len(slots)
        self.groups[event.group].remove(event.level, slots)

    # -- copies

    def _track(self, transfer_id: int, transfer: Transfer) -> None:
        invariant(self.next_transfer <= transfer_id <= MAX_NUMBER, "a transfer id was used twice")
        self.transfers[transfer_id] = transfer
        self.next_transfer = transfer_id + 1

    def _land(self, event: ev.TransferLanded) -> None:
        for transfer_id in array("q", event.transfers):
            transfer = self.transfers.pop(transfer_id)
            self.groups[transfer.group].land(transfer.level, transfer.slots, transfer_id)

    def _fail(self, event: ev.TransferFailed) -> None:
        """Whatever was computed may rest on what did not arrive, so every sequence begins again.

        What is cached goes with the `CacheCleared` that follows.
        """
        for transfer_id in array("q", event.transfers):
            del self.transfers[transfer_id]
        for sequence in self.sequences.values():
            self.set_computed(sequence, 0)


def _check_level(level: int) -> None:
    if level not in (PRIMARY, SECONDARY):
        raise InvariantViolated("there is no such level")

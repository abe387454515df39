"""How events about blocks change the state: the half of `CacheState` that knows slots, runs and copies.

Only `CacheState.apply` calls what is here.
"""

from __future__ import annotations

from array import array

from events import types as ev
from events.ids import MAX_NUMBER
from events.packed import CHECKSUM_BYTES, NAME_BYTES
from events.types import PRIMARY, SECONDARY, MoveReason
from kvcache.errors import InvariantViolated, invariant
from kvcache.fold.contents import Contents, Transfer
from kvcache.fold.sequence import ONBOARDING, Sequence
from kvcache.fold.slots import DEFAULT_PRIORITY, PRIORITY_MAX

_NO_KEY = bytearray()
_RESERVE = ev.AllocateReason.RESERVE


class BlockFold(Contents):
    """Folds the events that are about blocks and copies."""

    def _allocate(self, event: ev.BlocksAllocated) -> None:
        index, sequences = event.group, self.sequences
        slots = array("i", event.slots)
        self.groups[index].levels[PRIMARY].take_slots(slots)
        handles = array("q", event.handles)
        if event.why is _RESERVE:
            for handle in handles:
                # It has other slots from now on than its tokens need, so it does not decode like others.
                self.set_computed(sequences[handle], sequences[handle].computed)
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
        slots, first = array("i", event.slots), event.first_block
        table = sequence.tables[event.group]
        invariant(len(slots) > 0, "no block was reused")
        invariant(0 <= first <= len(table), "reused blocks leave a hole in the table")
        group.hold(sequence, event.level, first, slots)
        if event.level == SECONDARY:
            # Until `BlocksMoved` brings them.
            places = dict(zip(slots, range(first, first + len(slots)), strict=True))
            self.awaiting_onboard.setdefault(event.group, []).append((sequence, places))
            slots = array("i", [ONBOARDING]) * len(slots)
        if event.replaced:
            own = table[first : first + len(slots)]
            own.reverse()
            invariant(own.tobytes() == event.replaced, "the slots that a sequence gives back are not its own")
        table[first : first + len(slots)] = slots
        if event.replaced:
            group.return_uncached(array("i", event.replaced))

    def _copy(self, event: ev.BlocksCopied) -> None:
        target = array("i", [event.target])
        self._track(event.transfer, Transfer(event.group, PRIMARY, target, event.handle))
        sequence = self.sequences[event.handle]
        copied = ev.Inherited(event.group, event.block, event.priority, event.duration)
        if sequence.inherited or (copied.priority, copied.duration) != (DEFAULT_PRIORITY, 0):
            others = [each for each in sequence.inherited if each.group != event.group]
            sequence.inherited = (*others, copied)
            self.all_kept_alike = False

    def _store(self, event: ev.BlocksStored) -> None:
        index, first, size = event.group, event.first_block, self.tokens_per_block
        invariant(event.level == PRIMARY, "blocks are stored in primary")
        sequence, slots = self.sequences[event.handle], array("i", event.slots)
        last = first + len(slots)
        if not slots or first < 0 or sequence.tables[index][first:last] != slots:
            raise InvariantViolated("stored blocks are not the sequence's")
        invariant(0 < event.last_tokens <= size, "a stored block has an impossible number of tokens")
        group, keys = self.groups[index], sequence.keys
        key_bytes = group.tree.key_bytes
        keys += event.keys
        if len(keys) < last * key_bytes or (event.keys and len(keys) != last * key_bytes):
            raise InvariantViolated("stored blocks have other names than there are blocks")
        if event.parent != (keys[(first - 1) * key_bytes :][:NAME_BYTES] if first and key_bytes else b""):
            raise InvariantViolated("stored blocks continue a block of another name")
        group.store(sequence, first, slots, event.priority, event.duration, event.last_tokens)
        self.changed_blocks += len(slots)

    def _fill(self, event: ev.BlocksFilled) -> None:
        group, sequences = self.groups[event.group], self.sequences
        blocks, slots = array("I", event.blocks), array("i", event.slots)
        filling = [sequences[handle] for handle in array("q", event.handles)]
        keys = self._name_filled(event, filling, blocks)
        group.fill(filling, blocks, slots, keys, event.priority, event.duration)
        self.changed_blocks += len(slots)

    def _name_filled(
        self, event: ev.BlocksFilled, filling: list[Sequence], blocks: array[int]
    ) -> list[bytes | bytearray]:
        """The keys of the blocks that these sequences have filled, which they know now if no event had told them."""
        # Mostly one block or two: a plain loop takes half the time of anything that works on all of them at once.
        size, given, parents = self.hashing.key_bytes, event.keys, event.parents
        if not (size or given or parents):
            return [_NO_KEY] * len(blocks)
        if len(given) not in (0, len(blocks) * size):
            raise InvariantViolated("filled blocks have other names than there are blocks")
        at, above, filled = 0, bytearray(), []
        for sequence, block in zip(filling, blocks, strict=True):
            keys, end = sequence.keys, block * size
            if given:
                key: bytes | bytearray = given[at : at + size]
                keys += key
                at += size
            else:
                key = keys[end:]
            if len(keys) != end + size:
                raise InvariantViolated("a filled block has other names than one")
            above += keys[end - size : end - size + NAME_BYTES]
            filled.append(key)
        if above != parents:
            raise InvariantViolated("filled blocks continue blocks of other names")
        return filled

    def _update(self, event: ev.BlocksUpdated) -> None:
        _check_level(event.level)
        invariant(0 <= event.priority <= PRIORITY_MAX, "there is no such priority")
        slots, group = array("i", event.slots), self.groups[event.group]
        change = event.level, slots, event.old_priority, event.priority
        if event.why == ev.UpdateReason.EXPIRED:
            self.tell_time(event.clock)
            self.releases = group.expire(*change, self.releases)
        else:
            group.update(*change, event.duration)
        self.changed_blocks += len(slots)

    def _move(self, event: ev.BlocksMoved) -> None:
        group = self.groups[event.group]
        _check_level(event.to_level)
        from_slots, to_slots = array("i", event.from_slots), array("i", event.to_slots)
        self.changed_blocks += len(from_slots)
        if event.why == MoveReason.OFFLOAD:
            group.levels[SECONDARY].take_slots(to_slots)
            group.offload(from_slots, to_slots, event.transfer)
            self._track(event.transfer, Transfer(event.group, SECONDARY, to_slots, None))
            return
        assert event.handle is not None
        sequence = self.sequences[event.handle]
        if event.why == MoveReason.RECOMPUTED:
            first = event.first_block
            own = sequence.tables[event.group][first : first + len(to_slots)]
            invariant(own == to_slots, "the slots are not the sequence's")
            group.take_over(sequence, first, from_slots, to_slots)
            return
        group.levels[PRIMARY].take_slots(to_slots)
        group.onboard(sequence, from_slots, to_slots, event.transfer)
        self._fill_tables(event.group, from_slots, to_slots)
        self._track(event.transfer, Transfer(event.group, PRIMARY, to_slots, event.handle))

    def _fill_tables(self, index: int, from_slots: array[int], to_slots: array[int]) -> None:
        """Enter onboarded blocks into the tables of all that claimed them: several requests of one batch may have."""
        waiting = self.awaiting_onboard.pop(index, [])
        for sequence, places in waiting:
            table = sequence.tables[index]
            for old, new in zip(from_slots, to_slots, strict=True):
                block = places.pop(old, None)
                if block is not None:
                    table[block] = new
        left = [(sequence, places) for sequence, places in waiting if places]
        if left:
            self.awaiting_onboard[index] = left

    def _remove(self, event: ev.BlocksRemoved) -> None:
        _check_level(event.level)
        slots = array("i", event.slots)
        self.changed_blocks += len(slots)
        group = self.groups[event.group]
        if event.why == ev.RemoveReason.INVALIDATED and event.level == PRIMARY:
            group.invalidate(slots, self.sequences.values())
        else:
            group.remove(event.level, slots, event.why)

    def _detach(self, event: ev.BlocksDetached) -> None:
        sequences = [self.sequences[handle] for handle in array("q", event.handles)]
        counts = array("I", event.counts) if event.counts else None
        self.tell_time(event.clock)
        slots, freed = self.groups[event.group].detach(sequences, counts, self.releases, self.clock)
        self.releases += len(sequences)
        if slots.tobytes() != event.slots or freed.tobytes() != event.freed:
            raise InvariantViolated("other blocks were let go of than the window has left behind")

    def _return(self, event: ev.BlocksReturned) -> None:
        counts, slots, group = array("I", event.counts), array("i", event.slots), self.groups[event.group]
        invariant(sum(counts) == len(slots), "other slots are returned than counted")
        start = 0
        for handle, count in zip(array("q", event.handles), counts, strict=True):
            sequence, returned = self.sequences[handle], slots[start : start + count]
            table, start = sequence.tables[event.group], start + count
            needed = max(sequence.computed, 1)
            invariant(
                0 < count <= len(table) - -(-needed // self.tokens_per_block),
                "slots are returned that are in use",
            )
            invariant(
                table[: -count - 1 : -1] == returned, "the slots that a sequence gives back are not its own"
            )
            invariant(
                group.return_uncached(returned) == returned,
                "the slots that a sequence gives back are not its own",
            )
            del table[-count:]
            self.running.forget_row()

    # -- copies

    def _track(self, transfer_id: int, transfer: Transfer) -> None:
        invariant(self.next_transfer <= transfer_id <= MAX_NUMBER, "a transfer id was used twice")
        self.transfers[transfer_id] = transfer
        self.next_transfer = transfer_id + 1

    def _land(self, event: ev.TransferLanded) -> None:
        begin = 0
        for transfer_id in array("q", event.transfers):
            transfer = self.transfers.pop(transfer_id)
            group = self.groups[transfer.group]
            group.land(transfer.level, transfer.slots, transfer_id)
            if transfer.level == SECONDARY:
                end = begin + (CHECKSUM_BYTES * len(transfer.slots) if event.checksums else 0)
                # Those of slots that have another owner by now are replaced when its own copy lands.
                group.levels[SECONDARY].note_checksums(transfer.slots, event.checksums[begin:end])
                begin = end
        invariant(begin == len(event.checksums), "other blocks have checksums than were copied")

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

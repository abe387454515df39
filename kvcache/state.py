"""The state of the cache: a fold over events.

`CacheState.apply` is the only code that changes it, live and in replay. It knows no clock, file, socket, thread or
tensor. It trusts that an event was decided for this state, but checks what it can afford: an event that does not
fit raises `InvariantViolated` instead of corrupting silently.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from events import types as ev
from events.hashing import ALGORITHMS, HashAlgorithm
from events.sequence_tokens import RunningTokens
from events.symbols import SymbolTable, rich_end
from events.types import PRIMARY, SECONDARY, MoveReason, Namespace, RemoveReason, RequestId
from kvcache.errors import InvariantViolated, invariant
from kvcache.group_state import GroupState
from kvcache.prefix_tree import SYMBOL_BYTES, Node
from kvcache.sequence import Sequence
from kvcache.shape import check_created, longest_sequence
from kvcache.slots import PRIORITY_MAX


class Transfer:
    """A copy whose landing is not yet known."""

    __slots__ = ("first_block", "group", "handle", "level", "slots")

    def __init__(
        self, group: int, level: int, slots: array[int], handle: int | None, first_block: int
    ) -> None:
        self.group = group
        self.level = level
        self.slots = slots
        self.handle = handle
        """The sequence that must not have computed beyond `first_block` if this copy fails."""
        self.first_block = first_block


class CacheState:
    """Everything the cache knows. Starts empty; `CacheCreated` gives it its shape."""

    def __init__(self, *, tokens_recorded: bool = True) -> None:
        self.tokens_recorded = tokens_recorded
        """False: a log without tokens; blocks are then matched by their keys."""
        self.epoch = 0
        self.created: ev.CacheCreated | None = None
        self.groups: list[GroupState] = []
        self.hashing: HashAlgorithm = ALGORITHMS["none"]
        self.tokens_per_block = 1
        self.longest = 0
        """Tokens that a sequence can have at most."""
        self.sequences: dict[int, Sequence] = {}
        self.handles: dict[RequestId, int] = {}
        self.running = RunningTokens(self.sequences)
        self.symbols = SymbolTable()
        self.rich: dict[int, int] = {}
        """Sequences with symbols below 0, by handle: how many tokens there are up to the last one."""
        self.transfers: dict[int, Transfer] = {}
        self.next_handle = 1
        self.next_transfer = 1
        self.stamp = 0
        """Raised by each release."""
        self.changed_blocks = 0
        """Blocks stored, updated, moved and removed since the last checkpoint."""
        self.handlers: dict[type, Callable[[Any], None]] = {
            ev.CacheCreated: self._create,
            ev.EpochStarted: self._start_epoch,
            ev.StateExported: self._install,
            ev.Gap: _ignore,
            ev.SequenceAdded: self._add_sequence,
            ev.BlocksAllocated: self._allocate,
            ev.BlocksReused: self._reuse,
            ev.BlocksCopied: self._copy,
            ev.BlocksStored: self._store,
            ev.BlocksFilled: self._fill,
            ev.BlocksUpdated: self._update,
            ev.BlocksMoved: self._move,
            ev.BlocksRemoved: self._remove,
            ev.TokensAppended: self._append_tokens,
            ev.ContextComputed: self._compute,
            ev.SequenceRemoved: self._remove_sequence,
            ev.TransferLanded: self._land,
            ev.TransferFailed: self._fail,
            ev.CacheCleared: self._clear,
            ev.Checkpoint: self._checkpoint,
            ev.SymbolsInterned: self.symbols.intern,
            ev.SymbolsForgotten: self.symbols.forget,
            ev.AdmissionRefused: _ignore,
        }

    def apply(self, event: ev.Event) -> None:
        """Change the state by one event."""
        self.handlers[type(event)](event)

    # -- life of the cache

    def _create(self, event: ev.CacheCreated) -> None:
        check_created(event)
        self.created = event
        self.longest = longest_sequence(event)
        self.hashing = ALGORITHMS[event.hash_algorithm]
        self.tokens_per_block = event.tokens_per_block
        block_bytes = event.tokens_per_block * SYMBOL_BYTES if self.tokens_recorded else event.key_bytes
        self.groups = [
            GroupState(group.num_blocks, event.tokens_per_block, block_bytes, event.key_bytes)
            for group in event.groups
        ]
        self.sequences.clear()
        self.handles.clear()
        self.transfers.clear()
        self.running.forget()
        self.symbols.clear()
        self.rich.clear()
        self.changed_blocks = 0

    def _start_epoch(self, event: ev.EpochStarted) -> None:
        self.epoch = event.epoch
        self.tokens_recorded = event.tokens_recorded

    def _install(self, event: ev.StateExported) -> None:
        from kvcache.exported_state import install  # exported_state describes this class

        self.running.forget()
        install(self, event)

    def _checkpoint(self, event: ev.Checkpoint) -> None:
        self.changed_blocks = 0

    def _clear(self, event: ev.CacheCleared) -> None:
        removed, unnamed = (0, 0), 0
        for group in self.groups:
            counts, kept = group.clear()
            removed = (removed[0] + counts[0], removed[1] + counts[1])
            unnamed += kept
        invariant(removed == event.removed and unnamed == event.unnamed, "another state was cleared")
        for sequence in self.sequences.values():
            sequence.tails = self._roots(sequence.namespace)
        self.changed_blocks += sum(removed) + unnamed

    # -- sequences

    def root_key(self, namespace: Namespace) -> bytes:
        """The key that the first block of a prompt continues."""
        return self.hashing.root_key(namespace)

    def _roots(self, namespace: Namespace) -> list[Node]:
        return [
            group.tree.roots.get(namespace) or group.root(namespace, self.root_key(namespace))
            for group in self.groups
        ]

    def _add_sequence(self, event: ev.SequenceAdded) -> None:
        invariant(event.handle >= self.next_handle, "a handle was used twice")
        invariant(event.request_id not in self.handles, "a request was admitted twice")
        tokens = self.tokens_of(event.num_tokens, event.tokens)
        roots = self._roots(event.namespace)
        self.sequences[event.handle] = Sequence(
            event.handle, event.request_id, event.namespace, tokens, roots
        )
        self.handles[event.request_id] = event.handle
        self.note_rich(event.handle, event.tokens)
        self.next_handle = event.handle + 1
        for group in self.groups:
            group.tree.roots[event.namespace].users += 1

    def note_rich(self, handle: int, symbols: bytes) -> None:
        """Note how far a prompt has symbols below 0, so that nobody has to look through a plain one."""
        if self.symbols.pages and (end := rich_end(symbols)):
            self.rich[handle] = end

    def tokens_of(self, num_tokens: int, recorded: bytes) -> array[int]:
        """A sequence's tokens as an event has them; zeros where the log records none."""
        # Checked before so much is made of so little: a log without tokens could claim any number of them.
        invariant(
            0 < num_tokens <= self.longest, "a sequence has more tokens than the cache can hold, or none"
        )
        if not self.tokens_recorded:
            return array("i", bytes(SYMBOL_BYTES * num_tokens))
        invariant(len(recorded) == SYMBOL_BYTES * num_tokens, "a sequence has other tokens than it counts")
        return array("i", recorded)

    def _append_tokens(self, event: ev.TokensAppended) -> None:
        if event.counts:
            self._append_many(event)
        elif len(event.tokens) != len(event.handles):
            raise InvariantViolated("not each sequence got one token")
        else:
            self.running.append(event)

    def _append_many(self, event: ev.TokensAppended) -> None:
        handles, counts = array("I", event.handles), array("I", event.counts)
        if self.tokens_recorded or event.tokens:
            invariant(
                len(event.tokens) == SYMBOL_BYTES * sum(counts), "other tokens were appended than counted"
            )
        lengths: dict[int, int] = {}
        for handle, count in zip(handles, counts, strict=True):
            lengths[handle] = lengths.get(handle, self.sequences[handle].num_tokens) + count
        invariant(max(lengths.values(), default=0) <= self.longest, "a sequence outgrows the cache")
        self.running.append(event)
        for handle, length in lengths.items():
            self.sequences[handle].computed = length - 1

    def _compute(self, event: ev.ContextComputed) -> None:
        sequence = self.sequences[event.handle]
        if not 0 <= event.num_tokens <= sequence.num_tokens:
            raise InvariantViolated("more is computed than there is")
        self._set_computed(sequence, event.num_tokens)

    def _set_computed(self, sequence: Sequence, num_tokens: int) -> None:
        self.running.forget()
        sequence.computed = num_tokens

    def _remove_sequence(self, event: ev.SequenceRemoved) -> None:
        sequence = self.sequences.pop(event.handle)
        del self.handles[sequence.request_id]
        self.rich.pop(event.handle, None)
        self.stamp += 1
        for index, group in enumerate(self.groups):
            tail = sequence.tails[index]
            own = sequence.tables[index][tail.end :]
            own.reverse()
            freed = group.give_back(own)
            invariant(freed.tobytes() == event.freed[index], "other slots were freed")
            group.release(tail, self.stamp)
            root = group.tree.roots[sequence.namespace]
            root.users -= 1
            group.tree.drop_unused(root)

    # -- blocks

    def _allocate(self, event: ev.BlocksAllocated) -> None:
        index, sequences = event.group, self.sequences
        slots = array("i", event.slots)
        self.groups[index].levels[PRIMARY].take(slots)
        handles = array("I", event.handles)
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
        tail = group.claim(sequence.tails[event.group], event.level, slots)
        sequence.tails[event.group] = tail
        if event.level == SECONDARY:
            slots = array("i", [-1]) * len(slots)  # until `BlocksMoved` brings them
        table = sequence.tables[event.group]
        first = event.first_block
        invariant(0 <= first <= len(table), "reused blocks leave a hole in the table")
        if event.replaced:
            own = table[first : first + len(slots)]
            own.reverse()
            invariant(own.tobytes() == event.replaced, "the slots that a sequence gives back are not its own")
        table[first : first + len(slots)] = slots
        if event.replaced:
            group.give_back(array("i", event.replaced))
        else:
            self._set_computed(sequence, max(sequence.computed, tail.end * self.tokens_per_block))
        group.settle(tail)

    def _copy(self, event: ev.BlocksCopied) -> None:
        sequence = self.sequences[event.handle]
        reached = event.block * self.tokens_per_block + event.num_tokens
        self._set_computed(sequence, max(sequence.computed, reached))
        target = array("i", [event.target])
        self._track(event.transfer, Transfer(event.group, PRIMARY, target, event.handle, event.block))

    def _store(self, event: ev.BlocksStored) -> None:
        index, first = event.group, event.first_block
        group, sequence = self.groups[index], self.sequences[event.handle]
        tail = sequence.tails[index]
        slots = array("i", event.slots)
        last = first + len(slots)
        if tail.end != first or sequence.tables[index][first:last] != slots:
            raise InvariantViolated("stored blocks do not continue the sequence's cached prefix")
        size = self.tokens_per_block
        partial = event.last_tokens % size
        if self.tokens_recorded:
            stop = last * size - (size - partial if partial else 0)
            symbols = sequence.packed(first * size, stop)
        else:
            symbols = event.keys
        sequence.tails[index] = tail = group.store(tail, symbols, slots, event.keys, event.priority, partial)
        if group.incoming:
            group.await_copies(tail, slots)
        self.changed_blocks += len(slots)

    def _fill(self, event: ev.BlocksFilled) -> None:
        index, size = event.group, self.tokens_per_block
        group = self.groups[index]
        blocks, slots = array("I", event.blocks), array("i", event.slots)
        invariant(group.incoming.keys().isdisjoint(slots), "a block was filled while a copy is to come")
        key_bytes, key, at = group.tree.key_bytes, b"", 0
        owner, sequences, block_bytes = group.levels[PRIMARY].owner, self.sequences, group.tree.block_bytes
        for handle, block, slot in zip(array("I", event.handles), blocks, slots, strict=True):
            sequence = sequences[handle]
            run = sequence.tails[index]
            if run.end != block or sequence.tables[index][block] != slot or not run.grows(event.priority):
                raise InvariantViolated("a filled block does not continue what its sequence alone has cached")
            if key_bytes:
                key = event.keys[at : at + key_bytes]
                at += key_bytes
            symbols = sequence.packed(block * size, (block + 1) * size) if self.tokens_recorded else key
            if len(symbols) != block_bytes:
                raise InvariantViolated("a filled block is not full")
            owner[slot] = run.extend(symbols, slot, key)
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
            group.levels[SECONDARY].take(to_slots)
            group.offload(from_slots, to_slots, event.transfer)
        else:
            assert event.handle is not None
            group.levels[PRIMARY].take(to_slots)
            group.onboard(from_slots, to_slots, event.transfer)
            group.settle(self.sequences[event.handle].tails[event.group])  # type: ignore[arg-type]
            self._fill_tables(event.group, event.first_block, to_slots)
        onboarded = event.handle if event.why == MoveReason.ONBOARD else None
        transfer = Transfer(event.group, event.to_level, to_slots, onboarded, event.first_block)
        self._track(event.transfer, transfer)

    def _fill_tables(self, index: int, first: int, slots: array[int]) -> None:
        """Enter onboarded blocks into the tables of all that claimed them: several requests of one batch may have."""
        for sequence in self.sequences.values():
            table = sequence.tables[index]
            if first < len(table) and table[first] == -1 and self._holds(sequence, index, slots[0]):
                last = min(first + len(slots), sequence.tails[index].end)
                table[first:last] = slots[: last - first]

    def _holds(self, sequence: Sequence, index: int, slot: int) -> bool:
        return any(
            run.level == PRIMARY and slot in run.slots
            for run in self.groups[index].path(sequence.tails[index])
        )

    def _take_over(
        self, group: GroupState, event: ev.BlocksMoved, from_slots: array[int], to_slots: array[int]
    ) -> None:
        """A sequence computed what lay in secondary: its own slots hold the blocks from now on."""
        assert event.handle is not None
        sequence = self.sequences[event.handle]
        table = sequence.tables[event.group]
        first = event.first_block
        invariant(table[first : first + len(to_slots)] == to_slots, "the slots are not the sequence's")
        tail = group.claim(sequence.tails[event.group], SECONDARY, from_slots)
        group.onboard(from_slots, to_slots, 0)
        group.await_copies(tail, to_slots)
        sequence.tails[event.group] = tail
        group.settle(tail)

    def _remove(self, event: ev.BlocksRemoved) -> None:
        group = self.groups[event.group]
        _check_level(event.level)
        slots = array("i", event.slots)
        self.changed_blocks += len(slots)
        for run, parent in group.remove(event.level, slots):
            for sequence in self.sequences.values():
                if sequence.tails[event.group] is run:
                    sequence.tails[event.group] = parent
                    if event.why == RemoveReason.TRANSFER_FAILED:
                        kept = min(sequence.computed, parent.end * self.tokens_per_block)
                        self._set_computed(sequence, kept)

    # -- copies

    def _track(self, transfer_id: int, transfer: Transfer) -> None:
        invariant(transfer_id >= self.next_transfer, "a transfer id was used twice")
        self.transfers[transfer_id] = transfer
        self.next_transfer = transfer_id + 1
        self.groups[transfer.group].expect(transfer_id, transfer.level, transfer.slots)

    def _take_transfer(self, transfer_id: int) -> Transfer:
        transfer = self.transfers.pop(transfer_id)
        self.groups[transfer.group].forget(transfer_id, transfer.level, transfer.slots)
        return transfer

    def _land(self, event: ev.TransferLanded) -> None:
        for transfer_id in array("q", event.transfers):
            transfer = self._take_transfer(transfer_id)
            self.groups[transfer.group].land(transfer.level, transfer.slots, transfer_id)

    def _fail(self, event: ev.TransferFailed) -> None:
        for transfer_id in array("q", event.transfers):
            transfer = self._take_transfer(transfer_id)
            sequence = self.sequences.get(transfer.handle) if transfer.handle is not None else None
            if sequence is not None:
                kept = min(sequence.computed, transfer.first_block * self.tokens_per_block)
                self._set_computed(sequence, kept)


def _check_level(level: int) -> None:
    if level not in (PRIMARY, SECONDARY):
        raise InvariantViolated("there is no such level")


def _ignore(event: ev.Event) -> None:
    """Notes that change nothing."""

"""The state of the cache: a fold over events.

`CacheState.apply` is the only code that changes it, live and in replay. It uses no clock, file, socket, thread or
tensor. It trusts that an event was decided for this state, but checks what is cheap to check: an event that does not
fit raises `InvariantViolated` instead of corrupting silently.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

from events import types as ev
from events.ids import MAX_NUMBER, GroupIndex, Handle
from events.packed import CHECKSUM_BYTES, NAME_BYTES, TOKEN_BYTES, names_of_keys, unpack_names
from events.tokens.names import ALGORITHMS, HashAlgorithm
from events.tokens.sequences import RunningTokens
from events.tokens.symbols import SymbolTable, pages_in, rich_end
from events.types import (
    CHUNKED,
    CROSS,
    FEED_EVENTS,
    PRIMARY,
    SECONDARY,
    SLIDING,
    UNCACHED,
    MoveReason,
    Namespace,
    RequestId,
)
from kvcache.errors import InvariantViolated, invariant
from kvcache.fold.check import check_group, check_runs
from kvcache.fold.exported_state import export_group, export_sequence, install_group
from kvcache.fold.full_group import FullGroup
from kvcache.fold.group import MAX_TURN, UseCounts
from kvcache.fold.positional import KINDS, MOST_TOKENS, PositionalGroup, check_shared
from kvcache.fold.prefix_tree import Node, PathEnd, Run
from kvcache.fold.sequence import (
    DEFAULT_PRIORITY,
    DETACHED,
    ONBOARDING,
    PRIORITY_MAX,
    Pin,
    Sequence,
    Transfer,
    decode_on,
)
from kvcache.fold.shape import (
    check_created,
    counts_uses,
    keeps_replaced,
    longest_input,
    longest_sequence,
)
from kvcache.fold.sliding_group import AnyGroup, SlidingGroup
from kvcache.fold.slot_states import States, slot_states

REMEMBERED_REFUSALS = 4096
"""Number of refused requests that are remembered; an older one may be recorded again."""
_NO_KEY = bytearray()
_RESERVE = ev.AllocateReason.RESERVE


class CacheState:
    """State of the whole cache: blocks per group, running sequences, copies in flight, symbols, and counters.

    Starts empty; `CacheCreated` gives it its shape. The handlers are in the order of `AnyEvent`.
    """

    def __init__(self, *, tokens_recorded: bool = True) -> None:
        self.tokens_recorded = tokens_recorded
        """False for a log without tokens; blocks are then matched by their keys."""
        self.epoch = 0
        self.created: ev.CacheCreated | None = None
        self.groups: list[AnyGroup] = []
        self.positional: list[PositionalGroup] = []
        """Further groups, with slots in the pool of the first one."""
        self.hashing: HashAlgorithm = ALGORITHMS["none"]
        self.tokens_per_block = 1
        self.longest = self.longest_input = 0
        """Most tokens of a sequence, and of an encoder's input."""
        self.keeps_replaced = False
        """True if replaced slots stay their sequence's until it ends."""
        self.sequences: dict[int, Sequence] = {}
        """Sequences by handle, encoders' inputs included."""
        self.handles: dict[RequestId, int] = {}
        self.running = RunningTokens(self.sequences, decode_on)
        self.symbols = SymbolTable()
        self.rich: dict[int, int] = {}
        """Sequences with symbols below 0, by handle: the number of tokens up to the last one."""
        self.transfers: dict[int, Transfer] = {}
        self.awaiting_onboard: dict[int, list[tuple[Sequence, dict[int, int]]]] = {}
        """Sequences that claimed secondary blocks still to be onboarded, by group, each with the indices in its table
        by slot. Empty between two commands."""
        self.refused: dict[RequestId, None] = {}
        """Requests that did not fit and were not admitted since, oldest first."""
        self.next_handle = 1
        self.next_transfer = 1
        self.releases = 0
        """Number of releases so far."""
        self.clock = 0
        """Time of the latest event that has one; 0 while nothing has a duration."""
        self.default_retention_only = True
        """True while every request ever admitted has had the default retention."""
        self.pins: dict[int, Pin] = {}
        self.next_pin = 1
        self.changed_blocks = 0
        """Blocks stored, updated, moved and removed since the last checkpoint."""
        self.handlers = self._handlers()

    def apply(self, event: ev.Event) -> None:
        """Apply one event."""
        self.handlers[type(event)](event)

    def _handlers(self) -> dict[type, Callable[[Any], None]]:
        return {
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
            ev.BlocksPinned: self._pin,
            ev.BlocksUnpinned: self._unpin,
            ev.TokensAppended: self._append_tokens,
            ev.ContextComputed: self._compute,
            ev.BlocksDetached: self._detach,
            ev.BlocksReturned: self._return,
            ev.SequenceForked: self._fork,
            ev.SequenceRewound: self._rewind,
            ev.SequenceRemoved: self._remove_sequence,
            ev.EncoderAdded: self._add_encoder,
            ev.EncoderRemoved: self._remove_encoder,
            ev.TransferLanded: self._land,
            ev.TransferFailed: self._fail,
            ev.CacheCleared: self._clear,
            ev.Checkpoint: self._checkpoint,
            ev.SymbolsInterned: self.symbols.intern,
            ev.SymbolsForgotten: self.symbols.forget,
            ev.AdmissionRefused: self._note_refusal,
            ev.LoadFailed: self._note_failure,
            ev.PoolShared: self._share_pool,
            ev.SlotsTaken: self._take_slots,
            ev.SlotsLeft: self._leave_slots,
            ev.SlotsNamed: self._name_slots,
            ev.SlotsUnnamed: self._unname_slots,
            ev.HitDeferred: _ignore,
            **dict.fromkeys(FEED_EVENTS, _refuse),
        }

    # -- the whole state

    def _create(self, event: ev.CacheCreated) -> None:
        check_created(event)
        invariant(self.tokens_recorded or event.key_bytes > 0, "blocks have neither tokens nor names")
        self.created = event
        self.longest, self.longest_input = longest_sequence(event), longest_input(event)
        self.keeps_replaced = keeps_replaced(event)
        self.hashing = ALGORITHMS[event.hash_algorithm]
        self.tokens_per_block = event.tokens_per_block
        self.groups = [self.make_group(index) for index in range(len(event.groups))]
        self.positional = []
        self.sequences.clear()
        self.handles.clear()
        self.transfers.clear()
        self.awaiting_onboard.clear()
        self.running.forget_row()
        self.symbols.clear()
        self.rich.clear()
        self.refused.clear()
        self.changed_blocks = self.clock = 0
        self.pins.clear()
        self.next_pin = 1

    def _start_epoch(self, event: ev.EpochStarted) -> None:
        self.epoch = event.epoch
        self.tokens_recorded = event.tokens_recorded

    # -- sequences and their blocks

    def _add_sequence(self, event: ev.SequenceAdded) -> None:
        handle, request_id, namespace = event.handle, event.request_id, event.namespace
        self._refuse_duplicate(handle, request_id)
        tokens = self.tokens_of(event.num_tokens, event.tokens, self.longest)
        if not 0 <= event.reused < event.num_tokens:
            raise InvariantViolated("the reused tokens exceed the tokens to compute")
        if event.reused_external and (
            event.reused_partial or not 0 < event.reused_external < event.num_tokens - event.reused
        ):
            raise InvariantViolated("the external tokens exceed the tokens to compute, or end inside a block")
        sequence = Sequence(handle, request_id, namespace, tokens, self.roots(namespace))
        sequence.computed, sequence.retention = event.reused, event.retention
        self.default_retention_only &= event.retention is None
        self.advance_clock(event.clock)
        self.sequences[handle] = sequence
        self.handles[request_id] = handle
        self.refused.pop(request_id, None)
        self.note_rich(handle, event.tokens)
        self.next_handle = handle + 1
        for group in self.groups:
            group.begin(sequence, event.reused)

    def _allocate(self, event: ev.BlocksAllocated) -> None:
        index, sequences = event.group, self.sequences
        slots = array("i", event.slots)
        if self.positional and index == 0:
            self._refuse_used(slots)
        self.groups[index].levels[PRIMARY].take_slots(slots)
        handles = array("q", event.handles)
        if event.why is _RESERVE:
            for handle in handles:
                # From now on it has other slots than its tokens need, so it does not decode like others.
                self.set_computed(sequences[handle], sequences[handle].computed)
        if not event.counts:
            for handle, slot in zip(handles, slots, strict=True):
                sequences[handle].tables[index].append(slot)
            return
        start = 0
        for handle, count in zip(handles, array("I", event.counts), strict=True):
            sequences[handle].tables[index].extend(slots[start : start + count])
            start += count
        if start != len(slots):
            raise InvariantViolated("slots were allocated for an unknown sequence")

    def _reuse(self, event: ev.BlocksReused) -> None:
        group, sequence = self.groups[event.group], self.sequences[event.handle]
        _check_level(event.level)
        slots, first = array("i", event.slots), event.first_block
        table = sequence.tables[event.group]
        if not slots or not 0 <= first <= len(table):
            raise InvariantViolated("no block was reused, or reused blocks leave a gap in the table")
        group.hold(sequence, event.level, first, slots)
        if event.level == SECONDARY:
            # Until `BlocksMoved` brings them.
            places = dict(zip(slots, range(first, first + len(slots)), strict=True))
            self.awaiting_onboard.setdefault(event.group, []).append((sequence, places))
            slots = array("i", [ONBOARDING]) * len(slots)
        if event.replaced:
            own = table[first : first + len(slots)]
            own.reverse()
            invariant(own.tobytes() == event.replaced, "the returned slots do not belong to the sequence")
        table[first : first + len(slots)] = slots
        if event.replaced and self.keeps_replaced:
            sequence.keep(event.group, array("i", event.replaced))
        elif event.replaced:
            group.return_uncached(array("i", event.replaced))

    def _copy(self, event: ev.BlocksCopied) -> None:
        target = array("i", [event.target])
        self._track(event.transfer, Transfer(event.group, PRIMARY, target, event.handle))
        sequence = self.sequences[event.handle]
        copied = ev.Inherited(event.group, event.block, event.priority, event.duration)
        if sequence.inherited or (copied.priority, copied.duration) != (DEFAULT_PRIORITY, 0):
            others = [each for each in sequence.inherited if each.group != event.group]
            sequence.inherited = (*others, copied)
            self.default_retention_only = False

    def _store(self, event: ev.BlocksStored) -> None:
        index, first, size = event.group, event.first_block, self.tokens_per_block
        invariant(event.level == PRIMARY, "blocks are stored outside primary")
        sequence, slots = self.sequences[event.handle], array("i", event.slots)
        last = first + len(slots)
        if not slots or first < 0 or sequence.tables[index][first:last] != slots:
            raise InvariantViolated("stored blocks do not belong to the sequence")
        invariant(0 < event.last_tokens <= size, "a stored block has an impossible number of tokens")
        group, keys = self.groups[index], sequence.keys
        key_bytes = group.tree.key_bytes
        keys += event.keys
        if len(keys) < last * key_bytes or (event.keys and len(keys) != last * key_bytes):
            raise InvariantViolated("the number of names differs from the number of stored blocks")
        if event.parent != (keys[(first - 1) * key_bytes :][:NAME_BYTES] if first and key_bytes else b""):
            raise InvariantViolated("stored blocks do not follow the parent that they name")
        group.store(event, sequence, slots)
        self.changed_blocks += len(slots)

    def _fill(self, event: ev.BlocksFilled) -> None:
        group, sequences = self.groups[event.group], self.sequences
        blocks, filling = (
            array("I", event.blocks),
            [sequences[handle] for handle in array("q", event.handles)],
        )
        group.fill(event, filling, blocks, self._name_filled(event, filling, blocks))
        self.changed_blocks += len(blocks)

    def _name_filled(
        self, event: ev.BlocksFilled, filling: list[Sequence], blocks: array[int]
    ) -> list[bytes | bytearray]:
        """Return the keys of the blocks that these sequences have filled, and note them where no earlier event has."""
        # Mostly one block or two: a plain loop takes half the time of a vectorised one.
        size, given, parents = self.hashing.key_bytes, event.keys, event.parents
        if not (size or given or parents):
            return [_NO_KEY] * len(blocks)
        if len(given) not in (0, len(blocks) * size):
            raise InvariantViolated("the number of names differs from the number of filled blocks")
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
                raise InvariantViolated("a filled block must have exactly one name")
            above += keys[end - size : end - size + NAME_BYTES]
            filled.append(key)
        if above != parents:
            raise InvariantViolated("filled blocks do not follow the parents that they name")
        return filled

    def _update(self, event: ev.BlocksUpdated) -> None:
        _check_level(event.level)
        invariant(0 <= event.priority <= PRIORITY_MAX, "priority out of range")
        slots, group = array("i", event.slots), self.groups[event.group]
        if event.why == ev.UpdateReason.EXPIRED:
            self.advance_clock(event.clock)
            self.releases = group.expire(event, slots, self.releases)
        else:
            group.update(event, slots)
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
            invariant(own == to_slots, "the slots do not belong to the sequence")
            group.take_over(sequence, first, from_slots, to_slots)
            return
        group.levels[PRIMARY].take_slots(to_slots)
        group.onboard(sequence, from_slots, to_slots, event.transfer)
        self._fill_tables(event.group, from_slots, to_slots)
        self._track(event.transfer, Transfer(event.group, PRIMARY, to_slots, event.handle))

    def _fill_tables(self, index: int, from_slots: array[int], to_slots: array[int]) -> None:
        """Enter onboarded blocks into the tables of all sequences that claimed them: several requests of one batch may
        have.
        """
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
            if not isinstance(group, FullGroup):
                raise InvariantViolated("invalidated blocks are in a sliding window")
            group.invalidate(slots, self.sequences.values())
        else:
            group.remove(event.level, slots, event.why)

    def _pin(self, event: ev.BlocksPinned) -> None:
        invariant(self.next_pin == event.pin, "a pin does not have the next number")
        sequence = self.sequences[event.handle]
        slots = [array("i", packed) for packed in event.slots]
        ends = [
            group.pin(sequence.part_in(group.index), own)
            for group, own in zip(self.groups, slots, strict=True)
        ]
        self.pins[event.pin] = Pin(sequence.request_id, slots, ends)
        self.next_pin += 1

    def _unpin(self, event: ev.BlocksUnpinned) -> None:
        pin = self.pins.pop(event.pin)
        self.advance_clock(event.clock)
        self.releases += 1
        for group, slots, end, freed in zip(self.groups, pin.slots, pin.ends, event.freed, strict=True):
            if pin.named:
                group.unpin(slots, end, self.releases, self.clock)
                blank = array("i")
            else:
                blank = group.return_uncached(slots[::-1])
            invariant(blank.tobytes() == freed, "the number of freed slots is wrong")

    def _append_tokens(self, event: ev.TokensAppended) -> None:
        if event.counts:
            self._append_many(event)
        elif 2 * len(event.tokens) != len(event.handles):  # int32 and int64
            raise InvariantViolated("the number of tokens differs from the number of sequences")
        else:
            self.running.append(event)

    def _append_many(self, event: ev.TokensAppended) -> None:
        handles, counts = array("q", event.handles), array("I", event.counts)
        if self.tokens_recorded or event.tokens:
            agree = len(event.tokens) == TOKEN_BYTES * sum(counts)
            invariant(agree, "other tokens were appended than counted")
        lengths: dict[int, int] = {}
        for handle, count in zip(handles, counts, strict=True):
            lengths[handle] = lengths.get(handle, self.sequences[handle].num_tokens) + count
        invariant(max(lengths.values(), default=0) <= self.longest, "a sequence outgrows the cache")
        computed = {handle: self.sequences[handle].computed for handle in lengths} if event.draft else {}
        self.running.append(event)
        for handle, length in lengths.items():
            self.sequences[handle].computed = computed.get(handle, length - 1)

    def _compute(self, event: ev.ContextComputed) -> None:
        sequence = self.sequences[event.handle]
        if not 0 <= event.num_tokens <= sequence.num_tokens:
            raise InvariantViolated("more tokens are computed than exist")
        self.set_computed(sequence, event.num_tokens)

    def _detach(self, event: ev.BlocksDetached) -> None:
        sequences = [self.sequences[handle] for handle in array("q", event.handles)]
        counts = array("I", event.counts) if event.counts else None
        self.advance_clock(event.clock)
        group = self.groups[event.group]
        if not isinstance(group, SlidingGroup):
            raise InvariantViolated("full attention does not release blocks")
        slots, freed = group.detach(sequences, counts, self.releases, self.clock)
        self.releases += len(sequences)
        if slots.tobytes() != event.slots or freed.tobytes() != event.freed:
            raise InvariantViolated("the released blocks differ from those that left the window")

    def _return(self, event: ev.BlocksReturned) -> None:
        counts, slots, group = array("I", event.counts), array("i", event.slots), self.groups[event.group]
        invariant(sum(counts) == len(slots), "the number of returned slots differs from the count")
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
                table[: -count - 1 : -1] == returned, "the returned slots do not belong to the sequence"
            )
            invariant(
                group.return_uncached(returned) == returned,
                "the returned slots do not belong to the sequence",
            )
            del table[-count:]
            self.running.forget_row()

    def _fork(self, event: ev.SequenceForked) -> None:
        self._refuse_duplicate(event.child, event.request_id)
        parent = self.sequences[event.handle]
        # Anything not fully computed is continued by each sequence on its own.
        blocks = parent.computed // self.tokens_per_block
        child = parent.branch(event.child, event.request_id, blocks)
        for group in self.groups:
            group.share(parent, child, blocks)
            group.tree.roots[parent.namespace].users += 1
        if child.encoder is not None:
            child.encoder.holders += 1
        self.sequences[event.child] = child
        self.handles[event.request_id] = event.child
        if parent.handle in self.rich:
            self.rich[event.child] = self.rich[parent.handle]
        self.running.forget_row()
        self.refused.pop(event.request_id, None)
        self.next_handle = event.child + 1

    def _rewind(self, event: ev.SequenceRewound) -> None:
        sequence, num_tokens = self.sequences[event.handle], event.num_tokens
        invariant(0 < num_tokens < sequence.num_tokens, "a rewind takes back no tokens, or all")
        # The last remaining token is recomputed, in a block without other readers.
        computed = min(sequence.computed, num_tokens - 1)
        blocks = computed // self.tokens_per_block
        needed = min(-(-num_tokens // self.tokens_per_block), len(sequence.tables[0]))
        self.advance_clock(event.clock)
        self.releases += 1
        for group, freed in zip(self.groups, event.freed, strict=True):
            if not sequence.tables[group.index]:
                continue  # cross attention, which a rewind does not touch
            blank = group.rewind(sequence, blocks, needed, self.releases, self.clock)
            invariant(blank.tobytes() == freed, "the number of freed slots is wrong")
        self.running.forget_row()
        sequence.truncate(num_tokens)
        sequence.computed = computed
        sequence.num_prompt_tokens = min(sequence.num_prompt_tokens, num_tokens)
        sequence.inherited = tuple(each for each in sequence.inherited if each.block <= blocks)
        key_bytes = self.hashing.key_bytes
        del sequence.keys[blocks * key_bytes :]
        self.rich.pop(event.handle, None)
        self.note_rich(event.handle, sequence.tokens.tobytes())

    def _remove_sequence(self, event: ev.SequenceRemoved) -> None:
        sequence = self.sequences.pop(event.handle)
        del self.handles[sequence.request_id]
        self.rich.pop(event.handle, None)
        for each in self.positional:
            each.end(event.handle)
        if sequence.encoder is not None:
            sequence.encoder.holders -= 1
        self.running.forget_row()
        self.releases += 1
        self.advance_clock(event.clock)
        for group, freed in zip(self.groups, event.freed, strict=True):
            if group.end(sequence, self.releases, self.clock).tobytes() != freed:
                raise InvariantViolated("the number of freed slots is wrong")
            group.leave(sequence.namespace)

    def _add_encoder(self, event: ev.EncoderAdded) -> None:
        assert self.created is not None
        reader, size = self.sequences[event.sequence], self.tokens_per_block
        self._refuse_duplicate(event.handle, None)
        invariant(self.created.groups[event.group].kind == CROSS, "an encoder input without cross attention")
        invariant(
            reader.encoder is None and not reader.holders,
            "a sequence has two encoder inputs, or an encoder input has one",
        )
        blocks = -(-event.num_tokens // size)
        tokens = self.tokens_of(blocks * size, event.tokens, self.longest_input)
        encoder = Sequence(
            event.handle, reader.request_id, event.namespace, tokens, self.roots(event.namespace)
        )
        reused = event.reused_primary + event.reused_secondary
        invariant(0 <= reused <= blocks, "the reused tokens exceed the encoder input")
        encoder.num_prompt_tokens, encoder.computed, encoder.holders = event.num_tokens, reused * size, 1
        reader.encoder = self.sequences[event.handle] = encoder
        self.next_handle = event.handle + 1
        for group in self.groups:
            group.tree.roots[event.namespace].users += 1

    def _remove_encoder(self, event: ev.EncoderRemoved) -> None:
        encoder = self.sequences.pop(event.handle)
        invariant(not encoder.holders, "an encoder input ended while it is still in use")
        self.releases += 1
        self.advance_clock(event.clock)
        freed = self.groups[event.group].end(encoder, self.releases, self.clock)
        invariant(freed.tobytes() == event.freed, "the number of freed slots is wrong")
        for group in self.groups:
            group.leave(encoder.namespace)

    # -- copies, and the cache as a whole

    def _land(self, event: ev.TransferLanded) -> None:
        begin = 0
        for transfer_id in array("q", event.transfers):
            transfer = self.transfers.pop(transfer_id)
            group = self.groups[transfer.group]
            group.land(transfer.level, transfer.slots, transfer_id)
            if transfer.level == SECONDARY:
                end = begin + (CHECKSUM_BYTES * len(transfer.slots) if event.checksums else 0)
                # Checksums of slots that have another owner by now are replaced when its own copy lands.
                group.levels[SECONDARY].note_checksums(transfer.slots, event.checksums[begin:end])
                begin = end
        invariant(begin == len(event.checksums), "the checksums do not match the copied blocks")

    def _fail(self, event: ev.TransferFailed) -> None:
        """Restart every sequence, because anything computed may depend on the data that did not arrive.

        The `CacheCleared` that follows drops the cached blocks.
        """
        for transfer_id in array("q", event.transfers):
            del self.transfers[transfer_id]
        for sequence in self.sequences.values():
            self.set_computed(sequence, 0)

    def _clear(self, event: ev.CacheCleared) -> None:
        removed, unnamed = zip(*[group.counts() for group in self.groups], strict=True)
        invariant(removed == event.removed and unnamed == event.unnamed, "the cleared blocks differ")
        for group in self.groups:
            group.clear()
        for sequence in self.sequences.values():
            sequence.path_ends = self.roots(sequence.namespace)
        for pin in self.pins.values():
            pin.named, pin.ends = False, [None] * len(self.groups)
        for each in self.positional:
            each.forget_names()
        self.changed_blocks += sum(map(sum, removed)) + sum(unnamed)

    def _checkpoint(self, event: ev.Checkpoint) -> None:
        invariant(len(event.engine_counts) in (0, 2), "the engine's counts must be two, or none")
        self.changed_blocks = 0

    def _note_refusal(self, event: ev.AdmissionRefused) -> None:
        self.refused[event.request_id] = None
        if len(self.refused) > REMEMBERED_REFUSALS:
            del self.refused[next(iter(self.refused))]

    def _note_failure(self, event: ev.LoadFailed) -> None:
        if not 0 < event.num_tokens < self.sequences[event.handle].num_tokens:
            raise InvariantViolated("a failed load exceeds the external tokens")

    # -- groups that share the pool of the first one

    def _share_pool(self, event: ev.PoolShared) -> None:
        assert self.created is not None
        invariant(
            len(event.groups) > 0 and self.created.key_bytes > 0,
            "a shared pool needs at least one group, and names",
        )
        self.positional, first = [], self.groups[0].levels[PRIMARY].size
        for number, each in enumerate(event.groups, len(self.groups)):
            known = (
                each.kind in KINDS
                and 0 < each.tokens_per_block <= MOST_TOKENS
                and 0 <= each.window <= MOST_TOKENS
                and 0 <= each.blocks <= MOST_TOKENS
            )
            invariant(
                known and (each.kind not in (SLIDING, CHUNKED) or each.window > 0),
                "no such group shares the pool",
            )
            group = PositionalGroup(number, each, self.created.key_bytes, first)
            first += each.blocks
            group.install(each)
            self.positional.append(group)
        check_shared(self.positional, self.groups[0].levels[PRIMARY], self.sequences)

    def _shared(self, index: int) -> PositionalGroup:
        at = index - len(self.groups)
        invariant(0 <= at < len(self.positional), "no such group shares the pool")
        return self.positional[at]

    def _refuse_used(self, slots: array[int]) -> None:
        for group in self.positional:
            free = group.holders.keys().isdisjoint(slots) and group.names.keys().isdisjoint(slots)
            invariant(free, "a slot is taken that another group uses")

    def _take_slots(self, event: ev.SlotsTaken) -> None:
        group, slots = self._shared(event.group), array("i", event.slots)
        invariant(event.handle in self.sequences, "an unknown sequence takes slots")
        rows = list(zip(array("I", event.indices), slots, strict=True))
        if event.reused:
            invariant(all(group.ends_in(slot, index) for index, slot in rows), "a reused slot has no name")
        elif group.pool:
            invariant(
                group.are_free(slots), "a slot is taken that is in use, or outside the pool of the group"
            )
        else:
            self._refuse_used(slots)
            invariant(
                self.groups[0].levels[PRIMARY].are_blank(slots), "a slot is taken that the first group uses"
            )
        group.take(event.handle, iter(rows))

    def _leave_slots(self, event: ev.SlotsLeft) -> None:
        rows = zip(array("I", event.indices), array("i", event.slots), strict=True)
        self._shared(event.group).leave(event.handle, rows)

    def _name_slots(self, event: ev.SlotsNamed) -> None:
        group = self._shared(event.group)
        invariant(group.created.kind != UNCACHED, "a name is given to a block that cannot be found")
        group.name(event)

    def _unname_slots(self, event: ev.SlotsUnnamed) -> None:
        self._shared(event.group).unname(event)

    # -- shared by handlers

    def _refuse_duplicate(self, handle: int, request_id: RequestId | None) -> None:
        """Raise unless a new sequence may have this handle and, unless None, this request id."""
        if not self.next_handle <= handle <= MAX_NUMBER:
            raise InvariantViolated("a handle was used twice, or is out of range")
        if request_id in self.handles:
            raise InvariantViolated("duplicate request id")

    def _track(self, transfer_id: int, transfer: Transfer) -> None:
        invariant(self.next_transfer <= transfer_id <= MAX_NUMBER, "duplicate transfer id")
        self.transfers[transfer_id] = transfer
        self.next_transfer = transfer_id + 1

    def advance_clock(self, now: int) -> None:
        """Advance the clock to an event's time; 0: it has none."""
        if now:
            invariant(now >= self.clock, "time goes backwards")
            self.clock = now

    def root_key(self, namespace: Namespace) -> bytes:
        """Return the key that the first block of a prompt continues."""
        for group in self.groups:
            root = group.tree.roots.get(namespace)
            if root is not None:
                return root.key  # made once
        return self.hashing.root_key(namespace)

    def roots(self, namespace: Namespace) -> list[Node]:
        """Return the start of a new sequence's path in each group."""
        key = self.root_key(namespace)
        return [group.start(namespace, key) for group in self.groups]

    def make_group(self, index: int) -> AnyGroup:
        """Create the state of a window in which nothing is cached yet."""
        assert self.created is not None
        group, key_bytes, size = self.created.groups[index], self.created.key_bytes, self.tokens_per_block
        kind = SlidingGroup if group.kind == SLIDING else FullGroup
        block_bytes = size * TOKEN_BYTES if self.tokens_recorded else key_bytes
        made = kind(index, group, size, block_bytes, key_bytes, tokens_recorded=self.tokens_recorded)
        if kind is FullGroup and counts_uses(self.created):
            made.uses = UseCounts(sum(group.num_blocks))
        return made

    def note_rich(self, handle: int, symbols: bytes) -> None:
        """Note the length of the prefix with symbols below 0, so that plain prompts are never searched."""
        if self.symbols.pages and (end := rich_end(symbols)):
            self.rich[handle] = end

    def tokens_of(self, num_tokens: int, recorded: bytes, longest: int) -> array[int]:
        """Decode a sequence's tokens from an event; zeros where the log records none."""
        # Checked before allocating: a log without tokens could claim any number of them.
        if not 0 < num_tokens <= longest:
            raise InvariantViolated("the token count of a sequence is out of range")
        if not self.tokens_recorded:
            return array("i", bytes(TOKEN_BYTES * num_tokens))
        if len(recorded) != TOKEN_BYTES * num_tokens:
            raise InvariantViolated("the tokens of a sequence do not match its count")
        return array("i", recorded)

    def set_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Set the number of leading tokens with written K/V."""
        self.running.forget_row()
        sequence.computed = num_tokens

    def used_pages(self) -> set[int]:
        """Return the pages with symbols that occur in cached blocks and running sequences; others may be forgotten."""
        used: set[int] = set()
        for group in self.groups:
            for run in group.tree.runs.values():
                used |= pages_in(run.symbols)
        for handle, end in self.rich.items():
            used |= pages_in(self.sequences[handle].tokens[:end].tobytes())
        return used

    # -- the whole state: checked, exported, restored

    def check(self) -> None:
        """Prove the conservation laws from scratch; raises `InvariantViolated` at the first that does not hold.

        Each slot is in exactly one state (`kvcache.fold.slot_states`), and a copy brings what is in flight; references
        equal the sequences that hold a block; every cached block's parent is cached, in primary if the block is.
        """
        for group in self.groups:
            check_runs(group)
        self.check_slots()

    def check_slots(self) -> None:
        """Prove slots, references and sequences. Does not prove that the tree is in its best form."""
        grows_at_will = bool(self.created and self.created.engine)
        for group in self.groups:
            copies = {number: copy for number, copy in self.transfers.items() if copy.group == group.index}
            check_group(
                group, self.sequences.values(), self.pins.values(), copies, grows_at_will=grows_at_will
            )
        invariant(not self.awaiting_onboard, "a sequence waits for blocks that were not onboarded")
        handles = {each.request_id: handle for handle, each in self.sequences.items() if not each.holders}
        invariant(handles == self.handles, "request ids and handles disagree")
        self._check_readers()
        check_shared(self.positional, self.groups[0].levels[PRIMARY], self.sequences)
        self._check_decoding()
        if self.tokens_recorded:
            self._check_symbols()

    def slot_states(self, index: int) -> tuple[States, States]:
        """Derive the state of each slot of a group, per level. Raises `InvariantViolated` for a slot in two states or
        none.
        """
        return slot_states(self.groups[index], self.sequences.values(), self.pins.values())

    def _check_readers(self) -> None:
        readers = Counter[int](
            each.encoder.handle for each in self.sequences.values() if each.encoder is not None
        )
        for handle, sequence in self.sequences.items():
            invariant(
                sequence.holders == readers[handle], "the users of an encoder input are counted wrongly"
            )
        invariant(readers.keys() <= self.sequences.keys(), "a sequence uses an encoder input that has ended")

    def _check_decoding(self) -> None:
        """Verify the row of sequences that decode together: each change to one must have called
        `RunningTokens.forget_row`.
        """
        row = [self.sequences[handle] for handle in array("q", self.running.handles or b"")]
        invariant(
            all(sequence.is_decoding for sequence in row), "a sequence that decodes counts its tokens itself"
        )
        invariant(
            self.running.appends_to(row), "tokens are appended to sequences other than those that decode"
        )

    def _check_symbols(self) -> None:
        ends = {handle: rich_end(sequence.tokens.tobytes()) for handle, sequence in self.sequences.items()}
        rich = {handle: end for handle, end in ends.items() if end}
        invariant(self.rich == rich, "the symbols of a sequence are recorded wrongly, or have no meaning")
        invariant(self.used_pages() <= self.symbols.pages.keys(), "a symbol has no meaning")

    def export(self) -> ev.StateExported:
        """Export the state as an event."""
        return ev.StateExported(
            groups=tuple(export_group(group) for group in self.groups),
            sequences=tuple(export_sequence(sequence) for sequence in self.sequences.values()),
            transfers=tuple(
                ev.TransferExported(number, copy.group, copy.level, copy.slots.tobytes(), copy.handle)
                for number, copy in self.transfers.items()
            ),
            next_handle=self.next_handle,
            next_transfer=self.next_transfer,
            releases=self.releases,
            changed_blocks=self.changed_blocks,
            symbols=tuple(page for _, page in sorted(self.symbols.pages.items())),
            forget_symbols_at=self.symbols.forget_at,
            refused=tuple(self.refused),
            clock=self.clock,
            pins=tuple(
                ev.PinExported(
                    number, pin.request_id, pin.named, tuple(slots.tobytes() for slots in pin.slots)
                )
                for number, pin in self.pins.items()
            ),
            next_pin=self.next_pin,
        )

    def export_shared(self) -> tuple[ev.PoolShared, ...]:
        """Export the shared pool, which follows the exported state of a cache with groups that share one; empty for
        others.
        """
        return (
            (ev.PoolShared(tuple([group.export() for group in self.positional])),) if self.positional else ()
        )

    def _install(self, event: ev.StateExported) -> None:
        """Replace the state by an exported one. Raises `InvariantViolated` if it is impossible."""
        self.running.forget_row()
        self.awaiting_onboard.clear()
        self.positional = []
        invariant(self.created is not None, "a state was exported before the cache was created")
        invariant(len(event.groups) == len(self.groups), "the exported state has different groups")
        for number, exported in enumerate(event.groups):
            self.groups[number] = self.make_group(number)
            install_group(self.groups[number], exported, self.root_key)
        self.sequences.clear()
        self.handles.clear()
        self.symbols.install(event)
        self.rich.clear()
        self.refused = dict.fromkeys(event.refused)
        readers = Counter(entry.encoder for entry in event.sequences if entry.encoder)
        for entry in event.sequences:
            invariant(entry.handle < event.next_handle, "the handle of a running sequence is out of range")
            self._install_sequence(entry, readers[entry.handle])
        invariant(len(self.sequences) == len(event.sequences), "two sequences have one handle")
        for entry in event.sequences:
            if entry.encoder:
                self.sequences[entry.handle].encoder = self.sequences[entry.encoder]
        self.transfers = {
            item.transfer: Transfer(GroupIndex(item.group), item.level, array("i", item.slots), item.handle)
            for item in event.transfers
        }
        for transfer in self.transfers.values():
            invariant(transfer.level in (PRIMARY, SECONDARY), "unknown level")
            invariant(0 <= transfer.group < len(self.groups), "unknown group")
        numbers = (event.next_handle, event.next_transfer)
        invariant(min(numbers) > 0 and max(numbers) <= MAX_NUMBER, "handles or transfer ids are out of range")
        self.next_handle, self.next_transfer = numbers
        self.releases, self.changed_blocks, self.clock = event.releases, event.changed_blocks, event.clock
        counting = any(group.uses is not None for group in self.groups)
        invariant(not counting or 0 <= self.releases <= MAX_TURN, "the release counter is out of range")
        self._install_pins(event)
        self.check_slots()

    def _install_pins(self, event: ev.StateExported) -> None:
        self.pins.clear()
        for entry in event.pins:
            invariant(0 < entry.pin < event.next_pin, "the number of a pin is out of range")
            slots, ends = [array("i", packed) for packed in entry.slots], list[Run | None]()
            invariant(len(slots) == len(self.groups), "a pin holds blocks of unknown windows")
            for group, own in zip(self.groups, slots, strict=True):
                if isinstance(group, FullGroup) and entry.named and own:
                    ends.append(group.run_at(PRIMARY, own[-1]))
                else:
                    ends.append(None)
            self.pins[entry.pin] = Pin(entry.request_id, slots, ends, entry.named)
        self.next_pin = event.next_pin

    def _install_sequence(self, entry: ev.SequenceExported, readers: int) -> None:
        slots, count = [array("i", packed) for packed in entry.slots], len(self.groups)
        tables, replaced = slots[:count], tuple(slots[count:])
        invariant(len(replaced) in (0, count * self.keeps_replaced), "a sequence keeps slots of other groups")
        ends, detached = list[Node](), list[int]()
        for group, stored, table in zip(self.groups, entry.stored, tables, strict=True):
            root = group.root(entry.namespace, self.root_key(entry.namespace))
            root.users += 1
            invariant(0 <= stored <= len(table), "a sequence has more cached blocks than blocks")
            detached.append(next((n for n, slot in enumerate(table) if slot != DETACHED), len(table)))
            if isinstance(group, SlidingGroup):
                ends.append(PathEnd(stored))
                continue
            ends.append(group.run_at(PRIMARY, table[stored - 1]) if stored else root)
            invariant(ends[-1].end == stored, "a sequence's cached blocks end inside a run")
        tokens = self.tokens_of(
            entry.num_tokens, entry.tokens, self.longest_input if readers else self.longest
        )
        invariant(not (readers and entry.encoder), "an encoder input uses another one")
        invariant(
            0 < entry.num_prompt_tokens <= entry.num_tokens, "a prompt is empty, or longer than its sequence"
        )
        sequence = Sequence(Handle(entry.handle), entry.request_id, entry.namespace, tokens, ends)
        sequence.num_prompt_tokens, sequence.computed = entry.num_prompt_tokens, entry.computed
        sequence.tables, sequence.detached, sequence.keys = tables, detached, bytearray(entry.keys)
        sequence.replaced = replaced
        sequence.retention, sequence.inherited = entry.retention, entry.inherited
        self.default_retention_only &= entry.retention is None and not entry.inherited
        self.sequences[entry.handle] = sequence
        sequence.holders = readers
        if not readers:
            self.handles[entry.request_id] = entry.handle
        self.note_rich(entry.handle, entry.tokens)


def _ignore(event: ev.Event) -> None:
    """Ignore a note, which changes nothing."""


def _refuse(event: ev.Event) -> None:
    raise InvariantViolated("the log of a cache contains an event of another engine")


def _check_level(level: int) -> None:
    if level not in (PRIMARY, SECONDARY):
        raise InvariantViolated("unknown level")


def resident_names(state: CacheState, level: int, group: int = 0) -> set[int]:
    """Names of the full blocks resident in this level; empty if blocks have no names."""
    key_bytes = state.hashing.key_bytes
    names: set[int] = set()
    if not key_bytes:
        return names
    for keys in state.groups[group].resident_keys(level):
        names.update(unpack_names(names_of_keys(keys, key_bytes)).tolist())
    return names

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
from events.ids import MAX_NUMBER
from events.packed import TOKEN_BYTES
from events.tokens.names import ALGORITHMS
from events.types import FEED_EVENTS
from kvcache.errors import InvariantViolated, invariant
from kvcache.fold.exported_state import install
from kvcache.fold.positional_fold import PositionalFold
from kvcache.fold.sequence import Sequence
from kvcache.fold.shape import check_created, longest_input, longest_sequence

REMEMBERED_REFUSALS = 4096
"""A request that was refused longer ago may be noted again."""


class CacheState(PositionalFold):
    """Everything the cache knows. Starts empty; `CacheCreated` gives it its shape."""

    def __init__(self, *, tokens_recorded: bool = True) -> None:
        super().__init__(tokens_recorded=tokens_recorded)
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

    def apply(self, event: ev.Event) -> None:
        """Change the state by one event."""
        self.handlers[type(event)](event)

    # -- life of the cache

    def _create(self, event: ev.CacheCreated) -> None:
        check_created(event)
        invariant(self.tokens_recorded or event.key_bytes > 0, "blocks have neither tokens nor names")
        self.created = event
        self.longest, self.longest_input = longest_sequence(event), longest_input(event)
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

    def _install(self, event: ev.StateExported) -> None:
        self.running.forget_row()
        self.awaiting_onboard.clear()
        self.positional = []
        install(self, event)

    def _checkpoint(self, event: ev.Checkpoint) -> None:
        invariant(len(event.engine_counts) in (0, 2), "an engine has counted something else")
        self.changed_blocks = 0

    def _clear(self, event: ev.CacheCleared) -> None:
        cleared = [group.clear() for group in self.groups]
        removed, unnamed = zip(*cleared, strict=True)
        invariant(removed == event.removed and unnamed == event.unnamed, "another state was cleared")
        for sequence in self.sequences.values():
            sequence.path_ends = self.roots(sequence.namespace)
        self._forget_names_of_pins()
        self._forget_positional_names()
        self.changed_blocks += sum(map(sum, removed)) + sum(unnamed)

    # -- sequences

    def _add_sequence(self, event: ev.SequenceAdded) -> None:
        handle, request_id, namespace = event.handle, event.request_id, event.namespace
        if not self.next_handle <= handle <= MAX_NUMBER:
            raise InvariantViolated("a handle was used twice, or no epoch has it")
        if request_id in self.handles:
            raise InvariantViolated("a request was admitted twice")
        tokens = self.tokens_of(event.num_tokens, event.tokens, self.longest)
        if not 0 <= event.reused < event.num_tokens:
            raise InvariantViolated("more is reused than there is to compute")
        if event.reused_external and (
            event.reused_partial or not 0 < event.reused_external < event.num_tokens - event.reused
        ):
            raise InvariantViolated("more is loaded than there is to compute, or in the middle of a block")
        sequence = Sequence(handle, request_id, namespace, tokens, self.roots(namespace))
        sequence.computed, sequence.retention = event.reused, event.retention
        self.all_kept_alike = self.all_kept_alike and event.retention is None
        self.tell_time(event.clock)
        self.sequences[handle] = sequence
        self.handles[request_id] = handle
        self.refused.pop(request_id, None)
        self.note_rich(handle, event.tokens)
        self.next_handle = handle + 1
        for group in self.groups:
            group.tree.roots[namespace].users += 1
            group.begin(sequence, event.reused)

    def _note_refusal(self, event: ev.AdmissionRefused) -> None:
        self.refused[event.request_id] = None
        if len(self.refused) > REMEMBERED_REFUSALS:
            del self.refused[next(iter(self.refused))]

    def _note_failure(self, event: ev.LoadFailed) -> None:
        if not 0 < event.num_tokens < self.sequences[event.handle].num_tokens:
            raise InvariantViolated("more was to be loaded than there is")

    def _append_tokens(self, event: ev.TokensAppended) -> None:
        if event.counts:
            self._append_many(event)
        elif 2 * len(event.tokens) != len(event.handles):  # int32 and int64
            raise InvariantViolated("not each sequence got one token")
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
            raise InvariantViolated("more is computed than there is")
        self.set_computed(sequence, event.num_tokens)

    def _remove_sequence(self, event: ev.SequenceRemoved) -> None:
        sequence = self.sequences.pop(event.handle)
        del self.handles[sequence.request_id]
        self.rich.pop(event.handle, None)
        self._end_positional(event.handle)
        if sequence.encoder is not None:
            sequence.encoder.holders -= 1
        self.running.forget_row()
        self.releases += 1
        self.tell_time(event.clock)
        for index, group in enumerate(self.groups):
            freed = group.end(sequence, self.releases, self.clock)
            if freed.tobytes() != event.freed[index]:
                raise InvariantViolated("other slots were freed")
            root = group.tree.roots[sequence.namespace]
            root.users -= 1
            group.tree.drop_unused(root)


def _ignore(event: ev.Event) -> None:
    """Notes that change nothing."""


def _refuse(event: ev.Event) -> None:
    raise InvariantViolated("an event of a cache's log tells what another engine said")

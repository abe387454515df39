"""A log's events as a history of contents, and each admission explained by the history before it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import msgspec
import numpy as np

from events import types as ev
from events.ids import first_number
from events.packed import NAME_BYTES, TOKEN_BYTES, names_of_keys
from events.tokens.sequences import RunningTokens
from events.types import PRIMARY, SECONDARY, SLIDING, EventBatch, MoveReason, RemoveReason, RequestId
from kvcache.audit.admission import Admission
from kvcache.audit.columns import Columns, Ids
from kvcache.audit.explaining import explain, facts_of, note_reused
from kvcache.audit.exported import cached_in
from kvcache.audit.history import History
from kvcache.audit.listener import Listener
from kvcache.audit.reasons import Reason
from kvcache.audit.running import Running
from kvcache.audit.self_attention import SelfAttention
from kvcache.audit.window import NOWHERE, Window
from kvcache.fold.state import CacheState
from kvcache.replay import Replayed, fitting, known_events


class HistoryFold(History):
    """Folds batches; tells a listener what happens to contents, and of each admission why it computed what it did.

    Each batch is applied to the cache's state first, which refuses what does not follow from the batches before it:
    what is folded here can rely on all that is checked there.
    """

    def __init__(
        self, listener: Listener | None = None, details: Callable[[RequestId], bool] = lambda _: False
    ) -> None:
        super().__init__()
        self.replayed = Replayed(CacheState())
        """The cache after the last batch."""
        self.listener = listener if listener is not None else Listener()
        self._details = details
        self._self_attention = SelfAttention()
        self._tokens = RunningTokens(self.running)
        self._admitted: dict[int, Admission] = {}
        """Of this batch, by handle: what they claim follows."""
        self._counts: tuple[int, int] | None = None
        """Prompt tokens and reused ones since the cache was created; None: something is missing."""
        self._failed = False
        """Whether a copy fails in this batch: by it all that goes in it is lost."""
        self._pinned: dict[int, list[Ids]] = {}
        """By number of the pin: per window, contents that it holds."""
        self._losing: list[tuple[Window, Ids]] = []
        """What was cached when everything went, as long as a state may bring it back."""
        self._handlers = self._event_handlers()

    def _event_handlers(self) -> dict[type[ev.Event], Callable[[Any], None]]:
        return {
            ev.EpochStarted: self._on_epoch,
            ev.CacheCreated: self._on_created,
            ev.StateExported: self._on_exported,
            ev.SequenceAdded: self._on_added,
            ev.BlocksReused: self._on_reused,
            ev.BlocksStored: self._on_stored,
            ev.BlocksFilled: self._on_filled,
            ev.BlocksUpdated: self._on_updated,
            ev.BlocksMoved: self._on_moved,
            ev.BlocksRemoved: self._on_removed,
            ev.BlocksDetached: self._on_detached,
            ev.BlocksPinned: self._on_pinned,
            ev.BlocksUnpinned: self._on_unpinned,
            ev.TokensAppended: self._on_appended,
            ev.ContextComputed: self._on_computed,
            ev.LoadFailed: self._on_load_failed,
            ev.SequenceForked: self._on_forked,
            ev.SequenceRewound: self._on_rewound,
            ev.SequenceRemoved: self._on_ended,
            ev.TransferFailed: self._on_failed,
            ev.CacheCleared: self._on_cleared,
            ev.Checkpoint: self._on_checkpoint,
            ev.Gap: self._on_gap,
            ev.AdmissionRefused: self._on_refused,
            ev.SymbolsInterned: self._on_interned,
            ev.PoolShared: self._on_shared,
            ev.SlotsNamed: self._on_named,
            ev.SlotsUnnamed: self._on_unnamed,
        }

    def fold(self, batch: EventBatch) -> None:
        """Fold one batch. Raises `Unreplayable` for one that does not follow, and `TooLarge`."""
        self.replayed.fold(batch, verify=False)
        with fitting(batch.seq):
            self._fold(batch)

    def _fold(self, batch: EventBatch) -> None:
        self.batch, self.now = batch.seq, batch.ts
        events = known_events(batch)
        kinds = set(map(type, events))
        self._failed = ev.TransferFailed in kinds
        if ev.PoolShared in kinds and self.names is None:
            # Further groups are known by names alone.
            self.names = Columns(name=(np.uint64, 0))
        for event in self._self_attention.of(events):
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event)
        for admission in self._admitted.values():
            self._correct_same_step(admission)
            admission.count()
            self.listener.admitted(self, admission)
        self._admitted.clear()
        self.epochs.of(self.now)
        self.listener.batch_ended(self)

    # -- the life of the cache

    def _on_epoch(self, event: ev.EpochStarted) -> None:
        self.tokens_recorded = event.tokens_recorded
        self.epochs.begin(self.now, self.batch)

    def _on_created(self, event: ev.CacheCreated) -> None:
        """What ran before is forgotten by the state that follows, as far as it does not go on."""
        self._lose_all(Reason.RESTARTED)
        self.contents.learn((), anew=True)
        self.pending["count"].fill(0)
        settings = msgspec.json.decode(event.config)
        self.reuse, self.tokens_per_block = settings["enable_block_reuse"], event.tokens_per_block
        self.key_bytes, self._counts = event.key_bytes, (0, 0)
        self.engine, self.drops_last_hit = event.engine, event.drops_last_hit
        # Where every window attends to everything, what is cached can be reused, and our manager does.
        slides = any(group.kind == SLIDING for group in event.groups)
        self.not_taken = Reason.NOT_REUSED if event.engine and not slides else Reason.NOT_SERVABLE
        self.shared.end(self.batch, self.now)
        before, self.windows = self.windows, [Window(group) for group in event.groups]
        for old, new in zip(before, self.windows, strict=False):
            new.of = old.of

    def _on_exported(self, event: ev.StateExported) -> None:
        """What is not in it is gone: batches were lost before it, or the cache began with it."""
        self.shared.end(self.batch, self.now)
        if event.next_handle > first_number(self.replayed.state.epoch):
            self._counts = None
        running = {each.handle: self.running.get(each.handle) for each in event.sequences}
        self.contents.learn(event.symbols, anew=True)
        self._lose_all(Reason.RESTARTED)
        self.running.clear()
        self._tokens.forget_row()
        self.pending["count"].fill(0)
        for window, exported in zip(self.windows, event.groups, strict=True):
            for ids, slots, level, priority, names in cached_in(
                exported,
                self.contents,
                self.tokens_per_block,
                self.key_bytes,
                with_tokens=self.tokens_recorded,
            ):
                window.restore(ids, slots, level, priority, self.batch, self.now)
                self._name(ids, names)
        for each in event.sequences:
            self._go_on(each, running[each.handle])
        self._pinned.clear()
        for pin in event.pins:
            self._pin(pin.pin, pin.slots if pin.named else ())
        self._tell_lost()
        self.listener.restarted(self)

    def _go_on(self, exported: ev.SequenceExported, known: Running | None) -> None:
        symbols = _symbols(exported.tokens, exported.num_tokens)
        number = known.number if known is not None else self._numbered(exported.request_id)
        sequence = Running(number, exported.request_id, symbols, exported.namespace, len(self.windows))
        sequence.num_prompt_tokens = exported.num_prompt_tokens
        self.running[exported.handle] = sequence
        if self.key_bytes and exported.keys:
            sequence.name(0, names_of_keys(exported.keys, self.key_bytes))
        self._set_computed(sequence, min(exported.computed, exported.num_prompt_tokens), added=True)
        for group, (window, slots, stored) in enumerate(
            zip(self.windows, exported.slots, exported.stored, strict=True)
        ):
            table = np.frombuffer(slots, np.int32)
            sequence.left[group] = int((table == _DETACHED).sum())
            table = table[:stored]
            ids = np.where(table >= 0, window.slots[PRIMARY][table], -1).astype(np.intp)
            sequence.take(group, 0, ids)
            window.hold(ids[ids >= 0])

    def _on_interned(self, event: ev.SymbolsInterned) -> None:
        self.contents.learn(event.pages)

    def _lose_all(self, why: Reason) -> None:
        for window in self.windows:
            self._losing.append((window, window.remove_all(why, self.batch, self.now)))
        for sequence in self.running.values():
            sequence.held = [np.empty(0, np.intp) for _ in self.windows]
        for held in self._pinned.values():
            held.clear()

    def _tell_lost(self) -> None:
        """Everything cached is gone, but for what an exported state has brought back."""
        for window, ids in self._losing:
            self.listener.lost(self, window, ids[window.of["level"][ids] == NOWHERE])
        self._losing.clear()

    def _on_failed(self, event: ev.TransferFailed) -> None:
        self._tokens.forget_row()
        for sequence in self.running.values():
            self._set_computed(sequence, 0)

    def _on_gap(self, event: ev.Gap) -> None:
        self._counts = None

    def _on_checkpoint(self, event: ev.Checkpoint) -> None:
        if event.engine_counts and self._counts is not None:
            prompt_tokens, reused = event.engine_counts
            self.listener.counted(self, self._counts, (prompt_tokens, reused))

    def _on_cleared(self, event: ev.CacheCleared) -> None:
        self._lose_all(Reason.COPY_FAILED if self._failed else Reason.CLEARED)
        self.shared.clear(self.batch, self.now)
        self._tell_lost()

    def _on_shared(self, event: ev.PoolShared) -> None:
        self.shared.begin(event, len(self.windows), self.key_bytes)

    def _on_named(self, event: ev.SlotsNamed) -> None:
        self.shared.groups[event.group - len(self.windows)].name(event.keys)

    def _on_unnamed(self, event: ev.SlotsUnnamed) -> None:
        by = self.running[event.handle].number if event.handle in self.running else -1
        group = self.shared.groups[event.group - len(self.windows)]
        group.unname(event.keys, self.batch, self.now, by)

    # -- requests

    def _numbered(self, request_id: RequestId) -> int:
        self.requests.append(request_id)
        return len(self.requests) - 1

    def _on_added(self, event: ev.SequenceAdded) -> None:
        symbols = _symbols(event.tokens, event.num_tokens)
        number = self._numbered(event.request_id)
        if self._counts is not None:
            self._counts = self._counts[0] + event.num_tokens, self._counts[1] + event.reused
        sequence = Running(number, event.request_id, symbols, event.namespace, len(self.windows))
        sequence.left = [window.left_behind(event.reused, self.tokens_per_block) for window in self.windows]
        last_block = (event.num_tokens - 1) // self.tokens_per_block
        ids = self._prompt_contents(sequence, last_block)
        admission = explain(self, event, sequence, ids)
        self.listener.looked_up(self, admission)
        self.running[event.handle] = sequence
        self._tokens.forget_row()
        self._set_computed(sequence, event.reused, added=True)
        self._admitted[event.handle] = admission
        if self._details(event.request_id):
            admission.facts = facts_of(self, admission)

    def _prompt_contents(self, sequence: Running, stop: int) -> Ids:
        if not self.tokens_recorded:
            return np.empty(0, np.intp)
        ids = sequence.contents(self.contents, stop, self.tokens_per_block)
        self.reach()
        return ids

    def _correct_same_step(self, admission: Admission) -> None:
        for block in np.flatnonzero(admission.reasons == Reason.BEING_COMPUTED).tolist():
            of = self.windows[admission.windows[block]].of
            if of["seen"][admission.ids[block]] and of["stored_batch"][admission.ids[block]] == self.batch:
                admission.reasons[block] = Reason.SAME_STEP

    def _set_computed(self, sequence: Running, num_tokens: int, *, added: bool = False) -> None:
        """Note how far a prompt is computed."""
        size, stop = self.tokens_per_block, sequence.num_prompt_tokens // self.tokens_per_block
        before, after = min(sequence.computed // size, stop), min(num_tokens // size, stop)
        sequence.computed = num_tokens
        if not self.tokens_recorded or (before == after and not added):
            return
        ids = sequence.contents(self.contents, stop, size)
        self.reach()
        if added:
            self.pending["count"][ids[after:]] += 1
        elif before < after:
            self.pending["count"][ids[before:after]] -= 1
        else:
            self.pending["count"][ids[after:before]] += 1

    def _on_computed(self, event: ev.ContextComputed) -> None:
        sequence = self.running[event.handle]
        self._set_computed(sequence, min(event.num_tokens, sequence.num_prompt_tokens))

    def _on_load_failed(self, event: ev.LoadFailed) -> None:
        self.listener.not_loaded(self, self.running[event.handle], event.num_tokens)

    def _on_appended(self, event: ev.TokensAppended) -> None:
        if not event.draft and (event.counts or event.handles != self._tokens.handles):
            for handle in array("q", event.handles):
                sequence = self.running[handle]
                if sequence.computed < sequence.num_prompt_tokens:
                    self._set_computed(sequence, sequence.num_prompt_tokens)
        self._tokens.append(event)

    def _on_forked(self, event: ev.SequenceForked) -> None:
        """No admission: the branch has looked nothing up."""
        child = self.running[event.handle].branch_as(self._numbered(event.request_id), event.request_id)
        self.running[event.child] = child
        self._tokens.forget_row()
        self._set_computed(child, child.computed, added=True)
        for window, held in zip(self.windows, child.held, strict=True):
            window.hold(held[held >= 0])
        self.listener.forked(self, child)

    def _on_rewound(self, event: ev.SequenceRewound) -> None:
        sequence, computed = self.running[event.handle], self.running[event.handle].computed
        self._set_computed(sequence, sequence.num_prompt_tokens)
        self._tokens.forget_row()
        sequence.rewind(event.num_tokens, self.tokens_per_block)
        blocks = (event.num_tokens - 1) // self.tokens_per_block
        for group, window in enumerate(self.windows):
            window.release(sequence.let_go(group, blocks), self.now)
        sequence.computed = min(computed, event.num_tokens - 1)
        self._set_computed(sequence, sequence.computed, added=True)

    def _on_ended(self, event: ev.SequenceRemoved) -> None:
        sequence = self.running.pop(event.handle)
        self._tokens.forget_row()
        self._set_computed(sequence, sequence.num_prompt_tokens)
        for group, window in enumerate(self.windows):
            window.release(sequence.let_go(group, 0), self.now)
        self.listener.ended(self, sequence, event)

    def _on_refused(self, event: ev.AdmissionRefused) -> None:
        self.listener.refused(self, event)

    # -- blocks

    def _on_reused(self, event: ev.BlocksReused) -> None:
        sequence, window = self.running[event.handle], self.windows[event.group]
        ids = window.contents(event.level, event.slots)
        sequence.take(event.group, event.first_block, ids)
        sequence.name_up_to(event.first_block + len(ids), event.names)
        known = ids[ids >= 0]
        if event.replaced:
            self.listener.computed_twice(self, window, len(known))
        else:
            admission = self._admitted[event.handle]
            if admission.facts:
                note_reused(admission, event, window, ids)
            if event.level == SECONDARY:
                admission.reasons[event.first_block : event.first_block + len(ids)] = Reason.SECONDARY
            self._name_served(ids, event.names)
            self.listener.reused(self, window, known, event.level)
            window.reuse(known, self.now)
        window.hold(known)

    def _name_served(self, ids: Ids, names: bytes) -> None:
        """The names are of the sequence's blocks up to the last of these; other windows do not tell them again."""
        of_all = np.frombuffer(names, np.uint64)[-len(ids) :]
        own = ids[len(ids) - len(of_all) :]
        self.served_names.reach(len(self.contents))
        self.served_names["name"][own[own >= 0]] = of_all[own >= 0]

    def _on_stored(self, event: ev.BlocksStored) -> None:
        size, sequence = self.tokens_per_block, self.running[event.handle]
        slots = np.frombuffer(event.slots, np.int32)
        last = event.first_block + len(slots)
        if event.keys and self.keeps_names:
            sequence.name_up_to(last, names_of_keys(event.keys, self.key_bytes))
        full = len(slots) - (event.last_tokens < size)
        self._cache(sequence, event.group, event.first_block, slots[:full], event.priority)

    def _on_filled(self, event: ev.BlocksFilled) -> None:
        keys, size, naming = event.keys, self.key_bytes, self.keeps_names
        slots = np.frombuffer(event.slots, np.int32)
        for at, (handle, block) in enumerate(
            zip(array("q", event.handles), array("I", event.blocks), strict=True)
        ):
            sequence = self.running[handle]
            if keys and naming:
                sequence.name(block, names_of_keys(keys[at * size : (at + 1) * size], size))
            self._cache(sequence, event.group, block, slots[at : at + 1], event.priority)

    def _cache(self, sequence: Running, group: int, first: int, slots: Any, priority: int) -> None:
        if not len(slots):
            return
        if self.tokens_recorded:
            ids = sequence.contents(self.contents, first + len(slots), self.tokens_per_block)[first:]
        else:
            names = sequence.names[first * NAME_BYTES : (first + len(slots)) * NAME_BYTES]
            ids = np.array(self.contents.named(bytes(names)), np.intp)
        self.reach()
        self._name(ids, sequence.names[first * NAME_BYTES : (first + len(slots)) * NAME_BYTES])
        window = self.windows[group]
        window.store(ids, slots, PRIMARY, priority, sequence.number, self.batch, self.now)
        sequence.take(group, first, ids)
        window.hold(ids)
        self.listener.stored(self, window, ids)

    def _name(self, ids: Ids, names: bytes | bytearray) -> None:
        """Note the names of contents, where the log has any and somebody asks for them."""
        if self.names is not None and names:
            self.names.reach(len(self.contents))
            self.names["name"][ids] = np.frombuffer(names, np.uint64)

    def _on_updated(self, event: ev.BlocksUpdated) -> None:
        window = self.windows[event.group]
        ids = window.contents(event.level, event.slots)
        window.of["priority"][ids[ids >= 0]] = event.priority

    def _on_moved(self, event: ev.BlocksMoved) -> None:
        window = self.windows[event.group]
        window.move(event.from_level, event.from_slots, event.to_level, event.to_slots)
        if event.why == MoveReason.RECOMPUTED and event.handle is not None:
            ids, sequence = window.contents(event.to_level, event.to_slots), self.running[event.handle]
            sequence.take(event.group, event.first_block, ids)
            sequence.name_up_to(event.first_block + len(ids), event.names)
            window.hold(ids[ids >= 0])
        self.listener.moved(self, window, event)
        if event.why == MoveReason.OFFLOAD:
            ids = window.contents(event.to_level, event.to_slots)
            self.listener.evicted(self, window, ids[ids >= 0], event.from_level)

    def _on_removed(self, event: ev.BlocksRemoved) -> None:
        window = self.windows[event.group]
        by = self.running[event.handle].number if event.handle in self.running else -1
        invalid = event.why == RemoveReason.INVALIDATED
        ids = window.remove(event.level, event.slots, by, self.batch, self.now, invalid=invalid)
        for sequence in self.running.values() if invalid else ():
            sequence.forget(event.group, ids)
        if not invalid:
            self.listener.evicted(self, window, ids, event.level)
        self.listener.removed(self, window, ids, event)

    def _on_detached(self, event: ev.BlocksDetached) -> None:
        handles = array("q", event.handles)
        counts = array("I", event.counts) if event.counts else repeat(1, len(handles))
        window = self.windows[event.group]
        for handle, count in zip(handles, counts, strict=False):
            window.release(self.running[handle].leave(event.group, count), self.now)

    def _on_pinned(self, event: ev.BlocksPinned) -> None:
        self._pin(event.pin, event.slots)

    def _pin(self, number: int, slots: Sequence[bytes]) -> None:
        contents = [window.contents(PRIMARY, own) for window, own in zip(self.windows, slots, strict=False)]
        self._pinned[number] = held = [ids[ids >= 0] for ids in contents]
        for window, ids in zip(self.windows, held, strict=False):
            window.hold(ids)

    def _on_unpinned(self, event: ev.BlocksUnpinned) -> None:
        for window, ids in zip(self.windows, self._pinned.pop(event.pin), strict=False):
            window.release(ids, self.now)


def _symbols(tokens: bytes, count: int) -> array[int]:
    """The symbols of a sequence; zeros where the log records none."""
    return array("i", tokens or bytes(TOKEN_BYTES * count))


_DETACHED = -2
"""In an exported table: left behind."""

"""A log as a history of contents, and the reasons behind each admission's computed tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from typing import Any

import msgspec
import numpy as np

from events import types as ev
from events.ids import first_number
from events.packed import TOKEN_BYTES, names_between
from events.types import (
    CROSS,
    PRIMARY,
    SECONDARY,
    SLIDING,
    EpochStarted,
    EventBatch,
    MoveReason,
    RemoveReason,
    RequestId,
    SequenceAdded,
)
from kvcache.audit.admission import (
    NO_ORIGIN,
    ExplainedAdmission,
    Lacking,
    RequestOrigin,
    SharedGroups,
    Tokens,
)
from kvcache.audit.contents import NOWHERE, Columns, ContentIds, Ids, Window, cached_in
from kvcache.audit.reasons import IS_EVICTION, Reason
from kvcache.fold.sequence import Pin, Sequence
from kvcache.fold.state import CacheState
from kvcache.replay import Replayed, fitting, known_events


class RunningRequest:
    """An admitted sequence of the cache's state. In logs without tokens its contents are known by name only."""

    __slots__ = ("_ids", "computed", "number", "sequence")

    def __init__(self, number: int, sequence: Sequence) -> None:
        self.number = number
        """Number of admissions in the log before this one."""
        self.sequence = sequence
        self.computed = 0
        """Prompt tokens computed so far."""
        self._ids = array("q")

    def contents(self, known: ContentIds, stop: int, tokens_per_block: int) -> Ids:
        """Return the contents of the request's first `stop` full blocks."""
        ids, size = self._ids, tokens_per_block * TOKEN_BYTES
        if len(ids) < stop:
            symbols = self.sequence.packed(len(ids) * tokens_per_block, stop * tokens_per_block)
            known.extend(ids, self.sequence.namespace, symbols, size)
        return np.frombuffer(ids, np.int64)[:stop].astype(np.intp)

    def rewind(self, blocks: int) -> None:
        """Drop all contents after the first `blocks` blocks, because the request's tokens were rolled back."""
        self._ids = self._ids[:blocks]


class EpochClock:
    """Monotonic times of a log in which the clock may restart with an epoch, as in logs of simulated time."""

    def __init__(self) -> None:
        self._shift, self._latest = 0, 0
        self._epochs = 0
        self.set_back: list[int] = []
        """Sequence numbers of the batches that began an epoch and had to be shifted after the preceding ones."""

    def begin(self, at: int, batch: int) -> None:
        """Begin an epoch at time `at` (ns)."""
        self._epochs += 1
        self._shift = max(0, self._latest - at) if self._epochs > 1 else 0
        if self._shift:
            self.set_back.append(batch)

    def of(self, at: int) -> int:
        """Return a time of this epoch, shifted if the epoch's clock started too early."""
        shifted = at + self._shift
        self._latest = max(self._latest, shifted)
        return shifted

    def of_batch(self, batch: EventBatch) -> int:
        """Return the time of the next batch, which may begin an epoch."""
        if any(type(event) is EpochStarted for event in batch.events):
            self.begin(batch.ts, batch.seq)
        return self.of(batch.ts)


def laid_out(batches: Iterable[EventBatch], clock: EpochClock) -> Iterator[EventBatch]:
    """Yield the batches with times shifted by `clock`."""
    for batch in batches:
        at = clock.of_batch(batch)
        yield batch if at == batch.ts else msgspec.structs.replace(batch, ts=at)


class HistoryListener:
    """Receiver of the events of a `HistoryFold`, called after each event is folded.

    `reused` alone is called before, so that ages are those before the reuse.
    """

    counting = True
    """False before the audited part of the log, for listeners that also need the part before it."""

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Handle an admission at lookup, before onboarding and the later events of the step are known."""

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Handle an admission at the end of its batch."""

    def refused(self, history: HistoryFold, event: ev.AdmissionRefused) -> None:
        """Handle the refusal of a request that did not fit."""

    def forked(self, history: HistoryFold, child: RunningRequest) -> None:
        """Handle a fork. The child has looked nothing up, so it is no admission."""

    def ended(self, history: HistoryFold, request: RunningRequest, event: ev.SequenceRemoved) -> None:
        """Handle the end of a request."""

    def not_loaded(self, history: HistoryFold, request: RunningRequest, tokens: int) -> None:
        """Handle prompt tokens that were to be loaded from outside and did not arrive."""

    def counted(self, history: HistoryFold, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
        """Handle the prompt and reused tokens since the cache was created, as counted by the log and by its engine."""

    def reused(self, history: HistoryFold, window: Window, ids: Ids, event: ev.BlocksReused) -> None:
        """Handle the reuse of full blocks, before it is folded."""

    def computed_twice(self, history: HistoryFold, window: Window, blocks: int) -> None:
        """Handle full blocks that a request computed although another request had stored them meanwhile."""

    def stored(self, history: HistoryFold, window: Window, ids: Ids) -> None:
        """Handle full blocks that were cached."""

    def moved(self, history: HistoryFold, window: Window, ids: Ids, event: ev.BlocksMoved) -> None:
        """Handle full blocks that changed their level."""

    def evicted(self, history: HistoryFold, window: Window, ids: Ids, level: int) -> None:
        """Handle full blocks that leave a level: moved from primary to secondary, or about to be `removed`."""

    def removed(self, history: HistoryFold, window: Window, ids: Ids, event: ev.BlocksRemoved) -> None:
        """Handle full blocks that were removed. Calls `lost` by default."""
        self.lost(history, window, ids)

    def lost(self, history: HistoryFold, window: Window, ids: Ids) -> None:
        """Handle full blocks that are gone for another reason: cleared, or absent from the state exported anew.

        The window may be that of the previous cache.
        """

    def restarted(self, history: HistoryFold) -> None:
        """Handle a state exported anew, after `lost` was called for everything that is not in it."""

    def batch_ended(self, history: HistoryFold) -> None:
        """Handle the end of a batch, after its last event."""


class HistoryFold:
    """Fold of batches that notifies listeners of what happens to contents, and explains each admission.

    Each event is also applied to the cache's state, which refuses events that do not follow from earlier ones.
    Ownership of slots is read there: before the event is applied for released blocks, after it for everything else.
    """

    tokens_recorded = True
    reuse = True
    engine = model = ""
    """Decision maker (empty: this library's manager) and model, as named in the settings."""
    drops_last_hit = False
    """`CacheCreated.drops_last_hit` of the current cache."""
    not_taken = Reason.NOT_SERVABLE
    """Reason for not reusing a block that is cached in every window."""
    tokens_per_block = 0
    key_bytes = 0

    def __init__(self, *listeners: HistoryListener) -> None:
        self.contents = ContentIds()
        self.windows: list[Window] = []
        self.running: dict[int, RunningRequest] = {}
        """Running requests by handle."""
        self.pending = Columns(count=(np.int32, 0))
        """Per content: running requests that have it in their prompt and have not computed it yet."""
        self.names = Columns(name=(np.uint64, 0))
        """Per content: its name, 0 if the log has none."""
        self.shared = SharedGroups()
        """Further groups, with slots in the pool of the first group."""
        self.epochs = EpochClock()
        self.batch, self.now = -1, 0
        """Sequence number of the batch being folded, and its wall clock in ns."""
        self.requests: list[RequestId] = []
        """Request ids by admission number."""
        self.origins: list[RequestOrigin] = []
        """Request origins by admission number."""
        self.replayed = Replayed(CacheState())
        """Cache after the last event."""
        self.listeners = listeners
        self._cross: int | None = None
        """The cross-attention group. It and the encoders' inputs are not audited: an audit explains why prompts were
        computed, and a prompt's namespace already distinguishes inputs."""
        self._inputs: set[int] = set()
        """Handles of encoders' inputs."""
        self._admitted: dict[int, ExplainedAdmission] = {}
        """Admissions of this batch by handle; the slots they claim follow in later events."""
        self._counts: tuple[int, int] | None = None
        """Prompt and reused tokens since the cache was created; None if part of the log is missing."""
        self._failed = False
        """True if a copy fails in this batch: everything removed in the batch is then lost through it."""
        self._losing: list[tuple[Window, Ids]] = []
        """Contents cached when everything was lost, kept while an exported state may restore them."""
        self._before: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.BlocksDetached: self._on_detached,
            ev.BlocksUnpinned: self._on_unpinned,
            ev.TokensAppended: self._on_appended,
            ev.SequenceRewound: self._on_rewind,
            ev.SequenceRemoved: self._on_ended,
        }
        """Handlers that run before an event is applied to the state."""
        self._after = self._handlers_after()

    def _handlers_after(self) -> dict[type[ev.Event], Callable[[Any], None]]:
        return {
            ev.EpochStarted: self._on_epoch,
            ev.CacheCreated: self._on_created,
            ev.StateExported: self._on_exported,
            ev.SequenceAdded: self._on_added,
            ev.EncoderAdded: lambda event: self._inputs.add(event.handle),
            ev.BlocksReused: self._on_reused,
            ev.BlocksStored: self._on_stored,
            ev.BlocksFilled: self._on_filled,
            ev.BlocksUpdated: self._on_updated,
            ev.BlocksMoved: self._on_moved,
            ev.BlocksRemoved: self._on_removed,
            ev.BlocksPinned: lambda event: self._pin(self.replayed.state.pins[event.pin]),
            ev.ContextComputed: self._on_computed,
            ev.LoadFailed: self._on_load_failed,
            ev.SequenceForked: self._on_forked,
            ev.SequenceRewound: self._on_rewound,
            ev.TransferFailed: self._on_failed,
            ev.CacheCleared: self._on_cleared,
            ev.Checkpoint: self._on_checkpoint,
            ev.Gap: self._on_gap,
            ev.AdmissionRefused: self._on_refused,
            ev.SymbolsInterned: lambda event: self.contents.learn(event.pages),
            ev.PoolShared: lambda event: self.shared.begin(event, len(self.windows), self.key_bytes),
            ev.SlotsNamed: self._on_named,
            ev.SlotsUnnamed: self._on_unnamed,
        }

    def request_id(self, number: int) -> RequestId | None:
        """Return the id of a request by its admission number; None for -1."""
        return self.requests[number] if number >= 0 else None

    def evicted_blocks(self, admission: ExplainedAdmission) -> Iterator[tuple[Window, Ids, Tokens]]:
        """Yield each window, with the contents that a prompt computes again because of evictions, and their tokens."""
        evicted = np.flatnonzero(IS_EVICTION[admission.reasons])
        if not len(evicted):
            return
        tokens = admission.tokens()
        for group, window in enumerate(self.windows):
            blocks = evicted[admission.windows[evicted] == group]
            yield window, admission.ids[blocks], tokens[blocks]

    def reach(self) -> None:
        """Extend all tables to the number of known contents."""
        rows = len(self.contents)
        self.pending.reach(rows)
        self.names.reach(rows)
        for window in self.windows:
            window.of.reach(rows)

    def fold(self, batch: EventBatch) -> None:
        """Fold one batch. Raises `Unreplayable` if it does not follow the previous one, and `TooLarge`."""
        self.batch, self.now = batch.seq, batch.ts
        self._failed = any(type(event) is ev.TransferFailed for event in known_events(batch))
        before, after = partial(self._follow, self._before), partial(self._follow, self._after)
        self.replayed.fold(batch, verify=False, before=before, after=after)
        with fitting(batch.seq):
            self._end_batch()

    def _follow(self, handlers: dict[type[ev.Event], Callable[[Any], None]], event: ev.AnyEvent) -> None:
        handler = handlers.get(type(event))
        if handler is not None and not (self._cross is not None and self._is_of_encoder(event)):
            handler(event)

    def _end_batch(self) -> None:
        for admission in self._admitted.values():
            self._correct_same_step(admission)
            admission.count()
            for each in self.listeners:
                each.admitted(self, admission)
        self._admitted.clear()
        self.epochs.of(self.now)
        for each in self.listeners:
            each.batch_ended(self)

    def _is_of_encoder(self, event: Any) -> bool:
        if isinstance(event, ev.EncoderAdded):
            return False
        fields = event.__struct_fields__
        of_input = "handle" in fields and event.handle in self._inputs
        return of_input or ("group" in fields and event.group == self._cross)

    # -- lifecycle of the cache

    def _on_epoch(self, event: ev.EpochStarted) -> None:
        self.tokens_recorded = event.tokens_recorded
        self.epochs.begin(self.now, self.batch)

    def _on_created(self, event: ev.CacheCreated) -> None:
        """Start a new cache. The state that follows drops all requests that do not continue."""
        self._lose_all(Reason.RESTARTED)
        self.contents.learn((), again=True)
        self.pending["count"].fill(0)
        settings = msgspec.json.decode(event.config)
        self.reuse, self.tokens_per_block = settings["enable_block_reuse"], event.tokens_per_block
        self.key_bytes, self._counts = event.key_bytes, (0, 0)
        self.engine, self.drops_last_hit = event.engine, event.drops_last_hit
        self.model = settings.get("model") or ""
        # Where every window attends to everything, what is cached can be reused, and our manager does.
        windows = [group for group in event.groups if group.kind != CROSS]
        self._cross = len(windows) if len(windows) < len(event.groups) else None
        self._inputs.clear()
        slides = any(group.kind == SLIDING for group in windows)
        self.not_taken = Reason.NOT_REUSED if event.engine and not slides else Reason.NOT_SERVABLE
        self.shared.end(self.batch, self.now)
        before, self.windows = self.windows, [Window(group) for group in windows]
        for old, new in zip(before, self.windows, strict=False):
            new.of = old.of

    def _on_exported(self, event: ev.StateExported) -> None:
        """Handle an exported state: what it lacks is gone, because batches before it were lost or the cache is new."""
        self.shared.end(self.batch, self.now)
        if event.next_handle > first_number(self.replayed.state.epoch):
            self._counts = None
        self._inputs = {each.encoder for each in event.sequences if each.encoder}
        running = self.running.copy()
        self.contents.learn(event.symbols, again=True)
        self._lose_all(Reason.RESTARTED)
        self.running.clear()
        self.pending["count"].fill(0)
        for window, exported in zip(self.windows, event.groups, strict=False):
            for ids, slots, level, priority, names in cached_in(
                exported,
                self.contents,
                self.tokens_per_block,
                self.key_bytes,
                with_tokens=self.tokens_recorded,
            ):
                self.reach()
                window.restore(ids, slots, level, priority, self.batch, self.now)
                self._name(ids, names)
        for handle, sequence in self.replayed.state.sequences.items():
            if handle not in self._inputs:
                self._continue_sequence(handle, sequence, running.get(handle))
        for pin in self.replayed.state.pins.values():
            if pin.named:
                self._pin(pin)
        self._report_lost()
        for each in self.listeners:
            each.restarted(self)

    def _continue_sequence(self, handle: int, sequence: Sequence, known: RunningRequest | None) -> None:
        number = known.number if known is not None else self._numbered(sequence.request_id, NO_ORIGIN)
        request = self.running[handle] = RunningRequest(number, sequence)
        self._set_computed(request, min(sequence.computed, sequence.num_prompt_tokens), added=True)
        self._hold(request)

    def _held(self, request: RunningRequest, group: int, first: int = 0, stop: int | None = None) -> Ids:
        """Return the contents of the blocks that a request holds."""
        slots = np.array(request.sequence.tables[group][first:stop], np.int32)
        ids = self.windows[group].slots[PRIMARY][slots[slots >= 0]]
        return ids[ids >= 0]

    def _hold(self, request: RunningRequest) -> None:
        for group, window in enumerate(self.windows):
            window.hold(self._held(request, group))

    def _release(self, request: RunningRequest, first: int = 0) -> None:
        for group, window in enumerate(self.windows):
            window.release(self._held(request, group, first), self.now)

    def _lose_all(self, why: Reason) -> None:
        for window in self.windows:
            self._losing.append((window, window.remove_all(why, self.batch, self.now)))

    def _report_lost(self) -> None:
        """Report everything cached as lost, except what an exported state has restored."""
        for window, ids in self._losing:
            for each in self.listeners:
                each.lost(self, window, ids[window.of["level"][ids] == NOWHERE])
        self._losing.clear()

    def _on_failed(self, event: ev.TransferFailed) -> None:
        for request in self.running.values():
            self._set_computed(request, 0)

    def _on_gap(self, event: ev.Gap) -> None:
        self._counts = None

    def _on_checkpoint(self, event: ev.Checkpoint) -> None:
        if event.engine_counts and self._counts is not None:
            prompt_tokens, reused = event.engine_counts
            for each in self.listeners:
                each.counted(self, self._counts, (prompt_tokens, reused))

    def _on_cleared(self, event: ev.CacheCleared) -> None:
        self._lose_all(Reason.COPY_FAILED if self._failed else Reason.CLEARED)
        self.shared.clear(self.batch, self.now)
        self._report_lost()

    def _on_named(self, event: ev.SlotsNamed) -> None:
        self.shared.groups[event.group - len(self.windows)].name(event.keys)

    def _on_unnamed(self, event: ev.SlotsUnnamed) -> None:
        by = self.running[event.handle].number if event.handle in self.running else -1
        group = self.shared.groups[event.group - len(self.windows)]
        group.unname(event.keys, self.batch, self.now, by)

    # -- requests

    def _numbered(self, request_id: RequestId, origin: RequestOrigin) -> int:
        self.requests.append(request_id)
        self.origins.append(origin)
        return len(self.requests) - 1

    def computing(self, content: int, block: int) -> int:
        """Return the first running request with this content in its prompt, as this block, which it has still to
        compute; -1: none.
        """
        size = self.tokens_per_block
        for request in self.running.values():
            stop = request.sequence.num_prompt_tokens // size
            to_come = block < stop and (block + 1) * size > request.computed
            if to_come and int(request.contents(self.contents, stop, size)[block]) == content:
                return request.number
        return -1

    def _on_added(self, event: ev.SequenceAdded) -> None:
        said = event.session, event.labels
        origin = NO_ORIGIN if said == (None, None) else RequestOrigin(*said)
        number = self._numbered(event.request_id, origin)
        request = RunningRequest(number, self.replayed.state.sequences[event.handle])
        if self._counts is not None:
            self._counts = self._counts[0] + event.num_tokens, self._counts[1] + event.reused
        last_block = (event.num_tokens - 1) // self.tokens_per_block
        ids = self._contents(request, last_block) if self.tokens_recorded else np.empty(0, np.intp)
        admission = explain(self, event, number, ids)
        for each in self.listeners:
            each.looked_up(self, admission)
        self.running[event.handle] = request
        self._set_computed(request, event.reused, added=True)
        self._admitted[event.handle] = admission

    def _contents(self, request: RunningRequest, stop: int) -> Ids:
        ids = request.contents(self.contents, stop, self.tokens_per_block)
        self.reach()
        return ids

    def _correct_same_step(self, admission: ExplainedAdmission) -> None:
        for block in np.flatnonzero(admission.reasons == Reason.BEING_COMPUTED).tolist():
            of = self.windows[admission.windows[block]].of
            if of["seen"][admission.ids[block]] and of["stored_batch"][admission.ids[block]] == self.batch:
                admission.reasons[block] = Reason.SAME_STEP

    def _set_computed(self, request: RunningRequest, num_tokens: int, *, added: bool = False) -> None:
        """Record how far a prompt is computed."""
        size, stop = self.tokens_per_block, request.sequence.num_prompt_tokens // self.tokens_per_block
        before, after = min(request.computed // size, stop), min(num_tokens // size, stop)
        request.computed = num_tokens
        if not self.tokens_recorded or (before == after and not added):
            return
        ids = self._contents(request, stop)
        if added:
            self.pending["count"][ids[after:]] += 1
        elif before < after:
            self.pending["count"][ids[before:after]] -= 1
        else:
            self.pending["count"][ids[after:before]] += 1

    def _on_computed(self, event: ev.ContextComputed) -> None:
        request = self.running[event.handle]
        self._set_computed(request, min(event.num_tokens, request.sequence.num_prompt_tokens))

    def _on_load_failed(self, event: ev.LoadFailed) -> None:
        for each in self.listeners:
            each.not_loaded(self, self.running[event.handle], event.num_tokens)

    def _on_appended(self, event: ev.TokensAppended) -> None:
        # Sequences that continue together had their prompts computed before.
        if not event.draft and (event.counts or event.handles != self.replayed.state.running.handles):
            for handle in array("q", event.handles):
                request = self.running[handle]
                if request.computed < request.sequence.num_prompt_tokens:
                    self._set_computed(request, request.sequence.num_prompt_tokens)

    def _on_forked(self, event: ev.SequenceForked) -> None:
        """Handle a fork, which is no admission: the child has looked nothing up."""
        parent, sequence = self.running[event.handle], self.replayed.state.sequences[event.child]
        number = self._numbered(event.request_id, self.origins[parent.number])
        child = self.running[event.child] = RunningRequest(number, sequence)
        self._set_computed(child, parent.computed, added=True)
        self._hold(child)
        for each in self.listeners:
            each.forked(self, child)

    def _on_rewind(self, event: ev.SequenceRewound) -> None:
        request = self.running[event.handle]
        self._set_computed(request, request.sequence.num_prompt_tokens)
        self._release(request, (event.num_tokens - 1) // self.tokens_per_block)

    def _on_rewound(self, event: ev.SequenceRewound) -> None:
        request = self.running[event.handle]
        request.rewind(event.num_tokens // self.tokens_per_block)
        self._set_computed(request, request.sequence.computed, added=True)

    def _on_ended(self, event: ev.SequenceRemoved) -> None:
        request = self.running.pop(event.handle)
        self._set_computed(request, request.sequence.num_prompt_tokens)
        self._release(request)
        for each in self.listeners:
            each.ended(self, request, event)

    def _on_refused(self, event: ev.AdmissionRefused) -> None:
        for each in self.listeners:
            each.refused(self, event)

    # -- blocks

    def _on_reused(self, event: ev.BlocksReused) -> None:
        window = self.windows[event.group]
        ids = window.contents(event.level, event.slots)
        known = ids[ids >= 0]
        if event.replaced:
            for each in self.listeners:
                each.computed_twice(self, window, len(known))
        else:
            admission = self._admitted[event.handle]
            if event.level == SECONDARY:
                admission.reasons[event.first_block : event.first_block + len(ids)] = Reason.SECONDARY
            for each in self.listeners:
                each.reused(self, window, known, event)
            window.reuse(known, self.now)
        window.hold(known)

    def _on_stored(self, event: ev.BlocksStored) -> None:
        slots = np.frombuffer(event.slots, np.int32)
        full = len(slots) - (event.last_tokens < self.tokens_per_block)
        self._cache(event.handle, event.group, event.first_block, slots[:full], event.priority)

    def _on_filled(self, event: ev.BlocksFilled) -> None:
        slots = np.frombuffer(event.slots, np.int32)
        filled = zip(array("q", event.handles), array("I", event.blocks), strict=True)
        for at, (handle, block) in enumerate(filled):
            self._cache(handle, event.group, block, slots[at : at + 1], event.priority)

    def _cache(self, handle: int, group: int, first: int, slots: Any, priority: int) -> None:
        if not len(slots):
            return
        request, size, last = self.running[handle], self.key_bytes, first + len(slots)
        names = names_between(request.sequence.keys, size, first, last) if size else b""
        if self.tokens_recorded:
            ids = request.contents(self.contents, last, self.tokens_per_block)[first:]
        else:
            ids = np.array(self.contents.named(names), np.intp)
        self.reach()
        self._name(ids, names)
        window = self.windows[group]
        window.store(ids, slots, PRIMARY, priority, request.number, self.batch, self.now)
        window.hold(ids)
        for each in self.listeners:
            each.stored(self, window, ids)

    def _name(self, ids: Ids, names: bytes) -> None:
        """Record the names of contents, if the log has any."""
        if names:
            self.names["name"][ids] = np.frombuffer(names, np.uint64)

    def _on_updated(self, event: ev.BlocksUpdated) -> None:
        window = self.windows[event.group]
        ids = window.contents(event.level, event.slots)
        window.of["priority"][ids[ids >= 0]] = event.priority

    def _on_moved(self, event: ev.BlocksMoved) -> None:
        window = self.windows[event.group]
        ids = window.move(event, self.now)
        if event.why == MoveReason.RECOMPUTED:
            window.hold(ids)
        for each in self.listeners:
            each.moved(self, window, ids, event)
            if event.why == MoveReason.OFFLOAD:
                each.evicted(self, window, ids, event.from_level)

    def _on_removed(self, event: ev.BlocksRemoved) -> None:
        window = self.windows[event.group]
        by = self.running[event.handle].number if event.handle in self.running else -1
        invalid = event.why == RemoveReason.INVALIDATED
        ids = window.remove(event.level, event.slots, by, self.batch, self.now, invalid=invalid)
        if not invalid:
            for each in self.listeners:
                each.evicted(self, window, ids, event.level)
        for each in self.listeners:
            each.removed(self, window, ids, event)

    def _on_detached(self, event: ev.BlocksDetached) -> None:
        handles = array("q", event.handles)
        counts = array("I", event.counts) if event.counts else repeat(1, len(handles))
        for handle, count in zip(handles, counts, strict=False):
            request = self.running[handle]
            first = request.sequence.detached[event.group]
            ids = self._held(request, event.group, first, first + count)
            self.windows[event.group].release(ids, self.now)

    def _pinned(self, pin: Pin) -> Iterator[tuple[Window, Ids]]:
        for window, slots in zip(self.windows, pin.slots, strict=False):
            ids = window.contents(PRIMARY, slots)
            yield window, ids[ids >= 0]

    def _pin(self, pin: Pin) -> None:
        for window, ids in self._pinned(pin):
            window.hold(ids)

    def _on_unpinned(self, event: ev.BlocksUnpinned) -> None:
        pin = self.replayed.state.pins[event.pin]
        for window, ids in self._pinned(pin) if pin.named else ():
            window.release(ids, self.now)


def explain(history: HistoryFold, event: SequenceAdded, number: int, ids: Ids) -> ExplainedAdmission:
    """Return the admission with a reason for each block. Its onboarded blocks follow from later events."""
    size, last = history.tokens_per_block, event.num_tokens - 1
    external = event.reused + event.reused_external
    reasons = np.full(-(-last // size), Reason.UNALIGNED, np.int8)
    windows = np.full(len(reasons), -1, np.int8)
    reused = (event.reused - event.reused_partial) // size
    full = last // size
    if not history.reuse:
        reasons[:] = Reason.REUSE_OFF
    elif event.lookup is False:
        reasons[:] = Reason.NOT_LOOKED_UP
    elif not history.tokens_recorded:
        reasons[reused:full] = Reason.UNKNOWN
    else:
        reasons[reused:full], windows[reused:full] = _why_not(history, ids[reused:])
    lacking = _lacking(history, ids, reused) if event.lookup is None else None
    if lacking is not None:
        reasons[lacking.first_block : lacking.stop_block] = Reason.NOT_SERVABLE
    end = reused if lacking is None else lacking.stop_block
    if history.drops_last_hit and (reasons[end : end + 2] == Reason.NOT_REUSED).tolist() in _ONE:
        reasons[end] = Reason.LAST_HIT
    loaded = len(reasons) if external == last else external // size
    reasons[reused:loaded], windows[reused:loaded] = Reason.EXTERNAL, -1
    reasons[:reused] = Reason.PRIMARY
    return ExplainedAdmission(
        number=number,
        request_id=event.request_id,
        namespace=event.namespace,
        batch=history.batch,
        at=history.now,
        num_tokens=event.num_tokens,
        reused=event.reused,
        partial=event.reused_partial,
        external=event.reused_external,
        tokens_per_block=size,
        handle=event.handle,
        resumed=event.resumed,
        ids=ids,
        reasons=reasons,
        windows=windows,
        lacking=lacking,
        origin=history.origins[number],
    )


def _lacking(history: HistoryFold, ids: Ids, reused: int) -> Lacking | None:
    """Return what a group that shares the pool lacks of the leading blocks that full attention has."""
    if not history.shared.groups or not history.reuse:
        return None
    gone = np.flatnonzero(history.windows[0].of["level"][ids] < 0)
    stop = int(gone[0]) if len(gone) else len(ids)
    drops = history.drops_last_hit
    if stop - drops <= reused:
        return None
    names = history.names["name"][ids[:stop]]
    return history.shared.lacking(names, reused, history.tokens_per_block, drops_last=drops)


def _why_not(history: HistoryFold, ids: Ids) -> tuple[Ids, Ids]:
    """Return reason and window of each block that was not reused."""
    reasons = np.full(len(ids), history.not_taken, np.intp)
    windows = np.full(len(ids), -1, np.intp)
    if not len(ids):
        return reasons, windows
    cached = np.array([window.of["level"][ids] >= 0 for window in history.windows])
    missing = np.flatnonzero(~cached.all(axis=0))
    windows[missing] = cached[:, missing].argmin(axis=0)
    for group, window in enumerate(history.windows):
        at = np.flatnonzero(windows == group)
        if not len(at):
            continue
        of, own = window.of, ids[at]
        gone, pending = of["seen"][own] > 0, history.pending["count"][own] > 0
        new = np.where(pending, Reason.BEING_COMPUTED, Reason.NEVER_SEEN)
        new = np.where(cached[:, at].any(axis=0), Reason.OUT_OF_WINDOW, new)
        why = of["why"][own]
        reasons[at] = np.where(gone, np.where(pending, _COMPUTING[why], why), new)
    if history.contents.has_several_namespaces:
        for block in np.flatnonzero(reasons == Reason.NEVER_SEEN).tolist():
            levels = history.windows[windows[block]].of["level"]
            if any(levels[other] >= 0 for other in history.contents.elsewhere(int(ids[block]))):
                reasons[block] = Reason.OTHER_NAMESPACE
    return reasons, windows


_ONE = ([True], [True, False])
"""For the two blocks after the reused prefix, if they were reusable: only the first was."""
_COMPUTING = np.full(len(Reason), Reason.COMPUTING_AGAIN)
_COMPUTING[Reason.CLEARED] = Reason.COMPUTING_CLEARED
_COMPUTING[Reason.COPY_FAILED] = Reason.COMPUTING_COPY_FAILED
_COMPUTING[Reason.INVALIDATED] = Reason.COMPUTING_INVALIDATED
_COMPUTING[Reason.RESTARTED] = Reason.COMPUTING_RESTARTED
"""Reason for a block that a running request is already computing again, by the reason for which it is gone."""

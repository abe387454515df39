"""A log as a history of contents, and each admission explained by the history before it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from events import types as ev
from events.ids import first_number
from events.packed import NAME_BYTES, TOKEN_BYTES, names_of_keys
from events.tokens.sequences import NamedTokens, RunningTokens
from events.types import (
    CROSS,
    PRIMARY,
    SECONDARY,
    SLIDING,
    BlocksReused,
    EpochStarted,
    EventBatch,
    MoveReason,
    Namespace,
    RemoveReason,
    RequestId,
    SequenceAdded,
)
from kvcache.audit.admission import ExplainedAdmission, Lacking, SharedGroups
from kvcache.audit.contents import NOWHERE, Columns, ContentIds, Ids, Window, cached_in
from kvcache.audit.reasons import Reason
from kvcache.fold.state import CacheState
from kvcache.replay import Replayed, fitting, known_events


class RunningRequest(NamedTokens):
    """One admitted sequence. Without tokens its contents are known by name only, as far as events have given names."""

    __slots__ = ("_chain", "_ids", "computed", "held", "left", "num_prompt_tokens", "number", "request_id")

    def __init__(
        self, number: int, request_id: RequestId, tokens: array[int], namespace: Namespace, num_groups: int
    ) -> None:
        super().__init__(tokens, namespace)
        self.number = number
        """Admissions of the log before this one."""
        self.request_id = request_id
        self.num_prompt_tokens = len(tokens)
        self.computed = 0
        """Of the prompt."""
        self.held: list[Ids] = [np.empty(0, np.intp)] * num_groups
        """Per window, by block: contents that it holds; -1 where it holds none."""
        self.left = [0] * num_groups
        """Per window: leading blocks that it has left behind."""
        self._ids, self._chain = array("q"), 0

    def rewind(self, num_tokens: int, tokens_per_block: int) -> None:
        """Take back all but the first tokens."""
        super().rewind(num_tokens, tokens_per_block)
        self.num_prompt_tokens = min(self.num_prompt_tokens, num_tokens)
        self._ids, self._chain = array("q"), 0

    def branch_as(self, number: int, request_id: RequestId) -> RunningRequest:
        """Another sequence with the same tokens, which holds what this one holds."""
        child = RunningRequest(number, request_id, self.copy_tokens(), self.namespace, len(self.held))
        child.num_prompt_tokens, child.computed = self.num_prompt_tokens, self.computed
        child.names[:] = self.names
        child.held, child.left = [held.copy() for held in self.held], self.left[:]
        child._ids, child._chain = self._ids[:], self._chain
        return child

    def contents(self, known: ContentIds, stop: int, tokens_per_block: int) -> Ids:
        """The contents of its first `stop` full blocks."""
        have = len(self._ids)
        if have < stop:
            symbols = self.packed(have * tokens_per_block, stop * tokens_per_block)
            size = tokens_per_block * TOKEN_BYTES
            self._chain = known.extend(self._ids, self._chain, self.namespace, symbols, size)
        return np.frombuffer(self._ids, np.int64)[:stop].astype(np.intp)

    def take(self, group: int, first: int, ids: Ids) -> None:
        """Note contents that it holds, from its block `first` on."""
        held = self.held[group]
        if len(held) < first + len(ids):
            longer = np.full(max(first + len(ids), len(held) + len(held) // 4), -1, np.intp)
            longer[: len(held)] = held
            self.held[group] = held = longer
        held[first : first + len(ids)] = ids

    def forget(self, group: int, ids: Ids) -> None:
        """These contents are nowhere any more: it holds blocks without a name instead."""
        held = self.held[group]
        held[np.isin(held, ids)] = -1

    def let_go(self, group: int, first: int, stop: int | None = None) -> Ids:
        """Let go of blocks; returns the contents that were held there."""
        held = self.held[group][first:stop]
        ids = held[held >= 0]
        held[:] = -1
        return ids

    def leave(self, group: int, count: int) -> Ids:
        """Leave the next `count` blocks behind; returns the contents that were held there."""
        first = self.left[group]
        self.left[group] = first + count
        return self.let_go(group, first, first + count)


class EpochClock:
    """Times of a log whose clock may begin again with an epoch, as it does in logs of simulated time."""

    def __init__(self) -> None:
        self._shift, self._latest = 0, 0
        self._epochs = 0
        self.set_back: list[int] = []
        """Batches with which epochs began that have been shifted behind those before them."""

    def begin(self, at: int, batch: int) -> None:
        """An epoch begins at this time (ns)."""
        self._epochs += 1
        self._shift = max(0, self._latest - at) if self._epochs > 1 else 0
        if self._shift:
            self.set_back.append(batch)

    def of(self, at: int) -> int:
        """A time of this epoch, shifted where its clock began too early."""
        shifted = at + self._shift
        self._latest = max(self._latest, shifted)
        return shifted


def laid_out(batches: Iterable[EventBatch], clock: EpochClock) -> Iterator[EventBatch]:
    """The batches, with shifted times."""
    for batch in batches:
        if any(type(event) is EpochStarted for event in batch.events):
            clock.begin(batch.ts, batch.seq)
        at = clock.of(batch.ts)
        yield batch if at == batch.ts else msgspec.structs.replace(batch, ts=at)


class HistoryListener:
    """Hears of each event when the history has folded it, but of a reuse before: ages are those before it."""

    def looked_up(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """A request is being admitted; what it takes from secondary, and what comes later in the step, is not known."""

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Of each admission, at the end of its batch."""

    def refused(self, history: HistoryFold, event: ev.AdmissionRefused) -> None:
        """A request did not fit."""

    def forked(self, history: HistoryFold, child: RunningRequest) -> None:
        """A sequence branched: the branch has looked nothing up, so it is no admission."""

    def ended(self, history: HistoryFold, sequence: RunningRequest, event: ev.SequenceRemoved) -> None:
        """A request ended."""

    def not_loaded(self, history: HistoryFold, sequence: RunningRequest, tokens: int) -> None:
        """Prompt tokens that were to be loaded from outside have not come."""

    def counted(self, history: HistoryFold, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
        """Prompt tokens and reused ones since the cache was created: of the log, and as its engine has counted them."""

    def reused(self, history: HistoryFold, window: Window, ids: Ids, level: int) -> None:
        """A request is about to reuse full blocks from a level."""

    def computed_twice(self, history: HistoryFold, window: Window, blocks: int) -> None:
        """A request computed full blocks that another one had stored meanwhile."""

    def stored(self, history: HistoryFold, window: Window, ids: Ids) -> None:
        """Full blocks are cached."""

    def moved(self, history: HistoryFold, window: Window, event: ev.BlocksMoved) -> None:
        """Blocks changed their level."""

    def evicted(self, history: HistoryFold, window: Window, ids: Ids, level: int) -> None:
        """Full blocks have left a level: they moved from primary to secondary, or are about to be `removed`."""

    def removed(self, history: HistoryFold, window: Window, ids: Ids, event: ev.BlocksRemoved) -> None:
        """Full blocks are gone."""

    def lost(self, history: HistoryFold, window: Window, ids: Ids) -> None:
        """Full blocks are gone otherwise: cleared, or not in the state that was exported anew. The window may be that
        of the cache before.
        """

    def restarted(self, history: HistoryFold) -> None:
        """The state was exported anew, and what is not in it has been told as lost."""

    def batch_ended(self, history: HistoryFold) -> None:
        """After the last event of a batch."""


class HistoryFold:
    """Folds batches; reports to listeners what happens to contents, and of each admission why it computed what it did.

    Each batch is applied to the cache's state first, which refuses what does not follow from the batches before it:
    what is folded here can rely on all that is checked there.
    """

    tokens_recorded = True
    reuse = True
    engine = ""
    """Who decides; empty: this library's manager."""
    drops_last_hit = False
    """As in `CacheCreated`."""
    not_taken = Reason.NOT_SERVABLE
    """Why a block is not reused that is cached in every window."""
    tokens_per_block = 0
    key_bytes = 0

    def __init__(
        self, *listeners: HistoryListener, details: Callable[[RequestId], bool] = lambda _: False
    ) -> None:
        self.contents = ContentIds()
        self.windows: list[Window] = []
        self.running: dict[int, RunningRequest] = {}
        """By handle."""
        self.pending = Columns(count=(np.int32, 0))
        """Per content: running requests in whose prompt it is, and that have not computed it yet."""
        self.names: Columns | None = None
        """Per content its name as the log has it (`name`); None unless somebody asks for them."""
        self.served_names = Columns(name=(np.uint64, 0))
        """Per content that was reused its name; 0 where the log has none."""
        self.shared = SharedGroups()
        """Further groups, whose slots lie in the pool of the first one."""
        self.epochs = EpochClock()
        self.batch, self.now = -1, 0
        """The batch that is folded, and its wall clock in ns."""
        self.requests: list[RequestId] = []
        """By number of the admission."""
        self.replayed = Replayed(CacheState())
        """The cache after the last batch."""
        self.listeners = listeners
        self._details = details
        self._cross: int | None = None
        """The group of cross attention. Of it and of encoders' inputs nothing is said: an audit explains why prompts
        were computed, and a prompt's namespace tells inputs apart already."""
        self._inputs: set[int] = set()
        """Handles of encoders' inputs."""
        self._tokens = RunningTokens(self.running)
        self._admitted: dict[int, ExplainedAdmission] = {}
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
            ev.EncoderAdded: lambda event: self._inputs.add(event.handle),
            ev.BlocksReused: self._on_reused,
            ev.BlocksStored: self._on_stored,
            ev.BlocksFilled: self._on_filled,
            ev.BlocksUpdated: self._on_updated,
            ev.BlocksMoved: self._on_moved,
            ev.BlocksRemoved: self._on_removed,
            ev.BlocksDetached: self._on_detached,
            ev.BlocksPinned: lambda event: self._pin(event.pin, event.slots),
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
            ev.SymbolsInterned: lambda event: self.contents.learn(event.pages),
            ev.PoolShared: lambda event: self.shared.begin(event, len(self.windows), self.key_bytes),
            ev.SlotsNamed: self._on_named,
            ev.SlotsUnnamed: self._on_unnamed,
        }

    @property
    def keeps_names(self) -> bool:
        """Whether names of blocks are of use: where there are no tokens, or somebody asks for them."""
        return self.names is not None or not self.tokens_recorded

    def reach(self) -> None:
        """Have rows for all contents."""
        rows = len(self.contents)
        self.pending.reach(rows)
        for window in self.windows:
            window.of.reach(rows)

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
        for event in events:
            handler = self._handlers.get(type(event))
            if handler is not None and not (self._cross is not None and self._is_of_encoder(event)):
                handler(event)
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
        handle, group = getattr(event, "handle", None), getattr(event, "group", None)
        return (handle in self._inputs or group == self._cross) and not isinstance(event, ev.EncoderAdded)

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
        """What is not in it is gone: batches were lost before it, or the cache began with it."""
        self.shared.end(self.batch, self.now)
        if event.next_handle > first_number(self.replayed.state.epoch):
            self._counts = None
        self._inputs = {each.encoder for each in event.sequences if each.encoder}
        running = self.running.copy()
        self.contents.learn(event.symbols, anew=True)
        self._lose_all(Reason.RESTARTED)
        self.running.clear()
        self._tokens.forget_row()
        self.pending["count"].fill(0)
        for window, exported in zip(self.windows, event.groups, strict=False):
            for ids, slots, level, priority, names in cached_in(
                exported,
                self.contents,
                self.tokens_per_block,
                self.key_bytes,
                with_tokens=self.tokens_recorded,
            ):
                window.restore(ids, slots, level, priority, self.batch, self.now)
                self._name(ids, names)
        for sequence in event.sequences:
            if sequence.handle not in self._inputs:
                self._go_on(sequence, running.get(sequence.handle))
        self._pinned.clear()
        for pin in event.pins:
            self._pin(pin.pin, pin.slots if pin.named else ())
        self._tell_lost()
        for each in self.listeners:
            each.restarted(self)

    def _go_on(self, exported: ev.SequenceExported, known: RunningRequest | None) -> None:
        symbols = _symbols(exported.tokens, exported.num_tokens)
        number = known.number if known is not None else self._numbered(exported.request_id)
        sequence = RunningRequest(number, exported.request_id, symbols, exported.namespace, len(self.windows))
        sequence.num_prompt_tokens = exported.num_prompt_tokens
        self.running[exported.handle] = sequence
        if self.key_bytes and exported.keys:
            sequence.name(0, names_of_keys(exported.keys, self.key_bytes))
        self._set_computed(sequence, min(exported.computed, exported.num_prompt_tokens), added=True)
        for group, (window, slots, stored) in enumerate(
            zip(self.windows, exported.slots, exported.stored, strict=False)
        ):
            table = np.frombuffer(slots, np.int32)
            sequence.left[group] = int((table == _DETACHED).sum())
            table = table[:stored]
            ids = np.where(table >= 0, window.slots[PRIMARY][table], -1).astype(np.intp)
            sequence.take(group, 0, ids)
            window.hold(ids[ids >= 0])

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
            for each in self.listeners:
                each.lost(self, window, ids[window.of["level"][ids] == NOWHERE])
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
            for each in self.listeners:
                each.counted(self, self._counts, (prompt_tokens, reused))

    def _on_cleared(self, event: ev.CacheCleared) -> None:
        self._lose_all(Reason.COPY_FAILED if self._failed else Reason.CLEARED)
        self.shared.clear(self.batch, self.now)
        self._tell_lost()

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
        sequence = RunningRequest(number, event.request_id, symbols, event.namespace, len(self.windows))
        sequence.left = [window.left_behind(event.reused, self.tokens_per_block) for window in self.windows]
        last_block = (event.num_tokens - 1) // self.tokens_per_block
        ids = self._prompt_contents(sequence, last_block)
        admission = explain(self, event, sequence, ids)
        for each in self.listeners:
            each.looked_up(self, admission)
        self.running[event.handle] = sequence
        self._tokens.forget_row()
        self._set_computed(sequence, event.reused, added=True)
        self._admitted[event.handle] = admission
        if self._details(event.request_id):
            admission.facts = facts_of(self, admission)

    def _prompt_contents(self, sequence: RunningRequest, stop: int) -> Ids:
        if not self.tokens_recorded:
            return np.empty(0, np.intp)
        ids = sequence.contents(self.contents, stop, self.tokens_per_block)
        self.reach()
        return ids

    def _correct_same_step(self, admission: ExplainedAdmission) -> None:
        for block in np.flatnonzero(admission.reasons == Reason.BEING_COMPUTED).tolist():
            of = self.windows[admission.windows[block]].of
            if of["seen"][admission.ids[block]] and of["stored_batch"][admission.ids[block]] == self.batch:
                admission.reasons[block] = Reason.SAME_STEP

    def _set_computed(self, sequence: RunningRequest, num_tokens: int, *, added: bool = False) -> None:
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
        for each in self.listeners:
            each.not_loaded(self, self.running[event.handle], event.num_tokens)

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
        for each in self.listeners:
            each.forked(self, child)

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
        for each in self.listeners:
            each.ended(self, sequence, event)

    def _on_refused(self, event: ev.AdmissionRefused) -> None:
        for each in self.listeners:
            each.refused(self, event)

    # -- blocks

    def _on_reused(self, event: ev.BlocksReused) -> None:
        sequence, window = self.running[event.handle], self.windows[event.group]
        ids = window.contents(event.level, event.slots)
        sequence.take(event.group, event.first_block, ids)
        sequence.name_up_to(event.first_block + len(ids), event.names)
        known = ids[ids >= 0]
        if event.replaced:
            for each in self.listeners:
                each.computed_twice(self, window, len(known))
        else:
            admission = self._admitted[event.handle]
            if admission.facts:
                note_reused(admission, event, window, ids)
            if event.level == SECONDARY:
                admission.reasons[event.first_block : event.first_block + len(ids)] = Reason.SECONDARY
            self._name_served(ids, event.names)
            for each in self.listeners:
                each.reused(self, window, known, event.level)
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

    def _cache(self, sequence: RunningRequest, group: int, first: int, slots: Any, priority: int) -> None:
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
        for each in self.listeners:
            each.stored(self, window, ids)

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
        for each in self.listeners:
            each.moved(self, window, event)
        if event.why == MoveReason.OFFLOAD:
            ids = window.contents(event.to_level, event.to_slots)
            for each in self.listeners:
                each.evicted(self, window, ids[ids >= 0], event.from_level)

    def _on_removed(self, event: ev.BlocksRemoved) -> None:
        window = self.windows[event.group]
        by = self.running[event.handle].number if event.handle in self.running else -1
        invalid = event.why == RemoveReason.INVALIDATED
        ids = window.remove(event.level, event.slots, by, self.batch, self.now, invalid=invalid)
        for sequence in self.running.values() if invalid else ():
            sequence.forget(event.group, ids)
        if not invalid:
            for each in self.listeners:
                each.evicted(self, window, ids, event.level)
        for each in self.listeners:
            each.removed(self, window, ids, event)

    def _on_detached(self, event: ev.BlocksDetached) -> None:
        handles = array("q", event.handles)
        counts = array("I", event.counts) if event.counts else repeat(1, len(handles))
        window = self.windows[event.group]
        for handle, count in zip(handles, counts, strict=False):
            window.release(self.running[handle].leave(event.group, count), self.now)

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


def explain(
    history: HistoryFold, event: SequenceAdded, sequence: RunningRequest, ids: Ids
) -> ExplainedAdmission:
    """The admission, with a reason for each block. What it takes from secondary is told by the events that follow."""
    size, last = history.tokens_per_block, event.num_tokens - 1
    external = event.reused + event.reused_external
    reasons = np.full(-(-last // size), Reason.UNALIGNED, np.int8)
    windows = np.full(len(reasons), -1, np.int8)
    reused = (event.reused - event.reused_partial) // size
    full = last // size
    if not history.reuse:
        reasons[:] = Reason.REUSE_OFF
    elif not history.tokens_recorded:
        reasons[reused:full] = Reason.UNKNOWN
    else:
        reasons[reused:full], windows[reused:full] = _why_not(history, ids[reused:])
    lacking = _lacking(history, ids, reused)
    if lacking is not None:
        reasons[lacking.first_block : lacking.stop_block] = Reason.NOT_SERVABLE
    end = reused if lacking is None else lacking.stop_block
    if history.drops_last_hit and (reasons[end : end + 2] == Reason.NOT_REUSED).tolist() in _ONE:
        reasons[end] = Reason.LAST_HIT
    loaded = len(reasons) if external == last else external // size
    reasons[reused:loaded], windows[reused:loaded] = Reason.EXTERNAL, -1
    reasons[:reused] = Reason.PRIMARY
    return ExplainedAdmission(
        number=sequence.number,
        request_id=event.request_id,
        namespace=event.namespace,
        batch=history.batch,
        at=history.now,
        num_tokens=event.num_tokens,
        reused=event.reused,
        partial=event.reused_partial,
        external=event.reused_external,
        tokens_per_block=size,
        ids=ids,
        reasons=reasons,
        windows=windows,
        lacking=lacking,
    )


def _lacking(history: HistoryFold, ids: Ids, reused: int) -> Lacking | None:
    """What a group that shares the pool lost of the leading blocks that full attention has."""
    if not history.shared.groups or not history.reuse or history.names is None:
        return None
    gone = np.flatnonzero(history.windows[0].of["level"][ids] < 0)
    stop = int(gone[0]) if len(gone) else len(ids)
    drops = history.drops_last_hit
    if stop - drops <= reused:
        return None
    history.names.reach(len(history.contents))
    names = history.names["name"][ids[:stop]]
    return history.shared.lacking(names, reused, history.tokens_per_block, drops_last=drops)


def _why_not(history: HistoryFold, ids: Ids) -> tuple[Ids, Ids]:
    """Reason and window of blocks that were not reused."""
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


def facts_of(history: HistoryFold, admission: ExplainedAdmission) -> dict[str, npt.NDArray[np.int64]]:
    """Of each block what its window knows of it now: numbers of requests and batches, times in ns, or -1."""
    names = ("level", "stored_by", "stored_batch", "stored_at", "gone_batch", "gone_at", "gone_by")
    size = len(admission.ids)
    blocks = (admission.num_tokens - 1) // admission.tokens_per_block
    facts = {name: np.full(blocks, -1, np.int64) for name in (*names, "slot", "computed_by")}
    windows = admission.windows[:size]
    for group, window in enumerate(history.windows):
        at = (windows == group) | ((windows < 0) & (group == 0))
        for name in names:
            facts[name][:size][at] = window.of[name][admission.ids[at]]
    for block in np.flatnonzero(np.isin(admission.reasons[:size], _PENDING)).tolist():
        facts["computed_by"][block] = _computing(history, int(admission.ids[block]), block)
    return facts


def note_reused(admission: ExplainedAdmission, event: BlocksReused, window: Window, ids: Ids) -> None:
    """Add to the facts where reused blocks lie, and whose they are; the first window that says so counts."""
    slots = np.frombuffer(event.slots, np.int32)
    at = np.arange(event.first_block, event.first_block + len(slots))
    new = admission.facts["slot"][at] < 0
    admission.facts["slot"][at[new]] = slots[new]
    for name in ("stored_by", "stored_batch", "stored_at"):
        admission.facts[name][at[new & (ids >= 0)]] = window.of[name][ids[new & (ids >= 0)]]


def _computing(history: HistoryFold, content: int, block: int) -> int:
    """The first running request that has this content in its prompt, still to be computed."""
    size = history.tokens_per_block
    for sequence in history.running.values():
        stop = sequence.num_prompt_tokens // size
        to_come = block < stop and (block + 1) * size > sequence.computed
        if to_come and int(sequence.contents(history.contents, stop, size)[block]) == content:
            return sequence.number
    return -1


_ONE = ([True], [True, False])
"""Of two blocks after what is reused, whether they could have been: only the first."""
_COMPUTING = np.full(len(Reason), Reason.COMPUTING_AGAIN)
_COMPUTING[Reason.CLEARED] = Reason.COMPUTING_CLEARED
_COMPUTING[Reason.COPY_FAILED] = Reason.COMPUTING_COPY_FAILED
_COMPUTING[Reason.INVALIDATED] = Reason.COMPUTING_INVALIDATED
_COMPUTING[Reason.RESTARTED] = Reason.COMPUTING_RESTARTED
"""By why a block is gone: its reason while a running request computes it again."""
_PENDING = (
    Reason.COMPUTING_AGAIN,
    Reason.COMPUTING_CLEARED,
    Reason.COMPUTING_COPY_FAILED,
    Reason.COMPUTING_INVALIDATED,
    Reason.COMPUTING_RESTARTED,
    Reason.BEING_COMPUTED,
)

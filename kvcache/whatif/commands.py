"""An engine's calls to its cache, derived from its log so that they can be repeated."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from events import structs
from events import types as ev
from events.log import LogReader
from events.packed import SLOT_BYTES
from events.tokens.rich import RichTokens
from events.types import PRIMARY, AnyEvent, EndReason, Event, MoveReason, Namespace, RemoveReason, RequestId
from kvcache.config import KVCacheConfig
from kvcache.decide.block_manager import BlockManager
from kvcache.decide.lookup import count_blocks
from kvcache.decide.window_manager import WindowManager
from kvcache.errors import UsageError, invariant
from kvcache.fold.group import Watcher
from kvcache.fold.sequence import Sequence
from kvcache.fold.state import CacheState
from kvcache.inputs import MultimodalItem, Request, Retention, namespace_of
from kvcache.layout import Layout
from kvcache.replay import Replayed, fitting


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """Arguments of a request's admission."""

    handle: int
    """Handle in the log, unique there: the request's id in the replay."""
    request_id: RequestId
    """Request id in the log, which recurs when the request resumes after a preemption."""
    namespace: Namespace
    content: RichTokens
    resumed: bool = False
    retention: structs.StatedRetention | None = None
    slots: int | None = None
    """Number of leading tokens with slots at admission; None: all."""
    had_room: bool = True
    """True if all of it would have fitted then."""
    passed_over: int = 0
    """Cached tokens that the deciding engine did not reuse, though the request looked them up."""
    lookup: bool = True

    @property
    def num_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.content)

    @property
    def played_namespace(self) -> Namespace:
        """Namespace in the replay. A log has only digests of salts, so the digest stands for the salt: sharing is
        kept.
        """
        mine = self.namespace
        return namespace_of(mine.lora_id, mine.lora_name, self._salt, mine.uses_extra_ids)

    @property
    def _salt(self) -> str | None:
        return None if self.namespace.salt_digest is None else self.namespace.salt_digest.hex()

    def request(self) -> Request:
        """Return the request for a manager."""
        content, namespace = self.content, self.namespace
        items = [
            MultimodalItem(item.digest, item.begin, item.end - item.begin, item.uuid)
            for item in content.items
        ]
        extra_ids = None
        if namespace.uses_extra_ids:
            extra_ids = content.extra_ids_at(0, self.num_tokens).tolist()
        return Request(
            self.handle,
            memoryview(content.tokens).cast("i"),
            namespace.lora_id,
            namespace.lora_name,
            self._salt,
            items,
            extra_ids,
            self.resumed,
            None if self.retention is None else Retention.stated(self.retention),
            lookup=self.lookup,
        )


@dataclass(frozen=True, slots=True)
class Create:
    """Creation of a manager."""

    config: KVCacheConfig
    engine: str = ""
    """Engine that decided in its place; empty: the manager did."""


@dataclass(frozen=True, slots=True)
class Admit:
    """One call of `add_sequences`, which admitted all of these."""

    prompts: tuple[RecordedPrompt, ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """A call of `fork`."""

    handle: int
    child: RecordedPrompt
    """The child, as if admitted with all tokens that its parent had by then."""


@dataclass(frozen=True, slots=True)
class Compute:
    """A call of `store_context_blocks`."""

    handle: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """A call of `reserve`: slots for a chunk of a prompt, or for future tokens."""

    handles: tuple[int, ...]
    slots: tuple[int, ...]
    """Number of leading tokens of each sequence with slots from now on."""

    def only(self, handles: Container[int]) -> Reserve:
        """Return the call for some of its sequences."""
        kept = [pair for pair in zip(self.handles, self.slots, strict=True) if pair[0] in handles]
        return Reserve(tuple([handle for handle, _ in kept]), tuple([slots for _, slots in kept]))

    def of_each(self) -> Iterator[tuple[int, Reserve]]:
        """Yield a call for each single sequence."""
        for handle, slots in zip(self.handles, self.slots, strict=True):
            yield handle, Reserve((handle,), (slots,))


@dataclass(frozen=True, slots=True)
class Append:
    """A call of `add_tokens`."""

    handles: tuple[int, ...]
    counts: tuple[int, ...] | None
    """Tokens per sequence; None: one each."""
    tokens: memoryview
    """Token ids as int32."""
    draft: bool = False
    """True if they may be rolled back."""

    def only(self, handles: Container[int]) -> Append:
        """Return the call for some of its sequences."""
        return self._of([part for part in self.parts() if part[0] in handles])

    def of_each(self) -> Iterator[tuple[int, Append]]:
        """Yield a call for each single sequence."""
        for part in self.parts():
            yield part[0], self._of([part])

    def _of(self, parts: list[tuple[int, memoryview]]) -> Append:
        tokens = memoryview(b"".join(part for _, part in parts)).cast("i")
        handles, counts = tuple(handle for handle, _ in parts), tuple(len(part) for _, part in parts)
        return Append(handles, counts, tokens, self.draft)

    def parts(self) -> list[tuple[int, memoryview]]:
        """Return the tokens of each sequence."""
        found, start = [], 0
        for index, handle in enumerate(self.handles):
            stop = start + (1 if self.counts is None else self.counts[index])
            found.append((handle, self.tokens[start:stop]))
            start = stop
        return found


@dataclass(frozen=True, slots=True)
class Prioritize:
    """A call of `set_priority`, for the blocks that it changed."""

    handle: int
    priority: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Rewind:
    """A call of `rewind`."""

    handle: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Remove:
    """A call of `remove_sequence`."""

    handle: int
    store: bool
    why: EndReason = EndReason.FINISHED
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Clear:
    """A call of `clear`, or the cache's own clearing after a failed copy."""


@dataclass(frozen=True, slots=True)
class Poll:
    """A call of `poll`, or the end of a step: copies have landed."""


Command = Create | Admit | Fork | Compute | Reserve | Append | Prioritize | Rewind | Remove | Clear | Poll
OfOne = Compute | Prioritize | Rewind | Remove
"""Commands about one sequence."""
OfSeveral = Reserve | Append
"""Commands that give sequences slots; split up if these are not at the same point."""


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """A batch of a log, and the commands that produced it. A command never produces more than one batch."""

    seq: int
    events: tuple[AnyEvent, ...]
    commands: tuple[Command, ...]
    clock: int = 0
    """Time of the replay in ns since the cache's creation: the latest one in the log so far, or the wall clock."""
    ts: int = 0
    """Wall clock in ns."""


class _Wanted(Exception):
    """Signal, not an error: an event was decided upon."""


class Unstored:
    """Probe of pending decisions. They change state only through events, and here the first event ends them."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._windows: tuple[WindowManager, ...] = ()

    def begin(self) -> None:
        """Start with a new state."""
        self._windows = ()

    def any_of(self, sequence: Sequence) -> bool:
        """Return True if blocks of this running sequence are computed and could be stored now, but are not."""
        try:
            for window in self._windows or self._made():
                window.store(sequence, partial=True)
        except _Wanted:
            return True
        return False

    def _made(self) -> tuple[WindowManager, ...]:
        assert self._state.created is not None
        config = KVCacheConfig.model_validate_json(self._state.created.config)
        self._windows = BlockManager(config, self._state, _refuse, recorded=False, monotonic_ns=int).windows
        for group in self._state.groups:
            group.watcher = Watcher()  # evictability does not matter here
        return self._windows


def _refuse(event: Event) -> None:
    raise _Wanted


@dataclass(eq=False, repr=False)
class Unplayable(UsageError):
    """The log lacks data needed to replay its requests. `reason` names what is missing."""

    log: str
    reason: str
    text = "{log} cannot be replayed: {reason}"


def recorded(log: str | PathLike[str], reader: LogReader | None = None) -> Iterator[RecordedBatch]:
    """Yield the batches of a log with the commands that produced them; afterwards `reader` has the log's end.

    Raises `Unplayable` for a log without tokens, without its beginning, or with batches missing; `Unreplayable`, and
    what `LogReader` raises for a damaged, newer or missing log.
    """
    commands = _Commands(str(log))
    for batch in LogReader(Path(log)) if reader is None else reader:
        played = commands.of(batch)
        yield RecordedBatch(batch.seq, batch.events, played, commands.clock(batch), batch.ts)


def prompts(log: str | PathLike[str]) -> Iterator[tuple[KVCacheConfig, RecordedPrompt]]:
    """Yield the prompts of all admissions, in order, with their cache's settings. Raises what `recorded` raises."""
    config = None
    for batch in recorded(log):
        for command in batch.commands:
            if isinstance(command, Create):
                config = command.config
            elif isinstance(command, Admit):
                assert config is not None
                yield from ((config, prompt) for prompt in command.prompts)


class _Commands:
    """Fold of a log that derives the commands of each batch."""

    def __init__(self, log: str) -> None:
        self._log = log
        self._replayed = Replayed(CacheState())
        self.state = self._replayed.state
        self.config: KVCacheConfig | None = None
        self._longest = 0
        """Tokens of the longest prompt that gets all of its slots at once."""
        self._engine = ""
        """Engine that decided; empty: a manager of this library."""
        self._unstored = Unstored(self.state)
        self._commands: list[Command] = []
        self._admitting: list[RecordedPrompt] = []
        """Prompts of an admission that is not complete yet."""
        self._has_slots = False
        """True if it has claimed slots."""
        self._had_room = False
        """True if there was room for all of it by then."""
        self._growing: frozenset[int] = frozenset()
        """Sequences that got slots for future tokens."""
        self._storing: frozenset[int] = frozenset()
        """Sequences of which the last command stores blocks."""
        self._created_at = 0
        """Wall clock at the cache's creation."""
        self._bare: int | None = None
        """Sequence with stored blocks that no command has accounted for so far."""
        self._readers: dict[type, Callable[[Any], None]] = {
            ev.CacheCreated: self._create,
            ev.StateExported: lambda _: self._unstored.begin(),
            ev.SequenceAdded: self._admit,
            ev.BlocksAllocated: self._allocate,
            ev.BlocksReturned: lambda event: self._reserve(event, -1),
            ev.BlocksReused: self._reuse,
            ev.BlocksStored: lambda event: self._store(event.handle, event.first_block, event.slots),
            ev.BlocksFilled: self._fill,
            ev.BlocksMoved: self._move,
            ev.BlocksRemoved: self._lose,
            ev.BlocksDetached: lambda _: self._stored(),
            ev.BlocksUpdated: self._update,
            ev.TokensAppended: self._append,
            ev.ContextComputed: self._compute,
            ev.SequenceForked: self._fork,
            ev.SequenceRewound: lambda event: self._add(Rewind(event.handle, event.num_tokens)),
            ev.SequenceRemoved: self._remove,
            ev.CacheCleared: lambda _: self._add(Clear()),
            ev.TransferLanded: lambda _: self._add(Poll()),
        }

    def clock(self, batch: ev.EventBatch) -> int:
        """Return the time at which a batch is replayed."""
        return self.state.clock or max(0, batch.ts - self._created_at)

    def of(self, batch: ev.EventBatch) -> tuple[Command, ...]:
        """Return the commands that produced a batch, in order."""
        self._commands, before = [], self.state.created
        self._replayed.fold(batch, verify=False, before=self._read)
        if self.state.created is not before:
            self._created_at = batch.ts
        with fitting(batch.seq):
            self._settle()
        self._storing = frozenset()
        return tuple(self._commands)

    def _read(self, event: ev.AnyEvent) -> None:
        self._check(event)
        reader = self._readers.get(type(event))
        if reader is not None:
            reader(event)

    def _check(self, event: ev.AnyEvent) -> None:
        """Raise before applying an event that cannot be replayed."""
        if isinstance(event, ev.EpochStarted) and not event.tokens_recorded:
            self._refuse("it does not record tokens; write it with log.record_tokens=true")
        elif isinstance(event, ev.Gap):
            self._refuse("it lacks batches; with log.overflow=block none are lost")
        elif isinstance(event, ev.CacheCreated):
            self.config, self._engine = KVCacheConfig.model_validate_json(event.config), event.engine
            layout = Layout.of(self.config)
            sizes = [group.num_blocks for group in layout.groups]
            self._longest = layout.longest_prompt(self.config).tokens
            invariant(
                [group.num_blocks for group in event.groups] == sizes, "its settings are of another cache"
            )
            if self.config.cross_kv_cache_fraction is not None:
                self._refuse("its model has an encoder, whose inputs cannot be replayed")
        elif isinstance(event, ev.StateExported):
            if event.sequences or any(group.runs for group in event.groups):
                self._refuse("it begins with a cache that is not empty")
        elif isinstance(event, ev.PoolShared):
            self._refuse("layers of other kinds share its pool, and cannot be replayed")
        elif self.config is None and not isinstance(event, ev.EpochStarted):
            self._refuse("its beginning is missing")

    def _refuse(self, reason: str) -> None:
        raise Unplayable(self._log, reason)

    def _add(self, command: Command, storing: frozenset[int] = frozenset()) -> None:
        """Begin a command that stores blocks of these sequences."""
        self._settle()
        self._commands.append(command)
        self._storing = storing

    def _settle(self) -> None:
        """Finish the current command. Blocks that none accounts for were stored by a call without new tokens."""
        handle, self._bare = self._bare, None
        if handle is not None:
            self._commands.append(Compute(handle, self.state.sequences[handle].computed))
        if self._admitting:
            self._commands.append(Admit(tuple(map(self._with_slots, self._admitting))))
            self._admitting, self._has_slots, self._had_room = [], False, False

    def _with_slots(self, prompt: RecordedPrompt) -> RecordedPrompt:
        """Return an admitted prompt, with its current slots."""
        slots = self._slots_of(prompt.handle)
        if self._longest >= prompt.num_tokens <= slots:
            return prompt
        return replace(prompt, slots=slots, had_room=self._had_room)

    def _slots_of(self, handle: int) -> int:
        """Return the number of tokens of a sequence that have slots."""
        return len(self.state.sequences[handle].tables[0]) * self.state.tokens_per_block

    def _have_room(self) -> bool:
        """Return True if the prompt that has claimed what it reuses could get slots for all of it at once."""
        state, (prompt, *others) = self.state, self._admitting
        lacking = -(-(prompt.num_tokens - self._slots_of(prompt.handle)) // state.tokens_per_block)
        return not others and all(
            lacking + sum(len(places) for _, places in state.awaiting_onboard.get(group.index, ()))
            <= group.levels[PRIMARY].available
            for group in state.groups
        )

    # -- lifecycle of the cache and of sequences

    def _create(self, event: ev.CacheCreated) -> None:
        assert self.config is not None
        self._unstored.begin()
        self._add(Create(self.config, self._engine))

    def _admit(self, event: ev.SequenceAdded) -> None:
        if self._has_slots or self._engine or not self._admitting:
            self._settle()
        self._storing = frozenset()
        content = self.state.symbols.spell(event.tokens)
        prompt = RecordedPrompt(
            event.handle,
            event.request_id,
            event.namespace,
            content,
            event.resumed,
            event.retention,
            lookup=event.lookup is not False,
        )
        if self._engine and prompt.lookup:
            cached = count_blocks(self.state, prompt.namespace, prompt.content) * self.state.tokens_per_block
            prompt = replace(prompt, passed_over=max(0, cached - event.reused))
        self._admitting.append(prompt)

    def _allocate(self, event: ev.BlocksAllocated) -> None:
        if event.why == ev.AllocateReason.DECODE:
            self._growing = frozenset(array("q", event.handles))
        elif event.why == ev.AllocateReason.RESERVE:
            self._reserve(event, 1)
        elif self._engine and event.handles not in [
            array("q", [each.handle]).tobytes() for each in self._admitting
        ]:
            self._reserve(event, 1)  # other events followed the admission
        elif self._admitting and not self._has_slots:
            # Each admission takes at least one slot, but only after the whole batch has claimed what it reuses.
            self._has_slots, self._had_room = True, self._have_room()

    def _reserve(self, event: ev.BlocksAllocated | ev.BlocksReturned, sign: int) -> None:
        """Handle slots for future tokens, taken or given back: as many in each window."""
        if event.group:
            return
        handles, size = tuple(array("q", event.handles)), self.state.tokens_per_block
        counts = array("I", event.counts) or [1] * len(handles)
        slots = [
            (len(self.state.sequences[handle].tables[0]) + sign * count) * size
            for handle, count in zip(handles, counts, strict=True)
        ]
        self._add(Reserve(handles, tuple(slots)))

    def _append(self, event: ev.TokensAppended) -> None:
        handles, tokens = tuple(array("q", event.handles)), memoryview(event.tokens).cast("i")
        counts = tuple(array("I", event.counts)) if event.counts else None
        storing = frozenset[int]() if event.draft else self._growing
        self._add(Append(handles, counts, tokens, event.draft), storing)
        self._growing = frozenset()

    def _compute(self, event: ev.ContextComputed) -> None:
        self._add(Compute(event.handle, event.num_tokens), frozenset((event.handle,)))

    def _fork(self, event: ev.SequenceForked) -> None:
        parent = self.state.sequences[event.handle]
        content = self.state.symbols.spell(parent.tokens.tobytes())
        child = RecordedPrompt(
            event.child, event.request_id, parent.namespace, content, retention=parent.retention
        )
        self._add(Fork(event.handle, child))

    def _remove(self, event: ev.SequenceRemoved) -> None:
        # An engine that decides itself records what it stores.
        store = bool(self._engine) or not self._unstored.any_of(self.state.sequences[event.handle])
        if store and self._bare == event.handle:
            self._bare = None  # the removal itself stored these blocks
        self._add(Remove(event.handle, store, event.why, event.stop))

    def _update(self, event: ev.BlocksUpdated) -> None:
        """Handle a priority change of one row of blocks; the call may have covered more that already had it."""
        if event.why != ev.UpdateReason.SET or event.handle is None:
            return  # it follows from the requests' settings, and from the time
        size, slots = self.state.tokens_per_block, array("i", event.slots)
        first = self.state.sequences[event.handle].tables[event.group].index(slots[0])
        self._add(Prioritize(event.handle, event.priority, first * size, (first + len(slots)) * size))

    # -- blocks

    def _store(self, handle: int, first: int, slots: bytes) -> None:
        """Account for stored blocks of a sequence: by the previous command, or by one that does nothing else.

        An engine that decides itself has a separate call for it, which counts if it covers more than the computed
        blocks.
        """
        if self._engine:
            stop = (first + len(slots) // SLOT_BYTES) * self.state.tokens_per_block
            if stop > self.state.sequences[handle].computed:
                self._add(Compute(handle, stop))
        elif handle not in self._storing and handle != self._bare:
            self._settle()
            self._bare = handle
            self._storing = frozenset()

    def _stored(self) -> None:
        """End the current command's stores: blocks stored from now on belong to another command."""
        self._storing = frozenset()

    def _fill(self, event: ev.BlocksFilled) -> None:
        """Handle tokens that fill blocks; an engine may store them before the next ones arrive."""
        if self._engine:
            for handle, block in zip(array("q", event.handles), array("I", event.blocks), strict=True):
                self._store(handle, block, bytes(SLOT_BYTES))

    def _reuse(self, event: ev.BlocksReused) -> None:
        if event.replaced:
            self._store(event.handle, event.first_block, event.slots)

    def _move(self, event: ev.BlocksMoved) -> None:
        if event.why == MoveReason.RECOMPUTED and event.handle is not None:
            self._store(event.handle, event.first_block, event.to_slots)

    def _lose(self, event: ev.BlocksRemoved) -> None:
        if event.why == RemoveReason.SUPERSEDED and event.handle is not None:
            self._store(event.handle, 0, b"")

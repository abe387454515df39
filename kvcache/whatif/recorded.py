"""Reading a log as the commands that made it.

Events say what a command did, not what it was. Which command it was follows from them and from the state before:
an admission that has taken slots ends before the next one; blocks that are stored belong to the command before, unless
that has said nothing about their sequence; and whether the end of a request stored what was left is seen by what is not
stored yet, though it could have been.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from events import types as ev
from events.log import LogReader
from events.packed import SLOT_BYTES
from events.types import PRIMARY, MoveReason, RemoveReason
from kvcache.config import KVCacheConfig
from kvcache.decide.lookup import count_blocks
from kvcache.errors import UsageError, invariant
from kvcache.fold.state import CacheState
from kvcache.layout import Layout
from kvcache.replay import Replayed, fitting
from kvcache.whatif.commands import (
    Admit,
    Append,
    Clear,
    Command,
    Compute,
    Create,
    Fork,
    Poll,
    Prioritize,
    Prompt,
    RecordedBatch,
    Remove,
    Reserve,
    Rewind,
)
from kvcache.whatif.unstored import Unstored


@dataclass(eq=False, repr=False)
class Unplayable(UsageError):
    """A log does not hold all that is needed to play its requests again. `reason` says what is missing."""

    log: str
    reason: str
    text = "{log} cannot be played again: {reason}"


def recorded(log: str | PathLike[str], reader: LogReader | None = None) -> Iterator[RecordedBatch]:
    """The batches of a log with the commands that made them; `reader` knows then how the log ends.

    Raises `Unplayable` for a log without tokens, without its beginning, or with batches missing; `Unreplayable`, and
    what `LogReader` raises for a damaged, newer or missing log.
    """
    commands = _Commands(str(log))
    for batch in LogReader(Path(log)) if reader is None else reader:
        yield RecordedBatch(batch.seq, batch.events, commands.of(batch), commands.state.clock)


def prompts(log: str | PathLike[str]) -> Iterator[tuple[KVCacheConfig, Prompt]]:
    """The prompts of all admissions, in order, with the settings of their cache. Raises what `recorded` raises."""
    reader = _Prompts(str(log))
    for batch in LogReader(Path(log)):
        yield from reader.prompts_of(batch)


class _Prompts:
    """What is needed of a log to read prompts: tokens, symbols, and no gaps."""

    def __init__(self, log: str) -> None:
        self._log = log
        self._replayed = Replayed(CacheState())
        self.state = self._replayed.state
        self.config: KVCacheConfig | None = None
        self._longest = 0
        """Tokens of the longest prompt that gets all of its slots at once."""
        self._engine = ""
        """Who decided; empty: a manager of this library."""

    def prompts_of(self, batch: ev.EventBatch) -> list[tuple[KVCacheConfig, Prompt]]:
        """The prompts of a batch's admissions."""
        found = []

        def read(event: ev.AnyEvent) -> None:
            self.note(event)
            if isinstance(event, ev.SequenceAdded):
                assert self.config is not None
                found.append((self.config, self.prompt(event)))

        self._replayed.fold(batch, verify=False, before=read)
        return found

    def note(self, event: ev.AnyEvent) -> None:
        """Refuse what cannot be played; to be called with each event before it is applied."""
        if isinstance(event, ev.EpochStarted) and not event.tokens_recorded:
            self._refuse("it records no tokens. Write it with log.record_tokens=true")
        elif isinstance(event, ev.Gap):
            self._refuse("batches are missing in it. With log.overflow=block none are lost")
        elif isinstance(event, ev.CacheCreated):
            self.config, self._engine = KVCacheConfig.model_validate_json(event.config), event.engine
            layout = Layout.of(self.config)
            sizes = [group.num_blocks for group in layout.groups]
            self._longest = layout.longest_prompt(self.config).tokens
            invariant(
                [group.num_blocks for group in event.groups] == sizes, "its settings are of another cache"
            )
            if self.config.cross_kv_cache_fraction is not None:
                self._refuse("its model has an encoder, whose inputs are not played")
        elif isinstance(event, ev.StateExported):
            if event.sequences or any(group.runs for group in event.groups):
                self._refuse("it begins with a cache that holds something already")
        elif isinstance(event, ev.PoolShared):
            self._refuse("layers of other kinds take blocks of the same pool, and theirs are not played")
        elif self.config is None and not isinstance(event, ev.EpochStarted):
            self._refuse("its beginning is missing")

    def prompt(self, event: ev.SequenceAdded) -> Prompt:
        """What a request gave."""
        content = self.state.symbols.spell(event.tokens)
        return Prompt(
            event.handle, event.request_id, event.namespace, content, event.resumed, event.retention
        )

    def _refuse(self, reason: str) -> None:
        raise Unplayable(self._log, reason)


class _Commands(_Prompts):
    """Folds a log, and tells the commands of each batch."""

    def __init__(self, log: str) -> None:
        super().__init__(log)
        self._unstored = Unstored(self.state)
        self._commands: list[Command] = []
        self._admitting: list[Prompt] = []
        """Of an admission whose end was not seen yet."""
        self._has_slots = False
        """Whether it has taken slots."""
        self._had_room = False
        """And whether there was room for all of it by then."""
        self._growing: frozenset[int] = frozenset()
        """Sequences that got slots for tokens to come."""
        self._storing: frozenset[int] = frozenset()
        """Sequences of which the last command stores blocks."""
        self._bare: int | None = None
        """A sequence of which blocks were stored that no command has accounted for so far."""
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

    def of(self, batch: ev.EventBatch) -> tuple[Command, ...]:
        """The commands that made a batch, in order."""
        self._commands = []
        self._replayed.fold(batch, verify=False, before=self._read)
        with fitting(batch.seq):
            self._settle()
        self._storing = frozenset()
        return tuple(self._commands)

    def _read(self, event: ev.AnyEvent) -> None:
        self.note(event)
        reader = self._readers.get(type(event))
        if reader is not None:
            reader(event)

    def _add(self, command: Command, storing: frozenset[int] = frozenset()) -> None:
        """A command begins, which stores blocks of these sequences."""
        self._settle()
        self._commands.append(command)
        self._storing = storing

    def _settle(self) -> None:
        """What was going on is over. Blocks that no other command accounts for were stored by a call that had nothing
        new computed to tell.
        """
        handle, self._bare = self._bare, None
        if handle is not None:
            self._commands.append(Compute(handle, self.state.sequences[handle].computed))
        if self._admitting:
            self._commands.append(Admit(tuple(map(self._with_slots, self._admitting))))
            self._admitting, self._has_slots, self._had_room = [], False, False

    def _with_slots(self, prompt: Prompt) -> Prompt:
        """A prompt that was admitted, with what is known of its slots by now."""
        slots = self._slots_of(prompt.handle)
        if self._longest >= prompt.num_tokens <= slots:
            return prompt
        return replace(prompt, slots=slots, had_room=self._had_room)

    def _slots_of(self, handle: int) -> int:
        """For how many tokens a sequence has slots."""
        return len(self.state.sequences[handle].tables[0]) * self.state.tokens_per_block

    def _have_room(self) -> bool:
        """Whether the one prompt that has claimed what it reuses could have slots for all of it at once."""
        state, (prompt, *others) = self.state, self._admitting
        lacking = -(-(prompt.num_tokens - self._slots_of(prompt.handle)) // state.tokens_per_block)
        return not others and all(
            lacking + sum(len(places) for _, places in state.awaiting_onboard.get(group.index, ()))
            <= group.levels[PRIMARY].available
            for group in state.groups
        )

    # -- life of the cache and of sequences

    def _create(self, event: ev.CacheCreated) -> None:
        assert self.config is not None
        self._unstored.begin()
        self._add(Create(self.config, self._engine))

    def _admit(self, event: ev.SequenceAdded) -> None:
        if self._has_slots or self._engine or not self._admitting:
            self._settle()
        self._storing = frozenset()
        prompt = self.prompt(event)
        if self._engine:
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
            self._reserve(event, 1)  # it has told of something else since the admission
        elif self._admitting and not self._has_slots:
            # Each admission takes at least one slot, but only when the whole batch has claimed what it reuses.
            self._has_slots, self._had_room = True, self._have_room()

    def _reserve(self, event: ev.BlocksAllocated | ev.BlocksReturned, sign: int) -> None:
        """Slots for tokens to come were taken or given back: as many in each window."""
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
        if self._bare == event.handle:
            self._bare = None  # the fork itself has stored these blocks
        content = self.state.symbols.spell(parent.tokens.tobytes())
        child = Prompt(event.child, event.request_id, parent.namespace, content, retention=parent.retention)
        self._add(Fork(event.handle, child))

    def _remove(self, event: ev.SequenceRemoved) -> None:
        # An engine that decides itself has said what it stores.
        store = bool(self._engine) or not self._unstored.any_of(self.state.sequences[event.handle])
        if store and self._bare == event.handle:
            self._bare = None  # the end itself has stored these blocks
        self._add(Remove(event.handle, store, event.why))

    def _update(self, event: ev.BlocksUpdated) -> None:
        """One event tells of a row of a sequence's blocks; the call may have been about more that had the priority."""
        if event.why != ev.UpdateReason.SET or event.handle is None:
            return  # it follows from what requests state, and from the time
        size, slots = self.state.tokens_per_block, array("i", event.slots)
        first = self.state.sequences[event.handle].tables[event.group].index(slots[0])
        self._add(Prioritize(event.handle, event.priority, first * size, (first + len(slots)) * size))

    # -- blocks

    def _store(self, handle: int, first: int, slots: bytes) -> None:
        """Blocks of a sequence are stored: by the command before, or by one that says nothing else.

        Of an engine that decides itself a call of its own says so, which counts if it tells more than what is computed.
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
        """A command leaves blocks behind when it has stored all that it does: what follows is stored by another one."""
        self._storing = frozenset()

    def _fill(self, event: ev.BlocksFilled) -> None:
        """Tokens that arrive fill blocks; an engine may store them before the next ones arrive."""
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

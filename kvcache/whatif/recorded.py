"""Reading a log as the commands that made it.

Events say what a command did, not what it was. Which command it was follows from them and from the state before:
an admission ends with the first slots that it takes; blocks that are stored belong to the command before, unless that
has said nothing about their sequence; and whether the end of a request stored what was left is seen by what is not
stored yet, though it could have been.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from events import types as ev
from events.log import LogReader
from events.types import MoveReason, RemoveReason
from kvcache.config import KVCacheConfig
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
            self.config = KVCacheConfig.model_validate_json(event.config)
            sizes = [group.num_blocks for group in Layout.of(self.config).groups]
            invariant(
                [group.num_blocks for group in event.groups] == sizes, "its settings are of another cache"
            )
            if self.config.cross_kv_cache_fraction is not None:
                self._refuse("its model has an encoder, whose inputs are not played")
        elif isinstance(event, ev.StateExported):
            if event.sequences or any(group.runs for group in event.groups):
                self._refuse("it begins with a cache that holds something already")
        elif self.config is None and not isinstance(event, ev.EpochStarted):
            self._refuse("its beginning is missing")

    def prompt(self, event: ev.SequenceAdded) -> Prompt:
        """What a request gave."""
        content = self.state.symbols.spell(event.tokens)
        return Prompt(event.handle, event.namespace, content, event.resumed, event.retention)

    def _refuse(self, reason: str) -> None:
        raise Unplayable(self._log, reason)


class _Commands(_Prompts):
    """Folds a log, and tells the commands of each batch."""

    def __init__(self, log: str) -> None:
        super().__init__(log)
        self._unstored = Unstored(self.state)
        self._commands: list[Command] = []
        self._admitting: list[Prompt] = []
        """Of an admission that has not taken slots yet."""
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
            ev.BlocksReused: self._reuse,
            ev.BlocksStored: lambda event: self._store(event.handle),
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
        """Blocks that no other command accounts for were stored by a call that had nothing new computed to tell."""
        handle, self._bare = self._bare, None
        if handle is not None:
            self._commands.append(Compute(handle, self.state.sequences[handle].computed))

    # -- life of the cache and of sequences

    def _create(self, event: ev.CacheCreated) -> None:
        assert self.config is not None
        self._unstored.begin()
        self._add(Create(self.config))

    def _admit(self, event: ev.SequenceAdded) -> None:
        self._settle()
        self._admitting.append(self.prompt(event))

    def _allocate(self, event: ev.BlocksAllocated) -> None:
        if event.why == ev.AllocateReason.DECODE:
            self._growing = frozenset(array("q", event.handles))
        elif event.why == ev.AllocateReason.RESERVE:
            self._refuse_chunks(event)
        elif self._admitting:
            # Each admission takes at least one slot, but only when the whole batch has claimed what it reuses.
            self._add(Admit(tuple(self._admitting)))
            self._admitting = []

    def _refuse_chunks(self, event: ev.BlocksAllocated) -> None:
        """Slots for tokens to come are not played, but what a prompt of which it has only a part does is unknown."""
        size = self.state.tokens_per_block
        sequences = [self.state.sequences[handle] for handle in array("q", event.handles)]
        if any(len(each.tables[0]) * size < each.num_tokens for each in sequences):
            self._refuse("prompts took their slots chunk by chunk (reserve_tokens), which is not played")

    def _append(self, event: ev.TokensAppended) -> None:
        handles, tokens = tuple(array("q", event.handles)), memoryview(event.tokens).cast("i")
        counts = tuple(array("I", event.counts)) if event.counts else None
        self._add(Append(handles, counts, tokens, event.draft), self._growing)
        self._growing = frozenset()

    def _compute(self, event: ev.ContextComputed) -> None:
        self._add(Compute(event.handle, event.num_tokens), frozenset((event.handle,)))

    def _fork(self, event: ev.SequenceForked) -> None:
        parent = self.state.sequences[event.handle]
        if self._bare == event.handle:
            self._bare = None  # the fork itself has stored these blocks
        content = self.state.symbols.spell(parent.tokens.tobytes())
        child = Prompt(event.child, parent.namespace, content, retention=parent.retention)
        self._add(Fork(event.handle, child))

    def _remove(self, event: ev.SequenceRemoved) -> None:
        store = not self._unstored.any_of(self.state.sequences[event.handle])
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

    def _store(self, handle: int) -> None:
        """A command stores blocks of a sequence: the one before, or one that says nothing else."""
        if handle not in self._storing and handle != self._bare:
            self._settle()
            self._bare = handle
            self._storing = frozenset()

    def _stored(self) -> None:
        """A command leaves blocks behind when it has stored all that it does: what follows is stored by another one."""
        self._storing = frozenset()

    def _reuse(self, event: ev.BlocksReused) -> None:
        if not any(prompt.handle == event.handle for prompt in self._admitting):
            self._store(event.handle)

    def _move(self, event: ev.BlocksMoved) -> None:
        if event.why == MoveReason.RECOMPUTED and event.handle is not None:
            self._store(event.handle)

    def _lose(self, event: ev.BlocksRemoved) -> None:
        if event.why == RemoveReason.SUPERSEDED and event.handle is not None:
            self._store(event.handle)

"""A fold of a stream of batches into changes, which detects missed ones; and one for our own caches.

The parts of events about sequences are folded here, once for all folds; those about blocks in each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from events import types as ev
from events.feed.changes import AnyChange, Cleared
from events.packed import NAME_BYTES, SLOT_BYTES, TOKEN_BYTES, names_of_keys
from events.structs import BLOCK_COLUMNS, RUN_COLUMNS
from events.tokens.sequences import NamedTokens, RunningTokens
from events.tokens.symbols import SymbolTable
from events.types import GroupCreated, GroupExported, Namespace

Change_co = TypeVar("Change_co", bound=AnyChange, covariant=True)


class StreamFold(ABC, Generic[Change_co]):
    """Hands each event to the handler for its type; handlers add to `_changes`.

    A fold that has missed a batch can never be right again until the whole state comes, and ignores everything before.
    """

    groups: tuple[GroupCreated, ...] = ()
    """Groups of the stream's cache; none if unknown."""
    _handled_when_lost: ClassVar[tuple[type, ...]] = ()

    def __init__(self) -> None:
        self.lost = False
        """True if batches are missing: no changes until the stream has its whole state again."""
        self.last_seq: int | None = None
        self._beginning = False
        """True if the stream began anew in this batch."""
        self._changes: list[Any] = []
        self._handlers: dict[type, Callable[[Any], None]] = {ev.Gap: self._handle_gap}

    def fold(self, batch: ev.EventBatch) -> list[Change_co]:
        """Return the changes of the batch, in order."""
        if self.last_seq is not None and batch.seq != self.last_seq + 1:
            self.lost = True
        handlers = self._handlers
        for event in batch.events:
            handler = handlers.get(type(event))
            if handler is not None and (not self.lost or type(event) in self._handled_when_lost):
                handler(event)
        self.last_seq, self._beginning = batch.seq, False
        changes, self._changes = self._changes, []
        return changes

    @abstractmethod
    def snapshot(self) -> Iterator[Change_co]:
        """Yield everything there is at the time of this call, parents first; later folds do not affect it."""

    def _handle_gap(self, gap: ev.Gap) -> None:
        """A log's own loss does not concern a fold that has seen those batches."""
        if self.last_seq is None or gap.last_seq > self.last_seq:
            self.lost = True

    def _begin(self) -> None:
        """Begin anew: earlier events no longer matter, nor missing ones."""
        self.lost, self._beginning = False, True


class SequenceFold(StreamFold[Change_co]):
    """Folds the events of one cache. Needs a stream that holds token ids.

    Subclasses add handlers for blocks; these note the names of blocks that sequences have computed or taken back.
    """

    _handled_when_lost = (ev.Gap, ev.CacheCreated, ev.StateExported)

    def __init__(self) -> None:
        super().__init__()
        self.tokens_per_block = 1
        self._key_bytes = 0
        self._sequences: dict[int, NamedTokens] = {}
        self._running = RunningTokens(self._sequences)
        self._symbols = SymbolTable()
        self._handlers |= {
            ev.CacheCreated: self._create,
            ev.StateExported: self._install,
            ev.SequenceAdded: self._add_sequence,
            ev.EncoderAdded: self._add_sequence,
            ev.SequenceForked: self._fork,
            ev.SequenceRewound: self._rewind,
            ev.TokensAppended: self._running.append,
            ev.BlocksReused: self._reuse,
            ev.SequenceRemoved: self._remove_sequence,
            ev.EncoderRemoved: self._remove_sequence,
            ev.SymbolsInterned: self._symbols.intern,
            ev.SymbolsForgotten: self._symbols.forget,
        }

    # -- the cache

    def _create(self, event: ev.CacheCreated) -> None:
        self._begin()
        self.groups = event.groups
        self.tokens_per_block, self._key_bytes = event.tokens_per_block, event.key_bytes
        self._forget()
        self._changes.append(Cleared())

    def _forget(self) -> None:
        """Remove everything cached and running."""
        self._sequences.clear()
        self._running.forget_row()
        self._symbols.clear()

    def _install(self, event: ev.StateExported) -> None:
        """Begin with an exported state, unless this fold has it already."""
        if not self.lost and not self._beginning:
            return
        self.lost = False
        self._forget()
        self._symbols.install(event)
        for sequence in event.sequences:
            names = names_of_keys(sequence.keys, self._key_bytes)
            tokens = array("i", sequence.tokens)
            self._sequences[sequence.handle] = NamedTokens(tokens, sequence.namespace, names)
        self._install_blocks(event)
        self._changes = [Cleared(), *self.snapshot()]

    @abstractmethod
    def _install_blocks(self, event: ev.StateExported) -> None:
        """Install the cached blocks; the sequences and symbols are there."""

    # -- sequences

    def _add_sequence(self, event: ev.SequenceAdded | ev.EncoderAdded) -> None:
        self._sequences[event.handle] = NamedTokens(array("i", event.tokens), event.namespace)

    def _fork(self, event: ev.SequenceForked) -> None:
        self._sequences[event.child] = self._sequences[event.handle].branch()

    def _rewind(self, event: ev.SequenceRewound) -> None:
        self._running.forget_row()
        self._sequences[event.handle].rewind(event.num_tokens, self.tokens_per_block)

    def _remove_sequence(self, event: ev.SequenceRemoved | ev.EncoderRemoved) -> None:
        del self._sequences[event.handle]
        self._running.forget_row()

    def _reuse(self, event: ev.BlocksReused) -> None:
        stop = event.first_block + len(event.slots) // SLOT_BYTES
        self._sequences[event.handle].name_up_to(stop, event.names)


_HOLE = -1


class ExportedRun(NamedTuple):
    """Consecutive blocks of one prefix, of which a sliding window may lack some; the last may be a part of one."""

    parent: int
    """Index of the preceding run; below 0: there is none."""
    above: bytes
    """Name of the preceding block; empty at the start of a prompt."""
    names: bytes
    """Empty if blocks have none."""
    symbols: bytes
    """Empty if the state has no tokens."""
    slots: array[int]
    states: list[tuple[int, int, int] | None]
    """Per block: level, priority and the copy in flight to it (0: none); None: it is not cached."""
    full: int
    """Number of full blocks."""
    namespace: Namespace

    def pieces(self) -> Iterator[tuple[tuple[int, int, int], int, int]]:
        """Yield the cached full blocks in runs of one state: the state, the first block, the one after the last."""
        if self.states.count(self.states[0]) == len(self.states):
            parts: list[Sequence[int]] = [range(self.full)]
        else:
            parts = [list(part) for _, part in groupby(range(self.full), self.states.__getitem__)]
        for blocks in parts:
            if blocks and (state := self.states[blocks[0]]) is not None:
                yield state, blocks[0], blocks[-1] + 1

    def name_before(self, block: int) -> bytes:
        """Return the name of the block before `block`."""
        return self.names[(block - 1) * NAME_BYTES : block * NAME_BYTES] if block else self.above


def exported_runs(exported: GroupExported, tokens_per_block: int, key_bytes: int) -> Iterator[ExportedRun]:
    """Yield all runs, parents before children."""
    columns = np.frombuffer(exported.blocks, np.int64).reshape(-1, BLOCK_COLUMNS)[:, [0, 1, -1]].tolist()
    all_slots = array("i", exported.slots)
    token = block = 0
    runs: list[tuple[bytes, Namespace]] = []
    for parent, count, last_tokens, *state in (
        np.frombuffer(exported.runs, np.int64).reshape(-1, RUN_COLUMNS).tolist()
    ):
        above, namespace = runs[parent] if parent >= 0 else (b"", exported.namespaces[-1 - parent])
        keys = exported.keys[block * key_bytes : (block + count) * key_bytes]
        names, slots = names_of_keys(keys, key_bytes), all_slots[block : block + count]
        end = token + (count - 1) * tokens_per_block + last_tokens
        states: list[tuple[int, int, int] | None] = [(state[0], state[1], state[-1])] * count
        if columns:
            rows = zip(slots, columns[block : block + count], strict=True)
            states = [None if slot == _HOLE else (of[0], of[1], of[2]) for slot, of in rows]
        full = count - (last_tokens < tokens_per_block)
        symbols = exported.symbols[token * TOKEN_BYTES : end * TOKEN_BYTES]
        yield ExportedRun(parent, above, names, symbols, slots, states, full, namespace)
        runs.append((names[-NAME_BYTES:], namespace))
        token, block = end, block + count

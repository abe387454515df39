"""A fold of a stream of batches into changes, which detects missed ones; and one for our own caches.

The parts of events about sequences are folded here, once for all folds; those about blocks in each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

from events import types as ev
from events.feed.changes import AnyChange, Cleared
from events.packed import SLOT_BYTES, names_of_keys
from events.tokens.sequences import NamedTokens, RunningTokens
from events.tokens.symbols import SymbolTable
from events.types import GroupCreated

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

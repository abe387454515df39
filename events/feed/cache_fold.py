"""What every fold of our own cache's events has to know: its windows, its running sequences, and what symbols mean.

What an event says about sequences is taken in here, once for all folds; what it says about blocks is left to them.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array

from events import types as ev
from events.feed.changes import Cleared
from events.feed.stream_fold import Change_co, StreamFold
from events.packed import SLOT_BYTES, names_of_keys
from events.tokens.sequences import NamedTokens, RunningTokens
from events.tokens.symbols import SymbolTable


class CacheFold(StreamFold[Change_co]):
    """Folds the events of one cache. Needs a stream that holds token ids.

    Subclasses add handlers for blocks; these note the names of blocks that sequences have computed or taken back.
    """

    _heard_when_lost = (ev.Gap, ev.CacheCreated, ev.StateExported)

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
        """Nothing is cached and nothing runs."""
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
        """Take in what is cached; its sequences and symbols are there."""

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

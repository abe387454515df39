"""All that is cached, as a fold of events into changes, in the order of the events.

Parts of blocks are cached, too, and a block is where it is meant to be, whether its bytes have got there or not. That
is what TensorRT-LLM tells of its cache: `events.formats.trtllm` makes its dicts of the changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from events import types as ev
from events.feed.changes import Cached, Cleared, Created, InventoryChange, Uncached, Updated
from events.feed.exported import Block, exported_blocks
from events.packed import NAME_BYTES, SLOT_BYTES, TOKEN_BYTES, names_of_keys
from events.tokens.sequences import NamedTokens, RunningTokens
from events.tokens.symbols import SymbolTable
from events.types import PRIMARY, SLIDING, GroupCreated, MoveReason

_HEARD_WHEN_LOST = (ev.Gap, ev.CacheCreated, ev.StateExported)


class Inventory:
    """Folds batches into changes of what is cached. Needs a stream that holds token ids, and blocks that have names."""

    def __init__(self) -> None:
        self.groups: tuple[GroupCreated, ...] = ()
        self.lost = False
        """Batches are missing: nothing is said until the whole state comes (`StateExported`)."""
        self.last_seq: int | None = None
        self._beginning = False
        """A cache was created in this batch: a state in it is the one that the cache begins with."""
        self._created = Created((), "")
        self._size = 1
        self._key_bytes = 0
        self._blocks: list[dict[bytes, Block]] = []
        """Per group, by name."""
        self._sequences: dict[int, NamedTokens] = {}
        self._running = RunningTokens(self._sequences)
        self._symbols = SymbolTable()
        self._changes: list[InventoryChange] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Gap: self._meet_gap,
            ev.CacheCreated: self._create,
            ev.StateExported: self._install,
            ev.SequenceAdded: self._add_sequence,
            ev.SequenceForked: self._fork,
            ev.SequenceRewound: self._rewind,
            ev.TokensAppended: self._running.append,
            ev.BlocksReused: self._reuse,
            ev.BlocksStored: self._store,
            ev.BlocksFilled: self._fill,
            ev.BlocksMoved: self._move,
            ev.BlocksUpdated: self._update,
            ev.BlocksRemoved: self._remove,
            ev.SequenceRemoved: self._remove_sequence,
            ev.CacheCleared: self._clear,
            ev.SymbolsInterned: self._symbols.intern,
            ev.SymbolsForgotten: self._symbols.forget,
        }

    def fold(self, batch: ev.EventBatch) -> list[InventoryChange]:
        """What the batch changes, in order."""
        if self.last_seq is not None and batch.seq != self.last_seq + 1:
            self.lost = True
        for event in batch.events:
            kind = type(event)
            handler = self._handlers.get(kind)
            if handler is not None and (not self.lost or kind in _HEARD_WHEN_LOST):
                handler(event)
        self.last_seq, self._beginning = batch.seq, False
        changes, self._changes = self._changes, []
        return changes

    def snapshot(self) -> Iterator[InventoryChange]:
        """All that is cached at the time of this call, parents first; what is folded later changes nothing."""
        if not self.groups:
            return iter(())
        copies = [blocks.copy() for blocks in self._blocks]
        return _told(self._created, copies, self._size, self._symbols.copy())

    # -- the stream

    def _meet_gap(self, gap: ev.Gap) -> None:
        """A log's own loss does not concern a fold that has seen those batches."""
        if self.last_seq is None or gap.last_seq > self.last_seq:
            self.lost = True

    def _create(self, event: ev.CacheCreated) -> None:
        self.lost, self._beginning = False, True
        self.groups, self._size, self._key_bytes = event.groups, event.tokens_per_block, event.key_bytes
        self._created = Created(event.groups, event.hash_algorithm)
        self._forget()
        self._changes += [Cleared(), self._created]

    def _forget(self) -> None:
        self._blocks = [{} for _ in self.groups]
        self._sequences.clear()
        self._running.forget_row()
        self._symbols.clear()

    def _clear(self, _: ev.CacheCleared) -> None:
        for blocks in self._blocks:
            blocks.clear()
        self._changes.append(Cleared())

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
        for group, blocks, exported in zip(self.groups, self._blocks, event.groups, strict=True):
            slides = group.kind == SLIDING
            blocks.update(exported_blocks(exported, self._size, self._key_bytes, slides=slides))
        self._changes = [Cleared(), *self.snapshot()]

    # -- sequences

    def _add_sequence(self, event: ev.SequenceAdded) -> None:
        self._sequences[event.handle] = NamedTokens(array("i", event.tokens), event.namespace)

    def _fork(self, event: ev.SequenceForked) -> None:
        self._sequences[event.child] = self._sequences[event.handle].branch()

    def _rewind(self, event: ev.SequenceRewound) -> None:
        self._running.forget_row()
        self._sequences[event.handle].rewind(event.num_tokens, self._size)

    def _remove_sequence(self, event: ev.SequenceRemoved) -> None:
        del self._sequences[event.handle]
        self._running.forget_row()

    def _reuse(self, event: ev.BlocksReused) -> None:
        last = event.first_block + len(event.slots) // SLOT_BYTES
        self._sequences[event.handle].name(last - len(event.names) // NAME_BYTES, event.names)

    # -- blocks

    def _store(self, event: ev.BlocksStored) -> None:
        count, first = len(event.slots) // SLOT_BYTES, event.first_block
        given = names_of_keys(event.keys, self._key_bytes)
        sequence = self._sequences[event.handle]
        sequence.name(first + count - len(given) // NAME_BYTES, given)
        tokens = (count - 1) * self._size + event.last_tokens
        self._enter(event.group, event.level, event.priority, event.parent, sequence, first, tokens)

    def _fill(self, event: ev.BlocksFilled) -> None:
        rows = zip(array("q", event.handles), array("I", event.blocks), strict=True)
        for at, (handle, block) in enumerate(rows):
            sequence = self._sequences[handle]
            if event.keys:
                key = event.keys[at * self._key_bytes : (at + 1) * self._key_bytes]
                sequence.name(block, key[:NAME_BYTES])
            parent = event.parents[at * NAME_BYTES : (at + 1) * NAME_BYTES]
            self._enter(event.group, PRIMARY, event.priority, parent, sequence, block, self._size)

    def _enter(
        self, group: int, level: int, priority: int, parent: bytes, of: NamedTokens, first: int, tokens: int
    ) -> None:
        """So many tokens of a sequence, from the start of its block `first` on, are cached."""
        begin, blocks = first * self._size, self._blocks[group]
        symbols = of.packed(begin, begin + tokens)
        names = bytes(of.names[first * NAME_BYTES : (first - -tokens // self._size) * NAME_BYTES])
        size, above = self._size * TOKEN_BYTES, parent
        for at, name in enumerate(_split(names)):
            its = symbols[at * size : (at + 1) * size]
            blocks[name] = Block(level, priority, above, its, of.namespace)
            above = name
        spelled = self._symbols.spell(symbols)
        self._changes.append(Cached(group, level, priority, names, parent, spelled, self._size, of.namespace))

    def _move(self, event: ev.BlocksMoved) -> None:
        blocks = self._blocks[event.group]
        for name in _split(event.names):
            blocks[name] = blocks[name]._replace(level=event.to_level)
        if event.handle is not None and event.why != MoveReason.OFFLOAD:
            self._sequences[event.handle].name(event.first_block, event.names)
        self._changes.append(update_of(event))

    def _update(self, event: ev.BlocksUpdated) -> None:
        blocks = self._blocks[event.group]
        for name in _split(event.names):
            blocks[name] = blocks[name]._replace(priority=event.priority)
        self._changes.append(update_of(event))

    def _remove(self, event: ev.BlocksRemoved) -> None:
        blocks = self._blocks[event.group]
        for name in _split(event.names):
            del blocks[name]
        self._changes.append(Uncached(event.group, event.names))


def update_of(event: ev.BlocksMoved | ev.BlocksUpdated) -> Updated:
    """What the event changes."""
    if isinstance(event, ev.BlocksMoved):
        return Updated(event.group, event.names, level=(event.from_level, event.to_level))
    return Updated(event.group, event.names, priority=(event.old_priority, event.priority))


def _told(
    created: Created, groups: list[dict[bytes, Block]], size: int, symbols: SymbolTable
) -> Iterator[InventoryChange]:
    yield created
    for group, blocks in enumerate(groups):
        for chain in _chains(blocks):
            for (level, priority), part in groupby(chain, lambda item: item[1][:2]):
                names, its = zip(*part, strict=True)
                spelled = symbols.spell(b"".join([block.symbols for block in its]))
                yield Cached(
                    group, level, priority, b"".join(names), its[0].parent, spelled, size, its[0].namespace
                )


def _chains(blocks: dict[bytes, Block]) -> Iterator[list[tuple[bytes, Block]]]:
    """Each block once, behind the one before it if that is cached."""
    left = blocks.copy()
    for name in blocks:
        chain = []
        while (block := left.pop(name, None)) is not None:
            chain.append((name, block))
            name = block.parent  # noqa: PLW2901
        if chain:
            yield chain[::-1]


def _split(names: bytes) -> list[bytes]:
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]

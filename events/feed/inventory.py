"""All that is cached, as a fold of events into changes, in the order of the events.

Parts of blocks are cached, too, and a block is where it is meant to be, whether its bytes have got there or not. That
is what TensorRT-LLM tells of its cache: `events.formats.trtllm` makes its dicts of the changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import groupby

from events import types as ev
from events.feed.cache_fold import CacheFold
from events.feed.changes import Cached, Cleared, Created, InventoryChange, Uncached, Updated
from events.feed.exported import Block, exported_blocks
from events.packed import NAME_BYTES, SLOT_BYTES, TOKEN_BYTES, names_of_keys, split_names
from events.tokens.sequences import NamedTokens
from events.tokens.symbols import SymbolTable
from events.types import PRIMARY, SLIDING, MoveReason


class Inventory(CacheFold[InventoryChange]):
    """Folds batches into changes of what is cached. Needs a stream that holds token ids, and blocks that have names."""

    _changes: list[InventoryChange]

    def __init__(self) -> None:
        super().__init__()
        self._created = Created((), "")
        self._blocks: list[dict[bytes, Block]] = []
        """Per group, by name."""
        self._handlers |= {
            ev.BlocksStored: self._store,
            ev.BlocksFilled: self._fill,
            ev.BlocksMoved: self._move,
            ev.BlocksUpdated: self._update,
            ev.BlocksRemoved: self._remove,
            ev.CacheCleared: self._clear,
        }

    def snapshot(self) -> Iterator[InventoryChange]:
        """All that is cached at the time of this call, parents first; what is folded later changes nothing."""
        if not self.groups:
            return iter(())
        copies = [blocks.copy() for blocks in self._blocks]
        return _told(self._created, copies, self.tokens_per_block, self._symbols.copy())

    # -- the cache

    def _create(self, event: ev.CacheCreated) -> None:
        super()._create(event)
        self._created = Created(event.groups, event.hash_algorithm, event.attention_dp_rank)
        self._changes.append(self._created)

    def _forget(self) -> None:
        super()._forget()
        self._blocks = [{} for _ in self.groups]

    def _clear(self, _: ev.CacheCleared) -> None:
        for blocks in self._blocks:
            blocks.clear()
        self._changes.append(Cleared())

    def _install_blocks(self, event: ev.StateExported) -> None:
        for group, blocks, exported in zip(self.groups, self._blocks, event.groups, strict=True):
            slides = group.kind == SLIDING
            blocks.update(exported_blocks(exported, self.tokens_per_block, self._key_bytes, slides=slides))

    # -- blocks

    def _store(self, event: ev.BlocksStored) -> None:
        count, first = len(event.slots) // SLOT_BYTES, event.first_block
        sequence = self._sequences[event.handle]
        sequence.name_up_to(first + count, names_of_keys(event.keys, self._key_bytes))
        tokens = (count - 1) * self.tokens_per_block + event.last_tokens
        self._enter(event.group, event.level, event.priority, event.parent, sequence, first, tokens)

    def _fill(self, event: ev.BlocksFilled) -> None:
        rows = zip(array("q", event.handles), array("I", event.blocks), strict=True)
        for at, (handle, block) in enumerate(rows):
            sequence = self._sequences[handle]
            if event.keys:
                key = event.keys[at * self._key_bytes : (at + 1) * self._key_bytes]
                sequence.name(block, key[:NAME_BYTES])
            parent = event.parents[at * NAME_BYTES : (at + 1) * NAME_BYTES]
            self._enter(event.group, PRIMARY, event.priority, parent, sequence, block, self.tokens_per_block)

    def _enter(
        self, group: int, level: int, priority: int, parent: bytes, of: NamedTokens, first: int, tokens: int
    ) -> None:
        """So many tokens of a sequence, from the start of its block `first` on, are cached."""
        begin, blocks = first * self.tokens_per_block, self._blocks[group]
        symbols = of.packed(begin, begin + tokens)
        names = bytes(of.names[first * NAME_BYTES : (first - -tokens // self.tokens_per_block) * NAME_BYTES])
        size, above = self.tokens_per_block * TOKEN_BYTES, parent
        for at, name in enumerate(split_names(names)):
            its = symbols[at * size : (at + 1) * size]
            blocks[name] = Block(level, priority, above, its, of.namespace)
            above = name
        spelled = self._symbols.spell(symbols)
        self._changes.append(
            Cached(group, level, priority, names, parent, spelled, self.tokens_per_block, of.namespace)
        )

    def _move(self, event: ev.BlocksMoved) -> None:
        if event.handle is not None and event.why != MoveReason.OFFLOAD:
            self._sequences[event.handle].name(event.first_block, event.names)
        blocks = self._blocks[event.group]
        for name in split_names(event.names):
            blocks[name] = blocks[name]._replace(level=event.to_level)
        self._changes.append(update_of(event))

    def _update(self, event: ev.BlocksUpdated) -> None:
        blocks = self._blocks[event.group]
        for name in split_names(event.names):
            blocks[name] = blocks[name]._replace(priority=event.priority)
        self._changes.append(update_of(event))

    def _remove(self, event: ev.BlocksRemoved) -> None:
        blocks = self._blocks[event.group]
        for name in split_names(event.names):
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

"""All that is cached, as a fold of events into changes, in the order of the events.

Parts of blocks are included, and a block is in its intended place, even if its bytes have not landed there.
TensorRT-LLM publishes this view of its cache: `events.formats.trtllm` makes its dicts from the changes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from events import types as ev
from events.feed.cache_fold import SequenceFold, exported_runs
from events.feed.changes import Cached, Cleared, Created, InventoryChange, Uncached, Updated
from events.packed import NAME_BYTES, SLOT_BYTES, TOKEN_BYTES, names_of_keys, split_names
from events.tokens.sequences import NamedTokens
from events.tokens.symbols import SymbolTable
from events.types import PRIMARY, MoveReason, Namespace


class CachedBlock(NamedTuple):
    """A cached block, or the beginning of one."""

    level: int
    priority: int
    parent: bytes
    """Name of the preceding block; empty at the start of a prompt."""
    symbols: bytes
    namespace: Namespace


class Inventory(SequenceFold[InventoryChange]):
    """Folds batches into changes of the cached blocks. Needs a stream with token ids, and blocks with names."""

    _changes: list[InventoryChange]

    def __init__(self) -> None:
        super().__init__()
        self._created = Created((), "")
        self._blocks: list[dict[bytes, CachedBlock]] = []
        """Cached blocks per group, by name."""
        self._handlers |= {
            ev.BlocksStored: self._store,
            ev.BlocksFilled: self._fill,
            ev.BlocksMoved: self._move,
            ev.BlocksUpdated: self._update,
            ev.BlocksRemoved: self._remove,
            ev.CacheCleared: self._clear,
        }

    def snapshot(self) -> Iterator[InventoryChange]:
        """Yield all blocks cached at the time of this call, parents first; later folds do not affect it."""
        if not self.groups:
            return iter(())
        copies = [blocks.copy() for blocks in self._blocks]
        return _inventory_changes(self._created, copies, self.tokens_per_block, self._symbols.copy())

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
        size = self.tokens_per_block * TOKEN_BYTES
        for blocks, exported in zip(self._blocks, event.groups, strict=True):
            for run in (
                exported_runs(exported, self.tokens_per_block, self._key_bytes) if self._key_bytes else ()
            ):
                for at, (name, state) in enumerate(zip(split_names(run.names), run.states, strict=True)):
                    if state is not None:
                        symbols = run.symbols[at * size : (at + 1) * size]
                        blocks[name] = CachedBlock(*state[:2], run.name_before(at), symbols, run.namespace)

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
        """Add the blocks of `tokens` tokens of a sequence, from the start of its block `first` on, as cached."""
        begin, blocks = first * self.tokens_per_block, self._blocks[group]
        symbols = of.packed(begin, begin + tokens)
        names = bytes(of.names[first * NAME_BYTES : (first - -tokens // self.tokens_per_block) * NAME_BYTES])
        size, above = self.tokens_per_block * TOKEN_BYTES, parent
        for at, name in enumerate(split_names(names)):
            its = symbols[at * size : (at + 1) * size]
            blocks[name] = CachedBlock(level, priority, above, its, of.namespace)
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
        levels = event.from_level, event.to_level
        self._changes.append(Updated(event.group, event.names, level=levels))

    def _update(self, event: ev.BlocksUpdated) -> None:
        blocks = self._blocks[event.group]
        for name in split_names(event.names):
            blocks[name] = blocks[name]._replace(priority=event.priority)
        priorities = event.old_priority, event.priority
        self._changes.append(Updated(event.group, event.names, priority=priorities))

    def _remove(self, event: ev.BlocksRemoved) -> None:
        blocks = self._blocks[event.group]
        for name in split_names(event.names):
            del blocks[name]
        self._changes.append(Uncached(event.group, event.names))


def _inventory_changes(
    created: Created, groups: list[dict[bytes, CachedBlock]], size: int, symbols: SymbolTable
) -> Iterator[InventoryChange]:
    yield created
    for group, blocks in enumerate(groups):
        for chain in _chains(blocks):
            names, its = zip(*chain, strict=True)
            spelled = symbols.spell(b"".join([block.symbols for block in its]))
            level, priority, parent, _, namespace = its[0]
            yield Cached(group, level, priority, b"".join(names), parent, spelled, size, namespace)


def _chains(blocks: dict[bytes, CachedBlock]) -> Iterator[list[tuple[bytes, CachedBlock]]]:
    """Yield each block once, after its cached parent, in runs of one level and priority."""
    left, chain = blocks.copy(), list[tuple[bytes, CachedBlock]]()
    for name in blocks:
        path = []
        while (block := left.pop(name, None)) is not None:
            path.append((name, block))
            name = block.parent  # noqa: PLW2901
        for each in reversed(path):
            if chain and (each[1].parent, *each[1][:2]) != (chain[-1][0], *chain[-1][1][:2]):
                yield chain
                chain = []
            chain.append(each)
    if chain:
        yield chain

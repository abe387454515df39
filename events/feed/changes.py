"""The changes for routers: blocks stored in a level, blocks removed from it, everything cleared.

And for readers of an inventory: a cache that began, blocks that are cached, updated, no longer cached.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from events.tokens.rich import RichTokens
from events.tokens.symbols import SymbolTable, has_symbols
from events.types import EventBatch, GroupCreated, Namespace

BlockExtras = tuple[tuple[str, int], ...]
"""(64 hex digits, offset relative to the block) of each item in a block, in order."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Consecutive full blocks of one prefix became resident in a level."""

    group: int
    level: int
    names: bytes
    """8 bytes per block, big-endian."""
    parent: bytes
    """The name before the first block; empty at the start of a prompt."""
    tokens: bytes
    """Plain token ids, int32 LE; `tokens_per_block` for each name."""
    tokens_per_block: int
    namespace: Namespace
    extras: tuple[BlockExtras, ...] = ()
    """Contents of each block in addition to its tokens; empty if there are none."""
    padded: bytes = b""
    """The tokens as SGLang writes them, if different from `tokens`: with numbers that stand for `extras` as well."""
    salt: str | None = None
    """The salt of `namespace`, if it is published in clear."""


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks left a level; leaves first."""

    group: int
    level: int
    names: bytes


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """No block is resident any more."""


class EncodedEvent(msgspec.Struct, frozen=True, gc=False):
    """An engine's event, to be passed on unchanged."""

    encoded: bytes
    """The event on the wire, in msgpack."""


class Batched(msgspec.Struct, frozen=True, gc=False):
    """A batch of the cache's own events, to be passed on unchanged."""

    batch: EventBatch


class Created(msgspec.Struct, frozen=True, gc=False):
    """A cache of these groups began."""

    groups: tuple[GroupCreated, ...]
    hash_algorithm: str
    rank: int | None = None
    """The engine's rank, if its attention is data-parallel."""


class Cached(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks of one prefix are cached, the last of which may be the beginning of a block only."""

    group: int
    level: int
    priority: int
    names: bytes
    parent: bytes
    """The name before the first block; empty at the start of a prompt."""
    spelled: RichTokens
    """The tokens of all of them."""
    tokens_per_block: int
    namespace: Namespace


class Updated(msgspec.Struct, frozen=True, gc=False):
    """Cached blocks changed their level or their priority, from the first value to the second; None: unchanged."""

    group: int
    names: bytes
    level: tuple[int, int] | None = None
    priority: tuple[int, int] | None = None


class Uncached(msgspec.Struct, frozen=True, gc=False):
    """Blocks are no longer cached, in whichever level they were."""

    group: int
    names: bytes


Change = Stored | Removed | Cleared
InventoryChange = Created | Cached | Updated | Uncached | Cleared
AnyChange = Change | EncodedEvent | Batched | Created | Cached | Updated | Uncached


PAD_BASE, PAD_RANGE = 1_000_000, 1 << 30
"""Range of the number, determined by an item's hash, by which SGLang replaces the item's tokens."""


def expand_symbols(stored: Stored, table: SymbolTable) -> Stored:
    """Return the change with its symbols spelled out; the same object if they are plain."""
    if not stored.namespace.uses_extra_ids and not (table.pages and has_symbols(stored.tokens)):
        return stored
    tokens = table.spell(stored.tokens)
    extras = block_extras(tokens, stored.tokens_per_block, with_extra_ids=stored.namespace.uses_extra_ids)
    padded = _padded(tokens, stored.tokens_per_block, extras if stored.namespace.uses_extra_ids else ())
    return msgspec.structs.replace(stored, tokens=tokens.tokens, extras=extras, padded=padded)


def block_extras(
    tokens: RichTokens, tokens_per_block: int, *, with_extra_ids: bool
) -> tuple[BlockExtras, ...]:
    """Return the contents of each block, for routers, in addition to its tokens.

    Routers know items, but no extra ids: those of a block appear as one more item, with their SHA-256 as its digest, so
    that blocks with others, or with none, are distinguished.
    """
    blocks = []
    for index, items in enumerate(tokens.items_by_block(tokens_per_block)):
        extras = [(item.digest.hex(), item.begin - item.offset) for item in items]
        if with_extra_ids:
            extra_ids = tokens.extra_ids_at(index * tokens_per_block, (index + 1) * tokens_per_block)
            extras.append((hashlib.sha256(extra_ids.astype("<u8").tobytes()).hexdigest(), 0))
        blocks.append(tuple(extras))
    return tuple(blocks)


def _padded(tokens: RichTokens, tokens_per_block: int, extras: tuple[BlockExtras, ...]) -> bytes:
    """Return the tokens, those of items replaced as in SGLang, and moved by the extra ids' digests in `extras`."""
    padded = np.frombuffer(tokens.tokens, "<i4").astype("<i8")
    for item in tokens.items:
        padded[item.begin : item.end] = PAD_BASE + int.from_bytes(item.digest[:8], "big") % PAD_RANGE
    for index, block in enumerate(extras):
        digest, _ = block[-1]
        place = slice(index * tokens_per_block, (index + 1) * tokens_per_block)
        padded[place] = PAD_BASE + (padded[place] + int(digest[:16], 16) % PAD_RANGE) % PAD_RANGE
    return padded.astype("<i4").tobytes()

"""Blocks as routers are told of them: plain tokens, and beside them what else makes the blocks what they are."""

from __future__ import annotations

import hashlib

import msgspec

from events.feed.changes import BlockExtras, Stored
from events.tokens.rich import RichTokens
from events.tokens.symbols import SymbolTable, has_symbols


def told(stored: Stored, table: SymbolTable) -> Stored:
    """The change with its symbols spelled out; the same object if they are plain."""
    if not stored.namespace.uses_extra_ids and not (table.pages and has_symbols(stored.tokens)):
        return stored
    tokens = table.spell(stored.tokens)
    extras = block_extras(tokens, stored.tokens_per_block, with_extra_ids=stored.namespace.uses_extra_ids)
    return msgspec.structs.replace(stored, tokens=tokens.tokens, extras=extras)


def block_extras(
    tokens: RichTokens, tokens_per_block: int, *, with_extra_ids: bool
) -> tuple[BlockExtras, ...]:
    """What routers must know of each block besides its tokens.

    They know items, but no extra ids: those of a block appear as one item more, with their SHA-256 as its digest, so
    that blocks with others, or with none, are told apart.
    """
    blocks = []
    for index, items in enumerate(tokens.items_by_block(tokens_per_block)):
        extras = [(item.digest.hex(), item.begin - item.offset) for item in items]
        if with_extra_ids:
            extra_ids = tokens.extra_ids_at(index * tokens_per_block, (index + 1) * tokens_per_block)
            extras.append((hashlib.sha256(extra_ids.astype("<u8").tobytes()).hexdigest(), 0))
        blocks.append(tuple(extras))
    return tuple(blocks)

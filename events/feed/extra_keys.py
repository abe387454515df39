"""Blocks as routers are told of them: plain tokens, and beside them what else makes the blocks what they are."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from events.feed.changes import BlockExtras, Stored
from events.tokens.rich import RichTokens
from events.tokens.symbols import SymbolTable, has_symbols

PAD_BASE, PAD_RANGE = 1_000_000, 1 << 30
"""SGLang has the tokens of an item replaced by a number in this range that its hash determines."""


def told(stored: Stored, table: SymbolTable) -> Stored:
    """The change with its symbols spelled out; the same object if they are plain."""
    if not stored.namespace.uses_extra_ids and not (table.pages and has_symbols(stored.tokens)):
        return stored
    tokens = table.spell(stored.tokens)
    extras = block_extras(tokens, stored.tokens_per_block, with_extra_ids=stored.namespace.uses_extra_ids)
    padded = _padded(tokens, stored.tokens_per_block, extras if stored.namespace.uses_extra_ids else ())
    return msgspec.structs.replace(stored, tokens=tokens.tokens, extras=extras, padded=padded)


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


def _padded(tokens: RichTokens, tokens_per_block: int, extras: tuple[BlockExtras, ...]) -> bytes:
    """The tokens, with those of items replaced as in SGLang, and moved by the digests of extra ids in `extras`."""
    padded = np.frombuffer(tokens.tokens, "<i4").astype("<i8")
    for item in tokens.items:
        padded[item.begin : item.end] = PAD_BASE + int.from_bytes(item.digest[:8], "big") % PAD_RANGE
    for index, block in enumerate(extras):
        digest, _ = block[-1]
        place = slice(index * tokens_per_block, (index + 1) * tokens_per_block)
        padded[place] = PAD_BASE + (padded[place] + int(digest[:16], 16) % PAD_RANGE) % PAD_RANGE
    return padded.astype("<i4").tobytes()

"""Blocks as an engine told of them: taken out of the events that stored them, and put together again.

What a store says of all its blocks is kept once (`Scope`); what it says of each is the block's own. So blocks that are
gone leave nothing behind. In windows that slide, a store may name fewer blocks than its tokens make, and nothing says
which: then its tokens stay with all of its blocks, and are told again with whichever of them are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from events.packed import TOKEN_BYTES
from events.types import FeedStored, Hash

PER_BLOCK = ("extra_keys", "lookahead_token_ids")
"""Further fields that have an entry for each block."""
SLIDING_KINDS = ("sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention")
"""Of attention that looks back only so far; as engines call them."""
ODD_TOKENS = "token_ids"
"""The further field that has tokens which are no plain numbers."""

_pack = msgspec.msgpack.encode
_unpack = msgspec.msgpack.decode
_Own = tuple[tuple[str, Any], ...]


class Scope(NamedTuple):
    """What a store says of all its blocks: the event without the columns that the blocks have."""

    event: FeedStored
    whole: bool
    """Whether the tokens are in it, too, because nobody knows which are whose."""
    chained: bool = True
    """Whether a block is of no use without its parent, as with full attention."""


class Block(NamedTuple):
    """A resident block."""

    name: Hash
    parent: Hash | None
    tokens: bytes
    """int32 LE; empty where the engine did not say, or `scope.whole`."""
    own: _Own
    """Its entries of further fields."""
    scope: Scope

    def field(self, name: str) -> Any:
        """Its entry of a further field, or what is said of all; None: there is none."""
        for key, value in self.own:
            if key == name:
                return value
        more = self.scope.event.more
        return _unpack(more).get(name) if more else None


def blocks_of(event: FeedStored) -> list[Block]:
    """The blocks that are stored, in order."""
    hashes, size = event.block_hashes, event.block_size
    more: dict[str, Any] = _unpack(event.more) if event.more else {}
    count = len(hashes)
    own = {name: more.pop(name) for name in PER_BLOCK if _has_each(more.get(name), count)}
    aligned = not event.tokens or len(event.tokens) == count * size * TOKEN_BYTES
    if ODD_TOKENS in more and _has_each(more[ODD_TOKENS], count * size) and size:
        odd = more.pop(ODD_TOKENS)
        own[ODD_TOKENS] = [odd[at * size : (at + 1) * size] for at in range(count)]
    whole = not aligned or ODD_TOKENS in more
    bare = msgspec.structs.replace(
        event,
        block_hashes=(),
        parent_block_hash=event.parent_block_hash if whole else None,
        tokens=event.tokens if whole else b"",
        more=_pack(more) if more else b"",
    )
    chained = not whole and more.get("kv_cache_spec_kind") not in SLIDING_KINDS
    scope, step = Scope(bare, whole, chained), size * TOKEN_BYTES if event.tokens and not whole else 0
    blocks, parent = [], event.parent_block_hash
    for at, name in enumerate(hashes):
        mine = tuple([(key, values[at]) for key, values in own.items()])
        blocks.append(Block(name, parent, event.tokens[at * step : (at + 1) * step], mine, scope))
        parent = name
    return blocks


def _has_each(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count


def stores_of(blocks: Iterable[Block]) -> Iterator[FeedStored]:
    """Events that store these blocks, in this order; those that follow each other in one prefix by one event."""
    run: list[Block] = []
    for block in blocks:
        if run and not _continues(run[-1], block):
            yield _store(run)
            run = []
        run.append(block)
    if run:
        yield _store(run)


def _continues(before: Block, block: Block) -> bool:
    if block.scope.whole or before.scope.whole:
        return block.scope is before.scope
    same = block.scope is before.scope or block.scope == before.scope
    return (
        same
        and block.parent == before.name
        and [key for key, _ in block.own] == [key for key, _ in before.own]
    )


def _store(run: Sequence[Block]) -> FeedStored:
    scope = run[0].scope
    own: dict[str, list[Any]] = {}
    for block in run:
        for key, value in block.own:
            own.setdefault(key, []).extend(value if key == ODD_TOKENS else [value])
    more = scope.event.more
    if own:
        more = _pack({**own, **(_unpack(more) if more else {})})
    return msgspec.structs.replace(
        scope.event,
        block_hashes=tuple([block.name for block in run]),
        parent_block_hash=scope.event.parent_block_hash if scope.whole else run[0].parent,
        tokens=scope.event.tokens if scope.whole else b"".join([block.tokens for block in run]),
        more=more,
    )


def parents_first(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks in their order, but each behind its parent, in whatever places of its group that is."""
    rows = list(blocks)
    at: dict[tuple[int, Hash], list[int]] = {}
    for row, block in enumerate(rows):
        at.setdefault((_group(block), block.name), []).append(row)
    met, told = bytearray(len(rows)), bytearray(len(rows))
    for first in range(len(rows)):
        path = [first]
        while path:
            row = path[-1]
            block = rows[row]
            if not met[row]:
                met[row] = True
                parents = () if block.parent is None else at.get((_group(block), block.parent), ())
                path += [each for each in parents if not met[each]]
                continue
            path.pop()
            if not told[row]:
                told[row] = True
                yield block


def _group(block: Block) -> int:
    return block.scope.event.group_idx or 0

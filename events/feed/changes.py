"""What routers are told: blocks stored in a level, blocks removed from it, everything cleared.

And what readers of an inventory are told: a cache that began, blocks that are cached, updated, not cached any more.
"""

from __future__ import annotations

import msgspec

from events.tokens.rich import RichTokens
from events.types import EventBatch, GroupCreated, Namespace

BlockExtras = tuple[tuple[str, int], ...]
"""(64 hex digits, where it begins relative to the block) of each item in a block, in order."""


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
    """What distinguishes each block besides its tokens; empty where there is nothing."""
    padded: bytes = b""
    """The tokens as SGLang writes them, where that is not `tokens`: with numbers that stand for `extras` as well."""


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks left a level; leaves first."""

    group: int
    level: int
    names: bytes


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """Nothing is resident any more."""


class Told(msgspec.Struct, frozen=True, gc=False):
    """Something that an engine told, to be passed on as it was."""

    encoded: bytes
    """The event on the wire, in msgpack."""


class Batched(msgspec.Struct, frozen=True, gc=False):
    """A batch of the cache's own events, to be passed on as it is."""

    batch: EventBatch


class Created(msgspec.Struct, frozen=True, gc=False):
    """A cache of these groups began."""

    groups: tuple[GroupCreated, ...]
    hash_algorithm: str
    rank: int | None = None
    """The engine's, where its attention is data-parallel."""


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
    """Cached blocks changed their level or their priority, from the first value to the second; None: not that."""

    group: int
    names: bytes
    level: tuple[int, int] | None = None
    priority: tuple[int, int] | None = None


class Uncached(msgspec.Struct, frozen=True, gc=False):
    """Blocks are not cached any more, in whichever level they were."""

    group: int
    names: bytes


Change = Stored | Removed | Cleared
InventoryChange = Created | Cached | Updated | Uncached | Cleared
AnyChange = Change | Told | Batched | Created | Cached | Updated | Uncached

"""What routers are told: blocks stored in a level, blocks removed from it, everything cleared."""

from __future__ import annotations

import msgspec

from events.types import Namespace

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


Change = Stored | Removed | Cleared
AnyChange = Change | Told

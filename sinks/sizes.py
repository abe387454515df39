"""How much memory a batch holds, roughly, in a fraction of a microsecond.

Queues are bounded in bytes, and the engine's thread has to know the size of each batch it hands off.
Encoding would tell, and would cost more than everything else. Nearly all bytes are in packed columns, whose
length is known; a constant stands for the rest of an event. The few types that come with every engine
step are spelled out, because a generic walk over fields takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from events.types import (
    BlocksAllocated,
    BlocksFilled,
    BlocksRemoved,
    BlocksReused,
    BlocksStored,
    ContextComputed,
    EventBatch,
    SequenceAdded,
    TokensAppended,
)

OBJECT_BYTES = 200
"""Stands for the Python objects of an event or a batch besides its columns."""


def batch_bytes(batch: EventBatch) -> int:
    """Bytes of memory that `batch` keeps alive, estimated."""
    total = OBJECT_BYTES * (1 + len(batch.events))
    for event in batch.events:
        total += _MEASURES.get(type(event), column_bytes)(event)
    return total


def column_bytes(value: Any) -> int:
    """Bytes in the columns and texts of a struct, and of the structs and tuples inside it."""
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, msgspec.Struct):
        return sum(map(column_bytes, msgspec.structs.astuple(value)))
    if isinstance(value, tuple):
        return sum(map(column_bytes, value))
    return 0


_MEASURES: dict[type, Callable[[Any], int]] = {
    TokensAppended: lambda e: len(e.handles) + len(e.counts) + len(e.tokens),
    BlocksAllocated: lambda e: len(e.handles) + len(e.counts) + len(e.slots),
    BlocksReused: lambda e: len(e.slots) + len(e.names) + len(e.replaced),
    BlocksStored: lambda e: len(e.parent) + len(e.keys) + len(e.slots),
    BlocksFilled: lambda e: len(e.handles) * 2 + len(e.parents) + len(e.keys),
    BlocksRemoved: lambda e: len(e.slots) + len(e.names),
    ContextComputed: lambda _: 0,
    SequenceAdded: lambda e: len(e.tokens),
}

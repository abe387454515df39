"""An estimate of a batch's memory, in a fraction of a microsecond per event.

The queues before a log and before sinks are bounded in bytes, and the engine's thread needs the size of each batch that
it passes on. Encoding would give it, but would cost more than everything else. Nearly all bytes are in packed columns
of known length; a constant stands for the rest of an event. The types that come with engine steps are spelled out,
because a walk over fields takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from events import types as ev

OBJECT_BYTES = 200
"""Estimate for the Python objects of a batch, an event, or a struct in one, without its columns."""
_HASH_BYTES = 40
"""Bytes of a number of 64 bits, and of a place in a tuple."""


def batch_bytes(batch: ev.EventBatch) -> int:
    """Estimate the bytes of memory that `batch` keeps alive."""
    total = OBJECT_BYTES * (1 + len(batch.events))
    for event in batch.events:
        total += _MEASURES.get(type(event), column_bytes)(event)
    return total


def column_bytes(struct: msgspec.Struct) -> int:
    """Return the bytes in the columns and texts of a struct, and of the structs inside it."""
    return sum(map(_held_by, msgspec.structs.astuple(struct)))


def _held_by(value: object) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, tuple):
        return sum(map(_held_by, value))
    return OBJECT_BYTES + column_bytes(value) if isinstance(value, msgspec.Struct) else 0


_MEASURES: dict[type, Callable[[Any], int]] = {
    ev.TokensAppended: lambda e: len(e.handles) + len(e.counts) + len(e.tokens),
    ev.BlocksAllocated: lambda e: len(e.handles) + len(e.counts) + len(e.slots),
    ev.BlocksReused: lambda e: len(e.slots) + len(e.names) + len(e.replaced),
    ev.BlocksStored: lambda e: len(e.parent) + len(e.keys) + len(e.slots),
    ev.BlocksFilled: lambda e: len(e.handles) * 2 + len(e.parents) + len(e.keys),
    ev.BlocksMoved: lambda e: len(e.names) + len(e.from_slots) + len(e.to_slots),
    ev.BlocksRemoved: lambda e: len(e.slots) + len(e.names),
    ev.ContextComputed: lambda _: 0,
    ev.BlocksDetached: lambda e: len(e.handles) + len(e.counts) + len(e.slots) + len(e.freed),
    ev.BlocksReturned: lambda e: len(e.handles) + len(e.counts) + len(e.slots),
    ev.SequenceAdded: lambda e: len(e.tokens) + (OBJECT_BYTES if e.labels else 0),
    ev.SlotsTaken: lambda e: len(e.indices) + len(e.slots),
    ev.SlotsLeft: lambda e: len(e.indices) + len(e.slots),
    ev.SlotsNamed: lambda e: len(e.slots) + len(e.keys) + len(e.positions),
    ev.SlotsUnnamed: lambda e: len(e.slots) + len(e.keys),
    ev.FeedStored: lambda e: len(e.tokens) + len(e.more) + _HASH_BYTES * len(e.block_hashes),
    ev.FeedRemoved: lambda e: len(e.more) + _HASH_BYTES * len(e.block_hashes),
    ev.SequenceRemoved: lambda e: sum(map(len, e.freed)),
}

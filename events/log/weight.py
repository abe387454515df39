"""How much memory a batch holds, roughly, at a cost the engine thread can pay for every batch.

Only the columns that make batches large are looked at; all else of an event is a constant. Allocated and
freed slots are left out: 4 bytes per block, where tokens and keys of the same blocks have a hundred.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from events.types import (
    BlocksFilled,
    BlocksMoved,
    BlocksRemoved,
    BlocksReused,
    BlocksStored,
    BlocksUpdated,
    CacheCreated,
    EventBatch,
    SequenceAdded,
    StateExported,
    SymbolsInterned,
    TokensAppended,
)

_EVENT_BYTES = 100


def batch_weight(batch: EventBatch) -> int:
    """Bytes, within a factor of about two for large batches."""
    weight = _EVENT_BYTES * (1 + len(batch.events))
    for event in batch.events:
        weigh = _COLUMNS.get(type(event))
        if weigh is not None:
            weight += weigh(event)
    return weight


def _exported(event: StateExported) -> int:
    groups = sum(len(g.runs) + len(g.symbols) + len(g.slots) + len(g.keys) for g in event.groups)
    blanks = sum(len(column) for g in event.groups for column in g.blank_slots)
    sequences = sum(len(s.tokens) + sum(map(len, s.slots)) + _EVENT_BYTES for s in event.sequences)
    return groups + blanks + sequences + _EVENT_BYTES * (len(event.transfers) + len(event.symbols))


# A slot has 4 bytes and a name 8, so columns of equal length need one look.
_COLUMNS: dict[type, Callable[[Any], int]] = {
    BlocksFilled: lambda event: len(event.keys) + 6 * len(event.slots),
    BlocksMoved: lambda event: 4 * len(event.from_slots),
    BlocksRemoved: lambda event: 3 * len(event.slots),
    BlocksReused: lambda event: 3 * len(event.slots),
    BlocksStored: lambda event: len(event.keys) + len(event.slots),
    BlocksUpdated: lambda event: 3 * len(event.slots),
    CacheCreated: lambda event: len(event.config),
    SequenceAdded: lambda event: len(event.tokens),
    StateExported: _exported,
    SymbolsInterned: lambda event: _EVENT_BYTES * len(event.pages),
    TokensAppended: lambda event: len(event.tokens) + len(event.handles),
}

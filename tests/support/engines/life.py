"""The life of a block: what may become of the states of a slot (`kvcache.fold.slot_states`) by which event."""

from __future__ import annotations

from events import types as ev
from events.types import MoveReason
from kvcache.fold.slot_states import (
    BLANK,
    HELD,
    REFERENCED,
    REFERENCED_IN_FLIGHT,
    SHARED,
    UNREFERENCED,
    UNREFERENCED_IN_FLIGHT,
    SlotState,
)

Occasion = type[ev.Event] | MoveReason
"""The type of an event; of a `BlocksMoved` the reason, which decides."""
Life = dict[SlotState, dict[Occasion, set[SlotState]]]
"""What may become of a slot in this state by an event that names or changes it. What is not here cannot happen."""

IN_PRIMARY: Life = {
    BLANK: {ev.BlocksAllocated: {HELD}, MoveReason.ONBOARD: {REFERENCED_IN_FLIGHT}},
    HELD: {
        ev.BlocksCopied: {HELD},
        ev.BlocksStored: {REFERENCED},
        ev.BlocksFilled: {REFERENCED},
        MoveReason.RECOMPUTED: {REFERENCED},
        ev.BlocksReused: {BLANK, HELD},  # a cached one takes its place in the table: given back, or kept
        ev.BlocksDetached: {BLANK},
        ev.BlocksReturned: {BLANK},
        ev.SequenceRemoved: {BLANK},
        ev.EncoderRemoved: {BLANK},
        ev.BlocksUnpinned: {BLANK},
        ev.SequenceForked: {SHARED},
        ev.SequenceRewound: {BLANK},
    },
    SHARED: {
        ev.SequenceForked: {SHARED},
        ev.SequenceRewound: {SHARED, HELD},
        ev.BlocksCopied: {SHARED},
        ev.BlocksDetached: {SHARED, HELD, BLANK},
        ev.SequenceRemoved: {SHARED, HELD},
        ev.EncoderRemoved: {SHARED, HELD},
        ev.BlocksUnpinned: {SHARED, HELD},
    },
    REFERENCED: {
        ev.BlocksReused: {REFERENCED},
        ev.BlocksCopied: {REFERENCED},
        ev.BlocksUpdated: {REFERENCED},
        ev.BlocksDetached: {REFERENCED, UNREFERENCED},
        ev.SequenceRemoved: {REFERENCED, UNREFERENCED},
        ev.EncoderRemoved: {REFERENCED, UNREFERENCED},
        ev.BlocksPinned: {REFERENCED},
        ev.SequenceForked: {REFERENCED},
        ev.SequenceRewound: {REFERENCED, UNREFERENCED},
        ev.BlocksUnpinned: {REFERENCED, UNREFERENCED},
        ev.BlocksRemoved: {HELD, SHARED},  # invalidated
        ev.CacheCleared: {HELD, SHARED},
    },
    UNREFERENCED: {
        ev.BlocksReused: {REFERENCED},
        ev.BlocksCopied: {UNREFERENCED},
        ev.BlocksUpdated: {UNREFERENCED},
        MoveReason.OFFLOAD: {BLANK},
        ev.BlocksRemoved: {BLANK},
        ev.CacheCleared: {BLANK},
    },
    REFERENCED_IN_FLIGHT: {
        ev.TransferLanded: {REFERENCED},
        ev.BlocksReused: {REFERENCED_IN_FLIGHT},
        ev.BlocksCopied: {REFERENCED_IN_FLIGHT},
        ev.BlocksUpdated: {REFERENCED_IN_FLIGHT},
        ev.BlocksDetached: {REFERENCED_IN_FLIGHT, UNREFERENCED_IN_FLIGHT},
        ev.SequenceRemoved: {REFERENCED_IN_FLIGHT, UNREFERENCED_IN_FLIGHT},
        ev.EncoderRemoved: {REFERENCED_IN_FLIGHT, UNREFERENCED_IN_FLIGHT},
        ev.BlocksPinned: {REFERENCED_IN_FLIGHT},
        ev.SequenceForked: {REFERENCED_IN_FLIGHT},
        ev.SequenceRewound: {REFERENCED_IN_FLIGHT, UNREFERENCED_IN_FLIGHT},
        ev.BlocksUnpinned: {REFERENCED_IN_FLIGHT, UNREFERENCED_IN_FLIGHT},
        ev.CacheCleared: {HELD, SHARED},
    },
    UNREFERENCED_IN_FLIGHT: {
        ev.TransferLanded: {UNREFERENCED},
        ev.BlocksReused: {REFERENCED_IN_FLIGHT},
        ev.BlocksCopied: {UNREFERENCED_IN_FLIGHT},
        ev.BlocksUpdated: {UNREFERENCED_IN_FLIGHT},
        MoveReason.OFFLOAD: {BLANK},
        ev.BlocksRemoved: {BLANK},
        ev.CacheCleared: {BLANK},
    },
}

# Blocks are referenced here only within an admission: what it reuses it onboards.
IN_SECONDARY: Life = {
    BLANK: {MoveReason.OFFLOAD: {UNREFERENCED_IN_FLIGHT}},
    REFERENCED: {ev.BlocksReused: {REFERENCED}, ev.BlocksCopied: {REFERENCED}, MoveReason.ONBOARD: {BLANK}},
    UNREFERENCED: {
        ev.BlocksReused: {REFERENCED},
        ev.BlocksCopied: {UNREFERENCED},
        ev.BlocksUpdated: {UNREFERENCED},
        MoveReason.RECOMPUTED: {BLANK},
        ev.BlocksRemoved: {BLANK},
        ev.CacheCleared: {BLANK},
    },
    REFERENCED_IN_FLIGHT: {
        ev.BlocksReused: {REFERENCED_IN_FLIGHT},
        ev.BlocksCopied: {REFERENCED_IN_FLIGHT},
        MoveReason.ONBOARD: {BLANK},
    },
    UNREFERENCED_IN_FLIGHT: {
        ev.TransferLanded: {UNREFERENCED},
        ev.BlocksReused: {REFERENCED_IN_FLIGHT},
        ev.BlocksCopied: {UNREFERENCED_IN_FLIGHT},
        ev.BlocksUpdated: {UNREFERENCED_IN_FLIGHT},
        MoveReason.RECOMPUTED: {BLANK},
        ev.BlocksRemoved: {BLANK},
        ev.CacheCleared: {BLANK},
    },
}

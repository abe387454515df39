"""The life of a block as routers see it: what may become of what the feed knows of a slot, by which event."""

from __future__ import annotations

from enum import IntEnum

from events import types as ev
from events.feed import slots
from events.types import MoveReason


class Visibility(IntEnum):
    """What routers know of a slot's block."""

    ABSENT = slots.ABSENT
    IN_FLIGHT = slots.IN_FLIGHT
    WAITING = slots.WAITING
    ANNOUNCED = slots.ANNOUNCED


ABSENT, IN_FLIGHT, WAITING, ANNOUNCED = Visibility

Occasion = type[ev.Event] | MoveReason
"""The type of an event; of a `BlocksMoved` the reason, which decides."""
LIFE: dict[Visibility, dict[Occasion, set[Visibility]]] = {
    ABSENT: {
        ev.BlocksStored: {ABSENT, WAITING, ANNOUNCED},
        ev.BlocksFilled: {WAITING, ANNOUNCED},
        MoveReason.OFFLOAD: {ABSENT, IN_FLIGHT},
        MoveReason.ONBOARD: {IN_FLIGHT},
        MoveReason.RECOMPUTED: {WAITING, ANNOUNCED},
        ev.BlocksReused: {ABSENT},
        ev.BlocksRemoved: {ABSENT},
    },
    IN_FLIGHT: {
        ev.BlocksReused: {IN_FLIGHT},
        ev.TransferLanded: {WAITING, ANNOUNCED},
        MoveReason.OFFLOAD: {ABSENT},
        MoveReason.ONBOARD: {ABSENT},
        MoveReason.RECOMPUTED: {ABSENT},
        ev.BlocksRemoved: {ABSENT},
        ev.CacheCleared: {ABSENT},
    },
    # Those that wait are announced with their parent, by an event that need not name them.
    WAITING: {
        ev.BlocksReused: {WAITING},
        ev.TransferLanded: {ANNOUNCED},
        MoveReason.OFFLOAD: {ABSENT},
        MoveReason.ONBOARD: {ABSENT},
        MoveReason.RECOMPUTED: {ABSENT, ANNOUNCED},
        ev.BlocksRemoved: {ABSENT},
        ev.CacheCleared: {ABSENT},
    },
    ANNOUNCED: {
        ev.BlocksReused: {ANNOUNCED},
        MoveReason.OFFLOAD: {ABSENT},
        MoveReason.ONBOARD: {ABSENT},
        MoveReason.RECOMPUTED: {ABSENT},
        ev.BlocksRemoved: {ABSENT},
        ev.CacheCleared: {ABSENT},
    },
}
"""What may become of a slot by an event that names or changes it, in either level. What is not here cannot happen."""

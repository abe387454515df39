"""What happens to slots that several groups of layers share.

Of a recorded engine with layers of several kinds, the first group, with full attention, is told by the events of
blocks. The other ones take slots of its primary pool, and are told by what is here: a table says which slot a sequence
has at which index, and a name says that a slot holds what a prefix of `position` tokens needs.
"""

from __future__ import annotations

from events.ids import GroupIndex, Handle
from events.packed import Counts, Keys, Slots
from events.reasons import RemoveReason
from events.structs import Event, RequestId, SharingGroup


class PoolShared(Event, frozen=True):
    """Further groups take slots of the first group's primary pool. Behind each `StateExported` of such a cache."""

    groups: tuple[SharingGroup, ...]
    """They are numbered on from the groups of `CacheCreated`."""


class SlotsTaken(Event, frozen=True):
    """A sequence has these slots in its table of a group from now on."""

    handle: Handle
    group: GroupIndex
    indices: Counts
    """In the table: of a block that has the tokens from ``index * tokens_per_block`` on."""
    slots: Slots
    reused: bool = False
    """They have names, by which they were found; else nobody had them."""


class SlotsLeft(Event, frozen=True):
    """A sequence left slots that no token to come needs. Named ones can be found still."""

    handle: Handle
    group: GroupIndex
    indices: Counts
    slots: Slots


class SlotsNamed(Event, frozen=True):
    """Slots of a sequence can be found by others."""

    handle: Handle
    group: GroupIndex
    slots: Slots
    keys: Keys
    """Of the sequence's first tokens, one for each slot, as those of blocks with full attention."""
    positions: Counts
    """How many tokens that are."""


class SlotsUnnamed(Event, frozen=True):
    """Slots cannot be found by these names any more. Those that no sequence has are free."""

    group: GroupIndex
    slots: Slots
    keys: Keys
    why: RemoveReason
    handle: Handle | None = None
    """The sequence that needed the room: it takes the slots by the events that follow."""


class HitDeferred(Event, frozen=True):
    """A note: a request was not admitted, as what it found in a group is only being computed by the step."""

    request_id: RequestId
    group: GroupIndex

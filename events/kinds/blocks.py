"""What happens to blocks."""

from __future__ import annotations

from events.ids import BlockIndex, GroupIndex, Handle, Slot
from events.packed import Counts, Handles, Keys, Names, Parent, Slots
from events.reasons import AllocateReason, MoveReason, RemoveReason, UpdateReason
from events.structs import Event, Level


class BlocksAllocated(Event, frozen=True):
    """Blank slots were appended to the block tables of sequences, in order."""

    handles: Handles
    counts: Counts
    """Slots per sequence; empty: one each."""
    group: GroupIndex
    slots: Slots
    why: AllocateReason


class BlocksReused(Event, frozen=True):
    """A sequence took cached blocks into its table, from `first_block` on."""

    handle: Handle
    group: GroupIndex
    level: Level
    first_block: BlockIndex
    slots: Slots
    names: Names
    """In a sliding window those of blocks before come first, as far as no event about this sequence has given them."""
    replaced: Slots = b""
    """The sequence's own slots, given back because it had computed blocks that another one stored first."""


class BlocksCopied(Event, frozen=True):
    """The first `num_tokens` tokens of a block were copied to a primary slot of the sequence.

    Of a branch these are all of its tokens in the block, also those that are not known to be computed.
    """

    handle: Handle
    group: GroupIndex
    source_level: Level
    source: Slot
    target: Slot
    num_tokens: int
    block: BlockIndex
    """Index of the target in the sequence's block table."""
    transfer: int
    priority: int = 35
    """Of the source: the copy gets it when it is stored, unless its request says otherwise; so with `duration`."""
    duration: int = 0


class BlocksStored(Event, frozen=True):
    """Blocks of a sequence became reusable, from `first_block` of its table on. The tokens are the sequence's."""

    handle: Handle
    group: GroupIndex
    first_block: BlockIndex
    parent: Parent
    """Name of the block before the first one; empty at the start of a prompt."""
    keys: Keys
    """Up to that of the last of these blocks: those that no event about this sequence has given before."""
    slots: Slots
    level: Level
    priority: int
    last_tokens: int
    """Tokens in the last block; fewer than tokens_per_block only for the last block of a removed sequence."""
    duration: int = 0
    """For how long the priority holds from when the last sequence lets go of a block, in nanoseconds; 0: for good."""


class BlocksFilled(Event, frozen=True):
    """Decoding filled one block of each of these sequences, and it became reusable. The tokens are the sequences'.

    What `BlocksStored` says one sequence at a time: here all of an engine step's, each behind a block that its
    sequence had cached before and nobody else holds, so never the first of a prompt.
    """

    handles: Handles
    group: GroupIndex
    blocks: Counts
    """Per sequence, the index of the block in its table."""
    parents: Names
    """Names of the blocks before."""
    keys: Keys
    """Empty where earlier events, about other groups, have given them."""
    slots: Slots
    """In primary."""
    priority: int
    duration: int = 0


class BlocksUpdated(Event, frozen=True):
    """The priority of cached blocks changed, or for how long they have it.

    Blocks whose time is over are evicted after all others that have the same priority now; they are listed in any
    order, in a sliding window the shallowest first.
    """

    group: GroupIndex
    level: Level
    slots: Slots
    names: Names
    old_priority: int
    priority: int
    handle: Handle | None = None
    """The sequence for which it was changed."""
    why: UpdateReason = UpdateReason.SET
    duration: int | None = None
    """From now on; None: as before."""
    clock: int = 0
    """When a time was over; else 0."""


class BlocksMoved(Event, frozen=True):
    """Blocks changed their level."""

    group: GroupIndex
    names: Names
    from_level: Level
    from_slots: Slots
    to_level: Level
    to_slots: Slots
    why: MoveReason
    transfer: int
    """0: nothing is copied."""
    handle: Handle | None = None
    """The sequence for which the move was made."""
    first_block: BlockIndex = BlockIndex(0)
    """Onboard and recomputed: index of the first block in the sequence's table."""


class BlocksRemoved(Event, frozen=True):
    """Cached content is gone; deepest block first. Slots that no sequence holds become blank.

    Only invalidated blocks may be held: they stay with their sequences, without a name.
    """

    group: GroupIndex
    level: Level
    slots: Slots
    names: Names
    why: RemoveReason
    handle: Handle | None = None
    """The sequence that needed the room."""


class BlocksDetached(Event, frozen=True):
    """Sequences let go of their first blocks, which a sliding window has left behind. What is cached stays so."""

    handles: Handles
    counts: Counts
    """Blocks per sequence; empty: one each."""
    group: GroupIndex
    slots: Slots
    """Where the blocks lie, shallowest first."""
    freed: Slots
    """Slots among these that become blank, because they are not cached."""
    clock: int = 0


class BlocksReturned(Event, frozen=True):
    """Sequences gave back the last slots of their tables, which were reserved and are not needed: they are blank."""

    handles: Handles
    counts: Counts
    """Blocks per sequence."""
    group: GroupIndex
    slots: Slots
    """Each sequence's deepest first."""


class BlocksPinned(Event, frozen=True):
    """Cached blocks of a sequence are held by a reference that outlives it."""

    pin: int
    """Its number: 1, 2, ... in a log."""
    handle: Handle
    slots: tuple[Slots, ...]
    """Per group, in primary, shallowest first; with full attention from the first block of the prompt on."""


class BlocksUnpinned(Event, frozen=True):
    """A pin's references are released."""

    pin: int
    freed: tuple[Slots, ...]
    """Per group: slots that become blank, deepest first: none unless the cache was cleared meanwhile."""
    clock: int = 0

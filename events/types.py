"""The events: everything that can happen to the cache, as frozen msgspec structs.

An event is encoded as an array ``[tag, field, ...]``. The schema only grows: new fields are added at
the end with a default, tags are never reused. Columns are packed (see `events.packed`).

Inside a log a cached block is addressed by (group, level, slot); events about cached blocks carry the
8-byte names as well, so that a line can be read alone. A sequence is addressed by its `handle`, which
`SequenceAdded` ties to the request's id; a handle is never used twice in a log.

A log of kind `feed` has events of its own (`events.feed_events`) behind its `EpochStarted`, and `Gap`.

Levels: 0 is the primary (GPU) pool, 1 the secondary (host) pool.
"""

from __future__ import annotations

import msgspec

from events.feed_events import FeedCleared as FeedCleared
from events.feed_events import FeedGap as FeedGap
from events.feed_events import FeedReceived as FeedReceived
from events.feed_events import FeedRemoved as FeedRemoved
from events.feed_events import FeedRestarted as FeedRestarted
from events.feed_events import FeedStarted as FeedStarted
from events.feed_events import FeedStored as FeedStored
from events.feed_events import FeedUnknown as FeedUnknown
from events.feed_events import WorkerSeen as WorkerSeen
from events.ids import BlockIndex, GroupIndex, Handle, LevelIndex, Slot
from events.packed import Counts, Handles, Keys, Names, Numbers, Parent, Slots, Tokens
from events.reasons import AllocateReason as AllocateReason
from events.reasons import EndReason as EndReason
from events.reasons import MoveReason as MoveReason
from events.reasons import RemoveReason as RemoveReason
from events.structs import Event as Event
from events.structs import GroupCreated as GroupCreated
from events.structs import GroupExported as GroupExported
from events.structs import JsonText, Level
from events.structs import Namespace as Namespace
from events.structs import Pages as Pages
from events.structs import PoolCreated as PoolCreated
from events.structs import RequestId as RequestId
from events.structs import SequenceExported as SequenceExported
from events.structs import SymbolPage as SymbolPage
from events.structs import TransferExported as TransferExported

PRIMARY = LevelIndex(0)
SECONDARY = LevelIndex(1)
FULL, SLIDING = "full", "sliding"
"""Kinds of windows (`GroupCreated.kind`)."""
FORMAT_VERSION = 1
"""Raised when the meaning of an event changes. A reader refuses a newer one."""


class CacheCreated(Event, frozen=True):
    """A manager started with an empty cache."""

    config: JsonText
    """The effective configuration as JSON."""
    tokens_per_block: int
    groups: tuple[GroupCreated, ...]
    hash_algorithm: str
    key_bytes: int
    content_id: str
    """Digest of what a block's bytes mean (layers, heads, dims, dtype, layout)."""
    format_version: int = FORMAT_VERSION


class EpochStarted(Event, frozen=True):
    """A log was opened for writing. Always the first event of its batch, and of an epoch."""

    epoch: int
    log_id: bytes
    previous_epoch: int | None
    previous_last_seq: int | None
    clean: bool
    """Whether the previous epoch ended with a close (True for the first epoch)."""
    tokens_recorded: bool
    software: str


class StateExported(Event, frozen=True):
    """The whole state, so that folding can begin here."""

    groups: tuple[GroupExported, ...]
    sequences: tuple[SequenceExported, ...]
    transfers: tuple[TransferExported, ...]
    next_handle: int
    next_transfer: int
    releases: int
    """How often a sequence has let go of its blocks so far: the next one is released later than all others."""
    changed_blocks: int
    """Blocks changed since the last checkpoint."""
    symbols: Pages = ()
    """What symbols below 0 stand for; none if the log records no tokens."""
    forget_symbols_at: int = 0
    """Above so many pages those that nothing uses are forgotten; 0: the least there is."""
    refused: tuple[RequestId, ...] = ()
    """Requests whose refusal was noted, oldest first, that were not admitted since: it is not noted again."""


class Gap(Event, frozen=True):
    """Batches are missing here."""

    first_seq: int
    last_seq: int
    reason: str


class SequenceAdded(Event, frozen=True):
    """A request was admitted."""

    handle: Handle
    request_id: RequestId
    namespace: Namespace
    num_tokens: int
    tokens: Tokens
    reused: int
    """Leading tokens that need not be computed, as all groups have them: full blocks, then `reused_partial`."""
    reused_primary: tuple[int, ...]
    """Per group: tokens in full blocks that the sequence takes from primary: in a sliding window only what it sees."""
    reused_secondary: tuple[int, ...]
    """Per group: tokens in full blocks that it takes from secondary."""
    reused_partial: int
    """Tokens copied from a block of which only the start matches."""
    resumed: bool = False
    """The request had run before, and goes on: what it computed then and finds again is no hit."""


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
    """The first `num_tokens` tokens of a block were copied to a primary slot of the sequence."""

    handle: Handle
    group: GroupIndex
    source_level: Level
    source: Slot
    target: Slot
    num_tokens: int
    block: BlockIndex
    """Index of the target in the sequence's block table."""
    transfer: int


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


class BlocksUpdated(Event, frozen=True):
    """The priority of cached blocks changed."""

    group: GroupIndex
    level: Level
    slots: Slots
    names: Names
    old_priority: int
    priority: int
    handle: Handle | None = None
    """The sequence for which it was changed."""


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
    """Cached content is gone; deepest block first. Slots that no sequence holds become blank."""

    group: GroupIndex
    level: Level
    slots: Slots
    names: Names
    why: RemoveReason
    handle: Handle | None = None
    """The sequence that needed the room."""


class TokensAppended(Event, frozen=True):
    """One `add_tokens` call."""

    handles: Handles
    counts: Counts
    """Tokens per sequence; empty: one each."""
    tokens: Tokens


class ContextComputed(Event, frozen=True):
    """The engine has written K/V of the first `num_tokens` tokens of a sequence."""

    handle: Handle
    num_tokens: int


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


class SequenceRemoved(Event, frozen=True):
    """A sequence ended: its references are released, its own slots become blank."""

    handle: Handle
    stored: tuple[int, ...]
    """Per group: its leading blocks that have been stored. Of a sliding window those that it had left behind are
    among them, which may have been evicted since; with full attention all of them stay cached."""
    freed: tuple[Slots, ...]
    """Per group: slots that become blank, in the order in which they do."""
    num_tokens: int
    computed: int
    why: EndReason = EndReason.FINISHED


class TransferLanded(Event, frozen=True):
    """Copies are complete."""

    transfers: Numbers


class TransferFailed(Event, frozen=True):
    """Copies failed, or were given up because another one did: every sequence begins again, and the cache is cleared.

    Names all that were outstanding. A `CacheCleared` follows in the same batch.
    """

    transfers: Numbers
    reason: str


class CacheCleared(Event, frozen=True):
    """Everything was dropped that no sequence holds; what is held lost its name."""

    removed: tuple[tuple[int, int], ...]
    """Per group: blocks dropped per level."""
    unnamed: tuple[int, ...]
    """Per group: blocks that stay with running sequences."""


class Checkpoint(Event, frozen=True):
    """The fingerprint of the state before this event."""

    fingerprint: bytes
    num_sequences: int
    num_cached: tuple[tuple[int, int], ...]
    """Per group: blocks per level."""


class SymbolsInterned(Event, frozen=True):
    """Tokens of multimodal items, and tokens with an extra id, got symbols: numbers below 0, a page at a time."""

    pages: Pages
    """None in a log without tokens."""


class SymbolsForgotten(Event, frozen=True):
    """No cached block and no running sequence uses the symbols of these pages: they may stand for something else."""

    pages: Counts
    """Numbers of the pages."""


class AdmissionRefused(Event, frozen=True):
    """A note: a request did not fit. Not repeated until it is admitted, or 4,096 others were refused."""

    request_id: RequestId
    needed: tuple[int, ...]
    """Per group: blocks."""
    available: tuple[int, ...]
    """Per group: blocks that could be had."""


AnyEvent = (
    CacheCreated
    | EpochStarted
    | StateExported
    | Gap
    | SequenceAdded
    | BlocksAllocated
    | BlocksReused
    | BlocksCopied
    | BlocksStored
    | BlocksFilled
    | BlocksUpdated
    | BlocksMoved
    | BlocksRemoved
    | TokensAppended
    | ContextComputed
    | BlocksDetached
    | SequenceRemoved
    | TransferLanded
    | TransferFailed
    | CacheCleared
    | Checkpoint
    | SymbolsInterned
    | SymbolsForgotten
    | AdmissionRefused
    | FeedStarted
    | WorkerSeen
    | FeedReceived
    | FeedStored
    | FeedRemoved
    | FeedCleared
    | FeedGap
    | FeedRestarted
    | FeedUnknown
)


class EventBatch(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What one flush published: the unit of atomicity."""

    seq: int
    """Counts the batches of a log directory, from 0, without holes and never restarting."""
    ts: int
    """Wall clock in nanoseconds; never used for ordering."""
    events: tuple[AnyEvent, ...]

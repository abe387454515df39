"""Every change of the cache as an event: a frozen msgspec struct.

An event is encoded as an array ``[tag, field, ...]``. The schema only grows: new fields are added at
the end with a default, tags are never reused. Columns are packed (see `events.packed`).

Inside a log a cached block is addressed by (group, level, slot); events about cached blocks carry the
8-byte names as well, so that a line can be read alone. A sequence is addressed by its `handle`, which
`SequenceAdded` ties to the request's id; a handle is never used twice in a log.

A log of kind `feed` has events of its own after its `EpochStarted`, and `Gap`.

Levels: 0 is the primary (GPU) pool, 1 the secondary (host) pool.
"""

from __future__ import annotations

import typing
from enum import StrEnum
from typing import Annotated

import msgspec

from events.ids import BlockIndex, GroupIndex, Handle, LevelIndex, Slot
from events.packed import Checksums, Counts, Handles, Keys, Names, Numbers, Parent, Slots, Tokens
from events.structs import Event as Event
from events.structs import GroupCreated as GroupCreated
from events.structs import GroupExported as GroupExported
from events.structs import Inherited as Inherited
from events.structs import JsonText, Labels, Level, Lookup, Session, Spelled
from events.structs import Namespace as Namespace
from events.structs import Pages as Pages
from events.structs import PinExported as PinExported
from events.structs import PoolCreated as PoolCreated
from events.structs import RequestId as RequestId
from events.structs import SequenceExported as SequenceExported
from events.structs import SharingGroup as SharingGroup
from events.structs import StatedRange as StatedRange
from events.structs import StatedRetention as StatedRetention
from events.structs import SymbolPage as SymbolPage
from events.structs import TransferExported as TransferExported

__all__ = [
    "FORMAT_VERSION", "PRIMARY", "SECONDARY", "AdmissionRefused", "AllocateReason", "AnyEvent",
    "BlocksAllocated", "BlocksCopied", "BlocksDetached", "BlocksFilled", "BlocksMoved", "BlocksPinned",
    "BlocksRemoved", "BlocksReturned", "BlocksReused", "BlocksStored", "BlocksUnpinned", "BlocksUpdated",
    "CacheCleared", "CacheCreated", "Checkpoint", "ContextComputed", "EpochStarted", "Event", "EventBatch",
    "FeedCleared", "FeedGap", "FeedReceived", "FeedRemoved", "FeedRestarted", "FeedStarted", "FeedStored",
    "FeedUnknown", "Gap", "GroupCreated", "GroupExported", "HitDeferred", "LoadFailed", "MoveReason",
    "Namespace", "PoolCreated", "PoolShared", "RemoveReason", "RequestId", "SequenceAdded",
    "SequenceExported", "SequenceForked", "SequenceRemoved", "SequenceRewound", "SharingGroup", "SlotsLeft",
    "SlotsNamed", "SlotsTaken", "SlotsUnnamed", "StateExported", "SymbolPage", "SymbolsForgotten",
    "SymbolsInterned", "TokensAppended", "TransferExported", "TransferFailed", "TransferLanded",
    "WorkerSeen",
]  # fmt: skip
"""Names exported by `events`."""


class AllocateReason(StrEnum):
    """Reasons why slots are no longer blank."""

    PROMPT = "prompt"
    DECODE = "decode"
    COPY = "copy"
    FORK = "fork"
    """The blocks that a branch of a sequence does not share."""
    REWIND = "rewind"
    """Replacement of a cached block within which a sequence continues differently."""
    RESERVE = "reserve"
    """Room for tokens that are not known yet, or for the next tokens of a prompt admitted without all its slots."""


class MoveReason(StrEnum):
    """Reasons why blocks changed their level."""

    OFFLOAD = "offload"
    """Evicted from primary, kept in secondary."""
    ONBOARD = "onboard"
    """Reused by a sequence, so copied back to primary."""
    RECOMPUTED = "recomputed"
    """A sequence computed a block that is in secondary: its own primary slot takes over, nothing is copied."""


class EndReason(StrEnum):
    """Reasons why a sequence ended."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    """It gave up its blocks and will be admitted again."""
    ABORTED = "aborted"
    """The client no longer waits for the rest."""


class UpdateReason(StrEnum):
    """Reasons why the priority or the retention time of blocks changed."""

    SET = "set"
    """`set_priority`."""
    RETENTION = "retention"
    """A request that reuses them states its retention, or `stop_retention` does by how it ended."""
    EXPIRED = "expired"
    """Their retention time after release is over."""


class RemoveReason(StrEnum):
    """Reasons why cached content was removed."""

    CAPACITY = "capacity"
    SUPERSEDED = "superseded"
    """A stored block begins with the same tokens as this shorter one."""
    UNREACHABLE = "unreachable"
    """An ancestor was removed."""
    CLEARED = "cleared"
    INVALIDATED = "invalidated"
    """Content that an engine cached is invalid, as after a failed load, or continues invalid content."""


FORMAT_VERSION = 2
"""The newest format understood. Raised when events are added that older readers cannot fold and must refuse."""
FIRST_FORMAT = 1
"""The format of a log that older readers can fold: this library's manager decided, and the tokens per block are a power
of two."""


class CacheCreated(Event, frozen=True):
    """A manager, or an engine with one of its own, started with an empty cache."""

    config: JsonText
    """The effective configuration as JSON."""
    tokens_per_block: int
    groups: tuple[GroupCreated, ...]
    hash_algorithm: str
    key_bytes: int
    content_id: str
    """Digest of the meaning of a block's bytes (layers, heads, dims, dtype, layout)."""
    format_version: int = FIRST_FORMAT
    attention_dp_rank: int | None = None
    """The engine's rank if its attention is data-parallel, as in TensorRT-LLM's dicts."""
    engine: str = ""
    """The recorded engine, as in "vllm 0.33.0"; empty: this library's manager decided."""
    drops_last_hit: bool = False
    """True if the engine by design recomputes the last block of each hit, as speculative decoding with EAGLE does."""


class EpochStarted(Event, frozen=True):
    """A log was opened for writing. Always the first event of its batch, and of an epoch."""

    epoch: int
    log_id: bytes
    previous_epoch: int | None
    previous_last_seq: int | None
    clean: bool
    """True if the previous epoch ended with a close, and for the first epoch."""
    tokens_recorded: bool
    software: str


class StateExported(Event, frozen=True):
    """The whole state, from which a fold can begin."""

    groups: tuple[GroupExported, ...]
    sequences: tuple[SequenceExported, ...]
    transfers: tuple[TransferExported, ...]
    next_handle: int
    next_transfer: int
    releases: int
    """Number of releases of sequences' blocks so far: the next one counts as later than all others."""
    changed_blocks: int
    """Blocks changed since the last checkpoint."""
    symbols: Pages = ()
    """The meanings of symbols below 0; none if the log records no tokens."""
    forget_symbols_at: int = 0
    """Number of pages above which unused ones are forgotten; 0: the minimum."""
    refused: tuple[RequestId, ...] = ()
    """Requests with a recorded refusal, oldest first, not admitted since: their refusal is not recorded again."""
    clock: int = 0
    """The last time given by an event."""
    pins: tuple[PinExported, ...] = ()
    next_pin: int = 1


class Gap(Event, frozen=True):
    """Batches are missing at this place."""

    first_seq: int
    last_seq: int
    reason: str


class CacheCleared(Event, frozen=True):
    """Everything that no sequence holds was dropped; held blocks lost their names."""

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
    engine_counts: tuple[int, ...] = ()
    """A recorded engine's own counters since `CacheCreated`: prompt tokens looked up, and prompt tokens found. Empty:
    it has no counters."""


class TransferLanded(Event, frozen=True):
    """Copies are complete."""

    transfers: Numbers
    checksums: Checksums = b""
    """Checksums of the blocks that these copies wrote to a secondary that is a file: one copy's slots after another's,
    over the bytes of all pools as stored there now; else empty."""


class TransferFailed(Event, frozen=True):
    """Copies failed, or were abandoned because another one did: every sequence starts over, and the cache is cleared.

    Lists all outstanding copies. A `CacheCleared` follows in the same batch.
    """

    transfers: Numbers
    reason: str


class SymbolsInterned(Event, frozen=True):
    """Tokens of multimodal items, or with an extra id, were assigned symbols: numbers below 0, a page at a time."""

    pages: Pages
    """Pages of symbols; none in a log without tokens."""


class SymbolsForgotten(Event, frozen=True):
    """The symbols of these pages are used by no cached block or running sequence, and may be assigned anew."""

    pages: Counts
    """Numbers of the pages."""


# --- sequences of requests --------------------------------------------------------------------------


class SequenceAdded(Event, frozen=True):
    """A request was admitted."""

    handle: Handle
    request_id: RequestId
    namespace: Namespace
    num_tokens: int
    tokens: Tokens
    reused: int
    """Leading tokens that need not be computed, common to all groups: full blocks, then `reused_partial`."""
    reused_primary: tuple[int, ...]
    """Per window: tokens in full blocks taken from primary; in a sliding window only those still visible."""
    reused_secondary: tuple[int, ...]
    """Per window: tokens in full blocks taken from secondary."""
    reused_partial: int
    """Tokens copied from a block of which only the beginning matches."""
    resumed: bool = False
    """The request ran before and continues: tokens computed then and found again are no hits."""
    retention: StatedRetention | None = None
    """Retention stated by the request; None: priority 35, unlimited."""
    clock: int = 0
    """Nanoseconds since the cache was created, while it has run; 0 until a request has stated a duration. Releases of
    blocks are timed by it."""
    reused_external: int = 0
    """Tokens after `reused` that are to be loaded from outside this cache, as by a connector: they count as computed
    after `ContextComputed`."""
    session: Session = None
    """The conversation or agent run to which the request belongs, as named by the engine."""
    labels: Labels = None
    """Further attributes given by the engine, such as the tenant: at most 8, by name."""
    lookup: Lookup = None
    """False: the request was to read nothing from the cache. None: it reused what was there."""


class EncoderAdded(Event, frozen=True):
    """The encoder input of the request admitted last: the model reads its K/V by cross attention.

    It has its own handle, used by events about its blocks. It ends with the last sequence that reads it: a branch reads
    its parent's.
    """

    handle: Handle
    sequence: Handle
    """The request's sequence."""
    group: GroupIndex
    """The group of cross attention."""
    namespace: Namespace
    num_tokens: int
    tokens: Tokens
    """Zeros after the tokens fill the last block."""
    reused_primary: int
    """Leading blocks taken from primary."""
    reused_secondary: int
    """Blocks after these taken from secondary."""


class EncoderRemoved(Event, frozen=True):
    """The last sequence that reads an encoder input ended: its references are released."""

    handle: Handle
    group: GroupIndex
    freed: Slots
    """Slots that become blank, as in `SequenceRemoved`."""
    clock: int = 0


class TokensAppended(Event, frozen=True):
    """One `add_tokens` call."""

    handles: Handles
    counts: Counts
    """Tokens per sequence; empty: one each."""
    tokens: Tokens
    draft: bool = False
    """The tokens may be taken back: no further tokens of these sequences count as computed."""


class ContextComputed(Event, frozen=True):
    """The engine has written K/V of the first `num_tokens` tokens of a sequence."""

    handle: Handle
    num_tokens: int


class SequenceRemoved(Event, frozen=True):
    """A sequence ended: its references are released, its own slots become blank."""

    handle: Handle
    stored: tuple[int, ...]
    """Per group: leading blocks that were stored. In a sliding window these include blocks it has left, which may have
    been evicted since; with full attention all of them stay cached."""
    freed: tuple[Slots, ...]
    """Per group: slots that become blank, in that order: those of its table, deepest first, then those that were
    replaced there and that it has kept, the last ones first."""
    num_tokens: int
    computed: int
    why: EndReason = EndReason.FINISHED
    clock: int = 0
    stop: str | None = None
    """The reason why its output ended, in the engine's own words, as ``tool_calls``; None: not known."""


class SequenceForked(Event, frozen=True):
    """A sequence branched: another one has the same tokens, and shares the blocks that are computed."""

    handle: Handle
    child: Handle
    """The new sequence."""
    request_id: RequestId
    """The new sequence's request."""


class SequenceRewound(Event, frozen=True):
    """The last tokens of a sequence were taken back.

    It releases the blocks after the one with its last token, and that one if it is cached: cached blocks stay cached.
    Events that follow allocate a block of its own instead.
    """

    handle: Handle
    num_tokens: int
    """Remaining tokens."""
    freed: tuple[Slots, ...]
    """Per group: slots that become blank, deepest first."""
    clock: int = 0


class LoadFailed(Event, frozen=True):
    """A note: this many tokens that a sequence was to load from outside the cache are missing, and are computed."""

    handle: Handle
    num_tokens: int


class AdmissionRefused(Event, frozen=True):
    """A note: a request did not fit. Not repeated until it is admitted, or 4,096 others were refused."""

    request_id: RequestId
    needed: tuple[int, ...]
    """Per group: blocks."""
    available: tuple[int, ...]
    """Per group: blocks obtainable."""


# --- blocks -------------------------------------------------------------------------------------------


class BlocksAllocated(Event, frozen=True):
    """Blank slots were appended to the block tables of sequences, in order."""

    handles: Handles
    counts: Counts
    """Slots per sequence; empty: one each."""
    group: GroupIndex
    slots: Slots
    why: AllocateReason


class BlocksReused(Event, frozen=True):
    """A sequence takes cached blocks into its table, from `first_block` on."""

    handle: Handle
    group: GroupIndex
    level: Level
    first_block: BlockIndex
    slots: Slots
    names: Names
    """Names of the blocks; in a sliding window preceded by names of earlier blocks that no event about this sequence
    has given."""
    replaced: Slots = b""
    """The sequence's own slots, returned because it computed blocks that another sequence stored first. With the
    setting `append_only_tables` they stay the sequence's, and become blank when it ends."""


class BlocksCopied(Event, frozen=True):
    """The first `num_tokens` tokens of a block were copied to a primary slot of the sequence.

    For a branch these are all of its tokens in the block, including those not known to be computed.
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
    """The source's priority: the copy gets it when stored, unless its request states another; likewise `duration`."""
    duration: int = 0


class BlocksStored(Event, frozen=True):
    """Blocks of a sequence became reusable, from `first_block` of its table on. The tokens are the sequence's."""

    handle: Handle
    group: GroupIndex
    first_block: BlockIndex
    parent: Parent
    """Name of the block before the first one; empty at the start of a prompt."""
    keys: Keys
    """Keys up to that of the last of these blocks, except those that an event about this sequence has given before."""
    slots: Slots
    level: Level
    priority: int
    last_tokens: int
    """Tokens in the last block; fewer than tokens_per_block only for the last block of a removed sequence."""
    duration: int = 0
    """Nanoseconds for which the priority holds after the block's last release; 0: unlimited."""


class BlocksFilled(Event, frozen=True):
    """Decoding filled one block of each of these sequences, and it became reusable. The tokens are the sequences'.

    The same as `BlocksStored` for each sequence, but for a whole engine step; each block follows one that its sequence
    cached before and no other sequence holds, so is never the first of a prompt.
    """

    handles: Handles
    group: GroupIndex
    blocks: Counts
    """Per sequence: index of the block in its table."""
    parents: Names
    """Names of the preceding blocks."""
    keys: Keys
    """Empty if earlier events, about other groups, have given them."""
    slots: Slots
    """Slots in primary."""
    priority: int
    duration: int = 0


class BlocksUpdated(Event, frozen=True):
    """The priority of cached blocks, or its duration, changed.

    Expired blocks are evicted after all others that have the same priority now; they are listed in any order, in a
    sliding window the shallowest first.
    """

    group: GroupIndex
    level: Level
    slots: Slots
    names: Names
    old_priority: int
    priority: int
    handle: Handle | None = None
    """The sequence that caused the change."""
    why: UpdateReason = UpdateReason.SET
    duration: int | None = None
    """Duration from now on; None: unchanged."""
    clock: int = 0
    """Time of the expiry; else 0."""


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
    """The sequence that required the move."""
    first_block: BlockIndex = BlockIndex(0)
    """Onboard and recomputed: index of the first block in the sequence's table."""


class BlocksRemoved(Event, frozen=True):
    """Cached content was removed, deepest block first. Slots that no sequence holds become blank.

    Only invalidated blocks may be held: they stay with their sequences, without a name.
    """

    group: GroupIndex
    level: Level
    slots: Slots
    names: Names
    why: RemoveReason
    handle: Handle | None = None
    """The sequence that needed the slots."""


class BlocksDetached(Event, frozen=True):
    """Sequences release their first blocks, which a sliding window has passed. Cached blocks stay cached."""

    handles: Handles
    counts: Counts
    """Blocks per sequence; empty: one each."""
    group: GroupIndex
    slots: Slots
    """Slots of the blocks, shallowest first."""
    freed: Slots
    """Slots among these that become blank, because they are not cached."""
    clock: int = 0


class BlocksReturned(Event, frozen=True):
    """Sequences return the last slots of their tables, which were reserved and are not needed: they become blank."""

    handles: Handles
    counts: Counts
    """Blocks per sequence."""
    group: GroupIndex
    slots: Slots
    """Each sequence's deepest first."""


class BlocksPinned(Event, frozen=True):
    """Cached blocks of a sequence are held by a reference that outlives it."""

    pin: int
    """The pin's number: 1, 2, ... in a log."""
    handle: Handle
    slots: tuple[Slots, ...]
    """Per group, in primary, shallowest first; with full attention from the first block of the prompt on."""


class BlocksUnpinned(Event, frozen=True):
    """A pin's references are released."""

    pin: int
    freed: tuple[Slots, ...]
    """Per group: slots that become blank, deepest first: none unless the cache was cleared meanwhile."""
    clock: int = 0


# --- slots that several groups of layers share --------------------------------------------------------
#
# For a recorded engine with layers of several kinds, the first group, with full attention, is published by the events
# of blocks. The others take slots of its primary pool, and have their own events: a table maps a sequence's index to a
# slot, and a name states that a slot holds the state needed after a prefix of `position` tokens.


class PoolShared(Event, frozen=True):
    """Further groups, with slots of the first group's primary pool or their own. Follows each `StateExported`."""

    groups: tuple[SharingGroup, ...]
    """They are numbered on from the groups of `CacheCreated`."""


class SlotsTaken(Event, frozen=True):
    """A sequence takes these slots into its table of a group."""

    handle: Handle
    group: GroupIndex
    indices: Counts
    """Indices in the table: that of a block with the tokens from ``index * tokens_per_block`` on."""
    slots: Slots
    reused: bool = False
    """True if they have names, by which they were found; False if they were free."""


class SlotsLeft(Event, frozen=True):
    """A sequence leaves slots that no later token needs. Named ones can still be found."""

    handle: Handle
    group: GroupIndex
    indices: Counts
    slots: Slots


class SlotsNamed(Event, frozen=True):
    """Slots of a sequence can be found by other sequences."""

    handle: Handle
    group: GroupIndex
    slots: Slots
    keys: Keys
    """Keys of the sequence's first tokens, one per slot, like those of blocks with full attention."""
    positions: Counts
    """Number of these tokens, per slot."""


class SlotsUnnamed(Event, frozen=True):
    """Slots can no longer be found by these names. Those that no sequence holds are free."""

    group: GroupIndex
    slots: Slots
    keys: Keys
    why: RemoveReason
    handle: Handle | None = None
    """The sequence that needed the slots: it takes them by the events that follow."""


class HitDeferred(Event, frozen=True):
    """A note: a request was not admitted, because blocks it found in a group are still being computed by the step."""

    request_id: RequestId
    group: GroupIndex


# --- logs of kind `feed` ------------------------------------------------------------------------------
#
# Events published by engines about their caches, as `kvcache tap` received them, folded in `events.subscribe.workers`;
# `events.feed` has nothing to do with these events, but makes such a feed of a cache's.
#
# Terms are the wire's own: blocks are known by the hashes, and levels by the names, that the engine gives them.
# Numbers are those of the publisher, not of the log. An epoch begins with `EpochStarted` and `FeedStarted`. After a
# `FeedStarted` nothing is known but later events. For a worker continued from the previous epoch, that is its
# `WorkerSeen` and `FeedStored`s in a batch to come; after a `Gap`, those of all workers in the same batch.

Hash = Annotated[int | bytes, Spelled("hash")]
"""The engine's hash: 64 bits, signed or not, or a whole digest."""
Fields = Annotated[bytes, Spelled("fields")]
"""A msgpack map of further fields of the wire, including those that are not known here; empty: none."""


class FeedStarted(Event, frozen=True):
    """A log of engines' published events begins or continues: nothing is known but later events."""

    endpoints: tuple[str, ...]
    """The endpoints subscribed to."""


class WorkerSeen(Event, frozen=True):
    """The first batch of a worker in this epoch, or a change of its name."""

    worker: int
    """Number of the worker in this log; the same in all epochs."""
    source: str
    """Address of its publisher: the endpoint or, if publishers connect to a bound one, its topic and key."""
    topic: str
    rank: int | None
    """The data-parallel rank it reports."""
    complete: bool = True
    """True if all its resident blocks will be known; False: since a loss others may be resident."""


class FeedReceived(Event, frozen=True):
    """A batch was received; its events follow."""

    worker: int
    number: int
    published_ts: int
    """Nanoseconds since 1970, by the publisher's clock; 0 if that cannot be a time."""
    replayed: bool
    """True if it was requested from a replay, having been missed."""


class FeedStored(Event, frozen=True):
    """Consecutive blocks of one prefix became resident in a worker."""

    worker: int
    block_hashes: tuple[Hash, ...]
    parent_block_hash: Hash | None
    tokens: Tokens
    """Tokens of all these blocks, or of a longer span containing them; empty if the engine does not publish them, or if
    `more` has them (``token_ids``) because they are no plain numbers."""
    block_size: int
    medium: str | None = None
    group_idx: int | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    locality: str | None = None
    ownership: str | None = None
    more: Fields = b""


class FeedRemoved(Event, frozen=True):
    """Blocks are no longer resident; if there are several copies, one of each."""

    worker: int
    block_hashes: tuple[Hash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    more: Fields = b""


class FeedCleared(Event, frozen=True):
    """A worker published that nothing is resident."""

    worker: int


class FeedGap(Event, frozen=True):
    """Batches of a worker are lost for good: blocks resident before may be gone, so nothing is known."""

    worker: int
    first: int
    last: int
    reason: str


class FeedRestarted(Event, frozen=True):
    """A worker's publisher restarted: its numbers went back, and its earlier events no longer hold."""

    worker: int
    last: int
    """The last number before."""
    first: int
    """The first number received after."""


class FeedUnknown(Event, frozen=True):
    """A note: a worker published an event of an unknown type."""

    worker: int
    name: str


FeedEvent = (
    FeedStarted
    | WorkerSeen
    | FeedReceived
    | FeedStored
    | FeedRemoved
    | FeedCleared
    | FeedGap
    | FeedRestarted
    | FeedUnknown
)
FEED_EVENTS = typing.get_args(FeedEvent)
"""Types of all events of feed logs."""

PRIMARY = LevelIndex(0)
SECONDARY = LevelIndex(1)
FULL, SLIDING, CROSS = "full", "sliding", "cross"
"""Kinds of groups (`GroupCreated.kind`)."""
CHUNKED, STATE, UNCACHED = "chunked", "state", "uncached"
"""Further kinds of groups that share a pool (`SharingGroup.kind`)."""
CROSS_WINDOW = 0
"""Window that identifies cross attention, which has none, where groups are distinguished by their windows."""

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
    | BlocksPinned
    | BlocksUnpinned
    | TokensAppended
    | ContextComputed
    | BlocksDetached
    | BlocksReturned
    | SequenceForked
    | SequenceRewound
    | SequenceRemoved
    | EncoderAdded
    | EncoderRemoved
    | TransferLanded
    | TransferFailed
    | CacheCleared
    | Checkpoint
    | SymbolsInterned
    | SymbolsForgotten
    | AdmissionRefused
    | LoadFailed
    | PoolShared
    | SlotsTaken
    | SlotsLeft
    | SlotsNamed
    | SlotsUnnamed
    | HitDeferred
    | FeedEvent
)


class EventBatch(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The events published by one flush: the unit of atomicity."""

    seq: int
    """Counts the batches of a log directory, from 0, without holes and never restarting."""
    ts: int
    """Wall clock in nanoseconds; never used for ordering."""
    events: tuple[AnyEvent, ...]

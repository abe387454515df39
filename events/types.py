"""The events: everything that can happen to the cache, as frozen msgspec structs.

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
from events.structs import JsonText, Labels, Level, Session, Spelled
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
"""What `events` exports of these."""


class AllocateReason(StrEnum):
    """Why slots are not blank any more."""

    PROMPT = "prompt"
    DECODE = "decode"
    COPY = "copy"
    FORK = "fork"
    """For a branch of a sequence: what it does not share."""
    REWIND = "rewind"
    """Instead of a cached block in which a sequence goes on otherwise."""
    RESERVE = "reserve"
    """For tokens that are not known yet, or for the next ones of a prompt that had not got all its slots."""


class MoveReason(StrEnum):
    """Why blocks changed their level."""

    OFFLOAD = "offload"
    """Evicted from primary, kept in secondary."""
    ONBOARD = "onboard"
    """Reused by a sequence, so copied back to primary."""
    RECOMPUTED = "recomputed"
    """A sequence computed a block that lay in secondary: its own primary slot takes over, nothing is copied."""


class EndReason(StrEnum):
    """Why a sequence does not run any more."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    """It gave up its room, and will be admitted again."""
    ABORTED = "aborted"
    """Nobody waits for the rest of it."""


class UpdateReason(StrEnum):
    """Why blocks have another priority, or are kept for another time."""

    SET = "set"
    """`set_priority`."""
    RETENTION = "retention"
    """A request that reuses them states how long they are to be kept, or `stop_retention` does for how it ended."""
    EXPIRED = "expired"
    """The time is over for which they were to be kept after they were let go of."""


class RemoveReason(StrEnum):
    """Why cached content is gone."""

    CAPACITY = "capacity"
    SUPERSEDED = "superseded"
    """A stored block begins with the same tokens as this shorter one."""
    UNREACHABLE = "unreachable"
    """An ancestor was removed."""
    CLEARED = "cleared"
    INVALIDATED = "invalidated"
    """What an engine had cached is not what it should be, as after a failed load, or continues what is not."""


FORMAT_VERSION = 2
"""The newest that is understood. Raised when there is something that older readers cannot fold: they refuse it."""
FIRST_FORMAT = 1
"""Of a log that they can fold: this library's manager has decided, and blocks have a power of two of tokens."""


class CacheCreated(Event, frozen=True):
    """A manager, or an engine with one of its own, started with an empty cache."""

    config: JsonText
    """The effective configuration as JSON."""
    tokens_per_block: int
    groups: tuple[GroupCreated, ...]
    hash_algorithm: str
    key_bytes: int
    content_id: str
    """Digest of what a block's bytes mean (layers, heads, dims, dtype, layout)."""
    format_version: int = FIRST_FORMAT
    attention_dp_rank: int | None = None
    """Of the engine, where its attention is data-parallel: TensorRT-LLM's dicts tell it."""
    engine: str = ""
    """Whose decisions a recorder wrote down, as in "vllm 0.33.0"; empty: this library's manager decided."""
    drops_last_hit: bool = False
    """Whether the engine computes the last block of each hit again by design, as speculative decoding with EAGLE."""


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
    clock: int = 0
    """The last time that an event has told."""
    pins: tuple[PinExported, ...] = ()
    next_pin: int = 1


class Gap(Event, frozen=True):
    """Batches are missing here."""

    first_seq: int
    last_seq: int
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
    engine_counts: tuple[int, ...] = ()
    """What a recorded engine has itself counted since `CacheCreated`: tokens of prompts that it looked up, and those of
    them that it found. Empty: it counts none."""


class TransferLanded(Event, frozen=True):
    """Copies are complete."""

    transfers: Numbers
    checksums: Checksums = b""
    """Where secondary lies in a file, of the blocks that these copies brought there: one copy's slots after another's,
    over the bytes of all pools, as they lie there now; else empty."""


class TransferFailed(Event, frozen=True):
    """Copies failed, or were given up because another one did: every sequence begins again, and the cache is cleared.

    Names all that were outstanding. A `CacheCleared` follows in the same batch.
    """

    transfers: Numbers
    reason: str


class SymbolsInterned(Event, frozen=True):
    """Tokens of multimodal items, and tokens with an extra id, got symbols: numbers below 0, a page at a time."""

    pages: Pages
    """None in a log without tokens."""


class SymbolsForgotten(Event, frozen=True):
    """No cached block and no running sequence uses the symbols of these pages: they may stand for something else."""

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
    """Leading tokens that need not be computed, as all groups have them: full blocks, then `reused_partial`."""
    reused_primary: tuple[int, ...]
    """Per window: tokens in full blocks that the sequence takes from primary: in a sliding one only what it sees."""
    reused_secondary: tuple[int, ...]
    """Per window: tokens in full blocks that it takes from secondary."""
    reused_partial: int
    """Tokens copied from a block of which only the start matches."""
    resumed: bool = False
    """The request had run before, and goes on: what it computed then and finds again is no hit."""
    retention: StatedRetention | None = None
    """None: priority 35, for good."""
    clock: int = 0
    """Nanoseconds since the cache was created, while it has run; 0 as long as no request has stated a duration. Events
    tell it which let go of blocks."""
    reused_external: int = 0
    """Tokens after `reused` that are to be loaded from outside of this cache, as by a connector: they count as computed
    when `ContextComputed` says so."""
    session: Session = None
    """The conversation or agent's run of which it is a turn, as the engine calls it."""
    labels: Labels = None
    """What else the engine says of it, such as its tenant: at most 8, by name."""


class EncoderAdded(Event, frozen=True):
    """The input of an encoder came with the request that was admitted last: the model reads its K/V by cross attention.

    It has a handle of its own, which events about its blocks name. It ends when the last sequence does that reads it: a
    branch reads that of its parent.
    """

    handle: Handle
    sequence: Handle
    """The request's."""
    group: GroupIndex
    """That of cross attention."""
    namespace: Namespace
    num_tokens: int
    tokens: Tokens
    """Zeros behind them fill the last block."""
    reused_primary: int
    """Leading blocks that it takes from primary."""
    reused_secondary: int
    """Blocks behind these that it takes from secondary."""


class EncoderRemoved(Event, frozen=True):
    """The last sequence has ended that reads an encoder's input: its references are released."""

    handle: Handle
    group: GroupIndex
    freed: Slots
    """Slots that become blank, deepest first."""
    clock: int = 0


class TokensAppended(Event, frozen=True):
    """One `add_tokens` call."""

    handles: Handles
    counts: Counts
    """Tokens per sequence; empty: one each."""
    tokens: Tokens
    draft: bool = False
    """They may be taken back: of the sequences no more counts as computed than before."""


class ContextComputed(Event, frozen=True):
    """The engine has written K/V of the first `num_tokens` tokens of a sequence."""

    handle: Handle
    num_tokens: int


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
    clock: int = 0
    stop: str | None = None
    """Why its output ended, in the engine's own words, as ``tool_calls``; None: not known."""


class SequenceForked(Event, frozen=True):
    """A sequence branched: another one has the same tokens, and holds the same blocks as far as they are computed."""

    handle: Handle
    child: Handle
    """The new one."""
    request_id: RequestId
    """The new one's."""


class SequenceRewound(Event, frozen=True):
    """The last tokens of a sequence were taken back.

    It lets go of the blocks behind the one in which its last token is, and of that one if it is cached: what is cached
    stays so. Events that follow give it a block of its own instead.
    """

    handle: Handle
    num_tokens: int
    """That are left."""
    freed: tuple[Slots, ...]
    """Per group: slots that become blank, deepest first."""
    clock: int = 0


class LoadFailed(Event, frozen=True):
    """A note: of what a sequence was to get from outside of the cache, so many tokens do not come, and are computed."""

    handle: Handle
    num_tokens: int


class AdmissionRefused(Event, frozen=True):
    """A note: a request did not fit. Not repeated until it is admitted, or 4,096 others were refused."""

    request_id: RequestId
    needed: tuple[int, ...]
    """Per group: blocks."""
    available: tuple[int, ...]
    """Per group: blocks that could be had."""


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


# --- slots that several groups of layers share --------------------------------------------------------
#
# Of a recorded engine with layers of several kinds, the first group, with full attention, is published by the events of
# blocks. The other ones take slots of its primary pool, and have events of their own: a table says which slot a
# sequence has at which index, and a name says that a slot holds what a prefix of `position` tokens needs.


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


# --- logs of kind `feed` ------------------------------------------------------------------------------
#
# What engines published of their caches, as `kvcache tap` received it. It is folded in `events.subscribe.workers`;
# `events.feed` has nothing to do with these events, but makes such a feed of a cache's.
#
# The words are the wire's own: blocks are known by the hashes, and levels by the names, that the engine gives them.
# Numbers are those of the publisher, not of the log. An epoch begins with `EpochStarted` and `FeedStarted`. After a
# `FeedStarted` nothing is known but what follows. Of a worker that is taken over from the epoch before, that is its
# `WorkerSeen` and `FeedStored`s in a batch to come; after a `Gap`, those of all workers in the same batch.

Hash = Annotated[int | bytes, Spelled("hash")]
"""As the engine gave it: 64 bits, signed or not, or a whole digest."""
Fields = Annotated[bytes, Spelled("fields")]
"""A msgpack map of further fields of the wire, those that are not known here among them; empty: none."""


class FeedStarted(Event, frozen=True):
    """A log of what engines tell begins, or goes on: nothing is known but what follows."""

    endpoints: tuple[str, ...]
    """That are listened to."""


class WorkerSeen(Event, frozen=True):
    """A worker was heard for the first time in this epoch, or calls itself otherwise than before."""

    worker: int
    """Its number in this log; the same in all epochs."""
    source: str
    """Where its publisher is: the endpoint or, where publishers connect to a bound one, its topic and key."""
    topic: str
    rank: int | None
    """The data-parallel rank that it gives."""
    complete: bool = True
    """Whether all that is resident in it will be known; False: since a loss it is unknown what else is."""


class FeedReceived(Event, frozen=True):
    """A batch was received; its events follow."""

    worker: int
    number: int
    published_ts: int
    """Nanoseconds since 1970, by the publisher's clock; 0 if that cannot be a time."""
    replayed: bool
    """Whether it was asked for, having been missed."""


class FeedStored(Event, frozen=True):
    """Consecutive blocks of one prefix became resident in a worker."""

    worker: int
    block_hashes: tuple[Hash, ...]
    parent_block_hash: Hash | None
    tokens: Tokens
    """Of all these blocks, or of a longer span that they are from; empty where the engine does not say, or `more` has
    them (``token_ids``) because they are no plain numbers."""
    block_size: int
    medium: str | None = None
    group_idx: int | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    locality: str | None = None
    ownership: str | None = None
    more: Fields = b""


class FeedRemoved(Event, frozen=True):
    """Blocks are not resident any more; where there are several copies, one of each."""

    worker: int
    block_hashes: tuple[Hash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    more: Fields = b""


class FeedCleared(Event, frozen=True):
    """A worker told that nothing is resident any more."""

    worker: int


class FeedGap(Event, frozen=True):
    """Batches of a worker are lost for good: what was resident before may be gone, so nothing is known."""

    worker: int
    first: int
    last: int
    reason: str


class FeedRestarted(Event, frozen=True):
    """A worker's publisher began anew: its numbers went back, and nothing that it said before holds."""

    worker: int
    last: int
    """The last number before."""
    first: int
    """The first one that was heard after."""


class FeedUnknown(Event, frozen=True):
    """A note: a worker told something of a type that was not known here."""

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
"""All of them."""

PRIMARY = LevelIndex(0)
SECONDARY = LevelIndex(1)
FULL, SLIDING, CROSS = "full", "sliding", "cross"
"""Kinds of groups (`GroupCreated.kind`)."""
CHUNKED, STATE, UNCACHED = "chunked", "state", "uncached"
"""Further kinds of groups that share a pool (`SharingGroup.kind`)."""
CROSS_WINDOW = 0
"""Stands for cross attention, which has no window, wherever groups are told apart by their windows."""

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
    """What one flush published: the unit of atomicity."""

    seq: int
    """Counts the batches of a log directory, from 0, without holes and never restarting."""
    ts: int
    """Wall clock in nanoseconds; never used for ordering."""
    events: tuple[AnyEvent, ...]

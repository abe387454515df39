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
from events.ids import LevelIndex
from events.kinds.blocks import BlocksAllocated as BlocksAllocated
from events.kinds.blocks import BlocksCopied as BlocksCopied
from events.kinds.blocks import BlocksDetached as BlocksDetached
from events.kinds.blocks import BlocksFilled as BlocksFilled
from events.kinds.blocks import BlocksMoved as BlocksMoved
from events.kinds.blocks import BlocksPinned as BlocksPinned
from events.kinds.blocks import BlocksRemoved as BlocksRemoved
from events.kinds.blocks import BlocksReturned as BlocksReturned
from events.kinds.blocks import BlocksReused as BlocksReused
from events.kinds.blocks import BlocksStored as BlocksStored
from events.kinds.blocks import BlocksUnpinned as BlocksUnpinned
from events.kinds.blocks import BlocksUpdated as BlocksUpdated
from events.kinds.cache import FIRST_FORMAT as FIRST_FORMAT
from events.kinds.cache import FORMAT_VERSION as FORMAT_VERSION
from events.kinds.cache import CacheCleared as CacheCleared
from events.kinds.cache import CacheCreated as CacheCreated
from events.kinds.cache import Checkpoint as Checkpoint
from events.kinds.cache import EpochStarted as EpochStarted
from events.kinds.cache import Gap as Gap
from events.kinds.cache import StateExported as StateExported
from events.kinds.cache import SymbolsForgotten as SymbolsForgotten
from events.kinds.cache import SymbolsInterned as SymbolsInterned
from events.kinds.cache import TransferFailed as TransferFailed
from events.kinds.cache import TransferLanded as TransferLanded
from events.kinds.sequences import AdmissionRefused as AdmissionRefused
from events.kinds.sequences import ContextComputed as ContextComputed
from events.kinds.sequences import EncoderAdded as EncoderAdded
from events.kinds.sequences import EncoderRemoved as EncoderRemoved
from events.kinds.sequences import LoadFailed as LoadFailed
from events.kinds.sequences import SequenceAdded as SequenceAdded
from events.kinds.sequences import SequenceForked as SequenceForked
from events.kinds.sequences import SequenceRemoved as SequenceRemoved
from events.kinds.sequences import SequenceRewound as SequenceRewound
from events.kinds.sequences import TokensAppended as TokensAppended
from events.kinds.sharing import HitDeferred as HitDeferred
from events.kinds.sharing import PoolShared as PoolShared
from events.kinds.sharing import SlotsLeft as SlotsLeft
from events.kinds.sharing import SlotsNamed as SlotsNamed
from events.kinds.sharing import SlotsTaken as SlotsTaken
from events.kinds.sharing import SlotsUnnamed as SlotsUnnamed
from events.reasons import AllocateReason as AllocateReason
from events.reasons import EndReason as EndReason
from events.reasons import MoveReason as MoveReason
from events.reasons import RemoveReason as RemoveReason
from events.reasons import UpdateReason as UpdateReason
from events.structs import Event as Event
from events.structs import GroupCreated as GroupCreated
from events.structs import GroupExported as GroupExported
from events.structs import Inherited as Inherited
from events.structs import Namespace as Namespace
from events.structs import Pages as Pages
from events.structs import PinExported as PinExported
from events.structs import PoolCreated as PoolCreated
from events.structs import RequestId as RequestId
from events.structs import Retention as Retention
from events.structs import RetentionRange as RetentionRange
from events.structs import SequenceExported as SequenceExported
from events.structs import SharingGroup as SharingGroup
from events.structs import SymbolPage as SymbolPage
from events.structs import TransferExported as TransferExported

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

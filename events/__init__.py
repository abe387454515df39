"""What happened to the cache: the event types, their encodings, and the log they are kept in.

Events are the only way in which the cache's state changes, so whoever has them all has the state.
`events.codec` turns them into bytes and JSON, `events.log` keeps them on disk.

`Subscriber`, `AsyncSubscriber` and `Gathering` follow live streams of KV events, of any publisher of a format that
`events.formats.vllm` reads, `NativeSubscriber` a stream of all events of a cache, and `Curve` has the keys for those
that are encrypted. They are imported on first use: nothing else here needs ZeroMQ.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from events.errors import EventDecodeError as EventDecodeError
from events.errors import EventsError as EventsError
from events.errors import LogBeingKept as LogBeingKept
from events.errors import LogDamaged as LogDamaged
from events.errors import LogError as LogError
from events.errors import LogExists as LogExists
from events.errors import LogLocked as LogLocked
from events.errors import LogOfOtherKind as LogOfOtherKind
from events.errors import LogTooNew as LogTooNew
from events.errors import LogUnavailable as LogUnavailable
from events.errors import LogWriteFailed as LogWriteFailed
from events.errors import NoRegularFile as NoRegularFile
from events.errors import NotALog as NotALog
from events.errors import UnsafeFile as UnsafeFile
from events.types import FORMAT_VERSION as FORMAT_VERSION
from events.types import PRIMARY as PRIMARY
from events.types import SECONDARY as SECONDARY
from events.types import AdmissionRefused as AdmissionRefused
from events.types import AllocateReason as AllocateReason
from events.types import AnyEvent as AnyEvent
from events.types import BlocksAllocated as BlocksAllocated
from events.types import BlocksCopied as BlocksCopied
from events.types import BlocksDetached as BlocksDetached
from events.types import BlocksFilled as BlocksFilled
from events.types import BlocksMoved as BlocksMoved
from events.types import BlocksPinned as BlocksPinned
from events.types import BlocksRemoved as BlocksRemoved
from events.types import BlocksReturned as BlocksReturned
from events.types import BlocksReused as BlocksReused
from events.types import BlocksStored as BlocksStored
from events.types import BlocksUnpinned as BlocksUnpinned
from events.types import BlocksUpdated as BlocksUpdated
from events.types import CacheCleared as CacheCleared
from events.types import CacheCreated as CacheCreated
from events.types import Checkpoint as Checkpoint
from events.types import ContextComputed as ContextComputed
from events.types import EpochStarted as EpochStarted
from events.types import Event as Event
from events.types import EventBatch as EventBatch
from events.types import FeedCleared as FeedCleared
from events.types import FeedGap as FeedGap
from events.types import FeedReceived as FeedReceived
from events.types import FeedRemoved as FeedRemoved
from events.types import FeedRestarted as FeedRestarted
from events.types import FeedStarted as FeedStarted
from events.types import FeedStored as FeedStored
from events.types import FeedUnknown as FeedUnknown
from events.types import Gap as Gap
from events.types import GroupCreated as GroupCreated
from events.types import GroupExported as GroupExported
from events.types import HitDeferred as HitDeferred
from events.types import LoadFailed as LoadFailed
from events.types import MoveReason as MoveReason
from events.types import Namespace as Namespace
from events.types import PoolCreated as PoolCreated
from events.types import PoolShared as PoolShared
from events.types import RemoveReason as RemoveReason
from events.types import RequestId as RequestId
from events.types import SequenceAdded as SequenceAdded
from events.types import SequenceExported as SequenceExported
from events.types import SequenceForked as SequenceForked
from events.types import SequenceRemoved as SequenceRemoved
from events.types import SequenceRewound as SequenceRewound
from events.types import SharingGroup as SharingGroup
from events.types import SlotsLeft as SlotsLeft
from events.types import SlotsNamed as SlotsNamed
from events.types import SlotsTaken as SlotsTaken
from events.types import SlotsUnnamed as SlotsUnnamed
from events.types import StateExported as StateExported
from events.types import SymbolPage as SymbolPage
from events.types import SymbolsForgotten as SymbolsForgotten
from events.types import SymbolsInterned as SymbolsInterned
from events.types import TokensAppended as TokensAppended
from events.types import TransferExported as TransferExported
from events.types import TransferFailed as TransferFailed
from events.types import TransferLanded as TransferLanded
from events.types import WorkerSeen as WorkerSeen

if TYPE_CHECKING:
    from events.subscribe.continuity import Missed as Missed
    from events.subscribe.continuity import Received as Received
    from events.subscribe.continuity import ReceivedBatch as ReceivedBatch
    from events.subscribe.continuity import Report as Report
    from events.subscribe.continuity import Restarted as Restarted
    from events.subscribe.continuity import Restated as Restated
    from events.subscribe.gathering import Gathering as Gathering
    from events.subscribe.index import Index as Index
    from events.subscribe.sockets import Curve as Curve
    from events.subscribe.subscriber import AsyncSubscriber as AsyncSubscriber
    from events.subscribe.subscriber import NativeSubscriber as NativeSubscriber
    from events.subscribe.subscriber import Subscriber as Subscriber

KVCACHE_PACKAGE = "kvcache"
"""Marks this `events` as kvcache's own: another distribution of that name may lie over it on disk."""

_HOMES = {
    "AsyncSubscriber": "subscribe.subscriber",
    "Curve": "subscribe.sockets",
    "Gathering": "subscribe.gathering",
    "Index": "subscribe.index",
    "NativeSubscriber": "subscribe.subscriber",
    "ReceivedBatch": "subscribe.continuity",
    "Missed": "subscribe.continuity",
    "Received": "subscribe.continuity",
    "Report": "subscribe.continuity",
    "Restarted": "subscribe.continuity",
    "Restated": "subscribe.continuity",
    "Subscriber": "subscribe.subscriber",
}
"""The module of each name that is imported on first use."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"events.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

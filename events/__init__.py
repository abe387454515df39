"""The events of a cache: their types, their encodings, and the log they are kept in.

Events are the only way in which the cache's state changes, so all of them together are the state. `events.codec`
encodes them as bytes and JSON, `events.log` keeps them on disk.

`Subscriber`, `AsyncSubscriber` and `FanInSubscriber` follow live streams of KV events, of any publisher of a format
that `events.formats.vllm` reads, `NativeSubscriber` a stream of all events of a cache, and `Curve` has the keys for
encrypted ones. They are imported on first use: nothing else here needs ZeroMQ.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from events.errors import *  # noqa: F403  its own list says which
from events.types import *  # noqa: F403  its own list says which

if TYPE_CHECKING:
    from events.subscribe.continuity import Missed as Missed
    from events.subscribe.continuity import Received as Received
    from events.subscribe.continuity import ReceivedBatch as ReceivedBatch
    from events.subscribe.continuity import Report as Report
    from events.subscribe.continuity import Restarted as Restarted
    from events.subscribe.continuity import Restated as Restated
    from events.subscribe.fan_in import FanInSubscriber as FanInSubscriber
    from events.subscribe.index import Index as Index
    from events.subscribe.sockets import Curve as Curve
    from events.subscribe.subscriber import AsyncSubscriber as AsyncSubscriber
    from events.subscribe.subscriber import NativeSubscriber as NativeSubscriber
    from events.subscribe.subscriber import Subscriber as Subscriber

KVCACHE_PACKAGE = "kvcache"
"""Marks this `events` as kvcache's own: another distribution of that name may overwrite it on disk."""

_LAZY = {
    "continuity": ("Missed", "Received", "ReceivedBatch", "Report", "Restarted", "Restated"),
    "fan_in": ("FanInSubscriber",),
    "index": ("Index",),
    "sockets": ("Curve",),
    "subscriber": ("AsyncSubscriber", "NativeSubscriber", "Subscriber"),
}
_HOMES = {name: module for module, names in _LAZY.items() for name in names}
"""The module in `events.subscribe` of each name that is imported on first use."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"events.subscribe.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

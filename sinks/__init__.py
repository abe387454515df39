"""Sinks of events: for people, files, routers, monitors, and from other packages.

A sink is named by a URL (`open_sink`) and runs behind a bounded queue on a thread of its own
(`SinkRunner`), so that no sink can delay the engine, and none can lose a batch without a trace.
"""

from sinks.base import Sink as Sink
from sinks.base import SinkContext as SinkContext
from sinks.base import SinkError as SinkError
from sinks.base import SinkOpenError as SinkOpenError
from sinks.base import SinkStats as SinkStats
from sinks.base import SinkURL as SinkURL
from sinks.base import SinkURLError as SinkURLError
from sinks.registry import known_schemes as known_schemes
from sinks.registry import open_sink as open_sink
from sinks.router.kv_events import KVEventsConfigError as KVEventsConfigError
from sinks.router.kv_events import kv_events_sink as kv_events_sink
from sinks.runner import SinkRunner as SinkRunner

KVCACHE_PACKAGE = "kvcache"
"""Marks this `sinks` as kvcache's own: another distribution of that name may overwrite it on disk."""

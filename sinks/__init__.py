"""Where events go: to people, files, and whatever another package adds.

A sink is named by a URL (`open_sink`) and runs behind a bounded queue on a thread of its own
(`SinkRunner`), so that no sink can delay the engine, and none can lose a batch without a trace.
"""

from sinks.base import Sink, SinkContext, SinkError, SinkOpenError, SinkURL, SinkURLError
from sinks.registry import known_schemes, open_sink
from sinks.runner import SinkRunner, SinkStats

KVCACHE_PACKAGE = "kvcache"
"""Marks this `sinks` as kvcache's own: another distribution of that name may lie over it on disk."""

__all__ = [
    "KVCACHE_PACKAGE",
    "Sink",
    "SinkContext",
    "SinkError",
    "SinkOpenError",
    "SinkRunner",
    "SinkStats",
    "SinkURL",
    "SinkURLError",
    "known_schemes",
    "open_sink",
]

"""Whose feed it is: that of a cache, or of one of the engines in a log of `kvcache tap`."""

from __future__ import annotations

from events.feed.fold import Feed
from events.told.feed import WorkerFeed
from sinks.base import SinkContext, SinkURL, SinkURLError


def feed_for(url: SinkURL, engine: str | None, context: SinkContext) -> Feed | WorkerFeed:
    """What is folded for a URL whose option ``engine`` this is. Raises SinkURLError."""
    if context.kind == "feed":
        return WorkerFeed(engine)
    if context.kind == "cache" and engine is not None:
        reason = "engine= chooses one of the engines in a log of `kvcache tap`, but this is of one cache: leave it out"
        raise SinkURLError(str(url), reason)
    return Feed()

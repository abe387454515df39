"""``redis://HOST:6379/STREAM?worker=NAME`` feeds routers by way of Redis Streams (docs/brokers.md)."""

from __future__ import annotations

from events.brokers.address import BrokerError
from events.brokers.redis_session import NAMES
from sinks.base import SinkContext, SinkURL, SinkURLError
from sinks.brokers.options import BrokerOptions, address_of, feed_of, retain_seconds, worker_of
from sinks.brokers.redis import RedisStream
from sinks.router.feed import RouterFeed


class RedisOptions(BrokerOptions, frozen=True, kw_only=True):
    """Options of the URL."""

    retain: str = "60min"


def create(url: SinkURL, context: SinkContext) -> RouterFeed:
    """The sink for a ``redis:`` URL."""
    options = url.read_options(RedisOptions)
    address, worker = address_of(url, options), worker_of(url, options)
    if worker == NAMES:
        raise SinkURLError(
            str(url), f"{NAMES} is the key with the names of all: choose another name with worker="
        )
    try:
        stream = RedisStream(address, worker, retain_seconds=retain_seconds(url, options))
    except BrokerError as error:
        raise SinkURLError(str(url), error.reason) from None
    return feed_of(url, options, context, stream, worker)

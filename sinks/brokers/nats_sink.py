"""``nats://HOST:4222/STREAM?worker=NAME`` feeds routers by way of NATS JetStream (docs/brokers.md)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from events.brokers.address import BrokerError
from sinks.base import SinkContext, SinkURL, SinkURLError
from sinks.brokers.nats import NATSStream
from sinks.brokers.options import BrokerOptions, address_of, feed_of, quantity, retain_seconds, worker_of
from sinks.router.feed import RouterFeed


class NATSOptions(BrokerOptions, frozen=True, kw_only=True):
    """Options of the URL."""

    retain: str = "60min"
    max_bytes: str = "0"
    replicas: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1


def create(url: SinkURL, context: SinkContext) -> RouterFeed:
    """The sink for a ``nats:`` URL."""
    options = url.read_options(NATSOptions)
    address, worker = address_of(url, options), worker_of(url, options)
    try:
        stream = NATSStream(
            address,
            worker,
            retain_seconds=retain_seconds(url, options),
            max_bytes=int(quantity(url, options, "max_bytes")),
            replicas=options.replicas,
        )
    except BrokerError as error:
        raise SinkURLError(str(url), error.reason) from None
    return feed_of(url, options, context, stream, worker)

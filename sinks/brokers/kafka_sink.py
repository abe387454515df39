"""``kafka://HOST:9092/TOPIC?worker=NAME`` feeds routers by way of Kafka (docs/brokers.md)."""

from __future__ import annotations

from events.brokers.address import BrokerError
from sinks.base import SinkContext, SinkURL, SinkURLError
from sinks.brokers.kafka import KafkaStream
from sinks.brokers.options import BrokerOptions, address_of, feed_of, quantity, worker_of
from sinks.router.feed import RouterFeed


class KafkaOptions(BrokerOptions, frozen=True, kw_only=True):
    """Options of the URL."""


def create(url: SinkURL, context: SinkContext) -> RouterFeed:
    """The sink for a ``kafka:`` URL."""
    options = url.read_options(KafkaOptions)
    address, worker = address_of(url, options), worker_of(url, options)
    try:
        stream = KafkaStream(address, worker, timeout_seconds=quantity(url, options, "timeout"))
    except BrokerError as error:
        raise SinkURLError(str(url), error.reason) from None
    return feed_of(url, options, context, stream, worker)

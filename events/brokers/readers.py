"""Finds what reads a kind of broker; its client's package is loaded only then."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from events.brokers.address import BrokerAddress
from events.brokers.records import Reader

_READERS = {
    "kafka": ("events.brokers.kafka_reader", "KafkaReader"),
    "nats": ("events.brokers.nats_reader", "NATSReader"),
    "redis": ("events.brokers.redis_reader", "RedisReader"),
}


def open_reader(address: BrokerAddress, worker: str | None) -> Reader:
    """Reads all workers of the address's stream, or that one. Raises BrokerError where the client is missing."""
    module, name = _READERS[address.scheme]
    return cast("Reader", getattr(import_module(module), name)(address, worker))

"""Reads the records of workers from a topic of Kafka: all of its partitions, from what they hold on.

No group of consumers is needed, and nothing is committed: a reader keeps its place itself, and begins anew at the
beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from events.brokers.address import BrokerAddress, missing_extra
from events.brokers.kafka_client import TAG, client_settings, told
from events.brokers.records import Record, StreamRewound, parse_record
from events.errors import EventDecodeError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message

_AT_ONCE = 200
_SECONDS = 3.0


class KafkaReader:
    """Reads all workers, or one; the other's records come over the wire all the same."""

    def __init__(self, address: BrokerAddress, worker: str | None) -> None:
        try:
            import confluent_kafka  # noqa: F401
        except ImportError:
            raise missing_extra(address) from None
        self._address, self._only = address, worker
        self._consumer: Consumer | None = None
        self._error: KafkaError | None = None
        """What the client has said last about the broker."""

    def read(self, seconds: float) -> list[tuple[str, Record]]:
        """The next records."""
        from confluent_kafka import KafkaException

        try:
            if self._consumer is None:
                self._begin()
            assert self._consumer is not None
            self._error = None
            messages = self._consumer.consume(_AT_ONCE, max(seconds, 0.01))
        except KafkaException as failure:
            self.close()
            raise told(self._address, self._error or failure.args[0]) from None
        if not messages and self._error is not None:
            # The client connects again by itself, and goes on where it was.
            raise told(self._address, self._error)
        return [record for message in messages for record in self._records(message)]

    def close(self) -> None:
        """Disconnect."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _begin(self) -> None:
        from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition

        settings = {
            "group.id": "kvcache",  # asked for, but joined by nobody
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 50,
            "error_cb": self._note,
        }
        self._error = None
        self._consumer = Consumer(client_settings(self._address) | settings)
        topic = self._consumer.list_topics(self._address.stream, timeout=_SECONDS).topics[
            self._address.stream
        ]
        if topic.error is not None:
            raise KafkaException(topic.error)
        beginnings = [TopicPartition(topic.topic, each, OFFSET_BEGINNING) for each in topic.partitions]
        self._consumer.assign(beginnings)

    def _note(self, error: KafkaError) -> None:
        self._error = error

    def _records(self, message: Message) -> list[tuple[str, Record]]:
        error = message.error()
        if error is not None:
            self.close()
            if error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"):
                raise StreamRewound(None)
            raise told(self._address, error)
        worker = (message.key() or b"").decode(errors="replace")
        if self._only is not None and worker != self._only:
            return []
        tags = dict(message.headers() or ())
        try:
            return [(worker, parse_record(tags.get(TAG), message.value() or b""))]
        except EventDecodeError:
            return []  # not the feed's

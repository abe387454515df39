"""Kafka as a broker: a worker's records are in one topic, in the partition of its name.

The producer is idempotent: a record that it sends again is there once. It retries for `timeout_seconds`; then the
record is dropped with the producer, so that it cannot come late, and the feed publishes its state under the next
number. Readers belong to no group and commit nothing: each keeps its place itself, and begins at the beginning.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from events.brokers.address import REFUSED, BrokerAddress, BrokerError, BrokerUnavailable, require_client
from events.brokers.records import StreamRecord, StreamRewound, records_of

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, Producer


TAG = "record"
"""The header with a record's tag. The key is the worker, by which Kafka chooses the partition."""
MAX_BYTES = 16 << 20
"""Largest message that the client accepts."""
_SILENT = logging.getLogger("kvcache.kafka")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False
_SILENT.setLevel(logging.CRITICAL + 1)  # each call has its own


def client_settings(address: BrokerAddress) -> dict[str, Any]:
    """Return the settings of any client of this broker. Raises BrokerError."""
    access = address.access
    address.tls_context()  # raises, naming the files that are wrong
    host = f"[{address.host}]" if ":" in address.host else address.host
    settings: dict[str, Any] = {
        "bootstrap.servers": f"{host}:{address.port}",
        "logger": _SILENT,
        "reconnect.backoff.max.ms": 1000,
    }
    protocol = "SSL" if access.tls else "PLAINTEXT"
    if address.user is not None:
        protocol = f"SASL_{protocol}"
        settings |= {
            "sasl.mechanisms": "PLAIN",
            "sasl.username": address.user,
            "sasl.password": address.secret or "",
        }
    tls = {"ssl.ca.location": access.cafile, "ssl.certificate.location": access.certfile}
    tls["ssl.key.location"] = access.keyfile
    settings["security.protocol"] = protocol
    return settings | {name: value for name, value in tls.items() if value is not None}


def to_broker_error(address: BrokerAddress, error: KafkaError | None) -> BrokerError:
    """Convert an error of the client."""
    where = str(address)
    if error is None:
        return BrokerUnavailable(where, "no answer")
    name = error.name()
    if name in ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "TOPIC_AUTHORIZATION_FAILED"):
        return BrokerError(where, REFUSED)
    if name == "MSG_SIZE_TOO_LARGE":
        reason = "a batch exceeds the maximum message size (message.max.bytes in the broker's configuration)"
        return BrokerError(where, reason)
    if name in ("_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART"):
        reason = (
            f"topic {address.stream} does not exist: create it, with a retention.ms of at least three "
            "times restate"
        )
        return BrokerUnavailable(where, reason)
    if name in ("_TRANSPORT", "_ALL_BROKERS_DOWN"):
        return BrokerUnavailable(where, "cannot be reached")
    return BrokerUnavailable(where, name.strip("_").replace("_", " ").lower())


_AT_ONCE = 200
_SECONDS = 3.0


class KafkaReader:
    """Reads all workers, or one; the others' records come over the wire all the same."""

    def __init__(self, address: BrokerAddress, worker: str | None) -> None:
        require_client(address, "confluent_kafka")
        self._address, self._only = address, worker
        self._consumer: Consumer | None = None
        self._error: KafkaError | None = None
        """The client's last report about the broker."""

    def read(self, seconds: float) -> list[tuple[str, StreamRecord]]:
        """Return the next records."""
        from confluent_kafka import KafkaException

        try:
            if self._consumer is None:
                self._begin()
            assert self._consumer is not None
            self._error = None
            messages = self._consumer.consume(_AT_ONCE, max(seconds, 0.01))
        except KafkaException as failure:
            self.close()
            raise to_broker_error(self._address, self._error or failure.args[0]) from None
        if not messages and self._error is not None:
            # The client reconnects by itself, and continues where it was.
            raise to_broker_error(self._address, self._error)
        return [record for message in messages for record in self._records(message)]

    def close(self) -> None:
        """Disconnect."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _begin(self) -> None:
        from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition

        settings = {
            "group.id": "kvcache",  # required, but joined by none
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

    def _records(self, message: Message) -> list[tuple[str, StreamRecord]]:
        error = message.error()
        if error is not None:
            self.close()
            if error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"):
                raise StreamRewound(None)
            raise to_broker_error(self._address, error)
        worker = (message.key() or b"").decode(errors="replace")
        if self._only is not None and worker != self._only:
            return []
        return records_of(worker, dict(message.headers() or ()).get(TAG), message.value() or b"")


_CONNECT_SECONDS = 1.5


class KafkaStream:
    """Writes as one worker."""

    max_payload = MAX_BYTES

    def __init__(self, address: BrokerAddress, worker: str, *, timeout_seconds: float = 5.0) -> None:
        require_client(address, "confluent_kafka")
        self.name = str(address)
        self._address, self._worker, self._timeout = address, worker, timeout_seconds
        self._producer: Producer | None = None
        self._error: KafkaError | None = None
        """The client's last report about the broker."""
        self._outcome: Message | KafkaError | None = None
        self._last: tuple[int, int] | None = None
        """Partition and offset of our last record."""

    def open(self) -> int | None:
        """Connect. The last number is not known: finding it would mean reading the topic."""
        self._connect()
        self._last = None
        return None

    def append(self, record: StreamRecord) -> str:
        """Produce, and wait for the acknowledgement of all replicas in sync."""
        if self._producer is None:
            self._connect()
        assert self._producer is not None
        self._outcome = None
        try:
            self._producer.produce(
                self._address.stream,
                record.payload,
                key=self._worker,
                headers={TAG: record.tag},
                on_delivery=self._delivered,
            )
        except BufferError:
            raise BrokerUnavailable(self.name, "the client's queue is full") from None
        self._producer.flush(self._timeout + 1)
        message = self._acknowledged()
        place = message.partition() or 0, message.offset() or 0
        last, self._last = self._last, place
        if last is not None and last[0] == place[0] and place[1] <= last[1]:
            raise BrokerError(self.name, f"it has lost acknowledged records of worker {self._worker}")
        return f"{place[0]}/{place[1]}"

    def trim(self, place: str) -> None:
        """Do nothing: others write to the same partition, and old records go by the topic's own retention."""

    def keep_alive(self) -> None:
        """Let the client report errors."""
        if self._producer is not None:
            self._producer.poll(0)

    def close(self) -> None:
        """Disconnect; nothing is in flight."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            producer.flush(0)

    def _connect(self) -> None:
        from confluent_kafka import KafkaException, Producer

        self.close()
        self._error = None
        settings = {
            "enable.idempotence": True,
            "message.timeout.ms": max(1, int(self._timeout * 1000)),
            "message.max.bytes": MAX_BYTES,
            "linger.ms": 0,  # the feed has gathered already
            "error_cb": self._note,
        }
        try:
            self._producer = Producer(client_settings(self._address) | settings)
            topic = self._producer.list_topics(self._address.stream, timeout=_CONNECT_SECONDS)
            error = topic.topics[self._address.stream].error
        except KafkaException as failure:
            self.close()
            raise self._to_broker_error(failure.args[0]) from None
        if error is not None:
            self.close()
            raise to_broker_error(self._address, error)

    def _to_broker_error(self, error: KafkaError | None) -> BrokerError:
        """Return the client's report about the broker, which is more useful than a timeout."""
        return to_broker_error(self._address, self._error or error)

    def _note(self, error: KafkaError) -> None:
        self._error = error

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        self._outcome = message if error is None else error

    def _acknowledged(self) -> Message:
        from confluent_kafka import Message

        outcome = self._outcome
        if isinstance(outcome, Message):
            return outcome
        self.close()
        reason = self._to_broker_error(outcome).reason
        if outcome is not None and outcome.name() == "MSG_SIZE_TOO_LARGE":
            raise to_broker_error(self._address, outcome)
        # Not to be retried under the same number: it is unknown if it is there.
        raise BrokerError(self.name, reason)

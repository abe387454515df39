"""One worker's records in a topic of Kafka, in the partition of its name.

The producer is idempotent: a record that it sends again is there once. It tries for `timeout_seconds`; then the
record is given up with the producer, so that it cannot come late, and the feed tells its state under the next
number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from events.brokers.address import BrokerAddress, BrokerError, BrokerUnavailable, missing_extra
from events.brokers.kafka_client import MAX_BYTES, TAG, client_settings, told
from events.brokers.records import Record

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

_CONNECT_SECONDS = 1.5


class KafkaStream:
    """Writes as one worker."""

    max_payload = MAX_BYTES

    def __init__(self, address: BrokerAddress, worker: str, *, timeout_seconds: float = 5.0) -> None:
        try:
            import confluent_kafka  # noqa: F401
        except ImportError:
            raise missing_extra(address) from None
        self.name = str(address)
        self._address, self._worker, self._timeout = address, worker, timeout_seconds
        self._producer: Producer | None = None
        self._error: KafkaError | None = None
        """What the client has said last about the broker."""
        self._outcome: Message | KafkaError | None = None
        self._last: tuple[int, int] | None = None
        """Partition and offset of our last record."""

    def open(self) -> int | None:
        """Connect. Which number was the last one is not known: finding it would mean reading the topic."""
        self._connect()
        self._last = None
        return None

    def append(self, record: Record) -> str:
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
            raise BrokerUnavailable(self.name, "its client has no room") from None
        self._producer.flush(self._timeout + 1)
        message = self._acknowledged()
        place = message.partition() or 0, message.offset() or 0
        last, self._last = self._last, place
        if last is not None and last[0] == place[0] and place[1] <= last[1]:
            raise BrokerError(
                self.name, f"it has lost records of worker {self._worker} that it had acknowledged"
            )
        return f"{place[0]}/{place[1]}"

    def trim(self, place: str) -> None:
        """Others write to the same partition: what is old goes by the topic's own retention."""

    def breathe(self) -> None:
        """Let the client tell of errors."""
        if self._producer is not None:
            self._producer.poll(0)

    def close(self) -> None:
        """Disconnect; nothing is on its way."""
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
            raise self._told(failure.args[0]) from None
        if error is not None:
            self.close()
            raise told(self._address, error)

    def _told(self, error: KafkaError | None) -> BrokerError:
        """What the client has said of the broker tells more than that its time is over."""
        return told(self._address, self._error or error)

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
        reason = self._told(outcome).reason
        if outcome is not None and outcome.name() == "MSG_SIZE_TOO_LARGE":
            raise told(self._address, outcome)
        # Not to be tried again under the same number: whether it is there is not known.
        raise BrokerError(self.name, reason)

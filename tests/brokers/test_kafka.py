"""Feeds by way of Kafka's protocol: the broker is librdkafka's own mock cluster, inside this process.

No server of Kafka is packaged for Debian. The mock speaks the real protocol over TCP; but it keeps everything in
memory, 5 MiB of each partition, and cannot be killed and started again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from events.brokers.address import BrokerError
from events.brokers.records import Record
from sinks import SinkOpenError
from sinks.brokers.kafka import KafkaStream
from tests.brokers.fleet import FeedingWorker, StreamReader
from tests.brokers.nats_server import free_port
from tests.sinks.feed_source import Reader


class MockCluster:
    """A broker that listens on this machine; clients that are not ours talk to it as well."""

    def __init__(self) -> None:
        self._home = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "mock", "log_level": 0})
        (broker,) = self._home.list_topics(timeout=10).brokers.values()
        self.server = f"{broker.host}:{broker.port}"
        self.url = f"kafka://{self.server}"

    def records(self, worker: str) -> list[tuple[int, str, bytes]]:
        """Partition, tag and payload of all that a worker has in the topic, past our reader."""
        consumer = Consumer({"bootstrap.servers": self.server, "group.id": "test", "log_level": 0})
        partitions = consumer.list_topics("kvcache", timeout=10).topics["kvcache"].partitions
        found = []
        for partition in partitions:
            first, last = consumer.get_watermark_offsets(TopicPartition("kvcache", partition), timeout=10)
            consumer.assign([TopicPartition("kvcache", partition, first)])
            seen = first
            while seen < last:
                for message in consumer.consume(last - seen, 1.0):
                    seen += 1
                    if message.key() == worker.encode():
                        headers: Any = message.headers()
                        found.append((partition, dict(headers)["record"].decode(), message.value() or b""))
        consumer.close()
        return found


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    cluster = MockCluster()
    yield cluster
    del cluster._home


def test_what_workers_have_is_what_readers_know(cluster: MockCluster) -> None:
    """At the mock cluster: five workers of one topic, known to a reader from the start and to a late one."""
    rng = random.Random(1)
    with ExitStack() as stack, StreamReader(cluster.url) as early:
        workers = [
            stack.enter_context(FeedingWorker(cluster.url, f"w{number}", min_bytes=4000))
            for number in range(5)
        ]
        for _ in range(200):
            for worker in workers:
                worker.step(rng)
            early.read(1)
        early.check(*workers)
        with StreamReader(cluster.url) as late:
            late.check(*workers)
        with StreamReader(f"{cluster.url}?worker=w1") as one:
            one.check(workers[1])
            assert list(one.indexes) == ["w1"]
        assert [worker.runner.stats().errors for worker in workers] == [0] * 5
        for worker in workers:
            records = cluster.records(worker.name)
            assert len({partition for partition, _, _ in records}) == 1
            assert len({tag for _, tag, _ in records}) == len(records)


def test_late_in_the_middle(cluster: MockCluster) -> None:
    """At the mock cluster: whatever was trimmed, a reader of its own has all from the first whole state on."""
    rng = random.Random(2)
    with FeedingWorker(cluster.url, "w", min_bytes=3000) as worker:
        for _ in range(200):
            worker.step(rng)
            worker.settle()
        records = [(tag, payload) for _, tag, payload in cluster.records("w")]
        states = [at for at, (tag, _) in enumerate(records) if tag.endswith("/0/last")]
        assert len(states) > 3
        for begin in (1, states[1] + 1, states[-1]):
            reader, at = Reader(), None
            for tag, payload in records[begin:]:
                is_state, number = tag.endswith("/0/last"), int(tag.partition("/")[0])
                if (is_state and at is None) or (not is_state and at is not None):
                    assert at is None or number == at + 1
                    reader.take_payload(payload)
                    at = number
            assert {int.from_bytes(block) for _, block in reader.state} == worker.resident


def test_after_trimming(cluster: MockCluster) -> None:
    """At the mock cluster, which keeps the last 5 MiB of a partition: who joins then still finds all."""
    rng = random.Random(3)
    with (
        FeedingWorker(cluster.url, "w", min_bytes=100_000, block=256) as worker,
        StreamReader(cluster.url) as early,
    ):
        first = worker.settle()
        for _ in range(300):
            for _ in range(3):
                worker.step(rng)
            worker.settle()
            early.read(0)
        early.check(worker)
        records = cluster.records("w")
        assert int(records[0][1].partition("/")[0]) > first, "nothing was trimmed"
        with StreamReader(cluster.url) as late:
            late.check(worker)
        assert worker.runner.stats().errors == 0


def test_given_up_and_told_anew(cluster: MockCluster) -> None:
    """At the mock cluster: a record whose outcome is unknown makes the feed tell its state, and readers are exact."""
    with FeedingWorker(cluster.url, "w") as worker, StreamReader(cluster.url) as reader:
        worker.store(5)
        reader.check(worker)
        stream = worker.transport._stream
        assert isinstance(stream, KafkaStream)
        acknowledged = stream._acknowledged
        fails = iter([True])

        def deaf():  # type: ignore[no-untyped-def]
            if next(fails, False):
                stream._outcome = None
            return acknowledged()

        stream._acknowledged = deaf  # type: ignore[method-assign]
        worker.store(3)
        reader.check(worker)
        assert worker.runner.stats().errors == 1
        assert reader.reports["w"]


def test_lost_records_are_noticed(cluster: MockCluster) -> None:
    """At the mock cluster: an offset that does not go up means that what was acknowledged is gone."""
    with FeedingWorker(cluster.url, "w") as worker:
        worker.settle()
        address = worker.transport._stream._address  # type: ignore[attr-defined]
        stream = KafkaStream(address, "w")
        stream.open()
        partition, offset = map(int, stream.append(Record(1, b"")).split("/"))
        stream._last = (partition, offset + 10)
        with pytest.raises(BrokerError, match="lost records of worker w"):
            stream.append(Record(2, b""))
        stream.close()


def test_nobody_there() -> None:
    """A broker that is not there is an error of the sink at its start; a reader says so, and goes on trying."""
    url = f"kafka://127.0.0.1:{free_port()}"
    with pytest.raises(SinkOpenError, match=r"(?i)down|connect|answer|transport|resolve"):
        FeedingWorker(url, "w").__enter__()
    with StreamReader(url) as reader:
        reader.read_until(lambda: reader.subscriber.unavailable is not None)

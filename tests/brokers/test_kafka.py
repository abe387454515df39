"""What is particular to feeds by way of Kafka's protocol, at librdkafka's mock cluster; the rest: test_feeds.py."""

from __future__ import annotations

import random
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import Message, Producer

from events.brokers.address import BrokerAddress, BrokerError
from events.brokers.kafka import KafkaStream
from events.brokers.records import StreamRecord
from sinks import SinkOpenError
from tests.support.ports import free_port
from tests.support.servers.fleet import FeedingWorker, StreamReader
from tests.support.servers.kafka_cluster import MockCluster


def test_after_trimming(cluster: MockCluster) -> None:
    """At the mock cluster, which keeps the last 5 MiB of a partition: who joins then still finds all."""
    rng = random.Random(3)
    with (
        FeedingWorker(cluster.url, "w", min_bytes=100_000, block=256) as worker,
        StreamReader(cluster.url) as early,
    ):
        first = worker.settle()
        for _ in range(100):
            for _ in range(9):
                worker.step(rng)
            worker.settle()
            early.read(0)
        early.check(worker)
        assert cluster.numbers("w")[0] > first, "nothing was trimmed"
        assert len({partition for partition, _, _ in cluster.placed("w")}) == 1
        with StreamReader(cluster.url) as late:
            late.check(worker)
        assert worker.runner.stats().errors == 0


def test_given_up_and_sent_again(cluster: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the mock cluster: a record whose outcome is unknown makes the feed tell its state, and readers are exact."""
    fails: list[bool] = []

    class Deaf(Producer):
        def produce(self, topic: str, *args: Any, **options: Any) -> None:
            if fails and fails.pop():
                options["on_delivery"] = None
            super().produce(topic, *args, **options)

    monkeypatch.setattr(confluent_kafka, "Producer", Deaf)
    with FeedingWorker(cluster.url, "w") as worker, StreamReader(cluster.url) as reader:
        worker.store(5)
        reader.check(worker)
        fails.append(True)
        worker.store(3)
        reader.check(worker)
        assert worker.runner.stats().errors == 1
        assert reader.reports["w"]


def test_lost_records_are_noticed(cluster: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the mock cluster: an offset that does not go up means that what was acknowledged is gone."""
    delivered: list[Message] = []

    class Forgetful(Producer):
        """Says of each record that it is where the first one is."""

        def produce(self, topic: str, *args: Any, **options: Any) -> None:
            report = options["on_delivery"]

            def first(error: Any, message: Message) -> None:
                delivered.append(message)
                report(error, delivered[0])

            super().produce(topic, *args, **options | {"on_delivery": first})

    monkeypatch.setattr(confluent_kafka, "Producer", Forgetful)
    stream = KafkaStream(BrokerAddress("kafka", "127.0.0.1", cluster.port, cluster.stream), "w")
    stream.open()
    stream.append(StreamRecord(1, b""))
    with pytest.raises(BrokerError, match="lost acknowledged records of worker w"):
        stream.append(StreamRecord(2, b""))
    assert len(delivered) == 2
    stream.close()


def test_nobody_there() -> None:
    """A broker that is not there is an error of the sink at its start; a reader says so, and goes on trying."""
    url = f"kafka://127.0.0.1:{free_port()}"
    with pytest.raises(SinkOpenError, match=r"reached|answer"):
        FeedingWorker(url, "w").__enter__()
    with StreamReader(url) as reader:
        reader.read_until(lambda: reader.subscriber.unavailable is not None)

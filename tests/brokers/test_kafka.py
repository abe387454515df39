"""What is particular to feeds by way of Kafka's protocol, at librdkafka's mock cluster; the rest: test_feeds.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from events.brokers.address import BrokerError
from events.brokers.records import Record
from sinks import SinkOpenError
from sinks.brokers.kafka import KafkaStream
from tests.support.ports import free_port
from tests.support.servers.fleet import FeedingWorker, StreamReader
from tests.support.servers.kafka_cluster import MockCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MockCluster]:
    with MockCluster(tmp_path) as cluster:
        yield cluster


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
        assert cluster.numbers("w")[0] > first, "nothing was trimmed"
        assert len({partition for partition, _, _ in cluster.placed("w")}) == 1
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
    with pytest.raises(SinkOpenError, match=r"reached|answer"):
        FeedingWorker(url, "w").__enter__()
    with StreamReader(url) as reader:
        reader.read_until(lambda: reader.subscriber.unavailable is not None)

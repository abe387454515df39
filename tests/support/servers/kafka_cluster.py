"""A broker that speaks Kafka's protocol: librdkafka's own mock cluster, in a process that can be stopped.

No server of Kafka is packaged for Debian. The mock speaks the real protocol over TCP; but it keeps everything in
memory, 5 MiB of each partition, and cannot be killed and started again at the same place.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from confluent_kafka import Consumer, Producer, TopicPartition

from tests.support.places import ROOT
from tests.support.servers.server import Server
from tests.support.waiting import WAIT


class MockCluster(Server):
    """Answers each request `late_ms` milliseconds late."""

    scheme = "kafka"

    def __init__(self, directory: Path, *, late_ms: int = 0) -> None:
        super().__init__(directory)
        self.command = [sys.executable, "-m", "tests.support.servers.kafka_cluster", str(late_ms)]

    def start(self) -> None:
        self._process = subprocess.Popen(
            self.command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    @property
    def url(self) -> str:
        return f"{super().url}/{self.stream}"

    def with_stream(self, stream: str) -> Self:
        """The same process, with a topic that only the caller uses."""
        other = copy.copy(self)
        other.stream = stream
        return other

    def kill(self) -> None:
        super().kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def records(self, worker: str) -> list[tuple[str, bytes]]:
        return [record for _, *record in self.placed(worker)]  # type: ignore[misc]

    def placed(self, worker: str) -> list[tuple[int, str, bytes]]:
        """Partition, tag and payload of all that a worker has in the topic."""
        server = f"127.0.0.1:{self.port}"
        consumer = Consumer({"bootstrap.servers": server, "group.id": "test", "log_level": 0})
        partitions = consumer.list_topics(self.stream, timeout=WAIT).topics[self.stream].partitions
        found = []
        for partition in partitions:
            first, last = consumer.get_watermark_offsets(TopicPartition(self.stream, partition), timeout=WAIT)
            consumer.assign([TopicPartition(self.stream, partition, first)])
            seen = first
            while seen < last:
                for message in consumer.consume(last - seen, 1.0):
                    seen += 1
                    if message.key() == worker.encode():
                        headers: Any = message.headers()
                        found.append((partition, dict(headers)["record"].decode(), message.value() or b""))
        consumer.close()
        return found


def main(late_ms: str) -> None:
    """Serve until nobody needs it any more."""
    settings = {"test.mock.num.brokers": 1, "bootstrap.servers": "mock", "log_level": 0}
    if int(late_ms):
        settings["test.mock.broker.rtt"] = int(late_ms)
    producer = Producer(settings)
    (broker,) = producer.list_topics(timeout=WAIT).brokers.values()
    print(broker.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What is particular to feeds by way of Redis Streams, on a real server; the rest is in test_feeds.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from events.brokers.address import BrokerUnavailable
from events.brokers.records import Record
from sinks.brokers.redis import RedisStream
from tests.support.servers.fleet import FeedingWorker, StreamReader, wait_for
from tests.support.servers.redis_server import RedisServer

pytestmark = pytest.mark.needs("redis-server")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


class TestOnce:
    def test_answer_lost(self, server: RedisServer) -> None:
        """An entry whose answer never came is sent again, and is in the stream once, be it a batch or a piece."""
        with FeedingWorker(f"{server.url}?restate=200ms", "w") as worker, StreamReader(server.url) as reader:
            worker.store(1)
            reader.check(worker)
            stream = worker.transport._stream
            assert isinstance(stream, RedisStream)
            run = stream._session.run
            calls = iter(range(1, 200))

            def deaf(work):  # type: ignore[no-untyped-def]
                answer = run(work)
                if next(calls, 0) % 3 == 0:
                    stream._session.close()
                    stream._session.connect()
                    raise BrokerUnavailable("redis", "made up")
                return answer

            stream._session.run = deaf  # type: ignore[method-assign]
            for _ in range(20):
                worker.store(2)
                reader.check(worker)
            assert next(calls, 99) > 20
            tags = server.tags("w")
            assert len(tags) == len(set(tags))
            assert worker.runner.stats().errors == 0
            assert reader.indexes["w"].restated == 0

    def test_a_piece_is_not_taken_for_another(self, server: RedisServer) -> None:
        """A piece whose answer was lost is no reason to believe that the first piece of the next state is there."""
        with FeedingWorker(server.url, "w") as worker:
            worker.store(1)
            last = worker.settle()
        stream = RedisStream(worker.transport._stream._session._address, "w")  # type: ignore[attr-defined]
        assert (stream.open() or 0) >= last
        before = stream._last
        stream.append(Record(last, b"abandoned", 0, 1))
        stream._last, stream._tried = before, stream._last
        stream.append(Record(last, b"told anew", 0, 2))
        assert server.tags("w")[-2:] == [f"{last}/1/0", f"{last}/2/0"]
        stream.close()


def test_full(tmp_path: Path) -> None:
    """A server without room says so, by the kind of its error; with room again the feed goes on, exactly."""
    with (
        RedisServer(tmp_path, "--maxmemory", "3mb") as server,
        Redis(port=server.port) as client,
        FeedingWorker(f"{server.url}?timeout=200ms", "w") as worker,
        StreamReader(server.url) as reader,
    ):
        worker.settle()
        worker.store(60_000)
        wait_for(lambda: "it refuses: OutOfMemoryError" in str(worker.runner.stats().last_error))
        client.config_set("maxmemory", "100mb")
        wait_for(lambda: worker.runner.state == "running")
        if worker.feed.lost_seq is not None:
            worker.runner.put(worker.source.exported())
        reader.check(worker)

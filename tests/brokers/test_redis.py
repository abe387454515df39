"""What is particular to feeds by way of Redis Streams, on a real server; the rest is in test_feeds.py."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import ConnectionError, Redis  # noqa: A004

from events.brokers.address import BrokerAddress, BrokerUnavailable
from events.brokers.records import StreamRecord
from events.brokers.redis import RedisStream
from tests.support.servers.fleet import FeedingWorker, StreamReader
from tests.support.servers.redis_server import RedisServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.needs("redis-server")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


def lose_answers(monkeypatch: pytest.MonkeyPatch, loses: Iterator[bool]) -> Counter[str]:
    """Have connections break behind what writers do; returns how often that happened to each call."""
    lost: Counter[str] = Counter()

    def lossy(name: str, work: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            answer = work(*args, **options)
            if next(loses, False):
                lost[name] += 1
                raise ConnectionError("made up")
            return answer

        return call

    for name in ("eval", "xtrim"):
        monkeypatch.setattr(Redis, name, lossy(name, getattr(Redis, name)))
    return lost


class TestOnce:
    def test_answer_lost(self, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """An entry whose answer never came is sent again, and is in the stream once, be it a batch or a piece."""
        with FeedingWorker(f"{server.url}?restate=200ms", "w") as worker, StreamReader(server.url) as reader:
            worker.store(1)
            reader.check(worker)
            lost = lose_answers(monkeypatch, itertools.cycle([False, False, True]))

            def more() -> None:
                worker.store(2)
                reader.check(worker)

            wait_until(lambda: lost["eval"] > 6 and lost["xtrim"] > 0, meanwhile=more)
            tags = server.tags("w")
            assert len(tags) == len(set(tags))
            assert worker.runner.stats().errors == 0
            assert reader.indexes["w"].restated == 0

    def test_a_piece_is_not_taken_for_another(
        self, server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A piece whose answer was lost is no reason to believe that the first piece of the next state is there."""
        with FeedingWorker(server.url, "w") as worker:
            worker.store(1)
            last = worker.settle()
        stream = RedisStream(BrokerAddress("redis", "127.0.0.1", server.port), "w")
        assert (stream.open() or 0) >= last
        lose_answers(monkeypatch, iter([True]))
        with pytest.raises(BrokerUnavailable):
            stream.append(StreamRecord(last, b"abandoned", 0, 1))
        stream.append(StreamRecord(last, b"told anew", 0, 2))
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
        wait_until(lambda: "refused: OutOfMemoryError" in str(worker.runner.stats().last_error))
        client.config_set("maxmemory", "100mb")
        wait_until(lambda: worker.runner.state == "running")
        if worker.feed.resync_after_seq is not None:
            worker.runner.put(worker.source.exported())
        reader.check(worker)

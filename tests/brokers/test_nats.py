"""What is particular to feeds by way of NATS JetStream, on a real server; the rest is in test_feeds.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext

from sinks import SinkOpenError
from tests.support.servers.fleet import FeedingWorker, StreamReader
from tests.support.servers.nats_server import NATSServer
from tests.support.waiting import Clock, wait_until

pytestmark = pytest.mark.needs("nats-server")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NATSServer]:
    with NATSServer(tmp_path) as server:
        yield server


class TestStream:
    def test_what_others_trimmed_makes_late_but_not_wrong(self, server: NATSServer) -> None:
        """A worker whose beginning somebody removed is not known until its next whole state; others are, meanwhile."""
        clock, worker = Clock(), FeedingWorker(f"{server.url}?restate=10min", "w")
        worker.transport.clock = clock
        with worker, FeedingWorker(server.url, "other") as other:
            other.store(2)
            other.settle()
            worker.store(5)
            worker.settle()
            server.ask(lambda js: js.purge_stream("kvcache", subject="kvcache.w", keep=1))
            worker.store(4)
            worker.settle()
            with StreamReader(server.url) as late:
                late.read_until(lambda: bool(late.subscriber.waiting))
                late.check(other)
                assert [waiting.topic for waiting in late.subscriber.waiting] == ["w"]
                assert late.indexes["w"].blocks == {}
                clock.now += 600
                late.read_until(lambda: late.indexes["w"].resident() == worker.resident)
                assert late.subscriber.waiting == ()
                late.check(worker)

    def test_stream_removed(self, server: NATSServer) -> None:
        """A stream that somebody deletes is made again, with the whole state in it."""
        with FeedingWorker(server.url, "w") as worker, StreamReader(server.url) as reader:
            worker.store(5)
            reader.check(worker)
            server.ask(lambda js: js.delete_stream("kvcache"))
            worker.store(2)
            reader.check(worker)


class TestOnce:
    def test_acknowledgement_lost(self, server: NATSServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """A batch whose acknowledgement never came is sent again, and is in the stream once."""
        with FeedingWorker(server.url, "w") as worker, StreamReader(server.url) as reader:
            worker.store(1)
            reader.check(worker)
            publish = JetStreamContext.publish
            fails = iter([True, True])

            async def deaf(*args: Any, **options: Any) -> Any:
                answer = await publish(*args, **options)
                if next(fails, False):
                    raise TimeoutError
                return answer

            monkeypatch.setattr(JetStreamContext, "publish", deaf)
            worker.store(2)
            reader.check(worker)
            assert next(fails, None) is None
            tags = server.tags("w")
            assert len(tags) == len(set(tags))
            assert worker.runner.stats().errors == 0
            assert reader.indexes["w"].restated == 0


class TestRefused:
    def test_batches_larger_than_the_server_takes(self, tmp_path: Path) -> None:
        """It is said at the start which max_batch fits; with that one everything goes through."""
        with NATSServer(tmp_path, "max_payload: 64KB") as server:
            with pytest.raises(SinkOpenError, match=r"at most 65536 bytes: set max_batch= to 61440B or less"):
                FeedingWorker(server.url, "w").__enter__()
            with (
                FeedingWorker(f"{server.url}?max_batch=60KiB", "w") as worker,
                StreamReader(server.url) as reader,
            ):
                worker.store(20_000)
                reader.check(worker)

    def test_one_block_larger_than_the_server_takes(self, tmp_path: Path) -> None:
        """A single block that does not fit cannot be told: the sink says so, and does not pretend."""
        with (
            NATSServer(tmp_path, "max_payload: 8KB") as server,
            FeedingWorker(f"{server.url}?max_batch=4KiB", "w", block=4000) as worker,
        ):
            worker.settle()
            worker.store(1)
            wait_until(lambda: worker.runner.stats().errors > 0)
            assert "exceeds the maximum message size" in str(worker.runner.stats().last_error)

    def test_no_jetstream(self, tmp_path: Path) -> None:
        """A server without JetStream is told from one that is not there."""
        with NATSServer(tmp_path, jetstream=False) as server, pytest.raises(SinkOpenError, match="JetStream"):
            FeedingWorker(server.url, "w").__enter__()

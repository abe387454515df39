"""Feeds by way of Redis Streams, on a real server that is killed, filled and trimmed."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis import Redis

from events.brokers.address import BrokerError, BrokerUnavailable
from events.brokers.records import Record
from sinks import SinkOpenError
from sinks.brokers.redis import RedisStream
from tests.brokers.certificates import self_signed
from tests.brokers.fleet import FeedingWorker, StreamReader, wait_for
from tests.brokers.redis_server import RedisServer
from tests.sinks.feed_source import Reader


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


def entries(server: RedisServer, worker: str) -> list[tuple[str, bytes]]:
    """Tag and payload of all that is in a worker's stream, past our reader."""
    with Redis(port=server.port) as client:
        return [
            (fields[b"record"].decode(), fields[b"payload"])
            for _, fields in client.xrange(f"kvcache:{worker}")
        ]


def wait_until_loaded(server: RedisServer) -> None:
    def loaded() -> bool:
        with Redis(port=server.port) as client:
            try:
                return bool(client.ping())
            except Exception:
                return False

    wait_for(loaded)


def test_what_workers_have_is_what_readers_know(server: RedisServer) -> None:
    """Three workers of one server at random work: a reader from the start, and a late one, know what each has."""
    rng = random.Random(1)
    with ExitStack() as stack, StreamReader(server.url) as early:
        workers = [stack.enter_context(FeedingWorker(server.url, f"w{number}")) for number in range(3)]
        for _ in range(300):
            for worker in workers:
                worker.step(rng)
            early.read(1)
        early.check(*workers)
        with StreamReader(server.url) as late:
            late.check(*workers)
        with StreamReader(f"{server.url}?worker=w1") as one:
            one.check(workers[1])
            assert list(one.indexes) == ["w1"]
        assert [worker.runner.stats().errors for worker in workers] == [0, 0, 0]


class TestLateJoin:
    def test_after_trimming(self, server: RedisServer) -> None:
        """The sink removes what nobody needs; who joins then still finds all, and the stream stays small."""
        rng = random.Random(2)
        with FeedingWorker(server.url, "w", min_bytes=4000) as worker:
            sizes = []
            for _ in range(12):
                for _ in range(40):
                    worker.step(rng)
                worker.settle()
                sizes.append(len(entries(server, "w")))
                with StreamReader(server.url) as late:
                    late.check(worker)
            assert worker.transport._tellings > 4
            assert worker.runner.stats().errors == 0
            assert "/0" in entries(server, "w")[0][0]
            assert max(sizes[6:]) < 2 * max(sizes[:6]), sizes

    def test_who_fell_behind_what_was_removed(self, server: RedisServer) -> None:
        """A reader that stops is overtaken by the trimming; when it goes on it hears a whole state, and is exact."""
        rng = random.Random(3)
        with FeedingWorker(server.url, "w", min_bytes=10_000) as worker, StreamReader(server.url) as reader:
            worker.store(3)
            reader.check(worker)
            for _ in range(300):
                worker.step(rng)
                worker.settle()
            assert "/0" in entries(server, "w")[0][0]
            reader.check(worker)
            assert reader.indexes["w"].restated == 1
            assert worker.runner.stats().errors == 0

    def test_by_the_documented_rules_alone(self, server: RedisServer) -> None:
        """A reader of its own, from docs/brokers.md: a state, the batches behind it, plain msgpack."""
        rng = random.Random(4)
        with FeedingWorker(server.url, "w", min_bytes=4000) as worker:
            for _ in range(200):
                worker.step(rng)
                worker.settle()
            assert worker.transport._tellings > 2
            assert worker.runner.stats().errors == 0
            reader, at = Reader(), None
            for tag, payload in entries(server, "w"):
                is_state, number = tag.endswith("/0/last"), int(tag.partition("/")[0])
                if (is_state and at is None) or (not is_state and at is not None):
                    assert at is None or number == at + 1
                    reader.take_payload(payload)
                    at = number
            assert {int.from_bytes(block) for _, block in reader.state} == worker.resident


class TestBrokerFails:
    def test_killed_and_started_again(self, server: RedisServer) -> None:
        """Kill -9 in mid-stream, five times: nothing is lost, nothing comes twice, and the numbers have no hole."""
        rng = random.Random(5)
        with ExitStack() as stack, StreamReader(server.url) as early:
            workers = [stack.enter_context(FeedingWorker(server.url, f"w{number}")) for number in range(3)]
            for _ in range(5):
                for _ in range(60):
                    for worker in workers:
                        worker.step(rng)
                    early.read(1)
                server.kill()
                for worker in workers:
                    worker.step(rng)
                early.read(50)
                assert early.subscriber.unavailable is not None
                server.start()
            early.check(*workers)
            assert [worker.runner.stats().errors for worker in workers] == [0, 0, 0]
            for worker in workers:
                assert early.indexes[worker.name].restated == 0
                numbers = [int(tag) for tag, _ in entries(server, worker.name) if "/" not in tag]
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))

    def test_lost_what_it_acknowledged(self, server: RedisServer, tmp_path: Path) -> None:
        """A server that comes back empty is noticed with the next batch; then all is told anew, to everybody."""
        with (
            FeedingWorker(server.url, "w") as worker,
            FeedingWorker(server.url, "other") as other,
            StreamReader(server.url) as reader,
        ):
            other.store(2)
            for _ in range(20):
                worker.store(5)
                worker.settle()
            reader.check(worker, other)
            server.kill()
            shutil.rmtree(tmp_path / "appendonlydir")
            server.start()
            wait_until_loaded(server)
            worker.store(2)
            wait_for(lambda: worker.runner.stats().errors == 1)
            assert "has lost it, or another process" in str(worker.runner.stats().last_error)
            worker.store(1)
            reader.check(worker, other)
            with StreamReader(server.url) as late:
                late.check(worker, other)

    def test_one_stream_removed(self, server: RedisServer) -> None:
        """Somebody deletes one worker's key: it is told anew, and the others are not disturbed."""
        with (
            FeedingWorker(server.url, "w") as worker,
            FeedingWorker(server.url, "other") as other,
            StreamReader(server.url) as reader,
        ):
            worker.store(5)
            other.store(4)
            reader.check(worker, other)
            with Redis(port=server.port) as client:
                client.delete("kvcache:w")
            worker.store(2)
            reader.check(worker, other)
            assert reader.indexes["other"].restated == 0
            assert other.runner.stats().errors == 0

    def test_hangs(self, server: RedisServer) -> None:
        """A server that stands still holds up nobody who puts batches, and the runner's close waits its time only."""
        with FeedingWorker(server.url, "w") as worker:
            worker.settle()
            server.stop()
            began = time.monotonic()
            for _ in range(200):
                worker.store(3)
            assert time.monotonic() - began < 0.5
            worker.runner.close()
            assert time.monotonic() - began < 4
            server.go_on()


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
            tags = [tag for tag, _ in entries(server, "w")]
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
        assert [tag for tag, _ in entries(server, "w")][-2:] == [f"{last}/1/0", f"{last}/2/0"]
        stream.close()

    def test_second_writer_is_noticed(self, server: RedisServer) -> None:
        """Two processes that write as one worker: whoever is pushed aside says so."""
        with FeedingWorker(server.url, "w") as first:
            first.store(3)
            first.settle()
            with FeedingWorker(server.url, "w") as second:
                second.store(4)
                second.settle()
                wait_for(lambda: first.runner.stats().errors > 0)
                assert "another process writes as the same worker" in str(first.runner.stats().last_error)

    def test_lower_numbers_are_refused(self, server: RedisServer) -> None:
        """A feed that would begin below what is in the stream does not, and says what to do."""
        with FeedingWorker(server.url, "w") as worker:
            worker.settle()
        with pytest.raises(SinkOpenError, match="the feed would begin at 5: give state="):
            FeedingWorker(f"{server.url}?first=5", "w").__enter__()

    def test_worker_starts_again(self, server: RedisServer) -> None:
        """Its next life goes on in the stream with higher numbers and its whole state; readers follow."""
        with StreamReader(server.url) as reader:
            for blocks in (4, 7):
                with FeedingWorker(server.url, "w") as worker:
                    worker.store(blocks)
                    reader.check(worker)
            assert reader.indexes["w"].restated == 1


def test_wrong_password(tmp_path: Path) -> None:
    """Who comes with a wrong password, or none, is told so at once; no message repeats one."""
    with RedisServer(tmp_path, "--requirepass", "right-word") as server:
        host = server.url.removeprefix("redis://")
        for login in ("default:wrong-word@", ""):
            with pytest.raises(SinkOpenError, match="user or password is wrong") as caught:
                FeedingWorker(f"redis://{login}{host}", "w").__enter__()
            assert "wrong-word" not in str(caught.value)
            with (
                StreamReader(f"redis://{login}{host}") as reader,
                pytest.raises(BrokerError, match="user or password is wrong"),
            ):
                reader.read()
        url = f"redis://:right-word@{host}"
        with FeedingWorker(url, "w") as worker, StreamReader(url) as reader:
            worker.store(2)
            reader.check(worker)


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


def test_encrypted(tmp_path: Path) -> None:
    """With tls=true both ends look at the server's certificate, and who does not trust it does not connect."""
    certificate, key = self_signed(tmp_path)
    with RedisServer(tmp_path, tls=(certificate, key)) as server:
        url = f"{server.url}?tls=true&cafile={certificate}"
        with FeedingWorker(url, "w") as worker, StreamReader(url) as reader:
            worker.store(2)
            reader.check(worker)
        for options in ("?tls=true", ""):
            with pytest.raises(SinkOpenError):
                FeedingWorker(f"{server.url}{options}", "w").__enter__()

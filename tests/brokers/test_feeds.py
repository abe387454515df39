"""Feeds by way of brokers, the same for each kind: real servers, killed, emptied and trimmed, and Kafka's mock."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from events.brokers.address import BrokerError
from sinks import SinkError, SinkOpenError
from tests.support.feeds.feed_source import Reader
from tests.support.servers.certificates import self_signed
from tests.support.servers.fleet import FeedingWorker, StreamReader
from tests.support.servers.nats_server import NATSServer
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.server import Server
from tests.support.waiting import WAIT, wait_until

Kind = type[NATSServer | RedisServer]


def resident_by_the_documented_rules(records: list[tuple[str, bytes]]) -> set[int]:
    """What a reader of its own makes of records: a state, the batches behind it, plain msgpack."""
    reader, at = Reader(), None
    for tag, payload in records:
        # One piece suffices here for each state.
        is_state, number = tag.endswith("/0/last"), int(tag.partition("/")[0])
        if (is_state and at is None) or (not is_state and at is not None):
            assert at is None or number == at + 1
            reader.take_payload(payload)
            at = number
    return {int.from_bytes(block) for _, block in reader.state}


def test_what_workers_have_is_what_readers_know(broker: Server) -> None:
    """Three workers of one broker at random work: a reader from the start, and a late one, know what each has."""
    rng = random.Random(1)
    with ExitStack() as stack, StreamReader(broker.url) as early:
        workers = [
            stack.enter_context(FeedingWorker(broker.url, f"w{number}", min_bytes=4000))
            for number in range(3)
        ]
        for _ in range(100):
            for worker in workers:
                worker.step(rng)
            early.read(0)
        early.check(*workers)
        with StreamReader(broker.url) as late:
            late.check(*workers)
        with StreamReader(f"{broker.url}?worker=w1") as one:
            one.check(workers[1])
            assert list(one.indexes) == ["w1"]
        assert [worker.runner.stats().errors for worker in workers] == [0, 0, 0]
        for worker in workers:
            tags = broker.tags(worker.name)
            assert len(tags) == len(set(tags))


def test_worker_starts_again(broker: Server) -> None:
    """Its next life goes on in the stream with higher numbers and its whole state; readers follow."""
    with StreamReader(broker.url) as reader:
        for blocks in (4, 7):
            with FeedingWorker(broker.url, "w") as worker:
                worker.store(blocks)
                reader.check(worker)
        assert reader.indexes["w"].restated == 1


class TestLateJoin:
    def test_after_trimming(self, server: Server) -> None:
        """The sink removes what nobody needs; who joins then still finds all, and the stream stays small."""
        rng = random.Random(2)
        with FeedingWorker(server.url, "w", min_bytes=4000) as worker:
            sizes = []
            for _ in range(12):
                for _ in range(40):
                    worker.step(rng)
                worker.settle()
                sizes.append(sum(len(payload) for _, payload in server.records("w")))
                with StreamReader(server.url) as late:
                    late.check(worker)
            assert worker.transport.attempts > 4
            assert worker.runner.stats().errors == 0
            assert "/0" in server.tags("w")[0]
            assert max(sizes[6:]) < 2 * max(sizes[:6]), sizes

    def test_who_fell_after_what_was_removed(self, server: Server) -> None:
        """A reader that stops is overtaken by the trimming; when it goes on it hears a whole state, and is exact."""
        rng = random.Random(3)
        with FeedingWorker(server.url, "w", min_bytes=5000) as worker, StreamReader(server.url) as reader:
            worker.store(3)
            reader.check(worker)
            for _ in range(150):
                worker.step(rng)
                worker.settle()
            assert server.numbers("w")[0] > reader.seq["w"] + 1
            reader.check(worker)
            assert reader.indexes["w"].restated == 1
            assert worker.runner.stats().errors == 0

    def test_by_the_documented_rules_alone(self, broker: Server) -> None:
        """A reader of its own, from docs/how-to/brokers.md, has all from the first state on, wherever it begins."""
        rng = random.Random(4)
        with FeedingWorker(broker.url, "w", min_bytes=2000) as worker:
            for _ in range(100):
                worker.step(rng)
                worker.settle()
            assert worker.transport.attempts > 3
            assert worker.runner.stats().errors == 0
            records = broker.records("w")
            last = max(at for at, (tag, _) in enumerate(records) if tag.endswith("/0/last"))
            for begin in (0, 1, last):
                assert resident_by_the_documented_rules(records[begin:]) == worker.resident


class TestBrokerFails:
    def test_killed_and_started_again(self, server: Server) -> None:
        """Kill -9 in mid-stream, five times: nothing is lost, nothing comes twice, and the numbers have no hole."""
        rng = random.Random(5)
        with ExitStack() as stack, StreamReader(server.url) as early:
            url = f"{server.url}?timeout={WAIT}s"
            workers = [stack.enter_context(FeedingWorker(url, f"w{number}")) for number in range(3)]
            for _ in range(5):
                for _ in range(60):
                    for worker in workers:
                        worker.step(rng)
                    early.read(1)
                server.kill()
                for worker in workers:
                    worker.step(rng)
                early.read_until(lambda: early.subscriber.unavailable is not None)
                server.start()
            early.check(*workers)
            assert [worker.runner.stats().errors for worker in workers] == [0, 0, 0]
            for worker in workers:
                assert early.indexes[worker.name].restated == 0
                numbers = server.numbers(worker.name)
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            with StreamReader(server.url) as late:
                late.check(*workers)

    def test_away_for_longer_than_is_waited(self, server: Server) -> None:
        """Then the sink fails, is closed and opened again, and what the manager must tell anew is all that is lost."""
        with FeedingWorker(f"{server.url}?timeout=200ms", "w") as worker, StreamReader(server.url) as reader:
            worker.store(5)
            reader.check(worker)
            server.kill()
            worker.store(2)
            wait_until(lambda: worker.runner.state == "quarantined")
            worker.store(3)
            server.start()
            wait_until(lambda: worker.runner.state == "running")
            last_error = str(worker.runner.stats().last_error)
            assert "no answer" in last_error or "refused" in last_error
            worker.runner.put(worker.source.exported())
            reader.check(worker)

    def test_hangs(self, broker: Server) -> None:
        """A broker that stands still holds up nobody who puts batches, and the runner's close waits its time only."""
        with FeedingWorker(f"{broker.url}?timeout={WAIT}s", "w", drain_seconds=0.5) as worker:
            worker.settle()
            broker.stop()
            for _ in range(200):
                worker.store(3)
            worker.runner.close()
            [thread] = [each for each in threading.enumerate() if each.name == "kvcache-sink-w"]
            broker.go_on()
            thread.join(WAIT)


def lose(server: Server, what: str) -> None:
    """What it has acknowledged, in one of the ways in which servers do."""
    if what == "emptied":
        server.empty()
        return
    {"all": server.lose_all, "end": server.lose_end}[what]()
    server.start()


class TestBrokerLoses:
    @pytest.mark.parametrize("what", ["all", "end", "emptied"])
    def test_what_it_acknowledged(self, server: Server, what: str) -> None:
        """An idle sink notices with its heartbeat that all, or the end, is gone; then everybody is told all anew."""
        with ExitStack() as stack, StreamReader(server.url) as reader:
            workers = [stack.enter_context(FeedingWorker(server.url, f"w{number}")) for number in range(2)]
            for number in range(20):
                if number == 10:
                    server.remember()
                for worker in workers:
                    worker.store(5)
                    worker.settle()
            reader.check(*workers)
            lose(server, what)
            for worker in workers:
                wait_until(lambda worker=worker: worker.runner.stats().errors == 1)  # type: ignore[misc]
                assert "has lost it, or another process" in str(worker.runner.stats().last_error)
            reader.check(*workers)
            with StreamReader(server.url) as late:
                late.check(*workers)
            workers[0].store(2)
            reader.check(*workers)
            assert [worker.runner.stats().errors for worker in workers] == [1, 1]

    def test_one_worker_removed(self, server: Server) -> None:
        """Somebody deletes one worker's part: it is told anew, and the others are not disturbed."""
        with (
            FeedingWorker(server.url, "w") as worker,
            FeedingWorker(server.url, "other") as other,
            StreamReader(server.url) as reader,
        ):
            worker.store(5)
            other.store(4)
            reader.check(worker, other)
            server.drop("w")
            wait_until(lambda: worker.runner.stats().errors == 1)
            reader.check(worker, other)
            with StreamReader(server.url) as late:
                late.check(worker, other)
            assert reader.indexes["other"].restated == 0
            assert other.runner.stats().errors == 0


class TestWriters:
    def test_second_one_is_noticed(self, server: Server) -> None:
        """Two processes that write as one worker: whoever is pushed aside says so."""
        with FeedingWorker(server.url, "w") as first:
            first.store(3)
            first.settle()
            with FeedingWorker(server.url, "w") as second:
                second.store(4)
                second.settle()
                wait_until(lambda: first.runner.stats().errors > 0)
                last_error = str(first.runner.stats().last_error)
                assert "as the same worker (give each its own with worker=)" in last_error

    def test_lower_numbers_are_refused(self, server: Server) -> None:
        """A feed that would begin below what is in the stream does not, and says what to do."""
        with FeedingWorker(server.url, "w") as worker:
            worker.settle()
        with pytest.raises(SinkOpenError, match="the feed would start at 5: set state="):
            FeedingWorker(f"{server.url}?first=5", "w").__enter__()


def test_wrong_password(kind: Kind, tmp_path: Path) -> None:
    """Who comes with a wrong password, or none, is told so at once; no message repeats one."""
    with kind.with_password(tmp_path, "kv", "right-word") as server:
        host = server.url.partition("//")[2]
        for login in ("kv:wrong-word@", ""):
            with pytest.raises(SinkOpenError, match="wrong user or password") as caught:
                FeedingWorker(f"{server.scheme}://{login}{host}", "w").__enter__()
            assert "wrong-word" not in str(caught.value)
            with (
                StreamReader(f"{server.scheme}://{login}{host}") as reader,
                pytest.raises(BrokerError, match="wrong user or password") as reported,
            ):
                reader.read()
            assert "word@" not in str(reported.value)


def test_password_in_a_file(kind: Kind, tmp_path: Path) -> None:
    """The password is read from a file, and no part of the sink's texts has it."""
    secret = tmp_path / "password"
    secret.write_text("right-word\n")
    with kind.with_password(tmp_path, "kv", "right-word") as server:
        url = f"{server.scheme}://kv@127.0.0.1:{server.port}?password_file={secret}"
        with FeedingWorker(url, "w") as worker, StreamReader(url) as reader:
            worker.store(2)
            reader.check(worker)
            assert "right-word" not in f"{worker.transport.stream.name}{reader.subscriber.endpoint!r}"


@pytest.mark.needs("openssl")
def test_encrypted(kind: Kind, tmp_path: Path) -> None:
    """With tls=true both ends look at the server's certificate, and who does not trust it does not connect."""
    certificate, key = self_signed(tmp_path)
    with kind.with_tls(tmp_path, certificate, key) as server:
        url = f"{server.url}?tls=true&cafile={certificate}"
        with FeedingWorker(url, "w") as worker, StreamReader(url) as reader:
            worker.store(2)
            reader.check(worker)
        for options in ("?tls=true", ""):
            # Not by the runner, which waits for two seconds only.
            refused = FeedingWorker(f"{server.url}{options}", "w")
            with pytest.raises(SinkError, match=r"(?i)certificate|encrypt|tls|answer|reset|broken"):
                refused.feed.open()

"""Feeds by way of NATS JetStream, on a real server that is killed, filled and trimmed."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

from events.brokers.address import BrokerError
from events.brokers.records import Record
from sinks import SinkError, SinkOpenError
from sinks.brokers.nats import NATSStream
from tests.brokers.certificates import self_signed
from tests.brokers.fleet import FeedingWorker, StreamReader, wait_for
from tests.brokers.nats_server import NATSServer
from tests.sinks.feed_source import Reader


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NATSServer]:
    with NATSServer(tmp_path) as server:
        yield server


def test_what_workers_have_is_what_readers_know(server: NATSServer) -> None:
    """Three workers of one stream at random work: a reader from the start, and a late one, know what each has."""
    rng = random.Random(1)
    with ExitStack() as stack, StreamReader(server.url) as early:
        workers = [stack.enter_context(FeedingWorker(server.url, f"w{number}")) for number in range(3)]
        for _ in range(300):
            for worker in workers:
                worker.step(rng)
            early.read(0)
        early.check(*workers)
        with StreamReader(server.url) as late:
            late.check(*workers)
        with StreamReader(f"{server.url}?worker=w1") as one:
            one.check(workers[1])
            assert list(one.indexes) == ["w1"]
        assert [worker.runner.stats().errors for worker in workers] == [0, 0, 0]


class TestLateJoin:
    def test_after_trimming(self, server: NATSServer) -> None:
        """The sink removes what nobody needs; who joins then still finds all, and the stream stays small."""
        rng = random.Random(2)
        with ExitStack() as stack:
            workers = [
                stack.enter_context(FeedingWorker(server.url, f"w{number}", min_bytes=4000))
                for number in range(2)
            ]
            sizes = []
            for _ in range(12):
                for worker in workers:
                    for _ in range(40):
                        worker.step(rng)
                    worker.settle()
                sizes.append(state(server).bytes)
                with StreamReader(server.url) as late:
                    late.check(*workers)
            assert all(worker.transport._tellings > 4 for worker in workers)
            assert state(server).first_seq > 1
            assert [worker.runner.stats().errors for worker in workers] == [0, 0]
            assert max(sizes[6:]) < 1.5 * max(sizes[:6]), sizes

    def test_who_fell_behind_what_was_removed(self, server: NATSServer) -> None:
        """A reader that stops is overtaken by the trimming; when it goes on it hears a whole state, and is exact."""
        rng = random.Random(3)
        with FeedingWorker(server.url, "w", min_bytes=20_000) as worker, StreamReader(server.url) as reader:
            worker.store(3)
            reader.check(worker)
            for _ in range(600):
                worker.step(rng)
                worker.settle()
            assert messages(server, "kvcache.w")[0][0] > reader.seq["w"] + 1
            reader.check(worker)
            assert reader.indexes["w"].restated == 1
            assert worker.runner.stats().errors == 0

    def test_what_others_trimmed_makes_late_but_not_wrong(self, server: NATSServer) -> None:
        """A stream whose beginning somebody removed tells nothing until the next whole state; then all is right."""
        with FeedingWorker(f"{server.url}?restate=3s&retain=1min", "w") as worker:
            worker.store(5)
            worker.settle()
            last = state(server).last_seq
            ask(server, lambda js: js.purge_stream("kvcache", seq=last, subject="kvcache.w"))
            worker.store(4)
            worker.settle()
            with StreamReader(server.url) as late:
                late.read_until(lambda: bool(late.subscriber.waiting))
                assert late.indexes["w"].blocks == {}
                late.read_until(lambda: late.indexes["w"].resident() == worker.resident)
                assert late.subscriber.waiting == ()
                late.check(worker)

    def test_by_the_documented_rules_alone(self, server: NATSServer) -> None:
        """A reader of its own, from docs/brokers.md: state pieces in order, batches behind them, plain msgpack."""
        rng = random.Random(4)
        with FeedingWorker(server.url, "w", min_bytes=10_000) as worker:
            for _ in range(300):
                worker.step(rng)
                worker.settle()
            assert worker.transport._tellings > 2
            assert worker.runner.stats().errors == 0
            reader = Reader()
            at: int | None = None
            for number, tag, payload in messages(server, "kvcache.w"):
                # One piece suffices here for each state.
                is_state = tag.endswith("/0/last")
                if (is_state and at is None) or (not is_state and at is not None):
                    assert at is None or number == at + 1
                    reader.take_payload(payload)
                    at = number
            assert {int.from_bytes(block) for _, block in reader.state} == worker.resident


class TestBrokerFails:
    def test_killed_and_started_again(self, server: NATSServer) -> None:
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
                numbers = [
                    int(tag) for _, tag, _ in messages(server, f"kvcache.{worker.name}") if "/" not in tag
                ]
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            with StreamReader(server.url) as late:
                late.check(*workers)

    def test_away_for_longer_than_is_waited(self, server: NATSServer) -> None:
        """Then the sink fails, is closed and opened again, and what the manager must tell anew is all that is lost."""
        with FeedingWorker(f"{server.url}?timeout=200ms", "w") as worker, StreamReader(server.url) as reader:
            worker.store(5)
            reader.check(worker)
            server.kill()
            worker.store(2)
            wait_for(lambda: worker.runner.state == "quarantined")
            worker.store(3)
            server.start()
            wait_for(lambda: worker.runner.state == "running")
            assert "it does not answer" in str(worker.runner.stats().last_error) or "refused" in str(
                worker.runner.stats().last_error
            )
            worker.runner.put(worker.source.exported())
            reader.check(worker)

    def test_lost_what_it_acknowledged(self, server: NATSServer, tmp_path: Path) -> None:
        """A server that comes back empty is noticed with the next batch; then all is told anew, to everybody."""
        with FeedingWorker(server.url, "w") as worker, StreamReader(server.url) as reader:
            for _ in range(20):
                worker.store(5)
                worker.settle()
            reader.check(worker)
            server.kill()
            shutil.rmtree(tmp_path / "js")
            server.start()
            worker.store(2)
            wait_for(lambda: worker.runner.stats().errors == 1)
            assert "has lost it, or another process" in str(worker.runner.stats().last_error)
            worker.store(1)
            reader.check(worker)
            with StreamReader(server.url) as late:
                late.check(worker)

    def test_stream_removed(self, server: NATSServer) -> None:
        """A stream that somebody deletes is made again, with the whole state in it."""
        with FeedingWorker(server.url, "w") as worker, StreamReader(server.url) as reader:
            worker.store(5)
            reader.check(worker)
            ask(server, lambda js: js.delete_stream("kvcache"))
            worker.store(2)
            reader.check(worker)

    def test_hangs(self, server: NATSServer) -> None:
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
    def test_acknowledgement_lost(self, server: NATSServer) -> None:
        """A batch whose acknowledgement never came is sent again, and is in the stream once."""
        with FeedingWorker(server.url, "w") as worker, StreamReader(server.url) as reader:
            worker.store(1)
            reader.check(worker)
            stream = worker.transport._stream
            assert isinstance(stream, NATSStream)
            sent = stream._acknowledged
            fails = iter([True, True])

            async def deaf(record: Record, unique: str) -> int | None:
                answer = await sent(record, unique)
                if next(fails, False):
                    raise TimeoutError
                return answer

            stream._acknowledged = deaf  # type: ignore[method-assign]
            worker.store(2)
            reader.check(worker)
            assert next(fails, None) is None
            numbers = [tag for _, tag, _ in messages(server, "kvcache.w")]
            assert len(numbers) == len(set(numbers))
            assert worker.runner.stats().errors == 0
            assert reader.indexes["w"].restated == 0

    def test_second_writer_is_noticed(self, server: NATSServer) -> None:
        """Two processes that publish as one worker: whoever is pushed aside says so, and the last word is whole."""
        with FeedingWorker(server.url, "w") as first:
            first.store(3)
            first.settle()
            with FeedingWorker(server.url, "w") as second:
                second.store(4)
                second.settle()
                wait_for(lambda: first.runner.stats().errors > 0)
                assert "another process publishes as the same worker" in str(first.runner.stats().last_error)

    def test_lower_numbers_are_refused(self, server: NATSServer) -> None:
        """A feed that would begin below what is in the stream does not, and says what to do."""
        with FeedingWorker(server.url, "w") as worker:
            worker.settle()
        with pytest.raises(SinkOpenError, match="the feed would begin at 5: give state="):
            FeedingWorker(f"{server.url}?first=5", "w").__enter__()

    def test_worker_starts_again(self, server: NATSServer) -> None:
        """Its next life goes on in the stream with higher numbers and its whole state; readers follow."""
        with StreamReader(server.url) as reader:
            for blocks in (4, 7):
                with FeedingWorker(server.url, "w") as worker:
                    worker.store(blocks)
                    reader.check(worker)
            assert reader.indexes["w"].restated == 1


class TestRefused:
    USERS = 'authorization {{ users = [ {{ user: kv, password: "{password}" }} ] }}'

    def test_wrong_password(self, tmp_path: Path) -> None:
        """Who comes with a wrong password, or none, is told so at once; no message repeats one."""
        with NATSServer(tmp_path, self.USERS.format(password="right-word")) as server:
            host = server.url.removeprefix("nats://")
            for login in ("kv:wrong-word@", ""):
                with pytest.raises(SinkOpenError, match="user or password is wrong") as caught:
                    FeedingWorker(f"nats://{login}{host}", "w").__enter__()
                assert "wrong-word" not in str(caught.value)
                with (
                    StreamReader(f"nats://{login}{host}") as reader,
                    pytest.raises(BrokerError, match="user or password is wrong") as told,
                ):
                    reader.read()
                assert "word@" not in str(told.value)

    def test_password_in_a_file(self, tmp_path: Path) -> None:
        """The password is read from a file, and no part of the sink's texts has it."""
        secret = tmp_path / "password"
        secret.write_text("right-word\n")
        with NATSServer(tmp_path, self.USERS.format(password="right-word")) as server:
            url = f"nats://kv@127.0.0.1:{server.port}?password_file={secret}"
            with FeedingWorker(url, "w") as worker, StreamReader(url) as reader:
                worker.store(2)
                reader.check(worker)
                assert "right-word" not in f"{worker.transport.endpoint}{reader.subscriber.endpoint!r}"

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
            wait_for(lambda: worker.runner.stats().errors > 0)
            assert "is more than it takes in one message" in str(worker.runner.stats().last_error)

    def test_no_jetstream(self, tmp_path: Path) -> None:
        """A server without JetStream is told from one that is not there."""
        with NATSServer(tmp_path, jetstream=False) as server, pytest.raises(SinkOpenError, match="JetStream"):
            FeedingWorker(server.url, "w").__enter__()


def test_encrypted(tmp_path: Path) -> None:
    """With tls=true both ends look at the server's certificate, and who does not trust it does not connect."""
    certificate, key = self_signed(tmp_path)
    with NATSServer(tmp_path, f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}') as server:
        url = f"{server.url}?tls=true&cafile={certificate}"
        with FeedingWorker(url, "w") as worker, StreamReader(url) as reader:
            worker.store(2)
            reader.check(worker)
        for options in ("?tls=true", ""):
            # Not by the runner, which waits for two seconds only.
            refused = FeedingWorker(f"{server.url}{options}", "w")
            with pytest.raises(SinkError, match=r"(?i)certificate|encrypt|tls"):
                refused.feed.open()


# --- looking into the stream, past our reader -----------------------------------------------------------------


def ask(server: NATSServer, question: Callable[[Any], Awaitable[Any]]) -> Any:
    async def work() -> Any:
        client = await nats.connect(server.url)
        try:
            return await question(client.jetstream())
        finally:
            await client.close()

    return asyncio.run(work())


def state(server: NATSServer) -> Any:
    return ask(server, lambda js: js.stream_info("kvcache")).state


def messages(server: NATSServer, subject: str) -> list[tuple[int, str, bytes]]:
    """Number, tag and payload of all that is in the stream."""

    async def fetch(js: Any) -> list[tuple[int, str, bytes]]:
        last = (await js.stream_info("kvcache")).state.last_seq
        pull = await js.pull_subscribe(subject, stream="kvcache")
        found: list[tuple[int, str, bytes]] = []
        while True:
            try:
                batch = await pull.fetch(100, timeout=0.3)
            except nats.errors.TimeoutError:
                return found
            for message in batch:
                await message.ack()
                tag = message.headers["Kvcache-Record"]
                found.append((int(tag.partition("/")[0]), tag, message.data))
            if batch[-1].metadata.sequence.stream >= last:
                return found

    result: list[tuple[int, str, bytes]] = ask(server, fetch)
    return result

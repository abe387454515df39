"""Who comes late, again, or to do harm, on real sockets."""

from __future__ import annotations

import contextlib
import itertools
import socket as sockets
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import zmq
from structlog.testing import capture_logs

from sinks.router.feed import RouterFeed
from sinks.router.numbers import FeedNumbers
from sinks.router.publisher import (
    CALL_AGAIN_SECONDS,
    MAX_PREFIXES,
    READ_SECONDS,
    SNAPSHOTS_AT_ONCE,
    FeedSocket,
    SocketPlace,
)
from sinks.router.replay import ANSWERS_AT_ONCE, ReplayServer
from sinks.router.zmq import ZMQSettings, ZMQTransport
from tests.support.feeds.feed_source import Reader, Source, State
from tests.support.feeds.workers import Router, Worker, churn, last_seq, read_answer
from tests.support.ports import free_port
from tests.support.waiting import WAIT, WAIT_MS, Clock, wait_until

PLACE = SocketPlace("127.0.0.1", 0)


@pytest.fixture
def router() -> Iterator[Router]:
    with Router() as router:
        yield router


def state_of(worker: Worker) -> State:
    """What a reader of a replay knows."""
    with Router() as other:
        other.replay(worker, 0)
        return other.reader.state


def follow(router: Router, worker: Worker) -> State:
    """Fold what comes, however often the last number comes, until all is there."""
    router.reader = Reader()
    seq = -1
    while seq < last_seq(worker) or router.live.poll(20):
        _, frame, payload = router.receive()
        seq = int.from_bytes(frame, "big")
        router.reader.take_payload(payload)
    return router.reader.state


def raw_peer(endpoint: str, kind: bytes) -> sockets.socket:
    """A connection that speaks ZeroMQ's protocol (ZMTP 3.0) without its library, so that it may say anything."""
    peer = sockets.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])))
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    peer.sendall(greeting)
    assert len(peer.recv(64, sockets.MSG_WAITALL)) == 64
    peer.sendall(b"\x04" + bytes((len(ready),)) + ready)
    _, length = peer.recv(2, sockets.MSG_WAITALL)
    assert peer.recv(length, sockets.MSG_WAITALL)[:6] == b"\x05READY"
    return peer


class TestLateSubscribers:
    def test_the_state_comes_first(self, router: Router) -> None:
        """Without any replay, who comes late knows everything: one batch, under the last number, then live ones."""
        with Worker("coalesce=0") as worker:
            churn(worker, 60)
            worker.settle()
            before = last_seq(worker)
            router.subscribe(worker)
            topic, seq, payload = router.welcome()
            assert (topic, int.from_bytes(seq, "big")) == (worker.transport.topic, before)
            router.reader.take_payload(payload)
            assert len(router.reader.state) == 3 * len(worker.source.slots)
            churn(worker, 20, 1000)
            worker.settle()
            for expected in range(before + 1, last_seq(worker) + 1):
                _, seq, payload = router.receive()
                assert int.from_bytes(seq, "big") == expected
                router.reader.take_payload(payload)
            assert router.reader.state == state_of(worker)

    def test_others_are_not_disturbed(self, router: Router) -> None:
        """Those who were there hear live batches only, each once, while others come and go."""
        with Worker("coalesce=0") as worker:
            router.subscribe(worker)
            router.welcome()
            for round_ in range(10):
                churn(worker, 5, 1 + 10 * round_)
                with Router() as other:
                    other.subscribe(worker)
                    other.welcome()
                wait_until(lambda: worker.feed.subscribers == 1)
            worker.settle()
            seqs: list[int] = []
            while not seqs or seqs[-1] < last_seq(worker):
                _, seq, payload = router.receive()
                seqs.append(int.from_bytes(seq, "big"))
                assert msgspec.msgpack.decode(payload)[1][0]["type"] != "AllBlocksCleared"
            assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))

    def test_the_state_is_encoded_once_for_many(self, router: Router) -> None:
        """As long as little was sent since, newcomers get what was encoded for the first one, and the rest behind."""
        with Worker("coalesce=0") as worker:
            churn(worker, 200)
            worker.settle()
            router.subscribe(worker)
            router.welcome()
            snapshot = worker.transport.snapshot
            assert snapshot is not None
            for number in range(5):
                worker.put(worker.source.store(1000 + number, 2))
                worker.settle()
                with Router() as other:
                    other.subscribe(worker)
                    other.reader.take_payload(other.welcome()[2])
                    assert other.reader.state == state_of(worker)
                    assert worker.transport.snapshot is snapshot
                wait_until(
                    lambda: worker.feed.subscribers == 1
                )  # else the next one's coming could be overlooked
            assert len(snapshot.tail) == 5

    def test_who_comes_again_is_sent_again(self) -> None:
        """A feed that dies and comes back with its cache lost takes back what routers held, without their asking."""
        with Worker("coalesce=0") as worker:
            churn(worker, 30)
            worker.settle()
            port = worker.transport.endpoint.rpartition(":")[2]
            router = Router()
            router.subscribe(worker)
            assert follow(router, worker)
        with router:
            tried = router.live.get_monitor_socket(zmq.Event.CONNECT_RETRIED)
            assert tried.poll(WAIT_MS), "it does not try to connect again"
            router.live.disable_monitor()
            tried.close(linger=0)
            settings = ZMQSettings(SocketPlace("127.0.0.1", int(port)))
            feed = RouterFeed(ZMQTransport(settings), FeedNumbers(None), coalesce_seconds=0)
            with Worker(feed=feed) as again:
                again.put(again.source.store(7, 2))
                again.settle()
                # ZeroMQ subscribes again inside a call only.
                wait_until(lambda: bool(router.live.poll(10)))
                assert len(follow(router, again)) == 2

    def test_a_second_subscription_of_a_connection_reports_nothing_again(self, router: Router) -> None:
        """A subscriber of several prefixes is one subscriber, and is told once."""
        with Worker("coalesce=0") as worker:
            worker.settle()
            router.subscribe(worker)
            for prefix in (b"kv", b"kv@", b"other"):
                router.live.subscribe(prefix)
            router.welcome()
            publisher = worker.transport.publisher
            wait_until(lambda: [*publisher.topics.values()] == [{b"", b"kv", b"kv@", b"other"}])
            assert worker.feed.subscribers == 1
            worker.put(worker.source.store(1, 1))
            _, events, _ = msgspec.msgpack.decode(router.receive()[2])
            assert [event["type"] for event in events] == ["BlockStored"]
            for prefix in (b"", b"kv", b"kv@"):
                router.live.unsubscribe(prefix)
            wait_until(lambda: [*publisher.topics.values()] == [{b"other"}])
            worker.put(worker.source.store(2, 1))
            worker.settle()
            assert worker.feed.subscribers == 1
            router.live.subscribe(b"")  # what it has not heard meanwhile it is told
            router.reader.take_payload(router.welcome()[2])
            assert len(router.reader.state) == 2
            router.live.unsubscribe(b"")
            router.live.unsubscribe(b"other")
            wait_until(lambda: worker.feed.subscribers == 0)

    def test_large_states_wait_for_those_on_their_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who connects and never reads holds up newcomers for a while only, and no more memory than a few states."""
        monkeypatch.setattr("sinks.router.publisher.TAKING_SECONDS", 1.0)
        settings = ZMQSettings(PLACE, PLACE, stall_seconds=0.2, linger_seconds=0.05)
        feed = RouterFeed(ZMQTransport(settings), FeedNumbers(None), coalesce_seconds=0)
        with Worker(feed=feed) as worker, contextlib.ExitStack() as stack:
            worker.source.block = 4
            for handle in range(1, 12):
                worker.put(worker.source.store(handle, 5000))
            worker.settle()
            for number in range(8):
                stuck = stack.enter_context(Router()).socket(zmq.SUB)
                stuck.set(zmq.RCVHWM, 1)
                stuck.set(zmq.RCVBUF, 4096)
                stuck.subscribe(b"")
                stuck.connect(worker.transport.endpoint)
                worker.put(worker.source.store(100 + number, 1))  # each would get a payload of its own
            router = stack.enter_context(Router())
            live = router.socket(zmq.SUB)
            live.subscribe(b"")
            live.connect(worker.transport.endpoint)
            assert live.poll(int(WAIT * 1000))
            router.reader.take_payload(live.recv_multipart()[2])
            assert len(router.reader.state) >= 55_000
            in_flight = worker.transport.publisher.in_flight
            assert len({id(resident.payload) for resident in in_flight}) <= SNAPSHOTS_AT_ONCE


class TestHarm:
    def test_subscribing_without_end_stops_nobody(self, router: Router) -> None:
        """Live batches go on while a peer toggles subscriptions as fast as it can; all may have to connect anew."""
        stop = threading.Event()

        def toggle(endpoint: str) -> None:
            with Router() as hostile:
                sub = hostile.socket(zmq.XSUB)
                sub.sndhwm = 0
                sub.connect(endpoint)
                for number in itertools.count():
                    sub.send(b"\x01x%d" % (number % 50))
                    sub.send(b"\x00x%d" % (number % 50))
                    if stop.is_set():
                        return

        with Worker("coalesce=0&heartbeat=10ms") as worker, capture_logs() as logs:
            router.subscribe(worker)
            router.welcome()
            thread = threading.Thread(target=toggle, args=(worker.transport.endpoint,))
            thread.start()
            try:
                for number in range(40):
                    if number % 10 == 0:
                        worker.put(worker.source.store(1 + number, 1))
                    router.receive()
            finally:
                stop.set()
                thread.join()
            wait_until(lambda: worker.feed.subscribers == 1, meanwhile=lambda: router.live.poll(1))
        assert {log["event"] for log in logs} <= {"feed_reopened"}

    @pytest.mark.parametrize(
        "words", [[b"hello"], [b"hello", b"\x02", b"", b"\x01kv@"], [b"\xff" * 4000] * 300]
    )
    def test_messages_that_are_no_subscriptions(self, router: Router, words: list[bytes]) -> None:
        """They are ignored, their sender is cut off, and who subscribes at the same time gets everything."""
        with Worker("coalesce=0") as worker, capture_logs():
            router.subscribe(worker)
            hostile = router.socket(zmq.XSUB)
            hostile.connect(worker.transport.endpoint)
            wait_until(lambda: len(worker.transport.publisher.peers.connected) == 2)
            with contextlib.ExitStack() as stack:
                others = [stack.enter_context(Router()) for _ in range(4)]
                for word in words:
                    hostile.send(word)
                for other in others:
                    other.live = other.socket(zmq.SUB)
                    other.live.subscribe(b"")
                    other.live.connect(worker.transport.endpoint)
                    hostile.send(words[0])
                churn(worker, 30)
                worker.settle()
                hostile.close(linger=0)
                # Where the socket was opened anew, they subscribe again inside a call only.
                everybody = [router, *others]
                wait_until(lambda: all(r.live.poll(1) for r in everybody) and worker.feed.subscribers == 5)
                worker.put(worker.source.store(500, 1))
                worker.settle()
                expected = state_of(worker)
                assert len(expected) == 3 * (len(worker.source.slots) - 1) + 1
                for reader in (router, *others):
                    assert follow(reader, worker) == expected

    def test_who_subscribes_to_ever_more_is_cut_off(
        self, router: Router, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As many subscriptions as a connection may have are fine; with one more it ends, and nothing of it is left."""
        # However long it takes to read them.
        monkeypatch.setattr("sinks.router.publisher.BACKLOG_SECONDS", WAIT)
        with Worker("coalesce=0") as worker, capture_logs() as logs:
            publisher = worker.transport.publisher
            router.subscribe(worker)
            router.welcome()
            with raw_peer(worker.transport.endpoint, b"SUB") as peer:
                for number in range(MAX_PREFIXES):
                    peer.sendall(b"\x00\x05\x01" + number.to_bytes(4, "big"))
                peer.sendall(b"\x00\x05\x01" + bytes(4))  # which it has
                wait_until(lambda: sorted(map(len, publisher.topics.values())) == [1, MAX_PREFIXES])
                assert logs == []
                for number in range(1000):
                    with contextlib.suppress(OSError):
                        peer.sendall(b"\x00\x05\x01" + (MAX_PREFIXES + number).to_bytes(4, "big"))
                wait_until(lambda: list(map(len, publisher.topics.values())) == [1])
                address = "{}:{}".format(*peer.getsockname())
            assert [(log["event"], log["peer"]) for log in logs] == [("peer_cut_off", address)]
            assert logs[0]["endpoint"] == worker.transport.endpoint
            worker.put(worker.source.store(1, 1))
            assert router.receive()

    def test_too_many_connections_are_refused(self, router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
        """Bare connections beyond the bound are ended at once, and a router that was there goes on."""
        monkeypatch.setattr("sinks.router.publisher.MAX_CONNECTIONS", 10)
        with (
            Worker("coalesce=0") as worker,
            capture_logs() as logs,
            contextlib.ExitStack() as stack,
        ):
            router.subscribe(worker)
            router.welcome()
            port = int(worker.transport.endpoint.rpartition(":")[2])
            for _ in range(40):
                stack.enter_context(sockets.create_connection(("127.0.0.1", port)))
            wait_until(lambda: bool(logs) and len(worker.transport.publisher.peers.connected) <= 10)
            worker.put(worker.source.store(1, 1))
            assert router.receive()


class TestFeedSocket:
    """The socket alone, in the test's thread, with a clock that the test sets."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        clock = Clock()
        monkeypatch.setattr("sinks.router.publisher.time", SimpleNamespace(monotonic=clock))
        return clock

    @pytest.mark.parametrize("connects", [False, True])
    @pytest.mark.parametrize("turned_away", [False, True])
    def test_only_a_refused_caller_calls_again(
        self, router: Router, clock: Clock, connects: bool, turned_away: bool
    ) -> None:
        """A second after the refusal. A bound socket that has refused somebody stays, as one that is connected does."""
        place = SocketPlace("127.0.0.1", free_port(), connects)
        with opened(router, place) as (publisher, made):
            publisher.peers.turned_away = turned_away
            for seconds in (0, CALL_AGAIN_SECONDS / 2):
                clock.now += seconds
                publisher.poll_connections()
                assert len(made) == 1
            clock.now += CALL_AGAIN_SECONDS
            publisher.poll_connections()
            assert len(made) == 1 + (connects and turned_away)

    def test_reading_ends_when_its_time_is_over(self, router: Router, clock: Clock) -> None:
        """Subscribers' messages that are left are read in the next round."""
        with opened(router, PLACE) as (publisher, [socket]):
            publisher.topic = b"kv@"
            subscriber = router.socket(zmq.SUB)
            socket.bind("inproc://feed")  # where a message has arrived once it is sent
            subscriber.connect("inproc://feed")
            for number in range(5):
                subscriber.subscribe(b"x%d" % number)
            receive, slow = socket.recv, []

            def receive_slowly(*args: Any, **options: Any) -> Any:
                message = receive(*args, **options)
                slow.append(message.bytes)
                clock.now += READ_SECONDS / 2
                return message

            with patch.object(socket, "recv", receive_slowly):
                assert not publisher.has_pending_subscriber()
            assert slow == [b"\x01x0", b"\x01x1", b"\x01x2"]
            assert not publisher.has_pending_subscriber()
            assert not socket.poll(0)


@contextlib.contextmanager
def opened(router: Router, place: SocketPlace) -> Iterator[tuple[FeedSocket, list[zmq.Socket[bytes]]]]:
    """A feed's socket, and all that were made for it so far."""
    made: list[zmq.Socket[bytes]] = []

    def make() -> zmq.Socket[bytes]:
        made.append(router.socket(zmq.XPUB))
        made[-1].linger = 0
        return made[-1]

    with contextlib.closing(FeedSocket(make, place)) as publisher:
        yield publisher, made


class TestReplayFlood:
    def test_requests_without_end_cost_next_to_nothing(self, router: Router) -> None:
        """Thousands that nobody reads leave one answer and one request for it; an honest reader is answered."""
        with Worker("coalesce=0&ring=64KiB") as worker, capture_logs() as logs:
            churn(worker, 300)
            worker.settle()
            server = worker.transport.replay
            assert server is not None
            hostile = router.dealer(worker, RCVHWM=1, RCVBUF=4096, SNDHWM=0)
            for _ in range(20_000):
                hostile.send_multipart([b"", bytes(8)])
            assert len(state_of(worker)) == 3 * len(worker.source.slots)
            assert len(server.answers) + len(server.line) <= 3  # its own may not have been taken wholly yet
        assert "feed_numbers_went_back" not in {log["event"] for log in logs}

    def test_numbers_that_went_back_are_reported_once(self, router: Router) -> None:
        """A reader that asks for batches which are still to come has seen another feed's: it gets none, and a warning
        says so, however many such readers there are.
        """
        with Worker("coalesce=0") as worker, capture_logs() as logs:
            churn(worker, 3)
            worker.settle()
            for ahead in (1, 1000, 2, 1000):
                start = last_seq(worker) + ahead
                assert router.ask(worker, start.to_bytes(8, "big")) == []
        [warning] = [log for log in logs if log["event"] == "feed_numbers_went_back"]
        assert (warning["asked"], warning["next"]) == (last_seq(worker) + 1000, last_seq(worker) + 1)

    def test_who_must_wait_gets_no_empty_answer(self, router: Router) -> None:
        """With all places taken by readers that take nothing, the next one waits, and then gets all of it."""
        clock = Clock()
        with all_places_taken(router, clock) as (worker, server), capture_logs() as logs:
            honest = named_reader(router, worker, b"honest")
            wait_until(lambda: [*server.line] == [b"honest"])
            assert not honest.poll(0)
            clock.now += 1e7
            for frames in read_answer(honest):
                router.reader.take_payload(frames[3])
            assert len(router.reader.state) == 6000
            assert server.dropped >= 1
        assert {"peer_cut_off"} <= {log["event"] for log in logs} <= {"peer_cut_off", "feed_reopened"}

    def test_who_asks_and_leaves_keeps_nobody_waiting(self, router: Router) -> None:
        """Readers that have left are not in the line, and asking again changes no place in it."""
        with all_places_taken(router, Clock()) as (worker, server):
            first = named_reader(router, worker, b"first")
            wait_until(lambda: [*server.line] == [b"first"])
            for _ in range(50):
                with Router() as leaver:
                    named_reader(leaver, worker, b"leaver")
                    wait_until(lambda: len(server.line) == 2)
                wait_until(lambda: len(server.line) == 1)
            named_reader(router, worker, b"last")
            first.send_multipart([b"", (10**6).to_bytes(8, "big")])
            wait_until(lambda: [*server.line] == [b"first", b"last"] and server.line[b"first"][0] > 0)
            assert server.dropped == 50


def named_reader(router: Router, worker: Worker, name: bytes) -> zmq.Socket:
    """One that has asked for everything, and is known to the server by its name."""
    dealer = router.socket(zmq.DEALER)
    dealer.set(zmq.IDENTITY, name)
    dealer.connect(str(worker.transport.replay_endpoint))
    dealer.send_multipart([b"", bytes(8)])
    return dealer


@contextlib.contextmanager
def all_places_taken(router: Router, clock: Clock) -> Iterator[tuple[Worker, ReplayServer]]:
    """A feed of 6,000 blocks whose replay is answering as many readers as it does at once, which take nothing."""
    settings = ZMQSettings(PLACE, PLACE, stall_seconds=1e6, linger_seconds=0.05)
    transport = ZMQTransport(settings)
    feed = RouterFeed(transport, FeedNumbers(None), coalesce_seconds=0, heartbeat_seconds=0)
    with Worker(feed=feed) as worker:
        source = Source(block=1024)
        source.seq = worker.source.seq
        worker.put(source.created())
        for handle in range(1, 601):
            worker.put(source.store(handle, 10))
        worker.settle()
        server = transport.replay
        assert server is not None
        server.clock = clock
        for _ in range(ANSWERS_AT_ONCE):
            stuck = router.dealer(worker, RCVHWM=1, RCVBUF=4096)
            stuck.send_multipart([b"", bytes(8)])
            assert stuck.poll(WAIT_MS)
        yield worker, server

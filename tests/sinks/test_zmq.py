"""The feed over ZeroMQ, on real sockets, read by plain sockets and a generic msgpack decoder."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from structlog.testing import capture_logs

from kvcache import KVCacheConfig, KVCacheManager
from sinks import SinkContext, SinkOpenError, SinkRunner, SinkURLError, known_schemes, open_sink
from sinks.router.feed import RouterFeed
from sinks.router.numbers import FeedNumbers
from sinks.router.publisher import SocketPlace
from sinks.router.zmq import ZMQSettings, ZMQTransport
from tests.support.feeds.feed_source import Reader, Source
from tests.support.feeds.workers import CONTEXT, Router, Worker, churn, last_seq, port_in_use, read_answer
from tests.support.places import ROOT
from tests.support.ports import free_port
from tests.support.waiting import WAIT_MS, Clock, wait_until


@pytest.fixture
def router() -> Iterator[Router]:
    with Router() as router:
        yield router


class TestLive:
    def test_messages_have_three_frames(self, router: Router) -> None:
        """Topic, 8 bytes of number, and a payload that any msgpack decoder reads."""
        with Worker("coalesce=0&rank=3", SinkContext(CONTEXT.key_bytes, 4, model="org/m")) as worker:
            worker.settle()  # what goes out at the start is told before anybody listens
            router.subscribe(worker)
            router.welcome()
            worker.put(worker.source.store(1, 2))
            topic, seq, payload = router.receive()
            assert topic.decode() == f"kv@{worker.transport.endpoint.removeprefix('tcp://')}@org/m"
            assert int.from_bytes(seq, "big") == last_seq(worker)
            assert len(seq) == 8
            _, events, rank = msgspec.msgpack.decode(payload)
            assert (len(events), events[0]["type"], rank) == (1, "BlockStored", 3)

    def test_a_reader_that_was_there_is_exact(self, router: Router) -> None:
        """Numbers have no holes, and what was told adds up to what is there."""
        with Worker() as worker:
            router.subscribe(worker)
            churn(worker, 200)
            worker.settle()
            router.follow(last_seq(worker))
            assert router.seqs == list(range(router.seqs[0], last_seq(worker) + 1))
            assert len(router.reader.state) == 3 * len(worker.source.slots)
            state = router.reader.state
            router.replay(worker, 0)
            assert router.reader.state == state

    def test_subscribers_choose_by_topic(self, router: Router) -> None:
        """A subscriber of another topic gets nothing, one of a prefix does."""
        with Worker("topic=kv@a@m&coalesce=0") as worker, Router() as other:
            router.subscribe(worker, b"kv@a")
            other.subscribe(worker, b"kv@b")
            worker.put(worker.source.store(1, 1))
            assert router.receive()[0] == b"kv@a@m"
            other.live.subscribe(b"kv@a")
            other.welcome()  # the first that it hears

    def test_subscribers_are_counted_as_they_come_and_go(self, router: Router) -> None:
        """Equal subscriptions count one by one, and so do their ends."""
        with Worker() as worker:
            router.subscribe(worker)
            with Router() as other:
                other.subscribe(worker)
                assert worker.feed.subscribers == 2
            wait_until(lambda: worker.feed.subscribers == 1)
            assert not worker.feed.wait_subscribers(2, 0.01)

    def test_heartbeats_come_when_nothing_happens(self, router: Router) -> None:
        """Without any event, empty batches with rising numbers arrive, and a replay brings them too."""
        with Worker("heartbeat=30ms") as worker:
            worker.settle()
            router.subscribe(worker)
            router.welcome()
            seqs = []
            for _ in range(3):
                _, seq, payload = router.receive()
                seqs.append(int.from_bytes(seq, "big"))
                assert msgspec.msgpack.decode(payload)[1] == []
            assert seqs == list(range(seqs[0], seqs[0] + 3))
            assert router.replay(worker, seqs[0])[:3] == seqs

    def test_a_stalled_subscriber_delays_nobody(self, router: Router) -> None:
        """One that reads nothing loses batches beyond the high-water mark; the other gets all, and close is bounded."""
        with Worker("coalesce=0&hwm=5") as worker, Router() as stalled:
            stalled.subscribe(worker)
            router.subscribe(worker)
            big = Source()
            big.seq = worker.source.seq
            for handle in range(1, 41):
                worker.put(big.store(handle, 400))
                worker.settle()
                router.follow(last_seq(worker))
            assert len(router.reader.state) == 40 * 400

    def test_two_feeds_at_once(self, router: Router) -> None:
        """Two sinks of one stream have numbers and sockets of their own, and both are exact."""
        with Worker() as first, Worker("coalesce=0") as second, Router() as other:
            router.subscribe(first)
            other.subscribe(second)
            for worker in (first, second):
                churn(worker, 30)
                worker.settle()
            router.follow(last_seq(first))
            other.follow(last_seq(second))
            assert router.reader.state == other.reader.state != {}
            assert last_seq(first) < last_seq(second)


class TestReplay:
    def test_brings_batches_as_they_were_sent(self, router: Router) -> None:
        """From any number that the ring holds, byte by byte what was sent live, then the end marker."""
        with Worker("coalesce=0") as worker:
            router.subscribe(worker)
            churn(worker, 20)
            worker.settle()
            live = {}
            while last_seq(worker) not in live:
                _, seq, payload = router.receive()
                live[int.from_bytes(seq, "big")] = payload
            for start in (min(live), min(live) + 7, last_seq(worker)):
                answer = router.ask(worker, start.to_bytes(8, "big"))
                got = {int.from_bytes(frames[2], "big"): frames[3] for frames in answer}
                assert got == {seq: payload for seq, payload in live.items() if seq >= start}

    @pytest.mark.parametrize("start", [b"", b"\0", b"\0\0", bytes(8), bytes(12)])
    def test_starts_of_any_length_are_understood(self, router: Router, start: bytes) -> None:
        """Big-endian whatever the length; empty is 0."""
        with Worker() as worker:
            worker.settle()
            assert len(router.ask(worker, start)) == last_seq(worker) + 1

    @pytest.mark.parametrize("start", [(1).to_bytes(8, "big"), b"\xff" * 8, b"\xff" * 40])
    def test_the_future_is_an_end_marker_only(self, router: Router, start: bytes) -> None:
        """Numbers that were not used yet have no answer, however large."""
        with Worker() as worker:
            worker.settle()
            assert last_seq(worker) == 0
            assert router.ask(worker, start) == []

    def test_what_is_no_request_does_no_harm(self, router: Router) -> None:
        """Without the delimiter, with too many frames or too large, nothing comes, and others are answered."""
        with Worker() as worker:
            worker.settle()
            dealer = router.dealer(worker)
            for frames in ([bytes(8)], [b"x", bytes(8)], [b"", bytes(8), b""]):
                dealer.send_multipart(frames)
            dealer.send_multipart([b"", b""])
            assert len(read_answer(dealer)) == 1
            router.dealer(worker).send_multipart([b"", bytes(100_000)])
            assert len(router.ask(worker, b"")) == 1

    @pytest.mark.parametrize("start", [0, 1, 13])
    @pytest.mark.parametrize("pad", [False, True])
    def test_beyond_the_ring_the_state_is_reported(self, router: Router, start: int, pad: bool) -> None:
        """It clears, its numbers end with the last one, and its sum is the live reader's; padded, none is left out."""
        with Worker(f"coalesce=0&ring=1KiB&max_batch=2KiB&pad={pad}") as worker:
            churn(worker, 60)
            worker.settle()
            reported = router.replay(worker, start)
            assert reported == list(range(start if pad else reported[0], last_seq(worker) + 1))
            assert (1 < len(reported) < 30) != pad
            assert len(router.reader.state) == 3 * len(worker.source.slots)
            assert router.reader.cleared == 1
            assert worker.transport.replay is not None
            assert worker.transport.replay.compacted == 1
            state = router.reader.state
            router.subscribe(worker)
            router.reader.take_payload(router.welcome()[2])
            assert router.reader.state == state

    def test_an_old_feed_is_joined_as_fast_as_a_young_one(self, router: Router) -> None:
        """A hundred million numbers cost the answer nothing, and a second reader not even the state anew."""
        with Worker("coalesce=0&ring=1KiB&first=100000000") as worker:
            churn(worker, 60)
            worker.settle()
            for reader in range(1, 4):
                assert len(reported := router.replay(worker, 0)) == reader
                assert reported[-1] == last_seq(worker) > 100_000_000
                assert len(router.reader.state) == sum(map(len, worker.source.slots.values()))
                worker.put(worker.source.store(1000 + reader, 1))
                worker.settle()

    def test_where_numbers_are_few_batches_are_larger(self, router: Router) -> None:
        """A state of many batches fits onto the one number that is there."""
        with Worker("coalesce=0&ring=0B&max_batch=2KiB&heartbeat=1min") as worker:
            churn(worker, 60)
            worker.settle()
            last = last_seq(worker)
            assert router.replay(worker, last) == [last]
            assert len(router.reader.state) == 3 * len(worker.source.slots)

    def test_a_late_reader_goes_on_live_without_a_seam(self, router: Router) -> None:
        """Subscribed, then answered from 0 while things go on: the sum of both is exact at the end."""
        with Worker("coalesce=2ms&ring=2KiB") as worker:
            churn(worker, 50)
            router.subscribe(worker)
            dealer = router.dealer(worker)
            dealer.send_multipart([b"", bytes(8)])
            for round_ in range(1, 20):
                churn(worker, 10, 1000 * round_)
            worker.settle()
            seqs = []
            for frames in read_answer(dealer):
                seqs.append(int.from_bytes(frames[2], "big"))
                router.reader.take_payload(frames[3])
            while seqs[-1] < last_seq(worker):
                _, seq, payload = router.receive()
                if int.from_bytes(seq, "big") > seqs[-1]:
                    seqs.append(int.from_bytes(seq, "big"))
                    router.reader.take_payload(payload)
            assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
            expected = Router()
            with expected:
                expected.replay(worker, 0)
            assert router.reader.state == expected.reader.state
            assert len(router.reader.state) == 3 * len(worker.source.slots)

    def test_two_requests_of_one_reader_do_not_mix(self, router: Router) -> None:
        """A second request before the first answer is through is answered after it."""
        with Worker("coalesce=0") as worker:
            churn(worker, 200)
            worker.settle()
            dealer = router.dealer(worker)
            for _ in range(2):
                dealer.send_multipart([b"", bytes(8)])
            answers = [[frames[2] for frames in read_answer(dealer)] for _ in range(2)]
            assert answers[0] == answers[1] == sorted(answers[0])
            assert len(answers[0]) == last_seq(worker) + 1

    def test_a_reader_that_takes_nothing_is_given_up(self, router: Router) -> None:
        """It holds up neither live batches nor other readers; after a while it is dropped, counted and logged."""
        settings = ZMQSettings(
            place := SocketPlace("127.0.0.1", 0), place, stall_seconds=1e6, linger_seconds=0.05
        )
        transport = ZMQTransport(settings)
        feed = RouterFeed(transport, FeedNumbers(None), coalesce_seconds=0, heartbeat_seconds=0)
        with Worker(feed=feed) as worker, capture_logs() as logs:
            router.subscribe(worker)
            source = Source(block=1024)
            source.seq = worker.source.seq
            worker.put(source.created())
            for handle in range(1, 601):
                worker.put(source.store(handle, 10))
            worker.settle()
            assert transport.replay is not None
            server = transport.replay
            server.clock = clock = Clock()
            slow = router.dealer(worker, RCVHWM=1, RCVBUF=4096)
            slow.send_multipart([b"", bytes(8)])
            assert slow.poll(WAIT_MS)
            assert len(router.replay(worker, 0)) == last_seq(worker) + 1
            assert len(router.reader.state) == 6000
            assert server.dropped == 0
            clock.now += 1e7
            wait_until(lambda: server.dropped == 1)
            worker.put(source.store(1000, 1))
            worker.settle()
            router.reader = Reader()
            while int.from_bytes(router.receive()[1], "big") < last_seq(worker):
                pass
            assert len(router.replay(worker, last_seq(worker))) == 1
        assert [log["event"] for log in logs] == ["peer_cut_off"]

    def test_a_reader_that_goes_away_is_forgotten(self, router: Router) -> None:
        """Its answer ends at once, and the next reader gets its own."""
        with Worker("coalesce=0") as worker, Router() as leaver:
            worker.settle()
            for handle in range(1, 6000):
                worker.put(worker.source.store(handle, 1))
            worker.settle()
            dealer = leaver.dealer(worker, RCVHWM=1, RCVBUF=4096)
            dealer.send_multipart([b"", bytes(8)])
            assert dealer.poll(WAIT_MS)
            leaver.context.destroy(linger=0)
            assert len(router.replay(worker, 0)) == last_seq(worker) + 1
            assert worker.transport.replay is not None
            server = worker.transport.replay
            wait_until(lambda: server.dropped + server.answered == 2)


class TestRestart:
    def test_numbers_go_on_and_replay_bridges_the_jump(self, router: Router, tmp_path: Path) -> None:
        """After a close and a reopening, a reader of the first life gets the second one's state contiguously."""
        options = f"coalesce=0&state={tmp_path / 'numbers'}"
        with Worker(options) as worker:
            churn(worker, 30)
            worker.settle()
            last = last_seq(worker)
        with Worker(options) as worker:
            router.subscribe(worker)
            worker.put(worker.source.store(7, 2))
            worker.settle()
            assert last_seq(worker) > last
            assert router.replay(worker, last + 1) == list(range(last + 1, last_seq(worker) + 1))
            assert len(router.reader.state) == 2
            assert router.reader.cleared >= 1

    def test_a_killed_process_is_survived(self, router: Router, tmp_path: Path) -> None:
        """Its subscriber saw rising numbers; the second life goes on above them and tells its state."""
        path = tmp_path / "numbers"
        code = (
            "import sys, threading; from tests.support.feeds.workers import Worker, churn\n"
            "worker = Worker('coalesce=0&state=' + sys.argv[1]).__enter__()\n"
            "print(worker.transport.endpoint, flush=True)\n"
            "assert worker.feed.wait_subscribers(1, 60)\n"
            "churn(worker, 100); threading.Event().wait()"
        )
        command = [sys.executable, "-c", code, str(path)]
        live, seen = router.socket(zmq.SUB), []
        with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as child:
            try:
                assert child.stdout is not None
                live.setsockopt(zmq.SUBSCRIBE, b"")
                live.connect(child.stdout.readline().strip())
                for _ in range(20):
                    assert live.poll(WAIT_MS)
                    seen.append(int.from_bytes(live.recv_multipart()[1], "big"))
            finally:
                child.kill()
        while live.poll(100):
            seen.append(int.from_bytes(live.recv_multipart()[1], "big"))
        assert all(a < b for a, b in itertools.pairwise(seen))
        with Worker(f"coalesce=0&state={path}") as worker:
            worker.put(worker.source.store(7, 2))
            worker.settle()
            assert last_seq(worker) > seen[-1]
            start = seen[-1] + 1
            reported = router.replay(worker, start)
            assert reported == list(range(reported[0], last_seq(worker) + 1))
            assert (router.reader.cleared, len(router.reader.state)) == (1, 2)

    @pytest.mark.parametrize(
        ("options", "clock"), [("", True), ("&replay=0&pad=true", False), ("&first=7", False)]
    )
    def test_without_a_file_numbers_begin_with_the_clock(self, options: str, clock: bool) -> None:
        """So that they are above all of an earlier feed, whose numbers nobody knows any more; unless told otherwise."""
        numbers = []
        for _ in range(2):
            sink = open_sink(f"zmq+pub://127.0.0.1:0?state={options}", CONTEXT)
            assert isinstance(sink, RouterFeed)
            runner = SinkRunner(sink, "feed")
            runner.start()
            wait_until(lambda: sink.is_settled)  # noqa: B023
            runner.close()
            numbers.append(sink.last_seq + 1)
        assert (numbers[1] > numbers[0] > time.time_ns() // 1000 - 600_000_000) == clock
        assert clock or numbers[0] == numbers[1] < 9

    def test_numbers_lie_in_the_contexts_directory(self, tmp_path: Path) -> None:
        """A feed at a fixed port keeps its numbers beside the log; one at any free port, or told so, in memory."""
        context = SinkContext(8, 4, state_dir=tmp_path / "state")
        port = free_port()
        for url in (
            f"zmq+pub://127.0.0.1:{port}?heartbeat=0",
            "zmq+pub://127.0.0.1:0",
            "zmq+pub://127.0.0.1:0?state=",
        ):
            runner = SinkRunner(open_sink(url, context), "feed")
            runner.start()
            runner.close()
        found = {path.name for path in (tmp_path / "state").iterdir()}
        assert found == {f"feed-127.0.0.1-{port}.numbers", f"feed-127.0.0.1-{port}.numbers.lock"}


class TestOpening:
    @pytest.mark.parametrize("url", ["zmq+pub://127.0.0.1:{port}", "zmq+pub://127.0.0.1:0?replay={port}"])
    def test_a_port_in_use_is_named(self, url: str) -> None:
        """Either port; the error says what to do, and the other socket is not left bound."""
        with port_in_use() as port:
            sink = open_sink(url.format(port=port), CONTEXT)
            with pytest.raises(
                SinkOpenError, match=rf"port {port} on 127\.0\.0\.1 is in use: .*another port"
            ):
                SinkRunner(sink, "feed").start()
        again = SinkRunner(open_sink(url.format(port=port), CONTEXT), "feed")
        again.start()
        again.close()

    def test_a_host_that_is_not_ours_is_named(self) -> None:
        """An address of another machine cannot be bound, and the error says so."""
        sink = open_sink("zmq+pub://192.0.2.1:5557?connect=0&insecure=1", CONTEXT)
        with pytest.raises(
            SinkOpenError, match=r"cannot bind port 5557 on 192\.0\.2\.1 .*address of this machine"
        ):
            SinkRunner(sink, "feed").start()

    def test_leaving_the_machine_is_warned_of(self) -> None:
        """Loopback is silent; any other address is logged once with what it publishes."""
        for host, count in (("127.0.0.1", 0), ("localhost", 0), ("", 0), ("*", 1), ("0.0.0.0", 1)):
            with capture_logs() as logs:
                runner = SinkRunner(open_sink(f"zmq+pub://{host}:0?insecure=1", CONTEXT), "feed")
                runner.start()
                runner.close()
            assert [log["event"] for log in logs] == ["feed_leaves_machine"] * count

    def test_closing_without_readers_waits_for_nobody_and_leaves_no_thread(self) -> None:
        """And the server's thread ends with the feed."""
        with Worker() as worker:
            worker.settle()
        assert not {"kvcache-sink-feed", "kvcache-feed-replay"} & {
            each.name for each in threading.enumerate()
        }


class TestURL:
    def test_the_scheme_is_known(self) -> None:
        """It needs no installation."""
        assert "zmq+pub" in known_schemes()

    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("zmq+pub://127.0.0.1", "a port is required"),
            ("zmq+pub://127.0.0.1:1/path", "a path is not allowed"),
            (
                "zmq+pub://127.0.0.1:1?format=morse",
                r"format.*known options: format, tokens, engine, rank, salts",
            ),
            ("zmq+pub://127.0.0.1:1?replay=x", "replay"),
            ("zmq+pub://127.0.0.1:5557?replay=5557", "port 5557 is used for both the feed and the replay"),
            ("zmq+pub://127.0.0.1:1?replay=70000", "replay must be a port"),
            ("zmq+pub://127.0.0.1:1?rank=-1", ">= 0.*rank"),
            ("zmq+pub://127.0.0.1:1?hwm=0", ">= 1.*hwm"),
            ("zmq+pub://127.0.0.1:1?first=-1", ">= 0.*first"),
            ("zmq+pub://127.0.0.1:1?hwm=99999999999999", "<= 2147483647"),
            (
                "zmq+pub://127.0.0.1:1?coalesce=50",
                r"coalesce='50' needs a number and one of the units .*50ms",
            ),
            ("zmq+pub://127.0.0.1:1?ring=64XB", r"ring='64XB' needs a number .*64MiB"),
            ("zmq+pub://127.0.0.1:1?buffer=1", "unknown option 'buffer'"),
            ("zmq+pub://127.0.0.1:1?ring=1MiB", "requires replay="),
            ("zmq+pub://127.0.0.1:1?pad=true", "requires replay="),
            ("zmq+pub://127.0.0.1:1#5558", "it contains a #fragment"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, url: str, reason: str) -> None:
        """Each error names the option and what it should be."""
        with pytest.raises(SinkURLError, match=reason):
            open_sink(url, CONTEXT)

    @pytest.mark.parametrize("login", ["router:hidden", "hidden", ":hidden", "hidden:"])
    def test_a_login_that_nobody_asks_for_is_refused(self, login: str) -> None:
        """A password would be taken for protection; the error does not repeat it."""
        with pytest.raises(SinkURLError, match="this sink has no authentication") as raised:
            open_sink(f"zmq+pub://{login}@127.0.0.1:5557?replay=5558", CONTEXT)
        assert "hidden" not in str(raised.value)

    @pytest.mark.parametrize(("known", "model"), [("", "unknown"), ("org/m", "org/m")])
    def test_the_topic_names_pod_and_model(self, known: str, model: str) -> None:
        """The form in which llm-d looks for them: three parts, cut at @."""
        sink = open_sink("zmq+pub://127.0.0.1:0", SinkContext(8, 4, model=known))
        assert isinstance(sink, RouterFeed)
        runner = SinkRunner(sink, "feed")
        runner.start()
        transport = sink.transport
        assert isinstance(transport, ZMQTransport)
        pod = transport.endpoint.removeprefix("tcp://")
        assert transport.topic.decode().split("@") == ["kv", pod, model]
        runner.close()

    def test_a_model_that_cannot_be_in_a_topic_is_refused(self) -> None:
        """Unless the URL has the whole topic."""
        context = SinkContext(8, 4, model="a@b")
        with pytest.raises(SinkURLError, match="model must not contain one: add topic="):
            open_sink("zmq+pub://127.0.0.1:0", context)
        open_sink("zmq+pub://127.0.0.1:0?topic=t", context)


def test_opening_a_url_creates_nothing(tmp_path: Path) -> None:
    """Until its runner opens it, a feed has no socket, thread or file, so URLs can be checked beforehand."""
    descriptors = Path("/dev/fd")
    before = len(list(descriptors.iterdir()))
    open_sink(f"zmq+pub://127.0.0.1:5557?replay=5558&state={tmp_path / 'numbers'}", CONTEXT)
    assert len(list(descriptors.iterdir())) == before
    assert list(tmp_path.iterdir()) == []


def test_a_manager_reports_where_its_feeds_can_be_reached() -> None:
    """Programs find the ports that were free by the feed's transports."""
    config = KVCacheConfig(max_sequence_length=64, primary_blocks=4)
    with KVCacheManager(config, sinks=["zmq+pub://127.0.0.1:0?replay=0"]) as manager:
        (feed,) = manager.feeds
        transport = feed.transport
        assert isinstance(transport, ZMQTransport)
        assert transport.endpoint.startswith("tcp://127.0.0.1:")
        assert transport.replay_endpoint is not None
        assert not transport.endpoint.endswith(":0")

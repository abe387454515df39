"""A subscriber at real sockets, and the index that folds what it reports."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from events.feed.changes import Change, Cleared, Removed, Stored
from events.formats.vllm import decode_batch, encode_batch
from events.subscribe import continuity
from events.subscribe.continuity import Missed, Received, Report, Restarted
from events.subscribe.endpoints import EndpointError
from events.subscribe.index import GPU, HOST, STORAGE, Index, IndexedBlock, level_of
from events.subscribe.subscriber import Connection, Subscriber
from events.types import Namespace
from tests.support.columns import pack_i32
from tests.support.feeds.publisher import CLEARED, Publisher, batch, removed, replaying, stored
from tests.support.waiting import wait_until


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with Publisher() as publisher:
        yield publisher


def collect(subscriber: Subscriber, until: Callable[[list[Report]], bool]) -> list[Report]:
    """Everything reported until enough is there."""
    reports: list[Report] = []
    wait_until(
        lambda: until(reports), lambda: reports, meanwhile=lambda: reports.extend(subscriber.poll(1000))
    )
    return reports


def up_to(seq: int) -> Callable[[list[Report]], bool]:
    return lambda reports: any(isinstance(report, Received) and report.seq == seq for report in reports)


def brief(reports: list[Report]) -> list[object]:
    return [(report.seq, report.replayed) if isinstance(report, Received) else report for report in reports]


def payload(seq: int) -> bytes:
    """A batch that stores a block and tells its number by it."""
    return batch(stored(seq + 1, parent=seq or None), ts=float(seq))


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


class TestLive:
    """Messages as they come."""

    def test_batches_arrive_in_order(self, publisher: Publisher) -> None:
        """Topic, number and content of each message are reported, in the order of sending."""
        with Subscriber(publisher.endpoint) as subscriber:
            publisher.wait_subscribed()
            for seq in range(100):
                publisher.send(seq, payload(seq), b"kv@me@model")
            reports = collect(subscriber, up_to(99))
        assert reports == [
            Received(seq, "kv@me@model", decode_batch(payload(seq)), False) for seq in range(100)
        ]

    def test_large_messages_are_reported_few_at_a_time(self, publisher: Publisher) -> None:
        """What is decoded at once is bounded in bytes, and nothing is lost by that."""
        large = batch({**stored(1), "token_ids": list(range(60_000))})
        with Subscriber(publisher.endpoint) as subscriber:
            publisher.wait_subscribed()
            for seq in range(20):
                publisher.send(seq, large)
            polls = [subscriber.poll()]
            while not up_to(19)(polls[-1]):
                polls.append(subscriber.poll())
        assert max(map(len, polls)) <= 2
        assert [report.seq for report in chain(*polls) if isinstance(report, Received)] == [*range(20)]

    def test_localhost_is_where_publishers_are(self, publisher: Publisher) -> None:
        """By its name, too, a publisher at 127.0.0.1 is reached, though mostly that name means ::1 as well."""
        endpoint = publisher.endpoint.replace("127.0.0.1", "localhost")
        with Subscriber(endpoint):
            publisher.wait_subscribed()
        with zmq.Context() as context:
            line = Connection(context, zmq.SUB, endpoint)
            assert not line.socket.ipv6  # which would find ::1, and nothing else
            line.close()

    @pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
    def test_ipv6(self) -> None:
        """A publisher at ::1 is reached by that address."""
        with Publisher("tcp://[::1]:*", ipv6=True) as publisher, Subscriber(publisher.endpoint):
            publisher.wait_subscribed()

    def test_iteration(self, publisher: Publisher) -> None:
        """A subscriber can be iterated over, and its end is its closing."""
        subscriber = Subscriber(publisher.endpoint)
        publisher.wait_subscribed()
        for seq in range(3):
            publisher.send(seq, payload(seq))
        assert [report.batch.ts for report in islice(subscriber, 3) if isinstance(report, Received)] == [
            0,
            1,
            2,
        ]
        subscriber.close()
        subscriber.close()
        assert list(subscriber) == []

    def test_topic(self, publisher: Publisher) -> None:
        """Only topics that begin as wanted arrive; what others say takes no number from them."""
        with Subscriber(publisher.endpoint, topic="kv@a") as subscriber:
            publisher.wait_subscribed()
            publisher.send(0, payload(0), b"kv@b@model")
            publisher.send(7, payload(7), b"kv@a@model")
            assert brief(collect(subscriber, up_to(7))) == [(7, False)]

    def test_timeout(self, publisher: Publisher) -> None:
        """Where nothing comes, `poll` returns nothing after its time."""
        with Subscriber(publisher.endpoint) as subscriber:
            started = time.monotonic()
            assert subscriber.poll(50) == []
            assert time.monotonic() - started >= 0.05

    def test_malformed_messages_are_counted(self, publisher: Publisher) -> None:
        """Messages without a proper number are ignored and counted; those around them arrive."""
        with Subscriber(publisher.endpoint) as subscriber:
            publisher.wait_subscribed()
            publisher.send(0, payload(0))
            publisher.send_frames(b"kv", b"\0" * 7, payload(1))
            publisher.send_frames(b"kv", b"\0" * 8)
            publisher.send_frames(b"kv", b"\xff" * 8, payload(1))
            publisher.send(1, payload(1))
            assert brief(collect(subscriber, up_to(1))) == [(0, False), (1, False)]
            assert subscriber.malformed == 3

    def test_unreadable_batch(self, publisher: Publisher) -> None:
        """A batch that cannot be read is a loss with a reason, not a gap."""
        with Subscriber(publisher.endpoint) as subscriber:
            publisher.wait_subscribed()
            publisher.send(0, b"\xc1")
            publisher.send(1, payload(1))
            missed = Missed(0, 0, False, "the message is not a batch of KV events")
            assert brief(collect(subscriber, up_to(1))) == [missed, (1, False)]

    def test_publisher_that_comes_back(self) -> None:
        """A new publisher at the same place is connected to, and its lower numbers are a restart."""
        with Publisher() as first:
            endpoint = first.endpoint
            subscriber = Subscriber(endpoint)
            first.wait_subscribed()
            first.send(5, payload(5))
            reports = collect(subscriber, up_to(5))
        with subscriber, Publisher(endpoint) as second:
            # The subscription is renewed while the subscriber polls.
            wait_until(second.subscribed, meanwhile=lambda: reports.extend(subscriber.poll(20)))
            second.send(0, payload(0))
            reports += collect(subscriber, up_to(0))
        assert brief(reports) == [(5, False), Restarted(5, 0), (0, False)]

    @pytest.mark.parametrize(
        "endpoint",
        ["", "127.0.0.1:5557", "http://127.0.0.1:1", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "ipc://"],
    )
    def test_wrong_endpoints(self, endpoint: str) -> None:
        """An endpoint that can never work is refused at once, wherever it is given."""
        for publisher, replay in ((endpoint, None), ("tcp://127.0.0.1:1", endpoint)):
            with pytest.raises(EndpointError, match=r"write tcp://HOST:PORT") as caught:
                Subscriber(publisher, replay=replay)
            assert caught.value.endpoint == endpoint
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


class TestReplay:
    """What was missed is asked for."""

    @pytest.mark.parametrize("topics", [True, False], ids=["since_0_26", "before_0_26"])
    def test_late_join(self, publisher: Publisher, topics: bool) -> None:
        """Who comes late gets what was said before, then what is said live, each once; old answers serve too."""
        with (
            replaying({seq: payload(seq) for seq in range(50)}, topics=topics) as server,
            Subscriber(publisher.endpoint, replay=server.endpoint, start=0) as subscriber,
        ):
            publisher.wait_subscribed()
            for seq in range(45, 55):
                publisher.send(seq, payload(seq))
            reports = collect(subscriber, up_to(54))
            assert server.starts == [0]
        assert brief(reports) == [(seq, seq < 50) for seq in range(55)]
        assert reports[3] == Received(3, "kv" if topics else "", decode_batch(payload(3)), True)

    def test_gap_while_live(self, publisher: Publisher) -> None:
        """A gap is asked for, live messages wait for the answer, and the recovery is reported after it."""
        with (
            replaying({seq: payload(seq) for seq in range(9)}) as server,
            Subscriber(publisher.endpoint, replay=server.endpoint) as subscriber,
        ):
            server.before_end.clear()
            publisher.wait_subscribed()
            publisher.send(2, payload(2))
            publisher.send(6, payload(6))
            reports = collect(subscriber, up_to(8))
            assert server.starts == [3]
            for seq in range(7, 12):
                publisher.send(seq, payload(seq))
            assert subscriber.poll(50) == []
            server.before_end.set()
            reports += collect(subscriber, up_to(11))
        replayed = [(seq, True) for seq in range(3, 9)]
        live = [(seq, False) for seq in range(9, 12)]
        assert brief(reports) == [(2, False), *replayed, Missed(3, 5, True), *live]

    def test_publisher_forgot(self, publisher: Publisher) -> None:
        """What the answer does not hold any more is lost, with its range, before what it does hold."""
        with (
            replaying({seq: payload(seq) for seq in range(30, 40)}) as server,
            Subscriber(publisher.endpoint, replay=server.endpoint, start=0) as subscriber,
        ):
            reports = collect(subscriber, up_to(39))
        assert brief(reports) == [Missed(0, 29, False), *((seq, True) for seq in range(30, 40))]

    def test_publisher_does_not_answer(self, publisher: Publisher) -> None:
        """After the timeout what was missed is lost, and what was held goes on."""
        now = [0.0]
        with (
            replaying({}, silent=True) as server,
            Subscriber(
                publisher.endpoint, replay=server.endpoint, replay_timeout=5, clock=lambda: now[0]
            ) as subscriber,
        ):
            publisher.wait_subscribed()
            for seq in (0, 3, 4):
                publisher.send(seq, payload(seq))
            assert brief(collect(subscriber, up_to(0))) == [(0, False)]
            wait_until(lambda: server.starts == [1], meanwhile=lambda: subscriber.poll(20))
            assert subscriber.poll(20) == []  # from now on it waits for the answer
            now[0] = 4.9
            assert subscriber.poll(20) == []
            assert subscriber.unanswered_seconds == 4.9
            now[0] = 5.0
            assert brief(collect(subscriber, up_to(4))) == [Missed(1, 2, False), (3, False), (4, False)]
            assert server.starts == [1]

    def test_publisher_that_is_not_there_yet(self) -> None:
        """A subscriber may be first: its question waits for the publisher, however long that takes."""
        with replaying({0: payload(0)}) as later:
            endpoint = later.endpoint
        now = [0.0]
        with Subscriber("tcp://127.0.0.1:1", replay=endpoint, start=0, clock=lambda: now[0]) as subscriber:
            assert subscriber.poll(20) == []
            now[0] = 1e6
            assert subscriber.poll(20) == []
            with replaying({0: payload(0)}, endpoint=endpoint):
                assert brief(collect(subscriber, up_to(0))) == [(0, True)]

    def test_answers_that_make_no_sense_are_counted(self, publisher: Publisher) -> None:
        """A replayed batch of nonsense is lost with its reason; the rest of the answer counts."""
        batches = {0: payload(0), 1: b"\xc1", 2: payload(2)}
        with (
            replaying(batches) as server,
            Subscriber(publisher.endpoint, replay=server.endpoint, start=0) as subscriber,
        ):
            reports = collect(subscriber, up_to(2))
        missed = Missed(1, 1, False, "the message is not a batch of KV events")
        assert brief(reports) == [(0, True), missed, (2, True)]

    def test_compacted_answer(self, publisher: Publisher) -> None:
        """A publisher may answer with its whole state; live messages that it includes are not applied again."""
        state = batch(CLEARED, stored(1, 2, 3), ts=100.0)
        empty = batch(ts=100.0)
        with (
            replaying({5: state, 6: empty, 7: empty, 8: empty}) as server,
            Subscriber(publisher.endpoint, replay=server.endpoint) as subscriber,
        ):
            publisher.wait_subscribed()
            for seq, event in ((4, stored(9)), (7, stored(2, parent=1)), (8, stored(3, parent=2))):
                publisher.send(seq, batch(event, ts=50.0 + seq))
            publisher.send(9, batch(stored(4, parent=3), ts=101.0))
            index = Index()
            for report in collect(subscriber, up_to(9)):
                index.fold(report)
            assert server.starts == [5]
        assert index.resident() == {1, 2, 3, 4}
        assert (index.repeated_stores, index.orphans, index.missed_batches) == (0, 0, 0)

    def test_flood_during_a_long_answer(self, publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
        """More live messages than are held, during an answer of thousands, arrive once each, in order."""
        monkeypatch.setattr(continuity, "HELD_MAX", 500)
        monkeypatch.setattr("events.subscribe.subscriber.HELD_MAX", 500)
        total = 2000
        with (
            replaying({seq: payload(seq) for seq in range(total)}) as server,
            Subscriber(publisher.endpoint, replay=server.endpoint, start=0) as subscriber,
        ):
            server.before_end.clear()
            publisher.wait_subscribed()

            def flood() -> None:
                for seq in range(total, 2 * total):
                    publisher.send(seq, payload(seq))
                server.before_end.set()

            thread = threading.Thread(target=flood)
            thread.start()
            reports = collect(subscriber, lambda found: up_to(2 * total - 1)(found[-1:]))
            thread.join()
        assert brief(reports) == [(seq, seq < total) for seq in range(2 * total)]


def folded(*payloads: bytes) -> Index:
    index = Index()
    for data in payloads:
        index.apply(decode_batch(data))
    return index


class TestIndex:
    """What a router knows."""

    def test_blocks_have_parents_and_tokens(self) -> None:
        """A store of several blocks chains them, and gives each its tokens."""
        index = folded(batch(stored(10, 20)), batch(stored(30, parent=20)))
        assert index.blocks == {
            (0, GPU): {
                10: IndexedBlock(None, (10, 11)),
                20: IndexedBlock(10, (20, 21)),
                30: IndexedBlock(20, (30, 31)),
            }
        }
        assert (index.batches, index.events, index.orphans) == (2, 2, 0)

    def test_removal(self) -> None:
        """A removal concerns one group and one level only, and unknown ones are counted."""
        index = folded(
            batch(stored(1, 2), stored(1, 2, medium="CPU"), stored(1, group=3)),
            batch(removed(2), removed(2, 7, medium="CPU"), removed(5, group=3), removed(1, group=4)),
        )
        assert (index.resident(), index.resident(0, HOST), index.resident(3)) == ({1}, {1}, {1})
        assert (index.count(GPU), index.count(HOST), index.unknown_removals) == (2, 1, 3)

    def test_cleared(self) -> None:
        """AllBlocksCleared takes everything, in all groups and levels."""
        index = folded(batch(stored(1), stored(2, medium="CPU", group=1), CLEARED))
        assert index.blocks == {}

    def test_orphans(self) -> None:
        """A parent that is resident nowhere in the group makes an orphan; one in another level does not."""
        index = folded(batch(stored(1, medium="CPU"), stored(2, parent=1), stored(3, parent=9)))
        assert index.orphans == 1
        assert folded(batch(stored(1, group=1), stored(2, parent=1))).orphans == 1

    def test_what_a_sliding_window_has_left_behind_is_not_missed(self) -> None:
        """Where the window slides, a block may be there without the one before; in another group it may not."""
        slides: dict[str, Any] = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4}
        full: dict[str, Any] = {"kv_cache_spec_kind": "full_attention"}
        index = folded(batch(stored(1, parent=9, **slides), stored(1, parent=9, group=1, **full)))
        assert index.orphans == 1
        assert (index.resident(0), index.resident(1)) == ({1}, {1})
        assert index.blocks[0, GPU][1] == IndexedBlock(9, (1, 2))

    def test_repeated_stores(self) -> None:
        """A block stored twice where it is is counted; after a removal it is not."""
        assert folded(batch(stored(1, 2), stored(1))).repeated_stores == 1
        assert folded(batch(stored(1), removed(1), stored(1), stored(1, medium="CPU"))).repeated_stores == 0

    def test_tokens_that_cannot_be_distinguished(self) -> None:
        """Fewer hashes than blocks of tokens, or no tokens: the blocks are known without tokens."""
        sparse = {**stored(1, 2), "token_ids": [1, 2, 3, 4, 5, 6]}
        bare = {**stored(3, 4), "token_ids": [], "block_size": 0}
        index = folded(batch(sparse, bare))
        assert {block.tokens for block in index.blocks[0, GPU].values()} == {()}

    def test_media(self) -> None:
        """Names of media become levels; none is the GPU, and what is not known is the slowest."""
        levels = {
            medium: level_of(medium) for medium in (None, "GPU", "CPU", "cpu", "CPU_PINNED", "DISK", "X")
        }
        assert levels == {
            None: GPU,
            "GPU": GPU,
            "CPU": HOST,
            "cpu": HOST,
            "CPU_PINNED": HOST,
            "DISK": STORAGE,
            "X": STORAGE,
        }

    def test_reports(self) -> None:
        """Losses, recoveries and unknown events are counted; a restart forgets all blocks."""
        index = Index()
        index.fold(Received(0, "", decode_batch(batch(stored(1), {"type": "Later"})), False))
        index.fold(Missed(1, 4, recovered=True))
        index.fold(Missed(5, 5, recovered=False))
        assert (index.recovered_batches, index.missed_batches, index.unknown_events) == (4, 1, 1)
        assert index.resident() == {1}
        index.fold(Restarted(5, 0))
        assert (index.resident(), index.restarts) == (set(), 1)


places = st.tuples(st.integers(0, 1), st.integers(0, 1))
actions = st.one_of(
    st.tuples(st.just("store"), places, st.integers(1, 9)),
    st.tuples(st.just("remove"), places, st.integers(1, 9)),
    st.tuples(st.just("clear"), places, st.just(0)),
)


@given(st.lists(st.lists(actions, max_size=6), max_size=6))
def test_index_holds_what_changes_say(script: list[list[tuple[str, tuple[int, int], int]]]) -> None:
    """Changes that were encoded, decoded and folded leave what a plain set of (place, name) holds."""
    index, held = Index(), set[tuple[tuple[int, int], int]]()
    for step in script:
        changes: list[Change] = []
        for kind, place, name in step:
            packed = name.to_bytes(8, "big")
            if kind == "store":
                changes.append(Stored(*place, packed, b"", pack_i32([name, name]), 2, Namespace()))
                held.add((place, name))
            elif kind == "remove":
                changes.append(Removed(*place, packed))
                held.discard((place, name))
            else:
                changes.append(Cleared())
                held.clear()
        index.apply(decode_batch(encode_batch(changes, 1.0)))
    found = chain.from_iterable(((place, name) for name in blocks) for place, blocks in index.blocks.items())
    assert set(found) == held

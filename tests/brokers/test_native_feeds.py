"""All events of caches by way of brokers (``format=native``): real servers, and Kafka's mock."""

from __future__ import annotations

import random
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from events.brokers.records import StreamRecord
from events.brokers.subscriber import NativeBrokerSubscriber, NativeRecordFollower
from events.formats.native import NativeCodec
from events.subscribe.continuity import Missed, ReceivedBatch, Restarted, Restated
from kvcache.replay import Replayed
from sinks import SinkContext, SinkRunner, open_sink
from sinks.brokers import BrokerSettings, BrokerTransport
from sinks.router.native import NativeFeed
from sinks.router.numbers import FeedNumbers
from sinks.router.options import PayloadWriter
from tests.support.feeds.native import Cache, FoldingReader
from tests.support.feeds.native_feed import sent_by_a_cache
from tests.support.secrets import TOKENS, betrayed
from tests.support.seeds import seeds
from tests.support.servers.server import Server
from tests.support.waiting import WAIT, Clock, wait_until

CONTEXT = SinkContext(key_bytes=32, tokens_per_block=4, fold=Replayed)


def feeding(server: Server, options: str = "", *, min_bytes: int | None = None, **cache: Any) -> Cache:
    """A cache that feeds the stream as worker ``w``."""
    sink = open_sink(f"{server.url}?worker=w&heartbeat=200ms&format=native{options}", CONTEXT)
    assert isinstance(sink, NativeFeed)
    if min_bytes is not None:
        assert isinstance(sink.transport, BrokerTransport)
        sink.transport.settings = replace(sink.transport.settings, min_bytes=min_bytes)
    runner = SinkRunner(
        sink, "w", max_errors=4, backoff_seconds=0.05, retry_seconds=0.2, retry_seconds_max=0.5
    )
    return Cache(runner, **cache)


def settle(cache: Cache) -> None:
    (feed,) = cache.manager.feeds

    def settled() -> bool:
        (stats,) = cache.manager.sink_stats()
        return not stats.lag_batches and feed.is_settled and stats.state == "running"

    wait_until(settled, cache.manager.sink_stats)


def reading(server: Server) -> FoldingReader:
    return FoldingReader(NativeBrokerSubscriber(server.url))


@pytest.mark.parametrize("tokens", [0, 1])
def test_readers_know_what_the_manager_knows(broker: Server, tokens: int) -> None:
    """One from the start, and late ones, while the state is told again and again."""
    with ExitStack() as stack:
        early = stack.enter_context(closing(reading(broker)))
        cache = stack.enter_context(closing(feeding(broker, f"&tokens={tokens}", min_bytes=4000)))
        for _ in range(4):
            cache.steps(25)
            settle(cache)
            early.check(cache)
            with closing(reading(broker)) as late:
                late.check(cache)
        # Where it was overtaken by the trimming it hears a whole state.
        assert all(isinstance(each, Restated) for each in early.others)
        assert cache.manager.feeds[0].transport.attempts > 2  # type: ignore[attr-defined]
        assert cache.manager.sink_stats()[0].errors == 0


def test_batches_larger_than_messages_may_be(broker: Server) -> None:
    """They are cut, and put together again; a late reader finds the state among the pieces."""
    with ExitStack() as stack:
        early = stack.enter_context(closing(reading(broker)))
        cache = stack.enter_context(closing(feeding(broker, "&tokens=1&max_batch=300B", min_bytes=4000)))
        cache.steps(60)
        settle(cache)
        early.check(cache)
        assert not any(isinstance(each, Missed) for each in early.others)
        with closing(reading(broker)) as late:
            late.check(cache)
        records = broker.records("w")
        assert max(len(payload) for _, payload in records) <= 300
        assert len({tag.partition("/")[0] for tag, _ in records if "/" in tag}) > 5


def test_json(broker: Server) -> None:
    """One object for each record that is not cut."""
    with closing(feeding(broker, "-json")) as cache:
        cache.steps(20)
        settle(cache)
        reported = [msgspec.json.decode(payload) for tag, payload in broker.records("w") if "/" not in tag]
        assert {batch["seq"] for batch in reported if batch["events"]} >= set(range(1, cache.last_seq + 1))


def test_no_token_is_in_the_stream(broker: Server) -> None:
    """Unless asked for."""
    with closing(feeding(broker, min_bytes=2000, tokens=TOKENS[:6])) as cache:
        cache.steps(60)
        settle(cache)
    assert not betrayed(b"".join(payload for _, payload in broker.records("w")))
    with closing(feeding(broker, "&tokens=1", tokens=TOKENS[:6])) as cache:
        cache.steps(10)
        settle(cache)
    assert betrayed(b"".join(payload for _, payload in broker.records("w")))


def test_cache_begins_anew(broker: Server) -> None:
    """Its next life goes on in the stream, from its own state: readers are told, and follow."""
    with closing(reading(broker)) as reader:
        for seed in (3, 4):
            with closing(feeding(broker, seed=seed)) as cache:
                cache.steps(10 * seed)
                settle(cache)
                reader.check(cache)
        assert [type(each) for each in reader.others] == [Restarted]


class TestBrokerFails:
    def test_killed_and_started_again(self, server: Server) -> None:
        """Kill -9 in mid-stream: nothing is lost and nothing comes twice."""
        with ExitStack() as stack:
            early = stack.enter_context(closing(reading(server)))
            cache = stack.enter_context(closing(feeding(server, f"&timeout={WAIT}s")))
            for _ in range(3):
                cache.steps(20)
                early.read(1)
                server.kill()
                cache.steps(5)
                early.read(50)
                server.start()
            settle(cache)
            early.check(cache)
            assert early.others == []
            seqs = [batch.seq for batch in early.batches]
            assert seqs == list(range(seqs[0], seqs[-1] + 1))
            with closing(reading(server)) as late:
                late.check(cache)

    def test_away_for_longer_than_is_waited(self, server: Server) -> None:
        """The sink fails; once the broker is back it tells the state, and readers go on with that."""
        with ExitStack() as stack:
            reader = stack.enter_context(closing(reading(server)))
            cache = stack.enter_context(closing(feeding(server, "&timeout=200ms")))
            cache.steps(10)
            settle(cache)
            reader.check(cache)
            server.kill()
            cache.steps(30)
            wait_until(lambda: cache.manager.sink_stats()[0].errors >= 2)
            server.start()
            wait_until(lambda: cache.manager.sink_stats()[0].state == "running")
            cache.steps(5)
            settle(cache)
            cache.steps(1)
            reader.check(cache)
            assert any(isinstance(each, Restated) for each in reader.others)


class Kept:
    """A stream that keeps what is written to it, and trims nothing."""

    name, max_payload = "kept", 1 << 20

    def __init__(self) -> None:
        self.records: list[StreamRecord] = []

    def open(self) -> int | None: ...

    def append(self, record: StreamRecord) -> str:
        self.records.append(record)
        return str(len(self.records))

    def trim(self, place: str) -> None: ...

    def keep_alive(self) -> None: ...

    def close(self) -> None: ...


MISSED = 8
"""Fewer records than these are missing at a time."""


def received(records: list[StreamRecord]) -> bool:
    """Whether who begins here learns what is cached."""
    follower = NativeRecordFollower("w")
    return any(isinstance(report, ReceivedBatch) for record in records for report in follower.take(record))


@pytest.mark.parametrize("seed", seeds(range(10), quick=4))
def test_wherever_reading_begins_nobody_is_wrong(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are missing at the beginning and, as if trimmed, in the middle: what is known was so.

    States are told a piece at a time, with batches, whole and in pieces, in between.
    """
    monkeypatch.setattr("sinks.brokers.STATE_SLICE_SECONDS", 0)
    rng, kept = random.Random(seed), Kept()
    codec = NativeCodec("msgpack", 0)
    writer = PayloadWriter(lambda changes, *_, **__: codec.encode(changes[0].batch), is_cut=True)
    settings = BrokerSettings(piece_bytes=400, min_bytes=1000, writer=writer)
    transport = BrokerTransport(kept, settings)
    transport.clock = clock = Clock()
    sink = NativeFeed(transport, FeedNumbers(None), CONTEXT, tokens=True, heartbeat_seconds=0.01)

    def is_sent_again() -> bool:
        clock.now += settings.restate_seconds
        return sum(record.last for record in kept.records[end:]) > 1  # the first one may have begun before

    with closing(Cache(sink, seed=seed)) as cache:
        for _ in range(20):
            cache.steps(5)
            settle(cache)
        # However seldom the sink had its turn, who begins in the first third hears a whole state.
        while not received(kept.records[(third := len(kept.records) // 3) + MISSED :]):
            cache.steps(5)
            settle(cache)
        end = len(kept.records)
        wait_until(is_sent_again)
    truth, reader = (FoldingReader(None) for _ in range(2))  # type: ignore[arg-type]
    whole, follower = NativeRecordFollower("w"), NativeRecordFollower("w")
    prints, skipped, share = {}, 0, 0.01 * (seed % 2)
    begin = rng.randrange(third)
    for at, record in enumerate(kept.records[:end]):
        for report in whole.take(record):
            truth.take([report])
            prints[truth.replayed.last_seq] = truth.replayed.fingerprint
        if skipped or at < begin or rng.random() < share:
            skipped = (skipped or rng.randrange(1, MISSED)) - 1
            continue
        reader.take(follower.take(record))
        if reader.batches:
            assert reader.replayed.fingerprint == prints[reader.replayed.last_seq]
    assert truth.others == []
    assert truth.replayed.fingerprint == cache.fingerprint
    if not share:
        # It had to miss what was told before it began, and nothing after the first whole state behind that.
        assert reader.replayed.fingerprint == cache.fingerprint
        assert reader.others == []
    # Whoever waits then has it all with the next telling.
    for record in kept.records[end:]:
        reader.take(follower.take(record))
    assert not follower.waiting
    assert reader.replayed.fingerprint == cache.fingerprint


def test_numbers_that_go_back_are_another_life() -> None:
    """A worker that was given lower numbers tells its state in pieces: that is what readers go on with."""

    def state(seq: int, seed: int) -> tuple[list[StreamRecord], Cache]:
        sent, cache = sent_by_a_cache(seed)
        payload = sent.states[-1].payload
        half = len(payload) // 2
        return [
            StreamRecord(seq, payload[:half], 0, 1),
            StreamRecord(seq, payload[half:], 1, 1, last=True),
        ], cache

    follower, reader = NativeRecordFollower("w"), FoldingReader(None)  # type: ignore[arg-type]
    for seq, seed in ((900, 1), (7, 2)):
        records, cache = state(seq, seed)
        for record in records:
            reader.take(follower.take(record))
        assert reader.replayed.fingerprint == cache.fingerprint
    assert reader.others == [Restarted(900, 7)]

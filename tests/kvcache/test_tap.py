"""`kvcache tap` beside publishers on real sockets: what is lost, told twice, restarted, and taken over.

What a worker holds is compared with a dict that is fed from the wire.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest
import zmq

from events.errors import LogOfOtherKind, LogWriteFailed
from events.formats.vllm import encode_seq
from events.log import LogReader, LogWriter
from events.subscribe.fan_in import MAX_WORKERS
from events.subscribe.subscriber import Publication
from events.subscribe.workers import FeedState, WorkerState
from events.types import AnyEvent, FeedGap, FeedRestarted, Gap, WorkerSeen
from kvcache.manager import KVCacheManager
from kvcache.replay import replay
from kvcache.tap.tap import Endpoint, Tap, state_of
from tests.support.engines.traffic import config
from tests.support.feeds.publisher import CLEARED, Publisher, ReplayServer, batch, removed, replaying, stored
from tests.support.feeds.tapped import work_until
from tests.support.logs.full_disk import FullDisk, full_disk
from tests.support.waiting import wait_until

__all__ = ["full_disk"]


def names(tap_or_state: Tap | FeedState) -> list[set[Any]]:
    """Of each worker what is resident."""
    state = tap_or_state.state if isinstance(tap_or_state, Tap) else tap_or_state
    return [{name for there in worker.blocks.values() for name in there} for worker in state.workers.values()]


def the_worker(tap: Tap) -> WorkerState:
    [worker] = tap.state.workers.values()
    return worker


def events(log: Path, *kinds: type[AnyEvent]) -> list[AnyEvent]:
    return [
        event for each in LogReader(log, kind="feed") for event in each.events if isinstance(event, kinds)
    ]


@contextmanager
def tapping(log: Path, *endpoints: Endpoint, **options: Any) -> Iterator[Tap]:
    with Tap(endpoints, log, **options) as tap:
        yield tap


class Engine:
    """A publisher with a replay that has the last batches, or none."""

    def __init__(self, kept: int = 1000, *, life: float = 1.0) -> None:
        self.publisher, self.server = Publisher(), ReplayServer({})
        self.kept, self.life = kept, life
        self.seq = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.close()
        self.server.close()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.publisher.endpoint, replay=self.server.endpoint)

    def say(self, *said: Any, live: bool = True) -> None:
        """Publish a batch; not `live`: nobody hears it but who asks."""
        payload = batch(*said, ts=self.life + self.seq)
        self.server.batches[self.seq] = payload
        self.server.batches.pop(self.seq - self.kept, None)
        if live:
            self.publisher.send(self.seq, payload)
        self.seq += 1

    def wait_received(self) -> None:
        """Wait until somebody listens; who has gone may be told of before."""
        wait_until(lambda: self.publisher.subscribed(100), "nobody listens")

    def restart(self) -> None:
        """Begin anew, later."""
        self.server.batches.clear()
        self.seq, self.life = 0, self.life + 1000


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as made:
        yield made


def test_log_has_what_is_reported(engine: Engine, tmp_path: Path) -> None:
    """What was said before, live, and missed in between is in the log, whose fold is what is resident."""
    engine.say(stored(10, 20))
    with tapping(tmp_path, engine.endpoint) as tap:
        engine.wait_received()
        work_until(tap, lambda: names(tap) == [{10, 20}])
        engine.say(stored(30, parent=20, medium="CPU"))
        engine.say(removed(20), live=False)
        engine.say(stored(40))
        work_until(tap, lambda: names(tap) == [{10, 30, 40}])
        assert the_worker(tap).complete
        assert tap.recorder.recovered == 1
    assert names(state_of(tmp_path)) == [{10, 30, 40}]
    assert [event.topic for event in events(tmp_path, WorkerSeen)] == ["kv"]  # type: ignore[union-attr]


def test_what_cannot_be_replayed_is_a_loss(engine: Engine, tmp_path: Path) -> None:
    """Behind batches that are lost for good only what is told afterwards is known, until all is cleared."""
    engine.kept = 1
    with tapping(tmp_path, engine.endpoint) as tap:
        engine.wait_received()
        engine.say(stored(10))
        work_until(tap, lambda: names(tap) == [{10}])
        for name in (20, 30, 40):
            engine.say(stored(name), live=False)
        engine.say(stored(50))
        work_until(tap, lambda: names(tap) == [{50}])
        assert not the_worker(tap).complete
        engine.say(removed(20))
        engine.say(CLEARED, stored(60))
        work_until(tap, lambda: names(tap) == [{60}])
        assert the_worker(tap).complete
        assert the_worker(tap).unknown_removals == 1
    [gap] = events(tmp_path, FeedGap)
    assert isinstance(gap, FeedGap)
    assert (gap.first, gap.last) == (1, 3)


def test_without_a_replay_what_was_before_is_unknown(tmp_path: Path) -> None:
    """Who listens from the middle on says so; who hears the first batch, or "cleared", knows everything."""
    for first, said, complete in (
        (7, (stored(1),), False),
        (0, (stored(1),), True),
        (7, (CLEARED, stored(1)), True),
    ):
        log = tmp_path / f"{first}-{len(said)}"
        with Publisher() as publisher, tapping(log, Endpoint(publisher.endpoint)) as tap:
            publisher.wait_subscribed()
            publisher.send(first, batch(*said))
            work_until(tap, lambda tap=tap: names(tap) == [{1}])  # type: ignore[misc]
            assert the_worker(tap).complete == complete
            publisher.send(first + 2, batch(stored(2)))
            work_until(tap, lambda tap=tap: names(tap) == [{2}])  # type: ignore[misc]
            assert not the_worker(tap).complete


def test_a_restarted_engine_is_known_by_its_numbers(engine: Engine, tmp_path: Path) -> None:
    """When numbers go back, nothing holds that was said before."""
    with tapping(tmp_path, engine.endpoint) as tap:
        engine.wait_received()
        for name in (10, 20, 30):
            engine.say(stored(name))
        work_until(tap, lambda: names(tap) == [{10, 20, 30}])
        engine.restart()
        engine.say(stored(40))
        engine.say(stored(50))
        work_until(tap, lambda: names(tap) == [{40, 50}])
        assert the_worker(tap).complete
    assert len(events(tmp_path, FeedRestarted)) == 1


def test_a_loss_may_have_been_of_a_rank_that_was_not_received_yet(tmp_path: Path) -> None:
    """Of one publisher with several ranks: whoever is heard later was not heard from the start."""
    with Publisher() as publisher, tapping(tmp_path / "log", Endpoint(publisher.endpoint)) as tap:
        publisher.wait_subscribed()
        publisher.send(0, batch(CLEARED, rank=0))
        publisher.send(1, batch(stored(1), rank=1))
        publisher.send(4, batch(stored(2), rank=0))
        publisher.send(5, batch(stored(3), rank=2))
        publisher.send(6, batch(CLEARED, stored(4), rank=3))
        work_until(tap, lambda: tap.recorder.batches == 5)
        complete = {worker.seen.rank: worker.complete for worker in tap.state.workers.values()}
        assert complete == {0: False, 1: False, 2: False, 3: True}
    with Publisher() as publisher, tapping(tmp_path / "other", Endpoint(publisher.endpoint)) as tap:
        publisher.wait_subscribed()
        publisher.send(7, batch(stored(1), rank=0))
        publisher.send(8, batch(stored(2), rank=1))
        work_until(tap, lambda: tap.recorder.batches == 2)
        assert not any(worker.complete for worker in tap.state.workers.values())


class TestGoingOn:
    """A tap that is started again on its log."""

    def first(self, engine: Engine, log: Path) -> None:
        with tapping(log, engine.endpoint) as tap:
            engine.wait_received()
            for name in (10, 20, 30):
                engine.say(stored(name), stored(7))
            work_until(tap, lambda: names(tap) == [{10, 20, 30, 7}])

    def test_same_life(self, engine: Engine, tmp_path: Path) -> None:
        """What the engine has said meanwhile is asked for, and what was known holds, copies included."""
        self.first(engine, tmp_path)
        engine.say(removed(10, 7), live=False)
        engine.say(stored(40), live=False)
        with tapping(tmp_path, engine.endpoint, resume=True) as tap:
            work_until(tap, lambda: names(tap) == [{20, 30, 40, 7}])
            assert the_worker(tap).complete
            assert set(the_worker(tap).copies.values()) == {2}
            assert engine.server.starts[-1] == 2
        assert names(state_of(tmp_path)) == [{20, 30, 40, 7}]

    def test_another_life(self, engine: Engine, tmp_path: Path) -> None:
        """An engine that has restarted is found out, also if it has said as much as the first one by now."""
        self.first(engine, tmp_path)
        engine.restart()
        for name in (50, 60, 70, 80):
            engine.say(stored(name), live=False)
        with tapping(tmp_path, engine.endpoint, resume=True) as tap:
            work_until(tap, lambda: names(tap) == [{50, 60, 70, 80}])
            assert the_worker(tap).complete
            assert engine.server.starts[-2:] == [2, 0]

    def test_short_life(self, engine: Engine, tmp_path: Path) -> None:
        """Of an engine that has restarted and said less, nothing is taken over that was there before."""
        self.first(engine, tmp_path)
        engine.restart()
        engine.say(stored(50), live=False)
        with tapping(tmp_path, engine.endpoint, resume=True) as tap:
            engine.wait_received()
            tap.work(0.3)
            assert names(tap) == []
            engine.say(stored(60))
            work_until(tap, lambda: names(tap) == [{50, 60}])
            assert the_worker(tap).complete

    def test_too_late(self, engine: Engine, tmp_path: Path) -> None:
        """Of an engine that has forgotten what was heard last nobody knows whether it is the same: a loss."""
        self.first(engine, tmp_path)
        engine.kept = 2
        for name in (40, 50, 60):
            engine.say(removed(10), stored(name), live=False)
        engine.server.batches = {seq: engine.server.batches[seq] for seq in (4, 5)}
        with tapping(tmp_path, engine.endpoint, resume=True) as tap:
            work_until(tap, lambda: names(tap) == [{50, 60}])
            assert not the_worker(tap).complete

    def test_without_a_replay(self, tmp_path: Path) -> None:
        """Who cannot be asked proves nothing: what was known is forgotten."""
        with Publisher() as publisher:
            with tapping(tmp_path, Endpoint(publisher.endpoint)) as tap:
                publisher.wait_subscribed()
                publisher.send(0, batch(stored(1)))
                work_until(tap, lambda: names(tap) == [{1}])
            with tapping(tmp_path, Endpoint(publisher.endpoint), resume=True) as tap:
                while not publisher.subscribed(100):
                    pass
                publisher.send(1, batch(stored(2)))
                work_until(tap, lambda: names(tap) == [{2}])
                assert not the_worker(tap).complete


def test_several_engines_in_one_log(tmp_path: Path) -> None:
    """Each endpoint is a worker of its own, and so is each rank."""
    with (
        Publisher() as first,
        Publisher() as second,
        tapping(tmp_path, Endpoint(first.endpoint), Endpoint(second.endpoint)) as tap,
    ):
        first.wait_subscribed()
        second.wait_subscribed()
        first.send(0, batch(stored(1)))
        second.send(0, batch(stored(2), rank=1))
        second.send(1, batch(stored(3), rank=2))
        work_until(tap, lambda: sum(map(len, names(tap))) == 3)
        found = {worker.name: worker.num_blocks for worker in tap.state.workers.values()}
        assert found == {first.endpoint: 1, f"{second.endpoint}#1": 1, f"{second.endpoint}#2": 1}
        second.send(5, batch(stored(4), rank=2))
        work_until(tap, lambda: set().union(*names(tap)) == {1, 4})


def test_many_engines_connect(tmp_path: Path) -> None:
    """Where an endpoint is bound, feeds connect to it, are told apart by their topics, and are asked for all."""
    endpoint = Endpoint("tcp://127.0.0.1:0", replay=True, binds=True)
    with tapping(tmp_path, endpoint) as tap:
        [address] = tap.endpoints
        url = f"zmq+pub://{address.removeprefix('tcp://')}?connect=1&replay=127.0.0.1:0&coalesce=0"
        managers = [KVCacheManager(config(), sinks=[url]) for _ in range(2)]
        for number, manager in enumerate(managers):
            manager.add_sequence("r", list(range(9 + 4 * number)))
            manager.start_transfers()
            manager.store_context_blocks("r", 9 + 4 * number)
            manager.flush()
        work_until(tap, lambda: len(names(tap)) == 2 and all(names(tap)))
        sizes = sorted(map(len, names(tap)))
        assert len(set(sizes)) == 2
        for manager in managers:
            manager.close()


def test_what_is_not_received_is_counted(tmp_path: Path) -> None:
    """Engines that are too many, and endpoints at which nobody speaks."""
    with tapping(
        tmp_path / "log", Endpoint("tcp://127.0.0.1:0", binds=True), Endpoint("tcp://127.0.0.1:1")
    ) as tap:
        with zmq.Context() as context, context.socket(zmq.PUB) as socket:
            socket.linger = 0
            socket.connect(tap.endpoints[0])

            def too_many() -> bool:
                for number in range(MAX_WORKERS + 1):
                    socket.send_multipart([b"%d" % number, encode_seq(0), batch(CLEARED)])
                tap.work(0.05)
                return tap.ignored > 0

            wait_until(too_many, "nobody is ignored")
        assert tap.silent == {"tcp://127.0.0.1:1"}
        work_until(tap, lambda: len(tap.state.workers) == MAX_WORKERS)


def test_a_disk_that_refuses(
    engine: Engine, tmp_path: Path, full_disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had no room is told as missing once the disk takes the log again, with all that is known behind it."""
    log, writers = tmp_path / "log", list[LogWriter]()

    def open_writer(*args: Any, **options: Any) -> LogWriter:
        writers.append(LogWriter(*args, max_queued_batches=3, **options))
        return writers[0]

    monkeypatch.setattr("kvcache.tap.tap.LogWriter", open_writer)
    with tapping(log, engine.endpoint) as tap:
        [writer] = writers
        engine.wait_received()
        engine.say(stored(1))
        work_until(tap, lambda: names(tap) == [{1}])
        writer.flush()
        with full_disk():
            for name in range(2, 40):
                engine.say(stored(name), removed(name - 1))
            work_until(tap, lambda: names(tap) == [{39}])
            assert tap.log_stats().state == "suspended"
        with suppress(LogWriteFailed):
            writer.flush()
        work_until(tap, lambda: not writer.has_lost)
        engine.say(stored(50))
        work_until(tap, lambda: names(tap) == [{39, 50}])
    assert events(log, Gap)
    assert names(state_of(log)) == [{39, 50}]


class TestKinds:
    """Logs of caches and of what engines published are not taken for each other."""

    def test_readers_and_writers(self, engine: Engine, tmp_path: Path) -> None:
        """Whoever wants the one is told that it is the other."""
        reported, cache = tmp_path / "told", tmp_path / "cache"
        tapping_engine = tapping(reported, engine.endpoint)
        with tapping_engine:
            pass
        KVCacheManager(config(), log=LogWriter(cache)).close()
        with pytest.raises(LogOfOtherKind, match="kvcache tap"):
            replay(reported)
        with pytest.raises(LogOfOtherKind):
            LogWriter(reported, resume=True)
        with pytest.raises(LogOfOtherKind, match="another directory"):
            state_of(cache)
        with pytest.raises(LogOfOtherKind):
            Tap([engine.endpoint], cache, resume=True)


def test_without_tokens(engine: Engine, tmp_path: Path) -> None:
    """No token, salt, or anything else that may tell of a prompt goes to disk then."""
    with tapping(tmp_path, engine.endpoint, record_tokens=False) as tap:
        engine.wait_received()
        engine.say(stored(1_234_567, extra_keys=[["my-salt"]], cache_salt="my-salt", kv_cache_spec_kind="x"))
        work_until(tap, lambda: names(tap) == [{1_234_567}])
    data = b"".join(path.read_bytes() for path in tmp_path.glob("*.kvlog"))
    assert b"my-salt" not in data
    assert (1_234_568).to_bytes(4, "little") not in data
    assert names(state_of(tmp_path)) == [{1_234_567}]


def test_silence_of_a_replay_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that never answers keeps live batches waiting for a limited time only."""
    defaults = Publication.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "replay_timeout", 0.05)
    with (
        Publisher() as publisher,
        replaying({}, silent=True) as server,
        tapping(tmp_path, Endpoint(publisher.endpoint, replay=server.endpoint)) as tap,
    ):
        publisher.wait_subscribed()
        publisher.send(4, batch(stored(1)))
        work_until(tap, lambda: names(tap) == [{1}])
        assert not the_worker(tap).complete

"""Whatever happens to the engine, the network and the routers: when it is quiet again, routers know what is cached.

Only what a router can see is believed: real sockets, the public subscriber, an index that counts what must never
come. What is wrong is told with the seed that it came from; since threads and sockets keep their own time, a seed
repeats the misfortunes, not every interleaving.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from events.feed.changes import Change, Cleared, Stored
from events.feed.fold import Feed
from events.subscribe import subscriber
from events.subscribe.continuity import Continuity, Missed, Received
from events.types import EventBatch
from kvcache import KVCacheManager
from sinks import Sink
from tests.support.feeds.chaos import CONFIG, ChildEngine, Engine, HalfReader, LossyForwarder, Router, Site
from tests.support.feeds.feed_source import Reader
from tests.support.feeds.messages import message
from tests.support.feeds.strict import resident_in
from tests.support.feeds.workers import Router as PlainRouter
from tests.support.feeds.workers import Worker, churn
from tests.support.seeds import seeds
from tests.support.waiting import WAIT

ROUTERS = 5
Start = Callable[[Site, random.Random], "Engine | ChildEngine"]


class Chaos:
    """An engine, its routers, and what befalls them."""

    def __init__(self, seed: int, directory: Path, start: Start, resources: ExitStack) -> None:
        self.rng = random.Random(seed)
        self.site = Site.choose(directory, seed)
        self.resources = resources
        self._start = start
        self.engine: Engine | ChildEngine | None = None
        self.trouble = 0
        """Rounds that the engine is down or stalled for."""
        self.happened: list[str] = []
        self.forwarder = LossyForwarder(self.site.endpoint, random.Random(seed))
        resources.callback(self.forwarder.close)
        self.half_readers: list[HalfReader] = []
        resources.callback(self._close_half_readers)
        endpoints = [self.site.endpoint, self.forwarder.endpoint]
        self.routers = [Router(endpoints[number % 2], self.site) for number in range(ROUTERS)]
        for router in self.routers:
            resources.callback(router.leave)
        self.routers[0].connect(anew=True)  # before there is an engine; the others join late
        self._start_engine()
        resources.callback(self._end)

    def run(self, seconds: float, rate: float) -> None:
        """Work, and have `rate` misfortunes per round."""
        misfortunes = [
            *[self._end_engine, self._interrupt] * 2,
            self._stall_engine, self._fail_once, self._lose, self._read_half,
            *[self._put_to_sleep, self._disconnect, self._come] * 2,
        ]  # fmt: skip
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._round()
            if self.rng.random() < rate:
                self.rng.choice(misfortunes)()

    def check(self) -> None:
        """Let all come to rest; then every router must know exactly what is resident."""
        self.forwarder.loss = 0
        self._recover()
        assert self.engine is not None
        resident, last_seq = self.engine.settle()
        for router in self.routers:
            router.asleep = 0
            if router.subscriber is None:
                router.connect(anew=self.rng.random() < 0.5)
        self._wait_for(last_seq)
        for number, router in enumerate(self.routers):
            wrong = router.reported ^ resident
            assert not wrong, f"router {number}: {sorted(wrong, key=str)[:5]}"
            assert not router.faults, f"router {number}: {router.faults}"
        assert any(router.recovered for router in self.routers)

    def _wait_for(self, last_seq: int) -> None:
        deadline = time.monotonic() + WAIT
        while not all(router.has_received(last_seq) for router in self.routers):
            late = [router.next_seq for router in self.routers]
            assert time.monotonic() < deadline, f"routers do not get to {last_seq}: {late}"
            for router in self.routers:
                router.look(1)

    def _round(self) -> None:
        if self.trouble:
            self.trouble -= 1
            if not self.trouble:
                self._recover()
        if self.engine is not None:
            self.engine.step()
        for number, router in enumerate(self.routers):
            router.look(int(number == 0))
        for reader in self.half_readers[-1:]:
            if self.rng.random() < 0.5:
                reader.read()

    # -- the engine

    def _start_engine(self) -> None:
        self.engine = self._start(self.site, self.rng)

    def _recover(self) -> None:
        self.trouble = 0
        if self.engine is None:
            self._start_engine()
        else:
            self.engine.go_on()

    def _end(self) -> None:
        if self.engine is not None:
            self.engine.kill()

    def _end_engine(self) -> None:
        if self.engine is None:
            return
        kill = self.rng.random() < 0.5
        self.happened.append("kill" if kill else "stop")
        engine, self.engine = self.engine, None
        if kill:
            engine.kill()
        else:
            engine.stop()
        self.trouble = self.rng.choice([1, 10, 50])

    def _stall_engine(self) -> None:
        if self.engine is not None and not self.trouble:
            self.happened.append("stall")
            self.engine.stall()
            self.trouble = self.rng.choice([5, 60])

    def _fail_once(self) -> None:
        if self.engine is not None and not self.trouble:
            self.happened.append("fail once")
            self.engine.fail_once()

    # -- the network and the routers

    def _lose(self) -> None:
        self.forwarder.loss = self.rng.choice([0, 0.1, 0.5, 1])
        self.happened.append(f"lose {self.forwarder.loss}")

    def _read_half(self) -> None:
        self.happened.append("read half")
        if len(self.half_readers) > 3:
            self.half_readers.pop(0).close()
        self.half_readers.append(HalfReader(self.site))

    def _close_half_readers(self) -> None:
        for reader in self.half_readers:
            reader.close()

    def _put_to_sleep(self) -> None:
        self.happened.append("sleep")
        self.rng.choice(self.routers).asleep = self.rng.choice([5, 50, 200])

    def _disconnect(self) -> None:
        self.happened.append("disconnect")
        self.rng.choice(self.routers).leave()

    def _interrupt(self) -> None:
        """Who is reading an answer comes back in the middle of it."""
        for router in self.routers:
            if router.subscriber is not None and router.subscriber._follower.asking is not None:
                self.happened.append("interrupt")
                router.connect(anew=False)

    def _come(self) -> None:
        anew = self.rng.random() < 0.5
        self.happened.append("join" if anew else "come back")
        gone = [router for router in self.routers if router.subscriber is None]
        self.rng.choice(gone or self.routers).connect(anew=anew)


class Engines:
    """Starts engines in this process; some go on from the state of the one before."""

    def __init__(self) -> None:
        self._previous: Engine | None = None

    def __call__(self, site: Site, rng: random.Random) -> Engine:
        goes_on = self._previous is not None and rng.random() < 0.4
        state = self._previous.manager.state if goes_on and self._previous is not None else None
        self._previous = Engine(site, rng, state)
        return self._previous


def endure(seed: int, directory: Path, start: Start, seconds: float, rate: float) -> None:
    with ExitStack() as resources:
        chaos = Chaos(seed, directory, start, resources)
        try:
            chaos.run(seconds, rate)
            chaos.check()
        except Exception as error:
            report = f"seed {seed}, {chaos.site.options}, after {', '.join(chaos.happened[-12:])}"
            raise AssertionError(f"{report}: {error}") from error


@pytest.fixture(autouse=True)
def small_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subscribers read little at a time, so that they are interrupted in the middle of answers."""
    monkeypatch.setattr(subscriber, "READ_AT_ONCE", 1000)


@pytest.mark.parametrize("seed", seeds(range(12), quick=2))
def test_routers_know_what_is_cached_whatever_happened(seed: int, tmp_path: Path) -> None:
    """After crashes, stalls, losses and broken-off replays each index equals the residency, and none saw nonsense."""
    endure(seed, tmp_path, Engines(), 1.2, 0.1)


@pytest.mark.long
def test_routers_know_what_is_cached_after_processes_were_killed(tmp_path: Path) -> None:
    """The same with engines in processes of their own, killed and stopped by signals, for a minute."""
    seed = random.SystemRandom().randrange(1 << 30)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        directory = tmp_path / str(seed)
        directory.mkdir()
        endure(seed, directory, ChildEngine, 12, 0.02)
        seed += 1


class TestFirstCauses:
    """Single misfortunes that the chaos above is made of, without chance."""

    @pytest.mark.parametrize("read", [1, 2, 5])
    @pytest.mark.parametrize("pad", [False, True])
    def test_the_rest_of_a_state_is_the_whole_state(self, read: int, pad: bool) -> None:
        """Who has read a part of a compacted answer and asks for the rest ends with the state as it is."""
        with Worker(f"coalesce=0&ring=64KiB&max_batch=1KiB&pad={pad}") as worker, PlainRouter() as router:
            churn(worker, 200)
            worker.settle()
            ring, late, start = worker.transport._ring, Reader(), 0
            answer = router.ask(worker, bytes(8))
            numbers = [int.from_bytes(frames[2], "big") for frames in answer]
            for frames in answer[:read]:
                late.take_payload(frames[3])
            start = numbers[read - 1] + 1
            assert pad or ring.get(start) is not None
            for frames in router.ask(worker, start.to_bytes(8, "big")):
                late.take_payload(frames[3])
            router.replay(worker, 0)
            assert late.state == router.reader.state
            assert len(late.state) == 3 * len(worker.source.slots)

    def test_an_answer_that_breaks_off_is_completed_first(self) -> None:
        """Live messages wait until the rest was asked for, too; if it never comes, the part is called missed."""
        continuity = Continuity(0, can_ask=True)
        assert continuity.take_request() == 0
        continuity.answer(message(0))
        continuity.live(message(1))
        continuity.end_of_replay(complete=False)
        assert continuity.take_request() == 1
        assert [type(report) for report in continuity.take()] == [Received]
        continuity.end_of_replay(complete=False)
        missed, received = continuity.take()
        assert isinstance(missed, Missed)
        assert (missed.first, missed.last, missed.recovered) == (0, 0, False)
        assert isinstance(received, Received)
        assert received.seq == 1

    def test_a_state_that_a_cache_begins_with_is_reported(self) -> None:
        """A manager that goes on from a state tells its blocks once, of each window, after clearing."""
        with KVCacheManager(CONFIG, log=None) as manager:
            manager.add_sequence(1, [1, 2, 3, 4, 5])
            manager.store_context_blocks(1, 5)
            manager.flush()
            feed, changes = Feed(), list[Change]()
            with KVCacheManager.resume(manager.state, sinks=[Folding(feed, changes)]) as resumed:
                resumed.add_tokens([1], [6])
        assert [type(change) for change in changes] == [Cleared, Stored, Stored]
        assert len(resident_in(feed, 0, 0)) == len(resident_in(feed, 1, 0)) == 2


class Folding(Sink):
    """A sink that folds."""

    def __init__(self, feed: Feed, changes: list[Change]) -> None:
        self._feed, self._changes = feed, changes

    def open(self) -> None:
        """Nothing to open."""

    def write(self, batch: EventBatch) -> None:
        self._changes += self._feed.fold(batch)

    def close(self) -> None:
        """Nothing to close."""

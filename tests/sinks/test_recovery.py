"""Sinks that fail for a while: tried again, told what they missed, and whole again at the end."""

from __future__ import annotations

import errno
import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from events.subscribe.index import Index
from events.subscribe.subscriber import Subscriber
from events.types import EventBatch, Gap, StateExported
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.fold.state import resident_names
from sinks import SinkContext, SinkOpenError, SinkRunner, SinkStats, open_sink, state_file
from sinks.base import Overflow, State
from sinks.prometheus import BlockMetrics, MetricsCollector
from sinks.router import numbers as feed_numbers
from sinks.router.feed import RouterFeed
from sinks.router.zmq import ZMQTransport
from tests.oracles.json_reader import from_json
from tests.support.commands import RunPython
from tests.support.feeds.sinks import RecordingSink, check_stream, gaps, make_batch
from tests.support.seeds import seeds
from tests.support.waiting import WAIT, Clock, wait_until

QUICK: dict[str, Any] = {
    "max_errors": 2,
    "backoff_seconds": 0.001,
    "retry_seconds": 0.002,
    "retry_seconds_max": 0.02,
}
FULL = OSError(errno.ENOSPC, "No space left on device")


class Broken(RecordingSink):
    """Raises from the methods in `fails`, and knows how often it was to be opened and whether it is open."""

    def __init__(self, *fails: str) -> None:
        super().__init__()
        self.fails = set(fails)
        self.opened = self.closings = self.holds = 0

    def open(self) -> None:
        assert self.holds == 0
        self.opened += 1
        self._fail("open")
        self.holds = 1

    def write(self, batch: EventBatch) -> None:
        self._fail("write")
        super().write(batch)

    def tick(self) -> None:
        self._fail("tick")

    def close(self) -> None:
        assert self.holds == 1
        self.closings += 1
        self.holds = 0
        self._fail("close")

    def _fail(self, method: str) -> None:
        if method in self.fails:
            raise FULL


def wait_for_state(runner: SinkRunner, state: State) -> None:
    wait_until(lambda: runner.stats().state == state)


def thread_of(runner: SinkRunner) -> list[threading.Thread]:
    """The runner's thread, while there is one."""
    return [thread for thread in threading.enumerate() if thread.name == f"kvcache-sink-{runner.name}"]


class Feeder:
    """Puts a batch a moment, on a thread of its own, and looks at the accounts after each."""

    def __init__(self, runner: SinkRunner) -> None:
        self._runner = runner
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.put = 0
        self.wrong: list[SinkStats] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(0.0003):
            self._runner.put(make_batch(self.put))
            self.put += 1
            stats = self._runner.stats()
            if stats.batches + stats.dropped_batches + stats.lag_batches != self.put or stats.lag_batches < 0:
                self.wrong.append(stats)

    def more(self, batches: int = 20) -> None:
        """Wait until so many more were put."""
        enough = self.put + batches
        wait_until(lambda: self.put >= enough)


class TestRunner:
    """Any sink."""

    @pytest.mark.parametrize("fails", [("write",), ("tick",), ("write", "open"), ("write", "tick", "close")])
    @pytest.mark.parametrize("overflow", ["drop_oldest", "drop_newest"])
    def test_goes_on_when_it_works_again(self, fails: tuple[str, ...], overflow: Overflow) -> None:
        """What is put meanwhile is lost to gaps, all else arrives, accounts hold at any time, each turn is reported."""
        sink = Broken()
        runner = SinkRunner(sink, "broken", overflow=overflow, clock=Clock(), **QUICK)
        with capture_logs() as logs:
            runner.start()
            with Feeder(runner) as feeder:
                feeder.more()
                for _ in range(2):
                    sink.fails = set(fails)
                    wait_for_state(runner, "quarantined")
                    feeder.more()
                    wait_until(lambda: runner.stats().lag_batches <= 1)
                    sink.fails = set()
                    wait_for_state(runner, "running")
                    feeder.more()
            runner.close()
        assert feeder.wrong == []
        check_stream(sink.stream, feeder.put)
        lost = sum(gap.last_seq - gap.first_seq + 1 for gap in gaps(sink.stream))
        stats = runner.stats()
        assert (stats.state, stats.lag_batches) == ("closed", 0)
        assert (stats.dropped_batches, stats.batches) == (lost, feeder.put - lost)
        reported = [log["event"] for log in logs]
        turn = ["sink_quarantined", "sink_recovered"]
        assert reported == ["sink_fails", *turn, *turn, "sink_lost_batches"]
        assert sink.holds == 0

    def test_one_that_was_slow_to_open_loses_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where `start` did not wait for the failure, batches stay in the queue until the sink can be opened."""
        monkeypatch.setattr("sinks.runner.OPEN_SECONDS", 0.01)
        may_fail = threading.Event()

        class Slow(Broken):
            def open(self) -> None:
                may_fail.wait(WAIT)
                super().open()

        sink = Slow("open")
        runner = SinkRunner(sink, "slow", **QUICK)
        runner.start()
        runner.put(make_batch(0))
        may_fail.set()
        wait_for_state(runner, "quarantined")
        runner.put(make_batch(1))
        assert runner.stats().lag_batches == 2
        wait_until(lambda: sink.opened > 3)
        sink.fails = set()
        sink.wait_for(1)
        runner.close()
        assert sink.seqs() == [0, 1]
        assert gaps(sink.stream) == []

    def test_one_that_start_has_refused_is_not_tried_again(self) -> None:
        """After SinkOpenError nothing goes on in the background."""
        tried_again = threading.Event()

        class Dawdling(SinkRunner):
            """As on a machine that lets the starting thread wait for a processor before it refuses the sink."""

            def close(self) -> None:
                tried_again.wait(0.1)  # which is never set
                super().close()

        def pause(closing: threading.Event, seconds: float) -> bool:
            if not closing.is_set():
                tried_again.set()
            return closing.wait(seconds)

        sink = Broken("open")
        runner = Dawdling(sink, "refused", pause=pause, **QUICK)
        with pytest.raises(SinkOpenError, match="could not be opened"):
            runner.start()
        wait_until(lambda: not thread_of(runner))
        assert not tried_again.is_set()
        assert (sink.opened, sink.closings, runner.stats().state) == (1, 0, "quarantined")

    @pytest.mark.parametrize("fails", ["write", "open"])
    def test_close_waits_for_no_pause(self, fails: str) -> None:
        """A runner in a pause of an hour ends, its sink closed as often as it was opened."""
        sink = Broken("write")
        runner = SinkRunner(sink, "broken", max_errors=1, retry_seconds=3600)
        runner.start()
        sink.fails.add(fails)
        runner.put(make_batch(0))
        wait_for_state(runner, "quarantined")
        wait_until(lambda: sink.closings == 1)
        runner.put(make_batch(1))
        runner.close()
        assert not thread_of(runner)
        assert (sink.opened, sink.closings) == (1, 1)
        assert runner.stats().dropped_batches == 2

    def test_what_cannot_be_opened_is_reported_once(self) -> None:
        """By the error, not in the log besides; where opening takes long, there is no error to tell it."""
        with capture_logs() as logs, pytest.raises(SinkOpenError, match="No space left"):
            SinkRunner(Broken("open"), "poor").start()
        assert logs == []
        sink, late = Broken("open"), threading.Event()
        fail = sink.open
        sink.open = lambda: fail() if late.wait(WAIT) else None  # type: ignore[method-assign]
        runner = SinkRunner(sink, "slow", retry_seconds=3600)
        with pytest.MonkeyPatch.context() as patch, capture_logs() as logs:
            patch.setattr("sinks.runner.OPEN_SECONDS", 0.01)
            runner.start()
            late.set()
            wait_until(lambda: bool(logs))
            runner.close()
        assert [log["event"] for log in logs] == ["sink_quarantined"]

    @pytest.mark.parametrize("fails", ["write", "tick"])
    def test_failing_is_reported_before_anything_is_given_up(
        self, fails: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Once, also if it fails again soon, and so is the end of it; the state and the metric say it all the while."""
        sink = Broken()
        runner = SinkRunner(sink, "poor", max_errors=10**6, backoff_seconds=0.001)
        manager = KVCacheManager(KVCacheConfig(max_sequence_length=64, primary_blocks=4))

        def up() -> float:
            collector = MetricsCollector(BlockMetrics(), "m")
            collector.probe = Mock(wraps=manager, step_times=None, sink_stats=lambda: [runner.stats()])
            families = {each.name: each for each in collector.collect()}
            return families["kvcache_sink_up"].samples[0].value

        with capture_logs() as logs:
            runner.start()
            for _ in range(3):
                assert up() == 1
                sink.fails = {fails}
                runner.put(make_batch(0))
                wait_for_state(runner, "failing")
                assert up() == 0
                sink.fails = set()
                runner.put(make_batch(0))
                wait_for_state(runner, "running")
            assert [log["event"] for log in logs] == ["sink_fails", "sink_recovered"]
            assert "No space left" in logs[0]["last_error"]
            monkeypatch.setattr("sinks.runner.SILENCE_SECONDS", 0.0)
            sink.fails = {fails}
            runner.put(make_batch(0))
            wait_for_state(runner, "failing")
            wait_until(lambda: len(logs) > 2)
            # Without silence every further try that fails is reported, and there may have been some.
            assert {log["event"] for log in logs[2:]} == {"sink_fails"}
            runner.close()
        assert runner.stats().state == "closed"

    def test_it_is_not_taken_for_well_before_it_has_taken_the_gap(self) -> None:
        """A sink that can be opened but not written to, as on a full disk, is neither reported nor fed again."""
        sink = Broken("write")
        runner = SinkRunner(sink, "full", **QUICK)
        with capture_logs() as logs:
            runner.start()
            for seq in range(5):
                runner.put(make_batch(seq))
            wait_until(lambda: sink.opened > 5)
            assert runner.stats().state == "quarantined"
            runner.close()
        reported = [log["event"] for log in logs]
        assert reported == ["sink_fails", "sink_quarantined", "sink_lost_batches"]
        assert sink.opened == sink.closings

    def test_pauses_go_on_growing_where_it_fails_soon_again(self) -> None:
        """A sink that takes gaps but no batch is not tried every second for ever."""
        pauses: list[float] = []

        class OnlyGaps(RecordingSink):
            def write(self, batch: EventBatch) -> None:
                if not gaps([batch]):
                    raise FULL

        def note(closing: threading.Event, seconds: float) -> bool:
            pauses.append(seconds)
            return closing.is_set()

        runner = SinkRunner(OnlyGaps(), "shaky", max_errors=1, clock=Clock(), pause=note)
        runner.start()
        with Feeder(runner):
            wait_until(lambda: len(pauses) > 7)
        runner.close()
        assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]

    def test_a_gap_grows_over_many_tries(self) -> None:
        """However often a sink was tried, what it missed is one gap for each reason."""
        sink = Broken("write")
        runner = SinkRunner(sink, "full", **QUICK)
        runner.start()
        with Feeder(runner) as feeder:
            wait_until(lambda: sink.opened > 5)
            sink.fails = set()
            wait_for_state(runner, "running")
        runner.close()
        check_stream(sink.stream, feeder.put)
        assert len([gap for gap in gaps(sink.stream) if gap.reason == "quarantined"]) <= 2


def test_a_file_on_a_full_disk_goes_on_when_there_is_room(run_python: RunPython, tmp_path: Path) -> None:
    """With the system's own limit on the size of files: lines are whole, and a gap stands for what did not fit."""
    done = run_python(
        "import resource\n"
        "from sinks import SinkContext, SinkRunner, open_sink\n"
        "from tests.support.feeds.sinks import make_batch\n"
        "from tests.support.waiting import pause, wait_until\n"
        "sink = open_sink('file:events.jsonl', SinkContext(32, 4))\n"
        "runner = SinkRunner(sink, 'file', max_errors=2, backoff_seconds=0.001, retry_seconds=0.01)\n"
        "runner.start()\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))\n"
        "seq = 0\n"
        "def put():\n"
        "    global seq\n"
        "    runner.put(make_batch(seq))\n"
        "    seq += 1\n"
        "    pause()\n"
        "def put_until(state):\n"
        "    wait_until(lambda: runner.stats().state == state, runner.stats, meanwhile=put)\n"
        "put_until('quarantined')\n"
        "errors = runner.stats().errors\n"
        "wait_until(lambda: runner.stats().errors > errors + 3)\n"
        "assert runner.stats().state == 'quarantined'\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))\n"
        "put_until('running')\n"
        "for _ in range(9): runner.put(make_batch(seq)); seq += 1\n"
        "runner.close()\n"
        "print(seq, runner.stats().batches)"
    )
    assert done.returncode == 0, done.stderr
    put, delivered = map(int, done.stdout.split())
    stream = [from_json(line) for line in (tmp_path / "events.jsonl").read_bytes().splitlines()]
    check_stream(stream, put)
    assert [gap.reason for gap in gaps(stream)][-1] == "quarantined"
    assert len(stream) - sum(1 for batch in stream if gaps([batch])) == delivered


# --- the feed for routers


class Site:
    """A manager at random work, its feed on real sockets, and a reader that has followed it from the start."""

    def __init__(self, tmp_path: Path, seed: int, *, replay: bool = True) -> None:
        url = f"zmq+pub://127.0.0.1:0?replay=0&heartbeat=20ms&coalesce=1ms&state={tmp_path / 'numbers'}"
        feed = open_sink(url, SinkContext(32, 4))
        assert isinstance(feed, RouterFeed)
        transport = feed.transport
        assert isinstance(transport, ZMQTransport)
        self.feed, self.transport = feed, transport
        self.runner = SinkRunner(feed, "feed", **QUICK)
        config = KVCacheConfig(
            max_sequence_length=64, tokens_per_block=4, primary_blocks=40, secondary_blocks=20
        )
        self.manager = KVCacheManager(config, sinks=[self.runner])
        self.states: list[StateExported] = []
        self.manager.bus.subscribe(self.states.append, StateExported)
        self.index = Index()
        asked = transport.replay_endpoint if replay else None
        self.subscriber = Subscriber(transport.endpoint, replay=asked, start=0)
        assert self.manager.wait_subscribers(1, WAIT)
        self._rng = random.Random(seed)
        self._requests = itertools.count()

    def work(self, steps: int = 30) -> None:
        """Requests that share prefixes, evict and offload; a flush after each."""
        for _ in range(steps):
            request = str(next(self._requests))
            prompt = [self._rng.randrange(2) for _ in range(self._rng.randrange(5, 40))]
            self.manager.add_sequence(request, prompt)
            self.manager.store_context_blocks(request, len(prompt))
            self.manager.remove_sequence(request)
            self.manager.flush()
            self.read(0)

    def work_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, self.runner.stats, meanwhile=lambda: self.work(1))

    def read(self, timeout_ms: int = 5) -> None:
        for report in self.subscriber.poll(timeout_ms):
            self.index.fold(report)

    def check(self) -> None:
        """Wait until the reader holds what the cache holds, with no fault on the way."""
        state = self.manager.state
        expected = [resident_names(state, level) for level in (0, 1)]

        def read_more() -> None:
            self.manager.flush()
            self.read()

        wait_until(
            lambda: [self.index.resident(0, level) for level in (0, 1)] == expected,
            lambda: (self.runner.stats(), self.feed.resync_after_seq, self.index),
            meanwhile=read_more,
        )
        assert (self.index.orphans, self.index.unknown_removals, self.index.repeated_stores) == (0, 0, 0)

    def close(self) -> None:
        self.subscriber.close()
        self.manager.close()


@pytest.mark.parametrize("seed", seeds(range(2), quick=1))
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("what", ["numbers", "transport", "fold"])
def test_a_feed_that_failed_ends_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, replay: bool, seed: int
) -> None:
    """Whatever failed, after it works again a reader that has stayed holds exactly what the cache holds."""
    monkeypatch.setattr(feed_numbers, "STEP", 1)  # each batch needs the disk
    site = Site(tmp_path, seed, replay=replay)
    site.work()
    site.check()
    for _ in range(2):
        with monkeypatch.context() as broken:

            def fail(*_: object) -> None:
                raise FULL

            if what == "numbers":
                broken.setattr(state_file, "replace_file", fail)
            elif what == "transport":
                broken.setattr(site.transport, "send", fail)
            else:
                broken.setattr(site.feed, "write", fail)
            site.work_until(lambda: site.runner.stats().state == "quarantined")
            site.work()
        published = len(site.states)
        site.work_until(lambda: site.runner.stats().state == "running")
        site.work()
        site.check()
        assert len(site.states) == published + 1
    site.close()
    assert site.runner.stats().lag_batches == 0


def test_a_state_that_was_itself_lost_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last batch that a feed lost is the one with the whole state, the manager publishes another."""
    site = Site(tmp_path, 1)
    site.work()
    site.check()
    held = threading.Event()
    write = site.feed.write

    def lose(batch: EventBatch) -> None:
        if any(isinstance(event, StateExported) for event in batch.events) and not held.is_set():
            held.set()
            raise FULL
        write(batch)

    monkeypatch.setattr(site.feed, "write", lose)
    site.runner.put(EventBatch(site.runner.stats().batches - 1, 0, (Gap(0, 2**40, "made up"),)))
    site.work_until(held.is_set)
    site.check()
    site.close()

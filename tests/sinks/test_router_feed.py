"""The feed for routers: what goes out, when, and under which numbers; and what the runner does for it."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from events.feed.changes import Cleared, Removed, Stored
from events.types import EventBatch, Namespace
from sinks import SinkRunner
from sinks.router.feed import FeedBatch, RouterFeed
from sinks.router.numbers import FeedNumbers
from tests.support.feeds.feed_source import BLOCK, RecordingTransport, Source, name, names, state_of, tokens
from tests.support.feeds.sinks import RecordingSink, make_batch
from tests.support.waiting import WAIT, Clock, wait_until


class Rig:
    """A feed with one transport, driven by hand as the runner would."""

    def __init__(
        self, coalesce: float = 0.05, heartbeat: float = 1.0, max_batch_bytes: int = 1 << 20
    ) -> None:
        self.clock = Clock()
        self.transport = RecordingTransport()
        self.source = Source()
        self.feed = RouterFeed(
            self.transport,
            FeedNumbers(None),
            coalesce_seconds=coalesce,
            heartbeat_seconds=heartbeat,
            max_batch_bytes=max_batch_bytes,
            monotonic=self.clock,
            wall=lambda: 1.5e9 + self.clock.now,
        )
        self.feed.open()

    def write(self, *batches: EventBatch) -> None:
        for batch in batches:
            self.feed.write(batch)
            self.feed.tick()

    def tick(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        self.feed.tick()

    def sent(self) -> list[FeedBatch]:
        """What went out since the last call."""
        sent, self.transport.sent = self.transport.sent, []
        return sent

    def visible(self) -> dict:
        """What the fold would show now."""
        self.transport.wants_state = True
        self.tick(0.02)
        return state_of([list(self.transport.states[-1].changes)])


@pytest.fixture
def rig() -> Rig:
    """A feed whose start is over: "cleared" and the empty cache are out."""
    rig = Rig()
    rig.write(rig.source.created())
    rig.tick(0.06)
    rig.transport.sent.clear()
    return rig


class TestPace:
    def test_begins_with_cleared_at_once(self) -> None:
        """Without any event, what routers held of an earlier life is taken back."""
        rig = Rig()
        rig.tick()
        assert [(batch.seq, batch.changes) for batch in rig.sent()] == [(0, [Cleared()])]

    def test_a_change_after_silence_goes_out_at_once(self, rig: Rig) -> None:
        """Nobody waits for more to come when nothing went out lately."""
        rig.write(rig.source.store(1, 2))
        (batch,) = rig.sent()
        assert batch.changes == [Stored(0, 0, names(1, 2), b"", tokens(1, 2), BLOCK, Namespace())]
        assert batch.ts == 1.5e9 + rig.clock.now

    def test_what_follows_is_held_back_and_sent_together(self, rig: Rig) -> None:
        """Within the interval changes gather; one batch carries them in order, including what came and went."""
        rig.write(rig.source.store(1, 1))
        rig.sent()
        rig.tick(0.02)
        rig.write(rig.source.store(2, 2), rig.source.remove(2), rig.source.store(3, 1))
        rig.tick(0.02)
        assert rig.sent() == []
        rig.tick(0.02)
        (batch,) = rig.sent()
        assert [type(change) for change in batch.changes] == [Stored, Removed, Stored]
        assert batch.changes[1] == Removed(0, 0, name(2, 1) + name(2, 0))

    def test_there_are_at_most_as_many_batches_as_asked_for(self, rig: Rig) -> None:
        """A change every millisecond for two seconds makes 20 batches a second, and loses nothing."""
        for handle in range(1, 2001):
            rig.clock.now += 0.001
            rig.write(rig.source.store(handle, 1))
        sent = rig.sent()
        assert 38 <= len(sent) <= 41
        rig.tick(0.05)
        assert len(state_of([batch.changes for batch in [*sent, *rig.sent()]])) == 2000

    def test_too_much_does_not_wait(self) -> None:
        """As soon as a batch is full it goes out, and what is more becomes several batches in order."""
        rig = Rig(max_batch_bytes=4000)
        rig.write(rig.source.created())
        rig.sent()
        rig.write(rig.source.store(1, 10))
        assert rig.sent() == []
        rig.write(rig.source.store(2, 300))
        sent = rig.sent()
        assert len(sent) > 2
        assert [batch.seq for batch in sent] == list(range(1, len(sent) + 1))
        assert len(state_of([batch.changes for batch in sent])) == 310

    def test_coalesce_0_sends_one_batch_for_each(self) -> None:
        """Every batch with visible changes has one of its own; those without have none."""
        rig = Rig(coalesce=0)
        rig.write(rig.source.created())
        rig.sent()
        rig.write(rig.source.store(1, 1), rig.source.silent(), rig.source.store(2, 1), rig.source.remove(1))
        assert [[type(change) for change in batch.changes] for batch in rig.sent()] == [
            [Stored],
            [Stored],
            [Removed],
        ]

    def test_heartbeats_come_when_idle(self, rig: Rig) -> None:
        """A second after the last batch an empty one goes out, with a number of its own; and so on."""
        rig.write(rig.source.store(1, 1))
        first = rig.sent()[0].seq
        rig.tick(0.99)
        assert rig.sent() == []
        rig.tick(0.02)
        rig.tick(0.99)
        rig.tick(0.02)
        assert [(batch.seq, list(batch.changes)) for batch in rig.sent()] == [
            (first + 1, []),
            (first + 2, []),
        ]

    def test_changes_put_heartbeats_off(self, rig: Rig) -> None:
        """Silence is counted from the last batch of any kind."""
        for handle in range(1, 5):
            rig.write(rig.source.store(handle, 1))
            rig.tick(0.9)
        assert [len(batch.changes) for batch in rig.sent()] == [1, 1, 1, 1]

    def test_no_heartbeats_if_not_wanted(self) -> None:
        """0 turns them off."""
        rig = Rig(heartbeat=0)
        rig.tick()
        rig.sent()
        rig.tick(1000)
        assert rig.sent() == []

    def test_close_sends_what_is_held_back(self, rig: Rig) -> None:
        """Nothing is lost by ending within the interval."""
        rig.write(rig.source.store(1, 1), rig.source.store(2, 1))
        rig.feed.close()
        assert len(state_of([batch.changes for batch in rig.sent()])) == 2
        assert rig.transport.calls == ["open", "close"]


class TestState:
    def test_is_that_of_the_last_number(self, rig: Rig) -> None:
        """What was held back goes out first, so that number and state belong together."""
        rig.write(
            rig.source.store(1, 3), rig.source.store(2, 1), rig.source.remove(1), rig.source.store(3, 2)
        )
        rig.transport.wants_state = True
        rig.tick(0.02)
        (state,) = rig.transport.states
        sent = rig.sent()
        assert (state.seq, state.ts) == (sent[-1].seq, sent[-1].ts)
        # Told later, and still what it was then.
        rig.write(rig.source.store(4, 1), rig.source.remove(2))
        reported = state_of([list(state.changes)])
        assert reported == state_of([batch.changes for batch in sent])
        assert len(reported) == 3

    def test_before_anything_was_sent_the_start_goes_out(self) -> None:
        """A state that is asked for at once is the empty one, behind "cleared"."""
        rig = Rig()
        rig.transport.wants_state = True
        rig.tick()
        (state,) = rig.transport.states
        assert (state.seq, list(state.changes), state.groups) == (0, [Cleared()], ())
        assert [batch.changes for batch in rig.sent()] == [[Cleared()]]


class TestLoss:
    def test_a_gap_silences_the_feed_until_the_state_comes(self, rig: Rig) -> None:
        """After a gap only heartbeats go out; the exported state goes out whole, behind "cleared"."""
        rig.write(rig.source.store(1, 2))
        assert rig.feed.resync_after_seq is None
        rig.source.store(2, 2)
        rig.write(rig.source.gap(1))
        assert rig.feed.resync_after_seq is not None
        rig.write(rig.source.store(3, 2))
        rig.tick(0.1)
        assert len(rig.sent()) == 1
        rig.write(rig.source.exported())
        assert rig.feed.resync_after_seq is None
        (batch,) = rig.sent()
        assert batch.changes[0] == Cleared()
        assert len(state_of([batch.changes])) == 6

    def test_says_after_which_batch_the_state_is_needed(self, rig: Rig) -> None:
        """One state published since the loss is enough; a later loss, which may have taken it, asks for another."""
        rig.write(rig.source.store(1, 2))
        assert rig.feed.resync_after_seq is None
        rig.source.silent()
        rig.write(rig.source.gap(1))
        lost = rig.feed.resync_after_seq
        assert lost == rig.source.seq - 1
        rig.write(rig.source.silent())
        assert rig.feed.resync_after_seq == lost
        rig.source.exported()
        rig.write(rig.source.gap(1))
        assert rig.feed.resync_after_seq == rig.source.seq - 1 > lost
        rig.write(rig.source.exported())
        assert rig.feed.resync_after_seq is None

    def test_what_failed_on_its_way_is_reported_again_as_a_whole(self, rig: Rig) -> None:
        """After a transport has raised, "cleared" and everything visible go out, under a new number."""
        rig.write(rig.source.store(1, 2))
        rig.transport.fails = 1
        rig.clock.now += 1
        rig.feed.write(rig.source.store(2, 2))
        with pytest.raises(OSError, match="broken"):
            rig.feed.tick()
        rig.feed.write(rig.source.store(3, 2))
        before = rig.sent()[-1].seq
        rig.tick()
        (batch,) = rig.sent()
        assert batch.seq == before + 2
        assert batch.changes[0] == Cleared()
        assert len(state_of([batch.changes])) == 6

    def test_a_lost_heartbeat_is_made_good_too(self, rig: Rig) -> None:
        """Its number is missing to a reader, who must find the state behind it."""
        rig.transport.fails = 1
        with pytest.raises(OSError, match="broken"):
            rig.tick(2)
        rig.tick()
        assert [batch.changes for batch in rig.sent()] == [[Cleared()]]

    def test_nothing_piles_up_while_sending_fails(self, rig: Rig) -> None:
        """The fold is what is kept: a feed that cannot send for long holds no list of changes."""
        rig.transport.fails = 10**6
        for handle in range(1, 60):
            rig.feed.write(rig.source.store(handle, 1))
            with pytest.raises(OSError, match="broken"):
                rig.tick(1)
        assert rig.feed._pending == []
        rig.transport.fails = 0
        rig.tick(1)
        assert len(state_of([batch.changes for batch in rig.sent()])) == 59


class TestOpening:
    def test_goes_on_where_the_numbers_file_says(self, tmp_path: Path) -> None:
        """The transport learns the first number; the first batch has it and begins with "cleared"."""
        path = tmp_path / "numbers"
        numbers = FeedNumbers(path)
        numbers.open()
        for _ in range(5):
            numbers.take()
        numbers.close()
        transport = RecordingTransport()
        feed = RouterFeed(transport, FeedNumbers(path))
        feed.open()
        feed.tick()
        assert (transport.first, transport.sent[0].seq, transport.sent[0].changes) == (5, 5, [Cleared()])
        feed.close()

    def test_a_transport_that_does_not_open_leaves_nothing_open(self, tmp_path: Path) -> None:
        """The numbers are free for the next try."""

        class Broken(RecordingTransport):
            def open(self, next_seq: int, worker: object) -> None:
                raise OSError(5, "broken")

        feed = RouterFeed(Broken(), FeedNumbers(tmp_path / "numbers"))
        with pytest.raises(OSError, match="broken"):
            feed.open()
        numbers = FeedNumbers(tmp_path / "numbers")
        numbers.open()
        numbers.close()


class TestSubscribers:
    def test_waiting_ends_when_they_are_there(self, rig: Rig) -> None:
        """Another thread that waits for two is woken by the tick that sees the second."""
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(rig.feed.wait_subscribers(2, WAIT)))
        thread.start()
        rig.transport.subscribers = 1
        rig.tick(0.1)
        assert rig.feed.subscribers == 1
        rig.transport.subscribers = 2
        rig.tick(0.1)
        thread.join(WAIT)
        assert found == [True]

    def test_waiting_ends_in_time_or_when_reported(self, rig: Rig) -> None:
        """It says False after the timeout, and as soon as it is to stop."""
        assert rig.feed.wait_subscribers(0, 0)
        assert not rig.feed.wait_subscribers(1, 0.01)
        assert not rig.feed.wait_subscribers(1, 1e6, lambda: True)


class TestRunner:
    def test_an_overflow_ends_in_the_exact_state(self) -> None:
        """Batches lost before the fold leave a gap; with the state published after it, readers are exact again."""
        hold, held = threading.Event(), threading.Event()

        class Slow(RecordingTransport):
            def send(self, batch: FeedBatch) -> None:
                held.set()
                hold.wait(WAIT)
                super().send(batch)

        transport, source = Slow(), Source()
        feed = RouterFeed(transport, FeedNumbers(None), coalesce_seconds=0)
        runner = SinkRunner(feed, "feed", max_events=20)
        runner.start()
        runner.put(source.created())
        assert held.wait(WAIT)
        for handle in range(1, 40):
            runner.put(source.store(handle, 2))
        assert runner.stats().dropped_batches > 0
        hold.set()
        wait_until(lambda: feed.resync_after_seq is not None)
        for handle in range(1, 10):
            runner.put(source.remove(handle))
        runner.put(source.exported())
        runner.put(source.store(77, 2))
        wait_until(lambda: feed.resync_after_seq is None)
        runner.close()
        state = state_of([transport.changes()])
        assert {block for _, block in state} == {
            name(handle, block) for handle in [*range(10, 40), 77] for block in (0, 1)
        }

    def test_a_sink_says_what_gives_way(self) -> None:
        """A feed's queue refuses the newest without being told to; a runner that is told otherwise obeys."""
        sink = RecordingSink()
        sink.overflow = "drop_newest"
        kept = []
        for overflow in (None, "drop_oldest"):
            runner = SinkRunner(sink, "r", max_events=2, overflow=overflow)
            for seq in range(4):
                runner.put(make_batch(seq))
            runner.start()
            runner.close()
            kept.append([batch.seq for batch in sink.stream if batch.events[0].__class__.__name__ != "Gap"])
            sink.stream.clear()
        assert kept == [[0, 1], [2, 3]]

    def test_ticks_come_when_idle_and_after_each_batch(self) -> None:
        """A sink with a tick gets it without any batch, and between any two."""
        calls: list[str] = []
        idle = threading.Event()

        class Ticking(RecordingSink):
            def write(self, batch: EventBatch) -> None:
                calls.append("write")

            def tick(self) -> None:
                calls.append("tick")
                if len(calls) > 3:
                    idle.set()

        runner = SinkRunner(Ticking(), "ticking")
        runner.start()
        assert idle.wait(WAIT)
        for seq in range(100):
            runner.put(make_batch(seq))
        runner.close()
        assert calls.count("write") == 100
        assert ("write", "write") not in itertools.pairwise(calls)
        assert runner.stats().errors == 0

    def test_failing_ticks_are_counted_and_quarantine_the_sink(self) -> None:
        """A sink that takes batches but whose ticks raise is given up after ten in a row."""

        class Broken(RecordingSink):
            def tick(self) -> None:
                raise OSError(5, "broken")

        runner = SinkRunner(Broken(), "broken", backoff_seconds=0.0001, retry_seconds=3600)
        runner.start()
        for seq in range(20):
            runner.put(make_batch(seq))
        wait_until(lambda: runner.stats().state == "quarantined")
        stats = runner.stats()
        assert (stats.errors, stats.last_error) == (10, "tick: OSError: [Errno 5] broken")
        assert stats.batches + stats.dropped_batches == 20
        runner.close()

    def test_a_tick_that_fails_now_and_then_does_no_harm(self) -> None:
        """Only failures in a row count, and batches are delivered all the same."""
        counter = itertools.count()
        enough = threading.Event()

        class Shaky(RecordingSink):
            def tick(self) -> None:
                count = next(counter)
                if count > 30:
                    enough.set()
                if count % 2:
                    raise OSError(5, "broken")

        sink = Shaky()
        runner = SinkRunner(sink, "shaky", max_errors=2, backoff_seconds=0.0001)
        runner.start()
        assert enough.wait(WAIT)
        runner.put(make_batch(0))
        runner.close()
        assert runner.stats().errors >= 15
        assert (runner.stats().batches, runner.stats().state) == (1, "closed")

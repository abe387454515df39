"""The runner against sinks that misbehave: the engine never waits, and every batch is accounted for."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

import pytest
from structlog.testing import capture_logs

from events.types import EventBatch, Gap
from sinks import SinkError, SinkOpenError, SinkRunner, SinkStats
from sinks.base import Overflow
from sinks.runner import BACKOFF_SECONDS_MAX, describe
from tests.support.feeds.sinks import (
    ExitingSink,
    HangingSink,
    RaisingSink,
    RecordingSink,
    SlowSink,
    check_stream,
    gaps,
    make_batch,
)
from tests.support.waiting import WAIT, Clock, wait_until

ROOT = Path(__file__).resolve().parents[2]


def put_all(runner: SinkRunner, count: int, **shape: int) -> None:
    for seq in range(count):
        runner.put(make_batch(seq, **shape))


def check_accounts(stats: SinkStats, put: int) -> None:
    assert stats.batches + stats.dropped_batches + stats.lag_batches == put


class TestGoodSink:
    def test_gets_everything_in_order_on_one_other_thread(self) -> None:
        """All three methods run on the runner's thread, in order, and close delivers what is queued."""
        calls: list[tuple[str, str]] = []

        class Sink(RecordingSink):
            def open(self) -> None:
                calls.append(("open", threading.current_thread().name))

            def write(self, batch: EventBatch) -> None:
                calls.append((f"write {batch.seq}", threading.current_thread().name))

            def close(self) -> None:
                calls.append(("close", threading.current_thread().name))

        runner = SinkRunner(Sink(), "good")
        runner.start()
        put_all(runner, 3)
        runner.close()
        assert [call for call, _ in calls] == ["open", "write 0", "write 1", "write 2", "close"]
        assert {thread for _, thread in calls} == {"kvcache-sink-good"}

    def test_batches_arrive_without_a_close(self) -> None:
        """A single batch does not wait for more to come."""
        sink = RecordingSink()
        runner = SinkRunner(sink, "good")
        runner.start()
        runner.put(make_batch(0))
        sink.wait_for(0)
        runner.close()

    def test_what_was_put_before_start_is_delivered(self) -> None:
        """Batches wait in the queue until the sink is there."""
        sink = RecordingSink()
        runner = SinkRunner(sink, "good")
        put_all(runner, 3)
        assert runner.stats().lag_batches == 3
        runner.start()
        runner.close()
        assert sink.seqs() == [0, 1, 2]

    def test_stats_count_batches_and_events(self) -> None:
        """After a clean close everything is delivered, nothing lags, and nothing is logged."""
        sink = RecordingSink()
        runner = SinkRunner(sink, "good")
        runner.start()
        put_all(runner, 4, events=3)
        with capture_logs() as logs:
            runner.close()
        assert runner.stats() == SinkStats("good", 4, 12, 0, 0, 0, 0, "closed", None)
        assert logs == []

    def test_put_after_close_is_counted_and_does_not_raise(self) -> None:
        """A late batch is a dropped one."""
        runner = SinkRunner(RecordingSink(), "good")
        runner.start()
        runner.close()
        runner.close()
        runner.put(make_batch(0))
        assert runner.stats().dropped_batches == 1

    def test_cannot_be_started_twice(self) -> None:
        """A second thread on the same sink is refused."""
        runner = SinkRunner(RecordingSink(), "good")
        runner.start()
        with pytest.raises(RuntimeError, match="already been started"):
            runner.start()
        runner.close()

    def test_close_without_start_counts_what_was_put(self) -> None:
        """A runner that never ran loses its queue, and says so."""
        runner = SinkRunner(RecordingSink(), "good")
        put_all(runner, 2)
        runner.close()
        assert runner.stats().dropped_batches == 2

    def test_max_errors_must_be_positive(self) -> None:
        """A sink that may not fail even once would never be called."""
        with pytest.raises(ValueError, match="max_errors"):
            SinkRunner(RecordingSink(), "x", max_errors=0)


class TestOpen:
    def test_failure_is_raised_by_start(self) -> None:
        """A sink that cannot be opened is known before the engine runs, and is neither written to nor closed."""

        class Sink(RecordingSink):
            def open(self) -> None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/no/such/file")

        sink = Sink()
        runner = SinkRunner(sink, "lost")
        with pytest.raises(
            SinkOpenError, match=r"sink lost could not be opened.*No such file.*/no/such/file"
        ):
            runner.start()
        put_all(runner, 2)
        runner.close()
        assert sink.stream == []
        assert not sink.closed.is_set()
        check_accounts(runner.stats(), 2)
        assert runner.stats().state == "quarantined"

    def test_a_slow_one_does_not_hold_up_the_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Start returns after its time, and batches wait until the sink is open."""
        monkeypatch.setattr("sinks.runner.OPEN_SECONDS", 0.01)
        may_open = threading.Event()

        class Sink(RecordingSink):
            def open(self) -> None:
                may_open.wait(WAIT)

        sink = Sink()
        runner = SinkRunner(sink, "slow")
        runner.start()
        runner.put(make_batch(0))
        assert sink.stream == []
        may_open.set()
        sink.wait_for(0)
        runner.close()


class TestSlowSink:
    def test_gets_gaps_for_what_it_was_too_slow_for(self) -> None:
        """Delivered and dropped add up, and the stream covers everything."""
        sink = SlowSink()
        runner = SinkRunner(sink, "slow", max_events=10)
        runner.start()
        for seq in range(200):
            runner.put(make_batch(seq))
            if seq % 20 == 0:
                sink.let()
        sink.let(200)
        runner.close()
        stats = runner.stats()
        assert stats.dropped_batches >= 150
        check_accounts(stats, 200)
        check_stream(sink.stream, 200)

    @pytest.mark.parametrize("overflow", ["drop_oldest", "drop_newest"])
    def test_close_is_bounded_and_ends_the_stream_with_a_gap(self, overflow: Overflow) -> None:
        """What cannot be delivered in the drain time is one last gap, written before close returns, and a warning."""
        clock = Clock()

        class Sink(RaisingSink):
            def write(self, batch: EventBatch) -> None:
                clock.now += WAIT / 3
                super().write(batch)

        runner = SinkRunner(
            sink := Sink({0}),
            "slow",
            drain_seconds=WAIT,
            overflow=overflow,
            clock=clock,
            pause=lambda closing, seconds: closing.wait(WAIT),  # after the failure, until it is closed
        )
        runner.start()
        put_all(runner, 1000)
        wait_until(lambda: runner.stats().errors == 1)
        with capture_logs() as logs:
            runner.close()
        assert sink.closed.is_set()
        check_stream(sink.stream, 1000)
        assert gaps(sink.stream) == [Gap(0, 0, "failed"), Gap(3, 999, "closed")]
        stats = runner.stats()
        check_accounts(stats, 1000)
        assert (stats.batches, stats.lag_batches) == (2, 0)
        assert logs[-1]["event"] == "sink_lost_batches"
        assert logs[-1]["dropped"] == stats.dropped_batches


class TestRaisingSink:
    def test_a_failed_batch_leaves_a_gap_and_the_next_one_follows(self) -> None:
        """One failure costs one batch, is counted, and does not stop the sink."""
        sink = RaisingSink({2, 3})
        runner = SinkRunner(sink, "raising", backoff_seconds=0.001)
        runner.start()
        put_all(runner, 6)
        runner.close()
        check_stream(sink.stream, 6)
        assert gaps(sink.stream) == [Gap(2, 2, "failed"), Gap(3, 3, "failed")]
        stats = runner.stats()
        assert (stats.batches, stats.dropped_batches, stats.errors) == (4, 2, 2)
        assert stats.last_error == "write: OSError: [Errno 28] No space left on device"

    def test_a_failed_last_batch_leaves_a_gap_at_close(self) -> None:
        """A gap that no batch follows is written before the sink closes."""
        sink = RaisingSink({5})
        runner = SinkRunner(sink, "raising", backoff_seconds=0.001)
        runner.start()
        put_all(runner, 6)
        runner.close()
        check_stream(sink.stream, 6)

    def test_is_quarantined_after_failures_in_a_row(self) -> None:
        """It is not called any more, closed once, reported once, and its queue is let go."""
        sink = RaisingSink(None)
        runner = SinkRunner(sink, "raising", max_errors=3, backoff_seconds=0.001, retry_seconds=3600)
        with capture_logs() as logs:
            runner.start()
            put_all(runner, 50)
            assert sink.closed.wait(WAIT)
            put_all(runner, 50)
        stats = runner.stats()
        assert (sink.calls, stats.errors, stats.state) == (3, 3, "quarantined")
        assert [(log["event"], log["log_level"]) for log in logs] == [
            ("sink_fails", "warning"),
            ("sink_quarantined", "error"),
        ]
        assert {log["sink"] for log in logs} == {"raising"}
        # One batch may have been on its way into the queue when the sink was given up.
        assert runner.stats().lag_batches <= 1
        runner.close()
        assert runner.stats().state == "quarantined"
        assert (runner.stats().dropped_batches, runner.stats().lag_batches) == (100, 0)

    def test_success_starts_the_count_again(self) -> None:
        """Only failures in a row lead to quarantine."""
        sink = RaisingSink({1, 3, 5, 7, 9})
        runner = SinkRunner(sink, "raising", max_errors=2, backoff_seconds=0.0)
        runner.start()
        put_all(runner, 11)
        runner.close()
        assert runner.stats().errors == 5
        assert runner.stats().state == "closed"

    def test_back_off_doubles_and_is_bounded(self) -> None:
        """Pauses grow from the first one to the longest, between failures and between tries after them."""
        pauses: list[float] = []

        def note(closing: threading.Event, seconds: float) -> bool:
            pauses.append(seconds)
            return len(pauses) >= 17 and closing.wait(WAIT)

        runner = SinkRunner(RaisingSink(None), "raising", max_errors=9, backoff_seconds=0.1, pause=note)
        runner.start()
        put_all(runner, 20)
        wait_until(lambda: len(pauses) >= 17)
        runner.close()
        assert pauses[:8] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MAX]
        assert pauses[8:] == [1, 2, 4, 8, 16, 32, 60, 60, 60]

    def test_close_does_not_wait_for_a_back_off(self) -> None:
        """A sink in its pause is tried for the rest of the queue at once."""
        sink = RaisingSink({0})
        runner = SinkRunner(sink, "raising", pause=lambda closing, seconds: closing.wait(3600))
        runner.start()
        put_all(runner, 3)
        runner.close()
        assert sink.closed.is_set()
        assert sink.seqs() == [0, 1, 2]
        assert gaps(sink.stream) == [Gap(0, 0, "failed")]

    def test_a_failing_close_is_counted(self) -> None:
        """An error at the end is not lost."""

        class Sink(RecordingSink):
            def close(self) -> None:
                raise OSError(errno.EIO, "Input/output error")

        runner = SinkRunner(Sink(), "raising")
        runner.start()
        runner.close()
        assert runner.stats().last_error == "close: OSError: [Errno 5] Input/output error"

    def test_texts_that_may_quote_events_are_not_kept(self) -> None:
        """Of a foreign exception only the type and the place are shown, in stats as in logs."""
        sink = RaisingSink(None, ValueError("cannot send [1234567, 7654321]"))
        runner = SinkRunner(sink, "raising", max_errors=1)
        with capture_logs() as logs:
            runner.start()
            runner.put(make_batch(0))
            assert sink.closed.wait(WAIT)
            runner.close()
        assert "1234567" not in f"{runner.stats()} {logs}"
        assert (runner.stats().last_error or "").startswith("write: ValueError at sinks.py:")

    def test_errors_made_for_showing_are_shown(self) -> None:
        """The system's errors and sinks' own keep their text; numberless OSErrors of libraries do not."""
        assert describe(SinkError("no server")) == "SinkError: no server"
        assert (
            describe(OSError(28, "No space left on device")) == "OSError: [Errno 28] No space left on device"
        )
        assert describe(OSError("url with password")) == "OSError"


class TestHangingSink:
    def test_never_delays_put(self) -> None:
        """However much is put, the call returns, the queue stays bounded, and the rest is counted as dropped."""
        sink = HangingSink()
        runner = SinkRunner(sink, "hanging", max_events=100, drain_seconds=0.05)
        runner.start()
        runner.put(make_batch(0))
        assert sink.hanging.wait(WAIT)
        for seq in range(1, 20001):
            runner.put(make_batch(seq))
        stats = runner.stats()
        assert (stats.lag_batches, stats.dropped_batches) == (101, 19900)
        sink.release.set()
        runner.close()
        check_stream(sink.stream, 20001)

    @pytest.mark.realtime
    def test_put_takes_no_longer_than_with_an_idle_sink(self) -> None:
        """While one sink hangs and its queue overflows, a step's hand-off takes about what it takes for an idle one."""
        hanging, idle = HangingSink(), RecordingSink()
        runners = [
            SinkRunner(hanging, "hanging", max_events=100, drain_seconds=0.05),
            SinkRunner(idle, "idle", max_events=1000),  # for all, however seldom its thread gets its turn
        ]
        for runner in runners:
            runner.start()
            runner.put(make_batch(0))
        assert hanging.hanging.wait(WAIT)
        nanoseconds: tuple[list[int], list[int]] = ([], [])
        for seq in range(1, 601):
            for runner, times in zip(runners, nanoseconds, strict=True):
                time.sleep(0.0002)  # as between two steps: the sinks' threads get their turn
                batch = make_batch(seq)
                started = time.perf_counter_ns()
                runner.put(batch)
                times.append(time.perf_counter_ns() - started)
        assert (runners[0].stats().dropped_batches, runners[1].stats().dropped_batches) == (500, 0)
        while_hanging, while_idle = (median(times) for times in nanoseconds)
        assert (
            while_hanging <= 20 * while_idle + 50_000
        )  # machines are noisy; waiting for a sink takes far more
        hanging.release.set()
        for runner in runners:
            runner.close()

    def test_does_not_hold_up_close(self) -> None:
        """Close gives up after the drain time and reports what is unfinished."""
        sink = HangingSink()
        runner = SinkRunner(sink, "hanging", drain_seconds=0.05)
        runner.start()
        put_all(runner, 5)
        assert sink.hanging.wait(WAIT)
        with capture_logs() as logs:
            runner.close()
        assert (logs[0]["dropped"], logs[0]["unfinished"]) == (4, 1)
        check_accounts(runner.stats(), 5)
        sink.release.set()
        assert sink.closed.wait(WAIT)

    def test_that_comes_back_late_finishes_its_stream(self) -> None:
        """If it returns after close, its last batch counts as delivered and a gap stands for the rest."""
        sink = HangingSink()
        runner = SinkRunner(sink, "hanging", drain_seconds=0.0)
        runner.start()
        put_all(runner, 5)
        assert sink.hanging.wait(WAIT)
        runner.close()
        sink.release.set()
        assert sink.closed.wait(WAIT)
        check_stream(sink.stream, 5)
        stats = runner.stats()
        assert (stats.batches, stats.dropped_batches, stats.lag_batches) == (1, 4, 0)

    def test_does_not_keep_the_process_alive(self) -> None:
        """A process whose sink hangs for ever exits, even without a close."""
        script = (
            "import threading\n"
            "from sinks import SinkRunner\n"
            "from tests.support.feeds.sinks import HangingSink, make_batch\n"
            "sink = HangingSink()\n"
            "runner = SinkRunner(sink, 'hanging')\n"
            "runner.start(); runner.put(make_batch(0)); sink.hanging.wait()\n"
        )
        assert (
            subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=WAIT, check=False).returncode
            == 0
        )


class TestGrowingBatches:
    def test_memory_is_bounded_in_bytes(self) -> None:
        """A hanging sink and batches that double in size hold no more than the bound and one batch."""
        sink = HangingSink()
        runner = SinkRunner(sink, "growing", max_bytes=1 << 20)
        runner.start()
        runner.put(make_batch(0))
        assert sink.hanging.wait(WAIT)
        for seq in range(1, 22):
            runner.put(make_batch(seq, padding=1 << seq))
        stats = runner.stats()
        assert (stats.lag_batches, stats.dropped_batches) == (2, 20)  # one is being written, one waits
        sink.release.set()
        runner.close()
        check_stream(sink.stream, 22)
        assert [batch.seq for batch in sink.stream if not gaps([batch])] == [0, 21]

    def test_many_events_per_batch_are_bounded_too(self) -> None:
        """The bound in events holds whatever the number of batches."""
        sink = HangingSink()
        runner = SinkRunner(sink, "growing", max_events=100)
        runner.start()
        runner.put(make_batch(0))
        assert sink.hanging.wait(WAIT)
        for seq in range(1, 10):
            runner.put(make_batch(seq, events=40))
        assert runner.stats().lag_batches == 3
        sink.release.set()
        runner.close()
        check_stream(sink.stream, 10)


class TestExitingSink:
    def test_cannot_end_its_thread(self) -> None:
        """sys.exit() in a sink is a failure like any other, and the stream goes on."""
        sink = ExitingSink()
        runner = SinkRunner(sink, "exiting", backoff_seconds=0.0)
        runner.start()
        put_all(runner, 9)
        runner.close()
        check_stream(sink.stream, 9)
        assert runner.stats().errors == 4
        assert (runner.stats().last_error or "").startswith("write: SystemExit at sinks.py:")


FORKING = """
import os, sys
from pathlib import Path
from tests.oracles.json_reader import from_json
from sinks import SinkRunner
from sinks.file import FileOptions, FileSink
from tests.support.feeds.sinks import gaps, make_batch
from tests.support.waiting import WAIT, Clock, pause, wait_until
import threading

children = []
closes = Path(sys.argv[1] + ".closes")
done = threading.Event()

class Forking(FileSink):
    def write(self, batch):
        if batch.seq == 3 and not gaps([batch]):
            raise OSError(5, "so that a gap is written, and forks")
        super().write(batch)
        if pid := os.fork():
            children.append(pid)
            if batch.seq == 19:
                done.set()

    def close(self):
        with closes.open("a") as file:
            file.write("closed")

runner = SinkRunner(Forking(sys.argv[1], FileOptions(tokens=True), 8), "forking", backoff_seconds=0.0)
runner.start()
for seq in range(20):
    runner.put(make_batch(seq))
assert done.wait(WAIT)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 20
runner.close()
assert runner.stats().batches == 19
assert closes.read_text() == "closed"
print(*[from_json(line).seq for line in open(sys.argv[1], "rb")])
"""

FORKED = """
import os, signal, sys
from sinks import SinkRunner
from tests.support.feeds.sinks import HangingSink, make_batch

sink = HangingSink()
runner = SinkRunner(sink, "forked", max_events=2)
runner.start()
runner.put(make_batch(0))
sink.hanging.wait()
runner.put(make_batch(1))
runner._queue._lock.acquire()  # as if the sink's thread held it at this moment
if child := os.fork():
    runner._queue._lock.release()
    sink.release.set()
    assert os.waitpid(child, 0)[1] == 0
    runner.close()
    assert [batch.seq for batch in sink.stream] == [0, 1]
else:
    signal.alarm(60)
    for seq in range(100):
        runner.put(make_batch(seq))
    assert runner.stats().state == "closed"
    assert runner.stats().dropped_batches >= 100
    runner.close()
    os._exit(0)
"""


class TestForking:
    def run(self, script: str, *args: str) -> str:
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *args]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_a_sink_that_forks_publishes_nothing_twice(self, tmp_path: Path) -> None:
        """Children that a sink forks carelessly leave without writing the parent's batches again."""
        printed = self.run(FORKING, str(tmp_path / "events.jsonl"))
        assert printed.splitlines()[-1].split() == [str(seq) for seq in range(20)]

    def test_an_engine_that_forks_has_closed_runners_in_the_child(self) -> None:
        """In the child, put drops without waiting for a lock that nobody holds any more, and close returns."""
        self.run(FORKED)


def test_sinks_do_not_disturb_each_other() -> None:
    """Beside a hanging and a raising sink, a good one gets everything."""
    good, hanging, raising = RecordingSink(), HangingSink(), RaisingSink(None)
    runners = [
        SinkRunner(sink, name, max_events=1000, drain_seconds=0.05, max_errors=2, backoff_seconds=0.0)
        for sink, name in ((hanging, "hanging"), (raising, "raising"), (good, "good"))
    ]
    for runner in runners:
        runner.start()
    for seq, runner in itertools.product(range(500), runners):
        runner.put(make_batch(seq))
    good.wait_for(499)
    for runner in runners:
        runner.close()
    hanging.release.set()
    assert good.seqs() == list(range(500))

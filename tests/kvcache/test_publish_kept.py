"""Following a log of which only so much is kept."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.log.leases import leased
from events.log.retention import Limits, LogParts
from events.log.segments import first_seq, segment_paths
from events.log.snapshots import snapshots
from events.types import EpochStarted
from kvcache.fold.state import resident_names
from kvcache.maintenance.prune import make_snapshot, prune
from sinks.router.feed import FeedBatch
from tests.support.feeds.publishing import Collector, Reported, Running, once, sinks, write
from tests.support.waiting import wait_until

__all__ = ["sinks"]

SMALL: dict[str, Any] = {"segment_bytes": 2000}


def cut(log: Path, segments: int = 2) -> int:
    """Keep so much of a log; returns the batch that it begins with."""
    prune(log, Limits(segments=segments))
    return next(snapshots(log)).seq


def test_a_feed_begins_with_the_newest_snapshot(tmp_path: Path, sinks: dict[str, Any]) -> None:
    """It tells "cleared" and what is resident, having read no more than the segments behind it."""
    log = tmp_path / "log"
    manager = write(log, 40, **SMALL)
    newest = make_snapshot(log, first_seq(segment_paths(log)[-1]))
    assert newest is not None
    for path in segment_paths(log)[:-1]:
        path.unlink()
    once(log, "feed:a")
    assert sinks["a"].names == resident_names(manager.state, 0) != set()
    assert sinks["a"].kinds.count("Cleared") == 1


def test_a_feed_passes_over_a_damaged_snapshot(tmp_path: Path, sinks: dict[str, Any]) -> None:
    """Then it begins with the epoch."""
    log = tmp_path / "log"
    manager = write(log, 40, **SMALL)
    made = make_snapshot(log, first_seq(segment_paths(log)[-1]))
    assert made is not None
    made.path.write_bytes(made.path.read_bytes()[:-1])
    once(log, "feed:a")
    assert sinks["a"].names == resident_names(manager.state, 0) != set()


def test_what_counts_begins_with_the_epoch_nevertheless(tmp_path: Path, sinks: dict[str, Any]) -> None:
    """A snapshot has no history, so what counts reads all that is kept of the epoch."""
    log = tmp_path / "log"
    write(log, 40, **SMALL)
    everything = [batch.seq for batch in LogReader(log)]
    make_snapshot(log)
    once(log, "fold:a")
    assert sinks["a"].seqs == everything
    begins = cut(log)
    before = len(everything)
    once(log, "fold:a")
    assert sinks["a"].seqs[before:] == [seq for seq in everything if seq >= begins]


@pytest.mark.parametrize("had", [0, 1])
def test_other_sinks_get_a_gap_with_the_state(tmp_path: Path, sinks: dict[str, Any], had: int) -> None:
    """What was removed before a sink has had it is told as a gap, in the batch that begins what is kept."""
    log, first = tmp_path / "log", 0
    if had:
        write(log, 2)
        once(log, "x:a", state_dir=tmp_path / "state")
        first = sinks["a"].seqs[-1] + 1
    write(log, 40, first=2, **SMALL)
    last = [batch.seq for batch in LogReader(log)][-1]
    begins = cut(log)
    once(log, "x:a", state_dir=tmp_path / "state")
    assert sinks["a"].gaps == [(first, begins)]
    got = sinks["a"].batches[first:]
    assert [batch.seq for batch in got] == list(range(begins, last + 1))
    assert isinstance(got[0].events[0], EpochStarted)


def test_a_sink_that_had_all_before_notices_nothing(tmp_path: Path, sinks: dict[str, Any]) -> None:
    """It goes on with the batch behind its last one."""
    log = tmp_path / "log"
    write(log, 40, close=False, **SMALL).close()
    once(log, "x:a", state_dir=tmp_path / "state")
    cut(log)
    write(log, 2, first=40)
    last = [batch.seq for batch in LogReader(log)][-1]
    once(log, "x:a", state_dir=tmp_path / "state")
    assert sinks["a"].gaps == []
    assert sinks["a"].seqs == list(range(last + 1))


class HangingReport(Reported):
    """A feed's transport that hangs while it is told to, and with it what follows the log for it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def send(self, batch: FeedBatch) -> None:
        self.gate.wait()
        super().send(batch)


def test_a_follower_that_hangs_keeps_its_place_up_to_twice_the_limits(
    tmp_path: Path, sinks: dict[str, Any]
) -> None:
    """Its lease holds the segments it has not read; beyond twice the limits it gets a gap, and goes on rightly."""
    log = tmp_path / "log"
    write(log, 10, **SMALL)
    sinks["a"] = hanging = Collector()
    hanging.gate.clear()
    with Running(log, "x:a", state_dir=tmp_path / "state"):
        wait_until(lambda: bool(list((log / "leases").glob("*"))), "there is no lease")
        write(log, 40, first=10, **SMALL)
        count = len(LogParts(log).parts)
        prune(log, Limits(segments=count // 2 + 1))
        assert len(LogParts(log).parts) == count
        begins = cut(log, 3)
        assert len(LogParts(log).parts) == 6
        last = [batch.seq for batch in LogReader(log)][-1]
        hanging.gate.set()
        wait_until(lambda: bool(hanging.seqs) and hanging.seqs[-1] == last, "it does not go on")
    [(first, gap_last)] = hanging.gaps
    assert gap_last == begins
    assert hanging.seqs == [*range(first), *range(begins, last + 1)]


def test_routers_are_reported_the_state_after_a_gap(tmp_path: Path, sinks: dict[str, Any]) -> None:
    """A feed that lost its place in the log says "cleared" and all that is resident."""
    log = tmp_path / "log"
    write(log, 5, close=False, **SMALL).close()
    sinks["a"] = reported = HangingReport()
    with Running(log, "feed:a") as running:
        wait_until(lambda: bool(reported.batches), "it does not run")
        reported.gate.clear()
        write(log, 3, first=5, **SMALL)
        wait_until(lambda: leased(log) is not None, "it has no lease")
        manager = write(log, 60, first=8, **SMALL)
        cut(log, 2)
        reported.gate.set()
        wait_until(lambda: reported.names == resident_names(manager.state, 0), "routers know something else")
        assert running.publisher.stats().sinks[0].lost_batches > 0

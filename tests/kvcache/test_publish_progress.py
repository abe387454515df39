"""What is told of a sink that comes to the end of a long log: how much is left, how fast it is, and when it is open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from events.log import LogReader
from events.log.segments import first_seq
from kvcache.cli.publish import _line, to_json
from kvcache.maintenance.prune import make_snapshot
from tests.support.feeds.publishing import Collector, FoldingCollector, Running, sinks, write
from tests.support.logs.logs import plain
from tests.support.waiting import wait_until

__all__ = ["plain", "sinks"]


def size_of(log: Path) -> int:
    return sum(path.stat().st_size for path in log.glob("*.kvlog"))


@pytest.mark.usefixtures("plain")
def test_what_is_read_and_what_is_left_is_all_there_is(tmp_path: Path) -> None:
    """At each batch, over segments and epochs; the marks of orderly ends are read with what follows them."""
    log = tmp_path / "log"
    write(log, 30, segment_bytes=2000)
    write(log, 30, segment_bytes=2000)
    reader, whole, left = LogReader(log), size_of(log), []
    assert reader.bytes_left() == whole
    for _ in reader:
        left.append(reader.bytes_left())
        after = whole - reader.bytes_read - left[-1]
        assert after == 0, after
    assert left == sorted(left, reverse=True)
    assert len(set(left)) == len(left)
    assert (reader.bytes_left(), reader.bytes_read) == (0, whole)


def test_from_the_middle(tmp_path: Path) -> None:
    """What was not wanted is neither read nor left."""
    log = tmp_path / "log"
    write(log, 30, segment_bytes=2000)
    reader = LogReader(log, start=20)
    next(iter(reader))
    assert 0 < reader.bytes_left() < size_of(log) / 2
    assert reader.bytes_read < 2000


def test_snapshots_are_read_too(tmp_path: Path) -> None:
    """From a snapshot on: its bytes are read before those of the segments after it."""
    log = tmp_path / "log"
    write(log, 30, segment_bytes=2000)
    *_, last = sorted(log.glob("*.kvlog"))
    snapshot = make_snapshot(log, first_seq(last))
    assert snapshot is not None
    reader = LogReader(log, state_at=snapshot.seq)
    whole = snapshot.path.stat().st_size + last.stat().st_size
    batches = iter(reader)
    assert next(batches).seq == snapshot.seq
    assert reader.bytes_read == snapshot.path.stat().st_size
    assert [*batches]
    assert (reader.bytes_left(), reader.bytes_read) == (0, whole)


def test_removed_segments_are_not_left(tmp_path: Path) -> None:
    """Nobody waits for what is gone."""
    log = tmp_path / "log"
    write(log, 30, segment_bytes=2000)
    reader = LogReader(log)
    next(iter(reader))
    before, last = reader.bytes_left(), max(log.glob("*.kvlog"))
    size = last.stat().st_size
    last.unlink()
    assert reader.bytes_left() == before - size


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("folds", [True, False])
def test_progress(tmp_path: Path, sinks: dict[str, Any], folds: bool) -> None:
    """A sink in the middle of a log: what is left shrinks to nothing. One that folds is not open until then."""
    log = tmp_path / "log"
    write(log, 200)
    sinks["a"] = collector = FoldingCollector() if folds else Collector()
    gate, reached = collector.gate, []

    def count() -> None:
        reached.append(1)
        if len(reached) == 50:
            gate.clear()
            gate.wait()

    collector.fail = count
    with Running(log, "fold:a" if folds else "x:a") as running:
        wait_until(lambda: len(reached) == 50, "it does not begin")
        [lag] = running.publisher.stats().sinks
        assert lag.catch_up is not None
        assert 0.5 * size_of(log) < lag.catch_up.bytes_left < 0.9 * size_of(log)
        assert lag.catch_up.batches_per_second > 0
        assert lag.catch_up.seconds_left is not None
        assert lag.is_open is not folds
        text = _line(running.publisher.stats())
        assert " KiB of the log left, " in text
        assert text.endswith("; not open yet") is folds
        said: Any = to_json(running.publisher.stats())["sinks"]
        assert said[0]["open"] is not folds
        assert said[0]["bytes_left"] == lag.catch_up.bytes_left
        gate.set()
        wait_until(lambda: running.publisher.stats().sinks[0].state == "running", "it stays")
        [lag] = running.publisher.stats().sinks
        assert lag.catch_up is None
        assert lag.is_open
    assert not running.publisher.stats().sinks[0].is_open

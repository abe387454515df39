"""A log that is kept within limits while an engine writes it, by a process of its own."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from events.log import LogReader, LogWriter
from events.log.retention import Limits
from events.log.segments import first_seq, segment_paths
from events.log.snapshots import snapshot_paths
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.config import LogConfig
from kvcache.fold.fingerprint import fingerprint
from kvcache.keep.process import Keeper
from kvcache.record.outputs import open_log
from kvcache.replay import fold, replay
from tests.chaos import wait_until
from tests.events.logs import TIME, batch


def config(**log: Any) -> KVCacheConfig:
    return KVCacheConfig(
        max_sequence_length=64, tokens_per_block=2, primary_blocks=64, log=LogConfig(fsync="never", **log)
    )


def work(manager: KVCacheManager, first: int, count: int) -> None:
    for number in range(first, first + count):
        manager.add_sequence(number, [100 + number] * 7)
        manager.store_context_blocks(number, 7)
        manager.remove_sequence(number)
        manager.flush()


def size_of(log: Path) -> int:
    size = 0
    for path in [*segment_paths(log), *snapshot_paths(log)]:
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def test_an_engine_s_log_stays_within_its_limits(tmp_path: Path) -> None:
    """While the engine writes, old segments go; what is left replays to the state of the engine."""
    log = tmp_path / "log"
    manager = KVCacheManager(config(retain_bytes=200_000), log=log)
    stopping, read = threading.Event(), list[int]()
    follower = LogReader(log, follow=True, stop=stopping.is_set)
    thread = threading.Thread(target=lambda: read.extend(each.seq for each in follower))
    thread.start()
    for first in range(0, 4000, 500):
        work(manager, first, 500)
    manager.close()
    wait_until(lambda: size_of(log) <= 200_000 and first_seq(segment_paths(log)[0]) > 0, "nothing is removed")
    stopping.set()
    thread.join()
    assert replay(log).fingerprint == fingerprint(manager.state)
    assert fold(LogReader(log)).fingerprint == fingerprint(manager.state)
    assert read == sorted(set(read))
    assert read[-1] == replay(log).last_seq


def test_snapshots_alone(tmp_path: Path) -> None:
    """Without limits all is kept, and replays begin with snapshots."""
    log = tmp_path / "log"
    manager = KVCacheManager(config(snapshots=True, segment_bytes=20_000), log=log)
    work(manager, 0, 500)
    manager.close()
    wait_until(lambda: bool(snapshot_paths(log)), "no snapshot is made")
    assert first_seq(segment_paths(log)[0]) == 0
    found = replay(log)
    assert found.snapshot_seq is not None
    assert found.fingerprint == replay(log, verify=True).fingerprint == fingerprint(manager.state)


def test_nothing_is_started_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a log is kept whole, and no process is started."""
    monkeypatch.setattr(Keeper, "look", lambda self: pytest.fail("it looks"))
    manager = KVCacheManager(config(segment_bytes=4096), log=tmp_path / "log")
    work(manager, 0, 100)
    manager.close()
    assert first_seq(segment_paths(tmp_path / "log")[0]) == 0


def test_a_process_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it that it cannot be started, or that it ends in failure: a warning says why, and the engine goes on."""
    keeper = Keeper(tmp_path / "missing", Limits(segments=1))
    with capture_logs() as told:
        keeper.look()
        keeper.wait()
        monkeypatch.setattr(sys, "executable", "/missing")
        keeper = Keeper(tmp_path, Limits(segments=1))
        keeper.look()
        keeper.wait()
    assert [each["event"] for each in told] == ["log_not_kept"] * 2
    assert "is not a log directory" in told[0]["reason"]
    assert told[1]["reason"] == "FileNotFoundError"


def test_segments_are_an_eighth_of_what_is_kept(tmp_path: Path) -> None:
    """A log is cut between segments only, so they must not be too large for the limits."""
    for log in (LogConfig(retain_bytes=80_000), LogConfig(retain_bytes=80)):
        writer = open_log(tmp_path / str(log.retain_bytes), log)
        writer.close()
        assert writer._recorder.output._segment_bytes == max(log.retain_bytes // 8, 4096)  # type: ignore[operator]
    kept = open_log(tmp_path / "seconds", LogConfig(retain_seconds=60))
    kept.close()
    assert kept._recorder.output._segment_ns == 7_500_000_000


def test_a_segment_ends_by_the_times_of_its_batches(tmp_path: Path) -> None:
    """However fast they are written, and equal batches give equal files."""
    for name in ("one", "other"):
        with LogWriter(tmp_path / name, segment_seconds=10, fsync="never", log_id=bytes(16)) as log:
            for seq in range(30):
                log.append(msgspec.structs.replace(batch(seq), ts=TIME + seq * 10**9))
    paths = segment_paths(tmp_path / "one")
    assert [first_seq(path) for path in paths] == [0, 11, 22]
    assert [path.read_bytes() for path in paths] == [
        path.read_bytes() for path in segment_paths(tmp_path / "other")
    ]

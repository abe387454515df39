"""A log that is kept within limits while an engine writes it, by a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from structlog.testing import capture_logs

from events.log import LogReader, LogWriter
from events.log.retention import Limits, LogParts
from events.log.segments import first_seq, segment_paths
from events.log.snapshots import snapshot_paths
from kvcache import KVCacheConfig, KVCacheManager
from kvcache.config import LogConfig
from kvcache.fold.fingerprint import fingerprint
from kvcache.maintenance.maintainer import LogMaintainer
from kvcache.manager import Substitutes
from kvcache.record import outputs
from kvcache.record.outputs import open_log
from kvcache.replay import fold, replay
from tests.support.commands import RunPython
from tests.support.logs.logs import TIME, batch, frames_of
from tests.support.waiting import wait_until

KEPT = 50_000
SEGMENT = KEPT // 8
"""How large segments are where that much is kept; snapshots are smaller."""


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
    """While the engine writes, old segments go; what is left replays to the state of the engine.

    It never has more than a segment and a snapshot beyond the limit, and not more than that when it is closed.
    """
    log = tmp_path / "log"
    manager = KVCacheManager(config(retain_bytes=KEPT), log=log)
    for first in range(0, 400, 20):
        work(manager, first, 20)
        assert size_of(log) <= KEPT + 2 * SEGMENT
    manager.close()
    assert size_of(log) <= KEPT
    assert first_seq(segment_paths(log)[0]) > 0
    assert replay(log).fingerprint == fingerprint(manager.state)
    assert fold(LogReader(log)).fingerprint == fingerprint(manager.state)


def test_a_log_waits_for_its_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: no third segment begins before what the first has asked for is done."""
    log, goes_on, waits = tmp_path / "log", threading.Event(), threading.Event()
    popen, wait = subprocess.Popen, LogMaintainer.wait

    def slowly(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        goes_on.wait()
        return popen(*args, **options)

    def waiting(maintainer: LogMaintainer) -> None:
        if len(segment_paths(log)) > 1:
            waits.set()
        wait(maintainer)

    monkeypatch.setattr(subprocess, "Popen", slowly)
    monkeypatch.setattr(LogMaintainer, "wait", waiting)
    manager = KVCacheManager(config(retain_bytes=40_000), log=log)
    work(manager, 0, 100)
    assert waits.wait(60)
    assert len(segment_paths(log)) == 2
    goes_on.set()
    manager.close()
    assert size_of(log) <= 40_000
    assert replay(log).fingerprint == fingerprint(manager.state)


def test_a_keeper_is_started_once_and_ends_with_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process keeps all segments; when it was killed, there is another one. A follower gets each batch once."""
    log, stopping, read = tmp_path / "log", threading.Event(), list[int]()
    started, popen = list[subprocess.Popen[bytes]](), subprocess.Popen

    def starts(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", starts)
    manager = KVCacheManager(config(retain_bytes=40_000), log=log)
    follower = LogReader(log, follow=True, stop=stopping.is_set)
    thread = threading.Thread(target=lambda: read.extend(each.seq for each in follower))
    thread.start()
    work(manager, 0, 100)
    wait_until(lambda: bool(started), "none is started")
    started[0].kill()
    started[0].wait()
    work(manager, 100, 100)
    manager.close()
    wait_until(lambda: follower.closed, "the follower does not get to the end")
    stopping.set()
    thread.join()
    assert len(started) == 2
    assert all(each.returncode is not None for each in started)
    assert first_seq(segment_paths(log)[0]) > 0
    assert read == sorted(set(read))
    assert read[-1] == replay(log).last_seq


def test_a_keeper_ends_with_its_log_though_a_forked_child_has_its_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing does not wait until the process gives up to be asked again."""
    started, popen = list[subprocess.Popen[bytes]](), subprocess.Popen

    def starts(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", starts)
    manager = KVCacheManager(config(retain_bytes=40_000), log=tmp_path / "log")
    work(manager, 0, 20)
    wait_until(lambda: bool(started), "none is started")
    assert started[0].stdin is not None
    inherited = os.dup(started[0].stdin.fileno())
    manager.close()
    os.close(inherited)
    assert [each.returncode for each in started] == [-signal.SIGTERM]


def test_a_program_that_forgets_to_close_says_nothing(tmp_path: Path, run_python: RunPython) -> None:
    """The process ends with it, at work or not, and what is left of the log replays."""
    run = run_python(
        "from kvcache import KVCacheManager\n"
        "from tests.support.engines.traffic import Traffic, config\n"
        "limited = config(max_sequence_length=16, log={'fsync': 'never', 'retain_bytes': 40_000})\n"
        "Traffic(KVCacheManager(limited, log='log'), 0).record(600)\n"
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert size_of(tmp_path / "log") <= 40_000 + 2 * SEGMENT
    assert replay(tmp_path / "log").last_seq is not None


def test_a_clock_that_is_set_back_does_not_keep_what_is_old(tmp_path: Path) -> None:
    """By the log's own clock, which stands still then, segments end and go as before."""
    log, now = tmp_path / "log", [TIME]
    manager = KVCacheManager(
        config(retain_seconds=60), log=log, substitutes=Substitutes(wall_ns=lambda: now[0])
    )
    for number in range(200):
        now[0] += 2 * 10**9 if number != 100 else -24 * 3600 * 10**9
        work(manager, number, 1)
    manager.close()
    kept = LogParts(log)
    assert (kept.parts[-1].ts - kept.parts[1].ts) / 1e9 <= 60
    assert now[0] - kept.parts[0].ts < 90 * 10**9
    assert replay(log).fingerprint == fingerprint(manager.state)


def test_snapshots_alone(tmp_path: Path) -> None:
    """Without limits all is kept, and replays begin with snapshots."""
    log = tmp_path / "log"
    manager = KVCacheManager(config(snapshots=True, segment_bytes=8_000), log=log)
    work(manager, 0, 200)
    manager.close()
    wait_until(lambda: bool(snapshot_paths(log)), "no snapshot is made")
    assert first_seq(segment_paths(log)[0]) == 0
    found = replay(log)
    assert found.snapshot_seq is not None
    assert found.fingerprint == replay(log, verify=True).fingerprint == fingerprint(manager.state)


def test_nothing_is_started_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a log is kept whole, and no process is started."""
    monkeypatch.setattr(LogMaintainer, "look", lambda self: pytest.fail("it looks"))
    manager = KVCacheManager(config(segment_bytes=4096), log=tmp_path / "log")
    work(manager, 0, 100)
    manager.close()
    assert first_seq(segment_paths(tmp_path / "log")[0]) == 0


def test_a_process_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it that it cannot be started, or that it ends in failure: a warning says why, and the engine goes on."""
    fails = LogMaintainer(tmp_path / "missing", Limits(segments=1))
    with capture_logs() as reported:
        fails.look()
        fails.wait()
        monkeypatch.setattr(sys, "executable", "/missing")
        is_missing = LogMaintainer(tmp_path, Limits(segments=1))
        is_missing.look()
        is_missing.wait()
    fails.close()
    assert [each["event"] for each in reported] == ["log_not_kept"] * 2
    assert "is not a log directory" in reported[0]["reason"]
    assert reported[1]["reason"] == "FileNotFoundError"


def test_segments_are_an_eighth_of_what_is_kept(tmp_path: Path) -> None:
    """A log is cut between segments only, so they must not be too large for the limits."""
    with patch.object(outputs, "LogWriter") as opened:
        for limits, name, size in (
            (LogConfig(retain_bytes=80_000), "segment_bytes", 10_000),
            (LogConfig(retain_bytes=80), "segment_bytes", 4096),
            (LogConfig(retain_seconds=60), "segment_seconds", 7.5),
        ):
            open_log(tmp_path, limits)
            assert opened.call_args.kwargs[name] == size


def test_a_segment_ends_by_the_times_of_its_batches(tmp_path: Path) -> None:
    """However fast they are written: one by one as in one go."""
    for name in ("one by one", "at once"):
        with LogWriter(tmp_path / name, segment_seconds=10, fsync="never", log_id=bytes(16)) as log:
            for seq in range(30):
                log.append(msgspec.structs.replace(batch(seq), ts=TIME + seq * 10**9))
                if name == "one by one":
                    log.flush()
        assert [first_seq(path) for path in segment_paths(tmp_path / name)] == [0, 11, 22]
    assert frames_of(tmp_path / "one by one") == frames_of(tmp_path / "at once")

"""When batches are on disk: the policies of syncs, who waits for them, and disks that hang."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from events import EventBatch, Gap, LogWriteFailed
from events.log import LogReader, LogWriter
from events.log.frames import MAX_PAYLOAD
from kvcache.manager import KVCacheManager
from tests.support.commands import RunPython
from tests.support.engines import strategies
from tests.support.logs.logs import batch, batches, plain, read_log, segments, write_log
from tests.support.logs.syncs import record_syncs
from tests.support.waiting import WAIT, wait_until

__all__ = ["plain"]

pytestmark = pytest.mark.usefixtures("plain")


class Disk:
    """Notes how large segments are when they are synced; and hangs as long as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.syncs: list[int] = []
        self.released = threading.Event()
        self.released.set()
        self.entered = threading.Event()
        for name in ("fdatasync", "fsync"):
            if hasattr(os, name):
                monkeypatch.setattr(os, name, self._noting(getattr(os, name)))

    def _noting(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            found = os.fstat(descriptor)
            self.entered.set()
            assert self.released.wait(WAIT)
            call(descriptor)
            if stat.S_ISREG(found.st_mode):
                self.syncs.append(found.st_size)

        return sync

    def hang(self) -> None:
        self.entered.clear()
        self.released.clear()


def durable_on_disk(disk: Disk, log: LogWriter) -> int:
    """The last batch that the last sync has made durable, by the sizes of files: one segment, batches of a size."""
    whole = [each.stat().st_size for each in log.directory.glob("*.kvlog")]
    assert len(whole) == 1
    return sum(size <= max(disk.syncs) for size in frame_ends(log.directory)) - 1


def frame_ends(directory: Path) -> list[int]:
    [path] = directory.glob("*.kvlog")
    data, ends = path.read_bytes(), [64]
    while ends[-1] < len(data):
        ends.append(ends[-1] + 36 + int.from_bytes(data[ends[-1] + 4 : ends[-1] + 8], "little"))
    return ends[1:]


class TestPolicies:
    """What each promises."""

    def test_always_waits_in_each_append(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """When `append` returns, the batch is on disk."""
        disk = Disk(monkeypatch)
        with LogWriter(tmp_path, fsync="always") as log:
            for item in batches(10):
                assert log.append(item)
                assert log.durable_seq == durable_on_disk(disk, log) == item.seq

    def test_always_does_not_wait_for_a_disk_that_refuses(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`append` returns, nothing is called durable meanwhile, and all of it is in the end."""
        with LogWriter(tmp_path, fsync="always", overflow="drop") as log:
            log.append(batch(0))

            def refuse(*_: object) -> int:
                raise OSError(5, os.strerror(5))

            with monkeypatch.context() as patch:
                patch.setattr(os, "writev", refuse)
                for item in batches(5, 1):
                    assert log.append(item)
                assert (log.durable_seq, log.stats().state) == (0, "suspended")
            wait_until(lambda: log.stats().state == "running")
            assert log.flush()
            assert log.durable_seq == 5

    def test_group_does_not_wait(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """While the disk hangs, `append` returns and nothing is durable; soon afterwards all is, with few syncs."""
        disk = Disk(monkeypatch)
        with LogWriter(tmp_path) as log:
            disk.hang()
            for item in batches(50):
                log.append(item)
            assert disk.entered.wait(WAIT)
            assert (log.durable_seq, log.stats().lag_batches) == (-1, 50)
            assert log.wait_durable(0, 0.01) is False
            disk.released.set()
            assert log.wait_durable(49, WAIT)
            assert log.durable_seq == durable_on_disk(disk, log) == 49
            assert len(disk.syncs) <= 5

    def test_interval_syncs_no_more_often(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Batches are readable at once; they are synced when a time of the clock has passed since the first one."""
        disk, now = Disk(monkeypatch), [0.0]
        with LogWriter(tmp_path, fsync="interval", fsync_seconds=10, clock=lambda: now[0]) as log:
            for begin in (0, 30, 60):
                disk.syncs.clear()
                for item in batches(29, begin):
                    log.append(item)
                    now[0] += 0.3  # 8.7 in all
                wait_until(lambda: len(read_log(tmp_path)[0]) == begin + 29)  # noqa: B023
                assert disk.syncs in ([], [64])
                assert log.durable_seq == begin - 1
                now[0] += 10
                log.append(batch(begin + 29))  # which need not be in time for that sync
                assert log.wait_durable(begin + 28, WAIT)
                log.flush()
                assert log.durable_seq == durable_on_disk(disk, log) == begin + 29

    def test_interval_syncs_by_itself(self, tmp_path: Path) -> None:
        """Nobody need ask, nor append anything else."""
        with LogWriter(tmp_path, fsync="interval", fsync_seconds=0.05) as log:
            for item in batches(5):
                log.append(item)
            assert log.wait_durable(4, WAIT)

    def test_interval_is_hastened_by_who_flushes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`flush` makes durable at once what would have been in an hour; waiting alone hastens nothing."""
        disk = Disk(monkeypatch)
        with LogWriter(tmp_path, fsync="interval", fsync_seconds=3600) as log:
            for item in batches(5):
                log.append(item)
            assert log.wait_durable(4, 0.3) is False
            assert len(read_log(tmp_path)[0]) == 5
            assert (log.durable_seq, log.stats().lag_batches) == (-1, 5)
            assert log.flush(WAIT)
            assert log.durable_seq == durable_on_disk(disk, log) == 4

    def test_interval_keeps_no_more_than_half_a_queue_unsynced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where more is written in an interval, it is synced sooner, and nothing is lost for that."""
        Disk(monkeypatch)
        with LogWriter(tmp_path, fsync="interval", fsync_seconds=3600, max_queued_batches=20) as log:
            for item in batches(200):
                assert log.append(item)
                # The next one finds half of the queue full then.
                wait_until(lambda: log.stats().lag_batches <= 11)

    def test_never_syncs_where_files_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each once, the last one when the log is closed; nobody waits for the rest, which is not called durable."""
        write_log(tmp_path, batches(3))
        synced = record_syncs(monkeypatch)
        log = LogWriter(tmp_path, fsync="never", resume=True, segment_bytes=600)
        for item in batches(20, 3):
            log.append(item)
        assert log.flush()
        opened, *ended, last = segments(tmp_path)
        assert len(ended) > 3
        first = int(last.stem)
        assert (log.durable_seq, log.wait_durable(first - 1), log.wait_durable(first)) == (
            first - 1,
            True,
            False,
        )
        assert log.stats().lag_batches == 0
        sizes = [found.st_size for found in synced if stat.S_ISREG(found.st_mode)]
        headers = [64] * (len(ended) + 1)
        assert sorted(sizes) == sorted(
            [opened.stat().st_size, *headers, *(path.stat().st_size for path in ended)]
        )
        log.close()
        assert log.durable_seq == 22
        assert last.stat().st_ino in {found.st_ino for found in synced if found.st_size > 64}

    def test_time_between_syncs_is_above_zero(self, tmp_path: Path) -> None:
        """Other times are a ValueError."""
        with pytest.raises(ValueError, match="fsync_seconds"):
            LogWriter(tmp_path / "log", fsync="interval", fsync_seconds=0)


class TestWaiting:
    """Who waits for a batch to be on disk."""

    def test_any_thread_may_wait(self, tmp_path: Path) -> None:
        """Each is woken when its batch is there, whatever others wait for."""
        with LogWriter(tmp_path) as log:
            found: list[tuple[int, bool, bool]] = []

            def wait(seq: int) -> None:
                reported = log.wait_durable(seq, WAIT)
                found.append((seq, reported, log.durable_seq >= seq))

            threads = [threading.Thread(target=wait, args=(seq,)) for seq in range(0, 200, 10)]
            for thread in threads:
                thread.start()
            for item in batches(200):
                log.append(item)
            for thread in threads:
                thread.join()
        assert sorted(found) == [(seq, True, True) for seq in range(0, 200, 10)]

    def test_closing_wakes_who_waits(self, tmp_path: Path) -> None:
        """A batch that never comes is waited for until the log is closed, which is told."""
        log, raised = LogWriter(tmp_path), list[str]()

        def wait() -> None:
            with pytest.raises(LogWriteFailed) as caught:
                log.wait_durable(7)
            raised.append(str(caught.value))

        thread = threading.Thread(target=wait)
        thread.start()
        log.append(batch(0))
        log.close()
        thread.join()
        assert len(raised) == 1
        assert "the log is closed" in raised[0]
        assert log.wait_durable(0)

    def test_a_manager_waits_for_what_it_has_flushed(self, tmp_path: Path) -> None:
        """Without a log there is nothing to wait for; with one that is never synced nobody waits for ever."""
        assert KVCacheManager(strategies.config()).wait_durable(0)
        for fsync, reported in (("group", True), ("interval", True), ("always", True), ("never", False)):
            config = strategies.config(log={"fsync": fsync, "fsync_seconds": 0.05})
            with KVCacheManager(config, log=tmp_path / fsync) as manager:
                manager.add_sequence(1, [1, 2, 3])
                last = manager.flush()
                assert last is not None
                assert manager.wait_durable(WAIT) is reported
                stats = manager.log_stats()
                assert stats is not None
                assert stats.durable_seq == (last.seq if reported else -1)
            stats = manager.log_stats()
            assert stats is not None
            assert stats.durable_seq >= last.seq


class TestHangingDisk:
    """A disk that says nothing for long."""

    def test_the_engine_does_not_wait(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Appends return, what does not fit is counted, and a gap stands for it when the disk goes on."""
        disk = Disk(monkeypatch)
        with LogWriter(tmp_path, overflow="drop", max_queued_batches=100) as log:
            log.append(batch(0))
            assert log.flush()
            disk.hang()
            log.append(batch(1))
            assert disk.entered.wait(WAIT)
            for item in batches(2000, 2):
                log.append(item)
            stats = log.stats()
            assert (stats.batches, stats.lag_batches, stats.dropped_batches) == (1, 100, 1901)
            assert (stats.durable_seq, stats.state) == (0, "running")
            assert log.pop_gap() is None
            disk.released.set()
            assert log.flush(WAIT)
            gap = log.pop_gap()
            assert gap == Gap(101, 2001, "the log could not keep up")
            assert log.append(EventBatch(2002, 0, (gap,)))
            assert log.wait_durable(1500, WAIT)
        assert [each.seq for each in LogReader(tmp_path)] == [*range(101), 2002]


class TestLargeBatches:
    """Batches that no frame holds."""

    def test_such_a_batch_is_lost_and_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its run of tokens has no room in a frame: it is lost alone, a gap says so, and the log goes on."""
        assert MAX_PAYLOAD == 1 << 30
        monkeypatch.setattr("events.log.frames.MAX_PAYLOAD", 5000)
        with LogWriter(tmp_path) as log:
            log.append(batch(0))
            log.append(batch(1, range(100_000)))
            log.flush()
            gap = log.pop_gap()
            assert gap == Gap(1, 1, "a batch cannot be encoded (OverflowError)")
            log.append(EventBatch(2, 0, (gap,)))
        assert [each.seq for each in LogReader(tmp_path)] == [0, 2]


def test_a_forked_child_is_refused_everything(tmp_path: Path, run_python: RunPython) -> None:
    """Appending, flushing and waiting raise the listed error, a second writer is refused, and the parent goes on."""
    code = (
        "import os, sys\n"
        "from events import LogLocked, LogWriteFailed; from events.log import LogWriter\n"
        "from tests.support.logs.logs import batches\n"
        "log = LogWriter('log', fsync='always')\n"
        "first, second = batches(2)\n"
        "log.append(first)\n"
        "if (child := os.fork()) == 0:\n"
        "    told = []\n"
        "    for call in (lambda: log.append(second), log.flush, log.check, lambda: log.wait_durable(1)):\n"
        "        try: call()\n"
        "        except LogWriteFailed as error: told.append('parent' in str(error))\n"
        "    try: LogWriter('log', resume=True)\n"
        "    except LogLocked as error: told.append(error.holder == f'process {os.getppid()}')\n"
        "    sys.exit(7 if told == [True] * 5 else 8)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "log.append(second); log.close()\n"
    )
    found: Any = run_python(code)
    assert (found.returncode, found.stderr) == (0, "")
    content, end = read_log(tmp_path / "log")
    assert (content, end.kind) == (batches(2), "clean")

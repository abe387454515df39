"""Writing logs: order, files, bytes on disk, full queues, full disks, privacy."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog

from events import (
    EventBatch,
    Gap,
    LogExists,
    LogLocked,
    LogUnavailable,
    LogWriteFailed,
    NotALog,
)
from events.log import LogReader, LogWriter, output
from events.log import segments as segment_files
from events.log import writer as recorder
from tests.support.commands import RunPython
from tests.support.logs.held_disk import HoldDisk
from tests.support.logs.logs import (
    LOG_ID,
    batch,
    batches,
    form,
    frames_of,
    large_batch,
    plain,
    read_log,
    segments,
    settle,
    without_syncs,
    write_log,
)
from tests.support.logs.syncs import record_syncs
from tests.support.places import ROOT
from tests.support.seeds import seeds
from tests.support.waiting import WAIT, wait_until

__all__ = ["form", "plain"]


class TestFiles:
    """What is on disk."""

    @pytest.mark.parametrize("fsync", ["group", "never"])
    def test_everything_appended_is_on_disk_after_flush(self, tmp_path: Path, fsync: Any) -> None:
        """`flush` returns when another process could read all that was appended."""
        with LogWriter(tmp_path, fsync=fsync) as log:
            for item in batches(20):
                log.append(item)
            assert log.flush()
            content, end = read_log(tmp_path)
            assert (content, end.kind) == (batches(20), "open")
            assert log.batches_written == 20
            assert log.bytes_written == sum(path.stat().st_size for path in segments(tmp_path))
        assert read_log(tmp_path)[1].kind == "clean"
        assert log.bytes_written == sum(path.stat().st_size for path in segments(tmp_path))

    def test_batches_are_written_without_being_asked_for(self, tmp_path: Path) -> None:
        """A batch reaches the disk by itself, soon, also after the writer has been idle."""
        with LogWriter(tmp_path) as log:
            late = time.monotonic() + WAIT
            reader = iter(LogReader(tmp_path, follow=True, stop=lambda: time.monotonic() > late))
            for item in batches(3):
                log.append(item)
                assert next(reader) == item

    def test_group_fsync_syncs_what_flush_waits_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With fsync="group" the file is synced when flush returns; with "never" only the header ever is."""
        for fsync in ("never", "group"):
            with monkeypatch.context() as patch, LogWriter(tmp_path / fsync, fsync=fsync) as log:
                synced = record_syncs(patch)
                log.append(batch(0))
                log.flush()
                [path] = segments(tmp_path / fsync)
                sizes = [status.st_size for status in synced if stat.S_ISREG(status.st_mode)]
                assert sizes == ([64, path.stat().st_size] if fsync == "group" else [64])

    def test_a_segment_has_its_name_when_its_header_is_on_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The header is synced before the file gets its name, and then the directory, also with fsync="never"."""
        calls: list[str] = []
        rename = Path.rename

        def note_rename(self: Path, target: Path) -> Path:
            calls.extend("sync directory" if stat.S_ISDIR(each.st_mode) else "sync file" for each in synced)
            calls.append("rename")
            synced.clear()
            return rename(self, target)

        with LogWriter(tmp_path, fsync="never") as log:
            synced = record_syncs(monkeypatch)
            monkeypatch.setattr(Path, "rename", note_rename)
            log.append(batch(0))
            log.flush()
            assert calls == ["sync file", "rename"]
            assert [stat.S_ISDIR(status.st_mode) for status in synced] == [True]

    @pytest.mark.usefixtures("plain")
    def test_segments_begin_where_the_limit_is_reached(self, tmp_path: Path) -> None:
        """No segment is larger than its limit unless one batch is; names are the first batch's number."""
        content = [*batches(15), large_batch(15, 3000), *batches(15, 16)]
        write_log(tmp_path, content, segment_bytes=1000)
        assert read_log(tmp_path)[0] == content
        sizes = [path.stat().st_size for path in segments(tmp_path)]
        assert len(sizes) > 4
        assert sorted(size > 1036 for size in sizes) == [False] * (len(sizes) - 1) + [True]
        assert f"{15:020d}.kvlog" in [path.name for path in segments(tmp_path)]
        assert not list(tmp_path.glob("*.tmp"))

    def test_segments_end_where_they_would_be_read_for_long(self, tmp_path: Path) -> None:
        """However well it is compressed, a segment holds no more than eight times what its file may have."""
        content = [large_batch(seq, 1000) for seq in range(60)]
        write_log(tmp_path, content, segment_bytes=4096)
        assert read_log(tmp_path)[0] == content
        first, second, *_ = (int(path.stem) for path in segments(tmp_path))
        sizes = [36 + len(payload) for _, payload in frames_of(tmp_path)[first : second + 1]]
        assert sum(sizes[:-1]) <= 8 * 4096 < sum(sizes)
        assert all(path.stat().st_size < 4096 for path in segments(tmp_path))

    @pytest.mark.parametrize("segment_bytes", [600, 1 << 20])
    def test_equal_batches_give_equal_frames(self, tmp_path: Path, segment_bytes: int, form: str) -> None:
        """How batches were grouped can be seen in one flag alone, and when they were written nowhere.

        Grouping shows in compressed files, and not in what they hold.
        """
        write_log(tmp_path / "at once", batches(30), segment_bytes=segment_bytes)
        with LogWriter(tmp_path / "one by one", log_id=LOG_ID, segment_bytes=segment_bytes) as log:
            for item in batches(30):
                log.append(item)
                log.flush()
        assert frames_of(tmp_path / "at once") == frames_of(tmp_path / "one by one")
        if form == "compressed":
            return
        pairs = zip(segments(tmp_path / "at once"), segments(tmp_path / "one by one"), strict=True)
        assert all(a.name == b.name and without_syncs(a) == without_syncs(b) for a, b in pairs)

    def test_logs_have_ids_of_their_own(self, tmp_path: Path) -> None:
        """Two logs are told apart by 16 random bytes, which the first event names."""
        with LogWriter(tmp_path / "a") as a, LogWriter(tmp_path / "b") as b:
            assert a.epoch_started.log_id != b.epoch_started.log_id
            assert len(a.epoch_started.log_id) == 16

    def test_files_are_private_whatever_the_umask(self, tmp_path: Path) -> None:
        """Directories are 0700 and files 0600, those of recovery too, under a umask that forbids nothing."""
        directory = tmp_path / "log"
        directory.mkdir(mode=0o755)
        before = os.umask(0)
        try:
            write_log(directory, batches(1))
            with segments(directory)[0].open("r+b") as file:
                file.truncate(200)
            write_log(directory, batches(1), resume=True)
            write_log(tmp_path / "made", batches(1))
        finally:
            os.umask(before)
        paths = [directory, tmp_path / "made", *directory.rglob("*"), *(tmp_path / "made").rglob("*")]
        assert len(paths) > 6
        for path in paths:
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path

    def test_one_write_takes_more_frames_than_the_system_takes_buffers(self, tmp_path: Path) -> None:
        """Thousands of waiting batches are written in few writes, none lost at the system's limit of buffers."""
        with LogWriter(tmp_path, fsync="never") as log:
            for item in batches(3000):
                log.append(item)
        assert read_log(tmp_path)[0] == batches(3000)


def read_only() -> None:
    """What a read-only disk answers."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


class TestOpening:
    """Which directories a log may be opened in."""

    def test_existing_log_is_not_overwritten(self, tmp_path: Path) -> None:
        """Without resume=True, a log is left alone, byte by byte."""
        write_log(tmp_path, batches(1))
        before = segments(tmp_path)[0].read_bytes()
        with pytest.raises(LogExists) as raised:
            LogWriter(tmp_path)
        assert raised.value.path == tmp_path
        assert [path.read_bytes() for path in segments(tmp_path)] == [before]
        LogWriter(tmp_path, resume=True).close()

    @pytest.mark.parametrize("resume", [False, True])
    def test_other_peoples_directories_are_not_touched(self, tmp_path: Path, resume: bool) -> None:
        """A directory with other files in it is refused and stays as it was."""
        (tmp_path / "cat.png").touch()
        mode = tmp_path.stat().st_mode
        with pytest.raises(NotALog):
            LogWriter(tmp_path, resume=resume)
        assert [path.name for path in tmp_path.iterdir()] == ["cat.png"]
        assert tmp_path.stat().st_mode == mode

    @pytest.mark.parametrize("parts", [["file"], ["file", "log"]])
    def test_file_in_the_way_is_no_log(self, tmp_path: Path, parts: list[str]) -> None:
        """A file where the directory should be, or above it, is refused as other files are."""
        (tmp_path / "file").write_text("mine")
        with pytest.raises(NotALog):
            LogWriter(tmp_path.joinpath(*parts))
        assert (tmp_path / "file").read_text() == "mine"

    def test_place_that_cannot_be_used_is_reported(self, tmp_path: Path) -> None:
        """A path that is too long, or where nothing can be made, is a listed error with the system's reason."""
        for place in (tmp_path / ("x" * 300), Path("/proc/self/log")):
            with pytest.raises(LogUnavailable, match="choose a directory") as raised:
                LogWriter(place)
            assert raised.value.path == place
            assert raised.value.reason in str(raised.value)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    @pytest.mark.parametrize("resume", [False, True])
    def test_directory_without_permission_is_reported(self, tmp_path: Path, resume: bool) -> None:
        """A directory that this user may not write to is left as it is."""
        write_log(tmp_path / "log", batches(1) if resume else [])
        (tmp_path / "log" / "LOCK").unlink()
        (tmp_path / "log").chmod(0o500)
        with pytest.raises(LogUnavailable, match=os.strerror(errno.EACCES)):
            LogWriter(tmp_path / "log", resume=resume)

    @pytest.mark.parametrize(("owner", "name"), [(os, "open"), (Path, "mkdir"), (os, "ftruncate")])
    def test_read_only_disk_is_reported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
    ) -> None:
        """Whichever call of opening the system refuses, the error is the listed one, and no lock is kept."""
        write_log(tmp_path / "log", batches(1))
        with segments(tmp_path / "log")[0].open("r+b") as file:
            file.truncate(200)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *_, **__: read_only())
            with pytest.raises(LogUnavailable, match=os.strerror(errno.EROFS)):
                LogWriter(tmp_path / "log", resume=True)
        LogWriter(tmp_path / "log", resume=True).close()

    def test_second_writer_is_refused(self, tmp_path: Path) -> None:
        """One log has one writer, also within one process; closing lets the next one in."""
        with LogWriter(tmp_path):
            with pytest.raises(LogLocked) as raised:
                LogWriter(tmp_path, resume=True)
            assert raised.value.holder == f"process {os.getpid()}"
        LogWriter(tmp_path, resume=True).close()

    def test_second_writer_is_refused_though_the_lock_was_deleted(self, tmp_path: Path) -> None:
        """Who tidies up a directory does not let a second writer in; who holds it is not known any more."""
        with LogWriter(tmp_path) as log:
            log.append(batch(0))
            (tmp_path / "LOCK").unlink()
            with pytest.raises(LogLocked) as raised:
                LogWriter(tmp_path, resume=True)
            assert raised.value.holder == "another process"
            log.append(batch(1))
        with LogWriter(tmp_path, resume=True) as log:
            assert log.next_seq == 2

    def test_log_in_the_place_of_a_moved_one_is_left_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A writer whose directory was moved opens nothing in the one that has its name now, and goes on when back."""
        place, moved = tmp_path / "log", tmp_path / "old"
        log = LogWriter(place, segment_bytes=500)
        log.append(batch(0))
        log.flush()
        place.rename(moved)
        write_log(place, batches(1, 0))
        before = {path: path.read_bytes() for path in segments(place)}
        with monkeypatch.context() as patch:
            Refusal(patch, os, "writev")
            log.append(batch(1))
            with pytest.raises(LogWriteFailed):
                log.flush()
        for seq in (2, 3):
            with pytest.raises(LogWriteFailed, match="the log's directory was moved or removed; restore"):
                log.flush()
            log.append(batch(seq))
        assert {path: path.read_bytes() for path in place.glob("*.kvlog*")} == before
        place.rename(tmp_path / "other")
        moved.rename(place)
        log.close()
        assert read_log(place)[0] == batches(4)

    def test_writer_in_another_process_is_named(self, tmp_path: Path) -> None:
        """The error says which process holds the log; its death frees it."""
        code = (
            "import sys; from events.log import LogWriter\n"
            "log = LogWriter(sys.argv[1]); print('open', flush=True); input()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "log")],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"open\n"
            with pytest.raises(LogLocked, match=f"process {child.pid}:"):
                LogWriter(tmp_path / "log", resume=True)
            child.kill()
        LogWriter(tmp_path / "log", resume=True).close()

    @pytest.mark.parametrize(
        "options", [{"log_id": b"short"}, {"segment_bytes": 0}, {"max_queued_batches": 0}]
    )
    def test_impossible_settings_are_refused(self, tmp_path: Path, options: dict[str, Any]) -> None:
        """Settings that cannot work are a ValueError before anything is created."""
        with pytest.raises(ValueError, match="log"):
            LogWriter(tmp_path / "log", **options)
        assert not (tmp_path / "log").exists()

    def test_batches_come_in_order(self, tmp_path: Path) -> None:
        """A batch with another number than the next one is refused, and nothing is lost by that."""
        with LogWriter(tmp_path) as log:
            log.append(batch(0))
            for seq in (0, 2):
                with pytest.raises(ValueError, match="batch 1 was expected"):
                    log.append(batch(seq))
            log.append(batch(1))
        assert read_log(tmp_path)[0] == batches(2)

    def test_closed_log_takes_nothing(self, tmp_path: Path) -> None:
        """After `close`, which may be called twice, appending and flushing fail."""
        log = LogWriter(tmp_path)
        log.close()
        log.close()
        with pytest.raises(LogWriteFailed, match="closed"):
            log.append(batch(0))
        with pytest.raises(LogWriteFailed, match="closed"):
            log.flush()


class TestFullQueue:
    """What happens when the disk is slower than the engine."""

    def test_block_waits_for_room_and_loses_nothing(self, tmp_path: Path, hold_disk: HoldDisk) -> None:
        """With overflow="block", append returns when there is room, and every batch is written."""
        with LogWriter(tmp_path, max_queued_batches=4) as log:
            appended: list[int] = []
            fourth = threading.Event()

            def engine() -> None:
                for item in batches(10):
                    log.append(item)
                    appended.append(item.seq)
                    if item.seq == 3:
                        fourth.set()

            with hold_disk():
                thread = threading.Thread(target=engine)
                thread.start()
                assert fourth.wait(WAIT)
                thread.join(0.1)
                assert thread.is_alive()
                assert appended == [0, 1, 2, 3]
            thread.join()
            assert log.dropped_batches == 0
        assert read_log(tmp_path)[0] == batches(10)

    def test_drop_loses_a_range_and_says_which(self, tmp_path: Path, hold_disk: HoldDisk) -> None:
        """With overflow="drop", what does not fit is counted, and so is all up to the batch that tells the gap."""
        log = LogWriter(tmp_path, max_queued_batches=4, overflow="drop")
        with hold_disk():
            assert [log.append(item) for item in batches(7)] == [True] * 4 + [False] * 3
            assert log.pop_gap() is None
        assert log.flush()
        assert log.append(batch(7)) is False
        gap = log.pop_gap()
        assert gap == Gap(4, 7, "the log could not keep up")
        announcing = EventBatch(8, 0, (gap,))
        assert log.append(announcing)
        assert log.pop_gap() is None
        assert log.append(batch(9))
        log.close()
        content, end = read_log(tmp_path)
        assert content == [*batches(4), announcing, batch(9)]
        assert (end.kind, end.last_seq) == ("clean", 9)
        assert (log.batches_written, log.dropped_batches) == (6, 4)

    def test_nothing_slips_in_after_a_lost_batch(self, tmp_path: Path, hold_disk: HoldDisk) -> None:
        """After a batch that was too large for the room left, small ones are refused too, until the gap is told."""
        with LogWriter(tmp_path, max_queued_bytes=10_000, overflow="drop") as log:
            with hold_disk():
                assert [log.append(large_batch(seq, size)) for seq, size in ((0, 2000), (1, 9000))] == [
                    True,
                    False,
                ]
                assert log.append(batch(2)) is False
            log.flush()
            assert log.append(batch(3)) is False
            assert log.pop_gap() == Gap(1, 3, "the log could not keep up")
            assert log.append(batch(4))
        assert [item.seq for item in read_log(tmp_path)[0]] == [0, 4]

    def test_batch_with_the_gap_is_taken_whatever_its_size(self, tmp_path: Path, hold_disk: HoldDisk) -> None:
        """The whole state after a gap may be larger than the queue, and one that grew since is said again."""
        with LogWriter(tmp_path, max_queued_bytes=3000, overflow="drop") as log:
            with hold_disk():
                assert [log.append(large_batch(seq, 1000)) for seq in range(4)] == [True, True, False, False]
            log.flush()
            assert log.pop_gap() == Gap(2, 3, "the log could not keep up")
            assert log.append(large_batch(4, 50_000))
        assert [item.seq for item in read_log(tmp_path)[0]] == [0, 1, 4]

    @pytest.mark.parametrize("overflow", ["block", "drop"])
    def test_batch_larger_than_the_queue_goes_through_alone(self, tmp_path: Path, overflow: Any) -> None:
        """A limit on bytes bounds memory; it does not make a large batch impossible."""
        with LogWriter(tmp_path, max_queued_bytes=1000, overflow=overflow) as log:
            for seq in range(3):
                assert log.append(large_batch(seq, 10_000))
                log.flush()
        assert len(read_log(tmp_path)[0]) == 3

    def test_loss_at_the_end_shows_in_the_end(self, tmp_path: Path, hold_disk: HoldDisk) -> None:
        """Where nobody announced a loss before closing, the end of the log still says how far it should go."""
        log = LogWriter(tmp_path, max_queued_batches=2, overflow="drop")
        with hold_disk():
            assert [log.append(item) for item in batches(5)] == [True] * 2 + [False] * 3
        log.close()
        end = read_log(tmp_path)[1]
        assert (end.kind, end.last_seq, end.next_seq) == ("clean", 1, 5)
        with LogWriter(tmp_path, resume=True) as log:
            assert (log.next_seq, log.epoch_started.previous_last_seq) == (5, 4)
            log.append(batch(5))
        assert [item.seq for item in read_log(tmp_path)[0]] == [0, 1, 5]

    def test_flush_gives_up_in_time(self, tmp_path: Path, hold_disk: HoldDisk) -> None:
        """A flush whose time passes says False and loses nothing."""
        with LogWriter(tmp_path) as log:
            with hold_disk():
                log.append(batch(0))
                assert log.flush(timeout=0.01) is False
            assert log.flush() is True
        assert read_log(tmp_path)[0] == batches(1)


FULL_DISK = """
import json, resource, signal, sys
from events import LogWriteFailed
from events.log import LogWriter
from tests.support.logs.logs import LOG_ID, batches, settle

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

def write(directory, compression, limit, heals):
    failures = []
    def attempt(call):
        try:
            call()
        except LogWriteFailed as error:
            failures.append(error.errno)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    log = LogWriter(directory, log_id=LOG_ID, compression=compression)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
    for item in batches(50):
        log.append(item)
    attempt(log.flush)
    attempt(log.flush)
    if heals:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        settle(log)
    attempt(log.check)
    attempt(log.close)
    log.close()
    return log.batches_written, log.dropped_batches, failures

print(json.dumps([write(*case) for case in json.loads(sys.argv[1])]))
"""
FULL_DISKS = [
    *itertools.product(["none"], [30, 64, 100, 1000, 1500, 4000], [True, False]),
    *itertools.product(["zstd"], [30, 64, 100, 1000], [True, False]),
]
"""How logs are written, how long files may get, and whether there is room again."""
FullDisks = dict[tuple[str, int, bool], tuple[Path, int, int, list[int]]]


@pytest.fixture(scope="module")
def full_disks(tmp_path_factory: pytest.TempPathFactory) -> FullDisks:
    """The logs of a process whose files must not get long, and what it says of each: written, dropped, failures."""
    root = tmp_path_factory.mktemp("full")
    places = [root / f"{how}-{limit}-{heals}" for how, limit, heals in FULL_DISKS]
    cases = [(str(place), *case) for place, case in zip(places, FULL_DISKS, strict=True)]
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, json.dumps(cases)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said = zip(places, json.loads(run.stdout), strict=True)
    return {case: (place, *each) for case, (place, each) in zip(FULL_DISKS, said, strict=True)}


class Refusal:
    """A disk that refuses: a call fails with EIO as long as `on` is set, but for the first `spared` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.on = True
        self.spared = 0
        self.refused: list[object] = []
        self._call = getattr(owner, name)
        # A function, so that a class makes a method of it.
        monkeypatch.setattr(owner, name, lambda *arguments, **named: self(*arguments, **named))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.on and self.spared <= 0:
            self.refused.append(arguments[0])
            raise OSError(errno.EIO, "secret text")
        self.spared -= self.on
        return self._call(*arguments, **named)


REFUSED_CALLS = [
    (output, "sync_file"),
    (segment_files, "sync_file"),
    (segment_files, "sync_directory"),
    (os, "writev"),
    (os, "open"),
    (os, "ftruncate"),
    (Path, "rename"),
]
"""What the log asks of the system while it writes."""
REFUSALS: list[tuple[int, int, Any]] = [
    (spared, segment_bytes, call)
    for segment_bytes in (300, 1000, 1 << 20)
    for spared in (0, 1, 2, 5)
    for call in REFUSED_CALLS
]
"""How often a call is carried out before it fails, in a log with segments of this size."""


class TestFailingDisk:
    """What happens when the system refuses to write."""

    @pytest.mark.parametrize(("how", "limit", "heals"), FULL_DISKS)
    def test_full_disk(
        self, tmp_path: Path, full_disks: FullDisks, how: str, limit: int, *, heals: bool
    ) -> None:
        """What fits is readable; the rest is written when there is room, or counted as dropped when there is none."""
        place, written, dropped, failures = full_disks[how, limit, heals]
        assert failures == [errno.EFBIG] * (2 if heals else 4)
        assert written + dropped == 50
        content, end = read_log(place)
        assert content == batches(written)
        if heals:
            assert (written, end.kind) == (50, "clean")
            assert frames_of(place) == frames_of(write_log(tmp_path / "whole", batches(50)))
            return
        assert end.kind == "open"
        if limit > 64 and how == "none":
            size = segments(place)[0].stat().st_size
            assert limit - 200 < size <= limit
        with LogWriter(place, resume=True) as log:
            assert log.next_seq == written

    @pytest.mark.parametrize("case", seeds(range(len(REFUSALS)), quick=42))
    def test_refused_call_is_made_good(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: int, form: str
    ) -> None:
        """Whichever call fails, at the first or a later time, in the end the frames are those of a sound disk."""
        spared, segment_bytes, call = REFUSALS[case]
        with LogWriter(tmp_path / "log", log_id=LOG_ID, segment_bytes=segment_bytes) as log:
            with monkeypatch.context() as patch:
                refusal = Refusal(patch, *call)
                refusal.spared = spared
                for item in batches(12):
                    log.append(item)
                    with contextlib.suppress(LogWriteFailed):
                        log.flush()
                refusal.on = False
                for item in batches(6, 12):
                    log.append(item)
                settle(log)
            log.check()
            assert log.dropped_batches == 0
            assert log.batches_written == 18
            assert log.bytes_written == sum(path.stat().st_size for path in segments(tmp_path / "log"))
        write_log(tmp_path / "sound", batches(18), segment_bytes=segment_bytes)
        assert frames_of(tmp_path / "log") == frames_of(tmp_path / "sound")
        if form == "compressed":
            return
        contents = [
            {path.name: without_syncs(path) for path in (tmp_path / name).glob("*.kvlog*")}
            for name in ("log", "sound")
        ]
        assert contents[0] == contents[1]

    def test_what_a_failed_sync_left_is_written_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A system that forgets what it failed to sync, and says nothing about it later, loses nothing of the log."""
        with LogWriter(tmp_path) as log:
            log.append(batch(0))
            log.flush()
            durable = log.bytes_written

            def forget(descriptor: int) -> None:
                with segments(tmp_path)[0].open("r+b") as file:
                    file.seek(durable)
                    file.write(bytes(os.fstat(descriptor).st_size - durable))
                raise OSError(errno.EIO, "secret text")

            with monkeypatch.context() as patch:
                patch.setattr(output, "sync_file", forget)
                log.append(batch(1))
                with pytest.raises(LogWriteFailed) as raised:
                    log.flush()
            assert (raised.value.path, raised.value.errno) == (tmp_path, errno.EIO)
            assert "secret" not in str(raised.value)
            settle(log)
            log.append(batch(2))
        assert read_log(tmp_path)[0] == batches(3)

    def test_disk_is_tried_again_by_itself(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without being asked, not before each pause has passed, until it works."""
        monkeypatch.setattr(recorder, "_FIRST_PAUSE_SECONDS", 0.02)
        tries: list[float] = []

        def refuse(_: int) -> None:
            tries.append(time.monotonic())
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with LogWriter(tmp_path) as log:
            with monkeypatch.context() as patch:
                patch.setattr(segment_files, "sync_file", refuse)
                log.append(batch(0))
                wait_until(lambda: len(tries) >= 4)
            assert log.wait_durable(0, WAIT)
        assert read_log(tmp_path)[0] == batches(1)
        waited = [later - sooner for sooner, later in itertools.pairwise(tries[:4])]
        assert all(seconds >= pause for seconds, pause in zip(waited, (0.02, 0.04, 0.08), strict=True))

    def test_pauses_between_tries(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """They double up to a limit."""
        pauses: list[float] = []
        with LogWriter(tmp_path) as log:
            with monkeypatch.context() as patch:
                patch.setattr(log._recorder.retry, "wait", pauses.append)
                Refusal(patch, os, "writev")
                log.append(batch(0))
                wait_until(lambda: len(pauses) >= 9)
            settle(log)
        assert pauses[:9] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]

    @pytest.mark.parametrize("overflow", ["block", "drop"])
    def test_full_queue_before_a_failing_disk_loses_a_range(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overflow: Any
    ) -> None:
        """Nobody waits for a disk that refuses: the queue is kept, the rest is a gap that tells why."""
        with LogWriter(tmp_path, max_queued_batches=4, overflow=overflow) as log:
            with monkeypatch.context() as patch:
                Refusal(patch, os, "writev")
                log.append(batch(0))
                with pytest.raises(LogWriteFailed):
                    log.flush()
                assert [log.append(item) for item in batches(6, 1)] == [True] * 3 + [False] * 3
                assert log.pop_gap() is None
            settle(log)
            assert log.has_lost
            gap = log.pop_gap()
            assert gap == Gap(4, 6, f"the log could not be written: {os.strerror(errno.EIO)}")
            announcing = EventBatch(7, 0, (gap,))
            assert log.append(announcing)
            assert not log.has_lost
        assert read_log(tmp_path)[0] == [*batches(4), announcing]
        assert (log.batches_written, log.dropped_batches) == (5, 3)

    def test_check_reports_those_who_wait(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """While the disk refuses, `check` raises with "block" and not with "drop"; it is said once aloud in both."""
        choices: tuple[Literal["block", "drop"], ...] = ("block", "drop")
        for overflow in choices:
            with (
                structlog.testing.capture_logs() as reported,
                LogWriter(tmp_path / overflow, overflow=overflow) as log,
            ):
                with monkeypatch.context() as patch:
                    Refusal(patch, os, "writev")
                    for item in batches(3):
                        log.append(item)
                        with pytest.raises(LogWriteFailed, match=os.strerror(errno.EIO)):
                            log.flush()
                        if overflow == "block":
                            with pytest.raises(LogWriteFailed, match="retries automatically"):
                                log.check()
                        else:
                            log.check()
                settle(log)
                log.check()
            assert [entry["event"] for entry in reported] == ["log_suspended", "log_continues"]
            with pytest.raises(LogWriteFailed, match="closed"):
                log.check()

    def test_close_tries_once_more(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Closing on a disk that refuses raises soon, leaves what can be read, and lets the next writer in."""
        monkeypatch.setattr(recorder, "_FIRST_PAUSE_SECONDS", 3600)
        log = LogWriter(tmp_path)
        log.append(batch(0))
        log.flush()
        with monkeypatch.context() as patch:
            refusal = Refusal(patch, output, "sync_file")
            log.append(batch(1))
            with pytest.raises(LogWriteFailed):
                log.flush()
            tries = len(refusal.refused)
            with pytest.raises(LogWriteFailed, match=os.strerror(errno.EIO)):
                log.close()
            # One more, and perhaps one that `flush` has still asked for.
            assert 1 <= len(refusal.refused) - tries <= 2
        assert (log.batches_written, log.dropped_batches) == (1, 1)
        content, end = read_log(tmp_path)
        assert (content, end.kind) == (batches(1), "open")
        with LogWriter(tmp_path, resume=True) as log:
            assert log.next_seq == 1

    def test_end_is_marked_in_spite_of_a_passing_failure(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A disk that refuses the mark of the end once gets it the second time."""
        log = LogWriter(tmp_path)
        log.append(batch(0))
        log.flush()
        calls: list[int] = []

        def once(descriptor: int) -> None:
            calls.append(descriptor)
            if len(calls) == 1:
                raise OSError(errno.EIO, "")

        monkeypatch.setattr(output, "sync_file", once)
        log.close()
        content, end = read_log(tmp_path)
        assert (content, end.kind, len(calls)) == (batches(1), "clean", 2)

    def test_batch_that_cannot_be_encoded_is_lost_with_those_after_it(self, tmp_path: Path) -> None:
        """It stops nothing: a gap covers it, up to the batch that tells of it, and nothing is quoted anywhere."""
        with structlog.testing.capture_logs() as reported, LogWriter(tmp_path) as log:
            log.append(batch(0))
            for seq in (1, 2):
                assert log.append(EventBatch(seq, 0, (Gap(0, 0, "prompt \ud800"),)))
            assert log.append(batch(3))
            assert log.flush()
            gap = log.pop_gap()
            assert gap == Gap(1, 3, "a batch cannot be encoded (UnicodeEncodeError)")
            assert log.append(EventBatch(4, 0, (gap, Gap(0, 0, "prompt \ud800"))))
            log.flush()
            gap = log.pop_gap()
            assert gap == Gap(4, 4, "a batch cannot be encoded (UnicodeEncodeError)")
            announcing = EventBatch(5, 0, (gap,))
            log.append(announcing)
            log.append(batch(6))
            log.check()
        assert read_log(tmp_path)[0] == [batch(0), announcing, batch(6)]
        assert (log.batches_written, log.dropped_batches) == (3, 4)
        assert [entry["seq"] for entry in reported] == [1, 4]
        assert "prompt" not in str(reported)

    def test_loss_found_late_is_reported_from_its_start(self, tmp_path: Path, hold_disk: HoldDisk) -> None:
        """If a gap was told before an earlier loss was known, that batch is no beginning, and another gap follows."""
        with LogWriter(tmp_path, max_queued_bytes=10_000, overflow="drop") as log:
            with hold_disk() as hangs:
                log.append(batch(0))
                assert hangs.wait(WAIT)
                log.append(EventBatch(1, 0, (Gap(0, 0, "\ud800"),)))
                assert [log.append(item) for item in (large_batch(2, 20_000), batch(3))] == [False, False]
                assert log.pop_gap() == Gap(2, 3, "the log could not keep up")
                assert log.append(EventBatch(4, 0, ()))
            log.flush()
            gap = log.pop_gap()
            assert gap == Gap(1, 4, "a batch cannot be encoded (UnicodeEncodeError)")
            log.append(EventBatch(5, 0, (gap,)))
        assert [item.seq for item in read_log(tmp_path)[0]] == [0, 5]

    def test_blocked_engine_learns_of_the_failure(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An append that waits for room is woken by the failure instead of waiting for ever."""
        log = LogWriter(tmp_path, max_queued_batches=1)
        started = threading.Event()

        def fail(*_: object) -> None:
            assert started.wait(WAIT)
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(output.LogOutput, "write", fail)
        log.append(batch(0))
        threading.Timer(0.05, started.set).start()
        assert log.append(batch(1)) is False
        with pytest.raises(LogWriteFailed, match="No space"):
            log.check()
        with pytest.raises(LogWriteFailed, match="No space"):
            log.close()


def appearances(directory: Path, tokens: list[int]) -> int:
    """How often the tokens appear in any file, in any of the forms they could take."""
    forms = [struct.pack("<i", token) for token in tokens] + [struct.pack(">I", token) for token in tokens]
    forms += [str(token).encode() for token in tokens]
    contents = [path.read_bytes() for path in directory.rglob("*") if path.is_file()]
    return sum(content.count(form) for content in contents for form in forms)


@pytest.mark.usefixtures("plain")
def test_tokens_are_on_disk_only_if_asked_for(tmp_path: Path) -> None:
    """With record_tokens=False no token id is in any file, packed or spelled; with True all are."""
    planted = [1_234_567_891, 1_357_924_680]
    content = [batch(seq, planted) for seq in range(3)]
    write_log(tmp_path / "with", content)
    write_log(tmp_path / "without", content, record_tokens=False)
    assert appearances(tmp_path / "with", planted) == 9
    assert appearances(tmp_path / "without", planted) == 0
    assert [len(item.events) for item in read_log(tmp_path / "without")[0]] == [3] * 3
    with LogWriter(tmp_path / "without", resume=True, record_tokens=False) as log:
        assert log.epoch_started.tokens_recorded is False


class TestProcesses:
    """Death, exit and birth of processes."""

    @pytest.mark.parametrize("flushes", seeds(range(1, 21), quick=1))
    def test_killed_writer_leaves_a_beginning(self, tmp_path: Path, flushes: int) -> None:
        """After SIGKILL in the middle of writing, all that was flushed is there, in order, and can be continued."""
        code = (
            "import itertools, sys\n"
            "from events.log import LogWriter; from tests.support.logs.logs import batch\n"
            "log = LogWriter(sys.argv[1], segment_bytes=5000)\n"
            "for seq in itertools.count():\n"
            "    log.append(batch(seq))\n"
            "    if seq % 20 == 19: log.flush(); print(seq, flush=True)\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "log")],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        ) as child:
            assert child.stdout is not None
            flushed = [int(child.stdout.readline()) for _ in range(flushes)][-1]
            child.send_signal(signal.SIGKILL)
        content, end = read_log(tmp_path / "log")
        assert len(content) > flushed
        assert content == batches(len(content))
        assert end.kind in {"open", "torn"}
        with LogWriter(tmp_path / "log", resume=True) as log:
            assert log.next_seq == len(content)
            assert log.epoch_started.clean is False

    def test_program_that_forgets_to_close_keeps_its_batches(
        self, tmp_path: Path, run_python: RunPython
    ) -> None:
        """What was appended just before the end of the program is written; the log does not claim to be closed."""
        code = (
            "from events.log import LogWriter; from tests.support.logs.logs import batches\n"
            "log = LogWriter('log')\n"
            "for item in batches(10): log.append(item)\n"
        )
        run = run_python(code)
        assert (run.returncode, run.stderr) == (0, "")
        content, end = read_log(tmp_path / "log")
        assert (content, end.kind) == (batches(10), "open")

    def test_forked_child_has_no_part_in_the_log(self, tmp_path: Path, run_python: RunPython) -> None:
        """A child cannot write, its exit writes nothing, and its life does not keep the log locked."""
        code = (
            "import os, sys\n"
            "from events import LogWriteFailed; from events.log import LogWriter\n"
            "from tests.support.logs.logs import batches\n"
            "log = LogWriter('log')\n"
            "first, second = batches(2)\n"
            "log.append(first); log.flush()\n"
            "hold, release = os.pipe()\n"
            "if (child := os.fork()) == 0:\n"
            "    os.close(release)\n"
            "    os.read(hold, 1)\n"
            "    log.close()\n"
            "    try: log.append(second)\n"
            "    except LogWriteFailed: sys.exit(7)\n"
            "    sys.exit(8)\n"
            "log.append(second); log.close()\n"
            "LogWriter('log', resume=True).close()\n"
            "os.close(release)\n"
            "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        )
        run = run_python(code)
        assert (run.returncode, run.stdout) == (0, "7\n"), run.stderr
        content, end = read_log(tmp_path / "log")
        assert (content, end.kind) == (batches(2), "clean")

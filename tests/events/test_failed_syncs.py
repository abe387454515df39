"""Disks that refuse a sync: the file is done with, and what was durable of it goes on in a new one."""

from __future__ import annotations

import errno
import itertools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from events import EventBatch, LogDamaged, LogWriteFailed
from events.log import LogReader, LogWriter, zstd
from events.log import writer as recorder
from events.log.reader import LogHead
from events.log.retention import LogParts
from events.log.segments import segment_name
from kvcache.maintenance.compress import compress
from tests.support.logs.held_disk import HoldDisk
from tests.support.logs.logs import (
    LOG_ID,
    batch,
    form,
    frame_offsets,
    read_log,
    segments,
    settle,
    write_log,
    write_synced,
)
from tests.support.seeds import seeds
from tests.support.waiting import WAIT, wait_until

__all__ = ["form"]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="names of open files are asked of /proc"),
    pytest.mark.usefixtures("form"),
]

CONTENT = [batch(seq, range(seq * 7 % 90)) for seq in range(30)]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that refuses is tried again at once, and directories are not synced: that would take most of the time."""
    monkeypatch.setattr(recorder, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(recorder, "_LONGEST_PAUSE_SECONDS", 0.002)
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Disk:
    """A disk that refuses some syncs of segments. It has what was synced; of a file that it refused, nothing more.

    Later syncs of such a file succeed, as those of Linux do, and write nothing. With `forgets`, the system has
    forgotten what was not written, too, as soon as a sync has failed; else that can still be read.
    """

    def __init__(self, root: Path, fails: Callable[[int], bool], *, forgets: bool = True) -> None:
        self._root, self._fails, self._forgets = root, fails, forgets
        self._content: dict[int, bytes] = {}
        self._kept: list[int] = []
        """Descriptors, so that no number of a file is given to another one."""
        self.refused: set[int] = set()
        self.syncs = 0
        self.in_vain = 0
        """Syncs of files of which one had failed before."""
        self.meanwhile: Callable[[], None] = lambda: None
        """Called by a sync that is about to fail."""

    def sync(self, descriptor: int) -> None:
        path, number = Path(f"/proc/self/fd/{descriptor}").readlink(), os.fstat(descriptor).st_ino
        if not path.is_relative_to(self._root) or ".kvlog" not in path.name:
            return
        self._kept.append(os.dup(descriptor))
        self.syncs += 1
        if number in self.refused:
            self.in_vain += 1
        elif self._fails(self.syncs):
            self.meanwhile()
            self.refused.add(number)
            if self._forgets:
                known = len(self._content.get(number, b""))
                with path.open("r+b") as file:
                    file.seek(known)
                    file.write(bytes(path.stat().st_size - known))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        else:
            self._content[number] = path.read_bytes()

    def cut_power(self, log: Path, to: Path) -> Path:
        """The log as the disk has it."""
        to.mkdir()
        for path in segments(log):
            (to / path.name).write_bytes(self._content.get(path.stat().st_ino, b""))
        return to

    def close(self) -> None:
        for descriptor in self._kept:
            os.close(descriptor)


@pytest.fixture
def refusing(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """Makes such a disk."""
    made: list[Disk] = []
    with patch.object(os, "fdatasync", lambda descriptor: made[-1].sync(descriptor)):

        def make(fails: Callable[[int], bool], **options: Any) -> Disk:
            made.append(Disk(tmp_path, fails, **options))
            return made[-1]

        yield make
    for disk in made:
        disk.close()


class Follower:
    """Reads a log while it is written."""

    def __init__(self, directory: Path) -> None:
        self.read: list[EventBatch] = []
        self.error: BaseException | None = None
        self._stopped = threading.Event()
        self._reader = LogReader(directory, follow=True, poll_seconds=0.0005, stop=self._stopped.is_set)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.read.extend(self._reader)
        except BaseException as error:
            self.error = error

    def end(self) -> list[EventBatch]:
        """All that it has read by the time at which it has read the end."""
        wait_until(lambda: self._reader.closed or not self._thread.is_alive(), "the end is not read")
        self._stopped.set()
        self._thread.join()
        assert self.error is None
        return self.read


def run(log: LogWriter, content: list[EventBatch], chance: random.Random) -> None:
    """Append all, flush now and then, and close in order once the disk takes it."""
    for item in content:
        assert log.append(item)
        if chance.random() < 0.5:
            with suppress(LogWriteFailed):
                log.flush()
    settle(log)
    log.close()


SYNCED: tuple[Any, ...] = ("always", "group", "interval")


FAILING: list[set[int]] = [{1}, {2}, {3, 4}, {5, 6, 7, 9}, set(range(2, 30, 2)), {*range(3, 12)}]
CASES: list[tuple[Any, set[int], int]] = [
    *itertools.product(SYNCED, FAILING, [700, 1 << 20]),
    *itertools.product(["never"], FAILING, [700]),
    # Of one segment, the first sync but that of the header is made when the log is closed, which tries twice.
    *itertools.product(["never"], FAILING[:2], [1 << 20]),
]


@pytest.mark.parametrize("case", seeds(range(len(CASES)), quick=20))
def test_the_disk_has_all_of_it_in_the_end(tmp_path: Path, refusing: Callable[..., Disk], case: int) -> None:
    """Headers, batches, copies of what was there: no file is synced after it was refused; a follower gets all."""
    fsync, failing, segment_bytes = CASES[case]
    # What was never synced is nowhere but in the system, until it has forgotten it.
    disk, chance = refusing(failing.__contains__, forgets=fsync != "never"), random.Random(len(failing))
    log = LogWriter(
        tmp_path / "log", fsync=fsync, fsync_seconds=0.002, segment_bytes=segment_bytes, log_id=LOG_ID
    )
    follower = Follower(tmp_path / "log")
    run(log, CONTENT, chance)
    assert follower.end() == CONTENT
    assert log.durable_seq == len(CONTENT) - 1
    assert disk.refused
    assert disk.in_vain == 0
    content, end = read_log(disk.cut_power(tmp_path / "log", tmp_path / "left"))
    assert (content, end.kind) == (CONTENT, "clean")
    assert not list((tmp_path / "log").glob("*.tmp"))


@pytest.mark.parametrize("seed", seeds(range(100), quick=8))
def test_disks_that_refuse_by_chance(tmp_path: Path, refusing: Callable[..., Disk], seed: int) -> None:
    """The same with all kinds of settings, as often as a third of all syncs; and a power cut before the end."""
    chance = random.Random(seed)
    failure, often = chance.choice((0.1, 0.35)), random.Random(seed + 1000)
    disk = refusing(lambda _: often.random() < failure, forgets=chance.random() < 0.5)
    log = LogWriter(
        tmp_path / "log",
        fsync=chance.choice(SYNCED),
        fsync_seconds=0.001,
        segment_bytes=chance.choice((600, 2000, 1 << 20)),
        log_id=LOG_ID,
    )
    follower, half = Follower(tmp_path / "log"), chance.randrange(len(CONTENT))
    for item in CONTENT[:half]:
        log.append(item)
    settle(log)
    durable = log.durable_seq
    assert durable == half - 1
    left, _ = read_log(disk.cut_power(tmp_path / "log", tmp_path / "half")) if half else ([], None)
    assert left == CONTENT[:half]
    for item in CONTENT[half:]:
        log.append(item)
    settle(log)
    failure = 0
    log.close()
    assert follower.end() == CONTENT
    assert disk.in_vain == 0
    assert read_log(disk.cut_power(tmp_path / "log", tmp_path / "left"))[0] == CONTENT


@pytest.mark.parametrize("segment_bytes", [700, 1 << 20])
def test_what_was_never_synced_and_is_forgotten(
    tmp_path: Path, refusing: Callable[..., Disk], segment_bytes: int
) -> None:
    """No log with a hole is written, nothing of it is called durable, and no end is marked; what is left is read."""
    fails = [False]
    disk = refusing(lambda _: fails[0])
    log = LogWriter(tmp_path / "log", fsync="never", segment_bytes=segment_bytes, overflow="drop")
    for item in CONTENT[:8]:
        log.append(item)
    log.flush()
    durable = int(segments(tmp_path / "log")[-1].stem) - 1

    def once() -> None:
        fails[0] = False

    disk.meanwhile, fails[0] = once, True
    if segment_bytes == 700:
        for item in CONTENT[8:]:
            log.append(item)
        with suppress(LogWriteFailed):
            log.flush()
        with pytest.raises(LogWriteFailed, match="cannot be read back"):
            log.flush()
        durable = max(int(path.stem) for path in segments(tmp_path / "log")) - 1
    with pytest.raises(LogWriteFailed, match="cannot be read back"):
        log.close()
    assert (log.durable_seq, disk.in_vain) == (durable, 0)
    read, end = read_log(tmp_path / "log")
    assert (read, end.kind) == (CONTENT[: durable + 1], "torn")
    left, _ = read_log(disk.cut_power(tmp_path / "log", tmp_path / "left"))
    assert left == read


class TestFollowers:
    """Readers that have the old file open."""

    @pytest.mark.parametrize("segments_follow", [True, False])
    @pytest.mark.parametrize("forgets", [True, False])
    def test_one_that_has_read_what_was_not_durable(
        self, tmp_path: Path, refusing: Callable[..., Disk], forgets: bool, segments_follow: bool
    ) -> None:
        """It is beyond the end of the copy, and gets the next batch, once, when that is there."""
        fails = [False]
        disk = refusing(lambda _: fails[0], forgets=forgets)
        [seven] = segments(write_log(tmp_path / "seven", CONTENT[:7], compression="none"))
        limit = seven.stat().st_size if segments_follow else 1 << 20
        with LogWriter(tmp_path / "log", segment_bytes=limit) as log:
            for item in CONTENT[:6]:
                log.append(item)
            log.flush()
            follower = iter(LogReader(tmp_path / "log", follow=True, poll_seconds=0.001))
            read = [next(follower) for _ in range(6)]
            disk.meanwhile = lambda: read.append(next(follower)) if len(read) == 6 else None
            before, fails[0] = segments(tmp_path / "log")[-1].stat().st_ino, True
            log.append(CONTENT[6])
            with pytest.raises(LogWriteFailed):
                log.flush()
            assert read == CONTENT[:7]
            fails[0] = False
            for item in CONTENT[7:]:
                log.append(item)
            settle(log)
            assert before not in {path.stat().st_ino for path in segments(tmp_path / "log")}
            read += [next(follower) for _ in CONTENT[7:]]
            assert read == CONTENT
            follower.close()  # type: ignore[attr-defined]

    def test_who_looks_at_the_end_only(self, tmp_path: Path, refusing: Callable[..., Disk]) -> None:
        """It never goes back."""
        fails = [False]
        refusing(lambda _: fails[0])
        head = LogHead(tmp_path / "log")
        with LogWriter(tmp_path / "log") as log:
            seen = []
            for item in CONTENT[:9]:
                fails[0] = item.seq % 3 == 1
                log.append(item)
                with suppress(LogWriteFailed):
                    log.flush()
                seen.append(head.look())
                fails[0] = False
                settle(log)
                seen.append(head.look())
        head.close()
        numbers = [each.seq for each in seen if each is not None]
        assert numbers == sorted(numbers)
        assert numbers[1::2] == list(range(9))

    def replaced_while_read(self, log: Path) -> Callable[[], None]:
        """What may be there at the next look: the file is cut off, in its place a longer one, and one behind that."""
        source = write_synced(log.with_name("whole"), CONTENT[:12], segment_bytes=1500, fsync="never")
        first, *others = segments(source)
        log.mkdir()
        path, data = log / first.name, first.read_bytes()
        path.write_bytes(data[: frame_offsets(data)[2]])

        def replace() -> None:
            os.truncate(path, 64)
            path.with_suffix(".copy").write_bytes(data)
            path.with_suffix(".copy").rename(path)
            for other in others:
                (log / other.name).write_bytes(other.read_bytes())

        return replace

    def test_a_copy_and_a_segment_after_it(self, tmp_path: Path) -> None:
        """Nothing of the copy is passed over, though a segment follows by now."""
        replace = self.replaced_while_read(tmp_path / "log")
        reader = iter(LogReader(tmp_path / "log"))
        read = [next(reader), next(reader)]
        replace()
        assert [*read, *reader] == CONTENT[:12]

    def test_verify_and_salvage(self, tmp_path: Path) -> None:
        """Neither do they, which read on behind damage."""
        replace = self.replaced_while_read(tmp_path / "log")
        damage = list[LogDamaged]()
        reader = iter(LogReader(tmp_path / "log", damaged=damage.append))
        read = [next(reader), next(reader)]
        replace()
        assert [*read, *reader] == CONTENT[:12]
        assert damage == []

    def test_another_segment_of_that_name(self, tmp_path: Path) -> None:
        """What has another header is no copy: it is not read on in the middle of it."""
        log = write_log(tmp_path / "log", CONTENT[:4])
        other = write_log(tmp_path / "other", CONTENT, log_id=bytes(16))
        reader = iter(LogReader(log))
        read = [next(reader)]
        segments(other)[0].rename(log / segment_name(0))
        assert [*read, *reader] == CONTENT[:4]


def test_what_was_durable_and_is_damaged_meanwhile(tmp_path: Path, refusing: Callable[..., Disk]) -> None:
    """No log with a hole is written: that is said, the old file stays, and when it is mended the log goes on."""
    fails = [False]
    disk = refusing(lambda _: fails[0], forgets=False)
    with LogWriter(tmp_path / "log", overflow="drop") as log:
        for item in CONTENT[:5]:
            log.append(item)
        log.flush()
        [path] = segments(tmp_path / "log")
        whole, before = path.read_bytes(), path.stat().st_ino

        def damage() -> None:
            path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
            fails[0] = False

        disk.meanwhile, fails[0] = damage, True
        log.append(CONTENT[5])
        with pytest.raises(LogWriteFailed):
            log.flush()
        for _ in range(3):
            with pytest.raises(LogWriteFailed) as caught:
                log.flush()
            assert str(caught.value) == (
                f"{path} cannot be written: its data cannot be read back; free some space or "
                "repair the disk; it retries automatically"
            )
        assert (log.stats().state, log.durable_seq) == ("suspended", 4)
        assert path.stat().st_ino == before
        assert segments(tmp_path / "log") == [path]
        path.write_bytes(whole)
        settle(log)
    # Not before: while it is tried again, there is one for a moment.
    assert not list(path.parent.glob("*.tmp"))
    assert read_log(tmp_path / "log")[0] == CONTENT[:6]
    assert disk.in_vain == 0


def test_a_full_disk_while_copying(tmp_path: Path, refusing: Callable[..., Disk]) -> None:
    """What is half copied goes, so that it takes no room, and the next try begins with another file."""
    fails, real = [False], os.writev
    disk = refusing(lambda _: fails[0])
    with LogWriter(tmp_path / "log") as log:
        for item in CONTENT[:5]:
            log.append(item)
            log.flush()
        fails[0] = True
        log.append(CONTENT[5])
        with pytest.raises(LogWriteFailed, match=os.strerror(errno.EIO)):
            log.flush()
        written = itertools.count(1)

        def full(descriptor: int, parts: Any) -> int:
            if next(written) % 3 == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, parts)

        def is_full() -> bool:
            with pytest.raises(LogWriteFailed) as caught:
                log.flush()
            return os.strerror(errno.ENOSPC) in str(caught.value)

        # Syncs go on failing meanwhile: a try that has begun before must not succeed.
        with patch.object(os, "writev", full):
            wait_until(is_full)
            assert [is_full() for _ in range(3)] == [True] * 3
        fails[0] = False
        settle(log)
        assert not list((tmp_path / "log").glob("*.tmp"))
    assert read_log(disk.cut_power(tmp_path / "log", tmp_path / "left"))[0] == CONTENT[:6]
    assert disk.in_vain == 0


def test_a_segment_begun_again(tmp_path: Path, refusing: Callable[..., Disk]) -> None:
    """A header that could not be synced is written into another file."""
    disk = refusing(lambda number: number <= 3)
    with LogWriter(tmp_path / "log") as log:
        log.append(CONTENT[0])
        settle(log)
    assert (len(disk.refused), disk.in_vain) == (3, 0)
    assert read_log(disk.cut_power(tmp_path / "log", tmp_path / "left"))[0] == CONTENT[:1]


def test_what_came_before_a_refused_write(
    tmp_path: Path, refusing: Callable[..., Disk], hold_disk: HoldDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole frames in front of it are synced; where that fails, the file is done with as after any other sync."""
    monkeypatch.setattr(zstd, "BLOCK_BYTES", 1)
    real, fails, refused = os.writev, [False], list[int]()
    disk = refusing(lambda _: fails[0])
    frames: list[int] = []

    def once() -> None:
        fails[0] = False
        [path] = segments(tmp_path / "log")
        frames.append(len(frame_offsets(path.read_bytes())) - 1)

    disk.meanwhile = once
    with LogWriter(tmp_path / "log") as log:
        log.append(CONTENT[0])
        log.flush()

        def short(descriptor: int, parts: Any) -> int:
            if len(parts) > 2 and not refused:
                refused.append(len(parts))
                real(descriptor, parts[:2])
                fails[0] = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, parts)

        with patch.object(os, "writev", short):
            with hold_disk() as hangs:
                log.append(CONTENT[1])
                assert hangs.wait(WAIT)
                for item in CONTENT[2:5]:  # at once, thereafter
                    log.append(item)
            settle(log)
    assert frames == [3]  # and not the two behind them
    assert (len(disk.refused), disk.in_vain) == (1, 0)
    assert read_log(disk.cut_power(tmp_path / "log", tmp_path / "left"))[0] == CONTENT[:5]


def test_compressing_meanwhile(tmp_path: Path, refusing: Callable[..., Disk]) -> None:
    """The segment that is replaced is the last one, which is not touched."""
    fails = [False]
    disk = refusing(lambda _: fails[0])
    with LogWriter(tmp_path / "log", segment_bytes=700, compression="none") as log:
        for item in CONTENT:
            fails[0] = item.seq % 4 == 1
            log.append(item)
            with suppress(LogWriteFailed):
                log.flush()
            fails[0] = False
            compress(tmp_path / "log")
            settle(log)
    assert disk.in_vain == 0
    assert read_log(tmp_path / "log")[0] == CONTENT
    assert sum(part.is_compressed for part in LogParts(tmp_path / "log").parts) > 3

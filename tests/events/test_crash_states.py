"""Power cuts: whatever of unsynced sectors and names is on disk then, what was told to be durable is read."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from events import EventBatch, LogWriteFailed
from events.log import LogReader, LogWriter
from events.log import writer as recorder
from events.log.recovery import recover
from tests.oracles.crash_model import Disk, File, Recording, State, put
from tests.support.logs.logs import LOG_ID, batch, form, segments, settle
from tests.support.seeds import seeds

__all__ = ["form"]

pytestmark = [
    pytest.mark.usefixtures("form"),
    pytest.mark.skipif(sys.platform != "linux", reason="names of open files are asked of /proc"),
]


@pytest.fixture(autouse=True)
def no_syncs() -> Iterator[None]:
    """Nothing here need survive a real power cut: that would take most of the time."""
    with patch.object(os, "fsync"), patch.object(os, "fdatasync"):
        yield


def with_quarantine(state: State, name: str) -> Iterator[bytes]:
    """What a file was before recovery, as it has left it, and put together with what it has put into the quarantine."""
    left = state.get(name) or b""
    yield left
    for path, piece in state.items():
        if piece is not None and path.startswith(f"{name.replace('log/', 'log/quarantine/')}."):
            offset = path.rpartition(".")[2]
            yield (
                piece
                if offset.startswith("epoch")
                else left[: int(offset)] + piece
                if offset != "tmp"
                else b""
            )


class Judge:
    """Recovers a log from what a power cut has left of it, and reads it."""

    def __init__(
        self,
        content: list[EventBatch],
        place: Path,
        *,
        keeps: State | None = None,
    ) -> None:
        self._content, self._place, self._keeps = content, place, keeps or {}
        self._known: set[tuple[int, int]] = set()
        self.states = 0
        """Different ones."""
        self.cut = 0
        """Of them those of which the end was cut off."""

    def judge(self, state: State, reported: int) -> None:
        key = hash(frozenset(state.items())), reported
        if key in self._known:
            return
        self._known.add(key)
        self.states += 1
        for name, before in self._keeps.items():
            if before and name.endswith(".kvlog"):
                assert before in with_quarantine(state, name), "bytes are gone"
        put(state, self._place)
        try:
            self._judge(self._place / "log", reported)
        finally:
            shutil.rmtree(self._place)

    def _judge(self, log: Path, reported: int) -> None:
        if not log.exists():
            assert reported == -1
            return
        before = self._read(log, reported)
        chain, lost = recover(log)
        self.cut += lost
        after = self._read(log, reported)
        assert before == chain.seq == after
        assert recover(log) == (chain, False)
        if self.states % 10 == 0:
            with LogWriter(log, resume=True, log_id=LOG_ID) as writer:
                assert writer.next_seq == after
                writer.append(batch(after))
            assert list(LogReader(log)) == [*self._content[:after], batch(after)]

    def _read(self, log: Path, reported: int) -> int:
        """How many batches are read; nothing of what a power cut leaves is damage."""
        read = list(LogReader(log)) if segments(log) else []
        assert read == self._content[: len(read)]
        assert len(read) > reported
        return len(read)


def judged(recording: Recording, judge: Judge, most: int, seed: int = 0) -> None:
    """All crash states of each step, or `most` of them."""
    rng = random.Random(seed)
    for disk, reported in recording.disks():
        for state in disk.states(most, rng):
            judge.judge(state, reported)


Run = Callable[[LogWriter, list[EventBatch]], None]


def one_by_one(log: LogWriter, content: list[EventBatch]) -> None:
    for item in content:
        log.append(item)
        with suppress(LogWriteFailed):
            log.flush()


def in_groups(log: LogWriter, content: list[EventBatch]) -> None:
    for at in range(0, len(content), 3):
        for item in content[at : at + 3]:
            log.append(item)
        log.flush()


def recorded(root: Path, content: list[EventBatch], run: Run, **options: Any) -> Recording:
    """A log that is written, and closed in order."""
    root.mkdir()
    log: LogWriter | None = None
    recording = Recording(root, lambda: -1 if log is None else log.durable_seq)
    with recording.running():
        log = LogWriter(root / "log", log_id=LOG_ID, **options)
        run(log, content)
        settle(log)
        log.close()
    assert recording.steps[-1][1] <= log.durable_seq == len(content) - 1
    return recording


def sized(seq: int, size: int) -> EventBatch:
    """A batch of somewhat more than `size` bytes, all of them its own, which nothing makes smaller."""
    rng = random.Random(seq)
    return batch(seq, [rng.randrange(2**31) for _ in range(size // 4)])


SHORT = [sized(seq, size) for seq, size in enumerate((16, 900, 16, 400, 1600, 16, 200, 600))]


@pytest.mark.parametrize(
    ("fsync", "segment_bytes"),
    [
        ("group", 1500),
        ("always", 1500),
        pytest.param("group", 1 << 20, marks=pytest.mark.long),
    ],
)
def test_all_states_of_a_short_log(tmp_path: Path, fsync: Any, segment_bytes: int) -> None:
    """Where each batch has its own sync: all that was told is read, the rest is cut off, and nothing is refused."""
    recording = recorded(tmp_path / "run", SHORT, one_by_one, fsync=fsync, segment_bytes=segment_bytes)
    judge = Judge(SHORT, tmp_path / "state")
    judged(recording, judge, 4000)
    print(f"{fsync}, {segment_bytes}: {len(recording.steps)} steps, {judge.states} states, {judge.cut} cut")
    assert judge.states > 200
    assert judge.cut > 150


@pytest.mark.parametrize(
    ("fsync", "segment_bytes", "most"),
    [
        ("group", 1500, 60),
        ("interval", 1 << 20, 60),
        ("never", 1500, 60),
        *(
            pytest.param(fsync, segment_bytes, 300, marks=pytest.mark.long)
            for fsync in ("group", "interval", "never")
            for segment_bytes in (1500, 1 << 20)
        ),
    ],
)
def test_several_batches_with_one_sync(tmp_path: Path, fsync: Any, segment_bytes: int, most: int) -> None:
    """Then a whole unsynced batch may stand behind a broken one: it is cut off with that; all that was told is read.

    Of a log that is never synced, too, only the last segment is ever torn: it opens, and reads, in each state.
    """
    options = {"fsync": fsync, "fsync_seconds": 1000, "segment_bytes": segment_bytes}
    recording = recorded(tmp_path / "run", SHORT, in_groups, **options)
    judge = Judge(SHORT, tmp_path / "state")
    judged(recording, judge, most)
    print(f"{fsync}, {segment_bytes}: {judge.states} states, {judge.cut} cut")
    assert judge.states > most // 3
    assert judge.cut > most // 6


@pytest.mark.parametrize("fsync", ["group", "never"])
def test_an_epoch_after_one_that_was_never_synced(tmp_path: Path, fsync: Any) -> None:
    """Whoever goes on with the log of a killed writer that synced nothing stands on all of its segments."""
    (tmp_path / "run").mkdir()
    log: LogWriter | None = None
    recording = Recording(tmp_path / "run", lambda: -1 if log is None else log.durable_seq)
    with recording.running():
        killed = LogWriter(tmp_path / "run" / "log", fsync="never", log_id=LOG_ID, segment_bytes=600)
        in_groups(killed, SHORT[:5])
        killed.disown()
        log = LogWriter(tmp_path / "run" / "log", resume=True, fsync=fsync)
        in_groups(log, SHORT[5:])
        log.close()
    states, rng = 0, random.Random(0)
    for disk, reported in recording.disks():
        for state in disk.states(40 if reported >= 0 else 0, rng):
            put(state, tmp_path / "state")
            read = list(LogReader(tmp_path / "state" / "log"))
            assert read == SHORT[: len(read)]
            assert len(read) > reported
            states += 1
            shutil.rmtree(tmp_path / "state")
    print(f"{states} states")
    assert states > 50


class FailingSyncs:
    """A disk that refuses some syncs, and of what it should have written only the system knows until it forgets it.

    On Linux, pages that could not be written are called clean, and may go at any time. Here they go at once.
    """

    def __init__(self, root: Path, fails: Callable[[int], bool]) -> None:
        self._root, self._fails = root, fails
        self._sync: Callable[[int], None] = getattr(os, "fdatasync")  # noqa: B009 - which macOS has not
        self._durable: dict[int, bytes] = {}
        self.syncs, self.failed = 0, 0

    def __call__(self, descriptor: int) -> None:
        path, found = Path(f"/proc/self/fd/{descriptor}").readlink(), os.fstat(descriptor)
        is_segment = path.is_relative_to(self._root) and ".kvlog" in path.name
        self.syncs += is_segment
        if is_segment and self._fails(self.syncs):
            self.failed += 1
            durable = self._durable.get(found.st_ino, b"")
            path.write_bytes(durable.ljust(found.st_size, b"\0"))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._sync(descriptor)
        self._durable[found.st_ino] = path.read_bytes()


@pytest.mark.parametrize(
    ("failing", "segment_bytes", "most"),
    [
        ({5, 6}, 1500, 12),
        ({4, 7, 8, 9}, 1 << 20, 12),
        *(
            pytest.param(failing, segment_bytes, 60, marks=pytest.mark.long)
            for failing in ({3}, {5, 6}, {4, 7, 8, 9}, set(range(2, 40, 2)))
            for segment_bytes in (1500, 1 << 20)
        ),
    ],
)
def test_what_a_failed_sync_has_not_written_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: set[int], segment_bytes: int, most: int
) -> None:
    """No second sync is relied on: it would succeed without a byte. Power cuts meanwhile take nothing that was told."""
    monkeypatch.setattr(recorder, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(recorder, "_LONGEST_PAUSE_SECONDS", 0.002)
    disk = FailingSyncs(tmp_path, failing.__contains__)
    with patch.object(os, "fdatasync", disk):
        recording = recorded(tmp_path / "run", SHORT, one_by_one, segment_bytes=segment_bytes)
    assert disk.failed >= len(failing & set(range(12)))
    assert list(LogReader(tmp_path / "run" / "log")) == SHORT
    judge = Judge(SHORT, tmp_path / "state")
    judged(recording, judge, most)
    print(f"{disk.failed} of {disk.syncs} syncs failed: {judge.states} states")


def random_run(chance: random.Random) -> Run:
    """Flushed now and then."""

    def run(log: LogWriter, content: list[EventBatch]) -> None:
        for item in content:
            log.append(item)
            if chance.random() < 0.4:
                with suppress(LogWriteFailed):
                    log.flush()

    return run


def long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, batches: int, most: int) -> Judge:
    """A longer one of all kinds of batches and settings, with syncs that fail."""
    chance = random.Random(seed)
    monkeypatch.setattr(recorder, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(recorder, "_LONGEST_PAUSE_SECONDS", 0.002)
    content = [sized(seq, chance.choice((16, 100, 500, 3000))) for seq in range(batches)]
    failure = chance.choice((0, 0.1, 0.3))
    settled: list[bool] = []

    def run(log: LogWriter, content: list[EventBatch]) -> None:
        random_run(chance)(log, content)
        while not settled:
            with suppress(LogWriteFailed):
                settled.append(log.flush())
        # Closing tries twice only: what fails then is not for here.

    disk = FailingSyncs(tmp_path, lambda _: not settled and chance.random() < failure)
    with patch.object(os, "fdatasync", disk):
        recording = recorded(
            tmp_path / "run",
            content,
            run,
            fsync=chance.choice(("always", "group", "interval") if failure else ("interval", "never")),
            fsync_seconds=chance.choice((0.001, 0.01, 1000)),
            segment_bytes=chance.choice((600, 4096, 1 << 20)),
        )
    judge = Judge(content, tmp_path / "state")
    judged(recording, judge, most, seed)
    return judge


@pytest.mark.parametrize("seed", seeds(range(60), quick=3))
def test_some_states_of_a_log_by_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The same with all kinds of sizes and settings, and disks that refuse now and then."""
    judge = long_log(tmp_path, monkeypatch, seed, batches=14, most=2)
    print(f"{judge.states} states, {judge.cut} cut")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_states_of_long_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The same at length."""
    judge = long_log(tmp_path, monkeypatch, seed, batches=40, most=40)
    print(f"{judge.states} states, {judge.cut} cut")


def test_a_power_cut_during_recovery(tmp_path: Path) -> None:
    """Whatever it leaves of what recovery has begun, the next one keeps what the first would have kept."""
    recording = recorded(tmp_path / "run", SHORT, one_by_one, segment_bytes=1500)
    torn, states, steps = set[int](), 0, 0
    for disk, reported in recording.disks():
        for state in disk.states(4, random.Random(reported)):
            known = hash(frozenset(state.items()))
            if known in torn or not any(state.values()):
                continue
            torn.add(known)
            put(state, tmp_path / "torn")
            second = Recording(tmp_path / "torn", lambda reported=reported: reported)  # type: ignore[misc]
            with second.running():
                recover(tmp_path / "torn" / "log")
            judge = Judge(SHORT, tmp_path / "state", keeps=state)
            judged(second, judge, 100)
            states, steps = states + judge.states, steps + len(second.steps)
            shutil.rmtree(tmp_path / "torn")
    print(f"{len(torn)} logs recovered in {steps} steps: {states} states")
    assert states > 100


def test_the_model_forgets_what_a_failed_sync_has_not_written() -> None:
    """A sync after a failed one makes durable what was written since, and nothing else."""
    file = File()
    file.write(0, b"a" * 600)
    file.sync()
    file.write(600, b"b" * 600)
    file.fail_to_sync()
    file.write(1200, b"c" * 10)
    file.sync()
    assert file.durable == b"a" * 600 + bytes(424) + b"b" * 176 + b"c" * 10
    file.truncate(600)
    file.write(600, b"b" * 600)
    file.sync()
    assert file.durable == file.now == b"a" * 600 + b"b" * 600


def test_the_model_knows_what_a_power_cut_leaves(tmp_path: Path) -> None:
    """Names and lengths that were not synced may be there; what was, is."""
    disk = Disk()
    disk.root.change((), {"a": File()})
    file = disk.find(Path("a"))
    assert isinstance(file, File)
    file.write(0, b"x" * 600)
    states = list(disk.states(10**6, random.Random(0)))
    assert {len(state["a"] or b"") for state in states if state} == {0, 512, 600}
    assert {} in states
    file.sync()
    disk.root.sync()
    assert list(disk.states(10, random.Random(0))) == [{"a": b"x" * 600}]

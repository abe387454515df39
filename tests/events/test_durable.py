"""Locks and syncs: how each system is asked, what is a failure, and who is told to hold a lock."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from events.errors import NotARegularFile, UnsafeFile
from events.log.durable import LockHeld, sync_directory, sync_file, take_lock
from tests.support.places import ROOT

FULL = 51
"""F_FULLFSYNC of macOS."""


def sync(path: Path) -> None:
    """Sync what is there."""
    if path.is_dir():
        sync_directory(path)
        return
    with path.open("r+b") as file:
        sync_file(file.fileno())


def open_descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


@pytest.fixture(params=["file", "directory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "directory":
        return tmp_path
    (tmp_path / "file").write_bytes(b"x")
    return tmp_path / "file"


class Calls(list[str]):
    """What the system was asked for, all of it about one kind of thing. `refuse` is the answer to F_FULLFSYNC."""

    def __init__(self, is_directory: bool) -> None:
        self._is_directory = is_directory
        self.refuse: int | None = None

    def named(self, name: str) -> Callable[[int], None]:
        return lambda descriptor: self._note(name, descriptor)

    def fcntl(self, descriptor: int, command: int) -> int:
        assert command == FULL
        self._note("full", descriptor)
        if self.refuse is not None:
            raise OSError(self.refuse, os.strerror(self.refuse))
        return 0

    def _note(self, name: str, descriptor: int) -> None:
        assert stat.S_ISDIR(os.fstat(descriptor).st_mode) == self._is_directory
        self.append(name)


@pytest.fixture
def calls(place: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A system with everything: fsync, fdatasync and F_FULLFSYNC."""
    calls = Calls(place.is_dir())
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", calls.fcntl)
    monkeypatch.setattr(os, "fsync", calls.named("fsync"))
    monkeypatch.setattr(os, "fdatasync", calls.named("fdatasync"), raising=False)
    return calls


class TestSync:
    def test_where_the_drive_can_be_asked_it_is(self, calls: Calls, place: Path) -> None:
        """On macOS F_FULLFSYNC does it all, once."""
        sync(place)
        assert calls == ["full"]

    @pytest.mark.parametrize("number", [errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY])
    def test_a_file_system_without_it_is_synced_as_it_can_be(
        self, calls: Calls, place: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """Disks of other machines know no F_FULLFSYNC; then there is fsync, which macOS always has."""
        monkeypatch.delattr(os, "fdatasync")
        calls.refuse = number
        sync(place)
        assert calls == ["full", "fsync"]

    def test_a_drive_that_fails_is_not_asked_in_another_way(self, calls: Calls, place: Path) -> None:
        """A failure is told as it is: a second call may well succeed with the data lost."""
        calls.refuse = errno.EIO
        with pytest.raises(OSError, match="Input/output error"):
            sync(place)
        assert calls == ["full"]

    def test_elsewhere_the_data_of_files_is_enough(
        self, calls: Calls, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On Linux files are synced without what nobody needs to read them; directories always whole."""
        monkeypatch.delattr(fcntl, "F_FULLFSYNC")
        sync(place)
        assert calls == ["fsync" if place.is_dir() else "fdatasync"]

    def test_plain_systems_have_fsync(
        self, calls: Calls, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where there is nothing else, fsync is for files, too."""
        monkeypatch.delattr(fcntl, "F_FULLFSYNC")
        monkeypatch.delattr(os, "fdatasync")
        sync(place)
        assert calls == ["fsync"]


def test_this_system_can_sync(place: Path) -> None:
    """With nothing replaced, files and directories are synced without an error, and no descriptor stays open."""
    sync(place)
    before = open_descriptors()
    sync(place)
    assert open_descriptors() == before


class TestLock:
    def test_one_at_a_time(self, tmp_path: Path) -> None:
        """A second one is refused, also in the same process, and told who has it; giving back lets it in."""
        path = tmp_path / "LOCK"
        lock = take_lock(path)
        with pytest.raises(LockHeld) as raised:
            take_lock(path)
        assert raised.value.holder == f"process {os.getpid()}"
        lock.release()
        take_lock(path).release()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def test_a_holder_that_has_not_said_who_it_is(self, tmp_path: Path) -> None:
        """Between locking and writing the process into it, the file is empty."""
        path = tmp_path / "LOCK"
        lock = take_lock(path)
        os.truncate(path, 0)
        with pytest.raises(LockHeld, match=r"^another process$"):
            take_lock(path)
        lock.release()

    def test_the_last_holder_is_written_over(self, tmp_path: Path) -> None:
        """However long the name of the last one was, the file names this one only."""
        path = tmp_path / "LOCK"
        path.write_text("process 99999999999999999999\n")
        lock = take_lock(path)
        assert path.read_text() == f"process {os.getpid()}\n"
        lock.release()

    def test_death_gives_it_back(self, tmp_path: Path) -> None:
        """A killed process holds nothing."""
        path = tmp_path / "LOCK"
        code = (
            "import sys; from pathlib import Path; from events.log.durable import take_lock\n"
            "take_lock(Path(sys.argv[1])); print('held', flush=True); input()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, str(path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"held\n"
            with pytest.raises(LockHeld, match=f"process {child.pid}"):
                take_lock(path)
            child.kill()
        take_lock(path).release()

    @pytest.mark.parametrize("kind", ["pipe", "link"])
    def test_what_is_no_file_is_not_locked(self, tmp_path: Path, kind: str) -> None:
        """Neither a pipe nor what a link points to is touched, and no descriptor stays open."""
        path, other = tmp_path / "LOCK", tmp_path / "other"
        other.write_text("precious")
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(other)
        before = open_descriptors()
        with pytest.raises(NotARegularFile if kind == "pipe" else UnsafeFile):
            take_lock(path)
        assert open_descriptors() == before
        assert other.read_text() == "precious"

    def test_removed_file_lets_nobody_in_if_the_directory_is_locked(self, tmp_path: Path) -> None:
        """With the directory, one lock is what there is until it is given back, whatever becomes of the file."""
        path = tmp_path / "LOCK"
        lock = take_lock(path, with_directory=True)
        with pytest.raises(LockHeld, match=f"process {os.getpid()}"):
            take_lock(path, with_directory=True)
        path.unlink()
        for _ in range(2):
            with pytest.raises(LockHeld, match="another process"):
                take_lock(path, with_directory=True)
        path.mkdir()
        with pytest.raises(LockHeld, match="another process"):
            take_lock(path, with_directory=True)
        path.rmdir()
        assert lock.in_place()
        lock.release()
        take_lock(path, with_directory=True).release()

    def test_files_in_one_directory_are_locked_one_by_one(self, tmp_path: Path) -> None:
        """Without the directory, neighbours do not concern each other, and one with it is beside them."""
        paths = [tmp_path / name for name in ("a", "b", "c")]
        locks = [take_lock(path, with_directory=path.name == "c") for path in paths]
        for lock in locks:
            assert lock.in_place()
            lock.release()

    @pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK])
    def test_where_directories_cannot_be_locked_the_file_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """Disks of other machines may lock files only; that is better than nothing."""
        flock = fcntl.flock

        def files_only(descriptor: int, operation: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", files_only)
        before = open_descriptors()
        lock = take_lock(tmp_path / "LOCK", with_directory=True)
        with pytest.raises(LockHeld, match=f"process {os.getpid()}"):
            take_lock(tmp_path / "LOCK", with_directory=True)
        assert lock.in_place()
        (tmp_path / "LOCK").unlink()
        assert not lock.in_place()
        lock.release()
        assert open_descriptors() == before

    def test_file_that_is_removed_while_it_is_locked_is_not_the_lock(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between opening and locking, the name may come to mean another file: then that one is locked."""
        path = tmp_path / "LOCK"
        flock, calls = fcntl.flock, []

        def late(descriptor: int, operation: int) -> None:
            calls.append(descriptor)
            if len(calls) == 1:
                path.unlink()
            flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", late)
        lock = take_lock(path)
        assert len(calls) == 2
        assert lock.in_place()
        with pytest.raises(LockHeld):
            take_lock(path)
        lock.release()

    def test_moved_directory_is_noticed(self, tmp_path: Path) -> None:
        """A lock is out of place when its directory has another name, or none."""
        directory = tmp_path / "log"
        directory.mkdir()
        lock = take_lock(directory / "LOCK", with_directory=True)
        directory.rename(tmp_path / "old")
        assert not lock.in_place()
        directory.mkdir()
        assert not lock.in_place()
        take_lock(directory / "LOCK", with_directory=True).release()
        lock.release()

    def test_is_given_back_once(self, tmp_path: Path) -> None:
        """Its descriptors may be those of other files the second time."""
        lock = take_lock(tmp_path / "LOCK", with_directory=True)
        lock.release()
        with (tmp_path / "one").open("w") as one, (tmp_path / "other").open("w") as other:
            lock.release()
            lock.disown()
            for file in (one, other):
                file.write("still open")
                file.flush()
        assert {(tmp_path / name).read_text() for name in ("one", "other")} == {"still open"}

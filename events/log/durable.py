"""Files that outlive a crash: locks that name their holder, writes of all there is, and syncs that reach the disk.

On macOS `fsync` hands the data to the drive and does not make the drive write it; `F_FULLFSYNC` does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from events.files.safe import create_file, make_private, open_or_create

_NOT_HERE = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY}
"""Errors by which file systems, as those of other machines, report that they have no `F_FULLFSYNC`. Others are
failures."""
_NO_DIRECTORY_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors by which file systems of other machines report that they lock files only, and for writing."""
_PARTS_MAX = 1000
"""Systems take 1024 buffers in one write."""
_UNKNOWN_HOLDER = "another process"
_HOLDER = "process "


class LockHeld(Exception):
    """The lock is held; `holder` is its process, from the lock file."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


class Lock:
    """A lock that this process holds, until it is released or the process ends."""

    def __init__(self, path: Path, file: int, directory: int | None) -> None:
        self._path = path
        self._file = file
        self._directory = directory
        self._held = True

    def in_place(self) -> bool:
        """Return True if the locked file still has its name; if not, another process may have locked a new one."""
        try:
            if self._directory is not None:
                return os.path.samestat(self._path.parent.stat(), os.fstat(self._directory))
            return os.path.samestat(self._path.lstat(), os.fstat(self._file))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def write(self, content: bytes) -> None:
        """Write content into the lock file, instead of its holder."""
        os.pwrite(self._file, content.ljust(os.fstat(self._file).st_size, b"\n"), 0)

    def release(self) -> None:
        """Unlock. A second call does nothing."""
        for descriptor in self._release():
            # Explicit, because a forked child may still hold the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def disown(self) -> None:
        """Release the parent's lock in a forked child, without unlocking it. A second call does nothing."""
        for descriptor in self._release():
            os.close(descriptor)

    def _release(self) -> list[int]:
        """Return the open descriptors, once: their numbers will soon be those of other files."""
        held, self._held = self._held, False
        return [each for each in (self._file, self._directory) if held and each is not None]


def take_lock(path: Path, *, with_directory: bool = False) -> Lock:
    """Lock a file, which is made if it is missing, and write this process into it.

    Removing the file lets others lock; not so if the file's directory is locked with it (`with_directory`), which is
    then for this lock alone. Raises LockHeld, UnsafeFile, OSError.
    """
    directory = _lock_directory(path) if with_directory else None
    try:
        return Lock(path, _lock_file(path), directory)
    except BaseException:
        if directory is not None:
            os.close(directory)
        raise


def _lock_directory(path: Path) -> int | None:
    """Lock the directory of a lock file; None if directories cannot be locked, as on other machines' disks."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise LockHeld(_holder_in(path)) from None
        if error.errno in _NO_DIRECTORY_LOCKS:
            return None
        raise
    return descriptor


def _lock_file(path: Path) -> int:
    # flock, not POSIX locks: those are granted twice within one process, and lost when any descriptor closes.
    while True:
        descriptor = open_or_create(path, os.O_RDWR)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockHeld(_holder(descriptor)) from None
            if Lock(path, descriptor, None).in_place():
                # Never empty again: it identifies the directory as ours (`is_lock_file`).
                size = os.pwrite(descriptor, f"{_HOLDER}{os.getpid()}\n".encode(), 0)
                os.ftruncate(descriptor, size)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # It was removed while being locked.


def is_lock_file(path: Path) -> bool:
    """Return True if a lock of ours was there: other programs also have files of such names."""
    return _holder_in(path).startswith(_HOLDER)


def _holder_in(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return _UNKNOWN_HOLDER
    try:
        return _holder(descriptor) if stat.S_ISREG(os.fstat(descriptor).st_mode) else _UNKNOWN_HOLDER
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    """Return a lock's holder, from its file."""
    return os.pread(descriptor, 64, 0).decode("ascii", "replace").strip() or _UNKNOWN_HOLDER


def write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write all parts, in as many calls as needed."""
    for start in range(0, len(parts), _PARTS_MAX):
        some = parts[start : start + _PARTS_MAX]
        written, size = os.writev(descriptor, some), sum(map(len, some))
        if written < size:
            rest = memoryview(b"".join(some))[written:]
            while rest:
                rest = rest[os.write(descriptor, rest) :]


def replace_file(path: Path, *content: bytes, suffix: str = ".new") -> None:
    """Make `path` a file with this content, for us alone: at any moment a crash leaves the old one or the new.

    `suffix`: that of the unfinished file next to it; concurrent writers each need their own. Raises UnsafeFile,
    OSError.
    """
    unfinished = path.with_name(path.name + suffix)
    descriptor = create_file(unfinished)
    try:
        try:
            write_all(descriptor, list(content))
            sync_file(descriptor)
        finally:
            os.close(descriptor)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def make_directory(path: Path) -> None:
    """Make a private directory, and its missing parents, durably.

    Not durably if a directory may be written but not read: it cannot be synced. Raises OSError.
    """
    for made in make_private(path):
        with contextlib.suppress(PermissionError):
            sync_directory(made.parent)


def sync_file(descriptor: int) -> None:
    """Make a file's content and size survive a power failure. Raises OSError if that cannot be done."""
    if not _full_sync(descriptor):
        getattr(os, "fdatasync", os.fsync)(descriptor)


def sync_directory(directory: Path) -> None:
    """Make names in a directory survive a power failure: syncing a file does not do that."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _full_sync(descriptor):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _full_sync(descriptor: int) -> bool:
    """Let the drive write its cache as well; False if programs may not request that, or not of this disk."""
    command = getattr(fcntl, "F_FULLFSYNC", None)
    if command is None:
        return False
    try:
        fcntl.fcntl(descriptor, command)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        return False
    return True

"""Files that outlive a crash: locks that name their holder, and syncs that reach the disk.

On macOS `fsync` hands the data to the drive and does not make the drive write it; `F_FULLFSYNC` does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

_NOT_HERE = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY}
"""How file systems say that they have no `F_FULLFSYNC`, as those of other machines do. Other errors are failures."""


class LockHeld(Exception):
    """Somebody has the lock; `holder` says who, as the lock file does."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


class NoRegularFile(Exception):
    """What has the lock file's name is something else."""


def take_lock(path: Path) -> int:
    """Lock a file, which is made if it is missing, and write this process into it; returns its descriptor.

    The lock is held until `give_back`, or until the process dies. Raises LockHeld, NoRegularFile, OSError.
    """
    # flock, not POSIX locks: those are granted twice within one process, and lost when any descriptor closes.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NoRegularFile
        _lock(descriptor)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
        raise LockHeld(holder or "another process") from None


def give_back(lock: int) -> None:
    """Unlock what `take_lock` returned."""
    # Said aloud, because a child that was forked may still hold the descriptor.
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def sync_file(descriptor: int) -> None:
    """Make what a file holds, and how much that is, survive a power failure. OSError if that cannot be done."""
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
    """Let the drive write what it caches, too; False where that is not for programs to ask, or not of this disk."""
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

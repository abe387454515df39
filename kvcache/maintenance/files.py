"""Exclusive access for changes to a log's files, one process at a time."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from events.errors import LogBusy, LogError, NotALog, NotARegularFile, system_reason
from events.files.safe import check_directory
from events.log.durable import LockHeld, take_lock
from events.log.segments import MAINTENANCE_LOCK_NAME


@contextmanager
def exclusive_access(directory: Path) -> Iterator[None]:
    """Acquire exclusive access. Raises LogBusy if another process has it, NotALog, UnsafeFile, OSError."""
    check_directory(directory, may_be_sticky=False)
    try:
        lock = take_lock(directory / MAINTENANCE_LOCK_NAME)
    except LockHeld as held:
        raise LogBusy(directory, held.holder) from None
    except NotARegularFile:
        raise NotALog(directory) from None
    try:
        yield
    finally:
        lock.release()


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(eq=False, repr=False)
class NotWritten(LogError):
    """The system refused to write a part of a copy; `advice` says what to do."""

    reason: str
    advice: str
    text = "{path} cannot be written: {reason}; {advice}"


@contextmanager
def writing(path: Path, advice: str) -> Iterator[None]:
    """Raise NotWritten if the system refuses to write. Errors that name a file, except a full disk, pass unchanged."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and error.errno not in _FULL:
            raise
        raise NotWritten(path, system_reason(error), advice) from error

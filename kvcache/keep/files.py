"""One process at a time changes what is kept of a log."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from events.errors import LogBeingKept, LogError, NoRegularFile, NotALog, system_reason
from events.files.safe import check_directory
from events.log.durable import LockHeld, take_lock
from events.log.segments import KEEPER_NAME


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Be the one. Raises LogBeingKept if it is another one, NotALog, UnsafeFile, OSError."""
    check_directory(directory, may_be_sticky=False)
    try:
        lock = take_lock(directory / KEEPER_NAME)
    except LockHeld as held:
        raise LogBeingKept(directory, held.holder) from None
    except NoRegularFile:
        raise NotALog(directory) from None
    try:
        yield
    finally:
        lock.give_back()


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(eq=False, repr=False)
class NotWritten(LogError):
    """The system did not take what was to be written of a copy; `advice` says what to do."""

    reason: str
    advice: str
    text = "{path} cannot be written: {reason}; {advice}"


@contextmanager
def writing(path: Path, advice: str) -> Iterator[None]:
    """Raise NotWritten where the system refuses to write. What names a file, and no full disk, is raised as it is."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and error.errno not in _FULL:
            raise
        raise NotWritten(path, system_reason(error), advice) from error

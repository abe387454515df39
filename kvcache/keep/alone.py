"""One process at a time changes what is kept of a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from events.errors import LogBeingKept, NoRegularFile, NotALog
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

"""One process at a time changes what is kept of a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from events.errors import LogBeingKept, NotALog
from events.log.durable import LockHeld, NoRegularFile, take_lock
from events.log.segments import KEEPER_NAME


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Be the one. Raises LogBeingKept if it is another one, NotALog, OSError."""
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

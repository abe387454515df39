"""Leases: a follower of a log reserves the segments that it still needs, so that they are not removed before it has
read them.

A lease is a file in `leases/` that its reader has locked: when the reader ends, however that happens, the lock is gone,
and so is the lease. It holds the number of the first batch that is needed. Leases keep a limited part of a log
(`events.log.retention`); and a reader that may not write, as on a read-only mount, has none.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from events.errors import UnsafeFile
from events.files.safe import check_directory, make_private
from events.log.durable import Lock, LockHeld, take_lock
from events.log.segments import LEASES_NAME

_NAME = re.compile(r"[0-9]+-[0-9]+\.lease")
_NUMBERS = itertools.count()
_MAX_BYTES = 64


class Lease:
    """One reader's lease, which reserves nothing yet. Never raises: a reader without one reads all the same."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LEASES_NAME / f"{os.getpid()}-{next(_NUMBERS)}.lease"
        self._lock: Lock | None = None
        self._first: int | None = None

    def hold(self, first: int) -> None:
        """Reserve everything from this batch on; earlier batches are no longer needed."""
        if first == self._first:
            return
        self._first = first
        with suppress(OSError, LockHeld, UnsafeFile):
            if self._lock is None:
                # Not in another user's log, which its owner could then not remove.
                check_directory(self._path.parent.parent)
                make_private(self._path.parent)
                check_directory(self._path.parent)
                self._lock = take_lock(self._path)
            self._lock.write(f"{first}\n".encode())

    def end(self) -> None:
        """Release the lease."""
        lock, self._lock, self._first = self._lock, None, None
        if lock is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            lock.release()


def leased(directory: Path) -> int | None:
    """Return the first batch that some reader still needs; None: there is no lease. Removes leases of ended readers."""
    return min(_held(directory), default=None)


def _held(directory: Path) -> Iterator[int]:
    with suppress(FileNotFoundError):
        for name in os.listdir(directory / LEASES_NAME):
            path = directory / LEASES_NAME / name
            if _NAME.fullmatch(name) and (first := _of_a_reader(path)) is not None:
                yield first


def _of_a_reader(path: Path) -> int | None:
    """Return a lease's batch; None: its reader has ended, and the file is removed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(descriptor, _MAX_BYTES, 0)
        # Nothing is written yet, or the name of the process: the reader is just beginning, and may need everything.
        return int(text) if text.strip().isdigit() else 0
    except OSError:
        return None  # If files cannot be locked, no reader has a lease.
    else:
        with suppress(OSError):
            path.unlink()
        return None
    finally:
        os.close(descriptor)

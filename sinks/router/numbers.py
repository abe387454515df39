"""The numbers of a feed's batches: consecutive, and none used twice, over all restarts and crashes.

Routers tell lost and repeated batches by their numbers, and some drop everything at or below the highest one that
they have seen. A process that began again at a lower number would therefore talk to nobody. So numbers are used
only below a reservation that is on disk: a small file holds the first number that is not reserved, and is
replaced, durably, before that number is used. Whoever opens the file next goes on there; what was reserved and
not used is skipped. Closing gives back what was not used.

Where there is no file, or none yet, somebody may have heard an earlier feed all the same. So numbers then begin with
the clock, at microseconds since 1970, which no feed can have reached before (`clock_number`).

File format, three lines: what it is, the reservation, CRC-32 of the lines before in hex.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from pathlib import Path

from events.errors import NoRegularFile
from events.files.safe import check_directory, make_private, open_own
from events.log.durable import Lock, LockHeld, replace_file, take_lock
from sinks.base import SinkError

STEP = 4096
"""Numbers per reservation, so that a sync is needed once in minutes."""

_MAGIC = "kvcache feed numbers 1"
_CONTENT = re.compile(rb"(" + _MAGIC.encode() + rb"\nreserved (\d{1,19})\n)crc32 ([0-9a-f]{8})\n")
_MOST_BYTES = 4096


class FeedNumbers:
    """Hands out numbers below a reservation in the file at `path` (None: in memory only); without it, from `first` on.

    One instance per file at a time, which a lock file beside it enforces. Not for several threads. Raises SinkError for
    a path without a name.
    """

    def __init__(self, path: Path | None, step: int | None = None, first: int = 0) -> None:
        if path is not None and not path.name:
            raise SinkError("state= must name a file, not / or .")
        self._path = path
        self._step = STEP if step is None else step
        self._lock: Lock | None = None
        self._reserved = 0
        self.next = first
        """The number that `take` returns next."""

    def open(self) -> None:
        """Go on where the file says.

        Raises SinkError if it is damaged or in use, UnsafeFile if it is another user's, OSError if it cannot be read.
        """
        if self._path is None:
            return
        make_private(self._path.parent)
        check_directory(self._path.parent)
        self._lock = _lock(self._path)
        try:
            stored = _read(self._path)
            self.next = self._reserved = self.next if stored is None else stored
        except BaseException:
            self._unlock()
            raise

    def take(self) -> int:
        """The next number. Raises OSError, UnsafeFile or SinkError, with nothing used, if it cannot be reserved."""
        if self._path is not None and self.next >= self._reserved:
            self._keep_lock(self._path)
            _write(self._path, self.next + self._step)
            self._reserved = self.next + self._step
        number = self.next
        self.next += 1
        return number

    def close(self) -> None:
        """Give back what is reserved and not used. To be called when no number will be taken any more."""
        if self._path is None or self._lock is None:
            return
        try:
            # Who has removed the lock file has let others in, and then the file says what they have reserved.
            if self.next < self._reserved and self._lock.in_place():
                _write(self._path, self.next)
                self._reserved = self.next
        finally:
            self._unlock()

    def _keep_lock(self, path: Path) -> None:
        """A lock file that was removed is made anew, unless another feed has done so before."""
        if self._lock is not None and self._lock.in_place():
            return
        self._unlock()
        self._lock = _lock(path)
        self.next = max(self.next, _read(path) or 0)

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.give_back()


def _lock(path: Path) -> Lock:
    # A file of its own: the state file is another one after each reservation.
    lock = path.with_name(path.name + ".lock")
    try:
        return take_lock(lock)
    except NoRegularFile:
        raise SinkError(f"{lock} is no regular file: name another place with state=") from None
    except LockHeld as held:
        if held.holder == f"process {os.getpid()}":
            reason = "another feed of this process: name another port, or a file of its own with state="
            raise SinkError(f"{path} is in use by {reason}") from None
        raise SinkError(
            f"{path} is in use by {held.holder}: each feed needs its own, name another with state="
        ) from None


def clock_number() -> int:
    """Where a feed begins that knows of none before it: microseconds since 1970."""
    return time.time_ns() // 1000


def _read(path: Path) -> int | None:
    """The first number that is not reserved; None without a file."""
    try:
        content = _content(path)
    except FileNotFoundError:
        return None
    match = _CONTENT.fullmatch(content)
    if match is None or int(match[3], 16) != zlib.crc32(match[1]):
        raise SinkError(
            f"{path} is damaged, so nobody knows which numbers were used: restore it, or remove it and restart "
            "the routers that follow this feed"
        )
    return int(match[2])


def _content(path: Path) -> bytes:
    """What the file holds, up to more than it should."""
    descriptor = open_own(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def _write(path: Path, reserved: int) -> None:
    """Replace the file: at any moment a crash leaves the old content or the new."""
    content = f"{_MAGIC}\nreserved {reserved}\n".encode()
    content += f"crc32 {zlib.crc32(content):08x}\n".encode()
    replace_file(path, content)

"""The numbers of a feed's batches: consecutive, and none used twice, over all restarts and crashes.

Routers detect lost and repeated batches by their numbers, and some drop everything at or below the highest one that
they have seen. A process that restarted at a lower number would therefore reach no router. So numbers are used only
below a reservation that is on disk: a small file holds the first number that is not reserved, and is replaced, durably,
before that number is used. The next process to open the file continues there; numbers reserved and not used are
skipped. Closing returns unused numbers.

Without a file, or before there is one, a router may have received an earlier feed all the same. So numbers then begin
with the clock, at microseconds since 1970, which no feed can have reached before.

File format, three lines: what it is, the reservation, CRC-32 of the lines before in hex.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from sinks.base import SinkError
from sinks.state_file import StateFile

STEP = 4096
"""Numbers per reservation, so that a sync is needed only once in minutes."""

_MAGIC = "kvcache feed numbers 1"
_IF_DAMAGED = (
    "so the used numbers are unknown: restore it, or remove it and restart the routers that follow this feed"
)
_ELSEWHERE = "each feed needs its own, choose another with state="
_CONTENT = re.compile(rb"(" + _MAGIC.encode() + rb"\nreserved (\d{1,19})\n)crc32 ([0-9a-f]{8})\n")


class FeedNumbers:
    """Numbers below a reservation in the file at `path` (None: in memory only); without it, from `first` on.

    One instance per file at a time. Not for several threads. Raises SinkError for a path without a name.
    """

    def __init__(self, path: Path | None, step: int | None = None, first: int = 0) -> None:
        if path is not None and not path.name:
            raise SinkError("state= must be the name of a file, not / or .")
        self._file = None if path is None else StateFile(path, _encode, _decode, _IF_DAMAGED, _ELSEWHERE)
        self._step = STEP if step is None else step
        self._reserved = 0
        self.next = first
        """The next number of `take`."""

    def open(self) -> None:
        """Continue from the file. Raises the errors of `StateFile.open`."""
        if self._file is not None:
            stored = self._file.open()
            self.next = self._reserved = self.next if stored is None else stored

    def take(self) -> int:
        """Return the next number. Raises OSError, UnsafeFile or SinkError, using none, if it cannot be reserved."""
        if self._file is not None and self.next >= self._reserved:
            if not self._file.is_ours:
                # A removed lock file is made anew, unless another feed has done so before.
                self.next = max(self.next, self._file.open() or 0)
            self._file.save(self.next + self._step)
            self._reserved = self.next + self._step
        number = self.next
        self.next += 1
        return number

    def close(self) -> None:
        """Return reserved and unused numbers to the file. Call when no further number will be taken."""
        if self._file is None:
            return
        try:
            # Removing the lock file has let others in, and then the file has their reservation.
            if self.next < self._reserved and self._file.is_ours:
                self._file.save(self.next)
                self._reserved = self.next
        finally:
            self._file.close()


def _encode(reserved: int) -> bytes:
    content = f"{_MAGIC}\nreserved {reserved}\n".encode()
    return content + f"crc32 {zlib.crc32(content):08x}\n".encode()


def _decode(content: bytes) -> int | None:
    match = _CONTENT.fullmatch(content)
    return int(match[2]) if match is not None and int(match[3], 16) == zlib.crc32(match[1]) else None

"""Writing to a file descriptor, all of it."""

from __future__ import annotations

import os


def write_all(fd: int, data: bytes) -> None:
    """Write `data` with as many system calls as it takes. Raises PartlyWritten if one fails."""
    written = 0
    while written < len(data):
        try:
            written += os.write(fd, data[written:] if written else data)
        except OSError as error:
            raise PartlyWritten(error, written) from error


class PartlyWritten(OSError):
    """The write failed after `written` bytes."""

    def __init__(self, cause: OSError, written: int) -> None:
        super().__init__(cause.errno, cause.strerror)
        self.written = written

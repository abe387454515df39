"""Saying what could not be written, and what to do: a full disk tells neither."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from events.errors import LogError

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
        raise NotWritten(path, error.strerror or type(error).__name__, advice) from error

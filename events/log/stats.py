"""What a log tells of itself while it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LogStats:
    """One moment of a log that is written. `append` calls so far = the three counts of batches together."""

    batches: int
    """In the files; durable, unless `fsync` is "never"."""
    dropped_batches: int
    """Lost to the log for good; a `Gap` tells which, once the log goes on."""
    lag_batches: int
    """Waiting to be written, or to be durable."""
    bytes: int
    """In the files of this epoch."""
    state: Literal["running", "suspended", "closed"]
    """Suspended: the disk refuses, or does not have the files where they were, which is tried again."""
    last_error: str | None
    """Why the disk refused the last time, while it does."""
    durable_seq: int = -1
    """The last batch known to be on disk; with "never" that is known where a file ends. -1: none."""

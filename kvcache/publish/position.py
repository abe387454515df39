"""How far a sink has got in a log, in a small file, so that the next process goes on there.

One file per sink, named by its URL without options and login; a lock file beside it keeps two processes from serving
the same sink. What it holds was taken by the sink; the sink may have taken a little more than it says, if the process
was killed. Then the batches in between come twice, unless the sink itself can tell (`Sink.resume`).
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from events.errors import NoRegularFile
from events.files.safe import check_directory, make_private, open_own
from events.log.durable import Lock, LockHeld, replace_file, take_lock
from sinks import SinkError

_NAME_CHARACTERS = 60
_MOST_BYTES = 1 << 20
_FORM = 1


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place in a log: everything up to batch `seq` was taken."""

    log_id: str
    """In hex: numbers mean nothing in another log."""
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    """That of the batch: where a crash took batches back, the next epoch uses their numbers again."""
    seq: Annotated[int, msgspec.Meta(ge=-1)]
    """-1: none."""


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds."""

    publish: int
    sink: str
    position: Position


@dataclass
class PositionFile:
    """The file of one sink in `directory`; to be opened before anything else, by one process at a time."""

    directory: Path
    sink: str
    """The URL without options and login."""

    def __post_init__(self) -> None:
        plain = "".join(char if char.isalnum() or char in ".-" else "_" for char in self.sink)
        # Two paths may be spelled alike, or be cut to the same.
        name = f"publish-{plain[:_NAME_CHARACTERS]}-{zlib.crc32(self.sink.encode()):08x}.json"
        self.path = self.directory / name
        self._lock: Lock | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is ours."""
        return self._lock is not None

    def open(self) -> Position | None:
        """What it says; None: nothing yet. Raises SinkError if it is damaged or in use, UnsafeFile, OSError."""
        make_private(self.directory)
        check_directory(self.directory)
        lock = self.path.with_name(self.path.name + ".lock")
        try:
            self._lock = take_lock(lock)
        except LockHeld as held:
            raise SinkError(
                f"{self.sink} is served by {held.holder} already: stop that one, or give another --state"
            ) from None
        except NoRegularFile:
            raise SinkError(f"{lock} is no regular file: remove it, or give another --state") from None
        try:
            return self._read()
        except BaseException:
            self.close()
            raise

    def save(self, position: Position) -> None:
        """Replace what it says, durably. Raises UnsafeFile, OSError."""
        replace_file(self.path, msgspec.json.encode(_Content(_FORM, self.sink, position)) + b"\n")

    def close(self) -> None:
        """Let others have it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.give_back()

    def _read(self) -> Position | None:
        try:
            with os.fdopen(open_own(self.path, os.O_RDONLY), "rb") as file:
                content = msgspec.json.decode(file.read(_MOST_BYTES), type=_Content)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            reason = "restore it, or remove it: the sink gets the whole log again then"
            raise SinkError(
                f"{self.path} is damaged, so nobody knows what the sink has had: {reason}"
            ) from None
        return content.position

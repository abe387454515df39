"""A small file with state that must survive a restart, kept by one process at a time.

At any moment a crash leaves the old content or the new. A lock file next to it excludes others: the file itself is
replaced at each save.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from events.errors import NotARegularFile
from events.files.safe import check_directory, make_private, open_own
from events.log.durable import Lock, LockHeld, replace_file, take_lock
from sinks.base import SinkError

Content = TypeVar("Content")
_MOST_BYTES = 1 << 20


@dataclass(eq=False)
class StateFile(Generic[Content]):
    """The file at `path`, with content of one type; open it before anything else. Not for several threads."""

    path: Path
    encode: Callable[[Content], bytes]
    decode: Callable[[bytes], Content | None]
    """Decodes the file's content; None: it is damaged."""
    if_damaged: str
    """The consequence of damage, and the remedy, for the error's text."""
    elsewhere: str
    """A hint to name another file, as "name another with state="."""

    def __post_init__(self) -> None:
        self._lock: Lock | None = None

    @property
    def is_open(self) -> bool:
        """True if it was opened."""
        return self._lock is not None

    @property
    def is_ours(self) -> bool:
        """True if it is open and locked: removing the lock file lets others in."""
        return self._lock is not None and self._lock.in_place()

    def open(self) -> Content | None:
        """Lock it, and return its content; None: nothing yet.

        Raises SinkError if it is damaged or in use, UnsafeFile if it is another user's, OSError if it cannot be read.
        """
        self.close()
        make_private(self.path.parent)
        check_directory(self.path.parent)
        lock = self.path.with_name(self.path.name + ".lock")
        try:
            self._lock = take_lock(lock)
        except NotARegularFile:
            raise SinkError(f"{lock} is not a regular file: {self.elsewhere}") from None
        except LockHeld as held:
            own = held.holder == f"process {os.getpid()}"
            holder = "another sink of this process" if own else held.holder
            raise SinkError(f"{self.path} is in use by {holder}: {self.elsewhere}") from None
        try:
            return self._read()
        except BaseException:
            self.close()
            raise

    def save(self, content: Content) -> None:
        """Replace its content, durably. Raises UnsafeFile, OSError."""
        replace_file(self.path, self.encode(content))

    def close(self) -> None:
        """Unlock it. A second call does nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _read(self) -> Content | None:
        try:
            with os.fdopen(open_own(self.path, os.O_RDONLY), "rb") as file:
                content = self.decode(file.read(_MOST_BYTES))
        except FileNotFoundError:
            return None
        if content is None:
            raise SinkError(f"{self.path} is damaged, {self.if_damaged}")
        return content

"""``file:///path/events.jsonl`` keeps events as JSON lines, one object per batch, for `jq` and the like.

A batch is one line because it is the unit of atomicity: a reader sees all of it or none. Each is written
with one system call and no buffer, so ``tail -f`` is up to date and a killed process loses only what was
queued. A line that the disk takes only in part is cut off again.

Token ids are the prompt: they are left out unless ``?tokens=1``. A new file is readable by its owner
only. A file that holds something already is refused unless ``?append=1``: one that a person kept must not
be mixed up with another run's by accident. One writer per file.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import msgspec

from events.codec import to_json
from events.types import EventBatch
from sinks.base import SinkContext, SinkError, SinkURL, SinkURLError
from sinks.writing import PartlyWritten, write_all

FILE_MODE = 0o600


class FileOptions(msgspec.Struct, frozen=True):
    """Options of the URL."""

    tokens: bool = False
    append: bool = False


class FileSink:
    """Appends batches to a file as JSON lines."""

    def __init__(self, path: str, options: FileOptions, key_bytes: int) -> None:
        self._path = path
        self.needs_tokens = options.tokens
        self._options = options
        self._key_bytes = key_bytes
        self._fd = -1

    def open(self) -> None:
        """Create the file, or open it for appending.

        Raises SinkError if there is no such directory or two runs would be mixed, OSError if it cannot be opened.
        """
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except FileNotFoundError:
            raise SinkError(f"no such directory: {Path(self._path).parent}") from None
        try:
            self._prepare(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def write(self, batch: EventBatch) -> None:
        """Append one line. Raises OSError after cutting off what was written of it."""
        line = to_json(batch, self._key_bytes, tokens=self._options.tokens) + b"\n"
        try:
            write_all(self._fd, line)
        except PartlyWritten as error:
            if error.written:
                self._cut(error.written)
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _prepare(self, fd: int) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
            return
        if not self._options.append:
            raise SinkError(f"{self._path} is not empty: remove it, choose another, or add ?append=1")
        if not self._ends_with_newline():
            # A writer was killed in the middle of a line. It stays a line of its own.
            write_all(fd, b"\n")

    def _ends_with_newline(self) -> bool:
        with Path(self._path).open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _cut(self, length: int) -> None:
        # Only a file can be cut; a pipe's reader has seen the piece already.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, os.lseek(self._fd, 0, os.SEEK_END) - length)


def create(url: SinkURL, context: SinkContext) -> FileSink:
    """The sink for a ``file:`` URL. ``file:relative/path`` is relative to the working directory."""
    options = url.read_options(FileOptions)
    url.refuse_login(
        "a file is opened with the rights of this process, so a user and a password would be ignored: leave them out"
    )
    if url.host not in (None, "localhost") or url.port is not None:
        reason = (
            "write file:///tmp/events.jsonl for an absolute path and file:events.jsonl for a relative one"
        )
        raise SinkURLError(str(url), reason)
    if not url.path or url.path.endswith("/"):
        raise SinkURLError(str(url), "a file name is needed, as in file:///tmp/events.jsonl")
    return FileSink(url.path, options, context.key_bytes)

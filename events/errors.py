"""Errors about events and their log, as one tree.

::

    EventsError
    ├── EventDecodeError      these bytes are no events
    ├── UnsafeFile            another user has made it, or may change it
    │   └── NotARegularFile     a pipe, a device, a directory
    └── LogError              about the log directory `path`
        ├── LogExists         there is a log already, and `resume` was not set
        ├── LogLocked         another writer has it open
        │   └── LogBusy  no writer, but another process that compresses or prunes it
        ├── NotALog           a directory with other files, or none
        ├── LogOfOtherKind    a log of another kind than required
        ├── LogTooNew         written by a newer version of this software
        ├── LogOutdated       an earlier version has compressed it, which this one converts and does not read
        ├── ZstdMissing       it is compressed, and the extra for that is missing
        ├── LogDamaged        bytes that were once whole are not what was written
        ├── LogUnavailable    the system does not let us have a log there
        └── LogWriteFailed    the disk refuses to be written, or the log is closed

Messages are built from our own fields only: bytes that failed to decode may hold a user's prompt, and are never
repeated. All errors survive pickling, because engines pass them between processes.
"""

from __future__ import annotations

import errno
import re
import traceback
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "EventDecodeError",
    "EventsError",
    "LogBusy",
    "LogDamaged",
    "LogError",
    "LogExists",
    "LogLocked",
    "LogOfOtherKind",
    "LogTooNew",
    "LogUnavailable",
    "LogWriteFailed",
    "NotALog",
    "NotARegularFile",
    "UnsafeFile",
]  # fmt: skip
"""Names exported by `events`."""

_NAME = re.compile("[a-z_]{1,16}")
"""Pattern of option names."""
_QUOTED = re.compile(r"'([^']{40})[^']+'")


class FieldsError(Exception):
    """Base of errors with fields: those that a subclass declares become its arguments, so that it survives pickling."""

    text = ""
    """The message, with placeholders for the fields; empty: the argument itself."""

    def __post_init__(self) -> None:
        self.args = tuple(vars(self).values())

    def __str__(self) -> str:
        return self.text.format_map(vars(self)) or super().__str__()


class EventsError(FieldsError):
    """Base of all errors of this package."""


@dataclass(eq=False, repr=False)
class EventDecodeError(EventsError):
    """Bytes, or JSON, that hold no event batch."""

    reason: str


@dataclass(eq=False, repr=False)
class UnsafeFile(EventsError):
    """A file or directory that another user has made, may change, or may read though it is secret; it was not changed.

    `reason` is the fault, `advice` the remedy.
    """

    path: Path
    reason: str
    advice: str
    text = "{path} is not used: {reason}; {advice}"


@dataclass(eq=False, repr=False)
class NotARegularFile(UnsafeFile):
    """Something else than a regular file has the name of one of our files."""

    reason: str = "it is not a regular file"
    advice: str = "remove it, or choose another path"


@dataclass(eq=False, repr=False)
class LogError(EventsError):
    """Base of the errors about a log directory or a file in it."""

    path: Path


class LogExists(LogError):
    """The directory holds a log, and `resume` was not set."""

    text = (
        "{path} already holds a log: choose another directory, or continue it with log=LogWriter(directory, "
        "resume=True)"
    )


@dataclass(eq=False, repr=False)
class LogLocked(LogError):
    """Another writer has the log open; `holder` is its process, if known."""

    holder: str
    text = "{path} is being written by {holder}: stop that process or choose another directory"


@dataclass(eq=False, repr=False)
class LogBusy(LogLocked):
    """Another process makes snapshots of the log, compresses it or removes parts; a writer is no obstacle."""

    text = "{path} is being maintained by {holder} (snapshots, compression or pruning): try again when it is done"


@dataclass(eq=False, repr=False)
class NotALog(LogError):
    """No log is there: the directory is missing, empty, or holds other files.

    `to_write`: True if a log was to be written there: then an empty or a missing directory would do.
    """

    to_write: bool = False

    def __str__(self) -> str:
        problem = "is not a log directory: give a directory that a log was written to, with *.kvlog files"
        if self.to_write:
            problem = "holds something other than a log: give an empty or new directory"
        return f"{self.path} {problem}"


@dataclass(eq=False, repr=False)
class LogOfOtherKind(LogError):
    """A log of a cache instead of one of engines' published events, or the other way round; `kind` is its kind."""

    kind: str

    def __str__(self) -> str:
        if self.kind == "feed":
            return (
                f"{self.path} is a feed log: it records what engines published (`kvcache tap`), not what a "
                "cache did, so it cannot answer this; use it with replay, match, audit, events or publish"
            )
        return (
            f"{self.path} is the log of a cache, not of what engines published: give `kvcache tap` another "
            "directory"
        )


@dataclass(eq=False, repr=False)
class LogTooNew(LogError):
    """The log has a format version that this software does not support."""

    version: int
    text = "{path} has format version {version}, which is newer than this software: upgrade it"


class LogOutdated(LogError):
    """The log has segments compressed by an earlier version, in a form that is converted and not read."""

    text = "{path} was compressed by an earlier version: convert the log with `kvcache log compress`"


class ZstdMissing(LogError):
    """The log is compressed, which needs a package that is not installed."""

    text = "{path} is compressed and cannot be read without zstd: pip install 'kvcache[zstd]'"


@dataclass(eq=False, repr=False)
class LogDamaged(LogError):
    """Written bytes are no longer there.

    `offset` is the byte in the file `path` where reading had to stop, `seq` the batch that was expected there (None if
    that is not known). Everything before it is intact; nothing after it is returned.
    """

    offset: int
    seq: int | None
    reason: str

    def __str__(self) -> str:
        where = f"byte {self.offset}" if self.seq is None else f"byte {self.offset}, batch {self.seq}"
        return f"{self.path} is damaged at {where}: {self.reason}; restore the file from a copy"


@dataclass(eq=False, repr=False)
class LogUnavailable(LogError):
    """The system refuses to make, open or lock a log there: no permission, a read-only disk, too long a path."""

    reason: str
    text = "{path} cannot be used for a log: {reason}; choose a directory that this user may write to"


@dataclass(eq=False, repr=False)
class LogWriteFailed(LogError):
    """Nothing is recorded, at present because writing fails, or any more because the log is closed.

    `errno` is the system's error number, if it was the system that failed. An open log retries by itself, and then
    records its queue, a `Gap` for batches that had no room there, and the whole state. One that has `ended` does not:
    unwritten batches are lost.
    """

    reason: str
    errno: int | None = None
    ended: bool = False

    def __str__(self) -> str:
        if self.errno is None:
            return f"{self.path} is not recorded: {self.reason}; open a new log"
        if self.ended:
            return (
                f"the end of {self.path} could not be written: {self.reason}; everything before it can be "
                "read"
            )
        advice = (
            "free some space or repair the disk" if self.errno != errno.ESTALE else "restore what was there"
        )
        return f"{self.path} cannot be written: {self.reason}; {advice}; it retries automatically"


def type_and_place(error: BaseException) -> str:
    """Return an error's type and place, without its text: that may quote anything, a prompt's tokens too."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


def system_reason(error: BaseException, otherwise: str = "") -> str:
    """Return the system's message for a failure; without one, `otherwise`, by default the type of the error."""
    said = error.strerror if isinstance(error, OSError) else None
    return said or otherwise or type(error).__name__


def without_login(address: str) -> str:
    """Return an address, or a whole URL, without the part before the last @, all of which may be a password."""
    before, at, host = address.rpartition("@")
    scheme, colon, _ = before.partition(":")
    return f"{scheme * bool(colon)}{colon}…@{host}" if at else address


def option_name(given: str) -> str:
    """Return the name of an unknown option, if it looks like one: it may contain a password."""
    return repr(given if _NAME.fullmatch(given) else "…")


def shortened(text: str) -> str:
    """Return a message with long quoted values cut short."""
    return _QUOTED.sub(r"'\1…'", text)

"""Error messages and exit codes of failed commands."""

from __future__ import annotations

from contextlib import suppress

from events.errors import EventDecodeError, EventsError, LogDamaged, LogWriteFailed, NotALog
from kvcache.cli import messages
from kvcache.errors import ConfigError, InternalError, KVCacheError
from kvcache.publish.errors import BeginningRemoved, LogReplaced
from sinks import SinkError

EXPECTED = (KVCacheError, EventsError, SinkError, OSError, MemoryError)
"""Errors reported in one line. All others are bugs, and are shown with their origin."""
_ABOUT_DATA = (InternalError, EventDecodeError, LogDamaged, LogWriteFailed, BeginningRemoved, LogReplaced)


def report(error: Exception, *, verbose: bool) -> int:
    """Report an error on stderr; return the exit code: 1 if the data is wrong, 2 if the request is."""
    for number, line in enumerate(_lines(error)):
        messages.error(line, error if verbose and number == 0 else None)
    return 1 if isinstance(error, _ABOUT_DATA) else 2


def _lines(error: Exception) -> list[str]:
    """Return the message: one line, or one per problem of a configuration."""
    if isinstance(error, ConfigError):
        origin = f"{error.source}: " if error.source else ""
        return [origin + problem for problem in error.problems]
    if isinstance(error, NotALog) and not error.to_write:
        return [_not_a_log(error)]
    if isinstance(error, OSError) and error.strerror:
        return [f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror]
    if isinstance(error, MemoryError):
        return [f"there is not enough memory: {error}" if str(error) else "there is not enough memory"]
    return [str(error)]


def _not_a_log(error: NotALog) -> str:
    """Return advice: for a directory of logs, to name one of these; for a file, how a trace becomes a log."""
    from kvcache.cli.audit import logs_in, some_of

    with suppress(OSError):
        if inside := logs_in(error.path).logs:
            return f"{error.path} is no log but holds some: give one of them ({some_of(inside)})"
    if error.path.is_file():
        made = "of a trace (`kvcache docs traces`) `kvcache audit TRACE --keep-log DIR` makes one"
        return f"{error}; {made}"
    return str(error)

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
    """Print an error on stderr; return the exit code: 1 for wrong data, 2 for a wrong request."""
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
        return [f"out of memory: {error}" if str(error) else "out of memory"]
    return [str(error)]


def _not_a_log(error: NotALog) -> str:
    """Return the message with advice for a directory of logs, or for a file that may be a trace."""
    from kvcache.cli.audit import logs_in, some_of

    with suppress(OSError):
        if inside := logs_in(error.path)[0]:
            return f"{error.path} is a directory of logs: give one of them ({some_of(inside)})"
    if error.path.is_file():
        made = (
            "if it is a trace (`kvcache docs traces`), `kvcache audit TRACE --keep-log DIR` makes a log of it"
        )
        return f"{error}; {made}"
    return str(error)

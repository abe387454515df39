"""Messages on stderr, as lines for people or JSON lines: those of a command, and those that the libraries log.

Messages of the libraries (a sink that is quarantined, a disk that refuses the log) look like the command's own;
``-q`` leaves the errors, ``-v`` adds notes.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvcache.cli.process import forget
from kvcache.phrases import printable

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger


class _Form:
    """Form of this process's messages."""

    as_json = False


def configure(*, as_json: bool) -> None:
    """Set the form for this process."""
    _Form.as_json = as_json


def error(text: str, cause: BaseException | None = None) -> None:
    """Print an error; with `cause`, also its origin."""
    where = "" if cause is None else "".join(traceback.format_exception(cause)).rstrip()
    if where and not _Form.as_json:
        _write("\n".join(map(printable, where.split("\n"))))
    _say("error", text, {"exception": where} if where else {})


def warning(text: str) -> None:
    """Print a warning."""
    _say("warning", text, {})


def note(text: str) -> None:
    """Print a note."""
    _say("info", text, {})


def _say(level: str, text: str, more: dict[str, str]) -> None:
    if _Form.as_json:
        timestamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        _write(json.dumps({"event": printable(text), **more, "level": level, "timestamp": timestamp}))
    else:
        _write(f"kvcache: {'' if level == 'info' else f'{level}: '}{printable(text)}")


def _write(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # stderr is gone; the exit code remains
        forget(sys.stderr)


# -- log messages of libraries


def configure_diagnostics(*, as_json: bool, verbose: bool, quiet: bool) -> None:
    """Set up structlog for this process. It is not loaded before, because `--help` does not need it."""
    import structlog
    from structlog.tracebacks import ExceptionDictTransformer

    # SECURITY: neither an exception's text nor local variables, which may hold prompts.
    name_of_exception = structlog.processors.ExceptionRenderer(lambda info: info[0].__name__)
    for_machines: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
        structlog.processors.JSONRenderer(),
    ]
    level = logging.INFO if as_json or verbose else logging.ERROR if quiet else logging.WARNING
    structlog.configure(
        processors=for_machines if as_json else [name_of_exception, _spelled],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr) if as_json else lambda *_: _Messages(),
    )


class _Messages:
    """Logger that prints in the form of the command."""

    info = staticmethod(note)
    warning = staticmethod(warning)
    error = critical = staticmethod(error)


def _spelled(logger: WrappedLogger, method: str, fields: EventDict) -> str:
    """Format a log message as its event, its reason, and in brackets the rest: "log_suspended: no space (log=/x)"."""
    text, reason = str(fields.pop("event")), fields.pop("reason", None)
    if reason is not None:
        text += f": {reason}"
    more = ", ".join(f"{name}={value}" for name, value in fields.items())
    return f"{text} ({more})" if more else text

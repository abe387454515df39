"""What the libraries below report (a sink that is quarantined, a disk that refuses the log) goes to stderr.

Warnings and errors are told as the command's own (`kvcache.cli.messages`); ``-q`` leaves the errors, ``-v`` adds notes.
``--log-json`` writes all of it as JSON lines for machines.
"""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger

from kvcache.cli import messages

# SECURITY: neither an exception's text nor local variables, which may hold prompts.
_NAME_OF_EXCEPTION = structlog.processors.ExceptionRenderer(lambda info: info[0].__name__)


def configure(*, as_json: bool, verbose: bool, quiet: bool) -> None:
    """Set up structlog for this process."""
    level = logging.INFO if as_json or verbose else logging.ERROR if quiet else logging.WARNING
    structlog.configure(
        processors=_for_machines() if as_json else [_NAME_OF_EXCEPTION, _spelled],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr) if as_json else lambda *_: _Messages(),
    )


class _Messages:
    """A logger that says things as the command does."""

    info = staticmethod(messages.note)
    warning = staticmethod(messages.warning)
    error = critical = staticmethod(messages.error)


def _spelled(logger: WrappedLogger, method: str, fields: EventDict) -> str:
    """The name of what is reported, its reason, and in brackets all else: "log_suspended: no space (log=/x)"."""
    text, reason = str(fields.pop("event")), fields.pop("reason", None)
    if reason is not None:
        text += f": {reason}"
    more = ", ".join(f"{name}={value}" for name, value in fields.items())
    return f"{text} ({more})" if more else text


def _for_machines() -> list[Processor]:
    # SECURITY: local variables hold prompts; no report shows them.
    transformer = ExceptionDictTransformer(show_locals=False)
    return [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.ExceptionRenderer(transformer),
        structlog.processors.JSONRenderer(),
    ]

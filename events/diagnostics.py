"""The library's own log messages (an abandoned sink, a port open to others), by structlog.

The application's configuration of structlog applies, with one exception: nothing goes to stdout, where events and
results are. Without a configuration, or with one that names no stream, structlog prints there. If structlog passes
messages to the standard library's `logging`, its handlers decide alone.
"""

from __future__ import annotations

import sys
from typing import Any

import structlog

Logger = structlog.typing.FilteringBoundLogger


def get_logger(name: str) -> Logger:
    """Return a logger that reads the configuration at each use: the application may configure after the import."""
    logger: Logger = structlog.wrap_logger(_Configured(name))
    return logger


class _Configured:
    """The logger of the currently configured factory, or one like it that writes to stderr."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        made = structlog.get_config()["logger_factory"](self._name)
        return getattr(_off_stdout(made), attribute)


def _off_stdout(logger: Any) -> Any:
    """Return the logger, or one of its kind on stderr if it would write to stdout."""
    file = getattr(logger, "_file", None)  # structlog's loggers that write to a stream themselves
    if file is None or not _is_stdout(file):
        return logger
    if sys.stderr is None:
        return structlog.ReturnLogger()
    return type(logger)(sys.stderr.buffer if isinstance(logger, structlog.BytesLogger) else sys.stderr)


def _is_stdout(file: Any) -> bool:
    for stream in (sys.stdout, sys.__stdout__):
        if file is stream or file is getattr(stream, "buffer", None):
            return True
    try:
        return bool(file.fileno() == 1)
    except (AttributeError, OSError, ValueError):
        return False

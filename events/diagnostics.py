"""What the library reports about itself (a sink that was given up, a port that others can reach), by structlog.

The application's configuration of structlog holds, but for one thing: nothing of it goes to stdout, where events and
results are. Without a configuration structlog prints there, and so it does with one that names no stream. Where
structlog hands on to the standard library's `logging`, its handlers decide alone.
"""

from __future__ import annotations

import sys
from typing import Any

import structlog

Logger = structlog.typing.FilteringBoundLogger


def get_logger(name: str) -> Logger:
    """A logger that looks at the configuration whenever it is used: the application may configure after the import."""
    logger: Logger = structlog.wrap_logger(_Configured(name))
    return logger


class _Configured:
    """The logger that the configured factory makes at the moment, or one like it that writes to stderr."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        made = structlog.get_config()["logger_factory"](self._name)
        return getattr(_off_stdout(made), attribute)


def _off_stdout(logger: Any) -> Any:
    """The same, or a logger of its kind on stderr if it would write to stdout."""
    file = getattr(logger, "_file", None)  # of structlog's loggers that write to a stream themselves
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

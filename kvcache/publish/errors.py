"""Errors of publishing and following a log.

::

    LogError                  as in `events.errors`
    ├── BeginningRemoved      the segments that later batches depend on were removed
    └── LogReplaced           the followed log is gone, or was replaced by another one
    UsageError                as in `kvcache.errors`
    ├── NoTokens              a sink needs token ids, and the log has none
    └── NotPublishable        a sink needs data that no log has, or two have the same name
"""

from __future__ import annotations

from dataclasses import dataclass

from events.errors import LogError
from kvcache.errors import UsageError


class BeginningRemoved(LogError):
    """Segments were removed, including those with the beginning of the last epoch."""

    text = (
        "{path}: the files with the beginning of the last epoch were removed, and later ones cannot be read "
        "without them: restart the engine, which begins a new epoch with its whole state"
    )


class LogReplaced(LogError):
    """The directory is gone, or holds another log than before."""

    text = "{path} was removed or replaced by another log: restart to follow the current one"


@dataclass(eq=False, repr=False)
class NoTokens(UsageError):
    """The log's last epoch was recorded without token ids."""

    log: str
    sink: str
    text = (
        "{log} contains no token ids, but the sink {sink} needs them: let the engine record them "
        "(log.record_tokens), or give the sink to the engine itself"
    )


@dataclass(eq=False, repr=False)
class NotPublishable(UsageError):
    """A sink that works only in the engine, or not together with the others."""

    sink: str
    reason: str
    text = "sink {sink!r}: {reason}"

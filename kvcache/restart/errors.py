"""What keeps a cache from going on with a log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcache.errors import UsageError


@dataclass(eq=False, repr=False)
class LogOfOtherCache(UsageError):
    """The log is of a cache with other settings: what its blocks hold means something else here. Nothing was changed.

    `what` says in what they differ.
    """

    path: Path
    what: str
    text = (
        "{path} is the log of another cache: {what}; give the settings with which it was made, or another log and "
        "another secondary_path"
    )

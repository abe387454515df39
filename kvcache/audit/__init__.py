"""Why prompt tokens were computed: a log as a history of block contents, and each admission explained by it.

`open_log` gives a log to programs: its batches, and requests, lives of blocks, evictions and steps as rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.audit.tables import Log, open_log

__all__ = ["Log", "open_log"]


def __getattr__(name: str) -> Any:
    """Import on first use: commands that need only a part of this package load no more."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvcache.audit import tables

    return getattr(tables, name)

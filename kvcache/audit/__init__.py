"""Reasons why prompt tokens were computed: a log as a history of block contents that explains each admission.

`open_log` opens a log for programs: its batches, and rows of requests, block lives, evictions and steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.audit.tables import Log, open_log

__all__ = ["Log", "open_log"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that commands load only what they need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvcache.audit import tables

    return getattr(tables, name)

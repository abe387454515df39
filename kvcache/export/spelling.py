"""How values are spelled where a format has no type for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvcache.audit import phrases

iso = lru_cache(1 << 12)(phrases.iso)
"""Many rows have the same time."""


def times(values: Sequence[int | None]) -> list[str | None]:
    """A column of times."""
    return [None if value is None else iso(value) for value in values]


def texts(values: Sequence[Any]) -> list[str | None]:
    """A column of texts, among which request ids may be numbers."""
    return [value if value is None else str(value) for value in values]

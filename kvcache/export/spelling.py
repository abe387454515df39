"""How values are spelled where a format has no type for them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@lru_cache(1 << 12)
def iso(ts: int) -> str:
    """ISO 8601, UTC, with all nine digits of the nanoseconds: it sorts as text."""
    seconds, ns = divmod(ts, 1_000_000_000)
    return f"{(_EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None).isoformat()}.{ns:09}Z"


def times(values: Sequence[int | None]) -> list[str | None]:
    """A column of times."""
    return [None if value is None else iso(value) for value in values]


def texts(values: Sequence[Any]) -> list[str | None]:
    """A column of texts, among which request ids may be numbers."""
    return [value if value is None else str(value) for value in values]

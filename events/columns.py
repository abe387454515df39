"""Whether the packed columns of an event hold whole entries.

The schema says that a column is bytes; that four of them make a slot it cannot say. A log's reader looks once at every
length, so that nobody behind it has to expect half a number.
"""

from __future__ import annotations

import typing
from typing import Any

import msgspec

from events.packed import NAME_BYTES, Packed
from events.types import AnyEvent

MAX_KEY_BYTES = 64
"""Keys are digests; the longest in use have 64 bytes."""
_SIZES = {
    "token": 4,
    "int32": 4,
    "count": 4,
    "int64": 8,
    "parent": NAME_BYTES,
    "name": NAME_BYTES,
    "key": 0,
}
"""Bytes of an entry; 0 stands for those of a key, which each log chooses."""
_ENDLESS = 1 << 62
"""No column has so many bytes: one with entries of this size must be empty."""

_Columns = tuple[tuple[str, int], ...]


def are_keys(key_bytes: int) -> bool:
    """Whether keys can have this size: none at all, or some names' worth."""
    return 0 <= key_bytes <= MAX_KEY_BYTES and key_bytes % NAME_BYTES == 0


def broken_column(event: AnyEvent | msgspec.Struct, key_bytes: int) -> str | None:
    """The field that is a column with a part of an entry at its end; None if there is none."""
    columns, rows = _FIELDS.get(type(event)) or _fields(type(event))
    for name, size in columns:
        if len(getattr(event, name)) % (size or key_bytes or _ENDLESS):
            return name
    for name, size in rows:
        for item in getattr(event, name):
            if len(item) % size if size else broken_column(item, key_bytes):
                return name
    return None


_FIELDS: dict[type, tuple[_Columns, _Columns]] = {}
"""What `_fields` has found."""


def _fields(kind: type[msgspec.Struct]) -> tuple[_Columns, _Columns]:
    """The columns of a struct, and its fields that hold several: of columns, or of structs (size 0) with columns."""
    columns, rows = [], []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if (size := _entry_size(hint)) is not None:
            columns.append((name, size))
        elif typing.get_origin(hint) is tuple:
            item = typing.get_args(hint)[0]
            if (size := _entry_size(item)) is not None:
                rows.append((name, size))
            elif isinstance(item, type) and issubclass(item, msgspec.Struct) and any(_fields(item)):
                rows.append((name, 0))
    _FIELDS[kind] = tuple(columns), tuple(rows)
    return _FIELDS[kind]


def _entry_size(hint: Any) -> int | None:
    """Bytes per entry if the hint is that of a column."""
    marks = getattr(hint, "__metadata__", ())
    return _SIZES[marks[0].item] if marks and isinstance(marks[0], Packed) else None

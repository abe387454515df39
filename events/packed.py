"""Packed columns: the long rows of numbers in events.

A list of Python integers costs tens of nanoseconds per item to build, encode and decode; the same row as little-endian
bytes costs a memory copy. Events therefore carry slots, handles, names, keys and token ids as ``bytes``. The aliases
below define the meaning of the bytes, and carry a `Packed` marker, by which the JSON codec writes them as readable
lists.

The schema defines a column as bytes, but not that four of them make a slot. A log's reader checks every length once
(`broken_column`), so that later code need not expect half a number.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

SLOT_BYTES = 4
TOKEN_BYTES = 4
HANDLE_BYTES = 8
COUNT_BYTES = 4
CHECKSUM_BYTES = 8
NAME_BYTES = 8
"""Public names of blocks are the first 8 bytes of their keys."""
MAX_KEY_BYTES = 64
"""Keys are digests; the longest in use have 64 bytes."""


@dataclass(frozen=True)
class Packed:
    """Marks a ``bytes`` field as a column; `item` is the kind of an entry, `size` its bytes (0: each log's own)."""

    item: Literal["token", "int32", "count", "int64", "parent", "name", "key", "checksum"]
    size: int


Slots = Annotated[bytes, Packed("int32", SLOT_BYTES)]
"""int32 LE, one per block: the index of its storage in the pools of one window and level."""
Tokens = Annotated[bytes, Packed("token", TOKEN_BYTES)]
"""int32 LE, one per token: the symbol (a plain token id is its own symbol)."""
Handles = Annotated[bytes, Packed("int64", HANDLE_BYTES)]
"""int64 LE, one per sequence."""
Counts = Annotated[bytes, Packed("count", COUNT_BYTES)]
"""uint32 LE."""
Names = Annotated[bytes, Packed("name", NAME_BYTES)]
"""8 bytes per block, to be read as one big-endian unsigned number."""
Parent = Annotated[bytes, Packed("parent", NAME_BYTES)]
"""One name, or nothing."""
Keys = Annotated[bytes, Packed("key", 0)]
"""`key_bytes` of the hash algorithm per block; a block's name is the start of its key."""
Numbers = Annotated[bytes, Packed("int64", 8)]
"""int64 LE."""
Checksums = Annotated[bytes, Packed("checksum", CHECKSUM_BYTES)]
"""XXH3 of 64 bits, one per block, each as its digest (big-endian); 0: none is known."""


def unpack_i32(packed: bytes) -> npt.NDArray[np.int32]:
    """View an int32 column."""
    return np.frombuffer(packed, dtype="<i4")


def unpack_u32(packed: bytes) -> npt.NDArray[np.uint32]:
    """View a uint32 column."""
    return np.frombuffer(packed, dtype="<u4")


def unpack_i64(packed: bytes) -> npt.NDArray[np.int64]:
    """View an int64 column."""
    return np.frombuffer(packed, dtype="<i8")


def unpack_names(packed: bytes) -> npt.NDArray[np.uint64]:
    """View a column of names as unsigned numbers (big-endian, so that they sort like their hex form)."""
    return np.frombuffer(packed, dtype=">u8")


def names_of_keys(keys: bytes, key_bytes: int) -> bytes:
    """Cut the 8-byte names out of a column of keys of `key_bytes` each (0: blocks have no names)."""
    if key_bytes <= NAME_BYTES:
        return keys
    return names_between(keys, key_bytes, 0, len(keys) // key_bytes)


def split_names(names: bytes) -> list[bytes]:
    """Split a column of names into one per block."""
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def names_between(keys: bytes | bytearray, key_bytes: int, first: int, last: int) -> bytes:
    """Return the names of some entries, at least one, of a column of keys; reads only these."""
    begin = first * key_bytes
    if last == first + 1:
        return bytes(keys[begin : begin + NAME_BYTES])
    parts = key_bytes // NAME_BYTES
    # Without a copy of the keys, which would cost more than everything else.
    return np.frombuffer(keys, np.uint64, (last - first) * parts, begin)[::parts].tobytes()


def are_keys(key_bytes: int) -> bool:
    """Return True if keys can have this size: 0, or a number of names."""
    return 0 <= key_bytes <= MAX_KEY_BYTES and key_bytes % NAME_BYTES == 0


def broken_column(event: msgspec.Struct, key_bytes: int) -> str | None:
    """Return a description of a column with an incomplete entry at its end; None if there is none."""
    name = _broken_field(event, key_bytes)
    return name and f"the column {name} of {type(event).__name__} does not hold whole entries"


_ENDLESS = 1 << 62
"""An entry size larger than any column: a column of such entries must be empty."""
_Columns = tuple[tuple[str, int], ...]


def _broken_field(struct: msgspec.Struct, key_bytes: int) -> str | None:
    columns, rows = _fields(type(struct))
    for name, size in columns:
        if len(getattr(struct, name)) % (size or key_bytes or _ENDLESS):
            return name
    for name, size in rows:
        for item in getattr(struct, name):
            if len(item) % size if size else _broken_field(item, key_bytes):
                return name
    return None


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[_Columns, _Columns]:
    """Return names and entry sizes of a struct's columns (0: each log's own), and of its fields that hold several.

    These hold columns, or structs (0 bytes) that have columns.
    """
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
    return tuple(columns), tuple(rows)


def _entry_size(hint: Any) -> int | None:
    """Return the bytes per entry if the hint is a column's."""
    mark = hint.__metadata__[0] if typing.get_origin(hint) is typing.Annotated else None
    return mark.size if isinstance(mark, Packed) else None

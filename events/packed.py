"""Packed columns: how events carry long rows of numbers.

A list of Python integers costs tens of nanoseconds per item to build, encode and decode; the same
row as little-endian bytes costs a memory copy. Events therefore carry slots, handles, names, keys and
token ids as ``bytes``. The aliases below say what the bytes mean, and carry a `Packed` marker so that
the JSON codec can spell them out as lists for people.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

SLOT_BYTES = 4
TOKEN_BYTES = 4
HANDLE_BYTES = 8
NAME_BYTES = 8
"""Public names of blocks are the first 8 bytes of their keys."""


@dataclass(frozen=True)
class Packed:
    """Marks a ``bytes`` field as a column; `item` says what one entry is."""

    item: Literal["token", "int32", "count", "int64", "parent", "name", "key"]


Slots = Annotated[bytes, Packed("int32")]
"""int32 LE, one per block: the index of its storage in the pools of one window and level."""
Tokens = Annotated[bytes, Packed("token")]
"""int32 LE, one per token: the symbol (a plain token id is its own symbol)."""
Handles = Annotated[bytes, Packed("int64")]
"""int64 LE, one per sequence."""
Counts = Annotated[bytes, Packed("count")]
"""uint32 LE."""
Names = Annotated[bytes, Packed("name")]
"""8 bytes per block, to be read as one big-endian unsigned number."""
Parent = Annotated[bytes, Packed("parent")]
"""One name, or nothing."""
Keys = Annotated[bytes, Packed("key")]
"""`key_bytes` of the hash algorithm per block; a block's name is the start of its key."""
Numbers = Annotated[bytes, Packed("int64")]
"""int64 LE."""


def pack_i32(values: Iterable[int] | npt.NDArray[Any]) -> bytes:
    """Pack integers as int32 LE."""
    if not isinstance(values, np.ndarray):
        values = list(values)
    return np.asarray(values, dtype="<i4").tobytes()


def unpack_i32(packed: bytes) -> npt.NDArray[np.int32]:
    """View an int32 column."""
    return np.frombuffer(packed, dtype="<i4")


def pack_u32(values: Iterable[int]) -> bytes:
    """Pack integers as uint32 LE."""
    return np.asarray(list(values), dtype="<u4").tobytes()


def unpack_u32(packed: bytes) -> npt.NDArray[np.uint32]:
    """View a uint32 column."""
    return np.frombuffer(packed, dtype="<u4")


def pack_i64(values: Iterable[int]) -> bytes:
    """Pack integers as int64 LE."""
    return np.asarray(list(values), dtype="<i8").tobytes()


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
    if len(keys) == key_bytes:
        return bytes(keys[:NAME_BYTES])
    return np.frombuffer(keys, np.uint64)[:: key_bytes // NAME_BYTES].tobytes()

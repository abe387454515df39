"""TensorRT-LLM's event dicts, read: those of its older manager and of the newer one, and those of this software.

What is not known of a dict is ignored, and so is an event of a type that is not known. Anything else that does not fit
is refused, and its text is not repeated: it may hold somebody's prompt.
"""

from __future__ import annotations

from typing import Any

import msgspec

from events.errors import EventDecodeError
from events.formats.vllm_decode import Hash


class Token(msgspec.Struct, frozen=True, gc=False):
    """A token; in place of an item's the newer manager has a digest."""

    token_id: int | str
    token_extra_id: int = 0


class Item(msgspec.Struct, frozen=True, gc=False):
    """An item in a block, and where in the item that part of it begins."""

    hash: str
    start_offset: int = 0


class StoredBlock(msgspec.Struct, frozen=True):
    """A block, or the beginning of one."""

    block_hash: int | str
    tokens: tuple[Token, ...]
    cache_level: int = 0
    mm_keys: tuple[Item, ...] = ()
    cache_salt: str | None = None


class Stored(msgspec.Struct, frozen=True):
    """Blocks in a row."""

    blocks: tuple[StoredBlock, ...]
    parent_hash: int | str | None = None
    lora_id: int | None = None
    lora_name: str | None = None


class Difference(msgspec.Struct, frozen=True, gc=False):
    """A value, and the one before it."""

    new_value: int
    old_value: int


class Updated(msgspec.Struct, frozen=True):
    """A block changed its level or its priority."""

    block_hash: int | str
    cache_level: Difference | None = None


class Removed(msgspec.Struct, frozen=True):
    """Blocks are gone."""

    block_hashes: tuple[int | str, ...]


class Created(msgspec.Struct, frozen=True):
    """The cache of a window began."""


Data = Stored | Updated | Removed | Created
_TYPES: dict[str, type[Data]] = {
    "stored": Stored,
    "updated": Updated,
    "removed": Removed,
    "created": Created,
}


class _Envelope(msgspec.Struct, frozen=True):
    event_id: int
    data: dict[str, Any]
    window_size: int = 0
    attention_dp_rank: int | None = None
    layer_group_id: int | None = None


class Event(msgspec.Struct, frozen=True):
    """One dict."""

    number: int
    data: Data | None
    """None: of a type that is not known."""
    window: int
    rank: int | None
    group: int | None
    """The layer group, where it is told."""


_decode = msgspec.json.Decoder(_Envelope | None).decode


def decode_line(line: bytes) -> Event | None:
    """The event of a line; None where it holds none (``{}`` or ``null``). Raises EventDecodeError."""
    if line.strip() == b"{}":
        return None
    try:
        envelope = _decode(line)
        if envelope is None:
            return None
        kind = _TYPES.get(envelope.data.get("type", ""))
        data = None if kind is None else msgspec.convert(envelope.data, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError):
        raise EventDecodeError("the line is none of TensorRT-LLM's events") from None
    return Event(
        envelope.event_id, data, envelope.window_size, envelope.attention_dp_rank, envelope.layer_group_id
    )


def hash_of(name: int | str) -> Hash:
    """A block's hash; digests are written in hex. Raises EventDecodeError."""
    if isinstance(name, int):
        return name
    try:
        return bytes.fromhex(name)
    except ValueError:
        raise EventDecodeError("a block's hash is neither a number nor hex digits") from None

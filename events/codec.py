"""Events as bytes and as JSON.

Bytes are msgpack, straight from the structs: what the log and the native wire format carry. JSON is for
people and their tools: fields by name, packed columns as lists. Both hold the same information.

SECURITY: decoding is where bytes of unknown origin enter. It is typed, so nothing is built that the
schema does not name, and every way in which it can fail is one error that repeats none of the bytes
(msgspec's own messages do, and two of its failures are not even its own exception types).
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np

from events.errors import EventDecodeError
from events.packed import HANDLE_BYTES, NAME_BYTES, TOKEN_BYTES, Packed, broken_column, names_of_keys
from events.structs import LEVEL_NAMES, Spelled
from events.types import AnyEvent, EventBatch, FeedStored, SequenceAdded, TokensAppended

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EventBatch)

_added_fields = attrgetter(*SequenceAdded.__struct_fields__[:-3])
_named_fields = attrgetter(*SequenceAdded.__struct_fields__[:-1])
"""Fields that are written for a request without `session`, `labels` and `lookup`, or without `lookup`: logs without
these are no larger for them."""


def encode_batch(batch: EventBatch) -> bytes:
    """Encode the batch as msgpack. Equal batches give equal bytes."""
    if SequenceAdded in map(type, batch.events):
        return _ENCODER.encode([batch.seq, batch.ts, [*map(_shortened, batch.events)]])
    return _ENCODER.encode(batch)


def _shortened(event: AnyEvent) -> AnyEvent | tuple[Any, ...]:
    """Return the event, or its encoded form without the empty fields at its end."""
    if type(event) is not SequenceAdded or event.lookup is not None:
        return event
    plain = event.session is None and event.labels is None
    return ("SequenceAdded", *(_added_fields if plain else _named_fields)(event))


def decode_batch(data: bytes | memoryview) -> EventBatch:
    """Decode the bytes of `encode_batch`. Raises EventDecodeError for anything else."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # The error and its place, in our own words: the original message may quote the bytes.
        where = re.search(r"`(\$[\[\]0-9.]*)`$", str(error))
        place = f" at {where[1]}" if where else ""
        raise EventDecodeError(f"not an event batch: {type(error).__name__}{place}") from None


def without_tokens(event: AnyEvent) -> AnyEvent:
    """Return the event without token ids; the same object if it has none.

    Counts of tokens are kept: `TokensAppended.counts` becomes explicit. The meanings of symbols are removed, digests of
    items too: with them, an owner of an image could find out that it was sent, and such a stream does not need them.
    """
    if not _token_fields(type(event)):
        return event
    if isinstance(event, TokensAppended):
        one_each = b"\x01\0\0\0" * (len(event.handles) // HANDLE_BYTES)
        counts = event.counts or one_each
        return msgspec.structs.replace(event, counts=counts, tokens=b"") if event.tokens else event
    stripped = _stripped(event)
    return _without_extra_tokens(stripped) if isinstance(stripped, FeedStored) and stripped.more else stripped


def batch_without_tokens(batch: EventBatch) -> EventBatch:
    """Return the batch without token ids in its events; the same object if none can have any."""
    for event in batch.events:
        if _token_fields(type(event)):
            return EventBatch(batch.seq, batch.ts, tuple(map(without_tokens, batch.events)))
    return batch


def _stripped(struct: _Struct) -> _Struct:
    """Return a struct without columns of tokens, also in the structs inside; the same object if it has none."""
    changed: dict[str, Any] = {}
    for name, holds_structs in _token_fields(type(struct)):
        value = getattr(struct, name)
        new = tuple(map(_stripped, value)) if holds_structs else type(value)()
        if new != value:
            changed[name] = new
    return msgspec.structs.replace(struct, **changed) if changed else struct


@cache
def _token_fields(kind: type[msgspec.Struct]) -> list[tuple[str, bool]]:
    """Return the fields with tokens, by their types, each with True if structs inside it have them."""
    found = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if typing.get_origin(hint) is typing.Annotated and hint.__metadata__[0] in _OF_TOKENS:
            found.append((name, False))
        elif typing.get_origin(hint) is tuple:
            item = typing.get_args(hint)[0]
            if isinstance(item, type) and issubclass(item, msgspec.Struct) and _token_fields(item):
                found.append((name, True))
    return found


_OF_TOKENS = (Packed("token", TOKEN_BYTES), Spelled("tokens"))


def _without_extra_tokens(event: FeedStored) -> FeedStored:
    """Remove also further fields that hold tokens; unknown fields may hold anything, and are removed."""
    more = msgspec.msgpack.decode(event.more)
    kept = {name: value for name, value in more.items() if name in _FIELDS_WITHOUT_TOKENS}
    if kept == more:
        return event
    return msgspec.structs.replace(event, more=_ENCODER.encode(kept) if kept else b"")


_FIELDS_WITHOUT_TOKENS = ("kv_cache_spec_kind", "kv_cache_spec_sliding_window")


# --- JSON -------------------------------------------------------------------------------------------


def to_dict(item: AnyEvent | EventBatch, key_bytes: int, tokens: bool = True) -> dict[str, Any]:
    """Return the event or batch as JSON types: dicts by field name, lists, strings, numbers.

    Packed columns become lists: numbers as they are, names and keys (of `key_bytes` bytes each) as hex strings, as
    checksums, because JSON readers round numbers of 64 bits. If there are keys, `names` holds the names that they
    begin with, and if there are hashes of engines, 16 digits of each. Other bytes become one hex string. Levels are
    "primary" and "secondary", and pairs of one value per level an object with these two. Omitted values are None:
    tokens, counts of one each, names of blocks without any; the session, labels and lookup of a request without them
    are not there at all. An event has its name under "type". With `tokens` False, token ids are removed as in
    `without_tokens`. Raises EventDecodeError if a column is no whole number of entries.
    """
    if isinstance(item, EventBatch):
        events = [to_dict(event, key_bytes, tokens) for event in item.events]
        return {"seq": item.seq, "ts": item.ts, "events": events}
    event = item if tokens else without_tokens(item)
    if (reason := broken_column(event, key_bytes)) is not None:
        raise EventDecodeError(reason)
    spelled: dict[str, Any] = {"type": type(event).__name__}
    spelled.update(_struct(type(event))(event, key_bytes))
    return spelled


def to_json(item: AnyEvent | EventBatch, key_bytes: int, tokens: bool = True) -> bytes:
    """`to_dict` as one line of JSON, without the newline."""
    return json_line(to_dict(item, key_bytes, tokens))


def json_line(value: Any, enc_hook: Callable[[Any], Any] | None = None) -> bytes:
    """Encode a value as a line of JSON in ASCII, without the newline, safe for any stream and terminal.

    SECURITY: names in events come from clients. Control characters and marks of direction, which JSON allows in
    strings as they are, are escaped with all else that is not ASCII.
    """
    encoded = msgspec.json.encode(value, enc_hook=enc_hook)
    if encoded.isascii() and b"\x7f" not in encoded:
        return encoded
    return "".join(
        letter if letter.isascii() and letter != "\x7f" else json.dumps(letter)[1:-1]
        for letter in encoded.decode()
    ).encode()


_Speller = Callable[[Any, int], Any]
"""Converts a value, given the bytes of a key, to its JSON form."""
_NUMBERS = {"token": "<i4", "int32": "<i4", "count": "<u4", "int64": "<i8"}
_EMPTY_IS_NULL = ("token", "count")
"""Kinds of columns that are empty if omitted, not without entries: tokens are left out, or there is one per
sequence."""


@cache
def _struct(struct_type: type[msgspec.Struct]) -> _Speller:
    hints = typing.get_type_hints(struct_type, include_extras=True)
    spellers = [(name, name, _speller(hints[name])) for name in struct_type.__struct_fields__]
    if "keys" in hints:
        spellers.append(
            ("names", "keys", lambda keys, size: _spell_hex(names_of_keys(keys, size), NAME_BYTES, size))
        )
    if "block_hashes" in hints:
        spellers.append(("names", "block_hashes", lambda hashes, _: list(map(_spell_short, hashes))))
    rare = [name for name, hint in hints.items() if Spelled("rare") in typing.get_args(hint)]

    def spell_struct(value: Any, size: int) -> dict[str, Any]:
        spelled = {name: spell(getattr(value, source), size) for name, source, spell in spellers}
        for name in rare:
            if spelled[name] is None:
                del spelled[name]
        return spelled

    return spell_struct


def _speller(hint: Any) -> _Speller:
    """Return the converter for one type hint of the schema."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _marked(*arguments)
    if origin is tuple:
        item = _speller(arguments[0])
        if arguments[1] is ...:
            return lambda values, key_bytes: [item(value, key_bytes) for value in values]
        # A pair is always one value per level.
        return lambda values, key_bytes: {
            name: item(value, key_bytes) for name, value in zip(LEVEL_NAMES, values, strict=True)
        }
    if type(None) in arguments:
        some = _speller(arguments[0])
        return lambda value, key_bytes: None if value is None else some(value, key_bytes)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _struct(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda value, _: value.value
    return (lambda value, _: value.hex()) if hint is bytes else (lambda value, _: value)


def _marked(hint: Any, mark: Packed | Spelled) -> _Speller:
    if isinstance(mark, Spelled):
        if mark.form == "tokens":
            row = _speller(hint)
            return lambda values, key_bytes: row(values, key_bytes) or None
        return _FORMS[mark.form]
    if mark.item in _NUMBERS:
        dtype, empty_is_null = _NUMBERS[mark.item], mark.item in _EMPTY_IS_NULL
        return lambda column, _: (
            np.frombuffer(column, dtype).tolist() if column or not empty_is_null else None
        )
    if mark.item == "checksum":
        return lambda column, _: _spell_hex(column, mark.size, 0)
    if mark.item == "parent":
        return lambda name, _: name.hex() or None
    size = mark.size
    return lambda column, key_bytes: _spell_hex(column, size or key_bytes, key_bytes)


def _spell_json(text: str, _: int) -> Any:
    """Return the object in the text. A text without one is not ours, and stays text."""
    try:
        value = msgspec.json.decode(text)
        msgspec.json.encode(value)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _spell_hash(name: int | bytes, _: int) -> str:
    """Return 16 digits, with a sign below 0; a whole digest after 0x."""
    if isinstance(name, bytes):
        return f"0x{name.hex()}"
    return f"{'-' * (name < 0)}{abs(name):016x}"


def _spell_short(name: int | bytes) -> str:
    """Return the short form of a hash: 16 digits; of a whole digest those of its last 8 bytes, read as its number."""
    return name[-NAME_BYTES:].hex() if isinstance(name, bytes) else f"{name & (1 << 64) - 1:016x}"


def _spell_fields(packed: bytes, _: int) -> Any:
    """Return the fields; their bytes in hex if JSON cannot hold them."""
    if not packed:
        return None
    with suppress(
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError, TypeError
    ):
        value = msgspec.json.decode(msgspec.json.encode(msgspec.msgpack.decode(packed)))
        if isinstance(value, dict) and _ENCODER.encode(value) == packed:
            return value
    return f"0x{packed.hex()}"


_FORMS: dict[str, _Speller] = {
    "level": lambda level, _: LEVEL_NAMES[level] if 0 <= level < len(LEVEL_NAMES) else level,
    "json": _spell_json,
    "hash": _spell_hash,
    "fields": _spell_fields,
    "rare": lambda value, _: value,
}


def _spell_hex(column: bytes, size: int, key_bytes: int) -> list[str] | None:
    if not column:
        return [] if key_bytes else None
    return column.hex(" ", -size).split(" ")

"""Events as bytes and as JSON.

Bytes are msgpack, straight from the structs: what the log and the native wire format carry. JSON is for
people and their tools: fields by name, packed columns as lists. Both hold the same information, and
both can be read back.

SECURITY: decoding is where bytes of unknown origin enter. It is typed, so nothing is built that the
schema does not name, and every way in which it can fail is one error that repeats none of the bytes
(msgspec's own messages do, and two of its failures are not even its own exception types).
"""

from __future__ import annotations

import re
import struct
import types
import typing
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from events.errors import EventDecodeError
from events.packed import HANDLE_BYTES, NAME_BYTES, Packed, names_of_keys
from events.spelled import LEVEL_NAMES, Spelled
from events.types import (
    AnyEvent,
    Event,
    EventBatch,
    SequenceAdded,
    StateExported,
    SymbolsInterned,
    TokensAppended,
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(EventBatch)
_NUMBERS = {
    "token": ("<i4", "i"),
    "int32": ("<i4", "i"),
    "count": ("<u4", "I"),
    "int64": ("<i8", "q"),
}
_EMPTY_IS_NULL = ("token", "count")
"""An empty column of these is not one of no entries: tokens are left out, or there is one for each sequence."""
_EVENT_TYPES: dict[str, type[Event]] = {event.__name__: event for event in typing.get_args(AnyEvent)}

encode_batch: Callable[[EventBatch], bytes] = _ENCODER.encode
"""The batch as msgpack. Equal batches give equal bytes."""


def decode_batch(data: bytes | memoryview) -> EventBatch:
    """Read what `encode_batch` wrote. Raises EventDecodeError for anything else."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EventDecodeError(_reason(error)) from None


def _reason(error: Exception) -> str:
    """What is wrong and where, in our own words: the original message may quote the bytes."""
    where = re.search(r"`(\$[\[\]0-9.]*)`$", str(error))
    return f"no event batch: {type(error).__name__}" + (f" at {where[1]}" if where else "")


def without_tokens(event: AnyEvent) -> AnyEvent:
    """The event with token ids taken out; the same object if it has none.

    What counts tokens is kept: `TokensAppended.counts` becomes explicit. What symbols stand for goes, the digests of
    items too: whoever has an image could tell that somebody sent it, and such a stream needs them for nothing.
    """
    strip = _STRIPPERS.get(type(event))
    return event if strip is None else strip(event)


def batch_without_tokens(batch: EventBatch) -> EventBatch:
    """The batch with token ids taken out of its events; the same object if none can have any."""
    for event in batch.events:
        if type(event) in _STRIPPERS:
            return EventBatch(batch.seq, batch.ts, tuple([without_tokens(event) for event in batch.events]))
    return batch


def _strip_added(event: SequenceAdded) -> SequenceAdded:
    return msgspec.structs.replace(event, tokens=b"") if event.tokens else event


def _strip_appended(event: TokensAppended) -> TokensAppended:
    if not event.tokens:
        return event
    one_each = b"\x01\0\0\0" * (len(event.handles) // HANDLE_BYTES)
    return msgspec.structs.replace(event, counts=event.counts or one_each, tokens=b"")


def _strip_exported(event: StateExported) -> StateExported:
    told = any(group.symbols for group in event.groups) or any(s.tokens for s in event.sequences)
    if not told and not event.symbols:
        return event
    return msgspec.structs.replace(
        event,
        symbols=(),
        groups=tuple([msgspec.structs.replace(group, symbols=b"") for group in event.groups]),
        sequences=tuple([msgspec.structs.replace(sequence, tokens=b"") for sequence in event.sequences]),
    )


def _strip_interned(event: SymbolsInterned) -> SymbolsInterned:
    return SymbolsInterned(()) if event.pages else event


_STRIPPERS: dict[type, Callable[[Any], Any]] = {
    SequenceAdded: _strip_added,
    TokensAppended: _strip_appended,
    StateExported: _strip_exported,
    SymbolsInterned: _strip_interned,
}


# --- JSON -------------------------------------------------------------------------------------------


def to_dict(item: AnyEvent | EventBatch, key_bytes: int, tokens: bool = True) -> dict[str, Any]:
    """The event or batch as things JSON knows: dicts by field name, lists, strings, numbers.

    Packed columns become lists: numbers as they are, names and keys (of `key_bytes` bytes each) as hex
    strings, because JSON readers round numbers of 64 bits. Where there are keys, `names` holds the names that they
    begin with. Other bytes become one hex string. Levels are "primary" and "secondary", and what is one for each
    level an object with these two. What is left out is None: tokens, counts of one each, names where blocks have
    none. An event has its name under "type". With `tokens` False, token ids are taken out as in `without_tokens`.
    Raises EventDecodeError if a column is no whole number of entries.
    """
    if isinstance(item, EventBatch):
        return {
            "seq": item.seq,
            "ts": item.ts,
            "events": [to_dict(e, key_bytes, tokens) for e in item.events],
        }
    event = item if tokens else without_tokens(item)
    spelled: dict[str, Any] = {"type": type(event).__name__}
    spelled.update(_struct(type(event)).spell(event, key_bytes))
    return spelled


def to_json(item: AnyEvent | EventBatch, key_bytes: int, tokens: bool = True) -> bytes:
    """`to_dict` as one line of JSON, without the newline."""
    return msgspec.json.encode(to_dict(item, key_bytes, tokens))


def from_json(data: bytes | str) -> EventBatch:
    """Read a batch that `to_json` wrote with its tokens. Raises EventDecodeError for anything else."""
    try:
        batch = msgspec.json.decode(data, type=_JsonBatch)
        events = [_event_fields(event) for event in batch.events]
        return msgspec.convert([batch.seq, batch.ts, events], EventBatch)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, struct.error) as error:
        raise EventDecodeError(_reason(error)) from None


class _JsonBatch(msgspec.Struct):
    seq: int
    ts: int
    events: list[dict[str, Any]]


def _event_fields(event: dict[str, Any]) -> list[Any]:
    """The array form of an event given by field names, as msgspec converts it."""
    name = event.get("type")
    if not isinstance(name, str) or name not in _EVENT_TYPES:
        raise ValueError("unknown event type")
    return [name, *_struct(_EVENT_TYPES[name]).read(event)]


class _Spelling(NamedTuple):
    """How a value of one type is spelled in JSON, and read back into what `msgspec.convert` takes."""

    spell: Callable[[Any, int], Any]
    read: Callable[[Any], Any]


@cache
def _struct(struct_type: type[msgspec.Struct]) -> _Spelling:
    hints = typing.get_type_hints(struct_type, include_extras=True)
    fields = [(field, _spelling(hints[field.name])) for field in msgspec.structs.fields(struct_type)]
    spellers = [(field.name, field.name, spelling.spell) for field, spelling in fields]
    if "keys" in hints:
        spellers.append(("names", "keys", _spell_names_of_keys))

    def spell(value: Any, key_bytes: int) -> dict[str, Any]:
        return {name: speller(getattr(value, source), key_bytes) for name, source, speller in spellers}

    def read(value: Any) -> list[Any]:
        if not isinstance(value, dict):
            raise TypeError("no object")
        return [
            spelling.read(value[field.name]) if field.name in value else _default(field)
            for field, spelling in fields
        ]

    return _Spelling(spell, read)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    """Fields are only ever added with a default, so older JSON may lack them."""
    if field.default is msgspec.NODEFAULT:
        raise ValueError("a field is missing")
    return field.default


def _spelling(hint: Any) -> _Spelling:
    """The rule for one type hint of the schema."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        mark = hint.__metadata__[0]
        return _column(mark) if isinstance(mark, Packed) else _marked(mark, hint.__origin__)
    if origin is tuple:
        item, *rest = typing.get_args(hint)
        return _row(_spelling(item)) if rest == [...] else _per_level(_spelling(item))
    if origin in (typing.Union, types.UnionType):
        return _optional([_spelling(arg) for arg in typing.get_args(hint) if arg is not type(None)])
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _struct(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _Spelling(lambda value, _: value.value, _same)
    return _HEX if hint is bytes else _PLAIN


def _same(value: Any) -> Any:
    return value


_PLAIN = _Spelling(lambda value, _: value, _same)
_HEX = _Spelling(lambda value, _: value.hex(), bytes.fromhex)


def _optional(options: list[_Spelling]) -> _Spelling:
    """`T | None`; a union of several plain types (a request id) is plain."""
    if len(options) != 1 or options[0] is _PLAIN:
        return _PLAIN
    some = options[0]
    return _Spelling(
        lambda value, key_bytes: None if value is None else some.spell(value, key_bytes),
        lambda value: None if value is None else some.read(value),
    )


def _row(item: _Spelling) -> _Spelling:
    def read(values: Any) -> list[Any]:
        if not isinstance(values, list):
            raise TypeError("no list")
        return [item.read(value) for value in values]

    return _Spelling(lambda values, key_bytes: [item.spell(value, key_bytes) for value in values], read)


def _per_level(item: _Spelling) -> _Spelling:
    """A pair is always one value for each level."""

    def spell(values: Any, key_bytes: int) -> dict[str, Any]:
        return {name: item.spell(value, key_bytes) for name, value in zip(LEVEL_NAMES, values, strict=True)}

    def read(values: Any) -> list[Any]:
        if not isinstance(values, dict) or any(name not in values for name in LEVEL_NAMES):
            raise TypeError("no value for each level")
        return [item.read(values[name]) for name in LEVEL_NAMES]

    return _Spelling(spell, read)


def _marked(mark: Spelled, hint: Any) -> _Spelling:
    if mark.form == "level":
        return _LEVEL
    if mark.form == "json":
        return _JSON_TEXT
    row = _spelling(hint)
    return _Spelling(
        lambda values, key_bytes: row.spell(values, key_bytes) or None,
        lambda values: [] if values is None else row.read(values),
    )


def _spell_level(level: int, _: int) -> int | str:
    return LEVEL_NAMES[level] if 0 <= level < len(LEVEL_NAMES) else level


def _read_level(level: Any) -> Any:
    return LEVEL_NAMES.index(level) if level in LEVEL_NAMES else level


def _spell_json(text: str, _: int) -> Any:
    """The object that the text holds. What holds none is not ours, and stays text."""
    try:
        value = msgspec.json.decode(text)
        msgspec.json.encode(value)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _read_json(value: Any) -> Any:
    return msgspec.json.encode(value).decode() if isinstance(value, dict) else value


_LEVEL = _Spelling(_spell_level, _read_level)
_JSON_TEXT = _Spelling(_spell_json, _read_json)


def _column(packed: Packed) -> _Spelling:
    if packed.item in _NUMBERS:
        return _number_column(*_NUMBERS[packed.item], empty_is_null=packed.item in _EMPTY_IS_NULL)
    if packed.item == "parent":
        return _Spelling(_spell_parent, _read_parent)
    return _Spelling(_spell_keys if packed.item == "key" else _spell_names, _read_names)


def _spell_keys(column: bytes, key_bytes: int) -> list[str] | None:
    return _spell_hex(column, key_bytes, key_bytes)


def _spell_names(column: bytes, key_bytes: int) -> list[str] | None:
    return _spell_hex(column, NAME_BYTES, key_bytes)


def _spell_names_of_keys(column: bytes, key_bytes: int) -> list[str] | None:
    return _spell_names(names_of_keys(column, key_bytes), key_bytes)


def _spell_hex(column: bytes, size: int, key_bytes: int) -> list[str] | None:
    if not column:
        return [] if key_bytes else None
    _check_whole(column, size)
    return column.hex(" ", -size).split(" ")


def _read_names(values: Any) -> bytes:
    names = [] if values is None else msgspec.convert(values, list[str])
    return b"".join([bytes.fromhex(name) for name in names])


def _spell_parent(name: bytes, _: int) -> str | None:
    if len(name) not in (0, NAME_BYTES):
        raise EventDecodeError(f"a parent of {len(name)} bytes is no name")
    return name.hex() or None


def _read_parent(name: Any) -> bytes:
    return b"" if name is None else bytes.fromhex(name)


def _number_column(dtype: str, code: str, *, empty_is_null: bool) -> _Spelling:
    size = np.dtype(dtype).itemsize

    def spell(column: bytes, _: int) -> list[int] | None:
        if empty_is_null and not column:
            return None
        _check_whole(column, size)
        return typing.cast("list[int]", np.frombuffer(column, dtype=dtype).tolist())

    def read(values: Any) -> bytes:
        numbers = [] if values is None and empty_is_null else msgspec.convert(values, list[int])
        return struct.pack(f"<{len(numbers)}{code}", *numbers)

    return _Spelling(spell, read)


def _check_whole(column: bytes, size: int) -> None:
    if size <= 0 or len(column) % size:
        raise EventDecodeError(f"a column of {len(column)} bytes has no entries of {size} bytes")

"""JSON Schemas of event batches: of their JSON (`events.codec.to_json`), and of the msgpack (`encode_batch`).

Both are made from the types, by the rules by which the codec spells values. `docs/reference/events.schema.json` and
`docs/reference/events.msgpack.schema.json` hold them.
"""

from __future__ import annotations

import types
import typing
from enum import Enum
from typing import Any, NewType

import msgspec

from events.packed import Packed
from events.structs import LEVEL_NAMES, Spelled
from events.types import AnyEvent, EventBatch

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_INTEGERS = {"type": "array", "items": {"type": "integer"}}
_NAME = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
_HEX = {"type": "string", "pattern": "^([0-9a-f]{2})*$"}
_KEYS = {"type": ["array", "null"], "items": _HEX | {"minLength": 2}}
_NAMES = {"type": ["array", "null"], "items": _NAME}
_COLUMNS: dict[str, Schema] = {
    "int32": _INTEGERS,
    "int64": _INTEGERS,
    "token": _INTEGERS | {"type": ["array", "null"]},
    "count": {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}},
    "parent": _NAME | {"type": ["string", "null"]},
    "name": _NAMES,
    "key": _KEYS,
    "checksum": _NAMES,
}
_FORMS: dict[str, Schema] = {
    "level": {"enum": [*LEVEL_NAMES]},
    "json": {"type": ["object", "string"]},
    "hash": {"type": "string", "pattern": "^(-?[0-9a-f]{16}|0x([0-9a-f]{2})*)$"},
    "fields": {"type": ["object", "string", "null"]},
}
_PLAIN: dict[Any, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    bytes: _HEX,
    type(None): {"type": "null"},
}


def json_schema() -> Schema:
    """Of a batch as JSON."""
    kinds = typing.get_args(AnyEvent)
    properties = {
        "seq": {"type": "integer"},
        "ts": {"type": "integer"},
        "events": {"type": "array", "items": {"$ref": "#/$defs/event"}},
    }
    batch = {"type": "object", "properties": properties, "required": [*properties]}
    parts: dict[str, Schema] = {}
    events = {kind.__name__: _of(kind, parts, tag=kind.__name__) for kind in kinds}
    any_of = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in events]}
    title = "A batch of events, as sinks write it in a line of JSON"
    return {"$schema": DIALECT, "title": title, **batch, "$defs": {"event": any_of, **events, **parts}}


def msgpack_schema() -> Schema:
    """Of a batch as msgpack: structs are arrays, and what stands for base64 here is of msgpack's type bin."""
    title = "A batch of events as msgpack; a string with contentEncoding base64 is of the type bin"
    return {"$schema": DIALECT, "title": title, **msgspec.json.schema(EventBatch)}


def _of(kind: type[msgspec.Struct], parts: dict[str, Schema], tag: str | None = None) -> Schema:
    """The object that a struct becomes."""
    hints = typing.get_type_hints(kind, include_extras=True)
    properties: Schema = {} if tag is None else {"type": {"const": tag}}
    properties |= {name: _schema(hints[name], parts) for name in kind.__struct_fields__}
    if {"keys", "block_hashes"} & hints.keys():
        properties["names"] = _NAMES
    says = (kind.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    rare = [name for name, hint in hints.items() if Spelled("rare") in typing.get_args(hint)]
    required = [name for name in properties if name not in rare]
    return {"description": says, "type": "object", "properties": properties, "required": required}


def _schema(hint: Any, parts: dict[str, Schema]) -> Schema:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, NewType):
        return _schema(hint.__supertype__, parts)
    if origin is typing.Annotated:
        return _marked(arguments[0], arguments[1], parts)
    if origin is tuple:
        item = _schema(arguments[0], parts)
        if arguments[1] is ...:
            return {"type": "array", "items": item}
        properties = dict.fromkeys(LEVEL_NAMES, item)
        return {"type": "object", "properties": properties, "required": [*LEVEL_NAMES]}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(argument, parts) for argument in arguments]}
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        parts[hint.__name__] = _of(hint, parts)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [value.value for value in hint]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], parts)}
    return _PLAIN[hint]


def _marked(hint: Any, mark: Packed | Spelled, parts: dict[str, Schema]) -> Schema:
    if isinstance(mark, Packed):
        return _COLUMNS[mark.item]
    if mark.form == "tokens":
        return {"anyOf": [_schema(hint, parts), {"type": "null"}]}
    if mark.form == "rare":
        (some,) = [each for each in typing.get_args(hint) if each is not type(None)]
        return _schema(some, parts)
    return _FORMS[mark.form]

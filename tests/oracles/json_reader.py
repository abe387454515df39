"""Batches read back from their JSON: the proof that it says all that bytes do."""

from __future__ import annotations

import json
import struct
import typing
from typing import Any

import msgspec

from events import types
from events.structs import LEVEL_NAMES, Spelled
from events.types import EventBatch

_CODES = {"token": "i", "int32": "i", "count": "I", "int64": "q"}


def from_json(line: str | bytes) -> EventBatch:
    """The batch of a line that was written with tokens."""
    batch = json.loads(line)
    events = [[event["type"], *_fields(getattr(types, event["type"]), event)] for event in batch["events"]]
    return msgspec.convert([batch["seq"], batch["ts"], events], EventBatch)


def _fields(kind: type[msgspec.Struct], said: dict[str, Any]) -> list[Any]:
    """What a struct is made of, up to the first field that is not there; those that are left out as None are None."""
    hints = typing.get_type_hints(kind, include_extras=True)
    rare = {name: None for name, hint in hints.items() if Spelled("rare") in typing.get_args(hint)}
    there = rare | said if rare.keys() & said.keys() else said
    return [_value(hints[name], there[name]) for name in kind.__struct_fields__ if name in there]


def _value(hint: Any, said: Any) -> Any:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        return _marked(arguments[0], arguments[1], said)
    if typing.get_origin(hint) is tuple:
        if arguments[1] is not ...:
            said = [said[name] for name in LEVEL_NAMES]
        return [_value(arguments[0], each) for each in said]
    if type(None) in arguments:
        return None if said is None else _value(arguments[0], said)
    if hint is bytes:
        return bytes.fromhex(said)
    return _fields(hint, said) if hasattr(hint, "__struct_fields__") else said


def _marked(hint: Any, mark: Any, said: Any) -> Any:
    if isinstance(mark, Spelled):
        if mark.form == "rare":
            return said
        if mark.form == "tokens":
            return _value(hint, said or [])
        if mark.form == "hash":
            return bytes.fromhex(said[2:]) if said.startswith("0x") else int(said, 16)
        if mark.form == "fields" and not isinstance(said, dict):
            return bytes.fromhex((said or "0x")[2:])
        if mark.form == "fields":
            return msgspec.msgpack.encode(said)
        if mark.form == "level":
            return LEVEL_NAMES.index(said) if said in LEVEL_NAMES else said
        return json.dumps(said, ensure_ascii=False, separators=(",", ":")) if isinstance(said, dict) else said
    if mark.item in _CODES:
        return struct.pack(f"<{len(said or [])}{_CODES[mark.item]}", *(said or []))
    return bytes.fromhex("".join([said] if isinstance(said, str) else said or []))

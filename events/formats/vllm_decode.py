"""vLLM's KV events as this software reads them: every form that any release since 0.9 has written.

An event is a map with a ``type`` (since 0.24) or an array that begins with it (before); fields only ever came at the
end of the array, so shorter ones are older. Fields that are not known here are ignored, and events of a type that is
not known are kept by name, since a stream that grows must not go dark. Anything else that does not fit refuses the
whole batch, and what its bytes were is not repeated: they may hold somebody's prompt.
"""

from __future__ import annotations

from typing import Any

import msgspec

from events.errors import EventDecodeError

Hash = int | bytes
"""The last 8 bytes of a digest as a number, or (as a setting of vLLM, 0.10.2 and later) all of them."""


class _Told(msgspec.Struct, frozen=True, gc=False, tag_field="type", forbid_unknown_fields=True):
    """An event that is known here."""


class BlockStored(_Told, frozen=True, gc=False, tag=True):
    """Consecutive blocks of one prefix became resident; `token_ids` are those of all of them."""

    block_hashes: tuple[Hash, ...]
    parent_block_hash: Hash | None
    """The block before the first one; None at the start of a prompt."""
    token_ids: tuple[int | tuple[int, ...], ...]
    """Empty in notices about lower tiers. Pairs where a draft model's cache works on bigrams."""
    block_size: int
    """Tokens for each hash; 0 in some notices about lower tiers."""
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    """Per block, what its hash covers besides tokens: adapter, images, salt."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: tuple[tuple[int, ...], ...] | None = None
    """Per block, the tokens after it that its hash covers too."""
    cache_salt: str | None = None
    """The salt of the prompt; vLLM has it in `extra_keys` instead."""
    more: dict[str, Any] | None = None
    """Fields that are not known here, as they came."""


class BlockRemoved(_Told, frozen=True, gc=False, tag=True):
    """Blocks left a medium."""

    block_hashes: tuple[Hash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    more: dict[str, Any] | None = None
    """Fields that are not known here, as they came."""


class AllBlocksCleared(_Told, frozen=True, gc=False, tag=True):
    """Nothing is resident any more, in any medium."""


class Unknown(msgspec.Struct, frozen=True, gc=False):
    """An event of a type that this software does not know."""

    name: str


VLLMEvent = BlockStored | BlockRemoved | AllBlocksCleared | Unknown


class VLLMBatch(msgspec.Struct, frozen=True, gc=False):
    """One message of the stream."""

    ts: float
    """When it was made, in seconds since the epoch."""
    events: tuple[VLLMEvent, ...]
    rank: int | None
    """The data-parallel rank of the publisher; None where it does not say."""


class _Envelope(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    rank: int | None = None


class _Named(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of maps alone, without any field or type that is not known here: what nearly every batch is."""

    ts: float
    events: tuple[BlockStored | BlockRemoved | AllBlocksCleared, ...]
    rank: int | None = None


_Plain = str | int | float | bool | None


class _Usual(msgspec.Struct, array_like=True):
    """Extra keys as engines write them, which are looked at many times faster than any others."""

    keys: tuple[tuple[_Plain | list[_Plain], ...] | None, ...]


_decode = msgspec.msgpack.Decoder(_Envelope).decode
_decode_named = msgspec.msgpack.Decoder(_Named).decode
_TYPES: dict[str, type[BlockStored | BlockRemoved | AllBlocksCleared]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
_FIELDS = {kind: tuple(name for name in kind.__struct_fields__ if name != "more") for kind in _TYPES.values()}
_KNOWN = {kind: frozenset((*fields, "type")) for kind, fields in _FIELDS.items()}


_DEEPEST = 32
"""Containers inside each other in a field of any kind; engines write two. Who packs it again has a stack of its own."""


def positions(kind: str) -> tuple[str, ...]:
    """The fields of a type of event, in the order of its array."""
    return tuple(name for name in _FIELDS[_TYPES[kind]] if name != "cache_salt")


def decode_batch(payload: bytes | memoryview) -> VLLMBatch:
    """Read one payload frame; raises EventDecodeError if it is no batch."""
    try:
        named = _decode_named(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _decode_any(payload)
    if any(getattr(event, "more", None) is not None for event in named.events):
        return _decode_any(payload)  # whoever sends a field of that name sends one that is not known
    for event in named.events:
        if (keys := getattr(event, "extra_keys", None)) and any(keys):
            _refuse_deep_keys(keys)
    return VLLMBatch(named.ts, named.events, named.rank)


def _refuse_deep_keys(keys: tuple[tuple[Any, ...] | None, ...]) -> None:
    try:
        msgspec.convert((keys,), _Usual)
    except msgspec.ValidationError:
        _refuse_deep(keys)


def _refuse_deep(value: Any, left: int = _DEEPEST) -> None:
    """Raise EventDecodeError where containers are inside each other too often."""
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    for each in inner:
        if isinstance(each, list | tuple | dict):
            if not left:
                raise EventDecodeError("a KV event has a field that is nested too deeply")
            _refuse_deep(each, left - 1)


def _decode_any(payload: bytes | memoryview) -> VLLMBatch:
    """The same, event by event, each in whatever form it has."""
    try:
        envelope = _decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise EventDecodeError("the message is no batch of KV events") from None
    return VLLMBatch(envelope.ts, tuple(map(_event, envelope.events)), envelope.rank)


def _event(item: Any) -> VLLMEvent:
    name = None
    if isinstance(item, dict):
        name = item.get("type")
    elif isinstance(item, list) and item:
        name = item[0]
    if not isinstance(name, str):
        raise EventDecodeError("a KV event does not say its type")
    kind = _TYPES.get(name)
    if kind is None:
        return Unknown(name)
    if isinstance(item, list):
        item = dict(zip(_FIELDS[kind], item[1:], strict=False))
    more: dict[str, Any] = {}
    if not item.keys() <= _KNOWN[kind]:
        more = {key: item.pop(key) for key in [*item] if isinstance(key, str) and key not in _KNOWN[kind]}
    try:
        event = msgspec.convert(item, kind)
    except (msgspec.MsgspecError, RecursionError):
        raise EventDecodeError(f"a {name} event has a field that is missing or of a wrong type") from None
    _refuse_deep((getattr(event, "extra_keys", None) or (), more))
    return msgspec.structs.replace(event, more=more) if more and kind is not AllBlocksCleared else event

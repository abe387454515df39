"""The wire format of vLLM's KV events, which most KV-aware routers read, and the forms that resemble it.

A message has three frames: topic, number (8 bytes, big-endian), batch. Numbers count the batches of one publisher; a
subscriber that missed some sends its replay socket (a ROUTER, so use a DEALER) an empty frame and the first number
wanted, and receives ``"", topic, number, batch`` for each batch from there on, then an end marker with the number -1
and an empty batch. Until vLLM 0.25 answers had no topic; `parse_answer` reads both.

*Reading* (`decode_batch`): every form that any release since 0.9 has written. An event is a map with a ``type`` (since
0.24) or an array that begins with it (before); fields were only ever added at the end of the array, so shorter ones
are older. Unknown fields are kept, and unknown types of events by name, since a stream that grows must stay readable.
Anything else that does not fit refuses the whole batch, and its bytes are not repeated: they may hold a user's prompt.

*Writing* (`encode_batch`): the maps of 0.24 and later, with the keys of 0.33, byte by byte, from the changes of an
`events.feed.fold.Feed`: ``[ts, [event, ...], rank]``. What differs from vLLM's own bytes is chosen for the consumers:

* Hashes are 9 bytes always (``cf``), since some routers read no others. The parent of a prompt's first block
  is nil: some take 0 for a missed parent.
* Token ids are 5 bytes each (``ce``): numpy then lays out thousands of them in microseconds. No negative one is ever
  written, because it would cost a reader the whole batch.
* Blocks that leave a level at once are one removal. A host block is announced with its tokens, as if it were
  new: routers cannot follow moves.

`encode_arrays` writes positional arrays, as vLLM did until 0.23: trailing empty fields are left out, and each block is
an event of its own, since some readers take the event's parent for the parent of all its blocks. `encode_sglang` writes
SGLang's maps: hashes are signed, host memory is ``CPU_PINNED``, salts have a key of their own, what is None is left
out, and the tokens of an image are replaced by a number that its hash determines, as SGLang does itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from events.errors import EventDecodeError
from events.feed.changes import AnyChange, Cleared, EncodedEvent, Removed, Stored
from events.packed import NAME_BYTES, TOKEN_BYTES, unpack_i32, unpack_names
from events.types import CROSS, SLIDING, GroupCreated, Namespace

Hash = int | bytes
"""The last 8 bytes of a digest as a number, or (as a setting of vLLM, 0.10.2 and later) all of them."""


class _EngineEvent(msgspec.Struct, frozen=True, gc=False, tag_field="type", forbid_unknown_fields=True):
    """Base of the known events."""


class BlockStored(_EngineEvent, frozen=True, gc=False, tag=True):
    """Consecutive blocks of one prefix became resident; `token_ids` are the tokens of all of them."""

    block_hashes: tuple[Hash, ...]
    parent_block_hash: Hash | None
    """The parent of the first block; None at the start of a prompt."""
    token_ids: tuple[int | tuple[int, ...], ...]
    """Empty in notices about lower tiers. Pairs if a draft model's cache works on bigrams."""
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
    """Per block, the tokens after it that its hash covers as well."""
    cache_salt: str | None = None
    """The salt of the prompt; vLLM has it in `extra_keys` instead."""
    more: dict[str, Any] | None = None
    """Unknown fields, as received."""


class BlockRemoved(_EngineEvent, frozen=True, gc=False, tag=True):
    """Blocks left a medium."""

    block_hashes: tuple[Hash, ...]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    more: dict[str, Any] | None = None
    """Unknown fields, as received."""


class AllBlocksCleared(_EngineEvent, frozen=True, gc=False, tag=True):
    """Nothing is resident any more, in any medium."""


class Unknown(msgspec.Struct, frozen=True, gc=False):
    """An event of an unknown type."""

    name: str


VLLMEvent = BlockStored | BlockRemoved | AllBlocksCleared | Unknown


class VLLMBatch(msgspec.Struct, frozen=True, gc=False):
    """One message of the stream."""

    ts: float
    """Time of its creation, in seconds since the epoch."""
    events: tuple[VLLMEvent, ...]
    rank: int | None
    """The data-parallel rank of the publisher; None if not given."""


class _Envelope(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    rank: int | None = None


class _Named(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Maps only, without unknown fields or types: the form of nearly every batch."""

    ts: float
    events: tuple[BlockStored | BlockRemoved | AllBlocksCleared, ...]
    rank: int | None = None


_Plain = str | int | float | bool | None


class _Usual(msgspec.Struct, array_like=True):
    """Extra keys as engines write them, which are checked many times faster than any others."""

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
"""Limit of nested containers in a field of any kind; engines write two. Encoding it recurses as well."""


def positions(kind: str) -> tuple[str, ...]:
    """Return the fields of a type of event, in the order of its array."""
    return tuple(name for name in _FIELDS[_TYPES[kind]] if name != "cache_salt")


def decode_batch(payload: bytes | memoryview) -> VLLMBatch:
    """Decode one payload frame; raises EventDecodeError if it is no batch."""
    try:
        named = _decode_named(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _decode_any(payload)
    if any(not isinstance(event, AllBlocksCleared) and event.more is not None for event in named.events):
        return _decode_any(payload)  # an unknown field that has this name
    for event in named.events:
        if type(event) is BlockStored and event.extra_keys and any(event.extra_keys):
            _refuse_deep_keys(event.extra_keys)
    return VLLMBatch(named.ts, named.events, named.rank)


def _refuse_deep_keys(keys: tuple[tuple[Any, ...] | None, ...]) -> None:
    try:
        msgspec.convert((keys,), _Usual)
    except msgspec.ValidationError:
        _refuse_deep(keys)


def _refuse_deep(value: Any, left: int = _DEEPEST) -> None:
    """Raise EventDecodeError for containers nested too deep."""
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    for each in inner:
        if isinstance(each, list | tuple | dict):
            if not left:
                raise EventDecodeError("a field of a KV event is nested too deeply")
            _refuse_deep(each, left - 1)


def _decode_any(payload: bytes | memoryview) -> VLLMBatch:
    """Decode event by event, each in whatever form it has."""
    try:
        envelope = _decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise EventDecodeError("the message is not a batch of KV events") from None
    return VLLMBatch(envelope.ts, tuple(map(_event, envelope.events)), envelope.rank)


def _event(item: Any) -> VLLMEvent:
    name = None
    if isinstance(item, dict):
        name = item.get("type")
    elif isinstance(item, list) and item:
        name = item[0]
    if not isinstance(name, str):
        raise EventDecodeError("a KV event has no type")
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
        raise EventDecodeError(f"a field of a {name} event is missing or has the wrong type") from None
    _refuse_deep(((event.extra_keys or ()) if isinstance(event, BlockStored) else (), more))
    return msgspec.structs.replace(event, more=more) if more and kind is not AllBlocksCleared else event


Salts = Callable[[bytes], str | None]
"""Finds a salt by its digest, if known."""
MEDIA = ("GPU", "CPU")
"""Media by level. Readers compare letters exactly."""

_pack = msgspec.msgpack.encode
_UINT64 = b"\xcf"
_NIL = b"\xc0"
_BIG = np.dtype(">u4")
_LITTLE = np.dtype("<u4")
_RAW64 = np.dtype("u8")
_TS = struct.Struct(">Bd")
_SHORT_ARRAYS = tuple(bytes((0x90 | length,)) for length in range(16))
_UINT16, _UINT32 = struct.Struct(">BH"), struct.Struct(">BI")
_UINT16_ARRAY, _UINT32_ARRAY = 0xDC, 0xDD
_EVENTS_AT = 1 + _TS.size
"""Offset of the array of events in a batch."""

_FEW_NAMES, _FEW_TOKENS = 4, 32
"""Up to these counts a call of numpy costs more than it saves."""

_CLEARED = _pack({"type": "AllBlocksCleared"})
_STORED_KEYS, _REMOVED_KEYS = 0x8B, b"\x84"
"""Headers of the maps: 11 keys, and 4."""
_STORED_START = _pack("type") + _pack("BlockStored") + _pack("block_hashes")
_REMOVED_START = _REMOVED_KEYS + _pack("type") + _pack("BlockRemoved") + _pack("block_hashes")
_PARENT, _NO_PARENT = _pack("parent_block_hash") + _UINT64, _pack("parent_block_hash") + _NIL
_TOKENS, _BLOCK_SIZE = _pack("token_ids"), _pack("block_size")
_LORA_ID, _MEDIUM, _LORA_NAME = _pack("lora_id"), _pack("medium"), _pack("lora_name")
_EXTRA_KEYS, _GROUP = _pack("extra_keys"), _pack("group_idx")
_KIND, _WINDOW = _pack("kv_cache_spec_kind"), _pack("kv_cache_spec_sliding_window")


def encode_batch(
    changes: Sequence[AnyChange],
    ts: float,
    rank: int = 0,
    groups: Sequence[GroupCreated] = (),
) -> bytes:
    """Encode one batch; `ts` in seconds since the epoch, `groups` as in `CacheCreated` (none: full attention)."""
    groups = tuple(groups)
    parts: list[bytes | bytearray] = [b"\x93", _TS.pack(0xCB, ts), _array(len(changes))]
    for change in changes:
        if isinstance(change, Stored):
            _add_stored(parts, change, groups)
        elif isinstance(change, Removed):
            blocks = len(change.names) // NAME_BYTES
            place = _removed_from(change.group, change.level)
            parts += (_REMOVED_START, _array(blocks), _names(change.names, blocks), place)
        elif isinstance(change, EncodedEvent):
            parts.append(change.encoded)
        else:
            assert isinstance(change, Cleared)
            parts.append(_CLEARED)
    parts.append(_pack(rank))
    return b"".join(parts)


def with_salts(changes: Sequence[AnyChange], salts: Salts | None) -> Sequence[AnyChange]:
    """Return the changes, with the salts found by their digests; for other salts, readers receive the digest in hex."""
    return changes if salts is None else [_salted(change, salts) for change in changes]


def _salted(change: AnyChange, salts: Salts) -> AnyChange:
    digest = change.namespace.salt_digest if isinstance(change, Stored) else None
    salt = None if digest is None else salts(digest)
    return change if salt is None else msgspec.structs.replace(change, salt=salt)


def published_salt(stored: Stored) -> str | None:
    """Return the salt if it is known (`with_salts`), or its digest in hex."""
    digest = stored.namespace.salt_digest
    return stored.salt if stored.salt is not None or digest is None else digest.hex()


def join_batches(batches: Sequence[bytes], rank: int = 0) -> bytes:
    """Join several batches made by `encode_batch` into one, in order; its time is the last one's."""
    if len(batches) == 1:
        return batches[0]
    end = _pack(rank)
    total, events = 0, []
    for batch in batches:
        count, begin = _count_events(batch)
        total += count
        events.append(memoryview(batch)[begin : len(batch) - len(end)])
    return b"".join([batches[-1][:_EVENTS_AT], _array(total), *events, end])


def _count_events(batch: bytes) -> tuple[int, int]:
    """Return the number of events in a batch, and the offset of the first."""
    kind = batch[_EVENTS_AT]
    if kind == _UINT16_ARRAY:
        return _UINT16.unpack_from(batch, _EVENTS_AT)[1], _EVENTS_AT + _UINT16.size
    if kind == _UINT32_ARRAY:
        return _UINT32.unpack_from(batch, _EVENTS_AT)[1], _EVENTS_AT + _UINT32.size
    return kind & 0x0F, _EVENTS_AT + 1


def _add_stored(parts: list[bytes | bytearray], stored: Stored, groups: tuple[GroupCreated, ...]) -> None:
    blocks = len(stored.names) // NAME_BYTES
    parent, namespace = stored.parent, stored.namespace
    if (
        blocks == 1 and parent and stored.tokens and not stored.extras
    ):  # stores by decoding, several per engine step
        start, mid, end = _around_one(
            namespace, published_salt(stored), stored.level, stored.tokens_per_block, stored.group, groups
        )
        parts += (start, stored.names, _PARENT, parent, mid, _token_ids(stored.tokens), end)
        return
    salt = published_salt(stored)
    keys, attention = _attention(stored.group, *kind_and_window(groups, stored.group), salt is not None)
    first, other = _extra_keys(namespace, None if parent else salt)
    parts += (
        keys,
        _array(blocks),
        _names(stored.names, blocks),
        _PARENT + parent if parent else _NO_PARENT,
        _TOKENS,
        _array(len(stored.tokens) // TOKEN_BYTES),
        _token_ids(stored.tokens),
        _scope(namespace, stored.level, stored.tokens_per_block),
        _array(blocks),
        *(_with_extras(stored) if stored.extras else (first if blocks else b"", other * (blocks - 1))),
        attention,
        _salt(salt),
    )


@lru_cache(maxsize=1024)
def _around_one(
    namespace: Namespace,
    salt: str | None,
    level: int,
    tokens_per_block: int,
    group: int,
    groups: tuple[GroupCreated, ...],
) -> tuple[bytes, bytes, bytes]:
    """Return the bytes before the name, between the parent and the token ids, and after those, of one inner block."""
    keys, attention = _attention(group, *kind_and_window(groups, group), salt is not None)
    extra_keys, _ = _extra_keys(namespace, None)
    return (
        keys + _array(1) + _UINT64,
        _TOKENS + _array(tokens_per_block),
        _scope(namespace, level, tokens_per_block) + _array(1) + extra_keys + attention + _salt(salt),
    )


def _array(length: int) -> bytes:
    """Return the header of an array."""
    if length < 16:
        return _SHORT_ARRAYS[length]
    return _UINT16.pack(_UINT16_ARRAY, length) if length < 1 << 16 else _UINT32.pack(_UINT32_ARRAY, length)


def _names(names: bytes, blocks: int) -> bytes | bytearray:
    """Encode names as fixed-width uint64; they are big-endian already."""
    if blocks <= _FEW_NAMES:
        return b"".join([_UINT64 + names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)])
    items = bytearray(b"\xcf\0\0\0\0\0\0\0\0") * blocks
    np.ndarray(blocks, _RAW64, items, 1, 9)[:] = np.ndarray(blocks, _RAW64, names)
    return items


def _token_ids(tokens: bytes) -> bytes | bytearray:
    """Encode token ids as fixed-width uint32."""
    count = len(tokens) // TOKEN_BYTES
    if count <= _FEW_TOKENS:
        unpack, pack, headers, size = _few_token_ids(count)
        return (int.from_bytes(pack(*unpack(tokens)), "big") | headers).to_bytes(size, "big")
    items = bytearray(b"\xce\0\0\0\0") * count
    np.ndarray(count, _BIG, items, 1, 5)[:] = np.ndarray(count, _LITTLE, tokens)
    return items


@lru_cache(maxsize=_FEW_TOKENS + 1)
def _few_token_ids(count: int) -> tuple[Callable[..., tuple[int, ...]], Callable[..., bytes], int, int]:
    """Return a reader of `count` tokens, a packer with gaps, the constant for the gaps, and the total size in bytes."""
    headers = int.from_bytes(b"\xce\0\0\0\0" * count, "big")
    return struct.Struct(f"<{count}I").unpack, struct.Struct(">" + "xI" * count).pack, headers, 5 * count


@lru_cache(maxsize=1024)
def _scope(namespace: Namespace, level: int, tokens_per_block: int) -> bytes:
    """Return the bytes between the tokens and the extra keys."""
    return b"".join((
        _BLOCK_SIZE, _pack(tokens_per_block),
        _LORA_ID, _pack(namespace.lora_id),
        _MEDIUM, _pack(MEDIA[level]),
        _LORA_NAME, _pack(adapter_name(namespace)),
        _EXTRA_KEYS,
    ))  # fmt: skip


def adapter_name(namespace: Namespace) -> str | None:
    """Return the name that separates an adapter's blocks in routers; its number, if it has no name.

    Routers ignore `lora_id`, and would take blocks without a name for those of the base model.
    """
    if namespace.lora_name is None and namespace.lora_id is not None:
        return str(namespace.lora_id)
    return namespace.lora_name


@lru_cache(maxsize=1024)
def _extra_keys(namespace: Namespace, salt: str | None) -> tuple[bytes, bytes]:
    """Encode the extra keys of the first block and of the others: the adapter, at the root the salt."""
    adapter, of_root = scope_keys(namespace, salt)
    return _pack(adapter + of_root or None), _pack(adapter or None)


def scope_keys(namespace: Namespace, salt: str | None) -> tuple[list[str], list[str]]:
    """Return the extra keys before and after a block's items: the adapter, and the salt, at the root."""
    adapter = adapter_name(namespace)
    return [] if adapter is None else [adapter], [] if salt is None else [salt]


def _with_extras(stored: Stored) -> list[bytes]:
    """Encode the extra keys, block by block; between adapter and salt the items as [digest, offset]."""
    adapter, salt = scope_keys(stored.namespace, None if stored.parent else published_salt(stored))
    first, *others = stored.extras
    return [_pack([*adapter, *first, *salt] or None), *(_pack([*adapter, *each] or None) for each in others)]


def kind_and_window(groups: Sequence[GroupCreated], group: int) -> tuple[str, int | None]:
    """Return the group's attention, and its window if it slides."""
    if group < len(groups) and groups[group].kind == SLIDING:
        return "sliding_window", groups[group].window
    crosses = group < len(groups) and groups[group].kind == CROSS
    return "cross_attention" if crosses else "full_attention", None


@lru_cache(maxsize=256)
def _attention(group: int, kind: str, window: int | None, salted: bool) -> tuple[bytes, bytes]:
    """Encode a store's start, with the number of keys, and its end except the salt."""
    end = _GROUP + _pack(group) + _KIND + _pack(kind)
    if window is not None:
        end += _WINDOW + _pack(window)
    keys = _STORED_KEYS + (window is not None) + salted
    return bytes((keys,)) + _STORED_START, end


def _salt(salt: str | None) -> bytes:
    """Encode a key unknown to vLLM, by which Dynamo keeps salted blocks apart."""
    return b"" if salt is None else _pack("cache_salt") + _pack(salt)


@lru_cache(maxsize=256)
def _removed_from(group: int, level: int) -> bytes:
    return _MEDIUM + _pack(MEDIA[level]) + _GROUP + _pack(group)


SEQ_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQ_BYTES
"""The number of the end marker; its batch is empty."""


class Message(NamedTuple):
    """The frames of one message."""

    topic: bytes
    seq: int
    payload: bytes


def encode_seq(seq: int) -> bytes:
    """Encode a number as a frame."""
    return seq.to_bytes(SEQ_BYTES, "big")


def decode_seq(frame: bytes) -> int:
    """Decode a number from a frame; raises EventDecodeError if it has not 8 bytes."""
    if len(frame) != SEQ_BYTES:
        raise EventDecodeError(f"a sequence number must have {SEQ_BYTES} bytes, not {len(frame)}")
    return int.from_bytes(frame, "big")


def parse_message(frames: Sequence[bytes]) -> Message:
    """Parse the frames received by a SUB socket; raises EventDecodeError."""
    if len(frames) != 3:
        raise EventDecodeError(f"a message must have 3 frames, not {len(frames)}")
    return _message(*frames)


def replay_request(start: int) -> list[bytes]:
    """Return the frames that a DEALER socket sends to request all batches from `start` on."""
    return [b"", encode_seq(start)]


def parse_answer(frames: Sequence[bytes]) -> Message | None:
    """Parse the frames received by a DEALER socket; None is the end of the replay. Raises EventDecodeError."""
    if len(frames) not in (3, 4) or frames[0]:
        raise EventDecodeError("a replay answer must have 3 frames, or 4 of which the first is empty")
    topic = frames[1] if len(frames) == 4 else b""
    seq, payload = frames[-2:]
    # The empty batch is the mark: no real one is empty, whatever its number.
    return _message(topic, seq, payload) if payload else None


def _message(topic: bytes, seq: bytes, payload: bytes) -> Message:
    if seq == END_OF_REPLAY:
        raise EventDecodeError("a batch has the sequence number of the end marker")
    return Message(topic, decode_seq(seq), payload)


_SHORTEST = 7
"""Fields of a stored block up to its medium, including its name: the minimum that every reader of arrays expects."""
_PER_BLOCK = ("extra_keys", "lookahead_token_ids")
"""Fields that have an entry per block."""


def encode_arrays(
    changes: Sequence[AnyChange],
    ts: float,
    rank: int = 0,
    groups: Sequence[GroupCreated] = (),
) -> bytes:
    """Encode one batch as positional arrays; the arguments are those of `vllm.encode_batch`."""
    events: list[list[Any]] = []
    for change in changes:
        if isinstance(change, Stored):
            events += map(_trimmed, _stored_arrays(change, groups))
        elif isinstance(change, Removed):
            group = [change.group] if change.group else []
            events.append(["BlockRemoved", unpack_names(change.names).tolist(), MEDIA[change.level], *group])
        elif isinstance(change, EncodedEvent):
            events += map(_array_of, _single_blocks(msgspec.msgpack.decode(change.encoded)))
        else:
            events.append(["AllBlocksCleared"])
    return _pack([ts, events, rank])


def _stored_arrays(stored: Stored, groups: Sequence[GroupCreated]) -> Iterator[list[Any]]:
    space, size = stored.namespace, stored.tokens_per_block
    kind, window = kind_and_window(groups, stored.group)
    names: list[int] = unpack_names(stored.names).tolist()
    tokens: list[int] = token_ids(stored.tokens)
    parent = int.from_bytes(stored.parent, "big") if stored.parent else None
    medium, adapter = MEDIA[stored.level], adapter_name(space)
    for at, name in enumerate(names):
        extra = _array_extra_keys(stored, at, at_root=parent is None)
        more = [stored.group, kind, window] if stored.group or window is not None else []
        block = tokens[at * size : (at + 1) * size]
        yield ["BlockStored", [name], parent, block, size, space.lora_id, medium, adapter, extra, *more]
        parent = name


def _array_of(event: dict[str, Any]) -> list[Any]:
    """Convert an engine's event to an array, without fields that arrays cannot hold."""
    array = [event["type"], *(event.get(name) for name in positions(event["type"]))]
    least = _SHORTEST if event["type"] == "BlockStored" else len(("BlockRemoved", "hashes", "medium"))
    return _trimmed(array, least)


def _single_blocks(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield stored blocks one by one, if the tokens of each are known; with a salt if arrays have it."""
    names, tokens, size = event["block_hashes"], event.get("token_ids") or [], event.get("block_size", 0)
    if event["type"] != "BlockStored" or (tokens and len(tokens) != len(names) * size):
        yield event
        return
    parent, salt = event.get("parent_block_hash"), event.get("cache_salt")
    if parent is None and salt is not None and event.get("extra_keys") is None:
        event["extra_keys"] = [[salt], *[None] * (len(names) - 1)]
    for at, name in enumerate(names):
        own = {field: [event[field][at]] for field in _PER_BLOCK if event.get(field)}
        block = tokens[at * size : (at + 1) * size]
        yield event | own | {"block_hashes": [name], "parent_block_hash": parent, "token_ids": block}
        parent = name


def _trimmed(event: list[Any], least: int = _SHORTEST) -> list[Any]:
    while len(event) > least and event[-1] is None:
        event.pop()
    return event


def _array_extra_keys(stored: Stored, at: int, *, at_root: bool) -> list[list[Any]] | None:
    """Return the extra keys of the block's hash."""
    adapter, salt = scope_keys(stored.namespace, published_salt(stored) if at_root else None)
    keys = [*adapter, *(stored.extras[at] if stored.extras else ()), *salt]
    return [keys] if keys else None


def token_ids(tokens: bytes) -> list[int]:
    """Return a column of tokens as numbers."""
    numbers: list[int] = unpack_i32(tokens).view(np.uint32).tolist()
    return numbers


_ALWAYS = ("parent_block_hash", "lora_id")
SGLANG_MEDIA = ("GPU", "CPU_PINNED")
"""Media by level."""


def encode_sglang(
    changes: Sequence[AnyChange],
    ts: float,
    rank: int = 0,
    groups: Sequence[GroupCreated] = (),
) -> bytes:
    """Encode one batch as SGLang's maps; the arguments are those of `vllm.encode_batch`."""
    events: list[dict[str, Any]] = []
    crosses = {index for index, group in enumerate(groups) if group.kind == CROSS}
    for change in changes:
        if isinstance(change, Stored | Removed) and change.group in crosses:
            continue  # its readers would take it for prompts
        if isinstance(change, Stored):
            events.append(_stored_map(change))
        elif isinstance(change, Removed):
            events.append(
                {
                    "type": "BlockRemoved",
                    "block_hashes": _signed(change.names),
                    "medium": SGLANG_MEDIA[change.level],
                }
            )
        elif isinstance(change, EncodedEvent):
            fields = _with_signed_hashes(msgspec.msgpack.decode(change.encoded))
            events.append(
                {key: value for key, value in fields.items() if value is not None or key in _ALWAYS}
            )
        else:
            events.append({"type": "AllBlocksCleared"})
    return _pack([ts, events, rank])


def _stored_map(stored: Stored) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": _signed(stored.names),
        "parent_block_hash": _signed(stored.parent)[0] if stored.parent else None,
        "token_ids": token_ids(stored.padded or stored.tokens),
        "block_size": stored.tokens_per_block,
        "lora_id": None,
        "medium": SGLANG_MEDIA[stored.level],
    }
    more = {"lora_name": adapter_name(stored.namespace), "cache_salt": published_salt(stored)}
    return event | {key: value for key, value in more.items() if value is not None}


def _with_signed_hashes(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's event with 64-bit hashes as SGLang's readers take them; whole digests stay."""
    fields["block_hashes"] = list(map(_as_signed, fields["block_hashes"]))
    if "parent_block_hash" in fields:
        fields["parent_block_hash"] = _as_signed(fields["parent_block_hash"])
    return fields


def _as_signed(value: Any) -> Any:
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def _signed(names: bytes) -> list[int]:
    numbers: list[int] = unpack_names(names).view(">i8").tolist()
    return numbers


Encode = Callable[[Sequence[AnyChange], float, int, Sequence[GroupCreated]], bytes]
"""Encodes one batch, as `encode_batch` does; `join_batches` joins several of any of these formats."""
Join = Callable[[Sequence[bytes], int], bytes]
"""Joins several payloads into one; the number is the rank."""

ARRAY_OVERHEAD = 5
"""Factor by which arrays may exceed the estimated size of maps, since each block is an event of its own."""

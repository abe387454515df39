"""Visible changes as vLLM's KV events (the maps of 0.24 and later, with the keys of 0.33), byte by byte.

A batch is the msgpack array ``[ts, [event, ...], rank]``. What differs from vLLM's own bytes is chosen for the
consumers, and any conforming decoder reads it:

* Hashes are 9 bytes always (``cf``), also where a smaller form would do, since there are routers that know no others.
  The parent of a prompt's first block is nil: some take 0 for a parent that they have missed.
* Token ids are 5 bytes each (``ce``): numpy then lays out thousands of them in microseconds. No negative one is ever
  written, because it would cost a reader the whole batch.
* What left a level at once is one removal, not one per block.

A host block is announced with its tokens, as if it were new: routers cannot follow moves.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec
import numpy as np

from events.feed.changes import AnyChange, Cleared, Removed, Stored, Told
from events.packed import NAME_BYTES, TOKEN_BYTES
from events.types import CROSS, SLIDING, GroupCreated, Namespace

Salts = Callable[[bytes], str | None]
"""Finds a salt by its digest, where it is known."""
MEDIA = ("GPU", "CPU")
"""By level. Readers compare letters exactly."""

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
"""Where the array of events begins in a batch."""

_FEW_NAMES, _FEW_TOKENS = 4, 32
"""Up to here a call of numpy costs more than it saves."""

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


class SaltedNamespace(Namespace, frozen=True, cache_hash=True):
    """A namespace whose salt is told as it is."""

    salt: str = ""


def encode_batch(
    changes: Sequence[AnyChange],
    ts: float,
    rank: int = 0,
    groups: Sequence[GroupCreated] = (),
    *,
    salts: Salts | None = None,
) -> bytes:
    """One batch of events; `ts` in seconds since the epoch, `groups` as in `CacheCreated` (none: full attention).

    `salts` finds a salt by its digest: where it does, the salt is told itself, otherwise its digest in hex.
    """
    groups, changes = tuple(groups), with_salts(changes, salts)
    parts: list[bytes | bytearray] = [b"\x93", _TS.pack(0xCB, ts), _array(len(changes))]
    for change in changes:
        if isinstance(change, Stored):
            _add_stored(parts, change, groups)
        elif isinstance(change, Removed):
            _add_removed(parts, change)
        elif isinstance(change, Told):
            parts.append(change.encoded)
        else:
            assert isinstance(change, Cleared)
            parts.append(_CLEARED)
    parts.append(_pack(rank))
    return b"".join(parts)


def with_salts(changes: Sequence[AnyChange], salts: Salts | None) -> Sequence[AnyChange]:
    """The changes, with the salts that are known in their namespaces: `told_salt` then has them."""
    return changes if salts is None else [_salted(change, salts) for change in changes]


def _salted(change: AnyChange, salts: Salts) -> AnyChange:
    """The change with the salt in its namespace, if it has one that is known."""
    if not isinstance(change, Stored) or (digest := change.namespace.salt_digest) is None:
        return change
    salt = salts(digest)
    if salt is None:
        return change
    space = change.namespace
    named = SaltedNamespace(space.lora_id, space.lora_name, digest, space.uses_extra_ids, salt)
    return msgspec.structs.replace(change, namespace=named)


def join_batches(batches: Sequence[bytes], rank: int = 0) -> bytes:
    """One batch with the events of several that `encode_batch` has made, in order; its time is the last one's."""
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
    """How many events there are in a batch, and where they begin."""
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
    ):  # what decoding stores, several times per engine step
        start, mid, end = _around_one(namespace, stored.level, stored.tokens_per_block, stored.group, groups)
        parts += (start, stored.names, _PARENT, parent, mid, _token_ids(stored.tokens), end)
        return
    salt = _salt(namespace)
    keys, attention = _attention(stored.group, *kind_and_window(groups, stored.group), bool(salt))
    first, other = _extra_keys(namespace, not parent)
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
        salt,
    )


@lru_cache(maxsize=1024)
def _around_one(
    namespace: Namespace, level: int, tokens_per_block: int, group: int, groups: tuple[GroupCreated, ...]
) -> tuple[bytes, bytes, bytes]:
    """What stands before the name, between the parent and the token ids, and behind those, of one inner block."""
    salt = _salt(namespace)
    keys, attention = _attention(group, *kind_and_window(groups, group), bool(salt))
    extra_keys, _ = _extra_keys(namespace, False)
    return (
        keys + _array(1) + _UINT64,
        _TOKENS + _array(tokens_per_block),
        _scope(namespace, level, tokens_per_block) + _array(1) + extra_keys + attention + salt,
    )


def _add_removed(parts: list[bytes | bytearray], removed: Removed) -> None:
    blocks = len(removed.names) // NAME_BYTES
    names = _names(removed.names, blocks)
    parts += (_REMOVED_START, _array(blocks), names, _removed_from(removed.group, removed.level))


def _array(length: int) -> bytes:
    """The header of an array."""
    if length < 16:
        return _SHORT_ARRAYS[length]
    return _UINT16.pack(_UINT16_ARRAY, length) if length < 1 << 16 else _UINT32.pack(_UINT32_ARRAY, length)


def _names(names: bytes, blocks: int) -> bytes | bytearray:
    """Fixed-width uint64; the names are big-endian already."""
    if blocks <= _FEW_NAMES:
        return b"".join([_UINT64 + names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)])
    items = bytearray(b"\xcf\0\0\0\0\0\0\0\0") * blocks
    np.ndarray(blocks, _RAW64, items, 1, 9)[:] = np.ndarray(blocks, _RAW64, names)
    return items


def _token_ids(tokens: bytes) -> bytes | bytearray:
    """Fixed-width uint32."""
    count = len(tokens) // TOKEN_BYTES
    if count <= _FEW_TOKENS:
        unpack, pack, headers, size = _few_token_ids(count)
        return (int.from_bytes(pack(*unpack(tokens)), "big") | headers).to_bytes(size, "big")
    items = bytearray(b"\xce\0\0\0\0") * count
    np.ndarray(count, _BIG, items, 1, 5)[:] = np.ndarray(count, _LITTLE, tokens)
    return items


@lru_cache(maxsize=_FEW_TOKENS + 1)
def _few_token_ids(count: int) -> tuple[Callable[..., tuple[int, ...]], Callable[..., bytes], int, int]:
    """Reads so many tokens; lays them out with gaps; what belongs there; the bytes of all."""
    headers = int.from_bytes(b"\xce\0\0\0\0" * count, "big")
    return struct.Struct(f"<{count}I").unpack, struct.Struct(">" + "xI" * count).pack, headers, 5 * count


@lru_cache(maxsize=1024)
def _scope(namespace: Namespace, level: int, tokens_per_block: int) -> bytes:
    """What stands between the tokens and the extra keys."""
    return b"".join((
        _BLOCK_SIZE, _pack(tokens_per_block),
        _LORA_ID, _pack(namespace.lora_id),
        _MEDIUM, _pack(MEDIA[level]),
        _LORA_NAME, _pack(adapter_name(namespace)),
        _EXTRA_KEYS,
    ))  # fmt: skip


def adapter_name(namespace: Namespace) -> str | None:
    """The name under which routers keep an adapter's blocks apart; its number, if it has no other.

    Routers ignore `lora_id`, and would take blocks without a name for those of the base model.
    """
    if namespace.lora_name is None and namespace.lora_id is not None:
        return str(namespace.lora_id)
    return namespace.lora_name


@lru_cache(maxsize=1024)
def _extra_keys(namespace: Namespace, at_root: bool) -> tuple[bytes, bytes]:
    """What else the hashes cover, of the first block and of the others: the adapter, at the root the salt."""
    adapter, salt = scope_keys(namespace, at_root)
    return _pack(adapter + salt or None), _pack(adapter or None)


def scope_keys(namespace: Namespace, at_root: bool) -> tuple[list[str], list[str]]:
    """What the hashes cover before a block's items, and behind them: the adapter, at the root the salt."""
    adapter = [] if (name := adapter_name(namespace)) is None else [name]
    salt = [told] if at_root and (told := told_salt(namespace)) is not None else []
    return adapter, salt


def told_salt(namespace: Namespace) -> str | None:
    """The salt where it is known (`with_salts`), or its digest in hex."""
    if isinstance(namespace, SaltedNamespace):
        return namespace.salt
    return None if namespace.salt_digest is None else namespace.salt_digest.hex()


def _with_extras(stored: Stored) -> list[bytes]:
    """What the hashes cover, block by block; between adapter and salt the items as [digest, where it begins]."""
    adapter, salt = scope_keys(stored.namespace, not stored.parent)
    first, *others = stored.extras
    return [_pack([*adapter, *first, *salt] or None), *(_pack([*adapter, *each] or None) for each in others)]


def kind_and_window(groups: Sequence[GroupCreated], group: int) -> tuple[str, int | None]:
    """The group's attention, and its window if it slides."""
    if group < len(groups) and groups[group].kind == SLIDING:
        return "sliding_window", groups[group].window
    crosses = group < len(groups) and groups[group].kind == CROSS
    return "cross_attention" if crosses else "full_attention", None


@lru_cache(maxsize=256)
def _attention(group: int, kind: str, window: int | None, salted: bool) -> tuple[bytes, bytes]:
    """A store's start, which says how many keys there are, and its end but for the salt."""
    end = _GROUP + _pack(group) + _KIND + _pack(kind)
    if window is not None:
        end += _WINDOW + _pack(window)
    keys = _STORED_KEYS + (window is not None) + salted
    return bytes((keys,)) + _STORED_START, end


@lru_cache(maxsize=1024)
def _salt(namespace: Namespace) -> bytes:
    """A key that vLLM does not know, by which Dynamo keeps salted blocks apart."""
    salt = told_salt(namespace)
    return b"" if salt is None else _pack("cache_salt") + _pack(salt)


@lru_cache(maxsize=256)
def _removed_from(group: int, level: int) -> bytes:
    return _MEDIUM + _pack(MEDIA[level]) + _GROUP + _pack(group)

"""Positional arrays: how vLLM wrote its KV events until 0.23, for readers that know nothing else.

A batch is ``[ts, [event, ...], rank]``. Fields at the end of an event that say nothing are left out, as older releases
had none. Each block is an event of its own: some of these readers take the event's parent for the parent of all its
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from events.feed.changes import AnyChange, Removed, Stored, Told
from events.formats.vllm_decode import positions
from events.formats.vllm_encode import MEDIA, Salts, adapter_name, kind_and_window, scope_keys, with_salts
from events.packed import unpack_i32, unpack_names
from events.types import GroupCreated

_SHORTEST = 7
"""Fields of a stored block up to its medium, its name among them: what every reader of arrays expects."""
_PER_BLOCK = ("extra_keys", "lookahead_token_ids")
"""Fields with an entry for each block."""
_pack = msgspec.msgpack.encode


def encode_arrays(
    changes: Sequence[AnyChange],
    ts: float,
    rank: int = 0,
    groups: Sequence[GroupCreated] = (),
    *,
    salts: Salts | None = None,
) -> bytes:
    """One batch of positional arrays; the arguments are those of `vllm.encode_batch`."""
    events: list[list[Any]] = []
    for change in with_salts(changes, salts):
        if isinstance(change, Stored):
            events += map(_trimmed, _stored_arrays(change, groups))
        elif isinstance(change, Removed):
            group = [change.group] if change.group else []
            events.append(["BlockRemoved", unpack_names(change.names).tolist(), MEDIA[change.level], *group])
        elif isinstance(change, Told):
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
        extra = _extra_keys(stored, at, at_root=parent is None)
        more = [stored.group, kind, window] if stored.group or window is not None else []
        block = tokens[at * size : (at + 1) * size]
        yield ["BlockStored", [name], parent, block, size, space.lora_id, medium, adapter, extra, *more]
        parent = name


def _array_of(event: dict[str, Any]) -> list[Any]:
    """What an engine told, as an array: fields that arrays have no place for are left out."""
    array = [event["type"], *(event.get(name) for name in positions(event["type"]))]
    least = _SHORTEST if event["type"] == "BlockStored" else len(("BlockRemoved", "hashes", "medium"))
    while len(array) > least and array[-1] is None:
        array.pop()
    return array


def _single_blocks(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Stored blocks one by one, as far as it is known whose the tokens are; a salt where arrays have it."""
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


def _trimmed(event: list[Any]) -> list[Any]:
    while len(event) > _SHORTEST and event[-1] is None:
        event.pop()
    return event


def _extra_keys(stored: Stored, at: int, *, at_root: bool) -> list[list[Any]] | None:
    """What the block's hash covers besides its tokens."""
    adapter, salt = scope_keys(stored.namespace, at_root)
    keys = [*adapter, *(stored.extras[at] if stored.extras else ()), *salt]
    return [keys] if keys else None


def token_ids(tokens: bytes) -> list[int]:
    """A column of tokens as numbers."""
    numbers: list[int] = unpack_i32(tokens).view(np.uint32).tolist()
    return numbers

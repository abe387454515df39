"""The forms of KV events beside vLLM's maps: spelled one block at a time, and encoded as they stand.

Positional arrays
    What vLLM wrote until 0.23, for readers that know nothing else. Fields at the end that say nothing are left out, as
    older releases had none. Each block is an event of its own: some of these readers take the event's parent for the
    parent of all its blocks.

SGLang's maps
    Hashes are signed, host memory is ``CPU_PINNED``, salts have a key of their own, and what is None is left out.

A batch is ``[ts, [event, ...], rank]`` in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from events.feed.changes import AnyChange, Removed, Stored, Told
from events.formats.vllm_decode import positions
from events.formats.vllm_encode import MEDIA, adapter_name
from events.packed import unpack_i32, unpack_names
from events.types import SLIDING, GroupCreated, Namespace

Salts = Callable[[bytes], str | None]
SGLANG_MEDIA = ("GPU", "CPU_PINNED")
"""By level."""
_SHORTEST = 7
"""Fields of a stored block up to its medium, its name among them: what every reader of arrays expects."""
_ALWAYS = ("parent_block_hash", "lora_id")
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
    for change in changes:
        if isinstance(change, Stored):
            events += map(_trimmed, _stored_arrays(change, groups, salts))
        elif isinstance(change, Removed):
            group = [change.group] if change.group else []
            events.append(["BlockRemoved", unpack_names(change.names).tolist(), MEDIA[change.level], *group])
        elif isinstance(change, Told):
            events.append(_array_of(change))
        else:
            events.append(["AllBlocksCleared"])
    return _pack([ts, events, rank])


def _stored_arrays(
    stored: Stored, groups: Sequence[GroupCreated], salts: Salts | None
) -> Iterator[list[Any]]:
    space, size = stored.namespace, stored.tokens_per_block
    slides = stored.group < len(groups) and groups[stored.group].kind == SLIDING
    kind = ["sliding_window", groups[stored.group].window] if slides else ["full_attention"]
    names: list[int] = unpack_names(stored.names).tolist()
    tokens: list[int] = _unsigned(stored.tokens)
    parent = int.from_bytes(stored.parent, "big") if stored.parent else None
    medium, adapter = MEDIA[stored.level], adapter_name(space)
    for at, name in enumerate(names):
        extra = _extra_keys(stored, at, salts, at_root=parent is None)
        more = [stored.group, *kind] if stored.group or slides else []
        block = tokens[at * size : (at + 1) * size]
        yield ["BlockStored", [name], parent, block, size, space.lora_id, medium, adapter, extra, *more]
        parent = name


def _array_of(told: Told) -> list[Any]:
    """What an engine told, as an array: fields that arrays have no place for are left out."""
    event = msgspec.msgpack.decode(told.encoded)
    fields = positions(event["type"])
    array = [event["type"], *(event.get(name) for name in fields)]
    least = _SHORTEST if event["type"] == "BlockStored" else len(("BlockRemoved", "hashes", "medium"))
    while len(array) > least and array[-1] is None:
        array.pop()
    return array


def _trimmed(event: list[Any]) -> list[Any]:
    while len(event) > _SHORTEST and event[-1] is None:
        event.pop()
    return event


def _extra_keys(stored: Stored, at: int, salts: Salts | None, *, at_root: bool) -> list[list[Any]] | None:
    """What the block's hash covers besides its tokens."""
    adapter, salt = adapter_name(stored.namespace), _salt(stored.namespace, salts) if at_root else None
    items = stored.extras[at] if stored.extras else ()
    keys = [*([] if adapter is None else [adapter]), *items, *([] if salt is None else [salt])]
    return [keys] if keys else None


def _salt(namespace: Namespace, salts: Salts | None) -> str | None:
    """The salt where `salts` knows it, or its digest in hex."""
    digest = namespace.salt_digest
    if digest is None:
        return None
    known = salts(digest) if salts is not None else None
    return digest.hex() if known is None else known


def _unsigned(tokens: bytes) -> list[int]:
    numbers: list[int] = unpack_i32(tokens).view(np.uint32).tolist()
    return numbers


def encode_sglang(
    changes: Sequence[AnyChange],
    ts: float,
    rank: int = 0,
    groups: Sequence[GroupCreated] = (),
    *,
    salts: Salts | None = None,
) -> bytes:
    """One batch of SGLang's maps; the arguments are those of `vllm.encode_batch`."""
    events: list[dict[str, Any]] = []
    for change in changes:
        if isinstance(change, Stored):
            events.append(_stored_map(change, salts))
        elif isinstance(change, Removed):
            events.append(
                {
                    "type": "BlockRemoved",
                    "block_hashes": _signed(change.names),
                    "medium": SGLANG_MEDIA[change.level],
                }
            )
        elif isinstance(change, Told):
            told = msgspec.msgpack.decode(change.encoded)
            events.append({key: value for key, value in told.items() if value is not None or key in _ALWAYS})
        else:
            events.append({"type": "AllBlocksCleared"})
    return _pack([ts, events, rank])


def _stored_map(stored: Stored, salts: Salts | None) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": _signed(stored.names),
        "parent_block_hash": _signed(stored.parent)[0] if stored.parent else None,
        "token_ids": _unsigned(stored.tokens),
        "block_size": stored.tokens_per_block,
        "lora_id": None,
        "medium": SGLANG_MEDIA[stored.level],
    }
    adapter, salt = adapter_name(stored.namespace), _salt(stored.namespace, salts)
    more = {"lora_name": adapter, "cache_salt": salt}
    return event | {key: value for key, value in more.items() if value is not None}


def _signed(names: bytes) -> list[int]:
    numbers: list[int] = unpack_names(names).view(">i8").tolist()
    return numbers

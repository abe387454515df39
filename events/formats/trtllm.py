"""TensorRT-LLM's event dicts, as its `get_kv_cache_events` returns them.

One dict an event: ``{"event_id", "data": {"type": "created" | "stored" | "updated" | "removed", ...}, "window_size",
"hash_algo"}``. That format knows nothing of sequences, allocations or landings, has no "cleared" (its readers ignore
what they do not know), and repeats the tokens in every stored block.
"""

from __future__ import annotations

from typing import Any

from events.formats.vllm_encode import adapter_name
from events.packed import TOKEN_BYTES, names_of_keys, unpack_i32, unpack_names
from events.tokens.rich import RichTokens
from events.types import BlocksMoved, BlocksStored, BlocksUpdated, GroupCreated, Namespace

Data = dict[str, Any]


def created(group: GroupCreated) -> Data:
    """A window's blocks per level."""
    return {"type": "created", "num_blocks_per_cache_level": list(group.num_blocks)}


def stored(
    event: BlocksStored, tokens: RichTokens, namespace: Namespace, tokens_per_block: int, key_bytes: int
) -> Data:
    """Blocks that became reusable; `tokens` are those of all of them.

    An adapter without a name goes by its number, since routers know adapters by their names only.
    """
    hashes = unpack_names(names_of_keys(event.keys, key_bytes)).tolist()
    items = tokens.items_by_block(tokens_per_block)
    salt = namespace.salt_digest.hex() if namespace.salt_digest is not None else None
    blocks = [
        {
            "type": "stored_block",
            "block_hash": block_hash,
            "tokens": _unique_tokens(tokens, index * tokens_per_block, (index + 1) * tokens_per_block),
            "cache_level": event.level,
            "priority": event.priority,
            "mm_keys": [
                {"type": "mm_key", "hash": item.uuid or item.digest.hex(), "start_offset": item.offset}
                for item in items[index]
            ],
            "cache_salt": salt,
        }
        for index, block_hash in enumerate(hashes)
    ]
    parent = int.from_bytes(event.parent, "big") if event.parent else None
    return {
        "type": "stored",
        "parent_hash": parent,
        "blocks": blocks,
        "lora_id": namespace.lora_id,
        "lora_name": adapter_name(namespace),
    }


def _unique_tokens(tokens: RichTokens, begin: int, end: int) -> list[Data]:
    ids = unpack_i32(tokens.tokens[begin * TOKEN_BYTES : end * TOKEN_BYTES]).tolist()
    return [
        {"type": "unique_token", "token_id": token, "token_extra_id": extra_id}
        for token, extra_id in zip(ids, tokens.extra_ids_at(begin, end).tolist(), strict=True)
    ]


def updated(event: BlocksMoved | BlocksUpdated) -> list[Data]:
    """One dict per block that changed its level or its priority."""
    level = priority = None
    if isinstance(event, BlocksMoved):
        level = _diff(event.from_level, event.to_level)
    else:
        priority = _diff(event.old_priority, event.priority)
    return [
        {"type": "updated", "block_hash": block_hash, "cache_level": level, "priority": priority}
        for block_hash in unpack_names(event.names).tolist()
    ]


def _diff(old: int, new: int) -> Data:
    return {"type": "event_diff", "new_value": new, "old_value": old}


def removed(block_hashes: list[int]) -> Data:
    """Blocks that are gone."""
    return {"type": "removed", "block_hashes": block_hashes}

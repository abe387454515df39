"""TensorRT-LLM's event dicts, as its `get_kv_cache_events` returns them.

One dict an event: ``{"event_id", "data": {"type": "created" | "stored" | "updated" | "removed", ...}, "window_size",
"hash_algo"}``, and ``"attention_dp_rank"`` where there is one. That format knows nothing of sequences, allocations or
landings, has no "cleared" (its readers ignore what they do not know), and repeats the tokens in every stored block.
"""

from __future__ import annotations

from typing import Any

from events.feed.changes import Cached, Updated
from events.formats.vllm_encode import adapter_name
from events.packed import TOKEN_BYTES, unpack_i32, unpack_names
from events.tokens.rich import RichTokens
from events.types import GroupCreated

Data = dict[str, Any]


def envelope(group: GroupCreated, hash_algorithm: str, rank: int | None) -> Data:
    """What stands around the data of a window's dicts. `rank`: the engine's, where its attention is data-parallel."""
    told: Data = {"window_size": group.window, "hash_algo": hash_algorithm}
    return told if rank is None else {**told, "attention_dp_rank": rank}


def created(group: GroupCreated) -> Data:
    """A window's blocks per level."""
    return {"type": "created", "num_blocks_per_cache_level": list(group.num_blocks)}


def stored(cached: Cached) -> Data:
    """Blocks that became reusable.

    An adapter without a name goes by its number, since routers know adapters by their names only.
    """
    namespace, size, tokens = cached.namespace, cached.tokens_per_block, cached.spelled
    items = tokens.items_by_block(size)
    salt = namespace.salt_digest.hex() if namespace.salt_digest is not None else None
    adapter = {"lora_id": namespace.lora_id} if namespace.lora_id is not None else {}
    blocks = [
        {
            "type": "stored_block",
            "block_hash": block_hash,
            "tokens": _unique_tokens(tokens, index * size, (index + 1) * size),
            "cache_level": cached.level,
            "priority": cached.priority,
            "mm_keys": [
                {"type": "mm_key", "hash": item.uuid or item.digest.hex(), "start_offset": item.offset}
                for item in items[index]
            ],
            "cache_salt": salt,
            **adapter,
        }
        for index, block_hash in enumerate(unpack_names(cached.names).tolist())
    ]
    parent = int.from_bytes(cached.parent, "big") if cached.parent else None
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


def updated(event: Updated) -> list[Data]:
    """One dict per block that changed its level or its priority."""
    level, priority = _diff(event.level), _diff(event.priority)
    return [
        {"type": "updated", "block_hash": block_hash, "cache_level": level, "priority": priority}
        for block_hash in unpack_names(event.names).tolist()
    ]


def _diff(values: tuple[int, int] | None) -> Data | None:
    return None if values is None else {"type": "event_diff", "new_value": values[1], "old_value": values[0]}


def removed(block_hashes: list[int]) -> Data:
    """Blocks that are gone."""
    return {"type": "removed", "block_hashes": block_hashes}

"""What a store says of its blocks' contents, as bytes that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct, error
from typing import Any

import msgspec

from events.formats.vllm import BlockStored
from kvcache.prefixes.runs import Adapter

_encode = msgspec.msgpack.encode


class Contents(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks of one prefix."""

    adapter: Adapter
    tokens: bytes
    """int32 each."""
    extras: list[bytes] | None
    """Per block, what its hash covers beside adapter and tokens; None: nothing."""


def contents_of(event: BlockStored, blocks: int) -> Contents | None:
    """What is in the first blocks of a store; None if it does not say."""
    count = blocks * event.block_size
    try:
        tokens = _packer(count)(*event.token_ids[:count])
    except error:
        return None  # pairs, or numbers that are no token ids
    name = event.lora_name
    adapter = event.lora_id if name is None else name
    salt = event.cache_salt if event.parent_block_hash is None else None
    extras = event.extra_keys
    if extras is None or not any(extras):
        if salt is None:
            return Contents(adapter, tokens, None)
        extras = None
    if extras is not None and len(extras) < blocks:
        return None
    return Contents(adapter, tokens, pack_extras(extras or [None] * blocks, name, salt))


def pack_extras(
    extras: Sequence[Sequence[Any] | None], adapter: str | None, salt: str | None
) -> list[bytes] | None:
    """What hashes cover besides tokens and adapter, block by block; None if that is nothing in any of them.

    `salt` is that of the prompt: publishers tell it apart, or as the first block's last extra key, or both.
    """
    rows = [[key for key in keys or () if adapter is None or key != adapter] for keys in extras]
    if salt is not None and rows and salt not in rows[0]:
        rows[0].append(salt)
    return [_encode(row) if row else b"" for row in rows] if any(rows) else None


@lru_cache(maxsize=1024)
def _packer(tokens: int) -> Any:
    return Struct(f"<{tokens}i").pack

"""What a recorded cache looks like: checked before anything is made of it, since a log can claim anything.

A live manager's own `CacheCreated` passes by construction. One that was read may come from another version, or be a
lie, and everything behind it (sizes of tables, bounds, names) relies on it.
"""

from __future__ import annotations

import json
from typing import Any

from events.tokens.names import ALGORITHMS
from events.types import CacheCreated
from kvcache.errors import invariant

_MAX_BLOCKS = 2**31 - 1
"""Slots are int32."""
_MAX_TOKENS_PER_BLOCK = 2**30
"""So that a block's tokens are counted by an int32."""


def check_created(event: CacheCreated) -> None:
    """Raises `InvariantViolated` if no cache can have been created like that."""
    size = event.tokens_per_block
    invariant(0 < size <= _MAX_TOKENS_PER_BLOCK and not size & (size - 1), "blocks have an impossible size")
    invariant(bool(event.groups), "a cache has no group")
    for group in event.groups:
        fits = all(0 <= count <= _MAX_BLOCKS for count in group.num_blocks)
        invariant(fits, "a group has an impossible number of blocks")
    algorithm = ALGORITHMS.get(event.hash_algorithm)
    invariant(algorithm is not None, "blocks are named by an unknown algorithm")
    assert algorithm is not None
    invariant(algorithm.key_bytes == event.key_bytes, "keys have another size than their algorithm makes")
    invariant(isinstance(_parsed(event.config), dict), "the settings of a cache are no JSON object")


def longest_sequence(event: CacheCreated) -> int:
    """Tokens of the longest sequence that the cache can hold: each block of its table has a primary slot of its own."""
    room = min(group.num_blocks[0] for group in event.groups) * event.tokens_per_block
    limit = _parsed(event.config).get("max_sequence_length")
    return min(limit, room) if isinstance(limit, int) else room


def _parsed(config: str) -> Any:
    try:
        return json.loads(config)
    except (ValueError, RecursionError):
        return None

"""The shape of a recorded cache: checked before anything is built from it, since a log can claim anything.

A live manager's own `CacheCreated` passes by construction. One that was read may come from another version, or be
forged, and everything after it (sizes of tables, bounds, names) relies on it.
"""

from __future__ import annotations

import json
from typing import Any

from events.tokens.names import ALGORITHMS
from events.types import CROSS, CROSS_WINDOW, FULL, SLIDING, CacheCreated
from kvcache.errors import invariant

_MAX_BLOCKS = 2**31 - 1
"""Slots are int32."""
_MAX_TOKENS = 2**31 - 1
_NO_COUNTS, _COUNTS = "lru", "levels"
"""Values of `eviction_policy`; older logs have none."""
_MAX_TOKENS_PER_BLOCK = 2**30
"""A block's tokens are counted by an int32."""


def check_created(event: CacheCreated) -> None:
    """Raise `InvariantViolated` if no cache can have been created with this event."""
    size = event.tokens_per_block
    invariant(0 < size <= _MAX_TOKENS_PER_BLOCK, "blocks have an impossible size")
    invariant(bool(event.groups), "a cache has no group")
    for index, group in enumerate(event.groups):
        crosses = group.kind == CROSS and group.window == CROSS_WINDOW and 0 < index == len(event.groups) - 1
        known = crosses or (group.kind in (FULL, SLIDING) and group.window > 0)
        invariant(known, "unknown kind of group")
        fits = all(0 <= count <= _MAX_BLOCKS for count in group.num_blocks)
        invariant(fits, "a group has an impossible number of blocks")
    algorithm = ALGORITHMS.get(event.hash_algorithm)
    invariant(algorithm is not None, "unknown algorithm of block names")
    assert algorithm is not None
    invariant(algorithm.key_bytes == event.key_bytes, "the key size does not match the algorithm")
    invariant(isinstance(_parsed(event.config), dict), "the settings of a cache are not a JSON object")
    policy = _parsed(event.config).get("eviction_policy", _NO_COUNTS)
    invariant(policy in (_NO_COUNTS, _COUNTS), "unknown eviction policy")
    invariant(policy == _NO_COUNTS or event.key_bytes > 0, "uses are counted, but blocks have no names")


def counts_uses(event: CacheCreated) -> bool:
    """True if the eviction order depends on the number of uses of blocks."""
    return bool(_parsed(event.config).get("eviction_policy") == _COUNTS)


def keeps_replaced(event: CacheCreated) -> bool:
    """True if a sequence keeps its own slots of blocks that another one stored first, until it ends."""
    return _parsed(event.config).get("append_only_tables") is True


def longest_sequence(event: CacheCreated) -> int:
    """Tokens of the longest sequence that the cache can hold."""
    room = min(
        room_of(group.num_blocks[0], group.window, group.kind, event.tokens_per_block)
        for group in event.groups
        if group.kind != CROSS
    )
    limit = _parsed(event.config).get("max_sequence_length")
    return min(limit, room) if isinstance(limit, int) else room


def longest_input(event: CacheCreated) -> int:
    """Tokens of an encoder's longest input, padded; 0 without cross attention."""
    last = event.groups[-1]
    return last.num_blocks[0] * event.tokens_per_block if last.kind == CROSS else 0


def room_of(num_blocks: int, window: int, kind: str, tokens_per_block: int) -> int:
    """Tokens of the longest sequence that these primary blocks of a window can hold.

    In a sliding window a sequence can grow without end once there is room for the window, wherever in a block it
    begins.
    """
    # A new block is taken before the one is released that the window has left.
    if kind == SLIDING and num_blocks > -(-window // tokens_per_block):
        return _MAX_TOKENS
    return num_blocks * tokens_per_block


def _parsed(config: str) -> Any:
    try:
        return json.loads(config)
    except (ValueError, RecursionError):
        return None

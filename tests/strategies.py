"""What the random tests draw, and what they compare: small caches, prompts that collide, and views of a state.

Prompts are short and made of few tokens, so that prefixes meet all the time; most requests begin as an earlier one did.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path as FilePath
from typing import Any

from hypothesis import strategies as st

from events.codec import decode_batch, encode_batch
from events.types import EventBatch
from kvcache.config import KVCacheConfig, LogConfig
from kvcache.exported_state import COLUMNS, export
from kvcache.manager import KVCacheManager
from kvcache.results import Request
from kvcache.state import CacheState

Namespace = tuple[int | None, str | None, str | None]
"""LoRA id, LoRA name, cache salt."""
NAMESPACES: tuple[Namespace, ...] = (
    (None, None, None),
    (1, None, None),
    (None, "style", None),
    (None, None, "tenant"),
)
IDS: tuple[str | int, ...] = (0, 1, 2, 3, "0", "1", "2")
"""0 and "0" are two requests."""
LIMIT = 24
"""Tokens of the longest sequence."""
Cached = dict[bytes, tuple[int, int, int, int, int]]
"""Name of a cached block to (level, references, stamp, tokens in it, priority)."""


def config(**settings: Any) -> KVCacheConfig:
    """A tiny cache whose blocks have names."""
    defaults: dict[str, Any] = {
        "max_sequence_length": LIMIT,
        "tokens_per_block": 2,
        "primary_blocks": 8,
        "num_layers": 1,
        "block_hash": "v2_sha256_64",
        "checkpoint_spacing": 1,
        "log": LogConfig(fsync="never", overflow="block"),
    }
    return KVCacheConfig(**(defaults | settings))


def configs() -> st.SearchStrategy[KVCacheConfig]:
    """All the switches, and sizes at which every path is short of room."""
    return st.builds(
        config,
        tokens_per_block=st.sampled_from([1, 2, 4]),
        primary_blocks=st.integers(2, 12),
        secondary_blocks=st.integers(0, 8),
        enable_block_reuse=st.sampled_from([True, True, True, False]),
        enable_partial_reuse=st.booleans(),
        secondary_offload_min_priority=st.sampled_from([0, 35, 35, 36]),
    )


def prompts(earlier: Sequence[Sequence[int]]) -> st.SearchStrategy[list[int]]:
    """New prompts, or earlier ones cut somewhere and continued otherwise."""
    fresh = st.lists(st.integers(0, 2), min_size=1, max_size=14)
    if not earlier:
        return fresh
    continued = st.builds(
        lambda prompt, cut, rest: [*prompt[: cut % (len(prompt) + 1)], *rest],
        st.sampled_from(list(earlier)),
        st.integers(0, LIMIT),
        st.lists(st.integers(0, 1), min_size=1, max_size=5),
    )
    return st.one_of(continued, continued, fresh)


def batches(
    free_ids: Sequence[str | int], earlier: Sequence[Sequence[int]]
) -> st.SearchStrategy[list[tuple[str | int, Namespace, list[int]]]]:
    """One to four requests with ids that are not in use."""
    # Most share a namespace, so that they meet.
    namespaces = st.sampled_from((NAMESPACES[0],) * 4 + NAMESPACES)
    return st.lists(
        st.tuples(st.sampled_from(list(free_ids)), namespaces, prompts(earlier)),
        min_size=1,
        max_size=4,
        unique_by=lambda each: (type(each[0]), each[0]),
    )


def request(request_id: str | int, namespace: Namespace, tokens: list[int]) -> Request:
    """The request as the manager takes it."""
    return Request(request_id, tokens, *namespace)


# -- names, worked out anew from their definition


@cache
def key_of(path: tuple[Any, ...]) -> bytes:
    """The SHA-256 key of the block at the end of a path of the model."""
    if len(path) == 1:
        return _root_key(*path[0])
    return hashlib.sha256(key_of(path[:-1]) + array("i", path[-1]).tobytes()).digest()


def _root_key(lora_id: int | None, lora_name: str | None, salt: str | None) -> bytes:
    parts = [
        None if lora_id is None else lora_id.to_bytes(8, "little"),
        None if salt is None else hashlib.sha256(salt.encode()).digest()[:8],
        None if lora_name is None else hashlib.sha256(lora_name.encode()).digest()[:8],
    ]
    present = sum(1 << bit for bit, part in enumerate(parts) if part is not None)
    return hashlib.sha256(bytes([present]) + b"".join(part or b"" for part in parts)).digest()


def name_of(path: tuple[Any, ...]) -> bytes:
    """The public name."""
    return key_of(path)[:8]


# -- views


def split_names(packed: bytes) -> list[bytes]:
    """A column of names as a list."""
    return [packed[start : start + 8] for start in range(0, len(packed), 8)]


def cached_blocks(state: CacheState) -> Cached:
    """Every cached block, by its name."""
    (group,) = export(state).groups
    found: Cached = {}
    keys, numbers = group.keys, array("q", group.runs)
    size, block = state.tokens_per_block, 0
    for at in range(0, len(numbers), COLUMNS):
        _, count, last_tokens, level, priority, _, stamp, refs, _ = numbers[at : at + COLUMNS]
        for index in range(count):
            tokens = last_tokens if index == count - 1 else size
            found[keys[block * 32 : block * 32 + 8]] = (level, refs, stamp, tokens, priority)
            block += 1
    return found


def through_the_codec(*events: Any) -> tuple[Any, ...]:
    """The events as a reader of a log gets them."""
    return decode_batch(encode_batch(EventBatch(0, 0, events))).events


def mirror_of(manager: KVCacheManager) -> CacheState:
    """A second state that folds the manager's events from now on."""
    mirror = CacheState()
    assert manager.state.created is not None
    for event in through_the_codec(manager.state.created, export(manager.state)):
        mirror.apply(event)
    manager.bus.subscribe(mirror.apply)
    return mirror


def continue_from(settings: KVCacheConfig, *events: Any) -> KVCacheManager:
    """A manager that decides on the state which the events fold to."""
    state = CacheState()
    for event in through_the_codec(*events):
        state.apply(event)
    manager = KVCacheManager.resume(state)
    assert manager.config.model_copy(update={"block_hash": settings.block_hash}) == settings
    return manager


def log_directory(parent: str | FilePath) -> FilePath:
    """A directory for a log."""
    return FilePath(parent) / "log"

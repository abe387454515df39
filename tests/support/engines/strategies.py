"""What the random tests draw, and what they compare: small caches, prompts that collide, and views of a state.

Prompts are short and made of few tokens, so that prefixes meet all the time; most requests begin as an earlier one did.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from hypothesis import strategies as st

from events.codec import decode_batch, encode_batch
from events.structs import RUN_COLUMNS
from events.types import PRIMARY, SECONDARY, EventBatch
from kvcache import inputs
from kvcache.config import KVCacheConfig, LogConfig
from kvcache.fold.state import CacheState
from kvcache.inputs import MultimodalItem, Request
from kvcache.manager import KVCacheManager, Substitutes
from tests.oracles.window_model import Retention
from tests.support.places import slides

Namespace = tuple[int | None, str | None, str | None] | tuple[int | None, str | None, str | None, bool]
"""LoRA id, LoRA name, cache salt, and whether tokens have extra ids."""
Symbol = int | tuple[int, int, bytes | None, int]
"""A plain token, or (token, extra id, digest of its item, offset in the item)."""
NAMESPACES: tuple[Namespace, ...] = (
    (None, None, None),
    (1, None, None),
    (None, "style", None),
    (None, None, "tenant"),
)
EXTRA: Namespace = (None, None, None, True)
IDS: tuple[str | int, ...] = (0, 1, 2, 3, "0", "1", "2")
"""0 and "0" are two requests."""
STOPS = ("tool_calls", "stop", "length")
"""Why outputs end."""
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


def any_windows() -> st.SearchStrategy[tuple[int, ...] | None]:
    """One that attends to everything, or `windows`."""
    return st.one_of(st.none(), windows(), windows())


def windows() -> st.SearchStrategy[tuple[int, ...]]:
    """One to three attention windows: less than a block, a few blocks, some more, and longer than any sequence."""
    sizes = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 11, 16, LIMIT, LIMIT + 6])
    return st.lists(sizes, min_size=1, max_size=3, unique=True).map(tuple)


def configs(
    windows: st.SearchStrategy[tuple[int, ...] | None] | None = None,
    cross: st.SearchStrategy[float | None] | None = None,
) -> st.SearchStrategy[KVCacheConfig]:
    """All the switches, `windows` or any, `cross` or none, and sizes at which every path is short of room."""
    return st.builds(
        config,
        num_layers=st.just(3),
        max_attention_window=any_windows() if windows is None else windows,
        tokens_per_block=st.sampled_from([1, 2, 3, 4]),
        primary_blocks=st.integers(2, 12),
        secondary_blocks=st.integers(0, 8),
        enable_block_reuse=st.sampled_from([True, True, True, False]),
        enable_partial_reuse=st.booleans(),
        append_only_tables=st.sampled_from([False, False, True]),
        keep_reservations=st.booleans(),
        secondary_offload_min_priority=st.sampled_from([0, 35, 35, 36]),
        eviction_policy=st.sampled_from(["lru", "levels"]),
        stop_retention=st.sampled_from(
            [{}, {"tool_calls": "60:2ms", "stop": 20}, {"stop": "29:1ms"}, {"*": "80:1ms", "stop": 36}]
        ),
        evict_ahead=st.sampled_from([64, 64, 2, 0]),
        max_pinned_share=st.sampled_from([0.0, 0.5, 0.7, 1.0]),
        cross_kv_cache_fraction=st.none() if cross is None else cross,
    )


def encoder_inputs(earlier: Sequence[tuple[int, ...]]) -> st.SearchStrategy[tuple[int, ...]]:
    """What encoders read: new ones, which may be the beginning of others, and earlier ones."""
    fresh = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
    return st.one_of(st.sampled_from(list(earlier)), fresh) if earlier else fresh


def _item(digest: bytes, tokens: Sequence[int], extra_id: int) -> list[Symbol]:
    return [(token, extra_id, digest, offset) for offset, token in enumerate(tokens)]


def rich_parts() -> st.SearchStrategy[list[Symbol]]:
    """An image of a few tokens, or tokens with an extra id."""
    digests = st.sampled_from([b"\x11" * 32, b"\x22" * 32])
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=5)
    images = st.builds(_item, digests, tokens, st.sampled_from([0, 0, 1]))
    tuned = st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 2), st.none(), st.just(0)), min_size=1, max_size=4
    )
    return st.one_of(images, tuned)


def prompts(earlier: Sequence[Sequence[Symbol]]) -> st.SearchStrategy[list[Symbol]]:
    """New prompts, or earlier ones cut somewhere and continued otherwise."""
    plain: st.SearchStrategy[list[Symbol]] = st.lists(st.integers(0, 2), min_size=1, max_size=14)
    rich = st.lists(
        st.one_of(rich_parts(), st.lists(st.integers(0, 1), min_size=1, max_size=4)), min_size=1, max_size=3
    )
    fresh = st.one_of(plain, rich.map(lambda parts: [symbol for part in parts for symbol in part]))
    if not earlier:
        return fresh
    continued = st.builds(
        lambda prompt, cut, rest: [*prompt[: cut % (len(prompt) + 1)], *rest],
        st.sampled_from(list(earlier)),
        st.integers(0, LIMIT),
        st.one_of(st.lists(st.integers(0, 1), min_size=1, max_size=5), rich_parts()),
    )
    return st.one_of(continued, continued, fresh)


Drawn = tuple[str | int, Namespace, list[Symbol], Retention | None, int | None]
"""A request: id, namespace, prompt, retention, and for how many tokens it gets slots at first."""


def batches(
    free_ids: Sequence[str | int], earlier: Sequence[Sequence[Symbol]]
) -> st.SearchStrategy[list[Drawn]]:
    """One to four requests with ids that are not in use."""
    # Most share a namespace, so that they meet.
    namespaces = st.sampled_from((NAMESPACES[0],) * 4 + (EXTRA,) * 2 + NAMESPACES)
    return st.lists(
        st.builds(
            _allowed,
            st.sampled_from(list(free_ids)),
            namespaces,
            prompts(earlier),
            retentions(),
            st.sampled_from([None, None, None, 1, 3, 6]),
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda each: (type(each[0]), each[0]),
    )


MS = 1_000_000
"""Nanoseconds."""


def retentions() -> st.SearchStrategy[Retention | None]:
    """None for most; else up to three ranges, some for a time of a few milliseconds."""
    kept = st.tuples(st.sampled_from([0, 29, 35, 36, 100]), st.sampled_from([0, 0, MS, 3 * MS]))
    cuts = st.lists(st.integers(0, 14), min_size=2, max_size=6, unique=True).map(sorted)
    stated = st.builds(_retention, cuts, st.lists(kept, min_size=3, max_size=3), kept, st.booleans())
    return st.one_of(st.none(), st.none(), stated)


def _retention(
    cuts: list[int], kept: list[tuple[int, int]], decode: tuple[int, int], open_end: bool
) -> Retention:
    ranges: list[tuple[int, int | None, tuple[int, int]]] = [
        (start, stop, how) for start, stop, how in zip(cuts[::2], cuts[1::2], kept, strict=False)
    ]
    if open_end:
        ranges[-1] = (ranges[-1][0], None, ranges[-1][2])
    return Retention(tuple(ranges), decode)


def _allowed(
    request_id: str | int,
    namespace: Namespace,
    prompt: list[Symbol],
    retention: Retention | None,
    reserve: int | None,
) -> Drawn:
    """The prompt without extra ids of 0, and without any where the namespace has none."""
    simple = [_simplest(symbol, len(namespace) == 4) for symbol in prompt]
    return request_id, namespace, simple, retention, reserve


def _simplest(symbol: Symbol, with_extra_ids: bool) -> Symbol:
    if isinstance(symbol, int):
        return symbol
    token, extra_id, digest, offset = symbol
    extra_id *= with_extra_ids
    return (token, extra_id, digest, offset) if extra_id or digest is not None else token


def request(
    request_id: str | int,
    namespace: Namespace,
    prompt: Sequence[Symbol],
    retention: Retention | None = None,
    reserve_tokens: int | None = None,
    encoder_tokens: Sequence[int] | None = None,
) -> Request:
    """The request as the manager takes it."""
    lora_id, lora_name, salt, *_ = namespace
    spelled = [(symbol, 0, None, 0) if isinstance(symbol, int) else symbol for symbol in prompt]
    items: list[MultimodalItem] = []
    for place, (_, _, digest, offset) in enumerate(spelled):
        if digest is not None and offset == 0:
            items.append(MultimodalItem(digest, place, 1))
        elif digest is not None:
            items[-1] = replace(items[-1], length=offset + 1)
    tokens, extra_ids = [each[0] for each in spelled], [each[1] for each in spelled]
    return Request(
        request_id,
        tokens,
        lora_id,
        lora_name,
        salt,
        items[::-1],
        extra_ids if len(namespace) == 4 else None,
        retention=None if retention is None else spelled_retention(retention),
        reserve_tokens=reserve_tokens,
        encoder_tokens=encoder_tokens,
    )


def spelled_retention(retention: Retention) -> inputs.Retention:
    """As the manager takes it."""
    ranges = [
        inputs.RetentionRange(start, stop, priority, duration // MS or None)
        for start, stop, (priority, duration) in retention.ranges
    ]
    priority, duration = retention.decode
    return inputs.Retention(ranges, priority, duration // MS or None)


# -- names, worked out anew from their definition


@cache
def key_of(path: tuple[Any, ...]) -> bytes:
    """The SHA-256 key of the block at the end of a path of the model."""
    if len(path) == 1:
        return _root_key_with_input(*path[0]) if path[0][0] in ("decoder", "encoder") else _root_key(*path[0])
    return hashlib.sha256(key_of(path[:-1]) + _spelled(path[-1])).digest()


def _spelled(block: Sequence[Symbol]) -> bytes:
    """The tokens; where there are any, all extra ids behind 0x80000001; each stretch of an item behind 0x80000002."""
    rich = [(symbol, 0, None, 0) if isinstance(symbol, int) else symbol for symbol in block]
    data = b"".join(token.to_bytes(4, "little") for token, *_ in rich)
    if any(extra_id for _, extra_id, *_ in rich):
        data += bytes.fromhex("01000080") + np.array([extra_id for _, extra_id, *_ in rich], "<u8").tobytes()
    place = 0
    while place < len(rich):
        _, _, digest, offset = rich[place]
        end = place + 1
        while end < len(rich) and digest is not None and rich[end][2:] == (digest, offset + end - place):
            end += 1
        if digest is not None:
            data += bytes.fromhex("02000080") + place.to_bytes(4, "little") + end.to_bytes(4, "little")
            data += digest + offset.to_bytes(8, "little")
        place = end
    return data


def _root_key_with_input(role: str, namespace: Namespace, given: tuple[int, ...]) -> bytes:
    """The input and its role take part in the place of the salt."""
    lora_id, lora_name, salt, *extra = namespace
    tokens = b"".join(token.to_bytes(4, "little") for token in given)
    own = b"" if salt is None else hashlib.sha256(salt.encode()).digest()
    digest = hashlib.sha256(role.encode() + own + hashlib.sha256(tokens).digest()).digest()
    return _root_key(lora_id, lora_name, None, bool(extra), digest)


def _root_key(
    lora_id: int | None,
    lora_name: str | None,
    salt: str | None,
    extra: bool = False,
    digest: bytes | None = None,
) -> bytes:
    if salt is not None:
        digest = hashlib.sha256(salt.encode()).digest()
    parts = [
        None if lora_id is None else lora_id.to_bytes(8, "little"),
        None if digest is None else digest[:8],
        None if lora_name is None else hashlib.sha256(lora_name.encode()).digest()[:8],
    ]
    present = sum(1 << bit for bit, part in enumerate(parts) if part is not None) + 8 * extra
    return hashlib.sha256(bytes([present]) + b"".join(part or b"" for part in parts)).digest()


def name_of(path: tuple[Any, ...]) -> bytes:
    """The public name."""
    return key_of(path)[:8]


# -- views


def split_names(packed: bytes) -> list[bytes]:
    """A column of names as a list."""
    return [packed[start : start + 8] for start in range(0, len(packed), 8)]


def cached_blocks(state: CacheState, index: int = 0) -> Cached:
    """Every cached block of a group, by its name."""
    if slides(state, index):
        return _cached_alone(state, index)
    group = state.export().groups[index]
    found: Cached = {}
    keys, numbers = group.keys, array("q", group.runs)
    size, block = state.tokens_per_block, 0
    for at in range(0, len(numbers), RUN_COLUMNS):
        _, count, last_tokens, level, priority, _, _, stamp, refs, _ = numbers[at : at + RUN_COLUMNS]
        for index in range(count):
            tokens = last_tokens if index == count - 1 else size
            found[keys[block * 32 : block * 32 + 8]] = (level, refs, stamp, tokens, priority)
            block += 1
    return found


def timed_blocks(state: CacheState, index: int) -> dict[bytes, tuple[int, int]]:
    """Name of each cached block that is kept for a time to (duration, when that is over)."""
    group: Any = state.groups[index]
    key_bytes, found = group.tree.key_bytes, {}
    for run in group.tree.runs.values():
        for at, slot in enumerate(run.slots):
            times = run.duration, run.expiry
            if slides(state, index):
                times = (group.durations[slot], group.expiries[slot]) if slot >= 0 else (0, 0)
            if any(times):
                found[bytes(run.keys[at * key_bytes : at * key_bytes + 8])] = times
    return found


def _cached_alone(state: CacheState, index: int) -> Cached:
    """The same for a group that slides, whose runs are content with and without blocks."""
    group: Any = state.groups[index]
    primary, key_bytes = group.levels[PRIMARY].size, group.tree.key_bytes
    found: Cached = {}
    for run in group.tree.runs.values():
        for at, place in enumerate(run.slots):
            if place < 0:
                continue
            last_of_partial = run.partial and at == len(run.slots) - 1
            refs = group.refs[place]
            found[bytes(run.keys[at * key_bytes : at * key_bytes + 8])] = (
                PRIMARY if place < primary else SECONDARY,
                refs,
                0 if refs else group.released_at[place],
                run.partial if last_of_partial else state.tokens_per_block,
                group.priorities[place],
            )
    return found


def through_the_codec(*events: Any) -> tuple[Any, ...]:
    """The events as a reader of a log gets them."""
    return decode_batch(encode_batch(EventBatch(0, 0, events))).events


def mirror_of(manager: KVCacheManager) -> CacheState:
    """A second state that folds the manager's events from now on."""
    mirror = CacheState()
    assert manager.state.created is not None
    for event in through_the_codec(manager.state.created, manager.state.export()):
        mirror.apply(event)
    manager.bus.subscribe(mirror.apply)
    return mirror


class Ticks:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 0
        self._ahead = 0

    def __call__(self) -> int:
        return self.now + self._ahead

    def resume(self, state: CacheState) -> KVCacheManager:
        """A manager that goes on from a state as if no time had passed between the two."""
        self._ahead = state.clock - self.now
        manager = KVCacheManager.resume(state, substitutes=Substitutes(monotonic_ns=self))
        self._ahead = 0
        return manager


def continue_from(settings: KVCacheConfig, *events: Any, ticks: Ticks | None = None) -> KVCacheManager:
    """A manager that decides on the state which the events fold to."""
    state = CacheState()
    for event in through_the_codec(*events):
        state.apply(event)
    manager = (ticks or Ticks()).resume(state)
    assert manager.config.model_copy(update={"block_hash": settings.block_hash}) == settings
    return manager


def log_directory(parent: str | FilePath) -> FilePath:
    """A directory for a log."""
    return FilePath(parent) / "log"

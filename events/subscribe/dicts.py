"""Follows lines of TensorRT-LLM's event dicts, and makes of them what is told of any other engine.

Its dicts say that a block changed its level and not what is in it, and they have no "cleared". So it is remembered what
each block is: one that changes its level leaves one medium and is stored in the other. Numbers that are missing mean
that anything may have been removed: what was known is cleared. Numbers that go back mean another life of the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from events.formats.trtllm_decode import (
    Created,
    Data,
    Event,
    Removed,
    Stored,
    StoredBlock,
    Updated,
    decode_line,
    hash_of,
)
from events.formats.vllm_decode import AllBlocksCleared, BlockRemoved, BlockStored, Hash, VLLMBatch, VLLMEvent
from events.subscribe.continuity import Missed, Received, Report, Restarted

MEDIA = ("GPU", "CPU", "STORAGE")
"""By cache level."""


class Block(NamedTuple):
    """What is known of a block, and where it is."""

    level: int
    parent: Hash | None
    tokens: tuple[int, ...]
    """Empty where they are told as digests."""
    keys: tuple[Any, ...]
    """Items, as [digest, where in it this part begins], and extra ids."""
    lora: tuple[int | None, str | None]
    salt: str | None


class DictFollower:
    """Makes reports of lines. For one stream, of one engine and all its ranks.

    With `block_size` blocks of other sizes are left out: the parts of blocks, which these dicts tell of like others.
    """

    def __init__(self, block_size: int | None = None) -> None:
        self._block_size = block_size
        self._ranks: dict[int | None, _Rank] = {}

    def take(self, line: bytes) -> list[Report]:
        """What a line says. Raises EventDecodeError."""
        event = decode_line(line)
        if event is None:
            return []
        return self._ranks.setdefault(event.rank, _Rank(event.rank, self._block_size)).take(event)


class _Rank:
    def __init__(self, rank: int | None, block_size: int | None) -> None:
        self._rank, self._size = rank, block_size
        self._next: int | None = None
        self._windows: dict[int, int] = {}
        """Layer groups, or windows where these are not told, to numbers of groups."""
        self._widest = 0
        self._blocks: dict[int, dict[Hash, Block]] = {}

    def take(self, event: Event) -> list[Report]:
        reports: list[Report] = []
        events: list[VLLMEvent] = []
        number, expected = event.number, self._next
        if expected is not None and number != expected:
            self._blocks.clear()
            if number < expected:
                reports.append(Restarted(expected - 1, number))
            else:
                reason = "the engine did not keep them for long enough"
                reports.append(Missed(expected, number - 1, recovered=False, reason=reason))
                events.append(AllBlocksCleared())
        self._next = number + 1
        if event.data is not None:
            events += self._events(event, event.data)
        batch = VLLMBatch(0.0, tuple(events), self._rank)
        return [*reports, Received(number, "", batch, replayed=False)]

    def _events(self, event: Event, data: Data) -> Iterator[VLLMEvent]:
        key = event.window if event.group is None else event.group
        group = self._windows.setdefault(key, len(self._windows))
        self._widest = max(self._widest, event.window)
        window = event.window if event.window < self._widest else None
        blocks = self._blocks.setdefault(group, {})
        match data:
            case Stored():
                wanted = [b for b in data.blocks if self._size in (None, len(b.tokens))]
                above = None if data.parent_hash is None else hash_of(data.parent_hash)
                for block in wanted:
                    name = hash_of(block.block_hash)
                    blocks[name] = _known(block, above, (data.lora_id, data.lora_name))
                    above = name
                yield from _stores(group, window, [hash_of(block.block_hash) for block in wanted], blocks)
            case Removed():
                names = [*map(hash_of, data.block_hashes)]
                yield from _removals(group, [n for n in names if self._size is None or n in blocks], blocks)
            case Updated() if data.cache_level is not None:
                name, level = hash_of(data.block_hash), data.cache_level.new_value
                if self._size is not None and name not in blocks:
                    return
                before = blocks.get(name)
                yield BlockRemoved((name,), _medium(data.cache_level.old_value), group)
                blocks[name] = (before or Block(level, None, (), (), (None, None), None))._replace(
                    level=level
                )
                yield from _stores(group, window, [name], blocks)
            case Updated() | Created():
                pass


def _known(block: StoredBlock, parent: Hash | None, lora: tuple[int | None, str | None]) -> Block:
    ids = tuple([token.token_id for token in block.tokens if isinstance(token.token_id, int)])
    keys: list[Any] = [(item.hash, item.start_offset) for item in block.mm_keys]
    if any(token.token_extra_id for token in block.tokens):
        extra_ids = np.array([token.token_extra_id for token in block.tokens], "<u8")
        keys.append((hashlib.sha256(extra_ids.tobytes()).hexdigest(), 0))
    tokens = ids if len(ids) == len(block.tokens) else ()
    return Block(block.cache_level, parent, tokens, tuple(keys), lora, block.cache_salt)


def _stores(
    group: int, window: int | None, names: list[Hash], blocks: dict[Hash, Block]
) -> Iterator[BlockStored]:
    """Blocks in a row, those together that have one level and size."""
    for (level, size), part in groupby(names, lambda name: (blocks[name].level, len(blocks[name].tokens))):
        its = list(part)
        first = blocks[its[0]]
        keys = tuple([blocks[name].keys or None for name in its])
        yield BlockStored(
            block_hashes=tuple(its),
            parent_block_hash=first.parent,
            token_ids=tuple([token for name in its for token in blocks[name].tokens]),
            block_size=size,
            lora_id=first.lora[0],
            medium=_medium(level),
            lora_name=first.lora[1],
            extra_keys=keys if any(keys) else None,
            group_idx=group,
            kv_cache_spec_kind="full_attention" if window is None else "sliding_window",
            kv_cache_spec_sliding_window=window,
            cache_salt=first.salt,
        )


def _removals(group: int, names: Iterable[Hash], blocks: dict[Hash, Block]) -> Iterator[BlockRemoved]:
    """One for each level; what is not known was in the first one, if anywhere."""
    by_level: dict[int, list[Hash]] = {}
    for name in names:
        block = blocks.pop(name, None)
        by_level.setdefault(0 if block is None else block.level, []).append(name)
    for level, its in by_level.items():
        yield BlockRemoved(tuple(its), _medium(level), group)


def _medium(level: int) -> str:
    return MEDIA[level] if 0 <= level < len(MEDIA) else MEDIA[-1]

"""A router's view of one publisher: the places of blocks, folded from its messages.

As simple as possible, so that it can serve as a reference: it counts messages that a publisher should never send,
instead of interpreting them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from events.formats.vllm import AllBlocksCleared, BlockRemoved, BlockStored, Hash, Unknown, VLLMBatch
from events.subscribe.continuity import Missed, Received, Report, Restarted, Restated

GPU, HOST, STORAGE = 0, 1, 2
"""Levels of residency, from the fastest on."""
_LEVELS = {"GPU": GPU, "CPU": HOST, "CPU_PINNED": HOST, "CPU_TIER1": HOST}


class IndexedBlock(NamedTuple):
    """A resident block."""

    parent: Hash | None
    """The preceding block; None at the start of a prompt."""
    tokens: tuple[int | tuple[int, ...], ...]
    """Empty if the publisher did not give them, or not which belong to which block."""
    extra: tuple[Any, ...] = ()
    """Further contents of the block's hash, as published: adapter, salt, items; empty: tokens alone."""


class Index:
    """The blocks of one publisher."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], dict[Hash, IndexedBlock]] = {}
        """Blocks by (group, level), then by hash, in the order in which they came."""
        self.batches = 0
        self.events = 0
        self.unknown_events = 0
        self.orphans = 0
        """Stores with a parent that is resident nowhere in the group."""
        self.repeated_stores = 0
        """Blocks stored where they were resident already."""
        self.unknown_removals = 0
        """Blocks removed from where they were not resident."""
        self.missed_batches = 0
        """Lost batches: the blocks may be wrong since."""
        self.recovered_batches = 0
        self.restated = 0
        """Times that the publisher sent its whole state in place of missed batches."""
        self.restarts = 0

    def fold(self, report: Report) -> None:
        """Fold a subscriber's report."""
        if isinstance(report, Received):
            self.apply(report.batch)
        elif isinstance(report, Missed):
            count = report.last - report.first + 1
            if report.recovered:
                self.recovered_batches += count
            else:
                self.missed_batches += count
        elif isinstance(report, Restated):
            self.restated += 1
        else:
            assert isinstance(report, Restarted)
            self.restarts += 1
            self.blocks.clear()

    def apply(self, batch: VLLMBatch) -> None:
        """Fold one batch."""
        self.batches += 1
        self.events += len(batch.events)
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self.blocks.clear()
                case Unknown():
                    self.unknown_events += 1

    def resident(self, group: int = 0, level: int = GPU) -> set[Hash]:
        """Return the hashes of all blocks in a level of a group."""
        return set(self.blocks.get((group, level), ()))

    def count(self, level: int) -> int:
        """Return the number of blocks of all groups in a level."""
        return sum(len(blocks) for (_, its), blocks in self.blocks.items() if its == level)

    def _store(self, event: BlockStored) -> None:
        group = event.group_idx or 0
        parent = event.parent_block_hash
        levels = [self.blocks.get((group, level), ()) for level in (GPU, HOST, STORAGE)]
        # A sliding window does not need the blocks that it has passed, and need not keep them.
        slides = event.kv_cache_spec_kind == "sliding_window"
        if parent is not None and not slides and not any(parent in blocks for blocks in levels):
            self.orphans += 1
        blocks = self.blocks.setdefault((group, level_of(event.medium)), {})
        size, tokens = event.block_size, event.token_ids
        # With holes (sliding windows), or without tokens, the tokens of each block are unknown.
        aligned = len(tokens) == len(event.block_hashes) * size
        scoped = (event.lora_id, event.lora_name, event.cache_salt) != (None, None, None)
        extra = scoped or any(event.extra_keys or ())
        for number, name in enumerate(event.block_hashes):
            if name in blocks:
                self.repeated_stores += 1
            its_tokens = tokens[number * size : (number + 1) * size] if aligned else ()
            blocks[name] = IndexedBlock(parent, its_tokens, _extra(event, number) if extra else ())
            parent = name

    def _remove(self, event: BlockRemoved) -> None:
        blocks = self.blocks.get((event.group_idx or 0, level_of(event.medium)), {})
        for name in event.block_hashes:
            if blocks.pop(name, None) is None:
                self.unknown_removals += 1


def _extra(event: BlockStored, number: int) -> tuple[Any, ...]:
    keys = event.extra_keys[number] if event.extra_keys and number < len(event.extra_keys) else None
    adapter = event.lora_id if event.lora_name is None else event.lora_name
    said = [each for each in (adapter, event.cache_salt) if each is not None]
    return (*said, *(key for key in keys or () if key not in said)) if said or keys else ()


def level_of(medium: str | None) -> int:
    """Return the level of a medium's name; none is the GPU, an unknown one is storage."""
    return GPU if medium is None else _LEVELS.get(medium.upper(), STORAGE)

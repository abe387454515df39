"""What a log says of its blocks, one block at a time and in lists: what the metrics are compared with."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from typing import Any

from events import types as ev

LEVELS = ("primary", "secondary")


class NaiveMetrics:
    """Counts, and every single age."""

    def __init__(self) -> None:
        self.counts: Counter[Any] = Counter()
        self.ages: dict[Any, list[int]] = defaultdict(list)
        self.blocks: dict[tuple[int, int, int], tuple[int, int]] = {}
        """(group, level, slot) of a block of known age → when it was stored and last used."""
        self.copies: dict[int, tuple[str, int]] = {}

    def fold(self, batch: ev.EventBatch) -> None:
        for event in batch.events:
            self._one(event, batch.ts)

    def _one(self, event: Any, now: int) -> None:
        match event:
            case ev.CacheCreated():
                self.blocks.clear()
                self.copies.clear()
                self.sizes = [sum(pool.bytes_per_block for pool in group.pools) for group in event.groups]
            case ev.StateExported():
                self.blocks.clear()
                self.copies.clear()
            case ev.Gap():
                self.counts["lost"] += event.last_seq - event.first_seq + 1
                self.blocks.clear()
                self.copies.clear()
            case ev.SequenceAdded():
                below = max(event.reused_secondary)
                self.counts["requests"] += 1
                self.counts["prompt"] += event.num_tokens
                self.counts["reused"] += event.reused
                self.counts["reused", "secondary"] += below
                self.counts["reused", "partial"] += event.reused_partial
            case ev.SequenceRemoved():
                self.counts["finished"] += 1
            case ev.AdmissionRefused():
                self.counts["refused"] += 1
            case ev.BlocksAllocated():
                self.counts["allocated"] += len(array("i", event.slots))
            case ev.BlocksCopied():
                self.counts["copied"] += 1
            case ev.BlocksStored() | ev.BlocksFilled():
                for slot in array("i", event.slots):
                    self.counts["stored"] += 1
                    self.blocks[event.group, 0, slot] = (now, now)
            case ev.BlocksReused():
                for slot in array("i", event.slots):
                    key = (event.group, event.level, slot)
                    if key in self.blocks:
                        stored, used = self.blocks[key]
                        if not event.replaced:
                            self.ages["gap", LEVELS[event.level]].append(now - used)
                        self.blocks[key] = (stored, now)
            case ev.BlocksMoved():
                self._move(event, now)
            case ev.BlocksRemoved():
                for slot in array("i", event.slots):
                    self.counts["removed", LEVELS[event.level], str(event.why)] += 1
                    if (known := self.blocks.pop((event.group, event.level, slot), None)) is not None:
                        self.ages["lifetime", LEVELS[event.level]].append(now - known[0])
                        self.ages["idle", LEVELS[event.level]].append(now - known[1])
            case ev.TransferLanded():
                for transfer in array("q", event.transfers):
                    if transfer in self.copies:
                        why, since = self.copies.pop(transfer)
                        self.ages["copy", why].append(now - since)
            case ev.TransferFailed():
                for transfer in array("q", event.transfers):
                    self.copies.pop(transfer, None)
                    self.counts["failed"] += 1
            case ev.CacheCleared():
                for primary, secondary in event.removed:
                    self.counts["removed", "primary", "cleared"] += primary
                    self.counts["removed", "secondary", "cleared"] += secondary
                self.blocks.clear()
                self.copies.clear()

    def _move(self, event: ev.BlocksMoved, now: int) -> None:
        moved = zip(array("i", event.from_slots), array("i", event.to_slots), strict=True)
        for old, new in moved:
            known = self.blocks.pop((event.group, event.from_level, old), None)
            if known is not None:
                self.blocks[event.group, event.to_level, new] = known
                if event.why == "offload":
                    self.ages["idle", "primary"].append(now - known[1])
            if event.why == "recomputed":
                self.counts["recomputed"] += 1
            else:
                self.counts["moved", str(event.why)] += 1
                self.counts["bytes", str(event.why)] += self.sizes[event.group]
        if event.why != "recomputed":
            self.copies[event.transfer] = (str(event.why), now)

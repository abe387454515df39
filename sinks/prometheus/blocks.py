"""What events say about blocks, as numbers: a fold that knows of each slot when its block was stored and last reused.

Its memory is two times per slot. Where batches were lost, or an exported state came, the times of what lies there are
unknown, and such blocks are counted without their ages.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from events import types as ev
from events.packed import SLOT_BYTES
from events.structs import LEVEL_NAMES
from events.types import PRIMARY, SECONDARY, MoveReason
from sinks.histogram import SECONDS, Histogram

Slots = npt.NDArray[np.int32]
_UNKNOWN = 0


class _Times:
    """When the blocks of one window and level were stored and last used, in ns; 0 where that is unknown."""

    def __init__(self, size: int) -> None:
        self.stored, self.used = np.zeros(size, np.int64), np.zeros(size, np.int64)

    def forget(self) -> None:
        self.stored[:] = self.used[:] = _UNKNOWN


class BlockMetrics:
    """Counters and ages; written by the sink's thread, read by any."""

    def __init__(self) -> None:
        self.prompt_tokens = self.requests = self.refused = self.finished = self.lost_batches = 0
        self.reused_tokens: Counter[str] = Counter()
        """By level, or ``partial``."""
        self.stored = self.allocated = self.copied = self.recomputed = 0
        self.removed: Counter[tuple[str, str]] = Counter()
        """By level and reason."""
        self.moved: Counter[str] = Counter()
        """Blocks by direction: ``offload``, ``onboard``."""
        self.moved_bytes: Counter[str] = Counter()
        self.failed_copies = 0
        self.idle_before_evict = {name: Histogram(SECONDS) for name in LEVEL_NAMES}
        self.lifetime = {name: Histogram(SECONDS) for name in LEVEL_NAMES}
        self.reuse_gap = {name: Histogram(SECONDS) for name in LEVEL_NAMES}
        self.copy_seconds = {name: Histogram(SECONDS) for name in ("offload", "onboard")}
        self._now = 0
        self._times: list[tuple[_Times, _Times]] = []
        self._block_bytes: list[int] = []
        self._transfers: dict[int, tuple[str, int]] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.CacheCreated: self._create,
            ev.StateExported: self._export,
            ev.Gap: self._lose,
            ev.SequenceAdded: self._admit,
            ev.SequenceRemoved: self._finish,
            ev.AdmissionRefused: self._refuse,
            ev.BlocksAllocated: self._allocate,
            ev.BlocksCopied: self._copy,
            ev.BlocksStored: self._store,
            ev.BlocksFilled: self._store,
            ev.BlocksReused: self._reuse,
            ev.BlocksMoved: self._move,
            ev.BlocksRemoved: self._remove,
            ev.TransferLanded: self._land,
            ev.TransferFailed: self._fail,
            ev.CacheCleared: self._clear,
        }

    def fold(self, batch: ev.EventBatch) -> None:
        """Count what one batch says."""
        self._now = batch.ts
        for event in batch.events:
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event)

    # -- the cache

    def _create(self, event: ev.CacheCreated) -> None:
        self._times = [
            (_Times(group.num_blocks[PRIMARY]), _Times(group.num_blocks[SECONDARY])) for group in event.groups
        ]
        self._block_bytes = [sum(pool.bytes_per_block for pool in group.pools) for group in event.groups]
        self._transfers.clear()

    def _export(self, event: ev.StateExported) -> None:
        self._forget()

    def _lose(self, event: ev.Gap) -> None:
        self.lost_batches += event.last_seq - event.first_seq + 1
        self._forget()

    def _forget(self) -> None:
        self._transfers.clear()
        for levels in self._times:
            for times in levels:
                times.forget()

    def _clear(self, event: ev.CacheCleared) -> None:
        for levels in event.removed:
            for level, blocks in zip(LEVEL_NAMES, levels, strict=True):
                self.removed[level, "cleared"] += blocks
        self._forget()

    # -- requests

    def _admit(self, event: ev.SequenceAdded) -> None:
        secondary = max(event.reused_secondary)
        self.requests += 1
        self.prompt_tokens += event.num_tokens
        # Where windows differ, what one of them has to bring back counts as reused from secondary.
        self.reused_tokens["primary"] += event.reused - event.reused_partial - secondary
        self.reused_tokens["secondary"] += secondary
        self.reused_tokens["partial"] += event.reused_partial

    def _finish(self, event: ev.SequenceRemoved) -> None:
        self.finished += 1

    def _refuse(self, event: ev.AdmissionRefused) -> None:
        self.refused += 1

    # -- blocks

    def _allocate(self, event: ev.BlocksAllocated) -> None:
        self.allocated += len(event.slots) // SLOT_BYTES

    def _copy(self, event: ev.BlocksCopied) -> None:
        self.copied += 1

    def _store(self, event: ev.BlocksStored | ev.BlocksFilled) -> None:
        slots = np.frombuffer(event.slots, np.int32)
        self.stored += len(slots)
        times = self._times[event.group][PRIMARY]
        times.stored[slots] = times.used[slots] = self._now

    def _reuse(self, event: ev.BlocksReused) -> None:
        slots, times = np.frombuffer(event.slots, np.int32), self._times[event.group][event.level]
        if not event.replaced:  # else a block was computed twice, and nothing saved
            self._observe(self.reuse_gap[LEVEL_NAMES[event.level]], times.used[slots])
        times.used[slots] = np.where(times.used[slots] == _UNKNOWN, _UNKNOWN, self._now)

    def _move(self, event: ev.BlocksMoved) -> None:
        old, new = np.frombuffer(event.from_slots, np.int32), np.frombuffer(event.to_slots, np.int32)
        source = self._times[event.group][event.from_level]
        target = self._times[event.group][event.to_level]
        if event.why == MoveReason.OFFLOAD:
            self._observe(self.idle_before_evict["primary"], source.used[old])
        target.stored[new], target.used[new] = source.stored[old], source.used[old]
        source.stored[old] = source.used[old] = _UNKNOWN
        if event.why == MoveReason.RECOMPUTED:
            self.recomputed += len(new)
            return
        self.moved[event.why] += len(new)
        self.moved_bytes[event.why] += len(new) * self._block_bytes[event.group]
        self._transfers[event.transfer] = (str(event.why), self._now)

    def _remove(self, event: ev.BlocksRemoved) -> None:
        level, slots = LEVEL_NAMES[event.level], np.frombuffer(event.slots, np.int32)
        times = self._times[event.group][event.level]
        self.removed[level, str(event.why)] += len(slots)
        self._observe(self.idle_before_evict[level], times.used[slots])
        self._observe(self.lifetime[level], times.stored[slots])
        times.stored[slots] = times.used[slots] = _UNKNOWN

    def _observe(self, histogram: Histogram, since: npt.NDArray[np.int64]) -> None:
        known = since[since != _UNKNOWN]
        if len(known):
            histogram.observe(np.maximum(self._now - known, 0))

    # -- copies

    def _land(self, event: ev.TransferLanded) -> None:
        for transfer in array("q", event.transfers):
            why, since = self._transfers.pop(transfer, ("", 0))
            if why:
                self.copy_seconds[why].observe(np.array([max(self._now - since, 0)], np.int64))

    def _fail(self, event: ev.TransferFailed) -> None:
        for transfer in array("q", event.transfers):
            self._transfers.pop(transfer, None)
            self.failed_copies += 1

"""Counts what happened by listening to the bus, and reads gauges at each flush.

The engine's thread counts; other threads read what it has published with the last flush.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from events import types as ev
from events.bus import EventBus
from events.packed import SLOT_BYTES
from events.types import AllocateReason, MoveReason
from kvcache.fold.state import CacheState
from kvcache.record.own_tokens import OwnTokens
from kvcache.stats import Stats

_MOVED = {
    MoveReason.OFFLOAD: "blocks_offloaded",
    MoveReason.ONBOARD: "blocks_onboarded",
    MoveReason.RECOMPUTED: "blocks_recomputed",
}
_COLUMNS: dict[type[ev.Event], tuple[str, str]] = {
    ev.BlocksReused: ("blocks_deduplicated", "replaced"),
    ev.BlocksStored: ("blocks_stored", "slots"),
    ev.BlocksFilled: ("blocks_stored", "slots"),
    ev.BlocksUpdated: ("blocks_updated", "slots"),
    ev.BlocksRemoved: ("blocks_removed", "slots"),
}
"""What counts the entries of a column."""


class StatsCounter:
    """Counts events."""

    def __init__(self, bus: EventBus) -> None:
        self._counts: dict[str, Any] = asdict(Stats())
        self._published = self._counts.copy()
        self._own = OwnTokens()
        bus.subscribe(self._on_created, ev.CacheCreated)
        bus.subscribe(self._on_added, ev.SequenceAdded)
        bus.subscribe(self._own.remove, ev.SequenceRemoved)
        bus.subscribe(self._own.begin_again, ev.TransferFailed)
        bus.subscribe(self._on_allocated, ev.BlocksAllocated)
        bus.subscribe(self._on_copied, ev.BlocksCopied)
        bus.subscribe(self._on_moved, ev.BlocksMoved)
        bus.subscribe(self._on_cleared, ev.CacheCleared)
        for kind, (counter, column) in _COLUMNS.items():
            bus.subscribe(self._counting(counter, attrgetter(column)), kind)

    def publish(self, state: CacheState, num_events: int) -> None:
        """Make the totals of the flushed events visible to other threads."""
        counts = self._counts
        counts["events"] += num_events
        counts["batches"] += 1
        counts["sequences"] = len(state.sequences)
        primary, secondary = state.groups[0].levels
        blank, blank_below = len(primary.blank), len(secondary.blank)
        idle, idle_below = primary.unreferenced, secondary.unreferenced
        if len(state.groups) > 1:
            for group in state.groups[1:]:
                primary, secondary = group.levels
                blank, blank_below = blank + len(primary.blank), blank_below + len(secondary.blank)
                idle, idle_below = idle + primary.unreferenced, idle_below + secondary.unreferenced
        counts["blocks_blank"], counts["blocks_unreferenced"] = (blank, blank_below), (idle, idle_below)
        # Copied only, since this runs at every step; a reader makes a `Stats` of it.
        self._published = counts.copy()

    def read(self) -> Stats:
        """The totals and gauges of the last flush; from any thread."""
        return Stats(**self._published)

    def _on_created(self, event: ev.CacheCreated) -> None:
        primary, secondary = zip(*(group.num_blocks for group in event.groups), strict=True)
        self._counts["blocks_total"] = (sum(primary), sum(secondary))
        self._own.clear()

    def _on_added(self, event: ev.SequenceAdded) -> None:
        counts = self._counts
        counts["requests"] += 1
        counts["prompt_tokens"] += event.num_tokens
        # Where the windows differ, what one of them has to bring back is reused from secondary.
        secondary = max(event.reused_secondary)
        counts["reused_tokens_primary"] += event.reused - event.reused_partial - secondary
        counts["reused_tokens_secondary"] += secondary
        counts["reused_tokens_partial"] += event.reused_partial
        counts["reused_tokens_own"] += self._own.admit(event)

    def _counting(self, counter: str, slots_of: Callable[[ev.Event], bytes]) -> Callable[[ev.Event], None]:
        counts = self._counts

        def count(event: ev.Event) -> None:
            counts[counter] += len(slots_of(event)) // SLOT_BYTES

        return count

    def _on_allocated(self, event: ev.BlocksAllocated) -> None:
        blocks = len(event.slots) // SLOT_BYTES
        self._counts["blocks_allocated"] += blocks
        if event.why == AllocateReason.DECODE:
            self._counts["blocks_allocated_decode"] += blocks

    def _on_copied(self, event: ev.BlocksCopied) -> None:
        self._counts["blocks_copied"] += 1

    def _on_moved(self, event: ev.BlocksMoved) -> None:
        self._counts[_MOVED[event.why]] += len(event.from_slots) // SLOT_BYTES

    def _on_cleared(self, event: ev.CacheCleared) -> None:
        self._counts["blocks_removed"] += sum(map(sum, event.removed))

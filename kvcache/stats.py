"""Counters of what happened, kept by listening to the bus, and gauges read at each flush.

The engine's thread counts; other threads read an immutable `Stats` that is swapped at flush.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from events import types as ev
from events.bus import EventBus
from events.packed import SLOT_BYTES
from events.types import AllocateReason, MoveReason
from kvcache.fold.state import CacheState
from kvcache.record.own_tokens import OwnTokens

_Gauges = tuple[int, int, int, int, int]
"""Blank slots, primary and secondary; unreferenced ones; sequences."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since the manager started, and the state at the last flush."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens_primary: int = 0
    reused_tokens_secondary: int = 0
    reused_tokens_partial: int = 0
    reused_tokens_own: int = 0
    """Of the reused ones, those that a request which was removed and added again had computed itself before."""
    blocks_allocated: int = 0
    blocks_allocated_decode: int = 0
    blocks_stored: int = 0
    blocks_updated: int = 0
    """Given another priority."""
    blocks_removed: int = 0
    blocks_offloaded: int = 0
    blocks_onboarded: int = 0
    blocks_recomputed: int = 0
    """Stored again while they lay in secondary."""
    blocks_deduplicated: int = 0
    """Computed by two sequences at a time; one copy was given back."""
    blocks_copied: int = 0
    events: int = 0
    batches: int = 0
    blocks_total: tuple[int, int] = (0, 0)
    """Slots per level; blank, unreferenced and held ones add up to them."""
    blocks_blank: tuple[int, int] = (0, 0)
    blocks_unreferenced: tuple[int, int] = (0, 0)
    """Cached blocks that no sequence holds: reusable, and evicted when room is needed."""
    sequences: int = 0

    @property
    def blocks_free(self) -> int:
        """Primary slots that can be had."""
        return self.blocks_blank[0] + self.blocks_unreferenced[0]

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that needed no computing, own ones included."""
        return self.reused_tokens_primary + self.reused_tokens_secondary + self.reused_tokens_partial

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were reused, own ones left out of both."""
        others = self.prompt_tokens - self.reused_tokens_own
        return (self.reused_tokens - self.reused_tokens_own) / others if others else 0.0


_MOVED = {
    MoveReason.OFFLOAD: "blocks_offloaded",
    MoveReason.ONBOARD: "blocks_onboarded",
    MoveReason.RECOMPUTED: "blocks_recomputed",
}
_COUNTED = tuple(field.name for field in fields(Stats) if field.type == "int" and field.name != "sequences")


class StatsCounter:
    """Counts events."""

    def __init__(self, bus: EventBus) -> None:
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._published: tuple[dict[str, int], _Gauges] = (self._counts.copy(), (0, 0, 0, 0, 0))
        self._total = (0, 0)
        self._own = OwnTokens()
        bus.subscribe(self._on_created, ev.CacheCreated)
        bus.subscribe(self._on_added, ev.SequenceAdded)
        bus.subscribe(self._own.remove, ev.SequenceRemoved)
        bus.subscribe(self._own.begin_again, ev.TransferFailed)
        bus.subscribe(self._on_allocated, ev.BlocksAllocated)
        bus.subscribe(self._on_reused, ev.BlocksReused)
        bus.subscribe(self._on_copied, ev.BlocksCopied)
        bus.subscribe(self._on_stored, ev.BlocksStored)
        bus.subscribe(self._on_stored, ev.BlocksFilled)
        bus.subscribe(self._on_updated, ev.BlocksUpdated)
        bus.subscribe(self._on_removed, ev.BlocksRemoved)
        bus.subscribe(self._on_moved, ev.BlocksMoved)
        bus.subscribe(self._on_cleared, ev.CacheCleared)

    def publish(self, state: CacheState, num_events: int) -> None:
        """Make the totals of the flushed events visible to other threads."""
        counts = self._counts
        counts["events"] += num_events
        counts["batches"] += 1
        primary, secondary = state.groups[0].levels
        blank, unreferenced = len(primary.free), primary.unreferenced
        # Copied only, since this runs at every step; a reader makes a `Stats` of it.
        self._published = (
            counts.copy(),
            (blank, len(secondary.free), unreferenced, secondary.unreferenced, len(state.sequences)),
        )

    def read(self) -> Stats:
        """The totals and gauges of the last flush; from any thread."""
        counts, (blank, blank_below, unreferenced, unreferenced_below, sequences) = self._published
        gauges: dict[str, Any] = {
            "blocks_total": self._total,
            "blocks_blank": (blank, blank_below),
            "blocks_unreferenced": (unreferenced, unreferenced_below),
            "sequences": sequences,
        }
        return Stats(**{**counts, **gauges})

    def _on_created(self, event: ev.CacheCreated) -> None:
        self._total = event.groups[0].num_blocks
        self._own.clear()

    def _on_added(self, event: ev.SequenceAdded) -> None:
        counts = self._counts
        counts["requests"] += 1
        counts["prompt_tokens"] += event.num_tokens
        counts["reused_tokens_primary"] += min(event.reused_primary)
        counts["reused_tokens_secondary"] += min(event.reused_secondary)
        counts["reused_tokens_partial"] += event.reused_partial
        counts["reused_tokens_own"] += self._own.admit(event)

    def _on_allocated(self, event: ev.BlocksAllocated) -> None:
        blocks = len(event.slots) // SLOT_BYTES
        self._counts["blocks_allocated"] += blocks
        if event.why == AllocateReason.DECODE:
            self._counts["blocks_allocated_decode"] += blocks

    def _on_reused(self, event: ev.BlocksReused) -> None:
        self._counts["blocks_deduplicated"] += len(event.replaced) // SLOT_BYTES

    def _on_copied(self, event: ev.BlocksCopied) -> None:
        self._counts["blocks_copied"] += 1

    def _on_stored(self, event: ev.BlocksStored | ev.BlocksFilled) -> None:
        self._counts["blocks_stored"] += len(event.slots) // SLOT_BYTES

    def _on_updated(self, event: ev.BlocksUpdated) -> None:
        self._counts["blocks_updated"] += len(event.slots) // SLOT_BYTES

    def _on_removed(self, event: ev.BlocksRemoved) -> None:
        self._counts["blocks_removed"] += len(event.slots) // SLOT_BYTES

    def _on_moved(self, event: ev.BlocksMoved) -> None:
        self._counts[_MOVED[event.why]] += len(event.from_slots) // SLOT_BYTES

    def _on_cleared(self, event: ev.CacheCleared) -> None:
        self._counts["blocks_removed"] += sum(event.removed)

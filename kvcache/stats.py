"""Counters of what happened, kept by listening to the bus, and gauges read at each flush.

The engine's thread counts; other threads read an immutable `Stats` that is swapped at flush.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from events import types as ev
from events.bus import EventBus
from events.types import AllocateReason, MoveReason
from kvcache.state import CacheState


_Gauges = tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since the manager started, and the state at the last flush."""

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens_primary: int = 0
    reused_tokens_secondary: int = 0
    reused_tokens_partial: int = 0
    blocks_allocated: int = 0
    blocks_allocated_decode: int = 0
    blocks_stored: int = 0
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
        """Prompt tokens that needed no computing."""
        return self.reused_tokens_primary + self.reused_tokens_secondary + self.reused_tokens_partial

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were reused."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class StatsCounter:
    """Counts events."""

    def __init__(self, bus: EventBus) -> None:
        self._counts: dict[str, int] = {}
        self._published: tuple[dict[str, int], _Gauges] = ({}, ((0, 0), (0, 0), (0, 0), 0))
        bus.subscribe(self._on_added, ev.SequenceAdded)
        bus.subscribe(self._on_allocated, ev.BlocksAllocated)
        bus.subscribe(self._on_reused, ev.BlocksReused)
        bus.subscribe(self._on_copied, ev.BlocksCopied)
        bus.subscribe(self._on_stored, ev.BlocksStored)
        bus.subscribe(self._on_removed, ev.BlocksRemoved)
        bus.subscribe(self._on_moved, ev.BlocksMoved)
        bus.subscribe(self._on_cleared, ev.CacheCleared)

    def add(self, name: str, count: int) -> None:
        """Raise a counter."""
        self._counts[name] = self._counts.get(name, 0) + count

    def publish(self, state: CacheState, num_events: int) -> None:
        """Make the totals of the flushed events visible to other threads."""
        self.add("events", num_events)
        self.add("batches", 1)
        levels = state.groups[0].levels
        gauges = (
            (levels[0].size, levels[1].size),
            (len(levels[0].free), len(levels[1].free)),
            (levels[0].unreferenced, levels[1].unreferenced),
            len(state.sequences),
        )
        self._published = (self._counts.copy(), gauges)

    def read(self) -> Stats:
        """The totals and gauges of the last flush; from any thread."""
        counts, (total, blank, unreferenced, sequences) = self._published
        gauges = Stats(
            blocks_total=total, blocks_blank=blank, blocks_unreferenced=unreferenced, sequences=sequences
        )
        return replace(gauges, **counts)

    def _on_added(self, event: ev.SequenceAdded) -> None:
        self.add("requests", 1)
        self.add("prompt_tokens", event.num_tokens)
        self.add("reused_tokens_primary", min(event.reused_primary, default=0))
        self.add("reused_tokens_secondary", min(event.reused_secondary, default=0))
        self.add("reused_tokens_partial", event.reused_partial)

    def _on_allocated(self, event: ev.BlocksAllocated) -> None:
        self.add("blocks_allocated", len(event.slots) // 4)
        if event.why == AllocateReason.DECODE:
            self.add("blocks_allocated_decode", len(event.slots) // 4)

    def _on_reused(self, event: ev.BlocksReused) -> None:
        self.add("blocks_deduplicated", len(event.replaced) // 4)

    def _on_copied(self, event: ev.BlocksCopied) -> None:
        self.add("blocks_copied", 1)

    def _on_stored(self, event: ev.BlocksStored) -> None:
        self.add("blocks_stored", len(event.slots) // 4)

    def _on_removed(self, event: ev.BlocksRemoved) -> None:
        self.add("blocks_removed", len(event.slots) // 4)

    def _on_moved(self, event: ev.BlocksMoved) -> None:
        names = {
            MoveReason.OFFLOAD: "blocks_offloaded",
            MoveReason.ONBOARD: "blocks_onboarded",
            MoveReason.RECOMPUTED: "blocks_recomputed",
        }
        self.add(names[event.why], len(event.from_slots) // 4)

    def _on_cleared(self, event: ev.CacheCleared) -> None:
        self.add("blocks_removed", sum(event.removed))

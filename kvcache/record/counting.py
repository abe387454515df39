"""Counts what happened by listening to the bus, and reads gauges at each flush.

The engine's thread counts; other threads read what it has published with the last flush.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any

from events import types as ev
from events.bus import EventBus
from events.packed import SLOT_BYTES
from events.types import PRIMARY, SECONDARY, AllocateReason, MoveReason, RemoveReason
from kvcache.fold.state import CacheState
from kvcache.record.first_uses import FirstUses
from kvcache.record.own_tokens import OwnTokens
from kvcache.stats import BlockStats, Stats

_MOVED = {
    MoveReason.OFFLOAD: "blocks_offloaded",
    MoveReason.ONBOARD: "blocks_onboarded",
    MoveReason.RECOMPUTED: "blocks_recomputed",
}
_MOVED_BYTES = {MoveReason.OFFLOAD: "bytes_offloaded", MoveReason.ONBOARD: "bytes_onboarded"}
_COLUMNS: dict[type[ev.Event], tuple[str, str]] = {
    ev.BlocksReused: ("blocks_deduplicated", "replaced"),
    ev.BlocksStored: ("blocks_stored", "slots"),
    ev.BlocksFilled: ("blocks_stored", "slots"),
    ev.BlocksUpdated: ("blocks_updated", "slots"),
}
"""What counts the entries of a column."""
_OF_BLOCKS = tuple(each.name for each in fields(BlockStats))
_NONE = (0, 0)


class StatsCounter:
    """Counts events."""

    def __init__(self, bus: EventBus) -> None:
        zeros = asdict(Stats())
        self._counts: dict[str, Any] = {name: zeros[name] for name in zeros if name not in _OF_BLOCKS}
        del self._counts["windows"]
        self._by_window: dict[int, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        """The counts of each group's window. A window that a later cache of the log does not have keeps its own."""
        self._block_bytes: list[int] = []
        self._tokens_per_block = 1
        self._first_uses = FirstUses(())
        self._published: tuple[dict[str, Any], dict[int, dict[str, Any]]] = (self._counts.copy(), {})
        self._own = OwnTokens()
        bus.subscribe(self._on_created, ev.CacheCreated)
        bus.subscribe(self._on_added, ev.SequenceAdded)
        bus.subscribe(self._own.remove, ev.SequenceRemoved)
        bus.subscribe(self._own.begin_again, ev.TransferFailed)
        bus.subscribe(self._on_allocated, ev.BlocksAllocated)
        bus.subscribe(self._on_copied, ev.BlocksCopied)
        bus.subscribe(self._on_moved, ev.BlocksMoved)
        bus.subscribe(self._on_removed, ev.BlocksRemoved)
        bus.subscribe(self._on_cleared, ev.CacheCleared)
        for kind, (counter, column) in _COLUMNS.items():
            bus.subscribe(self._counting(counter, attrgetter(column)), kind)

    def publish(self, state: CacheState, num_events: int) -> None:
        """Make the totals of the flushed events visible to other threads."""
        counts = self._counts
        counts["events"] += num_events
        counts["batches"] += 1
        counts["sequences"] = len(state.sequences)
        for counted, group in zip(self._groups, state.groups, strict=False):
            primary, secondary = group.levels
            counted["blocks_blank"] = (len(primary.blank), len(secondary.blank))
            counted["blocks_unreferenced"] = (primary.unreferenced, secondary.unreferenced)
        # Copied only, since this runs at every step; a reader makes a `Stats` of it.
        self._published = (
            counts.copy(),
            {window: counted.copy() for window, counted in self._by_window.items()},
        )

    def read(self) -> Stats:
        """The totals and gauges of the last flush; from any thread."""
        counts, windows = self._published
        totals = {name: _total([counted[name] for counted in windows.values()]) for name in _OF_BLOCKS}
        if not windows:
            totals = {}
        return Stats(
            **counts,
            **totals,
            windows={window: BlockStats(**counted) for window, counted in windows.items()},
        )

    def _on_created(self, event: ev.CacheCreated) -> None:
        for counted in self._by_window.values():
            counted["blocks_total"] = counted["blocks_blank"] = counted["blocks_unreferenced"] = _NONE
        for group in event.groups:
            counted = self._by_window.setdefault(group.window, asdict(BlockStats()))
            counted["blocks_total"] = tuple(group.num_blocks)
        self._groups[:] = [self._by_window[group.window] for group in event.groups]
        self._block_bytes = [sum(pool.bytes_per_block for pool in group.pools) for group in event.groups]
        self._tokens_per_block = event.tokens_per_block
        self._first_uses = FirstUses(group.num_blocks[PRIMARY] for group in event.groups)
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
        for counted, reused in zip(self._groups, reused_blocks(event, self._tokens_per_block), strict=False):
            full, partial, missed = reused
            counted["blocks_reused_full"] += full
            counted["blocks_reused_partial"] += partial
            counted["blocks_missed"] += missed

    def _counting(self, counter: str, slots_of: Callable[[Any], bytes]) -> Callable[[Any], None]:
        groups = self._groups

        def count(event: Any) -> None:
            groups[event.group][counter] += len(slots_of(event)) // SLOT_BYTES

        return count

    def _on_allocated(self, event: ev.BlocksAllocated) -> None:
        counted, blocks = self._groups[event.group], len(event.slots) // SLOT_BYTES
        counted["blocks_allocated"] += blocks
        if event.why == AllocateReason.DECODE:
            counted["blocks_allocated_decode"] += blocks
        if self._first_uses.left[event.group]:
            counted["blocks_allocated_new"] += sum(self._first_uses.take(event.group, event.slots))

    def _on_copied(self, event: ev.BlocksCopied) -> None:
        counted = self._groups[event.group]
        counted["blocks_copied"] += 1
        if event.source_level != PRIMARY or event.source != event.target:
            size = self._tokens_per_block
            counted["bytes_copied"] += self._block_bytes[event.group] * event.num_tokens // size

    def _on_moved(self, event: ev.BlocksMoved) -> None:
        counted, blocks = self._groups[event.group], len(event.from_slots) // SLOT_BYTES
        counted[_MOVED[event.why]] += blocks
        if event.why in _MOVED_BYTES:
            counted[_MOVED_BYTES[event.why]] += blocks * self._block_bytes[event.group]
        if event.to_level == PRIMARY:
            self._first_uses.take(event.group, event.to_slots)

    def _on_removed(self, event: ev.BlocksRemoved) -> None:
        counted, blocks = self._groups[event.group], len(event.slots) // SLOT_BYTES
        counted["blocks_removed"] += blocks
        if event.level == SECONDARY and event.why != RemoveReason.SUPERSEDED:
            counted["blocks_dropped"] += blocks

    def _on_cleared(self, event: ev.CacheCleared) -> None:
        for counted, removed in zip(self._groups, event.removed, strict=True):
            counted["blocks_removed"] += sum(removed)


def reused_blocks(event: ev.SequenceAdded, tokens_per_block: int) -> list[tuple[int, int, int]]:
    """Blocks of a prompt, per group: reused in full, in part, and missed."""
    blocks, partial = -(-event.num_tokens // tokens_per_block), int(event.reused_partial > 0)
    missed = blocks - event.reused // tokens_per_block - partial
    return [
        ((primary + secondary) // tokens_per_block, partial, missed)
        for primary, secondary in zip(event.reused_primary, event.reused_secondary, strict=True)
    ]


def _total(values: list[Any]) -> Any:
    """The sum over windows: of numbers, or of pairs of them."""
    if values and isinstance(values[0], tuple):
        return tuple(map(sum, zip(*values, strict=True)))
    return sum(values)

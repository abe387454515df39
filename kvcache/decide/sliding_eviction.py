"""Making room in a sliding window: any block that no sequence holds can go, and takes nothing with it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection

from events.ids import Handle, LevelIndex
from events.types import PRIMARY, SECONDARY, BlocksMoved, BlocksRemoved, Event, MoveReason, RemoveReason
from kvcache.decide.release_order import ReleaseOrder
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.state import CacheState


class SlidingEvictor:
    """Decides what one sliding window loses. Reads state, emits events."""

    def __init__(
        self, state: CacheState, group: SlidingGroup, emit: Callable[[Event], None], offload_min_priority: int
    ) -> None:
        self._state, self._group, self._emit = state, group, emit
        self.order = ReleaseOrder(group)
        group.watcher = self.order
        self._offload_min_priority = offload_min_priority
        self._offloads = group.levels[SECONDARY].size > 0

    def free_up(self, needed: int, handle: Handle | None, spares: Collection[int] = ()) -> None:
        """Evict until `needed` primary slots are blank; the secondary slots in `spares` keep their blocks."""
        short = needed - len(self._group.levels[PRIMARY].blank)
        if short <= 0:
            return
        victims, priorities = self.order.take(PRIMARY, short), self._group.priorities
        kept = len(victims)
        if self._offloads:
            lowest = self._offload_min_priority
            kept = next((n for n, place in enumerate(victims) if priorities[place] >= lowest), kept)
        if kept:
            self.remove(victims[:kept], RemoveReason.CAPACITY, handle)
        if kept < len(victims):
            spared = self._group.places(SECONDARY, array("i", spares)) if spares else ()
            self._offload_or_drop(victims[kept:], handle, spared)

    def _offload_or_drop(self, victims: array[int], handle: Handle | None, spares: Collection[int]) -> None:
        """Move blocks to secondary as far as it has room, or has something lower in the same order."""
        secondary, order = self._group.levels[SECONDARY], self.order
        while victims:
            room = len(secondary.blank)
            if not room:
                lower = order.take(SECONDARY, len(victims), order.key(victims[0]), spares)
                room = len(lower)
                if lower:
                    self.remove(lower, RemoveReason.CAPACITY, handle)
            if room:
                self._offload(victims[:room], handle)
            else:
                lowest = order.lowest(SECONDARY, spares)
                higher = (
                    n for n, place in enumerate(victims) if lowest is not None and order.key(place) > lowest
                )
                room = next(higher, len(victims))
                self.remove(victims[:room], RemoveReason.CAPACITY, handle)
            victims = victims[room:]

    def _offload(self, places: array[int], handle: Handle | None) -> None:
        to_slots = self._group.levels[SECONDARY].peek(len(places))
        self._emit(
            BlocksMoved(
                group=self._group.index,
                names=self._group.names_of(places),
                from_level=PRIMARY,
                from_slots=places.tobytes(),
                to_level=SECONDARY,
                to_slots=to_slots.tobytes(),
                why=MoveReason.OFFLOAD,
                transfer=self._state.next_transfer,
                handle=handle,
            )
        )

    def supersede(self, places: array[int], handle: Handle | None) -> None:
        """Drop shorter blocks, at whatever levels they lie, that a stored one makes useless."""
        for level in (PRIMARY, SECONDARY):
            part = array("i", [place for place in places if self._group.slot_of(place)[0] == level])
            if part:
                self.remove(part, RemoveReason.SUPERSEDED, handle)

    def remove(self, places: array[int], why: RemoveReason, handle: Handle | None) -> None:
        """Drop blocks of one level."""
        level = self._group.slot_of(places[0])[0]
        begin = self._group.levels[PRIMARY].size if level else 0
        self._emit(
            BlocksRemoved(
                group=self._group.index,
                level=LevelIndex(level),
                slots=array("i", [place - begin for place in places]).tobytes()
                if begin
                else places.tobytes(),
                names=self._group.names_of(places),
                why=why,
                handle=handle,
            )
        )

"""Making room in a sliding window: any block that no sequence holds can go, and takes nothing with it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection

from events.ids import Handle, LevelIndex
from events.packed import names_of_keys
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
        primary = self._group.levels[PRIMARY]
        spared = self._group.places(SECONDARY, array("i", spares)) if spares else ()
        if not self._offloads:
            short = needed - len(primary.blank)
            if short > 0:
                self.remove(self.order.take(PRIMARY, short), RemoveReason.CAPACITY, handle)
            return
        while (short := needed - len(primary.blank)) > 0:
            victims = self.order.next(PRIMARY, short)
            assert victims, "counted before"
            room = self._room_in_secondary(victims, handle, spared)
            if room:
                self._offload(victims[:room], handle)
            else:
                self.remove(victims, RemoveReason.CAPACITY, handle)

    def _room_in_secondary(self, victims: array[int], handle: Handle | None, spares: Collection[int]) -> int:
        """How many of these blocks secondary takes now, after evicting what is lower in order there."""
        secondary, key = self._group.levels[SECONDARY], self.order.key
        if self._group.priorities[victims[0]] < self._offload_min_priority:
            return 0
        if not secondary.blank:
            lower = self.order.next(SECONDARY, len(victims), spares)
            if not lower or key(lower[0]) >= key(victims[0]):
                return 0
            # Of one release, one after the other: a deeper one may not be lower than the first victim any more.
            together = key(lower[0])[:2] == key(victims[0])[:2]
            self.remove(lower[:1] if together else lower, RemoveReason.CAPACITY, handle)
        return len(secondary.blank)

    def _offload(self, places: array[int], handle: Handle | None) -> None:
        to_slots = self._group.levels[SECONDARY].peek(len(places))
        self._emit(
            BlocksMoved(
                group=self._group.index,
                names=self._names(places),
                from_level=PRIMARY,
                from_slots=places.tobytes(),
                to_level=SECONDARY,
                to_slots=to_slots.tobytes(),
                why=MoveReason.OFFLOAD,
                transfer=self._state.next_transfer,
                handle=handle,
            )
        )

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
                names=self._names(places),
                why=why,
                handle=handle,
            )
        )

    def _names(self, places: array[int]) -> bytes:
        return names_of_keys(self._group.keys_of(places), self._group.tree.key_bytes)

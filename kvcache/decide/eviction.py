"""Making room in one window: who goes next, and whether to secondary or for good.

The victims are the first in an `EvictionOrder`. Blocks go from primary to secondary while
secondary has room or holds something lower in the same order; otherwise they are dropped, after what hangs behind.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection

import numpy as np

from events.ids import Handle
from events.packed import NAME_BYTES, names_between
from events.types import PRIMARY, SECONDARY, BlocksMoved, BlocksRemoved, Event, MoveReason, RemoveReason
from kvcache.decide.eviction_order import EvictionOrder
from kvcache.fold.group_state import GroupState
from kvcache.fold.prefix_tree import Run, runs_below
from kvcache.fold.slots import last_reversed
from kvcache.fold.state import CacheState

_FEW = 8
"""Up to so many names a loop is faster than numpy."""


class Evictor:
    """Decides what one window loses. Reads state, emits events."""

    def __init__(
        self,
        state: CacheState,
        group: GroupState,
        emit: Callable[[Event], None],
        offload_min_priority: int,
        order: type[EvictionOrder],
    ) -> None:
        self._state = state
        self.index = group.index
        self.group = group
        self.order = order(self.group)
        self.group.watcher = self.order
        self._emit = emit
        self._offload_min_priority = offload_min_priority
        self._key_bytes = state.hashing.key_bytes
        self._offloads = self.group.levels[SECONDARY].size > 0

    def free_up(self, needed: int, handle: Handle | None, spares: Collection[int] = ()) -> None:
        """Evict until `needed` primary slots are blank; the secondary slots in `spares` keep their blocks."""
        primary = self.group.levels[PRIMARY]
        together = not spares
        while (short := needed - len(primary.blank)) > 0:
            if together and self.evict_together(self.order.lowest(PRIMARY, short), handle):
                continue
            # Rare: priorities, or more than secondary holds. Looking for all of them each time would take too long.
            together = False
            run = self.order.next(PRIMARY)
            assert run is not None, "counted before"
            take = self.order.alike(run, min(short, len(run.slots)))
            room = self._room_in_secondary(run, take, handle, spares) if self._offloads else 0
            if room:
                self._offload([(run, min(take, room))], handle)
            else:
                if run.children:
                    self._remove_below(run, handle)
                    take = 1  # what hung behind it has made room in secondary, which the next ones may use
                self.remove_tail(run, take, RemoveReason.CAPACITY, handle)

    def evict_together(self, victims: list[tuple[Run, int]], handle: Handle | None) -> bool:
        """Evict these, the lowest ones, by an event or two, if that comes to the same as one after the other."""
        if not self._offloads:
            self._remove_tails(victims, RemoveReason.CAPACITY, handle)
            return True
        if min(run.priority for run, _ in victims) < self._offload_min_priority:
            return False
        secondary = self.group.levels[SECONDARY]
        missing = sum(take for _, take in victims) - len(secondary.blank)
        if missing > 0:
            lower = self.order.lowest(SECONDARY, missing)
            room = sum(take for _, take in lower)
            if room < missing or not self.order.precedes(lower[-1][0], victims[0][0]):
                return False
            self._remove_tails(lower, RemoveReason.CAPACITY, handle)
        self._offload(victims, handle)
        return True

    def _room_in_secondary(self, run: Run, take: int, handle: Handle | None, spares: Collection[int]) -> int:
        """How many of the victim's blocks secondary takes now, after evicting what is lower in order there."""
        secondary = self.group.levels[SECONDARY]
        if run.priority < self._offload_min_priority:
            return 0
        if not secondary.blank:
            lower = self.order.next(SECONDARY, spares)
            if lower is None or not self.order.precedes(lower, run):
                return 0
            behind = next((n for n, slot in enumerate(reversed(lower.slots)) if slot in spares), take)
            going = self.order.alike(lower, min(take, behind, len(lower.slots)), run)
            self.remove_tail(lower, going, RemoveReason.CAPACITY, handle)
        return len(secondary.blank)

    def _offload(self, victims: list[tuple[Run, int]], handle: Handle | None) -> None:
        slots, names = self._tails(victims)
        to_slots = self.group.levels[SECONDARY].peek(len(slots))
        self._emit(
            BlocksMoved(
                group=self.index,
                names=names,
                from_level=PRIMARY,
                from_slots=slots.tobytes(),
                to_level=SECONDARY,
                to_slots=to_slots.tobytes(),
                why=MoveReason.OFFLOAD,
                transfer=self._state.next_transfer,
                handle=handle,
            )
        )

    def remove_tail(self, run: Run, count: int, why: RemoveReason, handle: Handle | None) -> None:
        """Remove the last `count` blocks of a run that nothing hangs behind."""
        self._remove_tails([(run, count)], why, handle)

    def _remove_tails(self, tails: list[tuple[Run, int]], why: RemoveReason, handle: Handle | None) -> None:
        """Remove the ends of runs of one level, in this order."""
        slots, names = self._tails(tails)
        self._emit(
            BlocksRemoved(
                group=self.index,
                level=tails[0][0].level,
                slots=slots.tobytes(),
                names=names,
                why=why,
                handle=handle,
            )
        )

    def _tails(self, tails: list[tuple[Run, int]]) -> tuple[array[int], bytes]:
        """The slots and names of the last blocks of each run, deepest first."""
        if len(tails) == 1:
            ((run, count),) = tails
            return last_reversed(run.slots, count), self._names_of_tail(run, count)
        slots = array("i")
        for run, count in tails:
            slots += last_reversed(run.slots, count)
        return slots, b"".join([self._names_of_tail(run, count) for run, count in tails])

    def _remove_below(self, run: Run, handle: Handle | None) -> None:
        """Remove everything cached behind a run, leaves first."""
        # What to remove is noted first: a removal may join the runs that are left.
        events = [
            BlocksRemoved(
                group=self.index,
                level=below.level,
                slots=below.slots[::-1].tobytes(),
                names=self._names_of_tail(below, len(below.slots)),
                why=RemoveReason.UNREACHABLE,
                handle=handle,
            )
            for below in reversed(runs_below(run))
        ]
        for event in events:
            self._emit(event)

    def _names_of_tail(self, run: Run, count: int) -> bytes:
        """Names of the last `count` blocks, deepest first."""
        return last_names(run.keys, self._key_bytes, count)


def last_names(keys: bytes | bytearray, size: int, count: int) -> bytes:
    """The names of the last `count` blocks of a column of keys of this size, last first."""
    if not size:
        return b""
    if count == 1:
        at = len(keys) - size
        return bytes(keys[at : at + NAME_BYTES])
    if count <= _FEW:
        ends = range(len(keys), len(keys) - count * size, -size)
        return b"".join([keys[end - size : end - size + NAME_BYTES] for end in ends])
    blocks = len(keys) // size
    names = names_between(keys, size, blocks - count, blocks)
    return np.frombuffer(names, f"V{NAME_BYTES}")[::-1].tobytes()

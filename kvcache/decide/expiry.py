"""The time of the cache, and blocks whose time is over: they get the default priority, and go last among those."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from events.ids import GroupIndex, LevelIndex
from events.packed import names_of_keys
from events.types import BlocksUpdated, Event, UpdateReason
from kvcache.errors import invariant
from kvcache.fold.prefix_tree import Run
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.slots import DEFAULT_PRIORITY
from kvcache.fold.state import CacheState


class _Alike(NamedTuple):
    """What one event tells of."""

    group: int
    level: int
    priority: int


AT_ONCE = 1024
"""Blocks that expire in one step: many retentions may end at the same time, and a step is not to wait for all."""
_MUCH = 1024
"""Entries that are not worth an effort."""
_END_NS = 2**62 - 1
"""Time stands still there, after some 146 years: with the longest duration behind it, it is still an int64."""


class Expiry:
    """Hears from the fold when blocks expire; an entry that describes nothing any more is dropped when it comes up.

    `monotonic_ns` says how time goes on. One that raises stands still.
    """

    def __init__(
        self, state: CacheState, emit: Callable[[Event], None], monotonic_ns: Callable[[], int]
    ) -> None:
        self._state, self._emit, self._monotonic_ns = state, emit, monotonic_ns
        self._began: int | None = None
        """What the clock showed when the cache was created: known once it has answered."""
        self.now()
        for index, group in enumerate(state.groups):
            group.timed = partial(self._note, index)
        self.waiting = self._entries()
        """When, group, and the id of a run, or a place."""

    def _read(self) -> int | None:
        try:
            return int(self._monotonic_ns())
        except Exception:  # noqa: BLE001  a clock of somebody else's
            return None

    # -- the time

    def now(self) -> int:
        """Nanoseconds since the cache was created, while it has run."""
        clock, read = self._state.clock, self._read()
        if read is None:
            return max(clock, 1)
        if self._began is None:
            self._began = read - clock
        return max(min(read - self._began, _END_NS), clock, 1)

    def told(self, *, begins: bool = False) -> int:
        """The time for an event; 0 while nothing has ever been kept for a time, unless that begins with it."""
        return self.now() if begins or self._state.clock else 0

    # -- what expires

    def _note(self, group: int, expiry: int, number: int) -> None:
        heappush(self.waiting, (expiry, group, number))
        if len(self.waiting) > _MUCH and len(self.waiting) > 4 * self._slots:
            self.waiting = self._entries()

    @property
    def _slots(self) -> int:
        return sum(level.size for group in self._state.groups for level in group.levels)

    def _entries(self) -> list[tuple[int, int, int]]:
        """Of all that expires."""
        entries: list[tuple[int, int, int]] = []
        for index, group in enumerate(self._state.groups):
            if isinstance(group, SlidingGroup):
                places = group.views["expiries"].nonzero()[0].tolist()
                entries += [(group.expiries[place], index, place) for place in places]
            else:
                runs = group.tree.runs.values()
                entries += [(run.expiry, index, run.id) for run in runs if run.expiry]
        heapify(entries)
        return entries

    @property
    def due(self) -> bool:
        """Whether the time of some block may be over; this is asked at every step."""
        return self.waiting[0][0] <= self.now() if self.waiting else False

    def expire(self) -> None:
        """Record whose time is over: by one event for all that were kept alike.

        Of more than `AT_ONCE` blocks only those whose time was over first, and what expires with the last one of these.
        So it does not matter how blocks are cut into runs, and in which order runs are found.
        """
        now, over = self.now(), defaultdict[_Alike, dict[int, Run | None]](dict)
        blocks = last = 0
        while self.waiting and self.waiting[0][0] <= (now if blocks < AT_ONCE else last):
            expiry, index, number = heappop(self.waiting)
            group = self._state.groups[index]
            run = None
            if isinstance(group, SlidingGroup):
                if group.expiries[number] != expiry:
                    continue
                alike = _Alike(index, group.slot_of(number)[0], group.priorities[number])
            else:
                run = group.tree.runs.get(number)
                if run is None or run.expiry != expiry:
                    continue
                alike = _Alike(index, run.level, run.priority)
            if number not in over[alike]:
                over[alike][number], last = run, expiry
                blocks += len(run.slots) if run is not None else 1
        # All are noted before the first is told: that joins runs.
        events = [self._event(alike, over[alike], now) for alike in sorted(over)]
        for event in events:
            self._emit(event)

    def _event(self, alike: _Alike, over: dict[int, Run | None], now: int) -> BlocksUpdated:
        group = self._state.groups[alike.group]
        if isinstance(group, SlidingGroup):
            places = array("i", sorted(over, key=lambda place: (group.depth(place), place)))
            begin = group.levels[0].size if alike.level else 0
            slots, names = array("i", [place - begin for place in places]), group.names_of(places)
        else:
            runs = sorted((run for run in over.values() if run is not None), key=lambda run: run.slots[0])
            slots = array("i", b"".join([run.slots for run in runs]))
            names = names_of_keys(b"".join([run.keys for run in runs]), group.tree.key_bytes)
        return BlocksUpdated(
            group=GroupIndex(alike.group),
            level=LevelIndex(alike.level),
            slots=slots.tobytes(),
            names=names,
            old_priority=alike.priority,
            priority=DEFAULT_PRIORITY,
            why=UpdateReason.EXPIRED,
            duration=0,
            clock=now,
        )

    def check(self) -> None:
        """Raise `InvariantViolated` if something would not expire."""
        invariant(set(self.waiting) >= set(self._entries()), "a block would not expire in time")

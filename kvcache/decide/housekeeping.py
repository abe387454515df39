"""Decisions about a cache as a whole, independent of who decides about its sequences: time, expiry, unused symbols,
checkpoints, ended copies, and clearing.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from functools import partial
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from events import types as ev
from events.ids import GroupIndex, LevelIndex
from events.packed import names_of_keys
from events.tokens import symbols
from events.tokens.rich import RichTokens
from events.types import Event, RequestId, SymbolPage
from kvcache.errors import OutOfBlocks, OutOfSymbols, invariant
from kvcache.fold.fingerprint import fingerprint
from kvcache.fold.prefix_tree import Run
from kvcache.fold.sequence import DEFAULT_PRIORITY, Sequence
from kvcache.fold.sliding_group import SlidingGroup
from kvcache.fold.state import CacheState

GIVEN_UP = "given up, since another copy failed"
"""Reason of a `TransferFailed` for a copy that was given up with another one."""
AT_ONCE = 1024
"""Most blocks that expire in one step: many retentions may end at the same time, and a step must not wait for all. This
number of prompts of one block takes 4.5 ms."""
_END_NS = 2**62 - 1
"""Last value of the clock, after some 146 years: the longest duration added to it still fits in an int64."""


class _EqualRetention(NamedTuple):
    """Common fields of all blocks that one event expires."""

    group: int
    level: int
    priority: int


class Expiry:
    """Clock of the cache, and expiry of priorities: expired blocks get the default priority, and go last among those.

    The fold reports each expiry; a stale entry is dropped when its time comes. Time advances with `monotonic_ns`, and
    stands still while that raises.
    """

    def __init__(
        self, state: CacheState, emit: Callable[[Event], None], monotonic_ns: Callable[[], int]
    ) -> None:
        self._state, self._emit, self._monotonic_ns = state, emit, monotonic_ns
        self._began: int | None = None
        """Clock reading at the creation of the cache: known after the first successful reading."""
        self.now()
        self._slots = sum(level.size for group in state.groups for level in group.levels)
        for index, group in enumerate(state.groups):
            group.timed = partial(self._note, index)
        self.waiting = self._entries()
        """Heap of (time, group, id of a run or a place)."""

    # -- time

    def now(self) -> int:
        """Nanoseconds since the cache was created, excluding downtime."""
        clock = self._state.clock
        try:
            read = int(self._monotonic_ns())
        except Exception:  # noqa: BLE001  a clock of somebody else's
            return max(clock, 1)
        if self._began is None:
            self._began = read - clock
        return max(min(read - self._began, _END_NS), clock, 1)

    # -- expiry

    def _note(self, group: int, expiry: int, number: int) -> None:
        heappush(self.waiting, (expiry, group, number))
        if len(self.waiting) > 4 * self._slots:
            self.waiting = self._entries()

    def _entries(self) -> list[tuple[int, int, int]]:
        """Return entries for all blocks with an expiry."""
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
        """True if some block may have expired; checked at every step."""
        return self.waiting[0][0] <= self.now() if self.waiting else False

    def expire(self) -> None:
        """Emit expiries: one event for all blocks with the same retention.

        Of more than `AT_ONCE` blocks only those that expired first, and all that expire with the last one of these, so
        that run boundaries and the order in which runs are found do not matter.
        """
        now, over = self.now(), defaultdict[_EqualRetention, dict[int, Run | None]](dict)
        blocks = last = 0
        while self.waiting and self.waiting[0][0] <= (now if blocks < AT_ONCE else last):
            expiry, index, number = heappop(self.waiting)
            group = self._state.groups[index]
            run = None
            if isinstance(group, SlidingGroup):
                if group.expiries[number] != expiry:
                    continue
                alike = _EqualRetention(index, group.slot_of(number)[0], group.priorities[number])
            else:
                run = group.tree.runs.get(number)
                if run is None or run.expiry != expiry:
                    continue
                alike = _EqualRetention(index, run.level, run.priority)
            if number not in over[alike]:
                over[alike][number], last = run, expiry
                blocks += len(run.slots) if run is not None else 1
        # All are collected before the first is emitted: that joins runs.
        for event in [self._event(alike, over[alike], now) for alike in sorted(over)]:
            self._emit(event)

    def _event(self, alike: _EqualRetention, over: dict[int, Run | None], now: int) -> ev.BlocksUpdated:
        group = self._state.groups[alike.group]
        if isinstance(group, SlidingGroup):
            places = array("i", sorted(over, key=lambda place: (group.depth(place), place)))
            begin = group.levels[0].size if alike.level else 0
            slots, names = array("i", [place - begin for place in places]), group.names_of(places)
        else:
            runs = sorted((run for run in over.values() if run is not None), key=lambda run: run.slots[0])
            slots = array("i", b"".join([run.slots for run in runs]))
            names = names_of_keys(b"".join([run.keys for run in runs]), group.tree.key_bytes)
        return ev.BlocksUpdated(
            group=GroupIndex(alike.group),
            level=LevelIndex(alike.level),
            slots=slots.tobytes(),
            names=names,
            old_priority=alike.priority,
            priority=DEFAULT_PRIORITY,
            why=ev.UpdateReason.EXPIRED,
            duration=0,
            clock=now,
        )

    def check(self) -> None:
        """Raise `InvariantViolated` if some block would never expire."""
        invariant(set(self.waiting) >= set(self._entries()), "a block would not expire in time")


class Housekeeping:
    """Decisions about the cache as a whole."""

    def __init__(
        self,
        state: CacheState,
        emit: Callable[[Event], None],
        monotonic_ns: Callable[[], int],
        checkpoint_spacing: float,
    ) -> None:
        self._state, self._emit = state, emit
        self.expiry = Expiry(state, emit, monotonic_ns)
        slots = sum(level.size for group in state.groups for level in group.levels)
        self.checkpoint_due = checkpoint_spacing * slots
        """Blocks changed since the last checkpoint after which there should be another."""
        self.engine_counts: tuple[int, ...] = ()
        """Engine's counts for the next checkpoint; see `Checkpoint.engine_counts`."""

    def note_refusal(self, request_id: RequestId, refusal: OutOfBlocks) -> None:
        """Record that a request did not fit: once until it is admitted, regardless of the number of tries."""
        if request_id not in self._state.refused:
            self._emit(
                ev.AdmissionRefused(request_id=request_id, needed=refusal.needed, available=refusal.available)
            )

    def clear(self) -> None:
        """Drop unreferenced blocks, and the names of the rest."""
        removed, unnamed = zip(*[group.counts() for group in self._state.groups], strict=True)
        self._emit(ev.CacheCleared(removed=removed, unnamed=unnamed))

    # -- copies that ended

    def land(self, transfers: Items[int], checksums: bytes = b"") -> None:
        """Record completed copies. `checksums` are as in `TransferLanded`."""
        self._emit(ev.TransferLanded(transfers=array("q", transfers).tobytes(), checksums=checksums))

    def fail(self, failed: Items[tuple[int, str]]) -> list[Sequence]:
        """Record failed copies, given as (transfer, reason): every sequence restarts, and all cached blocks are
        dropped.

        Finding everything that depends on a failed copy would need a record of all that was copied and computed since.
        So all outstanding copies are given up. Returns the sequences that restart.
        """
        known, reasons = dict(failed), dict[str, list[int]]()
        for transfer in self._state.transfers:
            reasons.setdefault(known.get(transfer, GIVEN_UP), []).append(transfer)
        for reason, transfers in reasons.items():
            self._emit(ev.TransferFailed(transfers=array("q", transfers).tobytes(), reason=reason))
        self.clear()
        return [sequence for sequence in self._state.sequences.values() if not sequence.holders]

    # -- the end of a step

    @property
    def due(self) -> bool:
        """True if `run` would do anything; checked at every step."""
        state, expiry = self._state, self.expiry
        if state.changed_blocks >= self.checkpoint_due or (expiry.waiting and expiry.due):
            return True
        return bool(state.symbols.pages) and state.symbols.crowded

    def run(self) -> None:
        """Emit due expiries; record a checkpoint once enough blocks have changed; drop unused symbols."""
        state = self._state
        if self.expiry.due:
            self.expiry.expire()
        if state.changed_blocks >= self.checkpoint_due:
            self.checkpoint()
        if state.symbols.crowded:
            unused = sorted(state.symbols.pages.keys() - state.used_pages())
            self._emit(ev.SymbolsForgotten(array("I", unused).tobytes()))

    def checkpoint(self) -> None:
        """Record the fingerprint."""
        cached = [[0, 0] for _ in self._state.groups]
        for counts, group in zip(cached, self._state.groups, strict=True):
            for level, slots, _, _ in group.cached():
                counts[level] += len(slots)
        self._emit(
            ev.Checkpoint(
                fingerprint=fingerprint(self._state),
                num_sequences=len(self._state.handles),
                num_cached=tuple((primary, secondary) for primary, secondary in cached),
                engine_counts=self.engine_counts,
            )
        )

    # -- symbols of new prompts

    def missing_pages(self, prompts: Iterable[RichTokens]) -> tuple[SymbolPage, ...]:
        """Return the pages to intern before these prompts are admitted; raises `OutOfSymbols`."""
        table = self._state.symbols
        pages = table.missing(prompts)
        available = symbols.MAX_PAGES - len(table.pages)
        if len(pages) > available:
            raise OutOfSymbols(len(pages), available)
        return pages

    def intern(self, pages: tuple[SymbolPage, ...]) -> None:
        """Intern pages, if there are any."""
        if pages:
            self._emit(ev.SymbolsInterned(pages))

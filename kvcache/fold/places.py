"""The blocks of a sliding window by place: a primary slot or, behind all of these, a secondary one.

A block that is not cached while something behind it is leaves a `HOLE` in its run: its content says what hangs behind.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from events.ids import LevelIndex
from events.packed import NAME_BYTES, names_between
from events.types import PRIMARY, SECONDARY
from kvcache.errors import InvariantViolated, invariant
from kvcache.fold.group import CachedPart, Group
from kvcache.fold.prefix_tree import Run
from kvcache.fold.retention import Kept
from kvcache.fold.slots import DEFAULT_PRIORITY

HOLE = -1
"""In a run, the place of a block that is not cached."""
NOBODY = -1
"""In `positions`."""
DEPTH_BITS = 28
"""Of a position: the others are the run's id. No prompt has so many blocks."""
_DEPTH = (1 << DEPTH_BITS) - 1
FEW = 8
"""Up to so many blocks a loop is faster than numpy, whose `count_nonzero` takes a quarter of `all` or `any`."""
Segment = tuple[Run, int, int]
"""Consecutive blocks of a run: from its block, up to its block."""
_COLUMNS = ("positions", "refs", "priorities", "durations", "expiries", "released_at", "transfers")
_EXPORTED = ("priorities", "durations", "expiries", "released_at", "refs", "transfers")


class Places(Group):
    """What is known of each place: columns, and the runs whose blocks lie there.

    A step touches few of many places, so it is a column's memory that costs: no more of them are read or written than
    must be.
    """

    __slots__ = (*_COLUMNS, "keeps_time", "kept_alike", "views")

    def __init__(self, *created: Any, tokens_recorded: bool) -> None:
        super().__init__(*created, tokens_recorded=tokens_recorded)
        size = sum(level.size for level in self.levels)
        self.positions = array("q", [NOBODY]) * size
        """By place: the run that has the block, and its depth: how many blocks are before it in its prompt. Both in one
        number, so that blocks which follow each other in a run differ by 1. -1 where no block is cached; then the other
        columns mean nothing."""
        self.refs = array("i", [0]) * size
        self.priorities = array("i", [DEFAULT_PRIORITY]) * size
        """By place: as of a `Run`. Not written as long as `kept_alike`."""
        self.durations = array("q", [0]) * size
        self.expiries = array("q", [0]) * size
        """By place: as of a `Run`. Both are 0 where no block is cached."""
        self.released_at = array("q", [0]) * size
        """By place: when the last sequence let go of it, as a counter; 0 while it is held, or nothing is cached."""
        self.transfers = array("q", [0]) * size
        """By place: the copy that brings it here, 0 when it has landed."""
        self.keeps_time = False
        """Whether any block has been kept for a time."""
        self.kept_alike = True
        """Whether all blocks that were ever cached have the default priority."""
        # The same memory, for many places at a time.
        self.views = {name: _view(getattr(self, name)) for name in _COLUMNS}

    def places(self, level: int, slots: array[int]) -> array[int]:
        """Slots of a level as places. Raises `InvariantViolated` if the level has no such slots."""
        size = self.levels[level].size
        if len(slots) <= FEW:
            there = all(0 <= slot < size for slot in slots)
        else:
            # Negative ones are beyond all others.
            there = not np.count_nonzero(np.frombuffer(slots, np.uint32) >= size)
        invariant(there, "an event names a slot that the level has not")
        return array("i", [slot + self.levels[PRIMARY].size for slot in slots]) if level else slots

    def slot_of(self, place: int) -> tuple[int, int]:
        """The level and the slot of a place."""
        primary = self.levels[PRIMARY].size
        return (PRIMARY, place) if place < primary else (SECONDARY, place - primary)

    def is_cached(self, level: int, slot: int) -> bool:
        """Whether a block is cached in the slot."""
        return self.positions[slot + level * self.levels[PRIMARY].size] != NOBODY

    def kept_at(self, place: int) -> Kept:
        """How the block there is kept."""
        return Kept(self.priorities[place], self.durations[place])

    def kept_in(self, level: int, slot: int) -> Kept:
        """How a cached block is kept."""
        return self.kept_at(slot + level * self.levels[PRIMARY].size)

    def find(self, place: int) -> tuple[Run, int]:
        """The run of a cached block, and its index in it."""
        position = self.positions[place]
        run = self.tree.runs.get(position >> DEPTH_BITS)
        if run is None:
            raise InvariantViolated("a slot that an event names is not cached")
        return run, (position & _DEPTH) - run.start

    def depth(self, place: int) -> int:
        """How many blocks are before a cached one in its prompt."""
        return self.positions[place] & _DEPTH

    def depths_at(self, at: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Of many blocks."""
        depths: npt.NDArray[np.int64] = self.views["positions"][at] & _DEPTH
        return depths

    def segments(self, places: array[int]) -> list[Segment]:
        """Cached blocks as consecutive ones of runs."""
        segments: list[Segment] = []
        done, runs, positions = 0, self.tree.runs, self.positions
        while done < len(places):
            # As `find` does it, which takes twice as long.
            position = positions[places[done]]
            owner = runs.get(position >> DEPTH_BITS)
            if owner is None:
                raise InvariantViolated("a slot that an event names is not cached")
            slots = owner.slots
            begin = (position & _DEPTH) - owner.end + len(slots)
            # What follows in the run is compared, for that is quicker than looking up where each block is.
            end = begin + _common(slots, begin, places, done)
            segments.append((owner, begin, end))
            done += end - begin
        return segments

    def replace(self, places: array[int], to: array[int]) -> list[Segment]:
        """Let runs have cached blocks in other places, or no more; returns the segments."""
        segments, done = self.segments(places), 0
        for run, begin, end in segments:
            if end == begin + 1:  # what decoding leaves behind, mostly
                if run.slots[begin] != places[done]:
                    raise InvariantViolated("an event names a block twice")
                run.slots[begin] = to[done]
                done += 1
                continue
            count = end - begin
            if run.slots[begin:end] != places[done : done + count]:
                raise InvariantViolated("an event names a block twice")
            run.slots[begin:end] = to[done : done + count]
            done += count
        return segments

    def names_of(self, places: array[int]) -> bytes:
        """The names of cached blocks."""
        size = self.tree.key_bytes
        if not size or not places:
            return b""
        # Most segments have a single block: what decoding left behind.
        return b"".join(
            [
                run.keys[begin * size : begin * size + NAME_BYTES]
                if end == begin + 1
                else names_between(run.keys, size, begin, end)
                for run, begin, end in self.segments(places)
            ]
        )

    def cached(self) -> Iterator[tuple[int, array[int], bool, bool]]:
        """Cached blocks in pieces: level, slots, whether sequences hold them, whether their copy has not landed."""
        places = np.flatnonzero(self.views["positions"] != NOBODY)
        held, in_flight = self.views["refs"][places] > 0, self.views["transfers"][places] > 0
        primary = self.levels[PRIMARY].size
        for kind in range(8):
            level, is_held, flies = kind & 1, bool(kind & 2), bool(kind & 4)
            chosen = ((places >= primary) == level) & (held == is_held) & (in_flight == flies)
            slots = places[chosen] - level * primary
            yield level, array("i", slots.astype(np.int32).tobytes()), is_held, flies

    def parts(self, run: Run) -> Iterator[CachedPart]:
        """What of a run is cached, by level and priority."""
        states = [
            (place != HOLE, self.slot_of(place)[0], self.priorities[place] if place != HOLE else 0)
            for place in run.slots
        ]
        for (cached, level, priority), part in groupby(range(len(states)), states.__getitem__):
            blocks = list(part)
            if cached:
                yield CachedPart(blocks[0], blocks[-1] + 1, LevelIndex(level), priority)

    def resident_keys(self, level: int) -> Iterator[bytes]:
        """The keys of full blocks whose bytes are in this level."""
        size, key_bytes = self.levels[PRIMARY].size, self.tree.key_bytes
        for run in self.tree.runs.values():
            full = len(run.slots) - bool(run.partial)
            for index, place in enumerate(run.slots[:full]):
                if place != HOLE and (place >= size) == level and not self.transfers[place]:
                    yield bytes(run.keys[index * key_bytes : (index + 1) * key_bytes])

    def clear_places(self, places: array[int]) -> None:
        """Nothing is there any more: only what tells so is written, the other columns mean nothing then."""
        if len(places) <= FEW:
            for place in places:
                self.positions[place], self.released_at[place] = NOBODY, 0
        else:
            at = indexes(places)
            self.views["positions"][at], self.views["released_at"][at] = NOBODY, 0
        if self.levels[SECONDARY].size:
            # Without offload nothing is ever on its way.
            self.views["transfers"][indexes(places)] = 0
        if self.keeps_time:
            at = indexes(places)
            self.views["durations"][at], self.views["expiries"][at] = 0, 0

    def clear_columns(self) -> None:
        """Nothing is anywhere any more."""
        for name, view in self.views.items():
            view.fill({"positions": NOBODY, "priorities": DEFAULT_PRIORITY}.get(name, 0))

    def exported(self, places: array[int]) -> tuple[array[int], bytes]:
        """Slots instead of places, and seven numbers per block: level, priority, duration, expiry, stamp,
        references, copy.
        """
        at = np.frombuffer(places, np.int32)
        primary = self.levels[PRIMARY].size
        slots = np.where(at >= primary, at - primary, at).astype(np.int32)
        rows = np.zeros((len(at), 7), np.int64)
        rows[:, 0] = at >= primary
        there = at != HOLE
        for column, name in enumerate(_EXPORTED, 1):
            rows[there, column] = self.views[name][at[there]]
        return array("i", slots.tobytes()), rows.tobytes()

    def place(self, run: Run, numbers: Iterable[tuple[int, ...]]) -> None:
        """Enter what an exported state says of the blocks of a run, as `exported` gives it."""
        for index, (level, *columns) in enumerate(numbers):
            if run.slots[index] == HOLE:
                continue
            invariant(level in (PRIMARY, SECONDARY), "there is no such level")
            run.slots[index] += level * self.levels[PRIMARY].size
            place = run.slots[index]
            invariant(0 <= place < len(self.refs), "an exported block is in no slot")
            self.positions[place] = position_of(run) + run.start + index
            for name, number in zip(_EXPORTED, columns, strict=True):
                getattr(self, name)[place] = number
            self.keeps_time = self.keeps_time or self.durations[place] > 0
            self.kept_alike = self.kept_alike and self.priorities[place] == DEFAULT_PRIORITY
            self.levels[level].unreferenced += not self.refs[place]


def position_of(run: Run) -> int:
    """The position that a block of depth 0 would have in a run; that of any other is so many more."""
    return run.id << DEPTH_BITS


def indexes(places: array[int]) -> npt.NDArray[np.intp]:
    """Places as numpy takes them as indexes, without converting them anew for every column."""
    return np.frombuffer(places, np.int32).astype(np.intp)


def _common(slots: array[int], begin: int, places: array[int], done: int) -> int:
    """How many slots of a run from `begin` on are these places from `done` on, of which the first one is."""
    most = min(len(slots) - begin, len(places) - done)
    if most == 1 or slots[begin + 1] != places[done + 1]:
        return 1
    if slots[begin : begin + most] == places[done : done + most]:
        return most
    differs = np.frombuffer(slots, np.int32, most, begin * 4) != np.frombuffer(
        places, np.int32, most, done * 4
    )
    return int(differs.argmax())


def _view(column: array[Any]) -> npt.NDArray[Any]:
    kind = np.int64 if column.typecode == "q" else np.int32
    return np.frombuffer(column, kind) if len(column) else np.empty(0, kind)

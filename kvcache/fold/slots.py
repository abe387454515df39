"""The slots of one level: which are blank, and which run owns which."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from events.packed import CHECKSUM_BYTES
from kvcache.errors import InvariantViolated, invariant

_FEW = 16
"""Up to so many slots a loop is faster than numpy: it notes 16 in 0.6 µs, numpy in 1.4; 64 in 5.8 µs and in 1.0."""
_SLICED = 512
"""Up to so many slots a slice is faster than numpy: it reverses 256 in 0.7 µs, numpy in 1.1; 1024 in 2.4 and in 1.4."""
_ROWS = 3
"""If more rows than these make up what was chosen, it is in no order."""
_NEAR = 4096
"""Of so many blank slots that are next, one that was chosen is mostly found among these."""
DEFAULT_PRIORITY = 35
PRIORITY_MAX = 100
"""Priorities go from 0, evicted first, to this."""


def last_reversed(slots: array[int], count: int) -> array[int]:
    """The last `count` slots, last first."""
    if count > _SLICED:
        return array("i", np.frombuffer(slots, np.int32)[: -count - 1 : -1].tobytes())
    return slots[: -count - 1 : -1]


def indexes(places: array[int]) -> npt.NDArray[np.intp]:
    """Places as numpy takes them as indexes, without converting them anew for every column."""
    return np.frombuffer(places, np.int32).astype(np.intp)


def common_slots(slots: array[int], begin: int, places: array[int], done: int) -> int:
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


class Level:
    """Slots of one window at one level."""

    __slots__ = ("blank", "checksums", "index", "run_id_array", "run_ids", "size", "unreferenced")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size
        self.blank = array("i")
        self.blank.frombytes(np.arange(size - 1, -1, -1, dtype=np.int32).tobytes())
        """Blank slots; the last is taken first, so that a new cache hands out 0, 1, 2, ..."""
        self.run_ids = array("q", [-1]) * size
        """Id of the run that holds the slot, or was the last to do so: whoever asks compares the run's slots."""
        self.run_id_array = np.frombuffer(self.run_ids, np.int64) if size else np.empty(0, np.int64)
        """The same memory, for many slots at a time."""
        self.unreferenced = 0
        """Cached blocks that no sequence holds: all can be evicted, leaf by leaf."""
        self.checksums: npt.NDArray[np.uint64] | None = None
        """By slot, of what the last copy brought there: they mean something where a block is cached that has landed.
        0: not known. None: none is known, as where the level lies in no file."""

    @property
    def available(self) -> int:
        """Slots that can be had: blank, or cached and unreferenced."""
        return len(self.blank) + self.unreferenced

    def peek(self, count: int) -> array[int]:
        """The next `count` blank slots, in the order in which they would be taken."""
        if count > len(self.blank):
            raise InvariantViolated("not enough blank slots")
        return last_reversed(self.blank, count)

    def take_slots(self, slots: array[int]) -> None:
        """Take slots off the blank ones: the next ones or, where others have chosen, any."""
        count, free = len(slots), self.blank
        if last_reversed(free, count) == slots:
            del free[len(free) - count :]
            return
        done = rows = 0
        while done < count:
            if rows == _ROWS:
                self._take_scattered(np.frombuffer(slots, np.int32)[done:])
                return
            end, taken = self._row_of(slots, done)
            invariant(taken > 0, "a slot that is not blank cannot be taken")
            del free[end - taken : end]
            done, rows = done + taken, rows + 1

    def _take_scattered(self, wanted: npt.NDArray[np.int32]) -> None:
        """Take slots off the blank ones that stand there in no order, and mostly near the end."""
        chosen = np.zeros(self.size, bool)
        chosen[wanted] = True
        for tail in (len(wanted) + _NEAR, len(self.blank)):
            begin = max(0, len(self.blank) - tail)
            blank = np.array(self.blank[begin:])
            stays = ~chosen[blank]
            if len(blank) - np.count_nonzero(stays) == len(wanted):
                self.blank[begin:] = array("i", blank[stays].tobytes())
                return
        raise InvariantViolated("a slot that is not blank cannot be taken, and none twice")

    def are_blank(self, slots: array[int]) -> bool:
        """Whether all of these are blank, and none of them is named twice."""
        count = len(slots)
        if last_reversed(self.blank, count) == slots:
            return True
        if count == 1:
            return bool(self._row_of(slots, 0)[1])
        wanted, blank = np.frombuffer(slots, np.int32), np.frombuffer(self.blank, np.int32)
        chosen = np.zeros(self.size, bool)
        chosen[wanted] = True
        # Each is chosen once, and each of the blank ones stands there once.
        near = np.count_nonzero(chosen[blank[-count - _NEAR :]])
        return bool(np.count_nonzero(chosen) == count in (near, np.count_nonzero(chosen[blank])))

    def _row_of(self, slots: array[int], first: int) -> tuple[int, int]:
        """Where the slot ``slots[first]`` stands among the blank ones, and how many of those behind it stand in a row
        with it, so that they are taken one after the other: the end of the row and its length, 0 if it is not blank.
        """
        if not self.blank:
            return 0, 0
        blank, wanted = np.frombuffer(self.blank, np.int32), np.frombuffer(slots, np.int32)[first:]
        begin = max(0, len(blank) - _NEAR)
        found = np.flatnonzero(blank[begin:] == wanted[0])
        if not len(found):
            begin, found = 0, np.flatnonzero(blank == wanted[0])
        if not len(found):
            return 0, 0
        end = begin + int(found[-1]) + 1
        most = min(end, len(wanted))
        differs = blank[end - most : end][::-1] != wanted[:most]
        return end, int(differs.argmax()) if differs.any() else most

    def return_slots(self, slots: array[int]) -> None:
        """Add slots to the blank ones; the last one will be taken first."""
        self.blank.extend(slots)

    def note_checksums(self, slots: array[int], checksums: bytes) -> None:
        """What was copied to these slots has landed, and has these checksums; empty: nobody knows them."""
        if self.checksums is None:
            if not checksums:
                return
            self.checksums = np.zeros(self.size, np.uint64)
        invariant(len(checksums) in (0, CHECKSUM_BYTES * len(slots)), "checksums are missing")
        at = np.frombuffer(slots, np.int32)
        invariant(not len(at) or 0 <= int(at.min()) <= int(at.max()) < self.size, "there is no such slot")
        self.checksums[at] = np.frombuffer(checksums, np.uint64) if checksums else 0

    def own(self, slots: array[int], run_id: int) -> None:
        """Note which run holds the slots."""
        if len(slots) > _FEW:
            # As numpy indexes: it would convert them more slowly itself.
            self.run_id_array[np.frombuffer(slots, np.int32).astype(np.intp)] = run_id
            return
        owner = self.run_ids
        for slot in slots:
            owner[slot] = run_id

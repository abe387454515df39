"""The order of copies: in as few batches as it allows, and between batches on several streams.

Inside a batch copies run in any order, so two of them may share a batch only if neither reads or writes a
slot that the other writes. Each copy therefore goes into the first batch after all those that contain
something it must follow: the last writer of its sources and targets, and the last readers of its targets.
Cutting the list wherever a hazard shows up would be simpler and just as correct, but the usual step of an
engine is "offload from slot a, onboard into slot a, offload from slot b, onboard into slot b, ...", which
is two batches this way and one more than there are sequences the other way.

Batches then run on *lanes*, streams of which each has the copies to one level and is in order. `SlotOrder` records
which of them have touched a slot, so that a batch waits for those only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cuda_ops.copier import Copy

Place = tuple[int, int]
"""Group and level: the space of slot numbers."""
Marks = dict[Place, npt.NDArray[np.int32]]
"""Per place and slot: the index of a batch plus one, 0 for none."""


def schedule(copies: Sequence[Copy]) -> list[list[int]]:
    """Return the batches, in the order in which they have to run, as indices into `copies`.

    Raises ValueError for a copy that would need an order among its own pairs of slots.
    """
    written, read = _blank_marks(copies), _blank_marks(copies)
    batches: list[list[int]] = []
    for index, copy in enumerate(copies):
        _refuse_inner_hazard(copy)
        batch = _place(copy, written, read)
        if batch == len(batches):
            batches.append([])
        batches[batch].append(index)
    return batches


class SlotOrder:
    """The batches that have read and written each slot last, by numbers that rise along each lane.

    A level is written on its own lane, in order; so a slot has one number for writes, and one per lane for reads. One
    number for both lanes would not do: a later read on one lane does not imply the end of an earlier one on the other.
    A slot keeps its numbers when it is reassigned.
    """

    def __init__(self, sizes: Sequence[Sequence[int]]) -> None:
        """`sizes`: the number of slots, per group and level."""
        self._written = [[np.zeros(size, np.int64) for size in levels] for levels in sizes]
        self._read = [[[np.zeros(size, np.int64) for _ in levels] for size in levels] for levels in sizes]
        """Numbers of reads per group, level and lane."""

    def before(self, copies: Sequence[Copy]) -> dict[int, int]:
        """Return, per other lane, the number that must have ended before these copies, all of one lane, begin."""
        found: dict[int, int] = {}
        for copy in copies:
            wanted = [(copy.source_level, self._written[copy.group][copy.source_level], copy.source)]
            readers = enumerate(self._read[copy.group][copy.target_level])
            wanted += [(lane, numbers, copy.target) for lane, numbers in readers]
            for lane, numbers, slots in wanted:
                number = int(numbers[slots].max(initial=0))
                if lane != copy.target_level and number > found.get(lane, 0):
                    found[lane] = number
        return found

    def note(self, copy: Copy, number: int) -> None:
        """Record a copy of the batch with this number on its lane."""
        self._written[copy.group][copy.target_level][copy.target] = number
        self._read[copy.group][copy.source_level][copy.target_level][copy.source] = number


def _place(copy: Copy, written: Marks, read: Marks) -> int:
    """Find the batch of a copy and mark the slots it uses there."""
    source, target = (copy.group, copy.source_level), (copy.group, copy.target_level)
    if copy.source.size == 0:
        return 0
    batch = max(
        int(written[source][copy.source].max()),
        int(written[target][copy.target].max()),
        int(read[target][copy.target].max()),
    )
    written[target][copy.target] = batch + 1
    read[source][copy.source] = np.maximum(read[source][copy.source], batch + 1)
    return batch


def _blank_marks(copies: Sequence[Copy]) -> Marks:
    """Return room for a mark on each slot up to the highest that is used."""
    sizes: dict[Place, int] = {}
    for copy in copies:
        for level, slots in ((copy.source_level, copy.source), (copy.target_level, copy.target)):
            place = (copy.group, level)
            sizes[place] = max(sizes.get(place, 0), int(slots.max(initial=-1)) + 1)
    return {place: np.zeros(size, dtype=np.int32) for place, size in sizes.items()}


def _refuse_inner_hazard(copy: Copy) -> None:
    """Raise ValueError if two pairs of one copy touch the same slot, unless all of them stay in place."""
    if copy.source.size < 2 and copy.source_level != copy.target_level:
        return
    twice = np.unique(copy.target).size != copy.target.size
    both = copy.source_level == copy.target_level and np.intersect1d(copy.source, copy.target).size > 0
    if twice or (both and not copy.moves_nothing):
        raise ValueError("a copy writes a slot twice, or reads and writes the same slot")

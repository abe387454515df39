"""The states of a slot; docs/explanation/architecture.md draws the transitions by event.

No state is kept for a slot, so that no event has to change one. They follow from the lists of blank slots, the
runs and the block tables; `slot_states` works them out where the whole state is checked.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvcache.errors import invariant
from kvcache.fold.sequence import Pin, Sequence
from kvcache.fold.sliding_group import AnyGroup


class SlotState(IntEnum):
    """State of a slot."""

    BLANK = 0
    """Without an owner."""
    HELD = 1
    """Owned by a sequence, also after another slot has replaced it in the table (`append_only_tables`), or, after the
    cache was cleared, only by a pin; not cached. The sequence tracks a copy into it that has not landed."""
    SHARED = 2
    """Held by several sequences, and not cached: without reuse, or since the cache was cleared."""
    REFERENCED = 3
    """Cached, and held by sequences."""
    UNREFERENCED = 4
    """Cached, and held by none: may be evicted."""
    REFERENCED_IN_FLIGHT = 5
    """State `REFERENCED` while the copy that brings the block has not landed."""
    UNREFERENCED_IN_FLIGHT = 6
    """State `UNREFERENCED` while the copy that brings the block has not landed."""


BLANK, HELD, SHARED, REFERENCED, UNREFERENCED, REFERENCED_IN_FLIGHT, UNREFERENCED_IN_FLIGHT = SlotState

States = npt.NDArray[np.uint8]


def slot_states(group: AnyGroup, sequences: Iterable[Sequence], pins: Iterable[Pin]) -> tuple[States, States]:
    """Derive the state of each slot of a window, per level. Raises `InvariantViolated` for a slot in two states or
    none.
    """
    index, holders = group.index, Counter[int]()
    for sequence in sequences:
        cached = max(sequence.path_ends[index].end, sequence.detached[index])
        holders.update(sequence.tables[index][cached:])
        holders.update(sequence.retention_in(index))
    for pin in pins:
        if not pin.named:
            holders.update(pin.slots[index])
    shared = {slot: count for slot, count in holders.items() if count > 1}
    invariant(shared == group.shared, "the sharing of uncached blocks is recorded wrongly")
    primary, secondary = ([(level.blank, BLANK)] for level in group.levels)
    primary += [(array("i", holders.keys() - shared), HELD), (array("i", shared), SHARED)]
    for level, slots, held, in_flight in group.cached():
        (secondary if level else primary).append((slots, _CACHED[held, in_flight]))
    return _placed(primary, group.levels[0].size), _placed(secondary, group.levels[1].size)


_CACHED = {
    (True, False): REFERENCED,
    (False, False): UNREFERENCED,
    (True, True): REFERENCED_IN_FLIGHT,
    (False, True): UNREFERENCED_IN_FLIGHT,
}
"""States of cached blocks, by (held by sequences, copy in flight)."""


def _placed(places: list[tuple[array[int], SlotState]], size: int) -> States:
    slots = np.concatenate([np.array(slots, np.int32) for slots, _ in places])
    once = len(slots) == size and np.array_equal(np.sort(slots), np.arange(size))
    invariant(once, "a slot is in two places or in none")
    states = np.empty(size, np.uint8)
    states[slots] = np.repeat([state for _, state in places], [len(slots) for slots, _ in places])
    return states

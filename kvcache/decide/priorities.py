"""Changing the priority of cached blocks: which of them, and the events that say so."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import groupby

from events.packed import SLOT_BYTES, names_of_keys
from events.types import PRIMARY, BlocksUpdated, Event
from kvcache.decide.sliding_manager import SlidingWindowManager
from kvcache.decide.window_manager import WindowBlockManager
from kvcache.fold.prefix_tree import Run
from kvcache.fold.sequence import Sequence


def set_priority(
    window: WindowBlockManager,
    emit: Callable[[Event], None],
    sequence: Sequence,
    priority: int,
    first: int,
    last: int,
) -> int:
    """Give the blocks from `first` up to `last` of a sequence's cached path a priority; returns how many changed.

    One event for each row of blocks that had one priority. All are noted first: applying one splits and joins runs.
    """
    if isinstance(window, SlidingWindowManager):
        return _set_sliding(window, emit, sequence, priority, first, last)
    events = []
    path = list(window.group.path(sequence.path_ends[window.index]))
    path.reverse()
    for (level, old), runs in groupby(path, lambda run: (run.level, run.priority)):
        slots, names = _within(list(runs), first, last, window.group.tree.key_bytes)
        if slots and old != priority:
            packed = slots.tobytes()
            events.append(
                BlocksUpdated(
                    group=window.index,
                    level=level,
                    slots=packed,
                    names=names,
                    old_priority=old,
                    priority=priority,
                    handle=sequence.handle,
                )
            )
    for event in events:
        emit(event)
    return sum(len(event.slots) for event in events) // SLOT_BYTES


def _set_sliding(
    window: SlidingWindowManager,
    emit: Callable[[Event], None],
    sequence: Sequence,
    priority: int,
    first: int,
    last: int,
) -> int:
    """The same for what a sequence still holds of its cached blocks in a sliding window."""
    group, index = window.sliding, window.index
    first = max(first, sequence.detached[index])
    held = range(first, min(last, sequence.path_ends[index].end))
    table, changed = sequence.tables[index], 0
    for old, row in groupby(held, lambda block: group.priorities[table[block]]):
        blocks = list(row)
        begin, end = blocks[0], blocks[-1] + 1
        if old == priority:
            continue
        emit(
            BlocksUpdated(
                group=index,
                level=PRIMARY,
                slots=table[begin:end].tobytes(),
                names=window.names_at(table[begin:end]),
                old_priority=old,
                priority=priority,
                handle=sequence.handle,
            )
        )
        changed += len(blocks)
    return changed


def _within(runs: list[Run], first: int, last: int, key_bytes: int) -> tuple[array[int], bytes]:
    """The slots and names of the runs' blocks whose index in the path lies within the bounds."""
    slots, keys = array("i"), bytearray()
    for run in runs:
        begin, end = max(first - run.start, 0), max(last - run.start, 0)
        slots += run.slots[begin:end]
        keys += run.keys[begin * key_bytes : end * key_bytes]
    return slots, names_of_keys(bytes(keys), key_bytes)
